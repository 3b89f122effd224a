"""``outlast bench ray``: from an actor's death or hang to the next finished step, beside Ray Train's restart."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outlast import clock, env
from outlast.bench.measuring import Mark, Progress, median, read_marks, run_rounds
from outlast.bench.result import Bar, BenchResult
from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.errors import OutlastError, RolledBack

if TYPE_CHECKING:
    from outlast.ray import ActorGroup

__all__ = ["RecoveryTiming", "measure", "when_all", "when_rank"]

_MESH = {"dp": 2, "tp": 2}
_NUM_RANKS = 4
_SECTION_TIMEOUT_S = 2.0
_SPARES_S = 60.0


@dataclass(frozen=True, slots=True)
class RecoveryTiming:
    """One failure and what followed."""

    stepped_s: float
    """Seconds from the fault until all ranks had finished a step."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """What they were spent on, as the report of the recovery has it."""
    beyond_s: float = 0.0
    """Seconds from the end of the section's timeout until the hang was found."""

    def __str__(self) -> str:
        return f"{self.stepped_s:.3f} s" + (f", found {self.beyond_s:.3f} s late" if self.beyond_s else "")


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Kill, stop and delay an actor of a group, and kill a worker of Ray Train, in turns.

    Raises:
        OutlastError: Ray is not installed; or a run did not recover, or lost more than it had to.

    Blocks: about a minute a round.
    """
    try:
        import ray.train.torch  # noqa: F401 - Ray without what Ray Train needs is no peer
    except ImportError as error:
        raise OutlastError(f"Ray Train is not installed ({error}): pip install 'ray[train]'") from error
    measures: dict[str, Callable[[], RecoveryTiming]] = {
        "outlast, kill": partial(_run_group, "kill"),
        "Ray Train, kill": _run_ray_train,
        "outlast, sleep": partial(_run_group, "sleep"),
        "outlast, stop": partial(_run_group, "stop"),
    }
    with _cluster():
        found = run_rounds(measures, repeats=repeats, progress=progress)
    ours, peers = found["outlast, kill"], found["Ray Train, kill"]
    our_s, peer_s = median([one.stepped_s for one in ours]), median([one.stepped_s for one in peers])
    beyond_s = {kind: median([one.beyond_s for one in found[f"outlast, {kind}"]]) for kind in ("sleep", "stop")}
    phases = {name: _phases(some) for name, some in found.items()}
    return BenchResult(
        bench="ray",
        bars=(
            Bar(name="ray_recover_s", value=our_s, unit="s", bar=3.0, peer="Ray Train", peer_value=peer_s),
            Bar(
                name="ray_recover_vs_train",
                value=our_s / peer_s,
                unit="x",
                bar=0.25,
                peer="Ray Train (s)",
                peer_value=peer_s,
            ),
            Bar(name="hang_found_beyond_timeout_s", value=max(beyond_s.values()), unit="s", bar=1.0),
        ),
        notes=(
            f"dp2 x tp2 on gloo with one spare, peers in an all-reduce; Ray Train as it is, with {_NUM_RANKS} workers",
            *(f"  {name}: {_describe(values)}" for name, values in phases.items()),
            *(
                f"  {kind}: found {late_s:.3f} s after the section's timeout of {_SECTION_TIMEOUT_S:g} s"
                for kind, late_s in beyond_s.items()
            ),
        ),
        details={"phases_s": phases},
    )


@contextmanager
def _cluster() -> Iterator[None]:
    """Run a Ray of this program's own on this machine."""
    import ray

    before = env.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"})
    with (
        tempfile.TemporaryDirectory(
            prefix="olb-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,  # short for sockets
        redirect_stdout(sys.stderr),  # Ray prints there, too, that a worker died
    ):
        ray.init(
            address="local",
            num_cpus=2 * (_NUM_RANKS + 1),
            num_gpus=0,
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
            env.update(before)


def _run_group(fault: str) -> RecoveryTiming:
    """Have one actor of a group fail, and check that the others were kept."""
    from outlast.bench.ray_workers import STRUCK, TOTAL, VICTIM, BenchActor, batch_of
    from outlast.ray import ActorGroup

    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        with ActorGroup(
            BenchActor,
            _MESH,
            args=(name, fault),
            num_spares=1,
            checkpoint=CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=1),
            fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"step": _SECTION_TIMEOUT_S}),
        ) as group:
            _await_spare(group)
            pids, done_ns = group.pids, {}
            while (iteration := (group.iteration or 0) + 1) <= TOTAL:
                try:
                    group.run("train_step", batch_of(iteration), iteration=iteration)
                except RolledBack:
                    continue  # the step before was not committed yet: it is done again
                done_ns[iteration] = clock.now_ns()
            kept, recoveries = group.pids, group.recoveries
        marks = read_marks(folder)
    changed = [rank for rank, pid in pids.items() if kept[rank] != pid]
    if changed != [VICTIM] or len(recoveries) != 1:
        reports = "; ".join(report.describe() for report in recoveries)
        raise OutlastError(f"a fault of rank {VICTIM} ({fault}) cost ranks {changed}: {reports}")
    report = recoveries[0]
    struck_ns = when_rank(marks, "killed" if fault == "kill" else "entered", VICTIM, STRUCK)
    if struck_ns is None:
        raise OutlastError(f"rank {VICTIM} did not fail in step {STRUCK} ({fault})")
    stepped_s = (min(at_ns for at_ns in done_ns.values() if at_ns > struck_ns) - struck_ns) / 1e9
    again_ns = min(one.at_ns for one in marks if one.pid == kept[VICTIM])
    again_s = (again_ns - struck_ns) / 1e9
    detect_s = again_s - report.total_s  # the report's time begins with the evidence
    phases_s = {**report.phases_s, "detect": detect_s, "recovery": report.total_s, "step": stepped_s - again_s}
    return RecoveryTiming(stepped_s, phases_s, 0.0 if fault == "kill" else detect_s - _SECTION_TIMEOUT_S)


