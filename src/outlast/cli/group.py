"""What the commands share: context settings, a group that helps, and the end by a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from outlast.errors import ConfigError

__all__ = ["HELP", "CommandGroup", "ending_on_signals"]


HELP = {"help_option_names": ["-h", "--help"]}
"""Context settings of every command."""


class CommandGroup(click.Group):
    """A command with commands: alone it prints its help, and a mistyped command is answered with the nearest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; no word at all is a question, not a mistake."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command as click does; one that is not there is answered with the nearest.

        Raises:
            ConfigError: There is no such command.
        """
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            from outlast.config.base import nearest

            of = f" of {ctx.command_path}" if ctx.parent is not None else ""
            raise ConfigError(f"there is no command {args[0]!r}{of}; {nearest(args[0], known)}")
        return super().resolve_command(ctx, args)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that no process is left behind."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
