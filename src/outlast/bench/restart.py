"""``outlast bench restart``: from a rank's death or hang to the next cycle, beside torchrun."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP

from outlast.bench.launched import OUTLAST, TORCHRUN, LaunchedJob, strike
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say, median, run_rounds
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.incidents import Event, EventKind, IncidentKind
from outlast.journal import read

__all__ = ["Comeback", "measure", "stages_of"]

_WORLD_SIZES = (2, 4)
_VICTIM = 1
_START_TIMEOUT_S = 60.0
_COMEBACK_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0
_MOST_FAILURES = 3
_HANG_TIMEOUT_S = 1
# Without it a worker meets the dead cycle's addresses in the agent's store, and torchrun often hangs.
_PEER_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_STAGES = ("noticed", "all ended", "started", "script begun", "group joined", "all-reduced")
"""What happens between a rank's death and the next all-reduce, in this order."""


@dataclass(frozen=True, slots=True)
class Comeback:
    """One rank's death and what followed; times are seconds since the kill."""

    after_s: float
    """All ranks have finished an all-reduce in a later cycle."""
    cycle: int
    stages_s: Mapping[str, float]
    """When each stage was over, for the last rank."""

    def __str__(self) -> str:
        later = f" in cycle {self.cycle}" if self.cycle != 1 else ""
        return f"{self.after_s:.3f} s{later}"


def measure(*, repeats: int, say: Say) -> BenchResult:
    """Kill and stop ranks under both launchers.

    Raises:
        OutlastError: A run of ours, or three of the peer in a row, did not come back.

    Blocks: about 20 s a round.
    """
    failures: list[str] = []
    measures: dict[str, Callable[[], Comeback]] = {}
    for size in _WORLD_SIZES:
        measures[f"outlast, {size} ranks"] = partial(_kill_under_outlast, size)
        measures[f"torchrun, {size} ranks"] = partial(_kill_under_torchrun, size, failures, say)
    found = run_rounds(measures, repeats=repeats, say=say)
    beyond_s = _hang(repeats, say)
    bars, notes = [], []
    for size in _WORLD_SIZES:
        ours, peers = found[f"outlast, {size} ranks"], found[f"torchrun, {size} ranks"]
        our_s, peer_s = median([one.after_s for one in ours]), median([one.after_s for one in peers])
        bars.append(
            Bar(
                name=f"restart_vs_torchrun_{size}",
                value=our_s / peer_s,
                unit="x",
                bar=0.06,
                peer="torchrun, c10d (s)",
                peer_value=peer_s,
            )
        )
        notes += [f"{size} ranks: SIGKILL to the first all-reduce of all: {our_s:.3f} s, torchrun {peer_s:.3f} s"]
        notes += [f"  {name}: {_breakdown(some)}" for name, some in (("outlast", ours), ("torchrun", peers))]
        wasted = sum(one.cycle - 1 for one in peers)
        if wasted:
            notes.append(f"  torchrun restarted {wasted} times more than once was needed")
    if failures:
        notes.append(f"torchrun did not come back in {len(failures)} runs, which were done again")
    deaths = [one for name, some in found.items() if name.startswith("outlast") for one in some]
    noticed_s = median([one.stages_s["noticed"] for one in deaths])
    bars += [
        Bar(name="death_noticed_ms", value=noticed_s * 1e3, unit="ms", bar=30.0),
        Bar(name="hang_noticed_beyond_timeout_ms", value=median(beyond_s) * 1e3, unit="ms", bar=250.0),
    ]
    return BenchResult(bench="restart", bars=tuple(bars), notes=tuple(notes))


def stages_of(killed_ns: int, marks: Mapping[int, Mapping[str, int]], events: Sequence[Event]) -> dict[str, float]:
    """Return when each stage was over, in seconds since the kill.

    Args:
        killed_ns: When the signal was sent.
        marks: What the ranks of the next cycle wrote.
        events: The journal of the agent; empty for a launcher that keeps none.
    """
    exits = [one for one in events if one.kind == EventKind.WORKER_EXITED and one.cycle == 0]
    starts = [one.mono_ns for one in events if one.kind == EventKind.CYCLE_STARTED and one.cycle]
    ends_ns = {
        "noticed": min((one.mono_ns for one in exits if one.rank == _VICTIM), default=None),
        "all ended": max((one.mono_ns for one in exits), default=None),
        "started": min(starts, default=None),
        "script begun": max(mark["begun_ns"] for mark in marks.values()),
        "group joined": max(mark["joined_ns"] for mark in marks.values()),
        "all-reduced": max(mark["reduced_ns"] for mark in marks.values()),
    }
    return {name: (at_ns - killed_ns) / 1e9 for name, at_ns in ends_ns.items() if at_ns is not None}


