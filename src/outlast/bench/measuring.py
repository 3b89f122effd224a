"""How benchmarks measure: rounds in which ours and the peer's take turns, in this process or in processes that measure.

What the machine does meanwhile then meets both alike. The first round is dropped: caches and imports are cold in it.

A process that measures runs one function, which its command line names: ``python -m outlast.bench.measuring
MODULE:FUNCTION ROUNDS ARGUMENT...``. It yields what each round gave, values by name; each round is printed as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from outlast import clock, env
from outlast.decoding import from_json
from outlast.errors import OutlastError
from outlast.testing.ranks import RankProcesses

__all__ = [
    "GROUP_TIMEOUT_S",
    "ONE_THREAD",
    "Mark",
    "MarkWriter",
    "MeasuredRounds",
    "Progress",
    "describe_place",
    "measure_in_process",
    "measure_in_two_ranks",
    "median",
    "plain_environment",
    "process_group",
    "read_marks",
    "run_rounds",
    "timed",
    "worker_command",
]

T = TypeVar("T")
Progress = Callable[[str], None]
"""Is called with a line of progress, for people."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
GROUP_TIMEOUT_S = 60.0
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class MeasuredRounds:
    """What was measured, round by round.

    Args:
        rounds: Values by name; a round may lack what could not be measured.
    """

    def __init__(self, rounds: Sequence[Mapping[str, float]]) -> None:
        self._rounds = rounds

    def __contains__(self, name: str) -> bool:
        return all(name in one for one in self._rounds)

    def median(self, name: str) -> float | None:
        """Return the median of a measure; ``None``: it was not measured."""
        return median([one[name] for one in self._rounds]) if name in self else None

    def ratio(self, ours: str, peer: str) -> float | None:
        """Return the median over the rounds of ours as a ratio to the peer's of the same round."""
        if ours not in self or peer not in self:
            return None
        return median([one[ours] / one[peer] for one in self._rounds])


def run_rounds(measures: Mapping[str, Callable[[], T]], *, repeats: int, progress: Progress) -> dict[str, list[T]]:
    """Run every measure once a round, in the given order, and return what each gave.

    Args:
        measures: What is measured, by name.
        repeats: Rounds that count; one more goes before them and is dropped.
        progress: Is called with a line for every measure.

    Returns:
        Lists of ``repeats`` entries.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(repeats + 1):
        for name, measure in measures.items():
            value = measure()
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            progress(f"round {number}/{repeats}: {name}: {shown}{_dropped(number)}")
            if number > 0:
                found[name].append(value)
    return found


def measure_in_process(
    work: Callable[..., Iterator[Mapping[str, float]]],
    *arguments: object,
    repeats: int,
    progress: Progress,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> MeasuredRounds:
    """Measure ``repeats`` rounds, and one before them that is dropped, in a process of their own.

    Args:
        work: A module's function that is called with the number of rounds and the arguments, as text.
        arguments: Its arguments.
        repeats: Rounds that count.
        progress: Is called with a line for every round.
        timeout_s: Longest time for all of it.
        variables: What to add to the environment.

    Raises:
        OutlastError: It failed, or was too slow.

    Blocks: up to ``timeout_s``.
    """
    process = subprocess.Popen(
        worker_command(work, repeats + 1, *arguments),
        env={**plain_environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    found: list[Mapping[str, float]] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(_read_round(line, len(found), repeats, progress))
        code = process.wait()
    except ValueError as error:
        raise OutlastError(f"{_name_of(work)} printed what is no round ({error}); its output is above") from error
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if code or len(found) != repeats + 1:
        raise OutlastError(
            f"{_name_of(work)} ended with exit code {code} after {len(found)} rounds; its output is above"
        )
    return MeasuredRounds(found[1:])


def measure_in_two_ranks(
    work: Callable[..., Iterator[Mapping[str, float]]],
    *arguments: object,
    repeats: int,
    progress: Progress,
    timeout_s: float,
) -> MeasuredRounds:
    """Measure as :func:`measure_in_process` does, in two ranks with one thread each; rank 0 reports the rounds.

    Raises:
        OutlastError: A rank failed, or was too slow; the message holds the end of its output.

    Blocks: up to ``timeout_s``.
    """
    deadline_s = clock.now_s() + timeout_s
    words = [_name_of(work), str(repeats + 1), *map(str, arguments)]
    with RankProcesses("outlast.bench.measuring", *words, world_size=2, module=True) as ranks:
        found = []
        for number in range(repeats + 1):
            line = ranks.next_line(0, deadline_s - clock.now_s(), containing='{"')
            found.append(_read_round(line, number, repeats, progress))
        if any(codes := ranks.wait(max(0.0, deadline_s - clock.now_s()))):
            raise OutlastError(f"{words[0]} ended with exit codes {codes}\n{ranks.tails()}")
    return MeasuredRounds(found[1:])


def worker_command(work: Callable[..., Any], *arguments: object) -> list[str]:
    """Return the command of a process that runs a module's function with arguments, as text."""
    return [sys.executable, "-m", "outlast.bench.measuring", _name_of(work), *map(str, arguments)]


