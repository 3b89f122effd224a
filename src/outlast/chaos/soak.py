"""The soak: how the example trains under faults of all kinds, and the checks that they changed nothing.

``outlast chaos soak`` (:mod:`outlast.cli.soak`) runs the trainings; here is all that does not start processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from outlast.chaos.netns import NodeNetwork
from outlast.chaos.plan import FaultKind, FaultPlan
from outlast.chaos.reckoning import FaultOutcome, KindOutcome
from outlast.errors import ConfigError, OutlastError
from outlast.incidents import Event, EventKind

NUM_NODES, NPROC_PER_NODE = 2, 2
NUM_SPARES = 2
"""After the loss of two nodes in a row most nodes are left: fewer may not continue without the others."""
CALIBRATION = 40
"""Iterations by which the duration of a step is measured."""
MAX_ATTEMPTS = 3
"""Trainings, on a machine whose steps take less and less time."""
TENSOR = "model.blocks.*"
KINDS = tuple(
    kind
    for kind in FaultKind
    if kind not in (FaultKind.INF, FaultKind.SIGN_FLIP, FaultKind.EXIT, FaultKind.LOSE_NODE_AND_REPLICAS)
)
"""Three of the others are like one of these; the fourth needs a checkpoint in the global tier in each cycle."""
_SHARE, _RESTARTING = 1.1, 0.5
"""Share of the soak's time that is training, at most, and the part of it that restarts take if all faults cost one."""
_REST_S = 12.0
"""Training after the last fault, at least."""
_MAX_RESTARTS = 12
OPTIONS = (
    "--ft-rank-section-timeouts=setup:60,step:3,checkpointing:30",
    "--ft-rank-out-of-section-timeout=30",
    "--ft-node-heartbeat-timeout=4",
    f"--max-restarts={_MAX_RESTARTS}",
    f"--ft-max-no-progress-cycles={_MAX_RESTARTS}",
    "--rdzv-conf=join_timeout=45",  # where most nodes are lost at once, the job exits, and another one follows
)
"""Of ``outlast run``."""
_EXAMPLE = "train_gpt.py"
_SHARED = Path("share", "outlast", "examples", _EXAMPLE)
_COMPARED = ("weights", "optimizer", "losses")


class SoakOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a soak."""

    seed: int
    minutes: float
    iterations: int
    planned: int
    fired: int
    jobs: int
    cycles: int
    agents: int
    """Agents that were started."""
    wall_s: float
    """From the start of the first agent of the training with faults to the end of the last one."""
    bit_identical: bool
    kinds: list[KindOutcome]
    faults: list[FaultOutcome]
    problems: list[str]
    folder: str | None = None
    """Folder of all files, if they were kept."""

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problems


def find_example() -> Path:
    """Return the path of ``examples/train_gpt.py``: in the checkout, or where the wheel has put it.

    Raises:
        OutlastError: It is in neither place.
    """
    for path in _candidates():
        if path.is_file():
            return path.resolve()
    raise OutlastError(f"the script {_EXAMPLE} is not installed; reinstall outlast, or use a checkout of its sources")


def _candidates() -> Iterator[Path]:
    package = Path(__file__).resolve().parents[1]
    if (package.parents[1] / "pyproject.toml").is_file():
        yield package.parents[1] / "examples" / _EXAMPLE
    try:
        files = metadata.files("outlast") or []
    except metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())) for file in files if file.name == _EXAMPLE)
    yield package.parent / _SHARED  # pip install --target moves it there, and records the old place


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a training whose checkpoints are stored in a folder."""
    return {
        "checkpoint": {
            "directory": str(folder / "checkpoints"),
            "local_directory": str(folder / "local"),
            "save_interval": 10,
            "non_persistent_save_interval": 5,
        },
        "replica_digest": {"interval": 2},
        "straggler_detection": {
            "enabled": True,
            "report_time_interval": 1.0,
            "calc_individual_gpu_perf": False,  # a cycle is too short to know a rank's own best
            # A rank that waits for a core takes several times as long for a few milliseconds, where all share two.
            "noticeable_score": 0.2,
            "gpu_relative_perf_threshold": 0.2,
            "check_machine": False,  # all ranks share one
            "num_gpu_perf_scores_to_print": 0,
            "enable_logging": False,
        },
    }