def _await_spare(group: ActorGroup) -> None:
    """Wait until the spare is there, as it is in a run that has been going for a while."""
    until_s = clock.now_s() + _SPARES_S
    while not group.spares:
        if clock.now_s() > until_s:
            raise OutlastError(f"the spare actor did not start within {_SPARES_S:g} s")
        time.sleep(0.05)


def _run_ray_train() -> RecoveryTiming:
    from outlast.bench.ray_workers import STRUCK, VICTIM, run_ray_train

    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        run_ray_train(Path(name), num_workers=_NUM_RANKS)
        marks = read_marks(Path(name))
    killed_ns = when_rank(marks, "killed", VICTIM, STRUCK)
    if killed_ns is None:
        raise OutlastError(f"no worker of Ray Train was killed in step {STRUCK}")
    stages_s = {
        stage: (at_ns - killed_ns) / 1e9
        for stage in ("began", "loaded", "stepped")
        if (at_ns := when_all(marks, stage, since_ns=killed_ns, num_ranks=_NUM_RANKS)) is not None
    }
    if "stepped" not in stages_s:
        raise OutlastError("Ray Train ended without another step of all workers")
    return RecoveryTiming(stages_s["stepped"], stages_s)


def when_all(marks: Sequence[Mark], name: str, *, since_ns: int, num_ranks: int) -> int | None:
    """Return when the last rank first came to something after a moment; ``None``: not all did."""
    first: dict[int, int] = {}
    for mark in marks:
        if mark.name == name and mark.at_ns > since_ns:
            first.setdefault(mark.rank, mark.at_ns)
    return max(first.values()) if len(first) == num_ranks else None


def when_rank(marks: Sequence[Mark], name: str, rank: int, iteration: int) -> int | None:
    """Return when a rank first came to something in a step; ``None``: never."""
    return next((one.at_ns for one in marks if (one.name, one.rank, one.iteration) == (name, rank, iteration)), None)


def _phases(some: Sequence[RecoveryTiming]) -> dict[str, float]:
    """Return each phase's median."""
    names = dict.fromkeys(name for one in some for name in one.phases_s)
    return {name: round(median([one.phases_s[name] for one in some if name in one.phases_s]), 4) for name in names}


def _describe(phases_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases_s.items())
