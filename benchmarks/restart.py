"""Benchmark ``restart``: from a rank's death or hang to the next cycle, compared with torchrun.

The workers' imports before their first all-reduce are measured, too. Their script is therefore a separate file with the
source of :func:`reduce_until_killed` or :func:`stop_in_section`, which import what they need.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP

from benchmarks.measuring import Progress, launcher, median, read_marks, run_rounds, select_marks
from outlast import clock
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.incidents import Event, EventKind, IncidentKind
from outlast.journal import read
from outlast.simulate.benchmark_results import Bar, BenchResult
from outlast.testing.ranks import RankProcesses

_OUTLAST = ("outlast", "run")
_TORCHRUN = (
    *("torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    *("--max-restarts=3", "--monitor-interval=0.1"),
)
"""The stock launcher with its default interval."""
_WORLD_SIZES = (2, 4)
_VICTIM = 1
_START_TIMEOUT_S = 60.0
_RESTART_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0
_MOST_FAILURES = 3
_HANG_TIMEOUT_S = 1
# Without it a worker meets the dead cycle's addresses in the agent's store, and torchrun often hangs.
_PEER_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_STAGES = ("detected", "all ended", "started", "script begun", "group joined", "all-reduced")
"""Stages between a rank's death and the next all-reduce, in this order."""

Marks = Mapping[int, Mapping[str, int]]
"""The values that each rank recorded in a cycle, by rank and name."""


@dataclass(frozen=True, slots=True)
class RestartTiming:
    """One rank's death and its recovery; times are seconds since the kill."""

    after_s: float
    """Until all ranks have finished an all-reduce in a later cycle."""
    cycle: int
    stages_s: Mapping[str, float]
    """End of each stage, for the last rank."""

    def __str__(self) -> str:
        later = f" in cycle {self.cycle}" if self.cycle != 1 else ""
        return f"{self.after_s:.3f} s{later}"


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Kill and stop ranks under both launchers.

    Raises:
        OutlastError: A run of outlast, or three of the peer in a row, did not recover.

    Blocks: about 20 s a round.
    """
    failures: list[str] = []
    measures: dict[str, Callable[[], RestartTiming]] = {}
    for size in _WORLD_SIZES:
        measures[f"outlast, {size} ranks"] = partial(kill_under_outlast, size, reduce_until_killed)
        measures[f"torchrun, {size} ranks"] = partial(
            kill_under_torchrun, size, reduce_until_killed, failures, progress
        )
    found = run_rounds(measures, repeats=repeats, progress=progress)
    beyond_s = _hang(repeats, progress)
    bars, notes = [], []
    for size in _WORLD_SIZES:
        ours, peers = found[f"outlast, {size} ranks"], found[f"torchrun, {size} ranks"]
        our_s, peer_s = median([one.after_s for one in ours]), median([one.after_s for one in peers])
        bars.append(Bar(f"restart_vs_torchrun_{size}", our_s / peer_s, "x", 0.06, "torchrun, c10d (s)", peer_s))
        notes += [f"{size} ranks: SIGKILL to the first all-reduce of all: {our_s:.3f} s, torchrun {peer_s:.3f} s"]
        notes += [f"  {name}: {_breakdown(some)}" for name, some in (("outlast", ours), ("torchrun", peers))]
        wasted = sum(one.cycle - 1 for one in peers)
        if wasted:
            notes.append(f"  torchrun restarted {wasted} times more than once was needed")
    if failures:
        notes.append(f"torchrun did not recover in {len(failures)} runs, which were done again")
    deaths = [one for name, some in found.items() if name.startswith("outlast") for one in some]
    detected_s = median([one.stages_s["detected"] for one in deaths])
    bars += [
        Bar("death_noticed_ms", detected_s * 1e3, "ms", 30.0),
        Bar("hang_noticed_beyond_timeout_ms", median(beyond_s) * 1e3, "ms", 250.0),
    ]
    return BenchResult("restart", bars, notes)


def stages_of(killed_ns: int, marks: Marks, events: Sequence[Event], victim: int = _VICTIM) -> dict[str, float]:
    """Return the end of each stage, in seconds since the kill.

    Args:
        killed_ns: When the signal was sent.
        marks: Records of the ranks of the next cycle.
        events: The journal of the agent; empty for other launchers.
        victim: The killed rank.
    """
    exits = [one for one in events if one.kind == EventKind.WORKER_EXITED and one.cycle == 0]
    starts = [one.mono_ns for one in events if one.kind == EventKind.CYCLE_STARTED and one.cycle]
    ends_ns = {
        "detected": min((one.mono_ns for one in exits if one.rank == victim), default=None),
        "all ended": max((one.mono_ns for one in exits), default=None),
        "started": min(starts, default=None),
        "script begun": max(mark["begun_ns"] for mark in marks.values()),
        "group joined": max(mark["joined_ns"] for mark in marks.values()),
        "all-reduced": max(mark["reduced_ns"] for mark in marks.values()),
    }
    return {name: (at_ns - killed_ns) / 1e9 for name, at_ns in ends_ns.items() if at_ns is not None}


def _breakdown(some: Sequence[RestartTiming]) -> str:
    """Return the median end of each stage."""
    parts = []
    for stage in _STAGES:
        if seen := [one.stages_s[stage] for one in some if stage in one.stages_s]:
            parts.append(f"{stage} {median(seen) * 1e3:.1f}")
    return ", ".join(parts) + " ms"


Task = Callable[[int, str], None]
"""A worker's function, such as :func:`reduce_until_killed`."""