def choose_kinds(wanted: Sequence[FaultKind] | None) -> tuple[list[FaultKind], str | None]:
    """Return the kinds of faults to inject, and why this machine cannot cause some of :data:`KINDS`.

    Args:
        wanted: The kinds; ``None`` = all of :data:`KINDS` that this machine can cause.

    Raises:
        ConfigError: This machine cannot cause one that is wanted.
    """
    why = _why_impossible(needs_netem=True)
    possible = {FaultKind.DELAY, FaultKind.LOSS} if why is None else set()
    if why is None or _why_impossible(needs_netem=False) is None:
        possible.add(FaultKind.PARTITION)
    impossible = [kind for kind in wanted or KINDS if kind.is_of_networks and kind not in possible]
    if wanted is not None and impossible:
        raise ConfigError(f"{' and '.join(impossible)} cannot be caused here: {why}")
    return [kind for kind in wanted or KINDS if kind not in impossible], why if impossible else None


def _why_impossible(*, needs_netem: bool) -> str | None:
    try:
        with NodeNetwork(1, needs_netem=needs_netem):
            return None
    except ConfigError as error:
        return str(error)


def count_iterations(plan: FaultPlan, minutes: float, step_s: float) -> int:
    """Return how many iterations to train, so that the training lasts until all faults were injected."""
    gentle = sum(FaultKind(fault.kind).is_gentle for fault in plan.faults) / len(plan.faults)
    share = _SHARE - _RESTARTING * (1 - gentle)
    return int((minutes * 60 * share + _REST_S) / step_s)


def measure_step_s(events: Sequence[Event]) -> float:
    """Return the duration of a step in a training of :data:`CALIBRATION` iterations.

    Raises:
        OutlastError: The training did not end.
    """
    first = next((event for event in events if event.kind == EventKind.PROGRESS and event.rank == 0), None)
    end = [event for event in events if event.kind == EventKind.SESSION_ENDED and event.rank == 0]
    if first is None or not end:
        raise OutlastError("the first training did not end; --keep DIR keeps its output, in DIR/measured/run/agents")
    num_steps = max(1, CALIBRATION - (first.iteration or 0))
    return max(1e-3, (end[-1].mono_ns - first.mono_ns) / 1e9 / num_steps)


def next_iterations(iterations: int, attempt: int, *, problems: Sequence[str], missing: Sequence[str]) -> int | None:
    """Return how many iterations to train in the next attempt; ``None``: this one counts.

    A training is repeated, twice as long, where it ended before all faults were injected, as steps take less time than
    when they were measured.

    Args:
        iterations: Iterations of this attempt.
        attempt: Its number, from 1.
        problems: Everything that went wrong in it.
        missing: Faults that were not injected.
    """
    return None if problems or not missing or attempt >= MAX_ATTEMPTS else 2 * iterations


def find_differences(undisturbed: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ in two results, or are missing in one."""
    missing = object()
    names = dict.fromkeys([*_COMPARED, *undisturbed, *other])
    return [
        name
        for name in names
        if missing in (undisturbed.get(name, missing), other.get(name, missing)) or undisturbed[name] != other[name]
    ]


def find_gaps(events: Sequence[Event]) -> list[str]:
    """Return what is missing in a journal: the ends of jobs and cycles, and lost events."""
    starts = [event for event in events if event.kind == EventKind.CYCLE_STARTED]
    ended = {event.job for event in events if event.kind == EventKind.JOB_ENDED}
    decided = {(event.job, event.cycle) for event in events if event.kind in (EventKind.CYCLE_ENDED, EventKind.VERDICT)}
    jobs = dict.fromkeys(event.job for event in starts)
    cycles = dict.fromkeys((event.job, event.cycle) for event in starts)
    found = [f"the journal has no end of job {job}" for job in jobs if job not in ended]
    found += [f"the journal has no end of cycle {key[1]} of job {key[0]}" for key in cycles if key not in decided]
    if lost := sum(event.data.get("num", 0) for event in events if event.kind == EventKind.EVENTS_LOST):
        found.append(f"{lost} events of the journal are lost")
    return found
