"""``outlast bench``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from outlast.cli.main import CommandGroup, ending_on_signals, failing_in_one_line, json_option, open_console
from outlast.errors import ExitReason


@click.group("bench", cls=CommandGroup)
def bench() -> None:
    """Measure outlast beside its peers.

    Both are measured in turns in one run; the first round is dropped. How far it is goes to standard error.
    Leave the machine alone meanwhile: what else runs on it is measured too.

    Exit code 0: every bar is kept; 1: one is missed, or could not be measured.

    Examples:
      outlast bench heartbeat
      outlast bench restart --repeats 9
      TMPDIR=/nvme outlast bench save
      outlast bench rendezvous --json | jq '.bars[] | {name, value, bar, ok}'
      outlast bench save --help
    """


_NUMBER = click.IntRange(min=1)


def _benchmark(
    *, takes: str, repeats: int = 5, sized: bool = False, ranked: bool = False, crowded: bool = False, example: str = ""
) -> Callable[[Any], Any]:
    """Make a command of a function's name and docstring; it runs the module of that name in ``outlast.bench``.

    Args:
        takes: How long it takes.
        repeats: Rounds that count unless others are asked for.
        sized: It moves a state whose size can be chosen.
        ranked: It simulates ranks whose number can be chosen.
        crowded: It can have many light actors instead.
        example: One more example for its help.
    """

    def add(function: Callable[[], None]) -> Any:
        name = function.__name__
        summary, _, text = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        codes = "Exit code 0: every bar is kept; 1: one is missed, or could not be measured."
        examples = [f"outlast bench {name}", example, f"outlast bench {name} --repeats 9 --json | jq .bars"]
        measure: Any = partial(_measure, name)
        if sized:
            tensors = "Size of the state, in tensors of 16 MiB; default 64, which the bars are for."
            measure = click.option("--tensors", "num_tensors", type=_NUMBER, metavar="N", help=tensors)(measure)
        if ranked:
            ranks = "Simulated ranks; default 16384, which the bars are for."
            measure = click.option("--ranks", "num_ranks", type=_NUMBER, metavar="N", help=ranks)(measure)
        if crowded:
            actors = "Kill one of N light actors instead, and one of 16, of 64 and of 256 where N is more."
            measure = click.option("--actors", "num_actors", type=_NUMBER, metavar="N", help=actors)(measure)
        rounds = "Rounds that count; medians are shown."
        measure = click.option("--repeats", type=_NUMBER, default=repeats, show_default=True, metavar="N", help=rounds)(
            measure
        )
        return bench.command(
            name,
            short_help=summary,
            help=f"{text}\n\nTakes {takes}. {codes}",
            epilog="\n  ".join(["\b\nExamples:", *filter(None, examples)]) + "\n",
        )(json_option(measure))

    return add


def _measure(name: str, *, as_json: bool, repeats: int, **chosen: int | None) -> int:
    def progress(line: str) -> None:
        click.echo(f"[bench {name}] {line}", err=True)

    size = {name: number for name, number in chosen.items() if number is not None}
    with ending_on_signals(), failing_in_one_line():
        result = importlib.import_module(f"outlast.bench.{name}").measure(repeats=repeats, progress=progress, **size)
    if as_json:
        for note in result.notes:
            progress(note)
        click.echo(result.to_json())
    else:
        open_console(width=120).print(result.render())
    return int(ExitReason.FINISHED if result.ok else ExitReason.FAILED)


@_benchmark(takes="seconds")
def heartbeat() -> None:
    """A heartbeat, and entering and leaving a section.

    A heartbeat, beside TCPStore.set on the same machine; entering and leaving a section. In a worker process, on a
    board that another process holds, as under `outlast run`.
    """


@_benchmark(takes="about two minutes")
def restart() -> None:
    """From a killed rank to all ranks' next all-reduce.

    From SIGKILL of one of 2 and of 4 ranks until all have finished an all-reduce in the next cycle, beside
    torchrun; how soon a death and a hang are noticed.
    """


@_benchmark(takes="about six minutes, with the peer ten")
def inprocess() -> None:
    """From a fault to the function restarted in process.

    From an exception, a kill and three kinds of hang until four ranks are back in the function, beside
    nvidia-resiliency-ext where it is installed; what the wrapper costs when nothing is wrong.
    """


@_benchmark(takes="about two minutes")
def rendezvous() -> None:
    """Up to 4,096 agents meet on this machine.

    64, 256 and 512 agents meet, beside torchrun's c10d rendezvous; 2,048 and 4,096 meet and lose 64 at once; how
    much memory their coordinator takes. The agents are simulated and start no workers.
    """


@_benchmark(takes="about five minutes", repeats=7, sized=True, example="TMPDIR=/nvme outlast bench save")
def save() -> None:
    """What a save costs training, and when it is durable.

    How long training waits in a save, how much its steps slow down while it is written, and how long until it is
    durable, beside torch.distributed.checkpoint and others. Writes to TMPDIR: name a real disk.
    """


@_benchmark(takes="about a minute", repeats=7, sized=True, example="TMPDIR=/nvme outlast bench load")
def load() -> None:
    """From files or memory to live tensors, verified.

    From files, and from the memory of a writer that outlived its process, to live tensors, every byte verified,
    beside torch.load and torch.distributed.checkpoint. Writes to TMPDIR: name a real disk.
    """


@_benchmark(takes="about half a minute", repeats=7, sized=True)
def replica() -> None:
    """A shard fetched from another node's writer, verified.

    A shard fetched from another writer over loopback, every byte verified, beside gloo's send and recv of the same
    bytes.
    """


@_benchmark(takes="about three minutes", ranked=True, example="outlast bench commit --ranks 300")
def commit() -> None:
    """What a save of 16,384 ranks costs rank 0.

    From the answers of 16,384 simulated ranks of an 80-layer model under FSDP with Adam to the outcome that rank 0
    posts; how large the manifest is that it writes. The same for the global tier with 1,024 ranks. Writes about 2 GiB
    to TMPDIR.
    """


@_benchmark(takes="about a minute")
def numerics() -> None:
    """Digests of replicas; what judging a step costs.

    Digests of 512 MiB of bfloat16 on one core, beside torch.hash_tensor; how much longer a step of two ranks takes
    when its loss is judged and nothing is wrong.
    """


@_benchmark(takes="seconds")
def straggler() -> None:
    """What timing a step's sections costs.

    Timing a step with three sections, beside torch's record_function; a report on slow ranks.
    """


@_benchmark(takes="about seven minutes", crowded=True, example="outlast bench ray --actors 256")
def ray() -> None:
    """From an actor's death or hang to the next step.

    From SIGKILL of an actor until its group's next step has returned, beside Ray Train's restart; how soon a hang
    is noticed. Needs outlast[ray].
    """


@_benchmark(takes="about five minutes")
def adapters() -> None:
    """What a trainer's adapter costs a step.

    How much longer a step of Lightning's Trainer and of Hugging Face's takes with the adapter when nothing is wrong:
    one rank and two, on CPU, beside the bare framework. Needs outlast[lightning] and outlast[transformers].
    """
