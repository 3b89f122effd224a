"""``outlast bench``."""

from __future__ import annotations

import importlib
import inspect
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from outlast.bench.results import NOISE_PCT
from outlast.cli.main import (
    CommandGroup,
    complete_folder,
    echo,
    ending_on_signals,
    failing_in_one_line,
    json_option,
    open_console,
    print_json,
)
from outlast.errors import ConfigError, ExitReason


@click.group("bench", cls=CommandGroup)
def bench() -> None:
    """Measure outlast beside its peers.

    Both are measured in turns in one run; the first round is dropped. How far it is goes to standard error.
    Leave the machine alone meanwhile: what else runs on it is measured too.

    Exit code 0: every bar is kept; 1: one is missed, or could not be measured.

    Examples:
      outlast bench heartbeat
      outlast bench restart --repeats 9
      outlast bench all --results results
      TMPDIR=/nvme outlast bench save
      outlast bench rendezvous --json | jq '.bars[] | {name, value, bar, ok}'
      outlast bench save --help
    """


_NUMBER = click.IntRange(min=1)
_SUITE: dict[str, tuple[float, int]] = {}
"""Each benchmark, in the order of the suite: seconds that it takes, and rounds that it has by default."""


def _benchmark(
    *,
    takes: str,
    takes_s: float,
    repeats: int = 5,
    sized: bool = False,
    size: str = "64",
    ranked: bool = False,
    crowded: bool = False,
    example: str = "",
) -> Callable[[Any], Any]:
    """Make a command of a function's name and docstring; it runs the module of that name in ``outlast.bench``.

    Args:
        takes: How long it takes, in words.
        takes_s: The same in seconds, for the suite's progress.
        repeats: Rounds that count unless others are asked for.
        sized: It moves a state whose size can be chosen.
        size: Its default size.
        ranked: It simulates ranks whose number can be chosen.
        crowded: It can have many light actors instead.
        example: One more example for its help.
    """

    def add(function: Callable[[], None]) -> Any:
        name = function.__name__
        _SUITE[name] = (takes_s, repeats)
        summary, _, text = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        codes = "Exit code 0: every bar is kept; 1: one is missed, or could not be measured."
        examples = [f"outlast bench {name}", example, f"outlast bench {name} --repeats 9 --json | jq .bars"]
        measure: Any = partial(_measure, name)
        if sized:
            tensors = f"Size of the state, in tensors of 16 MiB; default {size}, which the bars are for."
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
        echo(f"[bench {name}] {line}", err=True)

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


@_benchmark(takes="seconds", takes_s=10)
def heartbeat() -> None:
    """A heartbeat, and entering and leaving a section.

    A heartbeat, beside TCPStore.set on the same machine; entering and leaving a section. In a worker process, on a
    board that another process holds, as under `outlast run`.
    """


@_benchmark(takes="about two minutes", takes_s=120)
def restart() -> None:
    """From a killed rank to all ranks' next all-reduce.

    From SIGKILL of one of 2 and of 4 ranks until all have finished an all-reduce in the next cycle, beside
    torchrun; how soon a death and a hang are noticed.
    """


@_benchmark(takes="about six minutes, with the peer ten", takes_s=360)
def inprocess() -> None:
    """From a fault to the function restarted in process.

    From an exception, a kill and three kinds of hang until four ranks are back in the function, beside
    nvidia-resiliency-ext where it is installed; what the wrapper costs when nothing is wrong.
    """


@_benchmark(takes="about two minutes", takes_s=120)
def rendezvous() -> None:
    """Up to 4,096 agents meet on this machine.

    64, 256 and 512 agents meet, beside torchrun's c10d rendezvous; 2,048 and 4,096 meet and lose 64 at once; how
    much memory their coordinator takes. The agents are simulated and start no workers.
    """


@_benchmark(takes="about five minutes", takes_s=300, repeats=7, sized=True, example="TMPDIR=/nvme outlast bench save")
def save() -> None:
    """What a save costs training, and when it is durable.

    How long training waits in a save, how much its steps slow down while it is written, and how long until it is
    durable, beside torch.distributed.checkpoint and others. Writes to TMPDIR: name a real disk.
    """


