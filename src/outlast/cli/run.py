"""``outlast run``, and how a shell completes its options."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem

from outlast import env, logs
from outlast.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from outlast.launch.options import RunOptions

log = logging.getLogger(__name__)

_VALUES = {
    "nproc_per_node": ("auto", "gpu", "cpu", "xpu"),
    "rdzv_backend": ("c10d", "static", "outlast"),
    "ft_simulated_fault_type": ("rank_hung", "rank_killed", "random"),
    "ft_rank_termination_signal": ("SIGKILL", "SIGTERM", "SIGINT", "SIGABRT"),
}
"""Values of options of `outlast run` that are words."""


_PATHS = {"config": "file", "run_dir": "dir", "log_dir": "dir"}


def complete_run_word(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete what follows `outlast run`: options and their values before the script, files from there on."""
    from outlast.launch.run_parser import make_parser, words_before_script

    words = _with_values_joined(ctx.params.get(parameter.name or "") or ())
    parser = make_parser()
    typed, position = words_before_script(parser, [*words, "script"])
    if position < len(words):
        return [CompletionItem(incomplete, type="file")]
    if position == len(words):
        if incomplete.startswith("-"):
            return _options_of(parser, incomplete)
        return [CompletionItem(incomplete, type="file")]
    attribute = list(typed)[-1]  # its value is what comes next
    if attribute in _PATHS:
        return [CompletionItem(incomplete, type=_PATHS[attribute])]
    choices = next((action.choices for action in parser._actions if action.dest == attribute), None)
    return [CompletionItem(word) for word in choices or _VALUES.get(attribute, ()) if str(word).startswith(incomplete)]


def _options_of(parser: argparse.ArgumentParser, incomplete: str) -> list[CompletionItem]:
    """Return options in the first of their spellings that fits; a spelling that the help hides where no other does."""
    shown, hidden = [], []
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith(incomplete) and "=" not in name]
        if names and action.help != "==SUPPRESS==":
            shown.append(CompletionItem(names[0], help=action.help))
        elif names:
            hidden.append(CompletionItem(names[0]))
    return shown or hidden


def _with_values_joined(words: Sequence[str]) -> list[str]:
    """Return words as they were typed: bash makes three words of `--nnodes=2`, the second of them `=`."""
    joined: list[str] = []
    follows = False
    for word in words[:-1] if words and words[-1] == "=" else words:
        if joined and (word == "=" or follows):
            joined[-1] += word
            follows = word == "="
        else:
            joined.append(word)
    return joined


class _Run(click.Command):
    """The command, as shells know it: its options are argparse's."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the options that begin with ``incomplete``; none behind the script."""
        from outlast.launch.run_parser import make_parser, words_before_script

        parser, words = make_parser(), _with_values_joined(ctx.params.get("arguments") or ())
        if words_before_script(parser, [*words, "script"])[1] < len(words):
            return []
        return _options_of(parser, incomplete)


@click.command(
    "run",
    cls=_Run,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_run_word)
def run(arguments: tuple[str, ...]) -> None:
    """Launch a training script and keep it alive."""
    from outlast.launch.run_parser import make_parser

    if arguments and arguments[0] in ("-h", "--help"):
        click.echo(make_parser().format_help(), nl=False)
        return
    launch_and_exit(arguments)


def launch_and_exit(
    arguments: Sequence[str], *, notes: Sequence[str] = (), settle: Callable[[RunOptions, int], int] | None = None
) -> NoReturn:
    """Run a job's part on this node and end this process.

    Args:
        arguments: What follows `outlast run`.
        notes: What to log at the start.
        settle: Called with the options and the job's exit code at the end; returns the one of this process.

    Raises:
        ConfigError: The command line or a setting is wrong; nothing was started.

    Blocks: until the job is over.
    """
    if os.getpid() == 1:  # the first process of a container
        from outlast.runtime.processes import fork_from_init

        fork_from_init()
    from outlast.launch.options import parse_options

    logs.read_settings()
    _configure_log(env.node_name())  # reading a config file may have something to say
    options = parse_options(arguments)
    if options.log_level is not None:
        env.update({env.LOG_LEVEL: options.log_level})  # for the workers and the checkpoint writer, too
    _configure_log(options.node_name)
    for note in notes:
        log.info("%s", note)
    from outlast.launch.run import launch

    try:
        code = launch(options)
    except ConfigError:
        options.remove_new_folders()
        raise
    if settle is not None:
        code = settle(options, code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads any more: outlast run ... | head
            stream.flush()
    # Threads that wait in a store call can neither be interrupted nor outlive this; everything of value is closed.
    os._exit(code)


def _configure_log(node: str) -> None:
    threads = dict.fromkeys(("outlast-coordinator", "outlast-lifelines"), "coordinator")
    logs.configure(f"agent {node}", node=node, threads=threads)
