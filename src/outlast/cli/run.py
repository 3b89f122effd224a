"""``outlast run``."""

from __future__ import annotations

import logging
import os
import sys

import click
from click.shell_completion import CompletionItem

from outlast import env, logs

__all__ = ["run"]


class _Run(click.Command):
    """The command, as shells know it: its options are argparse's."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the options that begin with ``incomplete``; none behind the script, whose own they would be."""
        import argparse

        from outlast.launch.options import make_parser

        actions = make_parser()._actions
        valued = {name for action in actions if action.nargs is None for name in action.option_strings}
        before = iter(ctx.params.get("arguments") or ())
        for word in before:
            if not word.startswith("-"):
                return []
            if word in valued:
                next(before, None)
        items = []
        for action in actions:
            names = [name for name in action.option_strings if name.startswith(incomplete)]
            if names and action.help != argparse.SUPPRESS:
                items.append(CompletionItem(names[0], help=action.help))
        return items


def _files(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.command(
    "run",
    cls=_Run,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
def run(arguments: tuple[str, ...]) -> None:
    """Launch a training script and keep it alive."""
    from outlast.launch.options import make_parser, parse_options

    if arguments and arguments[0] in ("-h", "--help"):
        click.echo(make_parser().format_help())
        return
    logs.read_settings()
    _configure_log(env.node_name())  # reading a config file may have something to say
    options = parse_options(arguments)
    if options.log_level is not None:
        env.update({env.LOG_LEVEL: options.log_level})  # for the workers and the checkpoint writer, too
    _configure_log(options.node_name)
    from outlast.launch.run import launch

    code = launch(options)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait in a store call can neither be interrupted nor outlive this; everything of value is closed.
    os._exit(code)


def _configure_log(node: str) -> None:
    threads = dict.fromkeys(("outlast-coordinator", "outlast-lifelines"), "coordinator")
    logs.configure(f"agent {node}", node=node, threads=threads)