def _kill_under_outlast(size: int) -> Comeback:
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        options = (f"--run-dir={folder / 'run'}", f"--nproc-per-node={size}")
        try:
            return _kill_one((*OUTLAST, *options), size, folder, {}, journal=True)
        except DeadlineExceeded as error:
            raise OutlastError(f"outlast run with {size} ranks did not come back: {error}") from error


def _kill_under_torchrun(size: int, failures: list[str], say: Say) -> Comeback:
    for _ in range(_MOST_FAILURES):
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
            command = (*TORCHRUN, f"--nproc-per-node={size}")
            try:
                return _kill_one(command, size, Path(name), _PEER_VARIABLES, journal=False)
            except DeadlineExceeded as error:
                failures.append(str(error))
                say(f"torchrun with {size} ranks did not come back; once more ({str(error).splitlines()[0]})")
    raise OutlastError(f"torchrun with {size} ranks did not come back {_MOST_FAILURES} times in a row: {failures[-1]}")


def _kill_one(
    launcher: Sequence[str], size: int, folder: Path, variables: Mapping[str, str], *, journal: bool
) -> Comeback:
    script = Path(__file__).with_name("restart_worker.py")
    ranks = range(size)
    with LaunchedJob((*launcher, str(script), str(folder)), folder=folder, variables=variables) as job:
        first = job.wait_for_marks((0,), ranks, timeout_s=_START_TIMEOUT_S)
        killed_ns = strike(first.marks[_VICTIM]["pid"], SIGKILL)
        later = job.wait_for_marks((1, 2, 3), ranks, timeout_s=_COMEBACK_TIMEOUT_S)
        job.wait(_END_TIMEOUT_S)
    events = list(read(folder / "run")) if journal else []
    stages_s = stages_of(killed_ns, later.marks, events)
    return Comeback(stages_s["all-reduced"], later.cycle, stages_s)


def _hang(repeats: int, say: Say) -> list[float]:
    """Return seconds from the end of a timeout to the incident, for each cycle of one job but the first."""
    num_cycles = repeats + 1
    script = Path(__file__).with_name("hang_worker.py")
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        options = (
            f"--run-dir={folder / 'run'}",
            "--nproc-per-node=2",
            f"--max-restarts={num_cycles}",
            f"--ft-rank-section-timeouts=step:{_HANG_TIMEOUT_S}",
            "--ft-num-warmup-iterations=0",
        )
        command = (*OUTLAST, *options, str(script), str(folder), str(num_cycles))
        entered_ns = []
        with LaunchedJob(command, folder=folder, variables={}) as job:
            try:
                for cycle in range(num_cycles):
                    mark = job.wait_for_marks((cycle,), (_VICTIM,), timeout_s=_START_TIMEOUT_S).marks[_VICTIM]
                    strike(mark["pid"], SIGSTOP)
                    entered_ns.append(mark["entered_ns"])
            except DeadlineExceeded as error:
                raise OutlastError(f"a hang was not followed by a restart: {error}") from error
            job.wait(_END_TIMEOUT_S)
        noticed_ns = {
            event.cycle: event.mono_ns
            for event in read(folder / "run")
            if event.kind == EventKind.INCIDENT
            and event.data["incident"].get("kind") == IncidentKind.WORKER_HUNG
            and event.proc == "agent"
        }
    if missing := [cycle for cycle in range(num_cycles) if cycle not in noticed_ns]:
        raise OutlastError(f"the hangs of cycles {missing} were not noticed as hangs")
    beyond_s = [(noticed_ns[cycle] - at_ns) / 1e9 - _HANG_TIMEOUT_S for cycle, at_ns in enumerate(entered_ns)]
    say(f"hangs noticed after the timeout of {_HANG_TIMEOUT_S} s, ms: {[round(one * 1e3, 1) for one in beyond_s]}")
    return beyond_s[1:]


def _breakdown(some: Sequence[Comeback]) -> str:
    """Return the medians of when each stage was over."""
    parts = []
    for stage in _STAGES:
        if seen := [one.stages_s[stage] for one in some if stage in one.stages_s]:
            parts.append(f"{stage} {median(seen) * 1e3:.1f}")
    return ", ".join(parts) + " ms"
