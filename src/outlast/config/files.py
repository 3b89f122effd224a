"""Read a :class:`~outlast.config.Config` from a TOML, YAML or JSON file.

The file's keys are the fields of ``Config``; its sections are the fields of the configs within. A few settings may
go by the names that users of another system know. An error is one line that begins with the file, and with the line
where that is known.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast.config import Config
from outlast.config.base import KNOWN_NAMES, Translation, from_mapping
from outlast.env import read_worker
from outlast.errors import ConfigError

__all__ = ["load_config", "load_values"]

log = logging.getLogger(__name__)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read and check a config file.

    Args:
        path: A file that ends in ``.toml``, ``.yaml``, ``.yml`` or ``.json``; YAML needs ``outlast[yaml]``.

    Raises:
        ConfigError: The file is of another type, cannot be read, is not well-formed, has an unknown or
            repeated key, or a value that the config refuses.
    """
    values, text = load_values(path)
    where = str(Path(path))

    def place(keys: tuple[str, ...]) -> str:
        line = _find_line(text, keys)
        return where if line is None else f"{where}:{line}"

    known = Translation(values, place=place)
    for section, keys in known.foreign.items():
        _warn_of_foreign_keys(place((section,)), section, keys)
    return from_mapping(Config, known.values, where=where, locate=lambda keys: _find_line(text, known.origin(keys)))


def _warn_of_foreign_keys(where: str, section: str, keys: list[str]) -> None:
    """Log which keys of another system's section are not read here. Rank 0 does, once a job."""
    if not read_worker().is_first:
        return
    hints = [f"{key} (or {near}?)" if (near := _nearest_known(section, key)) else key for key in keys]
    log.warning(
        "%s: [%s] has keys that outlast does not use: %s; the keys that it uses there: %s",
        where,
        section,
        ", ".join(hints),
        ", ".join(KNOWN_NAMES[section]),
    )


def _nearest_known(section: str, key: str) -> str | None:
    """Return the setting that a key may be meant to be."""
    close = difflib.get_close_matches(key.replace("-", "_"), KNOWN_NAMES[section], n=1, cutoff=0.85)
    return close[0] if close else None


def load_values(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], str]:
    """Read a file of keys and values; return them as they stand there, and the file's text.

    Args:
        path: As for :func:`load_config`.

    Raises:
        ConfigError: The file is of another type, cannot be read, is not well-formed, or repeats a key.
    """
    path = Path(path)
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        known = ", ".join(sorted(_PARSERS))
        raise ConfigError(f"{path}: a config file ends in one of {known}; rename or convert it")
    text = _read(path)
    values = parse(text, str(path))
    if values is None:  # an empty YAML file
        values = {}
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise ConfigError(f"{path}: the file holds a {kind}, not settings; write key and value pairs")
    return values, text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None


def _parse_toml(text: str, where: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at line (\d+), column \d+\)", str(error))
        line, problem = (f":{found[2]}", found[1]) if found else ("", str(error))
        raise ConfigError(f"{where}{line}: not valid TOML: {problem}") from None


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, where))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.lineno}: not valid JSON: {error.msg}") from None


def _parse_yaml(text: str, where: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{where}: YAML files need PyYAML; pip install 'outlast[yaml]', or write TOML") from None

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            _without_repeats([(key, None) for key in keys], f"{where}:{node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}{line}: not valid YAML: {problem}") from None


def _without_repeats(pairs: list[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [str(key) for key, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{where}: key {repeated!r} is given twice; keep one")
    return values


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    ".json": _parse_json,
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def _find_line(text: str, keys: tuple[str, ...]) -> int | None:
    """Return the line of a key below its sections; works for all three formats, as they spell keys alike."""
    position = 0
    for key in keys:
        pattern = rf"^[^#\n]*?(?<![\w.-])(?P<key>[\"']?{re.escape(key)}[\"']?\s*(?:[=:\].]))"
        found = re.compile(pattern, re.MULTILINE).search(text, position)
        if found is None:
            return None
        position = found.end()
    return text.count("\n", 0, position) + 1
