"""Measurement in rounds.

Outlast and the peer take turns in rounds, so that other load affects both equally. The first round is dropped, as
caches and imports are cold. Rounds run in this process (:func:`run_rounds`), or in processes that run one function
(:func:`measure_rounds`): ``python -m benchmarks.measuring MODULE:FUNCTION ROUNDS ARGUMENT...``. The function yields the
values of each round by name, which are printed as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from outlast import clock, env
from outlast.decoding import from_json, parse_json
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.simulate.benchmark_results import Bar
from outlast.testing.ranks import RankProcesses

T = TypeVar("T")
Progress = Callable[[str], None]
"""Called with a line of progress, for people."""
Measure = Callable[..., Iterator[Mapping[str, float]]]
"""Called in a measuring process with the number of rounds and arguments, as text; yields rounds by name."""
GROUP_TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[1]
IMPORTABLE = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.environ().get("PYTHONPATH")]))}
"""For a process that imports this package from any working directory."""
NO_RANK = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
"""Variables to remove for a process that is not a rank of a group."""
_ROUND = "benchmark round: "
"""Prefix of a round's values in a measuring process's output."""


# -- rounds ----------------------------------------------------------------------------------------------------------


def describe_place(folder: Path) -> str:
    done = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)], capture_output=True, text=True, timeout=10, check=False
    )
    return f"files in {folder} ({done.stdout.strip() or 'unknown file system'})"


class MeasuredRounds:
    """The measured values, round by round; a round may lack values that could not be measured."""

    def __init__(self, rounds: Sequence[Mapping[str, float]]) -> None:
        self._rounds = rounds

    def __contains__(self, name: str) -> bool:
        return all(name in one for one in self._rounds)

    def __getitem__(self, name: str) -> float:
        """Return the median of a measure that all rounds have."""
        return median([one[name] for one in self._rounds])

    def median(self, name: str) -> float | None:
        """Return the median of a measure; ``None``: it was not measured."""
        return median([one[name] for one in self._rounds]) if name in self else None

    def ratio(self, ours: str, peer: str) -> float | None:
        """Return the median ratio of one measure to the peer's in the same round."""
        if ours not in self or peer not in self:
            return None
        return median([one[ours] / one[peer] for one in self._rounds])

    def bar(self, name: str, ours: str, unit: str, bar: float, **options: Any) -> Bar:
        """Return the bar of a measure's median; ``called`` and ``peer`` are the peer's names for people and in the
        rounds."""
        called, peer = options.pop("called", None), options.pop("peer", None)
        return Bar(name, self.median(ours), unit, bar, called, peer and self.median(peer), **options)

    def ratio_bar(self, name: str, ours: str, peer: str, bar: float, called: str) -> Bar:
        """Return the bar of the ratio of two measures in seconds; ``called`` is the peer's name for people."""
        return Bar(name, self.ratio(ours, peer), "x", bar, f"{called} (s)", self.median(peer))


def run_rounds(measures: Mapping[str, Callable[[], T]], *, repeats: int, progress: Progress) -> dict[str, list[T]]:
    """Run every measure once a round, in the given order, and return its results.

    Args:
        measures: Measures by name.
        repeats: Counted rounds; one more precedes them and is dropped.
        progress: Called with a line for every measure.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(repeats + 1):
        for name, measure in measures.items():
            value = measure()
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            progress(describe_round(number, repeats, f"{name}: {shown}"))
            if number > 0:
                found[name].append(value)
    return found


def describe_round(number: int, repeats: int, text: str) -> str:
    """Return a line of progress; round 0 is the dropped one."""
    return f"round {number}/{repeats}: {text}{'' if number else ' (dropped: the first)'}"


def measure_rounds(
    work: Measure,
    *arguments: object,
    repeats: int,
    progress: Progress,
    timeout_s: float,
    num_ranks: int = 1,
    one_thread: bool = True,
    variables: Mapping[str, str | None] | None = None,
) -> MeasuredRounds:
    """Measure ``repeats`` rounds, and one before them that is dropped, in separate processes.

    Args:
        work: A module's function that measures; rank 0 reports the rounds.
        arguments: Its arguments.
        repeats: Counted rounds.
        progress: Called with a line for every round.
        timeout_s: Limit for all rounds together.
        num_ranks: Ranks of a group; 1: one process without any launcher's variables.
        one_thread: Give each process one OpenMP thread; otherwise as many as this process has.
        variables: Additions to the environment.

    Raises:
        OutlastError: A process failed, or was too slow; the message contains the end of its output.

    Blocks: up to ``timeout_s``.
    """
    deadline_s = clock.now_s() + timeout_s
    if not one_thread:
        variables = {"OMP_NUM_THREADS": env.environ().get("OMP_NUM_THREADS"), **(variables or {})}
    found: list[Mapping[str, float]] = []
    with worker_ranks(work, repeats + 1, *arguments, num_ranks=num_ranks, variables=variables) as ranks:
        try:
            for number in range(repeats + 1):
                line = ranks.next_line(0, deadline_s - clock.now_s(), containing=_ROUND)
                values: dict[str, float] = parse_json(line.partition(_ROUND)[2])
                found.append(values)
                shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                progress(describe_round(number, repeats, shown))
            codes = ranks.wait(max(0.0, deadline_s - clock.now_s()))
        except DeadlineExceeded as error:
            raise OutlastError(f"{_name_of(work)} stopped after {len(found)} rounds: {error}") from error
        if any(codes):
            raise OutlastError(f"{_name_of(work)} ended with exit codes {codes}\n{ranks.tails()}")
    return MeasuredRounds(found[1:])


def worker_ranks(
    work: Callable[..., Any],
    *arguments: object,
    num_ranks: int = 1,
    variables: Mapping[str, str | None] | None = None,
    **options: Any,
) -> RankProcesses:
    """Return processes that run a module's function; see :class:`RankProcesses`.

    Args:
        work: The function.
        arguments: Its arguments, passed as text.
        num_ranks: Ranks of a group; 1: one process without any launcher's variables.
        variables: Changes of the environment; ``None`` removes a variable.
        options: Further arguments of :class:`RankProcesses`.
    """
    own = {**(NO_RANK if num_ranks == 1 else {}), **(variables or {})}
    words = [_name_of(work), *map(str, arguments)]
    return RankProcesses(
        "benchmarks.measuring",
        *words,
        world_size=num_ranks,
        module=True,
        environment=IMPORTABLE,
        environments=[own] * num_ranks,
        **options,
    )


def launched_ranks(
    run_dir: Path, work: Callable[..., Any], *arguments: object, num_ranks: int, **options: Any
) -> RankProcesses:
    """Return the agent of ``outlast run`` whose workers run a module's function; see :func:`worker_ranks`."""
    words = (f"--nproc-per-node={num_ranks}", "-m", "benchmarks.measuring", _name_of(work), *map(str, arguments))
    return launcher("outlast", "run", f"--run-dir={run_dir}", *words, **options)


