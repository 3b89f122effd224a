"""``outlast run``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import click
from click.shell_completion import CompletionItem

from outlast import env, logs
from outlast.cli.completion import complete_run_word, run_options
from outlast.errors import ConfigError

__all__ = ["run"]


class _Run(click.Command):
    """The command, as shells know it: its options are argparse's."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the options that begin with ``incomplete``."""
        return run_options(ctx.params.get("arguments") or (), incomplete)


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
    from outlast.launch.options import parse_options

    logs.read_settings()
    _configure_log(env.node_name())  # reading a config file may have something to say
    options = parse_options(arguments)
    if options.log_level is not None:
        env.update({env.LOG_LEVEL: options.log_level})  # for the workers and the checkpoint writer, too
    _configure_log(options.node_name)
    from outlast.launch.run import launch

    try:
        code = launch(options)
    except ConfigError:
        options.remove_new_folders()
        raise
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads any more: outlast run ... | head
            stream.flush()
    # Threads that wait in a store call can neither be interrupted nor outlive this; everything of value is closed.
    os._exit(code)


def _configure_log(node: str) -> None:
    threads = dict.fromkeys(("outlast-coordinator", "outlast-lifelines"), "coordinator")
    logs.configure(f"agent {node}", node=node, threads=threads)
