"""Shared code of commands that make a scheduler's job: options from a dataclass, `outlast run`'s words, hints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from outlast.cli.main import complete_folder, echo
from outlast.cli.run import complete_run_word
from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.launch.run_parser import RunCommand

CONTEXT = {"ignore_unknown_options": False, "allow_interspersed_args": False}
Option = tuple[str, str, str]
"""Names (``--name``, and the field if that differs), the value's name (empty: a flag), help."""


def field_of(names: str) -> str:
    """Return the field that an option sets."""
    return names.split()[-1].removeprefix("--").replace("-", "_")


def job_options(rows: Sequence[Option], kind: type, *, single: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that adds an option for each row, with the type and default of a dataclass's field, and the
    command.

    Args:
        kind: The dataclass.
        single: A field of several values that one option gives as text.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.argument(
            "command",
            metavar="[--] [RUN OPTION]... SCRIPT [ARGUMENT]...",
            nargs=-1,
            type=click.UNPROCESSED,
            shell_complete=complete_run_word,
        )(command)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for names, metavar, text in reversed(rows):
            field = fields[field_of(names)]
            if not metavar:
                command = click.option(*names.split(), is_flag=True, help=text)(command)
                continue
            default = None if field.default is dataclasses.MISSING or field.name == single else field.default
            command = click.option(
                *names.split(),
                type=next((type_ for type_ in (int, float) if str(field.type).startswith(type_.__name__)), str),
                default=default,
                show_default=default not in (None, ()) and "default" not in text,
                multiple=default == (),
                metavar=metavar,
                shell_complete=complete_folder if metavar == "DIR" and field.name == "run_dir" else None,
                help=text or None,
            )(command)
        return command

    return add


def parse_words(command: Sequence[str], example: str) -> RunCommand:
    """Parse the words for `outlast run` behind the options.

    Raises:
        ConfigError: There is no training script, or `outlast run` would refuse the words.
    """
    from outlast.launch.run_parser import parse_command

    if not command:
        path = click.get_current_context().command_path
        raise ConfigError(f"there is no training script; name one, for example: {path} {example} -- train.py")
    return parse_command(tuple(command))


def show_hints(parsed: RunCommand, own: Collection[str], rows: Sequence[Option], warnings: Sequence[str]) -> None:
    """Print warnings, and hints about options of this command after the script, on standard error."""
    from outlast.launch.run_parser import hint_at

    words = [word.partition("=")[0] for word in parsed.args.training_script_args]
    mistaken = tuple(dict.fromkeys(word for word in words if word in own))
    hint = hint_at(mistaken, parsed.args.training_script, click.get_current_context().command_path)
    for line in (*(in_options(one, rows) for one in warnings), parsed.hint, hint):
        if line is not None:
            echo(f"outlast: {line}", err=True)


def in_options(text: str, rows: Sequence[Option]) -> str:
    """Replace the names of settings in a line by those of their options."""
    from outlast.config.base import as_written

    options: Mapping[str, str] = {field_of(names): names.split()[0] for names, *_ in rows}
    text = as_written(text, lambda field, value: f"{options[field]}={value}" if field in options else None)
    for field, name in options.items():
        text = re.sub(rf"(?<![\w/.-]){field}(?=[=:])", name, text)
        if "_" in field:
            text = re.sub(rf"(?<![\w/.-]){field}(?![\w/.=-])", name, text)
    return text
