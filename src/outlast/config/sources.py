"""Sources of settings (config files, options, the script) and their precedence.

A file is TOML, YAML or JSON. Its keys are the fields of :class:`~outlast.config.Config`, and its sections the fields of
the nested configs. Some settings also have the names that users of another system know. An error is one line that
begins with the file and, if known, the line.

Fault tolerance settings of several sources are merged field by field; precedence: options of ``outlast run``, its
config file, the script's own config, the defaults.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast.config import Config
from outlast.config.base import (
    KNOWN_NAMES,
    as_written,
    closest,
    from_mapping,
    frozen,
    shown,
)
from outlast.config.launching import FaultToleranceConfig
from outlast.decoding import MAX_SETTINGS_BYTES, MalformedText, parse_settings, read_file
from outlast.env import read_worker
from outlast.errors import ConfigError
from outlast.wording import one_line

log = logging.getLogger(__name__)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read and check a config file.

    Args:
        path: A file that ends in ``.toml``, ``.yaml``, ``.yml`` or ``.json``; YAML needs ``outlast[yaml]``.

    Raises:
        ConfigError: The file is of another type, cannot be read, is not well-formed, has an unknown or repeated key, or
            a value that the config refuses.
    """
    values, text = load_values(path)
    origins: dict[tuple[str, ...], tuple[str, ...]] = {}

    def place(keys: tuple[str, ...]) -> str:
        line = _find_line(text, origins.get(tuple(key.replace("-", "_") for key in keys), keys))
        return str(path) if line is None else f"{path}:{line}"

    values = _drop_foreign_sections(values, str(path))
    values = _translate(values, place, origins)
    return from_mapping(Config, values, where=place)


_CHECKPOINT_OF_KEMPNERFORGE = {"dir": "directory", "interval": "save_interval", "keep_last_n": "most_recent_k"}
"""Keys of KempnerForge's section ``checkpoint``, recognised by ``dir`` without ``directory``, to our keys."""