def plain_environment() -> dict[str, str]:
    """Return the environment without variables of launchers: a process in it is one rank, with no agent."""
    return {
        name: value
        for name, value in env.environ().items()
        if name not in _OF_LAUNCHERS and not name.startswith(("OUTLAST_", "TORCHELASTIC_", "SLURM_"))
    }


@contextmanager
def process_group() -> Iterator[None]:
    """Be in a gloo group of the ranks of :func:`measure_in_two_ranks`, on one thread each. Collective: both ranks."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    yield
    dist.barrier()
    dist.destroy_process_group()


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a process, as it wrote it down."""

    name: str
    rank: int
    iteration: int
    at_ns: int
    """Monotonic nanoseconds."""
    pid: int
    facts: Mapping[str, Any] = {}


class MarkWriter:
    """Write down what happens in this process, each a line in a file of the process, which may be killed at any time.

    Args:
        folder: Where the processes' files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, rank: int, iteration: int, **facts: Any) -> None:
        """Write down that something happened now."""
        pid = os.getpid()
        mark = Mark(name=name, rank=rank, iteration=iteration, at_ns=clock.now_ns(), pid=pid, facts=facts)
        with open(self._folder / f"marks-{pid}.jsonl", "ab", buffering=0) as file:
            file.write(msgspec.json.encode(mark) + b"\n")


def read_marks(folder: Path) -> list[Mark]:
    """Return all marks of a folder, by time; a line that its writer's death cut short is left out."""
    lines = [line for path in sorted(folder.glob("marks-*.jsonl")) for line in path.read_bytes().splitlines(True)]
    return sorted((from_json(line, Mark) for line in lines if line.endswith(b"\n")), key=lambda mark: mark.at_ns)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that ``work`` took, and what it returned."""
    begin_ns = clock.now_ns()
    result = work()
    return (clock.now_ns() - begin_ns) / 1e9, result


def median(values: Iterable[float]) -> float:
    """Return the median of at least one value."""
    return float(statistics.median(values))


def describe_place(folder: Path) -> str:
    """Return a line on the file system under ``folder``."""
    done = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)], capture_output=True, text=True, timeout=10, check=False
    )
    return f"files in {folder} ({done.stdout.strip() or 'unknown file system'})"


def _name_of(work: Callable[..., Any]) -> str:
    return f"{work.__module__}:{work.__qualname__}"


def _dropped(number: int) -> str:
    return " (dropped: the first)" if number == 0 else ""


def _read_round(line: str, number: int, repeats: int, progress: Progress) -> Mapping[str, float]:
    found: dict[str, float] = json.loads(line)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    progress(f"round {number}/{repeats}: {shown}{_dropped(number)}")
    return found


def main() -> None:
    """Run the function that the command line names; print each round that it yields, on rank 0."""
    module, _, name = sys.argv[1].partition(":")
    is_reporting = env.environ().get("RANK", "0") == "0"
    for found in getattr(importlib.import_module(module), name)(*sys.argv[2:]) or ():
        if is_reporting:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
