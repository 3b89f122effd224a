"""``outlast``: the entry point of the command line.

Imports stay inside the commands, so that ``outlast --help`` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from outlast import __version__
from outlast.errors import ConfigError, ExitReason

__all__ = ["cli", "main"]

_COMMANDS = {
    "run": (
        "outlast.cli.run:run",
        "Launch a training script and keep it alive (torchrun's options, and more).",
    ),
    "demo": (
        "outlast.cli.demo:demo",
        "Watch a real training survive a killed rank, a hung rank and a lost node.",
    ),
    "ckpt": ("outlast.cli.ckpt:ckpt", "List, verify and prune checkpoints, local and remote."),
    "status": ("outlast.cli.status:status", "Say how a run is: who runs where, how far, what it waits for."),
    "doctor": ("outlast.cli.doctor:doctor", "Say whether this node is fit to train."),
    "slurm": ("outlast.cli.slurm:slurm", "Make and submit Slurm jobs, give them back to the queue."),
    "bench": ("outlast.cli.bench:bench", "Measure outlast beside its peers."),
    "completion": ("outlast.cli.completion:completion", "Print what bash, zsh or fish needs to complete commands."),
}


class _LazyGroup(click.Group):
    """Import a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=text) for name, (_, text) in _COMMANDS.items() if name.startswith(incomplete)]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from outlast.config.base import nearest

            raise ConfigError(f"there is no command {args[0]!r}; {nearest(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="outlast")
def cli() -> None:
    """Keep long distributed PyTorch training runs alive."""


def main() -> None:
    """Run the command line; bad input is one line and exit code 2."""
    try:
        code = cli.main(standalone_mode=False)
    except ConfigError as error:
        click.echo(f"outlast: {error}", err=True)
        sys.exit(ExitReason.BAD_INPUT)
    except click.ClickException as error:
        click.echo(f"outlast: {error.format_message()}", err=True)
        sys.exit(ExitReason.BAD_INPUT)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