def kill_under_outlast(size: int, task: Task) -> RestartTiming:
    """Kill one of ``size`` ranks under ``outlast run``. Raises: OutlastError: they do not recover."""
    try:
        return _kill_one(*_OUTLAST, size=size, task=task)
    except DeadlineExceeded as error:
        raise OutlastError(f"outlast run with {size} ranks did not recover: {error}") from error


def kill_under_torchrun(size: int, task: Task, failures: list[str], progress: Progress) -> RestartTiming:
    """Kill one of ``size`` ranks under torchrun; a failed attempt is repeated, and added to ``failures``.

    Raises:
        OutlastError: They do not recover three times in a row.
    """
    for _ in range(_MOST_FAILURES):
        try:
            return _kill_one(*_TORCHRUN, size=size, task=task, variables=_PEER_VARIABLES)
        except DeadlineExceeded as error:
            failures.append(str(error))
            progress(f"torchrun with {size} ranks did not recover; trying again ({str(error).splitlines()[0]})")
    raise OutlastError(f"torchrun with {size} ranks did not recover {_MOST_FAILURES} times in a row: {failures[-1]}")


def _kill_one(*command: str, size: int, task: Task, variables: Mapping[str, str] | None = None) -> RestartTiming:
    victim = min(_VICTIM, size - 1)
    with _launch(*command, f"--nproc-per-node={size}", task=task, variables=variables) as (job, folder):
        _, marks = _wait_for_marks(job, folder, (0,), size, _START_TIMEOUT_S)
        killed_ns = clock.now_ns()
        os.kill(marks[victim]["pid"], SIGKILL)
        cycle, marks = _wait_for_marks(job, folder, (1, 2, 3), size, _RESTART_TIMEOUT_S)
        with suppress(DeadlineExceeded):  # the result exists; remaining processes are ended
            job.wait(_END_TIMEOUT_S)
        stages_s = stages_of(killed_ns, marks, list(read(folder / "run")), victim)
    return RestartTiming(stages_s["all-reduced"], cycle, stages_s)


def _hang(repeats: int, progress: Progress) -> list[float]:
    """Return the seconds from the end of a timeout to the incident, for each cycle of one job but the first."""
    num_cycles = repeats + 1
    options = (
        "--nproc-per-node=2",
        f"--max-restarts={num_cycles}",
        "--ft-max-restart-delay=0",  # only the detection is measured
        f"--ft-rank-section-timeouts=step:{_HANG_TIMEOUT_S}",
        "--ft-num-warmup-iterations=0",
    )
    entered_ns = []
    with _launch(*_OUTLAST, *options, task=stop_in_section, arguments=(str(num_cycles),)) as (job, folder):
        try:
            for cycle in range(num_cycles):
                _, marks = _wait_for_marks(job, folder, (cycle,), 1, _START_TIMEOUT_S)
                os.kill(marks[_VICTIM]["pid"], SIGSTOP)
                entered_ns.append(marks[_VICTIM]["entered_ns"])
        except DeadlineExceeded as error:
            raise OutlastError(f"a hang was not followed by a restart: {error}") from error
        with suppress(DeadlineExceeded):
            job.wait(_END_TIMEOUT_S)
        detected_ns = {
            event.cycle: event.mono_ns
            for event in read(folder / "run")
            if event.kind == EventKind.INCIDENT
            and event.data["incident"].get("kind") == IncidentKind.WORKER_HUNG
            and event.proc == "agent"
        }
    if missing := [cycle for cycle in range(num_cycles) if cycle not in detected_ns]:
        raise OutlastError(f"the hangs of cycles {missing} were not detected as hangs")
    beyond_s = [(detected_ns[cycle] - at_ns) / 1e9 - _HANG_TIMEOUT_S for cycle, at_ns in enumerate(entered_ns)]
    late_ms = [round(one * 1e3, 1) for one in beyond_s]
    progress(f"hangs detected after the timeout of {_HANG_TIMEOUT_S} s, ms: {late_ms}")
    return beyond_s[1:]