def _drop_foreign_sections(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a file's values without the sections that belong to the training script; rank 0 logs their names.

    A section with a name similar to that of a section of outlast is kept, and refused by name, as it may be misspelt.
    """
    own = {field.name for field in dataclasses.fields(Config)} | KNOWN_NAMES.keys()

    def resembles_own(name: str) -> bool:
        return any(name in one or one in name for one in own) or closest(name, own, likeness=0.7) is not None

    foreign = [
        key
        for key, value in values.items()
        if isinstance(value, Mapping) and not resembles_own(str(key).replace("-", "_"))
    ]
    if foreign and read_worker().is_first:
        log.warning(
            "%s has sections that outlast does not use: %s", where, ", ".join(one_line(str(key)) for key in foreign)
        )
    return {key: value for key, value in values.items() if key not in foreign}


def _translate(
    values: Mapping[str, Any],
    place: Callable[[tuple[str, ...]], str],
    origins: dict[tuple[str, ...], tuple[str, ...]],
) -> Mapping[str, Any]:
    """Return a file's values with the sections of other systems merged into outlast's own; log their unused keys.

    Args:
        values: Content of a file.
        place: Returns file and line of keys in the file.
        origins: Gets, for keys of outlast, the corresponding keys in the file.

    Raises:
        ConfigError: Such a section has no keys, or a setting is given under both names.
    """
    merged = dict(values)
    checkpoint = values.get("checkpoint")
    known_names = dict(KNOWN_NAMES)
    if isinstance(checkpoint, Mapping) and "dir" in checkpoint and "directory" not in checkpoint:
        known_names["checkpoint"] = {key: ("checkpoint", own) for key, own in _CHECKPOINT_OF_KEMPNERFORGE.items()}
    for section, known in known_names.items():
        # Megatron's names of checkpoint settings are fields of CheckpointConfig.
        if section not in values or known is KNOWN_NAMES["checkpoint"]:
            continue
        given, foreign = merged.pop(section), []
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{place((section,))}: {section}: {shown(given)} is not a section; write keys and values below its name"
            )
        for key, value in given.items():
            name = str(key).replace("-", "_")
            if name not in known:
                foreign.append(one_line(str(key)))
                continue
            own, there = known[name]
            fields = merged.get(own, {})
            if not isinstance(fields, Mapping) or there in {str(other).replace("-", "_") for other in fields}:
                where = place((section, str(key)))
                raise ConfigError(f"{where}: {section}.{key} is {own}.{there}, which is given too; keep one of them")
            if own not in merged:
                origins[own,] = (section,)
            origins[own, there] = (section, str(key))
            merged[own] = {**fields, there: value}
        if foreign and read_worker().is_first:
            hints = {key: closest(key.replace("-", "_"), known, likeness=0.85) for key in foreign}
            log.warning(
                "%s: [%s] has keys that outlast does not use: %s; the keys that it uses there: %s",
                place((section,)),
                section,
                ", ".join(f"{key} (or {near}?)" if near else key for key, near in hints.items()),
                ", ".join(known),
            )
    return merged


def load_values(path: str | os.PathLike[str], otherwise: str | None = None) -> tuple[Mapping[str, Any], str]:
    """Read a file of keys and values; return its values and its text.

    Args:
        path: As for :func:`load_config`.
        otherwise: Format of a file with another suffix; ``None`` = such a file is refused.

    Raises:
        ConfigError: The file is of another type, cannot be read, is not well-formed, or repeats a key.
    """
    path = Path(path)
    form = _FORMATS.get(path.suffix.lower(), otherwise)
    if form is None:
        known = ", ".join(sorted(_FORMATS))
        raise ConfigError(f"{path}: a config file ends in one of {known}; rename or convert it")
    text = _read(path, MAX_SETTINGS_BYTES[form])
    try:
        values = parse_settings(text, form)
    except MalformedText as error:
        line = "" if error.line is None else f":{error.line}"
        raise ConfigError(f"{path}{line}: not valid {form.upper()}: {error}") from None
    except ImportError:
        raise ConfigError(f"{path}: YAML files need PyYAML; pip install 'outlast[yaml]', or write TOML") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); write settings as in the reference") from None
    if values is None:  # an empty YAML file
        values = {}
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise ConfigError(f"{path}: the file holds a {kind}, not settings; write key and value pairs")
    return values, text


def _read(path: Path, max_bytes: int) -> str:
    try:
        return read_file(path, max_bytes=max_bytes, follows_links=True).decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None


_FORMATS = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def _find_line(text: str, keys: tuple[str, ...]) -> int | None:
    """Return the line of a key below its sections; the pattern fits all three formats."""
    if not keys:
        return None
    position = 0
    for key in keys:
        pattern = rf"^[^#\n]*?(?<![\w.-])(?P<key>[\"']?{re.escape(key)}[\"']?\s*(?:[=:\].]))"
        found = re.compile(pattern, re.MULTILINE).search(text, position)
        if found is None:
            return None
        position = found.end()
    return text.count("\n", 0, position) + 1


def ft_option(field: str) -> str:
    """Return the option of a field, as help and documents write it."""
    return f"--ft-{field.replace('_', '-')}"


SCRIPT = "script's config"
OPTION = "option"
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredSettings:
    """The values of each source, by field, and their merged result."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``outlast run``."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """The options as the user wrote them, such as ``--ft-safety-factor=3``, for errors."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """Values of its config file."""
    file_name: str = ""
    script: Mapping[str, Any] = field(default_factory=dict)
    """The config of the script's session or ``RankMonitor``; empty until it runs."""
    derived: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that follow from the size of the job."""

    @property
    def launcher(self) -> FaultToleranceConfig:
        """The settings given to ``outlast run``."""
        return self._put_together({**self.file, **self.options})

    @property
    def config(self) -> FaultToleranceConfig:
        """The merged settings.

        Raises:
            ConfigError: A value of one source contradicts that of another.
        """
        return self._put_together(
            {"enable_ft_package": True, **self.derived, **self.script, **self.file, **self.options}
        )

    def with_script(self, text: str) -> LayeredSettings:
        """Return a copy with the script's config, as ``FaultToleranceConfig.to_json`` wrote it.

        Raises:
            ConfigError: It contradicts itself or another source.
        """
        own = FaultToleranceConfig.from_json(text)
        layered = dataclasses.replace(self, script=own.given)
        _ = layered.config
        return layered

    def source(self, name: str) -> str:
        """Return the source of a field's value, in words."""
        places = ((OPTION, self.options), (self.file_name, self.file), (SCRIPT, self.script))
        return next((place for place, values in places if name in values), DEFAULT)

    def _put_together(self, values: Mapping[str, Any]) -> FaultToleranceConfig:
        try:
            return FaultToleranceConfig(**values)
        except ConfigError as error:
            message = as_written(str(error), self._written)
            raise ConfigError(message if message != str(error) else f"{self._describe()}: {message}") from None

    def written(self, name: str) -> str:
        """Return how the value of a field was written: ``--ft-min-nodes=3``, or ``min_nodes=3 (run.toml)``."""
        value = getattr(self.config, name)
        return self._written(name, str(value)) or f"{name}={value}"

    def _written(self, name: str, value: str) -> str | None:
        if name in self.options:
            return self.typed.get(name, f"{ft_option(name)}={value}")
        where = self.source(name)
        return None if where == DEFAULT else f"{name}={value} ({where})"

    def _describe(self) -> str:
        given = ((OPTION + "s", self.options), (self.file_name, self.file), (SCRIPT, self.script))
        return "fault tolerance settings from " + " and ".join(place for place, values in given if values)


def merge_under(text: str | None, config: FaultToleranceConfig | None) -> FaultToleranceConfig:
    """Return a script's settings overridden by those of its launcher, field by field.

    Args:
        text: The launcher's settings, as ``FaultToleranceConfig.to_json`` wrote them; ``None`` = none.
        config: The script's own, if any.

    Raises:
        ConfigError: They contradict each other, or the launcher's text was cut or comes from another version.
    """
    config = frozen(config)
    own = {} if config is None else config.given
    first = FaultToleranceConfig.from_json(text).given if text else {}
    if not first:
        return config if config is not None else FaultToleranceConfig()
    return from_mapping(FaultToleranceConfig, {**own, **first}, where="the script's config and outlast run's")
