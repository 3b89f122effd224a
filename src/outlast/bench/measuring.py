"""A process that measures: it prints one JSON object a round, seconds by name."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from outlast import clock, env
from outlast.bench.rounds import Say, median
from outlast.errors import OutlastError

__all__ = ["Rounds", "describe_place", "measure_in_process", "plain_environment", "timed"]

T = TypeVar("T")
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class Rounds:
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


def plain_environment() -> dict[str, str]:
    """Return the environment without what a launcher says: a process in it is one rank, with no agent."""
    return {
        name: value
        for name, value in env.environ().items()
        if name not in _OF_LAUNCHERS and not name.startswith(("OUTLAST_", "TORCHELASTIC_", "SLURM_"))
    }


def measure_in_process(
    module: str,
    arguments: Sequence[str],
    *,
    repeats: int,
    say: Say,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> Rounds:
    """Run a module that measures ``repeats`` rounds and one before them, which is dropped.

    Args:
        module: What to run; its first argument is the number of rounds.
        arguments: Its others.
        repeats: Rounds that count.
        say: Hears of every round.
        timeout_s: Longest time for all of it.
        variables: What to add to the environment.

    Raises:
        OutlastError: It failed, or was too slow.

    Blocks: up to ``timeout_s``.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(repeats + 1), *arguments],
        env={**plain_environment(), **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    found: list[dict[str, float]] = []
    try:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            found.append(json.loads(line))
            told = ", ".join(f"{name} {value:.4g}" for name, value in found[-1].items())
            say(f"round {number}/{repeats}: {told}{' (dropped: the first)' if number == 0 else ''}")
        code = process.wait()
    except ValueError as error:
        raise OutlastError(f"{module} printed what is no round ({error}); its output is above") from error
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if code or len(found) != repeats + 1:
        raise OutlastError(f"{module} ended with exit code {code} after {len(found)} rounds; its output is above")
    return Rounds(found[1:])


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that ``work`` took, and what it returned."""
    begin_ns = clock.now_ns()
    result = work()
    return (clock.now_ns() - begin_ns) / 1e9, result


def describe_place(folder: Path) -> str:
    """Return a line on the file system under ``folder``."""
    done = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)], capture_output=True, text=True, timeout=10, check=False
    )
    return f"files in {folder} ({done.stdout.strip() or 'unknown file system'})"
