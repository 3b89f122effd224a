"""How settings are made from mappings, texts and flags, checked, and described.

Every config is a keyword-only frozen dataclass that validates itself when it is made. The text under a field is
its documentation: the command line's help and the tables in the docs are generated from it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from outlast.errors import ConfigError

__all__ = ["FieldDoc", "describe_fields", "from_mapping", "nearest", "parse_text", "require"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class FieldDoc:
    """One field of a config, for people."""

    name: str
    type_name: str
    default: Any
    text: str


def require(condition: bool, message: str) -> None:
    """Raise :class:`ConfigError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest of ``known``, or all of them when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Make a config from plain values.

    Args:
        cls: A config dataclass.
        values: Field name (``-`` and ``_`` alike) to value; texts are converted to the field's type, and the text
            ``none`` means ``None`` where a field allows it.
        where: What to call the source in an error, such as a file's name.

    Raises:
        ConfigError: An unknown key (the nearest valid one is named), a value of the wrong type, or one that the
            config refuses.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(name, fields)}")
        hint = hints[name]
        if dataclasses.is_dataclass(inner := _strip_none(hint)) and isinstance(value, Mapping):
            arguments[name] = from_mapping(typing.cast(type, inner), value, where=f"{where}: {name}")
        else:
            arguments[name] = parse_text(hint, value, where=f"{where}: {name}")
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def parse_text(hint: Any, value: Any, *, where: str) -> Any:
    """Convert ``value`` (from a file or the command line) to the type ``hint``."""
    if isinstance(value, str):
        if value.strip().lower() in ("none", "null") and type(None) in typing.get_args(hint):
            return None
        if typing.get_origin(_strip_none(hint)) in (dict, Mapping) or "Mapping" in str(_strip_none(hint)):
            value = _parse_pairs(value, where)
        elif _strip_none(hint) is bool:
            lowered = value.strip().lower()
            if lowered not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
                raise ConfigError(f"{where}: {value!r} is neither true nor false")
            value = lowered in ("1", "true", "yes", "on")
    try:
        return msgspec.convert(value, hint, strict=not isinstance(value, str | dict))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {value!r} does not fit: {error}") from None


def _parse_pairs(text: str, where: str) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    if text.strip().lower() in ("none", "null", ""):
        return pairs
    for part in text.split(","):
        name, colon, number = part.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"{where}: {part!r} is not in the form name:seconds; write for example setup:600,step:180")
        pairs[name.strip()] = None if number.strip().lower() in ("none", "null") else number.strip()
    return pairs


def _strip_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


@cache
def describe_fields(cls: type) -> tuple[FieldDoc, ...]:
    """Return name, type, default and text of every field of a config, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    types_: dict[str, str] = {}
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            types_[statement.target.id] = ast.unparse(statement.annotation)
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                texts[statement.target.id] = " ".join(str(following.value.value).split())
    docs = []
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = "required"
        docs.append(FieldDoc(field.name, types_[field.name], default, texts.get(field.name, "")))
    return tuple(docs)
