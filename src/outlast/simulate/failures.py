"""Times and kinds of faults: drawn, or from a trace.

The failures of all ranks together are one process in time, drawn at once for the whole run; the rank of each is drawn
separately. With exponential times it is a Poisson process of the sum of the rates. With a Weibull distribution the
times between failures of the whole world have that shape, and the same mean, as was observed (B. Schroeder and G.
Gibson, "A large-scale study of failures in high-performance computing systems", 2006); many ranks that fail
independently would be a Poisson process again.

Each purpose has its own random stream, all from one seed. So two scenarios that differ in spares, intervals or
replication have the same faults at the same moments in the same slots, and the same repair times (common random
numbers).
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outlast import journal
from outlast.config.base import nearest
from outlast.decoding import parse_json, read_file
from outlast.errors import ConfigError
from outlast.goodput.history import decode
from outlast.incidents import CYCLE_ENDING, Incident, IncidentKind
from outlast.policy.run_view import RunView
from outlast.simulate.scenario import SHARES, DrawnFault, Scenario, SimulatedFault, trace_span_s

_TIMES, _KINDS, _SLOTS, _REPAIRS, _PREEMPTIONS, _OFFSET = range(6)
"""Numbers of the random streams."""


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """The faults of one simulated run, by time; lists of the same length."""

    times: list[float]
    """Seconds since the run began."""
    kinds: list[int]
    """Values of :class:`SimulatedFault`."""
    slots: list[int]
    """The slot of each."""
    repairs: list[float]
    """Seconds until the lost nodes are repaired."""


def draw_faults(scenario: Scenario, seed: int) -> FaultSchedule:
    """Return the faults of one run.

    Args:
        scenario: The scenario.
        seed: Seed of the run; the same one gives the same faults.
    """
    if scenario.trace is None:
        times = _renewals(_stream(seed, _TIMES), scenario.failures_per_s, scenario.duration_s, scenario.weibull_shape)
        shares = np.array([getattr(scenario, name) for name in SHARES.values()])
        edges = np.cumsum(shares)[:-1]
        kinds = np.searchsorted(edges, _stream(seed, _KINDS).random(len(times)), side="right")
        slots = _stream(seed, _SLOTS).integers(0, scenario.num_ranks, len(times)) // scenario.node_size
    else:
        times, kinds, slots = _replay(scenario, scenario.trace, seed)
    if scenario.preempt_every_s is not None:
        more = _renewals(_stream(seed, _PREEMPTIONS), 1.0 / scenario.preempt_every_s, scenario.duration_s, None)
        order = np.argsort(np.concatenate([times, more]), kind="stable")
        times = np.concatenate([times, more])[order]
        kinds = np.concatenate([kinds, np.full(len(more), int(SimulatedFault.PREEMPTION))])[order]
        slots = np.concatenate([slots, np.zeros(len(more), dtype=np.int64)])[order]
    repairs = np.full(len(times), scenario.repair_s)
    if not scenario.fixed_repair:
        repairs *= _stream(seed, _REPAIRS).exponential(1.0, len(times))
    return FaultSchedule(times.tolist(), kinds.tolist(), slots.tolist(), repairs.tolist())


def _stream(seed: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, purpose])


def _renewals(
    random: np.random.Generator, rate: float, duration_s: float, shape: float | None
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the times of events at a mean rate; a longer run only adds events."""
    if rate <= 0:
        return np.empty(0)
    scale = 1.0 if shape is None else math.gamma(1.0 + 1.0 / shape)
    blocks, last, size = list[Any](), 0.0, max(16, int(rate * duration_s * 1.1))
    while last < duration_s:
        gaps = random.exponential(1.0, size) if shape is None else random.weibull(shape, size) / scale
        block = last + np.cumsum(gaps) / rate
        blocks.append(block)
        last = float(block[-1])
    times = np.concatenate(blocks)
    return times[times < duration_s]


def _replay(scenario: Scenario, trace: tuple[DrawnFault, ...], seed: int) -> tuple[Any, Any, Any]:
    """Return a trace, repeated; every run except seed 0 begins at a random moment of it."""
    span_s = trace_span_s(trace)
    times = np.array([fault.time_s for fault in trace])
    kinds = np.array([int(fault.kind) for fault in trace], dtype=np.int64)
    slots = np.array([-1 if fault.slot is None else fault.slot % scenario.num_nodes for fault in trace], dtype=np.int64)
    if seed and math.isfinite(span_s):
        times = (times - _stream(seed, _OFFSET).random() * span_s) % span_s
    order = np.argsort(times, kind="stable")
    num = max(1, math.ceil(scenario.duration_s / span_s))
    times = np.concatenate([times[order] + (span_s * turn if turn else 0.0) for turn in range(num)])
    kinds, slots = np.tile(kinds[order], num), np.tile(slots[order], num)
    within = times < scenario.duration_s
    times, kinds, slots = times[within], kinds[within], slots[within]
    drawn = _stream(seed, _SLOTS).integers(0, scenario.num_ranks, len(times)) // scenario.node_size
    return times, kinds, np.where(slots < 0, drawn, slots)


# -- traces ------------------------------------------------------------------------------------------------------------