@contextmanager
def _launch(
    *command: str,
    task: Callable[..., None],
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[RankProcesses, Path]]:
    """Run a launcher whose workers run a task; yield it and its folder, and end all of its processes.

    Args:
        command: The launcher's module and options.
        task: A function of this module, called with the folder and ``arguments``.
        arguments: Further arguments of the task.
        variables: Additions to the environment.
    """
    is_ours = command[: len(_OUTLAST)] == _OUTLAST
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        script = Path(name, "worker.py")
        call = f"{task.__name__}(begun_ns, *sys.argv[1:])"
        script.write_text(f"import sys, time\nbegun_ns = time.monotonic_ns()\n{inspect.getsource(task)}\n{call}\n")
        command = (*command, *([f"--run-dir={name}/run"] * is_ours), str(script), name, *arguments)
        with launcher(*command, directory=name, variables=variables) as job:
            yield job, Path(name)


def _wait_for_marks(
    job: RankProcesses, folder: Path, cycles: Sequence[int], num_ranks: int, timeout_s: float
) -> tuple[int, dict[int, dict[str, int]]]:
    """Return the first of some cycles in which so many ranks wrote marks, and each rank's marks.

    Raises:
        DeadlineExceeded: They did not in time, or the launcher ended first.

    Blocks: up to ``timeout_s``.
    """

    def look() -> tuple[int, dict[int, dict[str, int]]] | None:
        marks = read_marks(folder)
        for cycle in cycles:
            found = {one.rank: {"pid": one.pid, **one.facts} for one in select_marks(marks, "worker", cycle)}
            if len(found) == num_ranks:
                return cycle, found
        return None

    return job.wait_until(look, timeout_s)


# -- functions of the workers, without names of this module ---------------------------------------------------------


def reduce_until_killed(begun_ns: int, folder: str) -> None:
    """Run a rank of plain torch.distributed, the same under both launchers.

    In cycle 0 every rank marks that it is ready and reduces until it is killed or a peer disconnects. In a later cycle
    each marks when its script had begun, when it had its group and its first all-reduce, and ends.
    """
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    joined_ns = time.monotonic_ns()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    reduced_ns = time.monotonic_ns()

    from benchmarks.measuring import MarkWriter  # not before: only what any script does is measured
    from outlast.env import read_worker

    def reduce_for(seconds: float) -> None:
        """Reduce until so much time has passed on rank 0."""
        end_ns = time.monotonic_ns() + int(seconds * 1e9)
        continues = torch.ones(1)
        while continues.item():
            dist.all_reduce(tensor)
            continues.fill_(float(dist.get_rank() == 0 and time.monotonic_ns() < end_ns))
            dist.all_reduce(continues)

    worker, mark = read_worker(), MarkWriter(folder)
    if worker.cycle == 0:
        reduce_for(0.3)  # the group is warm
    mark("worker", worker.global_rank, worker.cycle, begun_ns=begun_ns, joined_ns=joined_ns, reduced_ns=reduced_ns)
    if worker.cycle == 0:
        reduce_for(90.0)
    dist.barrier()
    dist.destroy_process_group()


def stop_in_section(_begun_ns: int, folder: str, num_cycles: str) -> None:
    """Run a rank of two, of which rank 1 enters a section in which it is stopped, in so many cycles."""
    import threading
    import time

    from benchmarks.measuring import MarkWriter
    from outlast.monitor import RankMonitor

    monitor, never = RankMonitor(), threading.Event()
    worker, longest_s = monitor.env, 60.0
    if worker.cycle >= int(num_cycles):
        return
    if worker.global_rank == 1:
        entered_ns = time.monotonic_ns()
        with monitor.section("step"):
            MarkWriter(folder)("worker", worker.global_rank, worker.cycle, entered_ns=entered_ns)
            never.wait(longest_s)
    end_ns = time.monotonic_ns() + int(longest_s * 1e9)
    while time.monotonic_ns() < end_ns:
        with monitor.section("step"):
            never.wait(0.05)
