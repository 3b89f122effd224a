"""The soak: settings and length of its trainings, and the checks that faults changed nothing.

``outlast chaos soak`` (:mod:`outlast.cli.soak`) runs the trainings; nothing here starts a process.
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
"""Enough that most nodes remain after the loss of two in a row: fewer may not continue."""
CALIBRATION = 40
"""Iterations of the training that measures the duration of a step."""
MAX_ATTEMPTS = 3
"""Maximum number of trainings, on a machine whose steps become faster."""
TENSOR = "model.blocks.*"
KINDS = tuple(
    kind
    for kind in FaultKind
    if kind not in (FaultKind.INF, FaultKind.SIGN_FLIP, FaultKind.EXIT, FaultKind.LOSE_NODE_AND_REPLICAS)
)
"""Three of the others are like one of these; the fourth needs a checkpoint in the global tier in each cycle."""
_SHARE, _RESTARTING = 1.1, 0.5
"""Maximum share of training in the soak's time, and the part of it for restarts if all faults cost one."""
_REST_S = 12.0
"""Minimum training time after the last fault."""
_MAX_RESTARTS = 12
OPTIONS = (
    "--ft-rank-section-timeouts=setup:60,step:3,checkpointing:30",
    "--ft-rank-out-of-section-timeout=30",
    "--ft-node-heartbeat-timeout=4",
    f"--max-restarts={_MAX_RESTARTS}",
    f"--ft-max-no-progress-cycles={_MAX_RESTARTS}",
    "--rdzv-conf=join_timeout=45",  # where most nodes are lost at once, the job exits, and another one follows
)
"""Options of ``outlast run``."""
_EXAMPLE = "train_gpt.py"
_SHARED = Path("share", "outlast", "examples", _EXAMPLE)
COMPARED = ("weights", "optimizer", "losses")


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
    """Number of agents that were started."""
    wall_s: float
    """Seconds from the start of the first agent of the training with faults to the end of the last one."""
    bit_identical: bool
    kinds: list[KindOutcome]
    faults: list[FaultOutcome]
    problems: list[str]
    folder: str | None = None
    """Folder of all files, if they were kept."""

    @property
    def ok(self) -> bool:
        return not self.problems


def find_example() -> Path:
    """Return the path of ``examples/train_gpt.py``, in the checkout or the installed wheel.

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
    yield package.parent / _SHARED  # moved there by pip install --target, which records the old place


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
            "calc_individual_gpu_perf": False,  # a cycle is too short for a rank's own best value
            # A rank that waits for a core is several times slower for a few milliseconds if all ranks share two cores.
            "noticeable_score": 0.2,
            "gpu_relative_perf_threshold": 0.2,
            "check_machine": False,  # all ranks share one
            "num_gpu_perf_scores_to_print": 0,
            "enable_logging": False,
        },
    }


def choose_kinds(wanted: Sequence[FaultKind] | None) -> tuple[list[FaultKind], str | None]:
    """Return the kinds of faults to inject, and why this machine cannot inject some of :data:`KINDS`.

    Args:
        wanted: The kinds; ``None``: all of :data:`KINDS` that are possible here.

    Raises:
        ConfigError: A wanted kind is not possible here.
    """
    why = _why_impossible(needs_netem=True)
    has_networks = why is None or _why_impossible(needs_netem=False) is None
    needed = [kind for kind in wanted or KINDS if kind.is_of_networks] if why is not None else []
    impossible = [kind for kind in needed if kind.needs_netem or not has_networks]
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
    """Return the number of iterations after which all faults were injected."""
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
    """Return the number of iterations of the next attempt; ``None``: this attempt counts.

    A training that ended before all faults were injected is repeated with twice the length: its steps were faster than
    measured.

    Args:
        iterations: Iterations of this attempt.
        attempt: Its number, from 1.
        problems: Problems of this attempt.
        missing: Faults that were not injected.
    """
    return None if problems or not missing or attempt >= MAX_ATTEMPTS else 2 * iterations


def find_differences(undisturbed: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ in two results, or are missing in one."""
    missing = object()
    names = dict.fromkeys([*COMPARED, *undisturbed, *other])
    return [
        name
        for name in names
        if missing in (undisturbed.get(name, missing), other.get(name, missing)) or undisturbed[name] != other[name]
    ]


def find_gaps(events: Sequence[Event]) -> list[str]:
    """Return the gaps in a journal: missing ends of jobs and cycles, and lost events."""
    starts = [event for event in events if event.kind == EventKind.CYCLE_STARTED]
    ended = {event.job for event in events if event.kind == EventKind.JOB_ENDED}
    decided = {
        (event.job, event.cycle) for event in events if event.kind in (EventKind.CYCLE_ENDED, EventKind.DECISION)
    }
    jobs = dict.fromkeys(event.job for event in starts)
    cycles = dict.fromkeys((event.job, event.cycle) for event in starts)
    found = [f"the journal has no end of job {job}" for job in jobs if job not in ended]
    found += [f"the journal has no end of cycle {key[1]} of job {key[0]}" for key in cycles if key not in decided]
    if lost := sum(event.data.get("num", 0) for event in events if event.kind == EventKind.EVENTS_LOST):
        found.append(f"{lost} events of the journal are lost")
    return found
