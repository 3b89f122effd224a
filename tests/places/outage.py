"""Measure a training run during an outage of its durable tier: ``python tests/places/outage.py --minutes 15``.

Two nodes of one rank train under ``outlast run`` with default settings and a save every ten seconds, to a directory on
bindfs or to an S3 server. During a save bindfs or the server is stopped, and resumed after the outage. The result is
compared with the limits below and printed as JSON; the exit code is 1 if a limit is exceeded.

Everything runs in a process namespace and a mount namespace, so that a SIGKILL of this program ends every process and
removes every mount.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, os.fspath(Path(__file__).parent))

from broken_places import Bucket, Disk, Fault, processes_named, start_store
from trained_nodes import LIMIT_S, NODES, Step, TrainedNodes, newest_checkpoint

from outlast.incidents import EventKind

SAVE_S, STEP_S = 10.0, 0.1
INTERVAL = round(SAVE_S / STEP_S)
STATE_BYTES = 16 << 20
SAMPLE_S = 5.0
NUM_SAVES = 4
"""Saves before the outage and after it."""
NUM_STEPS_AFTER = 3
"""Steps after the start and the end of the outage that the second ratio omits."""
MAX_RATIO, MAX_SAVES, MAX_GROWTH = 2.0, 1.0, 1.5
"""Slowest step to median; saves until the newest checkpoint is durable again; memory during to before the outage."""


@dataclass(kw_only=True)
class Memory:
    """Maximum bytes of all nodes together in one part of the run."""

    writers_rss: int = 0
    """Of the checkpoint writers, including shared memory."""
    ranks_rss: int = 0
    shared: int = 0
    """Shared memory of the whole machine, including other programs."""

    def add(self, other: Memory) -> None:
        """Take the maximum of each value."""
        self.writers_rss = max(self.writers_rss, other.writers_rss)
        self.ranks_rss = max(self.ranks_rss, other.ranks_rss)
        self.shared = max(self.shared, other.shared)


@dataclass(kw_only=True)
class Result:
    """The cost of one outage."""

    place: str
    outage_s: float
    num_restarts: int
    num_lost: int
    """Iterations that were computed twice."""
    num_steps: int
    median_s: float
    slowest_s: float
    ratio: float
    """Slowest step to median, from the start of the outage to the end of the run."""
    ratio_apart: float
    """The same without the steps after the start and the end of the outage."""
    ratio_before: float
    """The same before the outage: the behaviour of this machine without a fault."""
    num_slow: int
    """Steps that exceeded the limit, from the start of the outage to the end of the run."""
    num_slow_at_saves: int
    """Slow steps within three steps after a save."""
    late_s: float
    """How late this idle program woke from a sleep.

    If the value is large, the machine was busy and the slowest step is not meaningful.
    """
    oldest_lag: int
    """Iterations that the newest durable checkpoint was behind at the end of the outage."""
    durable_s: float
    """Seconds from the end of the outage until its newest save, or a later one, was durable."""
    durable_saves: float
    """The same in saves."""
    memory: dict[str, Memory] = field(default_factory=dict)
    lines: int = 0
    """Warnings and errors during the run."""
    exit_codes: list[int] = field(default_factory=list)
    last_line: str = ""
    exceeded: list[str] = field(default_factory=list)
    """Exceeded limits."""


class Measured:
    """One run with its place."""

    def __init__(self, place: str, folder: Path, minutes: float) -> None:
        self._place, self._folder, self._outage_s = place, folder, minutes * 60
        self._parts: dict[str, Memory] = {}
        self._late_s = 0.0

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[TrainedNodes, Any, Callable[[], int]]]:
        """Yield a run that has not started, its place, and a function that returns the newest checkpoint."""
        common = {"save_interval": INTERVAL}
        options: dict[str, Any] = {"step_s": STEP_S, "state_bytes": STATE_BYTES}
        if self._place == "directory":
            with Disk(self._folder / "shared", NODES) as disk:
                settings = {node: {**common, "directory": str(disk.path(node) / "run")} for node in NODES}
                run = TrainedNodes(self._folder, settings, **options)
                yield run, disk, lambda: newest_checkpoint(disk.files / "run")
            return
        server = start_store(self._folder / "record")
        try:
            with Bucket(server, NODES) as bucket:
                url = f"s3://{server.bucket}/run"
                environments = {node: bucket.environment(node) for node in NODES}
                settings = {node: {**common, "directory": url} for node in NODES}
                run = TrainedNodes(self._folder, settings, environments=environments, **options)
                yield run, bucket, lambda: bucket.newest_checkpoint(url)
        finally:
            server.kill()

    def measure(self) -> Result:
        """Run the training with the outage. Blocks: the outage and some minutes."""
        with self._open() as (run, place, newest), run:
            run.wait_for_iteration(2 * INTERVAL)
            self._sample(run, "before", lambda: run.iteration >= (NUM_SAVES + 1) * INTERVAL, LIMIT_S)
            run.wait_for_save_to_begin(INTERVAL)
            held = newest()
            place.break_(Fault.HUNG)
            broken_s = time.monotonic()
            early_s = broken_s + self._outage_s / 4
            self._sample(run, "during, first quarter", lambda: time.monotonic() >= early_s, self._outage_s + LIMIT_S)
            self._sample(run, "during", lambda: time.monotonic() >= broken_s + self._outage_s, self._outage_s + LIMIT_S)
            due = run.iteration // INTERVAL * INTERVAL
            lag = run.iteration - held
            place.lift()
            lifted_s, lifted = time.monotonic(), run.iteration
            durable = None
            with contextlib.suppress(AssertionError):
                self._sample(run, "after", lambda: newest() >= due, LIMIT_S)
                durable = time.monotonic() - lifted_s, (run.iteration - lifted) / INTERVAL
            with contextlib.suppress(AssertionError):
                self._sample(run, "after", lambda: run.iteration >= lifted + NUM_SAVES * INTERVAL, LIMIT_S)
            end_s = time.monotonic()
            codes = run.stop()
            last = next(line for line in reversed(run.cluster.agent(0).output().splitlines()) if "job over" in line)
            run.check_weights()
            result = self._judge(run, broken_s=broken_s, lifted_s=lifted_s, end_s=end_s, lag=lag, durable=durable)
            result.exit_codes, result.last_line = codes, last[:600]
            result.lines = len(run.lines(" WARNING ")) + len(run.lines(" ERROR "))
            return result

    def _sample(self, run: TrainedNodes, part: str, is_over: Callable[[], bool], limit_s: float) -> None:
        memory = self._parts.setdefault(part, Memory())
        end_s, next_s = time.monotonic() + limit_s, 0.0
        while not is_over():
            assert time.monotonic() < end_s, f"{limit_s:g} s passed\n{run.shown()}"
            assert all(agent.running for agent in run.cluster.agents), f"an agent ended\n{run.shown()}"
            if time.monotonic() >= next_s:
                memory.add(_memory(run))
                next_s = time.monotonic() + SAMPLE_S
            slept_s = time.monotonic()
            time.sleep(0.2)
            self._late_s = max(self._late_s, time.monotonic() - slept_s - 0.2)

    def _judge(
        self,
        run: TrainedNodes,
        *,
        broken_s: float,
        lifted_s: float,
        end_s: float,
        lag: int,
        durable: tuple[float, float] | None,
    ) -> Result:
        steps = [step for step in run.new_steps if step.end_s <= end_s]
        took = _durations(steps)
        median_s = statistics.median(took.values())
        later = {at: duration for at, duration in took.items() if at > broken_s}
        apart = dict(later)
        for begin_s in (broken_s, lifted_s):
            for at in [at for at in later if at > begin_s][:NUM_STEPS_AFTER]:
                apart.pop(at, None)
        before = [duration for at, duration in took.items() if at <= broken_s][INTERVAL:]
        slow = [at for at, duration in later.items() if duration > MAX_RATIO * median_s]
        iterations = {step.end_s: step.iteration for step in steps}
        cycles = {event.cycle for event in run.events(EventKind.CYCLE_STARTED)}
        durable_s, durable_saves = durable or (float("inf"), float("inf"))
        result = Result(
            place=self._place,
            outage_s=lifted_s - broken_s,
            num_restarts=len(cycles) - 1,
            num_lost=run.redone(),
            num_steps=len(steps),
            median_s=round(median_s, 4),
            slowest_s=round(max(later.values()), 4),
            ratio=round(max(later.values()) / median_s, 2),
            ratio_apart=round(max(apart.values()) / median_s, 2),
            ratio_before=round(max(before) / median_s, 2),
            num_slow=len(slow),
            num_slow_at_saves=sum(iterations[at] % INTERVAL in (1, 2, 3) for at in slow),
            late_s=round(self._late_s, 3),
            oldest_lag=lag,
            durable_s=round(durable_s, 2),
            durable_saves=round(durable_saves, 2),
            memory=self._parts,
        )
        grown = {
            name: getattr(self._parts["during"], name) / max(1, getattr(self._parts["before"], name))
            for name in ("writers_rss", "ranks_rss")
        }
        limits = {
            "restarts": result.num_restarts == 0,
            "lost iterations": result.num_lost == 0,
            f"slowest step over {MAX_RATIO:g} x the median": result.ratio <= MAX_RATIO,
            f"durable later than {MAX_SAVES:g} save": result.durable_saves <= MAX_SAVES,
            f"memory over {MAX_GROWTH:g} x ({grown})": max(grown.values()) <= MAX_GROWTH,
        }
        result.exceeded = [name for name, is_kept in limits.items() if not is_kept]
        return result


def _durations(steps: list[Step]) -> dict[float, float]:
    """Return the duration of each step from the end of the previous one, by its end."""
    pairs = itertools.pairwise(steps)
    return {after.end_s: after.end_s - before.end_s for before, after in pairs if before.cycle == after.cycle}


def _memory(run: TrainedNodes) -> Memory:
    found = Memory(shared=psutil.virtual_memory().shared)
    for agent in run.cluster.agents:
        children = psutil.Process(agent.pid).children(recursive=True)
        found.writers_rss += sum(_rss(one) for one in processes_named(children, "outlast.checkpoint.writer"))
    for rank in range(len(NODES)):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            found.ranks_rss += _rss(psutil.Process(run.steps(rank)[-1].pid))
    return found


def _rss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        rss: int = process.memory_info().rss
        return rss
    return 0


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="length of the outage; default 15")
    parser.add_argument("--place", choices=["directory", "store", "both"], default="both", help="what is away")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    known = parser.parse_args()
    if not known.inside:
        command = [sys.executable, __file__, "--inside", f"--minutes={known.minutes}", f"--place={known.place}"]
        contained = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", *command]
        os.execvp(contained[0], contained)
    if known.place == "both":
        command = [sys.executable, __file__, "--inside", f"--minutes={known.minutes}"]
        runs = [subprocess.Popen([*command, f"--place={place}"]) for place in ("directory", "store")]
        return max(run.wait() for run in runs)
    with tempfile.TemporaryDirectory(prefix="outlast-outage-") as folder:
        result = Measured(known.place, Path(folder), known.minutes).measure()
    print(json.dumps(asdict(result), indent=1), flush=True)
    return 1 if result.exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