_KIND_OF = {
    **{kind.name.lower(): kind for kind in SimulatedFault},
    IncidentKind.WORKER_DIED.value: SimulatedFault.PROCESS,
    IncidentKind.WORKER_FAILED.value: SimulatedFault.PROCESS,
    IncidentKind.WORKER_HUNG.value: SimulatedFault.HANG,
    IncidentKind.NODE_LOST.value: SimulatedFault.NODE,
    IncidentKind.CANNOT_START.value: SimulatedFault.NODE,
    IncidentKind.NODE_UNHEALTHY.value: SimulatedFault.NODE,
}


def read_trace(path: Path) -> tuple[DrawnFault, ...]:
    """Read the faults of a file, or those that ended the cycles of a run.

    Args:
        path: A CSV file with a header, or a JSON file with a list of objects: ``time`` (seconds, or ISO 8601), ``kind``
            (``process``, ``hang``, ``node``, ``rack``, ``preemption``, or an incident's kind), and, where known,
            ``node`` (its number, or any name). Or a run directory.

    Returns:
        The faults by time. Dates count from the first one, times of a run directory from the start of the run.

    Raises:
        ConfigError: The path cannot be read, or has other contents, or no fault.
    """
    if path.is_dir():
        return _read_journal(path)
    try:
        text = read_file(path, follows_links=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the trace {path} cannot be read: {error}; give a CSV or JSON file, or a run directory"
        ) from None
    if path.suffix.lower() == ".json" or text.lstrip()[:1] in ("[", "{"):
        try:
            rows = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"the trace {path} is not JSON: {error}; write a list of objects") from None
        if isinstance(rows, dict):
            rows = rows.get("faults")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"the trace {path} must be a list of objects with time, kind and node")
    else:
        rows = list(csv.DictReader(text.splitlines(), skipinitialspace=True))
    return _sorted(_parse_rows(rows, path), path)


def _parse_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> list[DrawnFault]:
    numbered: dict[str, int] = {}
    found: list[tuple[float, bool, SimulatedFault, int | None]] = []
    for number, row in enumerate(rows, start=1):
        where = f"fault {number} of {path}"
        for name in ("time", "kind"):
            if row.get(name) in (None, ""):
                raise ConfigError(f"{where} has no {name}; the columns are time, kind and node")
        kind = str(row["kind"]).strip().lower()
        if kind not in _KIND_OF:
            raise ConfigError(f"{where}: there is no kind {kind!r}; {nearest(kind, _KIND_OF)}")
        time_s, is_date = _parse_time(row["time"], where)
        found.append((time_s, is_date, _KIND_OF[kind], _number_node(row.get("node"), numbered)))
    if len({is_date for _, is_date, _, _ in found}) > 1:
        raise ConfigError(f"the trace {path} has both seconds and dates; write one of them")
    begin = min((time_s for time_s, is_date, _, _ in found if is_date), default=0.0)
    return [DrawnFault(time_s - begin, kind, slot) for time_s, _, kind, slot in found]


def _parse_time(value: Any, where: str) -> tuple[float, bool]:
    """Return seconds, and whether they are a date's."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        try:
            moment = datetime.datetime.fromisoformat(str(value).strip())
        except ValueError:
            raise ConfigError(f"{where}: time {value!r} is neither seconds nor a date in ISO 8601") from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.timestamp(), True
    if not math.isfinite(seconds) or seconds < 0:
        raise ConfigError(f"{where}: time {value!r} must be 0 or more seconds")
    return seconds, False


def _number_node(node: Any, numbered: dict[str, int]) -> int | None:
    """Return a node's number: its own, or the index of its name among those of the trace."""
    text = "" if node is None else str(node).strip()
    if not text:
        return None
    return int(text) if text.isdecimal() else numbered.setdefault(text, len(numbered))


def _read_journal(run_dir: Path) -> tuple[DrawnFault, ...]:
    view = RunView.of(journal.read(run_dir))
    if view.newest is None:
        raise ConfigError(
            f"{run_dir} is not a run directory: it has no journal with events; specify a run directory or a file"
        )
    ending = [
        (one.time_s, one.decision, incident)
        for job in view.jobs
        for one in job.incidents
        if one.incident.get("kind") in CYCLE_ENDING and (incident := decode(one.incident, Incident)) is not None
    ]
    first: dict[tuple[str, int], tuple[float, Incident]] = {}  # of a cycle; the others are consequences
    for time_s, _, incident in ending:
        first.setdefault((incident.job, incident.cycle), (time_s, incident))
    causes = [(time_s, incident) for time_s, decision, incident in ending if decision] or list(first.values())
    numbered: dict[str, int] = {}
    faults = [
        DrawnFault(
            max(0.0, time_s - (view.began_ns or 0) / 1e9 - (incident.detected_after_s or 0.0)),
            _KIND_OF[incident.kind.value],
            numbered.setdefault(incident.node, len(numbered)) if incident.node else None,
        )
        for time_s, incident in causes
    ]
    return _sorted(faults, run_dir)


def _sorted(faults: list[DrawnFault], path: Path) -> tuple[DrawnFault, ...]:
    if not faults:
        raise ConfigError(f"the trace {path} holds no fault; give one with some, or leave it out")
    return tuple(sorted(faults, key=lambda fault: fault.time_s))
