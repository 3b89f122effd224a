"""``outlast bench``."""

from __future__ import annotations

import importlib

import click

from outlast.cli.ending import ending_on_signals
from outlast.errors import ExitReason, OutlastError

__all__ = ["bench"]

_BENCHES = ("heartbeat", "restart", "rendezvous")


@click.command(
    "bench",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Benchmarks:
  heartbeat    a heartbeat, and entering and leaving a section, beside TCPStore.set
  restart      from SIGKILL of a rank to all ranks' next all-reduce, beside torchrun; death and hang noticed
  rendezvous   up to 512 agents meet on this machine, beside torchrun's c10d rendezvous

\b
Examples:
  outlast bench heartbeat
  outlast bench restart --repeats 9
  outlast bench rendezvous --json | jq '.bars[] | {name, value, bar, ok}'
""",
)
@click.argument("name", metavar="{heartbeat|restart|rendezvous}", type=click.Choice(_BENCHES))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds that count; medians are told."
)
def bench(name: str, as_json: bool, repeats: int) -> int:
    """Measure outlast beside its peers.

    Both are measured in turns in one run; the first round is dropped. How far it is goes to standard error.
    Leave the machine alone meanwhile: what else runs on it is measured too.

    Exit code 0: every bar is kept; 1: one is missed, or could not be measured.
    """
    from rich.console import Console

    module = importlib.import_module(f"outlast.bench.{name}")

    def say(line: str) -> None:
        click.echo(f"[bench {name}] {line}", err=True)

    try:
        with ending_on_signals():
            result = module.measure(repeats=repeats, say=say)
    except OutlastError as error:
        click.echo(f"outlast: {error}", err=True)
        return int(ExitReason.FAILED)
    if as_json:
        for note in result.notes:
            say(note)
        click.echo(result.to_json())
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=120)
        console.print(result.render())
    return int(ExitReason.FINISHED if result.ok else ExitReason.FAILED)
