"""The ``--ft-<field>`` options, and which source of fault tolerance settings comes first.

There is one option for each field of :class:`FaultToleranceConfig`. They are written with dashes, and taken with ``_``
too. The options keep the values as they were given; :func:`ft_config_from` converts them, so that an error names the
option and not a type of argparse's.

Settings from several sources are put together field by field: an option of ``outlast run`` comes before its config
file, that before the script's own config, and that before the defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.config.base import (
    FieldDoc,
    as_written,
    describe_fields,
    from_mapping,
    nearest,
    parse_text,
)
from outlast.config.launching import FaultToleranceConfig
from outlast.errors import ConfigError

__all__ = [
    "DEFAULT",
    "SCRIPT",
    "LayeredSettings",
    "add_ft_arguments",
    "ft_config_from",
    "ft_option",
    "ft_typed",
    "merge_under",
    "unknown_flag_message",
]

_TRUTHS = ("true", "false", "1", "0", "yes", "no", "on", "off")


def ft_option(field: str) -> str:
    """Return how the option of a field is written in help and documents."""
    return f"--ft-{field.replace('_', '-')}"


def add_ft_arguments(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Add the ``--ft-*`` options to ``parser``; they have no abbreviations, whatever other options have.

    Many begin alike: a mistyped or shortened name would silently pass for another option.

    Returns:
        Field name to the option as it is shown in the help.
    """
    others, complete = set(parser._actions), parser._get_option_tuples
    group = parser.add_argument_group("fault tolerance", "what is watched, for how long, how often to restart")
    shown = {
        field.name: (_add_switch if field.type_name == "bool" else _add_option)(group, field)
        for field in describe_fields(FaultToleranceConfig)
    }
    whole = set(parser._actions) - others
    parser._get_option_tuples = lambda option_string: [  # type: ignore[method-assign]
        match for match in complete(option_string) if match[0] not in whole
    ]
    return shown


