"""``outlast status``: the state of a run, from its run directory or its coordinator. Read-only."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outlast import clock
from outlast.cli.main import Command, echo, print_json, run_key_option
from outlast.errors import ConfigError, ExitReason, RendezvousError

if TYPE_CHECKING:
    from outlast.status.report import StatusReport


class _StatusCommand(Command):
    """Accepts ``--watch`` without a number before the run directory."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for place, word in enumerate(args):
            if word == "--watch" and not (place + 1 < len(args) and _is_number(args[place + 1])):
                args[place] = f"--watch={_WATCH_S:g}"
        return super().parse_args(ctx, args)


_WATCH_S = 2.0


@click.command("status", cls=_StatusCommand)
@click.argument("target", metavar="RUN_DIR|HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else (--watch: one a line).")
@click.option(
    "--watch",
    "watch_s",
    metavar="[SECONDS]",
    type=click.FloatRange(min=0.1),
    help=f"Look again every so many seconds, {_WATCH_S:g} without a number, until Ctrl-C.",
)
@run_key_option
def status(target: str, as_json: bool, watch_s: float | None, key_file: str | None) -> int:
    """Show the state of a run: its ranks and nodes, its progress, its incidents, and the restarts that are left.

    RUN_DIR is a run directory; its files are enough during a run, after it, and after a power cut. HOST:PORT is the
    --rdzv-endpoint of a run that is under way: the state is queried from its coordinator. Nothing is ever written.

    Exit code 0: shown, whatever the state; 2: there is no such run directory, or no coordinator responds.

    Examples:
      outlast status runs/my-run
      outlast status runs/my-run --watch
      outlast status node-0:29400             where no file system is shared
      outlast status runs/my-run --json | jq '.state, .iteration, .waiting'
    """
    try:
        while True:
            _show(_look(target, key_file), as_json=as_json, watches=watch_s is not None)
            if watch_s is None:
                return int(ExitReason.FINISHED)
            time.sleep(watch_s)
    except RendezvousError as error:
        raise ConfigError(str(error)) from None


def _look(target: str, key_file: str | None) -> StatusReport:
    """Read the state once.

    Raises:
        ConfigError: It is not a run directory, or cannot be read.
        RendezvousError: No coordinator responds.
    """
    from outlast.runtime.run_key import find_known_keys
    from outlast.status.evidence import Evidence, ask_coordinator, endpoint_of, gather
    from outlast.status.facts import judge

    if (endpoint := endpoint_of(target)) is None:
        return judge(gather(Path(target), key_file=key_file), clock.wall_ns())
    keys = find_known_keys(None, key_file=key_file)
    live = ask_coordinator(endpoint, keys[0] if keys else None)
    evidence = Evidence(job=live.job, live=live)
    if live.run_dir is not None:
        try:
            found = gather(Path(live.run_dir), live=live)
        except ConfigError:
            pass  # not shared with this machine: only the coordinator's response is available
        else:
            evidence = found if found.job == live.job else evidence
    return judge(evidence, clock.wall_ns())


def _show(report: StatusReport, *, as_json: bool, watches: bool) -> None:
    from outlast.env import environ
    from outlast.status.report import render

    if as_json:
        print_json(report, on_one_line=watches)
        return
    is_terminal = sys.stdout.isatty()
    lines = list(render(report, width=shutil.get_terminal_size().columns if is_terminal else None))
    if watches and is_terminal and environ().get("TERM", "dumb") != "dumb":
        click.clear()
    elif watches:
        lines = [f"--- {report.time} ---", *lines]
    echo(*lines)


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
