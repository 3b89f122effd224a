"""The command line's ``--ft-<field>`` options, one for each field of :class:`FaultToleranceConfig`.

``-`` and ``_`` are alike in their names. The options keep the values as they were given;
:func:`ft_config_from` converts them, so that an error names the option and not a type of argparse's.
"""

from __future__ import annotations

import argparse
import typing
from typing import Any

from outlast.config.base import FieldDoc, describe_fields, nearest, parse_text
from outlast.config.fault_tolerance import FaultToleranceConfig

__all__ = ["add_ft_arguments", "ft_config_from", "unknown_flag_message"]

_TRUTHS = ("true", "false", "1", "0", "yes", "no", "on", "off")


def add_ft_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``--ft-*`` options to ``parser``; they have no abbreviations, whatever other options have.

    Many begin alike: a mistyped or shortened name would silently pass for another option.
    """
    others, complete = set(parser._actions), parser._get_option_tuples
    group = parser.add_argument_group("fault tolerance", "what is watched, for how long, how often to restart")
    for field in describe_fields(FaultToleranceConfig):
        add = _add_switch if field.type_name == "bool" else _add_option
        add(group, field)
    whole = set(parser._actions) - others
    parser._get_option_tuples = lambda option_string: [  # type: ignore[method-assign]
        match for match in complete(option_string) if match[0] not in whole
    ]


def _add_option(group: argparse._ArgumentGroup, field: FieldDoc) -> None:
    shown, *others = _spellings(field.name)
    metavar = _metavar(field)
    group.add_argument(shown, dest=_dest(field.name), default=argparse.SUPPRESS, metavar=metavar, help=_help(field))
    for spelling in others:
        group.add_argument(spelling, dest=_dest(field.name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_switch(group: argparse._ArgumentGroup, field: FieldDoc) -> None:
    # An option with an optional value would swallow the script's name after a bare `--ft-simulate_fault`, so
    # `--ft-simulate_fault=true` and the like are option names of their own: argparse looks for those first.
    for number, spelling in enumerate(_spellings(field.name)):
        group.add_argument(
            spelling,
            dest=_dest(field.name),
            action="store_const",
            const="true",
            default=argparse.SUPPRESS,
            help=_help(field) if number == 0 else argparse.SUPPRESS,
        )
        for truth in _TRUTHS:
            for written in (truth, truth.capitalize()) if truth.isalpha() else (truth,):
                group.add_argument(
                    f"{spelling}={written}",
                    dest=_dest(field.name),
                    action="store_const",
                    const=truth,
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )


def ft_config_from(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the given ``--ft-*`` options as field name to value.

    Raises:
        ConfigError: A value does not fit its field.
    """
    hints = typing.get_type_hints(FaultToleranceConfig)
    return {
        field.name: parse_text(hints[field.name], getattr(namespace, dest), where=f"--ft-{field.name}")
        for field in describe_fields(FaultToleranceConfig)
        if hasattr(namespace, dest := _dest(field.name))
    }


def unknown_flag_message(flag: str) -> str:
    """Return one line that names the closest known option for an unknown ``--ft-...`` one."""
    name, _, value = flag.partition("=")
    known = {field.name for field in describe_fields(FaultToleranceConfig)}
    wanted = name.removeprefix("--ft").lstrip("-_").replace("-", "_")
    if wanted in known:
        return f"{name}={value}: neither true nor false; write {name}=true or {name}=false"
    hint = nearest(wanted, known)
    if hint.startswith("did you mean"):
        hint = f"did you mean --ft-{hint.split(chr(39))[1]}?"
    else:
        hint = "see outlast run --help for the known ones"
    return f"unknown option {name}; {hint}"


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--ft-{name}", f"--ft-{name.replace('_', '-')}")))


def _dest(name: str) -> str:
    return f"ft_{name}"


def _metavar(field: FieldDoc) -> str:
    if "Mapping" in field.type_name:
        return "NAME:SECONDS,..."
    if "float" in field.type_name:
        return "FACTOR" if field.name.endswith("factor") else "SECONDS"
    return "NUMBER" if "int" in field.type_name else "NAME"


def _help(field: FieldDoc) -> str:
    default = "none" if field.default in (None, {}) else str(field.default)
    text = " ".join(field.text.split()).replace("``", "").rstrip(".")
    return f"{text} (default: {default})".replace("%", "%%")
