"""``outlast demo``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

import click

from outlast.cli.main import Command, complete_folder, echo, ending_on_signals, failing_in_one_line, json_option
from outlast.errors import ExitReason

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.demo.outcome import DemoOutcome
    from outlast.demo.plan import Shape


@click.command("demo", cls=Command)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Draws order, victims, moments.")
@click.option("--iterations", type=int, default=115, show_default=True, help="Length of each run, at least 105.")
@click.option(
    "--keep",
    metavar="DIR",
    shell_complete=complete_folder,
    help="Keep journals, output and generations of both runs in this new folder.",
)
@json_option
def demo(seed: int, iterations: int, keep: str | None, as_json: bool) -> int:
    """Watch a real training survive wrong numbers, a killed rank, a hung rank, lost nodes and a preemption.

    A small GPT is trained twice on this machine, by 2 nodes of 2 ranks: once undisturbed, and once with two spare nodes
    while one rank is slow, one activation becomes NaN, one bit of a weight flips, a rank is killed, a rank is stopped
    and a whole node is lost with its memory and disk. The slow rank is named, the NaN costs one run of a step, the rank
    of the flipped bit its node, and all resume from what the nodes hold of each other. Then another node is lost when
    every copy of its state is damaged: the global tier has it. Then one rank gets SIGTERM: all save and leave together,
    and a second job continues where they left. At the end the two results are compared bit by bit.

    Exit code 0: the results are identical, each fault was noticed for what it was, and each rank was restored from
    where it should; else 1.

    Examples:
      outlast demo
      outlast demo --seed 7                   other victims, at other moments
      outlast demo --iterations 300 --keep runs/demo
      outlast demo --json | jq .bit_identical
    """
    from outlast.demo.plan import Shape

    with ending_on_signals(), failing_in_one_line():
        try:
            return _perform(Shape(iterations=iterations), seed=seed, keep=keep, as_json=as_json)
        except KeyboardInterrupt:
            echo("interrupted; every process of the demo has been ended", err=True)
            raise
        except BrokenPipeError:  # nobody reads on, as after `| head`: everything has been ended and removed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE


def _perform(shape: Shape, *, seed: int, keep: str | None, as_json: bool) -> int:
    from outlast.demo.show import perform
    from outlast.demo.view import LiveView, PlainView, SilentView, View, render

    console = _open_console()
    view: View
    if as_json:
        view = SilentView(shape)
    elif console.is_terminal:
        view = LiveView(shape, console)
    else:
        view = PlainView(shape, _echo_text, width=console.width)
    outcome = perform(
        shape,
        seed=seed,
        keep=keep,
        view=view,
        on_failure=lambda tails: _echo_text(tails, err=True),
        writes_page=not as_json,
    )
    if as_json:
        click.echo(outcome.to_json())
        return _exit_code(outcome)
    with console.capture() as captured:
        console.print(render(outcome))
    for line in captured.get().splitlines():
        click.echo(line.rstrip())  # the console escaped it, and added colours
    places = {
        "The run as a page, for a browser": outcome.report,
        "Journal, output and generations": outcome.folder,
    }
    for what, place in places.items():
        if place is not None:
            echo("", f"{what}:", str(place))  # a line of its own, to be copied
    return _exit_code(outcome)


def _echo_text(text: str, *, err: bool = False) -> None:
    echo(*text.split("\n"), err=err)


def _exit_code(outcome: DemoOutcome) -> int:
    return int(ExitReason.FINISHED if outcome.ok else ExitReason.FAILED)


def _open_console() -> Console:
    """Return the terminal; where only plain text is wanted, or possible, one on which nothing moves or has a colour."""
    from outlast.cli.console import PrintableConsole

    console = PrintableConsole()
    if console.is_terminal and sys.stdout.isatty() and not console.is_dumb_terminal and not console.no_color:
        return console
    width = shutil.get_terminal_size().columns
    return PrintableConsole(color_system=None, force_terminal=False, width=width)
