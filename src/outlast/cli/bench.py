"""``outlast bench``."""

from __future__ import annotations

import importlib

import click

from outlast.cli.ending import ending_on_signals
from outlast.errors import ExitReason, OutlastError

__all__ = ["bench"]

_REPEATS = {
    "heartbeat": 5,
    "restart": 5,
    "inprocess": 5,
    "rendezvous": 5,
    "save": 7,
    "load": 7,
    "replica": 7,
    "numerics": 5,
    "straggler": 5,
    "ray": 5,
}
"""The benchmarks, and the rounds that count unless others are asked for."""
_SIZED = ("save", "load", "replica")
"""Those that move a state."""


@click.command(
    "bench",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Benchmarks:
  heartbeat    a heartbeat, and entering and leaving a section, beside TCPStore.set
  restart      from SIGKILL of a rank to all ranks' next all-reduce, beside torchrun; death and hang noticed
  inprocess    from a fault to the function restarted in process, beside nvidia-resiliency-ext; its quiet cost
  rendezvous   up to 512 agents meet on this machine, beside torchrun's c10d rendezvous
  save         what a save costs training, and when it is durable, beside torch.distributed.checkpoint and others
  load         from files or memory to live tensors, every byte verified, beside the same
  replica      a shard fetched from another node's writer, every byte verified, beside gloo's send and recv
  numerics     digests of replicas, beside torch.hash_tensor; what judging a step costs when nothing is wrong
  straggler    what timing a step's sections costs, beside torch's record_function; a report on slow ranks
  ray          from an actor's death or hang to the next finished step, beside Ray Train's restart

\b
Examples:
  outlast bench heartbeat
  outlast bench restart --repeats 9
  TMPDIR=/nvme outlast bench save
  outlast bench rendezvous --json | jq '.bars[] | {name, value, bar, ok}'
""",
)
@click.argument("name", metavar="{" + "|".join(_REPEATS) + "}", type=click.Choice(list(_REPEATS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=None,
    help="Rounds that count; medians are told.  [default: 7 for save, load and replica, else 5]",
)
@click.option(
    "--tensors",
    type=click.IntRange(min=1),
    default=None,
    help="Size of the state of save, load and replica, in tensors of 16 MiB.  [default: 64, which the bars are for]",
)
def bench(name: str, as_json: bool, repeats: int | None, tensors: int | None) -> int:
    """Measure outlast beside its peers.

    Both are measured in turns in one run; the first round is dropped. How far it is goes to standard error.
    Leave the machine alone meanwhile: what else runs on it is measured too.

    Exit code 0: every bar is kept; 1: one is missed, or could not be measured.
    """
    from rich.console import Console

    if tensors is not None and name not in _SIZED:
        raise click.UsageError(f"--tensors is for {', '.join(_SIZED)}; {name} has no state")
    size = {} if tensors is None else {"num_tensors": tensors}
    module = importlib.import_module(f"outlast.bench.{name}")

    def say(line: str) -> None:
        click.echo(f"[bench {name}] {line}", err=True)

    try:
        with ending_on_signals():
            result = module.measure(repeats=repeats or _REPEATS[name], say=say, **size)
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