def _add_option(group: argparse._ArgumentGroup, field: FieldDoc) -> argparse.Action:
    shown, *others = _spellings(field.name)
    # Strings that argparse does not show are an option of their own: it lists all spellings of one that it shows.
    action = group.add_argument(
        shown, dest=_dest(field.name), default=argparse.SUPPRESS, metavar=_metavar(field), help=_help(field)
    )
    if others:
        group.add_argument(*others, dest=_dest(field.name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return action


def _add_switch(group: argparse._ArgumentGroup, field: FieldDoc) -> argparse.Action:
    # An option with an optional value would swallow the script's name after a bare `--ft-simulate-fault`, so
    # `--ft-simulate-fault=true` and the like are option names of their own: argparse looks for those first.
    spellings = _spellings(field.name)
    kept: dict[str, Any] = {"dest": _dest(field.name), "action": "store_const", "default": argparse.SUPPRESS}
    action = group.add_argument(spellings[0], const="true", help=_help(field), **kept)
    if spellings[1:]:
        group.add_argument(*spellings[1:], const="true", help=argparse.SUPPRESS, **kept)
    for truth in _TRUTHS:
        written = (truth, truth.capitalize()) if truth.isalpha() else (truth,)
        names = [f"{spelling}={word}" for spelling in spellings for word in written]
        group.add_argument(*names, const=truth, help=argparse.SUPPRESS, **kept)
    return action


def ft_config_from(namespace: argparse.Namespace, typed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the given ``--ft-*`` options as field name to value.

    Args:
        namespace: What a parser with these options returned.
        typed: Attribute of ``namespace`` to the option as it was written; without it errors name the usual spelling.

    Raises:
        ConfigError: A value does not fit its field.
    """
    hints = typing.get_type_hints(FaultToleranceConfig)
    return {
        field: parse_text(hints[field], text, where=(typed or {}).get(_dest(field), ft_option(field)))
        for field, text in _given(namespace).items()
    }


def ft_typed(namespace: argparse.Namespace, typed: Mapping[str, str]) -> dict[str, str]:
    """Return the given ``--ft-*`` options as field name to what was written, such as ``--ft-safety-factor=3``."""
    return {field: f"{typed.get(_dest(field), ft_option(field))}={text}" for field, text in _given(namespace).items()}


def _given(namespace: argparse.Namespace) -> dict[str, str]:
    names = [field.name for field in describe_fields(FaultToleranceConfig)]
    return {name: getattr(namespace, _dest(name)) for name in names if hasattr(namespace, _dest(name))}


def unknown_flag_message(flag: str) -> str:
    """Return one line that names the closest known option for an unknown ``--ft-...`` one."""
    name, _, value = flag.partition("=")
    fields = describe_fields(FaultToleranceConfig)
    known = [field.name.replace("_", "-") for field in fields]
    wanted = name.removeprefix("--ft").lstrip("-_").replace("_", "-")
    if value and wanted in [field.name.replace("_", "-") for field in fields if field.type_name == "bool"]:
        return f"{name}={value}: neither true nor false; write {name}=true or {name}=false"
    hint = nearest(wanted, known)
    if hint.startswith("did you mean"):
        hint = f"did you mean --ft-{hint.split(chr(39))[1]}?"
    else:
        hint = "see outlast run --help for the known ones"
    return f"unknown option {name}; {hint}"


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((ft_option(name), f"--ft-{name}", f"--ft_{name}", f"--ft_{name.replace('_', '-')}")))


def _dest(name: str) -> str:
    return f"ft_{name}"


def _metavar(field: FieldDoc) -> str:
    if "Mapping" in field.type_name:
        return "NAME:SECONDS,..."
    if "float" in field.type_name:
        return "FACTOR" if field.name.endswith("factor") else "SECONDS"
    return "N" if "int" in field.type_name else "NAME"


def _help(field: FieldDoc) -> str:
    default = "none" if field.default in (None, {}) else str(field.default)
    text = " ".join(field.text.split()).replace("``", "").rstrip(".")
    return f"{text} (default: {default})".replace("%", "%%")


SCRIPT = "script's config"


OPTION = "option"


DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredSettings:
    """What each source gives, by field, and what is in force."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``outlast run``."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """How they were written, such as ``--ft-safety-factor=3``, for errors."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """Its config file."""
    file_name: str = ""
    script: Mapping[str, Any] = field(default_factory=dict)
    """The config that the script gave to its session, or its ``RankMonitor``; empty until it runs."""

    @property
    def launcher(self) -> FaultToleranceConfig:
        """What ``outlast run`` was given."""
        return self._put_together({**self.file, **self.options})

    @property
    def config(self) -> FaultToleranceConfig:
        """What is in force.

        Raises:
            ConfigError: A value of one source contradicts that of another.
        """
        return self._put_together({"enable_ft_package": True, **self.script, **self.file, **self.options})

    def with_script(self, text: str) -> LayeredSettings:
        """Return the same with what the script's config gives, as ``FaultToleranceConfig.to_json`` wrote it.

        Raises:
            ConfigError: It contradicts itself, or what another source gives.
        """
        own = FaultToleranceConfig.from_json(text)
        layered = dataclasses.replace(self, script=own.given)
        _ = layered.config
        return layered

    def source(self, name: str) -> str:
        """Return where the value of a field comes from, in words."""
        places = ((OPTION, self.options), (self.file_name, self.file), (SCRIPT, self.script))
        return next((place for place, values in places if name in values), DEFAULT)

    def _put_together(self, values: Mapping[str, Any]) -> FaultToleranceConfig:
        try:
            return FaultToleranceConfig(**values)
        except ConfigError as error:
            message = as_written(str(error), self._written)
            raise ConfigError(message if message != str(error) else f"{self._describe()}: {message}") from None

    def written(self, name: str) -> str:
        """Return how a field that is in force was given: ``--ft-min-nodes=3``, or ``min_nodes=3 (run.toml)``."""
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
    """Return a script's settings with those of its launcher in their place, field by field.

    Args:
        text: What the launcher was given, as ``FaultToleranceConfig.to_json`` wrote it; ``None`` = nothing.
        config: The script's own; ``None`` = it has none.

    Raises:
        ConfigError: Both contradict each other, or the launcher's text was cut or comes from another version.
    """
    own = {} if config is None else config.given
    first = FaultToleranceConfig.from_json(text).given if text else {}
    if not first:
        return config if config is not None else FaultToleranceConfig()
    return from_mapping(FaultToleranceConfig, {**own, **first}, where="the script's config and outlast run's")
