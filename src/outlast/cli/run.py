"""``outlast run``, and shell completion of its options."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem, ShellComplete

from outlast import env, logs
from outlast.errors import ConfigError
from outlast.launch.run_parser import RunParser

if TYPE_CHECKING:
    from outlast.launch.options import RunOptions

log = logging.getLogger(__name__)


def complete_run_word(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete words that another command passes on to `outlast run`."""
    words = ["run", *(ctx.params.get(parameter.name or "") or ())]
    return ShellComplete(ctx.find_root().command, {}, "outlast", "").get_completions(words, incomplete)


class _Run(RunParser):
    def invoke(self, ctx: click.Context) -> NoReturn:
        launch_and_exit(ctx.args)


run = _Run()


def launch_and_exit(
    arguments: Sequence[str], *, notes: Sequence[str] = (), settle: Callable[[RunOptions, int], int] | None = None
) -> NoReturn:
    """Run a job's part on this node and end this process.

    Args:
        arguments: The words after `outlast run`.
        notes: Lines to log at the start.
        settle: Called with the options and the job's exit code at the end; returns this process's exit code.

    Raises:
        ConfigError: The command line or a setting is wrong; nothing was started.

    Blocks: until the job is over.
    """
    if os.getpid() == 1:  # the first process of a container
        from outlast.runtime.processes import fork_from_init

        fork_from_init()
    from outlast.launch.options import parse_options

    logs.read_settings()
    _configure_log(env.node_name())  # reading a config file may log warnings
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
        with contextlib.suppress(OSError):  # the reader has exited: outlast run ... | head
            stream.flush()
    # Threads in store calls cannot be interrupted and need not end: everything of value is closed.
    os._exit(code)


def _configure_log(node: str) -> None:
    threads = dict.fromkeys(("outlast-coordinator", "outlast-lifelines"), "coordinator")
    logs.configure(f"agent {node}", node=node, threads=threads)