@_benchmark(takes="about a minute", takes_s=60, repeats=7, sized=True, example="TMPDIR=/nvme outlast bench load")
def load() -> None:
    """From files or memory to live tensors, verified.

    From files, and from the memory of a writer that outlived its process, to live tensors, every byte verified,
    beside torch.load and torch.distributed.checkpoint. Writes to TMPDIR: name a real disk.
    """


@_benchmark(takes="about half a minute", takes_s=30, repeats=7, sized=True)
def replica() -> None:
    """A shard fetched from another node's writer, verified.

    A shard fetched from another writer over loopback, every byte verified, beside gloo's send and recv of the same
    bytes.
    """


@_benchmark(takes="about three minutes", takes_s=180, ranked=True, example="outlast bench commit --ranks 300")
def commit() -> None:
    """What a save of 16,384 ranks costs rank 0.

    From the answers of 16,384 simulated ranks of an 80-layer model under FSDP with Adam to the outcome that rank 0
    posts; how large the manifest is that it writes. The same for the global tier with 1,024 ranks. Writes about 2 GiB
    to TMPDIR.
    """


@_benchmark(takes="about a minute", takes_s=60)
def numerics() -> None:
    """Digests of replicas; what judging a step costs.

    Digests of 512 MiB of bfloat16 on one core, beside torch.hash_tensor; how much longer a step of two ranks takes
    when its loss is judged and nothing is wrong.
    """


@_benchmark(takes="seconds", takes_s=15)
def straggler() -> None:
    """What timing a step's sections costs.

    Timing a step with three sections, beside torch's record_function; a report on slow ranks.
    """


@_benchmark(takes="about seven minutes", takes_s=420, crowded=True, example="outlast bench ray --actors 256")
def ray() -> None:
    """From an actor's death or hang to the next step.

    From SIGKILL of an actor until its group's next step has returned, beside Ray Train's restart; how soon a hang
    is noticed. Needs outlast[ray].
    """


@_benchmark(takes="about five minutes", takes_s=300)
def adapters() -> None:
    """What a trainer's adapter costs a step.

    How much longer a step of Lightning's Trainer and of Hugging Face's takes with the adapter when nothing is wrong:
    one rank and two, on CPU, beside the bare framework. Needs outlast[lightning] and outlast[transformers].
    """


@_benchmark(takes="about five minutes", takes_s=300, repeats=3, sized=True, size="1192 (20 GB)")
def gpu() -> None:
    """Saves, loads, restarts and digests on a GPU.

    How long training waits in a save, and in a load, of a state on the GPU, beside pinned copies of as many bytes and
    torch.distributed.checkpoint; from SIGKILL to the next step on the GPU, beside torchrun; an exception recovered
    in process with NCCL; what watches a device. Needs a GPU, and three times the state's size of memory.
    """


