"""``outlast bench restart``: from a rank's death or hang to the next cycle, beside torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from types import TracebackType

import psutil

from outlast import clock
from outlast.bench.measuring import ONE_THREAD, Progress, median, plain_environment, run_rounds
from outlast.bench.result import Bar, BenchResult
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.incidents import Event, EventKind, IncidentKind
from outlast.journal import read

__all__ = ["RestartTiming", "measure", "stages_of"]

_OUTLAST = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "run")
_TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=3", "--monitor-interval=0.1"),
)
"""The stock launcher at its best: the interval is its default."""
_SCRIPT = str(Path(__file__).with_name("restart_worker.py"))
_POLL_S = 0.002
_TAIL_LINES = 15
_WORLD_SIZES = (2, 4)
_VICTIM = 1
_START_TIMEOUT_S = 60.0
_RESTART_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0
_MOST_FAILURES = 3
_HANG_TIMEOUT_S = 1
# Without it a worker meets the dead cycle's addresses in the agent's store, and torchrun often hangs.
_PEER_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_STAGES = ("noticed", "all ended", "started", "script begun", "group joined", "all-reduced")
"""What happens between a rank's death and the next all-reduce, in this order."""


@dataclass(frozen=True, slots=True)
class RestartTiming:
    """One rank's death and what followed; times are seconds since the kill."""

    after_s: float
    """All ranks have finished an all-reduce in a later cycle."""
    cycle: int
    stages_s: Mapping[str, float]
    """When each stage was over, for the last rank."""

    def __str__(self) -> str:
        later = f" in cycle {self.cycle}" if self.cycle != 1 else ""
        return f"{self.after_s:.3f} s{later}"


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Kill and stop ranks under both launchers.

    Raises:
        OutlastError: A run of ours, or three of the peer in a row, did not recover.

    Blocks: about 20 s a round.
    """
    failures: list[str] = []
    measures: dict[str, Callable[[], RestartTiming]] = {}
    for size in _WORLD_SIZES:
        measures[f"outlast, {size} ranks"] = partial(_kill_under_outlast, size)
        measures[f"torchrun, {size} ranks"] = partial(_kill_under_torchrun, size, failures, progress)
    found = run_rounds(measures, repeats=repeats, progress=progress)
    beyond_s = _hang(repeats, progress)
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
        notes.append(f"torchrun did not recover in {len(failures)} runs, which were done again")
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


def _kill_under_outlast(size: int) -> RestartTiming:
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        options = (f"--run-dir={folder / 'run'}", f"--nproc-per-node={size}")
        try:
            return _kill_one((*_OUTLAST, *options), size, folder, {}, journal=True)
        except DeadlineExceeded as error:
            raise OutlastError(f"outlast run with {size} ranks did not recover: {error}") from error


def _kill_under_torchrun(size: int, failures: list[str], progress: Progress) -> RestartTiming:
    for _ in range(_MOST_FAILURES):
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
            command = (*_TORCHRUN, f"--nproc-per-node={size}")
            try:
                return _kill_one(command, size, Path(name), _PEER_VARIABLES, journal=False)
            except DeadlineExceeded as error:
                failures.append(str(error))
                progress(f"torchrun with {size} ranks did not recover; once more ({str(error).splitlines()[0]})")
    raise OutlastError(f"torchrun with {size} ranks did not recover {_MOST_FAILURES} times in a row: {failures[-1]}")


def _kill_one(
    launcher: Sequence[str], size: int, folder: Path, variables: Mapping[str, str], *, journal: bool
) -> RestartTiming:
    ranks = range(size)
    with _LaunchedJob((*launcher, _SCRIPT, str(folder)), folder=folder, variables=variables) as job:
        _, marks = job.wait_for_marks((0,), ranks, timeout_s=_START_TIMEOUT_S)
        killed_ns = clock.now_ns()
        os.kill(marks[_VICTIM]["pid"], SIGKILL)
        cycle, marks = job.wait_for_marks((1, 2, 3), ranks, timeout_s=_RESTART_TIMEOUT_S)
        job.wait(_END_TIMEOUT_S)
    events = list(read(folder / "run")) if journal else []
    stages_s = stages_of(killed_ns, marks, events)
    return RestartTiming(stages_s["all-reduced"], cycle, stages_s)


def _hang(repeats: int, progress: Progress) -> list[float]:
    """Return seconds from the end of a timeout to the incident, for each cycle of one job but the first."""
    num_cycles = repeats + 1
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        options = (
            f"--run-dir={folder / 'run'}",
            "--nproc-per-node=2",
            f"--max-restarts={num_cycles}",
            f"--ft-rank-section-timeouts=step:{_HANG_TIMEOUT_S}",
            "--ft-num-warmup-iterations=0",
        )
        command = (*_OUTLAST, *options, _SCRIPT, str(folder), str(num_cycles))
        entered_ns = []
        with _LaunchedJob(command, folder=folder) as job:
            try:
                for cycle in range(num_cycles):
                    _, marks = job.wait_for_marks((cycle,), (_VICTIM,), timeout_s=_START_TIMEOUT_S)
                    os.kill(marks[_VICTIM]["pid"], SIGSTOP)
                    entered_ns.append(marks[_VICTIM]["entered_ns"])
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
    progress(f"hangs noticed after the timeout of {_HANG_TIMEOUT_S} s, ms: {[round(one * 1e3, 1) for one in beyond_s]}")
    return beyond_s[1:]


def _breakdown(some: Sequence[RestartTiming]) -> str:
    """Return the medians of when each stage was over."""
    parts = []
    for stage in _STAGES:
        if seen := [one.stages_s[stage] for one in some if stage in one.stages_s]:
            parts.append(f"{stage} {median(seen) * 1e3:.1f}")
    return ", ".join(parts) + " ms"


class _LaunchedJob:
    """Run a launcher; use as a context manager, which ends every process of it.

    Args:
        command: The launcher, its options, the script and its arguments.
        folder: Its own folder: the output goes to ``output.txt``, and the workers write ``CYCLE-RANK.json``.
        variables: What to add to the environment.
    """

    def __init__(self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._output = folder / "output.txt"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**plain_environment(), **ONE_THREAD, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> _LaunchedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait_for_marks(
        self, cycles: Sequence[int], ranks: Sequence[int], *, timeout_s: float
    ) -> tuple[int, dict[int, dict[str, int]]]:
        """Return the first of some cycles in which ranks all wrote, and what each wrote.

        Blocks: up to ``timeout_s``.

        Raises:
            DeadlineExceeded: They did not, or the launcher ended first.
        """
        deadline_s = clock.now_s() + timeout_s
        while True:
            code = self._process.poll()  # asked before the files: what is not there after its end never comes
            for cycle in cycles:
                paths = {rank: self._folder / f"{cycle}-{rank}.json" for rank in ranks}
                if all(path.exists() for path in paths.values()):
                    return cycle, {rank: json.loads(path.read_bytes()) for rank, path in paths.items()}
            if code is not None:
                raise DeadlineExceeded(f"the launcher ended with exit code {code}\n{self._tail()}")
            if clock.now_s() > deadline_s:
                raise DeadlineExceeded(f"cycle {cycles[0]} was not there after {timeout_s:.0f} s\n{self._tail()}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> int | None:
        """Return the launcher's exit code; ``None``: it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End every process; idempotent. Blocks: until they are gone, 10 s at most."""
        left: list[psutil.Process] = []
        if self._process.poll() is None:
            # The launcher first: it must not start others while they are ended one by one.
            self._process.send_signal(SIGSTOP)
            left = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait(timeout=10)
        for process in left:
            if process.is_running():
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def _tail(self) -> str:
        return "\n".join(self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
