"""``outlast bench``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from outlast.cli.main import HELP, CommandGroup, ending_on_signals
from outlast.errors import ExitReason, OutlastError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Benchmark:
    """One of the benchmarks, for its help; ``outlast.bench`` has a module of its name."""

    name: str
    summary: str
    text: str
    """What is measured."""
    takes: str
    repeats: int = 5
    """Rounds that count unless others are asked for."""
    sized: bool = False
    """It moves a state whose size can be chosen."""
    example: str = ""


_BENCHMARKS = (
    _Benchmark(
        name="heartbeat",
        summary="A heartbeat, and entering and leaving a section.",
        text="A heartbeat, beside TCPStore.set on the same machine; entering and leaving a section. In a worker "
        "process, on a board that another process holds, as under `outlast run`.",
        takes="seconds",
    ),
    _Benchmark(
        name="restart",
        summary="From a killed rank to all ranks' next all-reduce.",
        text="From SIGKILL of one of 2 and of 4 ranks until all have finished an all-reduce in the next cycle, beside "
        "torchrun; how soon a death and a hang are noticed.",
        takes="about two minutes",
    ),
    _Benchmark(
        name="inprocess",
        summary="From a fault to the function restarted in process.",
        text="From an exception, a kill and three kinds of hang until four ranks are back in the function, beside "
        "nvidia-resiliency-ext where it is installed; what the wrapper costs when nothing is wrong.",
        takes="about six minutes, with the peer ten",
    ),
    _Benchmark(
        name="rendezvous",
        summary="Up to 512 agents meet on this machine.",
        text="64, 256 and 512 agents meet, beside torchrun's c10d rendezvous. The agents are simulated and start no "
        "workers.",
        takes="about half a minute",
    ),
    _Benchmark(
        name="save",
        summary="What a save costs training, and when it is durable.",
        text="How long training waits in a save, how much its steps slow down while it is written, and how long until "
        "it is durable, beside torch.distributed.checkpoint and others. Writes to TMPDIR: name a real disk.",
        takes="about five minutes",
        repeats=7,
        sized=True,
        example="TMPDIR=/nvme outlast bench save",
    ),
    _Benchmark(
        name="load",
        summary="From files or memory to live tensors, verified.",
        text="From files, and from the memory of a writer that outlived its process, to live tensors, every byte "
        "verified, beside torch.load and torch.distributed.checkpoint. Writes to TMPDIR: name a real disk.",
        takes="about a minute",
        repeats=7,
        sized=True,
        example="TMPDIR=/nvme outlast bench load",
    ),
    _Benchmark(
        name="replica",
        summary="A shard fetched from another node's writer, verified.",
        text="A shard fetched from another writer over loopback, every byte verified, beside gloo's send and recv of "
        "the same bytes.",
        takes="about half a minute",
        repeats=7,
        sized=True,
    ),
    _Benchmark(
        name="numerics",
        summary="Digests of replicas; what judging a step costs.",
        text="Digests of 512 MiB of bfloat16 on one core, beside torch.hash_tensor; how much longer a step of two "
        "ranks takes when its loss is judged and nothing is wrong.",
        takes="about a minute",
    ),
    _Benchmark(
        name="straggler",
        summary="What timing a step's sections costs.",
        text="Timing a step with three sections, beside torch's record_function; a report on slow ranks.",
        takes="seconds",
    ),
    _Benchmark(
        name="ray",
        summary="From an actor's death or hang to the next step.",
        text="From SIGKILL of an actor until its group's next step has returned, beside Ray Train's restart; how soon "
        "a hang is noticed. Needs outlast[ray].",
        takes="about seven minutes",
    ),
)


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


def _command(benchmark: _Benchmark) -> click.Command:
    """Return the command of a benchmark."""
    name = benchmark.name

    def measure(as_json: bool, repeats: int, tensors: int | None = None) -> int:
        return _measure(name, as_json=as_json, repeats=repeats, tensors=tensors)

    measure.__doc__ = (
        f"{benchmark.text}\n\nTakes {benchmark.takes}. Exit code 0: every bar is kept; 1: one is missed, or could not "
        "be measured."
    )
    options: list[Callable[[Any], Any]] = [
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
        click.option(
            "--repeats",
            type=click.IntRange(min=1),
            default=benchmark.repeats,
            show_default=True,
            metavar="N",
            help="Rounds that count; medians are shown.",
        ),
    ]
    if benchmark.sized:
        options.append(
            click.option(
                "--tensors",
                type=click.IntRange(min=1),
                metavar="N",
                help="Size of the state, in tensors of 16 MiB; default 64, which the bars are for.",
            )
        )
    examples = [f"outlast bench {name}", benchmark.example, f"outlast bench {name} --repeats 9 --json | jq .bars"]
    lines = "\n".join(f"  {line}" for line in examples if line)
    command = click.command(
        name, context_settings=HELP, short_help=benchmark.summary, epilog=f"\b\nExamples:\n{lines}\n"
    )
    function: Any = measure
    for option in reversed(options):
        function = option(function)
    return command(function)


for _benchmark in _BENCHMARKS:
    bench.add_command(_command(_benchmark))


def _measure(name: str, *, as_json: bool, repeats: int, tensors: int | None) -> int:
    from rich.console import Console

    size = {} if tensors is None else {"num_tensors": tensors}
    module = importlib.import_module(f"outlast.bench.{name}")

    def progress(line: str) -> None:
        click.echo(f"[bench {name}] {line}", err=True)

    try:
        with ending_on_signals():
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