def launcher(
    module: str, *words: str, variables: Mapping[str, str | None] | None = None, **options: Any
) -> RankProcesses:
    """Return a launcher, ``python -m MODULE WORDS``, that can be ended with all its workers."""
    variables = {**IMPORTABLE, **NO_RANK, **(variables or {})}
    return RankProcesses(module, *words, world_size=1, module=True, environments=[variables], **options)


def _name_of(work: Callable[..., Any]) -> str:
    return f"{work.__module__}:{work.__qualname__}"


@contextmanager
def process_group() -> Iterator[None]:
    """Join a gloo group of all ranks of :func:`measure_rounds`, on one thread each. Collective: all ranks."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    yield
    dist.barrier()
    dist.destroy_process_group()


# -- within a round --------------------------------------------------------------------------------------------------


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds and the result of ``work``."""
    begin_ns = clock.now_ns()
    result = work()
    return (clock.now_ns() - begin_ns) / 1e9, result


def seconds_per_call(call: Callable[[], object], num_calls: int) -> float:
    """Return the mean seconds of several calls in a row."""
    begin_ns = clock.now_ns()
    for _ in repeat(None, num_calls):
        call()
    return (clock.now_ns() - begin_ns) / num_calls / 1e9


def take_turns(
    kinds: Mapping[str, Callable[[], float]], num_turns: int, order: random.Random | None = None
) -> dict[str, list[float]]:
    """Measure each kind once a turn and return the results.

    Args:
        kinds: Measures by name.
        num_turns: Number of turns.
        order: Draws each turn's order, equally on all ranks; ``None``: as given.
    """
    found: dict[str, list[float]] = {name: [] for name in kinds}
    names = list(kinds)
    for _ in range(num_turns):
        if order is not None:
            order.shuffle(names)
        for name in names:
            found[name].append(kinds[name]())
    return found


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def cost_in_percent(ours: Sequence[float], plain: Sequence[float]) -> float:
    """Return by how many percent steps are longer than the plain ones, turn by turn."""
    return 100 * median(a - b for a, b in zip(ours, plain, strict=True)) / median(plain)


# -- marks -----------------------------------------------------------------------------------------------------------


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """An event in a process, as it recorded it."""

    name: str
    rank: int
    iteration: int
    at_ns: int
    """Monotonic nanoseconds."""
    pid: int
    facts: Mapping[str, Any] = {}


class MarkWriter:
    """Record events of this process as lines of a file; the process may be killed at any time."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def __call__(self, name: str, rank: int, iteration: int, **facts: Any) -> None:
        """Record an event now."""
        pid = os.getpid()
        mark = Mark(name=name, rank=rank, iteration=iteration, at_ns=clock.now_ns(), pid=pid, facts=facts)
        with open(self._folder / f"marks-{pid}.jsonl", "ab", buffering=0) as file:
            file.write(msgspec.json.encode(mark) + b"\n")


def read_marks(folder: Path) -> list[Mark]:
    """Return all marks of a folder, by time, without lines that their writer's death cut short."""
    lines = [line for path in sorted(folder.glob("marks-*.jsonl")) for line in path.read_bytes().splitlines(True)]
    return sorted((from_json(line, Mark) for line in lines if line.endswith(b"\n")), key=lambda mark: mark.at_ns)


def select_marks(marks: Iterable[Mark], name: str, iteration: int) -> list[Mark]:
    return [one for one in marks if (one.name, one.iteration) == (name, iteration)]


def main() -> None:
    """Run the function that the command line names; print each round that it yields, on rank 0."""
    module, _, name = sys.argv[1].partition(":")
    is_reporting = env.environ().get("RANK", "0") == "0"
    for found in getattr(importlib.import_module(module), name)(*sys.argv[2:]) or ():
        if is_reporting:
            print(_ROUND + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
