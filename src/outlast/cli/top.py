"""``outlast top``: a live view of a run. Read-only; hosts that do not respond never block the view."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from outlast.cli.main import (
    Command,
    complete_folder,
    echo,
    ending_on_signals,
    json_option,
    open_console,
    print_json,
    run_key_option,
)
from outlast.errors import ExitReason

if TYPE_CHECKING:
    from outlast.top.look import Looker, TopReport

_INTERRUPTED = 130


@click.command("top", cls=Command)
@click.argument("target", metavar="RUN_DIR|HOST:PORT", shell_complete=complete_folder)
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    help="Look again every so many seconds; default 1.",
)
@click.option("--once", is_flag=True, help="Print one view, and end.")
@json_option
@run_key_option
def top(target: str, interval_s: float, once: bool, as_json: bool, key_file: str | None) -> int:
    """Watch a run live: its ranks and what each does, how fast it is, what went wrong, what is saved and where.

    RUN_DIR is a run directory, HOST:PORT the --rdzv-endpoint of a run that is under way. In a terminal the view fills
    it, until q (or Ctrl-C). Elsewhere one view is printed below the other; with --json one object a line, with --once
    as well one object. The view continues when the run restarts, when another job resumes the run, and when no
    coordinator responds.

    What a rank does at this moment is read from the memory of its node: on this machine, as the user of the job.

    Exit code 0: ended with q, or after --once; 2: there is no such run directory, or no coordinator responds.

    Examples:
      outlast top runs/my-run
      outlast top node-0:29400
      outlast top runs/my-run --once
      outlast top runs/my-run --once --json | jq '.ranks[] | select(.state != "running")'
    """
    from outlast.top.look import Looker

    looker = Looker(target, interval_s=interval_s, key_file=key_file)
    code = int(ExitReason.FINISHED)
    with ending_on_signals():
        looker.start()
        try:
            looker.wait_for_first(for_all=once)
            if once:
                _print(looker.newest, as_json=as_json, is_alone=True)
            elif _has_screen() and not as_json:
                _show_live(looker, target, interval_s)
            else:
                while True:
                    looker.check()
                    _print(looker.newest, as_json=as_json, is_alone=False)
                    time.sleep(interval_s)
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except BrokenPipeError:  # the reader has exited: outlast top ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            if not looker.close():
                # A thread waits for a host that does not respond; the interpreter would wait for the thread at its end.
                code = _code_of(sys.exc_info()[1], code)
                sys.stdout.flush()
                os._exit(code)
    return code


def _code_of(error: BaseException | None, code: int) -> int:
    """Return the exit code of a process that an exception ends; print its message."""
    if error is None:
        return code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    echo(f"outlast: {error}", err=True)
    return int(ExitReason.BAD_INPUT)


def _has_screen() -> bool:
    from outlast.env import environ

    return sys.stdout.isatty() and environ().get("TERM", "dumb") != "dumb"


def _print(report: TopReport | None, *, as_json: bool, is_alone: bool) -> None:
    from outlast.top.view import plain, show

    if report is None:
        return
    if as_json:
        print_json(report, on_one_line=not is_alone)
    else:
        time_of = [] if is_alone else [f"--- {report.status.time} ---"]
        echo(*time_of, *plain(show(report)).split("\n"))
    sys.stdout.flush()


def _show_live(looker: Looker, target: str, interval_s: float) -> None:
    from rich.text import Text

    from outlast.top.screen import HINT, TopScreen
    from outlast.top.view import show

    def paint(width: int, height: int) -> list[Text]:
        looker.check()
        if (report := looker.newest) is None:
            return [Text(f"no response from {target} yet"), Text(HINT, style="dim")]
        return show(report, width=width, height=height, hint=HINT)

    TopScreen(open_console(width=80), paint, interval_s=interval_s).run()
