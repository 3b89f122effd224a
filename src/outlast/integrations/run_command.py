"""Checks of the ``outlast run`` command line in batch scripts and manifests."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from outlast.config.base import require
from outlast.errors import ConfigError
from outlast.launch.run_parser import given_options


def is_nproc(text: str) -> bool:
    """Return whether a text is a valid value of ``--nproc-per-node``."""
    return text in ("auto", "gpu", "cpu", "xpu") or (text.isdigit() and int(text) > 0)


def split_command(outlast: str) -> list[str]:
    """Return the words of the ``outlast`` command on a node.

    Raises:
        ConfigError: There is none, or a quote is not closed.
    """
    try:
        words = shlex.split(outlast)
    except ValueError as error:
        raise ConfigError(f"outlast={outlast!r} is not a command line ({error}); close its quotes") from None
    require(bool(words), f"outlast={outlast!r} is not a command; write for example 'uv run outlast'")
    return words


def check_run_command(command: Sequence[str], made_from: Mapping[str, str]) -> dict[str, str]:
    """Return the options of ``outlast run`` in a command, as they are typed.

    Raises:
        ConfigError: The command has an option that is generated.
    """
    given = given_options(command)
    for option, typed in given.items():
        if option in made_from:
            raise ConfigError(f"{typed} is made from {made_from[option]}; leave it out of what outlast run gets")
    return given
