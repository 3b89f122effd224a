"""Configs: created from mappings, texts and flags, checked, and described.

Every config is a keyword-only frozen dataclass that validates itself when it is created. The text under a field is its
documentation, from which the command line's help and the tables in the docs are generated. Some settings also have the
names that users of another system know (:data:`KNOWN_NAMES`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar
from functools import cache
from typing import Any, Self, TypeVar

import msgspec

from outlast.decoding import convert
from outlast.errors import ConfigError

T = TypeVar("T")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of every config: a keyword-only frozen dataclass that records which of its fields were given.

    Settings of several sources are merged field by field, and a default never replaces a value that another source
    gives. :meth:`changed` makes one from another.
    """

    _given_names: InitVar[frozenset[str] | None] = None
    """The fields that were given; ``dataclasses.replace`` passes it on together with the defaults."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        fill, defaults = cls.__init__, {field.name: _default_of(field) for field in dataclasses.fields(cls)}

        @functools.wraps(fill)
        def init(self: Settings, _given_names: frozenset[str] | None = None, **given: Any) -> None:
            values = self._settle(given)
            replaced = {name for name, value in values.items() if value != defaults.get(name)}
            vars(self)["_given_names"] = frozenset(values) if _given_names is None else _given_names | replaced
            fill(self, **values)

        cls.__init__ = init  # type: ignore[method-assign]

    def __post_init__(self, _given_names: frozenset[str] | None) -> None:
        self._check()

    @classmethod
    def _settle(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Normalise values before they are stored, for example other names of fields. Raises: ConfigError."""
        return values

    def _check(self) -> None:
        """Check the values. Raises: ConfigError."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given, by name."""
        names: frozenset[str] = vars(self)["_given_names"]
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values; given values stay given, defaults included.

        Raises:
            ConfigError: A value is out of range or contradicts another.
        """
        return type(self)(**{**self.given, **changes})


class Changeable:
    """Mixin for a config of another system whose attributes are set one by one: it may be changed until it is read.

    A class derives from this one and from the frozen config with its fields, defaults and checks. Setting an unknown
    name is refused. Values are checked when the config is read, since a script may set related values one after the
    other; from then on it cannot be changed.
    """

    _checked: type
    """The frozen config."""

    def __init_subclass__(cls) -> None:
        cls._checked = cls.__bases__[1]

    def __post_init__(self, *_: object) -> None:
        """Defer the checks."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        require(name in known, f"{type(self).__name__} has no setting {name!r}; {nearest(name, known)}")
        require(
            "_frozen" not in self.__dict__,
            f"{type(self).__name__}.{name}={value!r} is set too late: the settings were read before, so that it would "
            "have no effect; set it first",
        )
        if isinstance(self, Settings):
            vars(self)["_given_names"] |= {name}
        object.__setattr__(self, name, value)

    def finalize(self) -> None:
        """Check the present values, as Megatron-Bridge does before a training; they can still be changed.

        Raises:
            ConfigError: A value is out of range or contradicts another.
        """
        self.checked()

    def checked(self) -> Any:
        """Return the frozen config with the present values; this one can still be changed.

        Raises:
            ConfigError: A value is out of range or contradicts another.
        """
        if isinstance(self, Settings):
            return self._checked(**self.given)
        return self._checked(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})  # type: ignore[arg-type]

    def freeze(self) -> None:
        """Refuse changes from now on."""
        self.__dict__["_frozen"] = True


def frozen(config: Any) -> Any:
    """Return a config for use: a :class:`Changeable` one is checked and frozen."""
    if not isinstance(config, Changeable):
        return config
    checked = config.checked()
    config.freeze()
    return checked


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class FieldDoc:
    """Documentation of one field of a config."""

    name: str
    type_name: str
    default: Any
    text: str


