"""``outlast``: the entry point of the command line, and helpers that its commands share.

Imports stay inside the commands, so that ``outlast --help`` responds at once.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from outlast.errors import ConfigError, ExitReason, OutlastError
from outlast.version import __version__
from outlast.wording import one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
run_key_option = click.option(
    "--run-key-file",
    "key_file",
    metavar="FILE",
    help="The run's secret, where it comes from a file; default OUTLAST_RUN_KEY, or run.key of the run directory.",
)


class Command(click.Command):
    """A command whose help is a docstring; the examples at its end are printed after the options."""

    def __init__(self, name: str | None, *, help: str | None = None, epilog: str | None = None, **options: Any) -> None:
        text, heading, examples = inspect.cleandoc(help or "").partition("\n\nExamples")
        settings = {"help_option_names": ["-h", "--help"], **(options.pop("context_settings", None) or {})}
        epilog = f"\b\n{heading.strip()}{examples}\n" if heading else epilog
        super().__init__(name, help=text, epilog=epilog, context_settings=settings, **options)


class ScriptCommand(Command):
    """A command with options of a scheduler, followed by those of `outlast run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; report the right place of a misplaced option of `outlast run`."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from outlast.launch.run_parser import RunParser, find_options, names_of

            if not find_options(names_of(RunParser().options), error.option_name):
                raise
            raise ConfigError(
                f"{error.option_name} is an option of outlast run; put it after --, before the script: "
                f"{ctx.command_path} ... -- {error.option_name} ... train.py"
            ) from None


class CommandGroup(Command, click.Group):
    """A command with subcommands: alone it prints its help, and for a mistyped command it suggests the nearest."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; without words, print the help."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command as click does; suggest the nearest one for an unknown command.

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


_NOT_ASCII = re.compile(r"[^\n -~]")


@contextmanager
def failing_in_one_line(what: str = "", *errors: type[Exception]) -> Iterator[None]:
    """End the command with one line and exit code 1 for an ``OutlastError``, or one of ``errors``.

    Bad input passes: :func:`main` ends the command with exit code 2.
    """
    failures: tuple[type[Exception], ...] = (OutlastError, *errors)
    try:
        yield
    except ConfigError:
        raise
    except failures as error:
        echo(f"outlast: {what}{error}", err=True)
        raise click.exceptions.Exit(ExitReason.FAILED) from None


def print_json(value: object, *, on_one_line: bool = False) -> None:
    import msgspec

    data = msgspec.json.encode(value)
    text = (data if on_one_line else msgspec.json.format(data, indent=2)).decode()
    click.echo(_NOT_ASCII.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text))


def echo(*lines: str, err: bool = False) -> None:
    """Print lines, each with its control characters escaped: parts may come from other machines and users."""
    click.echo("\n".join(map(one_line, lines)), err=err)


def open_console(*, width: int, markup: bool = False) -> Console:
    """Return the terminal to print to.

    Args:
        width: Columns of a line in a file or a pipe.
        markup: Whether texts may contain rich's markup.
    """
    from outlast.cli.console import PrintableConsole

    console = PrintableConsole(markup=markup)
    return console if console.is_terminal else PrintableConsole(markup=markup, width=width)


_COMMANDS = {
    "run": (
        "outlast.cli.run:run",
        "Launch a training script and keep it alive (torchrun's options, and more).",
    ),
    "ckpt": ("outlast.cli.ckpt:ckpt", "List, verify and prune checkpoints, local and remote."),
    "status": ("outlast.cli.status:status", "Show the state of a run: ranks, nodes, progress, incidents."),
    "top": ("outlast.cli.top:top", "Watch a run live: ranks, sections, iterations a second, incidents, tiers."),
    "report": (
        "outlast.cli.report:report",
        "Show what happened in a run and what it cost; write report.html and a trace.",
    ),
    "simulate": ("outlast.cli.simulate:simulate", "Predict goodput at scale; compare intervals, spares and timeouts."),
    "chaos": ("outlast.cli.chaos:chaos", "Plan faults, and run a script under them."),
    "doctor": ("outlast.cli.doctor:doctor", "Check whether this node is healthy enough to train."),
    "slurm": ("outlast.cli.slurm:slurm", "Write, submit and requeue Slurm jobs."),
    "k8s": ("outlast.cli.k8s:k8s", "Make the manifest of a job on Kubernetes."),
    "shims": ("outlast.cli.shims:shims", "Write ft_launcher, for scripts of NVIDIA's resiliency extension."),
    "completion": ("outlast.cli.main:completion", "Print what bash, zsh or fish needs to complete commands."),
}


_PLAINLY = {
    "is not a valid integer range": "is not a whole number",
    "is not a valid integer": "is not a whole number",
    "is not a valid float range": "is not a number",
    "is not a valid float": "is not a number",
}
"""Click's messages about wrong values, and plain ones."""


class _LazyGroup(CommandGroup):
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


@click.group(cls=_LazyGroup)
@click.version_option(__version__, "-V", "--version", prog_name="outlast")
def cli() -> None:
    """Keep long distributed PyTorch training runs alive.

    Examples:
      outlast run --nproc-per-node=8 train.py
      outlast doctor
      outlast ckpt ls /shared/runs/gpt/checkpoints
      outlast run --help
    """


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main() -> None:
    """Run the command line; bad input is one line and exit code 2."""
    if logging.lastResort is not None:  # prints the warnings of commands that configure no log
        logging.lastResort.setFormatter(_Printable())
    with ending_in_one_line("outlast"):
        code = cli.main(standalone_mode=False, prog_name="outlast")
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def ending_in_one_line(program: str) -> Iterator[None]:
    """End the process with one line and exit code 2 for bad input, and with 130 on Ctrl-C."""
    try:
        yield
    except ConfigError as error:
        echo(f"{program}: {error}", err=True)
        sys.exit(ExitReason.BAD_INPUT)
    except click.ClickException as error:
        echo(f"{program}: {_describe(error)}", err=True)
        sys.exit(ExitReason.BAD_INPUT)
    except click.exceptions.Exit as ended:  # --help after other options
        sys.exit(ended.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)


def _describe(error: click.ClickException) -> str:
    """Return a click error as one line that ends with a remedy."""
    message = " ".join(error.format_message().split()).rstrip(".").replace(". (", " (")
    message = message[:1].lower() + message[1:]
    for clicks, ours in _PLAINLY.items():
        message = message.replace(clicks, ours)
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or message.endswith("?"):
        return message
    return f"{message}; see {context.command_path} --help"


@add_completion_class
class _Bash(BashComplete):
    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Complete words as they were typed: bash splits `--nnodes=2` into three words, the second of them `=`."""
        words: list[str] = []
        for before, word in zip(["", *args], [*args, incomplete], strict=True):
            if words and "=" in (before, word):
                words[-1] += word
            else:
                words.append(word)
        return super().get_completions(words[:-1], words[-1])


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands, options and files.

    The options of `outlast run` are those of the torch that is installed.

    Examples:
      eval "$(outlast completion bash)"            in ~/.bashrc
      eval "$(outlast completion zsh)"             in ~/.zshrc, behind compinit
      outlast completion fish > ~/.config/fish/completions/outlast.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "outlast", "_OUTLAST_COMPLETE").source())


def complete_file(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def complete_folder(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]
