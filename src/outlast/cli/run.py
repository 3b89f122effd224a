"""``outlast run``."""

from __future__ import annotations

import logging
import os
import sys

import click

__all__ = ["run"]


@click.command(
    "run",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Launch a training script and keep it alive."""
    from outlast.launch.options import make_parser, parse_options

    if arguments and arguments[0] in ("-h", "--help"):
        click.echo(make_parser().format_help())
        return
    options = parse_options(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("outlast").setLevel(logging.INFO)
    from outlast.launch.run import launch

    code = launch(options)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait in a store call can neither be interrupted nor outlive this; everything of value is closed.
    os._exit(code)