def require(condition: bool, message: str) -> None:
    """Raise :class:`ConfigError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def closest(name: str, known: Iterable[str], likeness: float = 0.5) -> str | None:
    """Return the known name that is most similar to ``name``; ``None`` = none reaches ``likeness``, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=likeness)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar of the known names, or with all of them if none is similar."""
    names = sorted(known)
    close = closest(name, names)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(names)}"


_LAUNCHER_OPTIONS = frozenset({"max_restarts", "max_restarts_total", "nnodes", "nproc_per_node", "rdzv_endpoint"})
"""Options of ``outlast run`` that users expect in a config file."""
_SETTING = re.compile(r"(?<![\w.-])(?P<name>[a-z_]+)(?:\['(?P<key>[^']*)'\])?=(?P<value>'[^']*'|[^\s:;,]+)")


def as_written(message: str, write: Callable[[str, str], str | None]) -> str:
    """Return an error's message with each ``setting=value`` in it as the user wrote it.

    Args:
        message: A config's error, with its own names of settings.
        write: Returns how a setting and its value were written; ``None`` = unchanged.
    """

    def replace(found: re.Match[str]) -> str:
        written = write(found["name"], found["value"])
        if written is None:
            return found[0]
        return written if found["key"] is None else f"{written}: {found['key']}={found['value']}"

    return _SETTING.sub(replace, message)


def from_mapping(
    cls: type[T],
    values: Mapping[str, Any],
    *,
    where: str | Callable[[tuple[str, ...]], str],
) -> T:
    """Create a config from plain values.

    Args:
        cls: A config dataclass.
        values: Field name (``-`` and ``_`` are equivalent) to value; texts are converted to the field's type, and the
            text ``none`` means ``None`` where a field allows it.
        where: Name of the source for errors, such as a file's name; or a function from the keys that lead to a value to
            the source with the line.

    Raises:
        ConfigError: An unknown key (the error has the most similar known one), a value of the wrong type, or one that
            the config refuses.
    """
    return _Reader(where).read(cls, values, ())


def settle_sections(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values with each section that is a mapping converted to its config.

    Raises:
        ConfigError: A section is neither a config nor a mapping, or its settings are refused.
    """
    hints, settled = typing.get_type_hints(cls), dict(values)
    for name, value in values.items():
        kind = strip_none(hints.get(name))
        if not dataclasses.is_dataclass(kind) or value is None:
            continue
        section = typing.cast(type, kind)
        is_right = isinstance(value, Mapping | section)
        require(is_right, f"{name} must be a {section.__name__} or a mapping, not {value!r}")
        settled[name] = from_mapping(section, value, where=name) if isinstance(value, Mapping) else frozen(value)
    return settled


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Create configs from one source."""

    where: str | Callable[[tuple[str, ...]], str]

    def read(self, cls: type[T], values: Mapping[str, Any], path: tuple[str, ...]) -> T:
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        hints = typing.get_type_hints(cls)
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name, here = str(key).replace("-", "_"), (*path, str(key))
            if name not in fields:
                hint = nearest(name, fields)
                if name in _LAUNCHER_OPTIONS:
                    hint = f"it is an option of outlast run: --{name.replace('_', '-')}"
                raise ConfigError(f"{self.place(here, path)}: unknown key {shown(key)}; {hint}")
            if name in arguments:
                raise ConfigError(f"{self.place(here, path)}: key {name!r} is given twice; keep one")
            hint = hints[name]
            inner = strip_none(hint)
            if not dataclasses.is_dataclass(inner):
                arguments[name] = parse_text(hint, value, where=self.place(here, here))
            elif isinstance(value, Mapping):
                arguments[name] = self.read(typing.cast(type, inner), value, here)
            elif value is None or is_none(value):
                arguments[name] = None
            else:
                raise ConfigError(
                    f"{self.place(here, here)}: {shown(value)} is not a section; write keys and values below its name"
                )
        for field in fields.values():
            if _is_required(field) and field.name not in arguments:
                raise ConfigError(f"{self.place(path, path)}: key {field.name!r} is missing; give it")
        try:
            return cls(**arguments)
        except ConfigError as error:
            raise ConfigError(f"{self.place(path, path)}: {error}") from None

    def place(self, located: tuple[str, ...], named: tuple[str, ...]) -> str:
        """Return source, line of ``located``, and the keys ``named``."""
        source = self.where if isinstance(self.where, str) else self.where(located)
        return ": ".join((source, ".".join(named))) if named else source


def parse_text(hint: Any, value: Any, *, where: str) -> Any:
    """Convert ``value`` (from a file or the command line) to the type ``hint``.

    Raises:
        ConfigError: It does not fit; the message begins with ``where`` and describes the type.
    """
    wanted = strip_none(hint)
    given, lax = value, isinstance(value, str)
    if isinstance(value, str):
        if is_none(value) and type(None) in typing.get_args(hint):
            return None
        if _is_mapping(wanted):
            value = _parse_pairs(value, where)
        elif wanted is bool and (lowered := value.strip().lower()) in _TRUTHS:
            value = _TRUTHS[lowered]
    if _is_mapping(wanted) and isinstance(value, Mapping):
        value = {key: None if is_none(item) else item for key, item in value.items()}
        lax = lax or any(isinstance(item, str) for item in value.values())
    try:
        return convert(value, hint, strict=not lax)
    except msgspec.ValidationError:
        raise ConfigError(f"{where}: {shown(given)} does not fit; write {_describe_type(hint)}") from None


def shown(value: Any) -> str:
    """Return a value as an error shows it, cut to a maximum length."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


