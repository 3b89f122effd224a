"""``outlast shims``, and the ``ft_launcher`` program that it writes."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

import click

from outlast import env
from outlast.cli.main import Command, complete_folder, echo, ending_in_one_line, json_option, print_json
from outlast.errors import ExitReason

if TYPE_CHECKING:
    from outlast.launch.options import RunOptions


@click.command("shims", cls=Command)
@click.argument("folder", metavar="DIR", shell_complete=complete_folder)
@json_option
def shims(folder: str, as_json: bool) -> int:
    """Write ft_launcher into DIR, for scripts of NVIDIA's resiliency extension.

    With DIR at the front of PATH, scripts and NeMo-Run that call ft_launcher get `outlast run`, with the options
    translated. The program calls the Python that this command runs in. One that is there and is not ours is left alone
    (exit code 2); ours is written again where it differs.

    Examples:
      outlast shims ~/outlast-shims
      PATH=~/outlast-shims:$PATH ft_launcher --nproc-per-node=8 train.py
      outlast shims /shared/shims --json
    """
    from outlast.integrations.ft_launcher import write_shims

    written = write_shims(folder)
    if as_json:
        print_json({"folder": os.path.abspath(folder), "shims": written})
        return int(ExitReason.FINISHED)
    for shim in written:
        echo(f"{shim.path}: {'written' if shim.changed else 'is there already'}")
    click.echo(f'export PATH={shlex.quote(os.path.abspath(folder))}:"$PATH"')
    return int(ExitReason.FINISHED)


def ft_launcher() -> None:
    """Run this process's command line as `ft_launcher`, and end the process."""
    with ending_in_one_line("ft_launcher"):
        _launch(sys.argv[1:])


def _launch(argv: list[str]) -> None:
    from outlast.cli.run import launch_and_exit
    from outlast.integrations.ft_launcher import USAGE, settle_exit, translate

    if argv and argv[0] in ("-h", "--help"):
        click.echo(USAGE, nl=False)
        return
    translation = translate(argv, env.environ())

    def settle(options: RunOptions, code: int) -> int:
        return settle_exit(code, others_may_continue=options.max_nodes > options.num_slots)

    launch_and_exit(translation.arguments, notes=translation.notes, settle=settle)
