"""``outlast bench``."""

from __future__ import annotations

import importlib
from typing import Any

import click

from outlast.cli.main import HELP, CommandGroup, ending_on_signals
from outlast.errors import ExitReason, OutlastError


@click.group(
    "bench",
    cls=CommandGroup,
    context_settings=HELP,
    epilog="""\b
Examples:
  outlast bench heartbeat
  outlast bench restart --repeats 9
  TMPDIR=/nvme outlast bench save
  outlast bench rendezvous --json | jq '.bars[] | {name, value, bar, ok}'
  outlast bench save --help
""",
)
def bench() -> None:
    """Measure outlast beside its peers.

    Both are measured in turns in one run; the first round is dropped. How far it is goes to standard error.
    Leave the machine alone meanwhile: what else runs on it is measured too.

    Exit code 0: every bar is kept; 1: one is missed, or could not be measured.
    """


def _add(
    name: str, *, summary: str, text: str, takes: str, repeats: int = 5, sized: bool = False, example: str = ""
) -> None:
    """Add the command of a benchmark; ``outlast.bench`` has a module of its name.

    Args:
        name: Its name.
        summary: What is measured, in a line.
        text: The same, for its help.
        takes: How long it takes.
        repeats: Rounds that count unless others are asked for.
        sized: It moves a state whose size can be chosen.
        example: One more example for its help.
    """

    def measure(as_json: bool, repeats: int, tensors: int | None = None) -> int:
        return _measure(name, as_json=as_json, repeats=repeats, tensors=tensors)

    measure.__doc__ = (
        f"{text}\n\nTakes {takes}. Exit code 0: every bar is kept; 1: one is missed, or could not be measured."
    )
    function: Any = measure
    if sized:
        tensors = "Size of the state, in tensors of 16 MiB; default 64, which the bars are for."
        function = click.option("--tensors", type=click.IntRange(min=1), metavar="N", help=tensors)(function)
    function = click.option(
        "--repeats",
        type=click.IntRange(min=1),
        default=repeats,
        show_default=True,
        metavar="N",
        help="Rounds that count; medians are shown.",
    )(function)
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(function)
    examples = [f"outlast bench {name}", example, f"outlast bench {name} --repeats 9 --json | jq .bars"]
    lines = "\n".join(f"  {line}" for line in examples if line)
    bench.command(name, context_settings=HELP, short_help=summary, epilog=f"\b\nExamples:\n{lines}\n")(function)


def _measure(name: str, *, as_json: bool, repeats: int, tensors: int | None) -> int:
    from rich.console import Console

    size = {} if tensors is None else {"num_tensors": tensors}

    def progress(line: str) -> None:
        click.echo(f"[bench {name}] {line}", err=True)

    try:
        with ending_on_signals():
            module = importlib.import_module(f"outlast.bench.{name}")
            result = module.measure(repeats=repeats, progress=progress, **size)
    except OutlastError as error:
        click.echo(f"outlast: {error}", err=True)
        return int(ExitReason.FAILED)
    if as_json:
        for note in result.notes:
            progress(note)
        click.echo(result.to_json())
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=120)
        console.print(result.render())
    return int(ExitReason.FINISHED if result.ok else ExitReason.FAILED)


_add(
    name="heartbeat",
    summary="A heartbeat, and entering and leaving a section.",
    text="A heartbeat, beside TCPStore.set on the same machine; entering and leaving a section. In a worker "
    "process, on a board that another process holds, as under `outlast run`.",
    takes="seconds",
)
_add(
    name="restart",
    summary="From a killed rank to all ranks' next all-reduce.",
    text="From SIGKILL of one of 2 and of 4 ranks until all have finished an all-reduce in the next cycle, beside "
    "torchrun; how soon a death and a hang are noticed.",
    takes="about two minutes",
)
_add(
    name="inprocess",
    summary="From a fault to the function restarted in process.",
    text="From an exception, a kill and three kinds of hang until four ranks are back in the function, beside "
    "nvidia-resiliency-ext where it is installed; what the wrapper costs when nothing is wrong.",
    takes="about six minutes, with the peer ten",
)
_add(
    name="rendezvous",
    summary="Up to 512 agents meet on this machine.",
    text="64, 256 and 512 agents meet, beside torchrun's c10d rendezvous. The agents are simulated and start no "
    "workers.",
    takes="about half a minute",
)
_add(
    name="save",
    summary="What a save costs training, and when it is durable.",
    text="How long training waits in a save, how much its steps slow down while it is written, and how long until "
    "it is durable, beside torch.distributed.checkpoint and others. Writes to TMPDIR: name a real disk.",
    takes="about five minutes",
    repeats=7,
    sized=True,
    example="TMPDIR=/nvme outlast bench save",
)
_add(
    name="load",
    summary="From files or memory to live tensors, verified.",
    text="From files, and from the memory of a writer that outlived its process, to live tensors, every byte "
    "verified, beside torch.load and torch.distributed.checkpoint. Writes to TMPDIR: name a real disk.",
    takes="about a minute",
    repeats=7,
    sized=True,
    example="TMPDIR=/nvme outlast bench load",
)
_add(
    name="replica",
    summary="A shard fetched from another node's writer, verified.",
    text="A shard fetched from another writer over loopback, every byte verified, beside gloo's send and recv of "
    "the same bytes.",
    takes="about half a minute",
    repeats=7,
    sized=True,
)
_add(
    name="numerics",
    summary="Digests of replicas; what judging a step costs.",
    text="Digests of 512 MiB of bfloat16 on one core, beside torch.hash_tensor; how much longer a step of two "
    "ranks takes when its loss is judged and nothing is wrong.",
    takes="about a minute",
)
_add(
    name="straggler",
    summary="What timing a step's sections costs.",
    text="Timing a step with three sections, beside torch's record_function; a report on slow ranks.",
    takes="seconds",
)
_add(
    name="ray",
    summary="From an actor's death or hang to the next step.",
    text="From SIGKILL of an actor until its group's next step has returned, beside Ray Train's restart; how soon "
    "a hang is noticed. Needs outlast[ray].",
    takes="about seven minutes",
)