_MAX_SHOWN = 200
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def is_none(value: Any) -> bool:
    """Return whether ``value`` is a text that means ``None``."""
    return isinstance(value, str) and value.strip().lower() in ("none", "null")


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) in (dict, Mapping)


def _describe_type(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
    wanted = strip_none(hint)
    text = "name:seconds,name:seconds,..." if _is_mapping(wanted) else names.get(wanted, str(wanted))
    return f"{text}, or none" if wanted is not hint else text


def _parse_pairs(text: str, where: str) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    if is_none(text) or not text.strip():
        return pairs
    for part in text.split(","):
        name, colon, number = (piece.strip() for piece in part.partition(":"))
        if not colon or not name:
            raise ConfigError(
                f"{where}: {part!r} is not in the form name:seconds; write for example setup:600,step:180"
            )
        if name in pairs:
            raise ConfigError(f"{where}: {name!r} is given twice; keep one")
        pairs[name] = number
    return pairs


def require_finite(config: Any) -> None:
    """Raise :class:`ConfigError` when a number of ``config`` is infinite or not a number."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value.values() if isinstance(value, Mapping) else (value,):
            finite = not isinstance(number, float) or math.isfinite(number)
            require(finite, f"{field.name}={number} must be finite; write none where a setting can be off")


def require_above_zero(config: Any, *names: str, what: str = " seconds") -> None:
    """Raise :class:`ConfigError` when one of the named settings is not above 0; ``None`` is not checked."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value > 0, f"{name}={value} must be above 0{what}")


def require_at_least(config: Any, least: int, *names: str, what: str = "") -> None:
    """Raise :class:`ConfigError` when one of the named settings is below ``least``; ``None`` is not checked."""
    for name in names:
        value = getattr(config, name)
        bound = f"be at least {least}" if least else "not be negative"
        require(value is None or value >= least, f"{name}={value} must {bound}{what}")


def require_utf8(name: str, path: str | None) -> None:
    """Raise :class:`ConfigError` if a path has bytes that are not UTF-8, which no record could contain."""
    try:
        (path or "").encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}={path!a} is not UTF-8, as what is written about it must be; name another") from None


def require_one_of(config: Any, name: str, known: Sequence[str]) -> None:
    """Raise :class:`ConfigError` when a setting is not one of the known texts."""
    value = getattr(config, name)
    require(value in known, f"{name}={value!r} must be {', '.join(known[:-1])} or {known[-1]}")


def strip_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


@cache
def describe_fields(cls: type) -> tuple[FieldDoc, ...]:
    """Return name, type, default and documentation of every field of a config, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    types_: dict[str, str] = {}
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            types_[statement.target.id] = ast.unparse(statement.annotation)
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                texts[statement.target.id] = " ".join(str(following.value.value).split())
    return tuple(
        FieldDoc(
            field.name,
            types_[field.name],
            "required" if _is_required(field) else _default_of(field),
            texts.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
    )


KNOWN_NAMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "checkpoint": {  # Megatron
        "save": ("checkpoint", "directory"),
        "non_persistent_local_ckpt_dir": ("checkpoint", "local_directory"),
    },
    "train": {  # KempnerForge
        "shutdown_timeout_sec": ("preemption", "shutdown_timeout"),
        "nccl_health_check_interval": ("health", "process_group_interval"),
    },
}
"""Section and key in another system to our section and key; unit and meaning of 0 are the same. Other keys of such a
section belong to the other system: the training script reads them."""


def take_known_names(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return a config's values with its own names in place of another system's.

    Raises:
        ConfigError: A setting has different values under its two names.
    """
    settled = dict(values)
    for alias, (_, name) in KNOWN_NAMES[section].items():
        given, own = settled.pop(alias, None), settled.get(name)
        require(
            given is None or own is None or given == own,
            f"{alias}={given!r} and {name}={own!r} are two names of one setting; leave one of them out",
        )
        if given is not None:
            settled[name] = given
    return settled