class _Names(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Names of benchmarks, separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(name for one in str(value).split(",") if (name := one.strip()))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{name}") for name in _SUITE if name.startswith(last)]


@bench.command("all")
@click.option("--repeats", type=_NUMBER, metavar="N", help="Rounds of each that count; default: what each has alone.")
@click.option("--only", type=_Names(), default=(), metavar="A,B", help="Only these benchmarks.")
@click.option("--skip", type=_Names(), default=(), metavar="A,B", help="All but these benchmarks.")
@click.option(
    "--results",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    shell_complete=complete_folder,
    help="Store each result as DIR/NAME.json, and add a line to DIR/history.jsonl.",
)
@json_option
def measure_all(
    *, repeats: int | None, only: tuple[str, ...], skip: tuple[str, ...], folder: Path | None, as_json: bool
) -> int:
    """Measure everything, one benchmark after another.

    Each has a process of its own. One that fails, hangs, or lacks a package is shown as not measured, with the reason,
    and the others are measured all the same. Takes about half an hour; Ctrl-C keeps what was measured until then.

    Exit code 0: every bar that was measured is kept; 1: one is missed, or a benchmark failed (one that lacks a package
    has not failed); 130: Ctrl-C.

    Examples:
      outlast bench all
      outlast bench all --only restart,save --repeats 9
      outlast bench all --skip ray,adapters --results results
      outlast bench all --json | jq '.bars[] | select(.ok | not)'
    """
    from outlast.bench.results import append_record
    from outlast.bench.suite import Suite, SuiteBench, render_record, select

    benches = [
        SuiteBench.of_command_line(name, takes_s=_SUITE[name][0], default_repeats=_SUITE[name][1], repeats=repeats)
        for name in select(list(_SUITE), only=only, skip=skip)
    ]
    if folder is not None:
        _make_writable(folder)
    with failing_in_one_line("a result cannot be stored: ", OSError):
        suite = Suite(benches, folder=folder, tell=partial(echo, err=True))
        code: int | None = None
        with ending_on_signals():
            try:
                suite.run()
            except KeyboardInterrupt:
                code = 128 + signal.SIGINT
            except SystemExit as ended:  # SIGTERM, SIGHUP
                code = int(ended.code or 0)
        record = suite.record()
        if folder is not None and record.bars:
            append_record(folder, record)
    if as_json:
        print_json(record, on_one_line=True)
    else:
        open_console(width=140).print(render_record(record))
    if code is not None:
        return code
    return int(ExitReason.FINISHED if record.ok else ExitReason.FAILED)


def _make_writable(folder: Path) -> None:
    """Make the folder of the results; what is wrong with it must not be found out half an hour later.

    Raises:
        ConfigError: It cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--results: {folder} cannot be written to ({error.strerror}); name another folder") from None


@bench.command("history")
@click.argument(
    "folder", type=click.Path(path_type=Path), metavar="[DIR]", required=False, shell_complete=complete_folder
)
@click.option("--bar", "only", metavar="NAME", help="Only this figure: FIGURE, or BENCH.FIGURE.")
@click.option(
    "--noise",
    "noise_pct",
    type=click.FloatRange(min=0),
    default=NOISE_PCT,
    show_default=True,
    metavar="PCT",
    help="A change of up to so many per cent is not marked; of a figure in per cent, so many per cent of its bar.",
)
@json_option
def history(*, folder: Path | None, only: str | None, noise_pct: float, as_json: bool) -> int:
    """Show how each figure moved from run to run of `outlast bench all`.

    DIR is what --results named; default: docs/results of the checkout that outlast is run from. Runs on the same kind
    of machine (processor, cores, memory) are compared with each other: the newest values, the change from the run
    before that measured the figure, and from the best of all. A change that exceeds the noise is marked as better or
    worse.

    Exit code 0: it could be shown, whatever it shows; 2: there is no history, or no such figure.

    Examples:
      outlast bench history
      outlast bench history results --bar restart.restart_vs_torchrun_4
      outlast bench history --noise 10 --json | jq '.machines[].bars[] | select(.moved == "worse")'
    """
    from outlast.bench.results import compare_records, read_history, render_history
    from outlast.bench.suite import find_checkout
    from outlast.wording import count

    if folder is None:
        checkout = find_checkout()
        if checkout is None:
            raise ConfigError("outlast is not run from a checkout; name the folder that --results of bench all named")
        folder = checkout / "docs" / "results"
    records, num_torn = read_history(folder)
    if num_torn:
        echo(f"{folder}: {count(num_torn, 'line')} of the history cut short, left out", err=True)
    machines = compare_records(records, noise_pct=noise_pct, only=only)
    if as_json:
        fields = {"noise_pct": noise_pct, "num_torn": num_torn, "machines": [one.to_fields() for one in machines]}
        print_json(fields, on_one_line=True)
    else:
        for one in machines:
            open_console(width=140).print(render_history(one, noise_pct))
    return int(ExitReason.FINISHED)
