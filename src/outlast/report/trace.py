"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: nodes are processes, ranks are threads.

Process 0 is the whole run: the division of its time, its cycles, saves, loads, and values over time. The format is the
Trace Event Format's JSON: times in microseconds since the start of the run. All events, including metadata, have
``ph``, ``ts``, ``pid`` and ``tid``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from outlast.goodput.account import CycleSpan, IncidentCost, Warned
from outlast.goodput.ledger import Ledger
from outlast.wording import number_ranges

RUN_PID = 0
MAX_RANK_SPANS = 200_000
"""Above this number a node has one thread instead of one for each rank."""
_TRACKS = ("parts", "cycles", "saves", "loads", "jobs", "incidents")
_NODE_TID = 1_000_000
"""Thread of a node for events without a rank; larger than any rank."""


def make_trace(ledger: Ledger) -> bytes:
    events = list(_TraceEvents(ledger).events())
    other = {"run_id": ledger.run_id, "began": ledger.began, "headline": ledger.headline}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


class _TraceEvents:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        names = dict.fromkeys(node.node for cycle in ledger.cycles for node in cycle.nodes)
        names.update(dict.fromkeys(one.node for one in ledger.incidents if one.node))
        names.update(dict.fromkeys(one.node for one in ledger.warned if one.node))
        self._pids = {name: place for place, name in enumerate(names, 1)}
        num_spans = sum(len(node.ranks) for cycle in ledger.cycles for node in cycle.nodes)
        self._has_ranks = num_spans <= MAX_RANK_SPANS

    def events(self) -> Iterator[dict[str, Any]]:
        yield from self._names()
        yield from self._run()
        for cycle in self._ledger.cycles:
            yield from self._cycle(cycle)
        for incident in self._ledger.incidents:
            yield self._mark(incident, f"incident: {incident.kind}", _facts(incident))
        for warning in self._ledger.warned:
            yield self._mark(warning, f"warning: {warning.kind}", {"text": warning.text})

    def _names(self) -> Iterator[dict[str, Any]]:
        yield _name("process_name", RUN_PID, 0, f"run {self._ledger.run_id}".strip())
        yield _order("process_sort_index", RUN_PID, 0, -1)
        for tid, track in enumerate(_TRACKS):
            yield _name("thread_name", RUN_PID, tid, track)
            yield _order("thread_sort_index", RUN_PID, tid, tid)
        for node, pid in self._pids.items():
            yield _name("process_name", pid, 0, node)
            yield _order("process_sort_index", pid, 0, pid)
            yield _name("thread_name", pid, _NODE_TID, "node")
            yield _order("thread_sort_index", pid, _NODE_TID, -1)
            ranks = {
                rank for cycle in self._ledger.cycles for one in cycle.nodes if one.node == node for rank in one.ranks
            }
            for rank in sorted(ranks) if self._has_ranks else ():
                yield _name("thread_name", pid, rank, f"rank {rank}")
                yield _order("thread_sort_index", pid, rank, rank)

    def _run(self) -> Iterator[dict[str, Any]]:
        ledger = self._ledger
        for segment in ledger.segments:
            facts: dict[str, Any] = {"job": segment.job, "cycle": segment.cycle, "incident": segment.incident}
            if segment.straggler_s:
                facts["straggler_s"] = segment.straggler_s
            yield _span(str(segment.part), RUN_PID, 0, segment.start_s, segment.end_s, facts)
        for number, save in enumerate(ledger.saves):
            name = f"save of iteration {save.iteration}"
            facts = {"tiers": list(save.tiers), "num_bytes": save.num_bytes, "duration_s": save.duration_s}
            yield _span(name, RUN_PID, 2, save.at_s - save.stall_s, save.at_s, facts)
            if save.duration_s is not None:  # saves overlap one another: only events with an id may
                shared = {"cat": "save", "id": number, "pid": RUN_PID, "tid": 2, "name": f"{name} becomes durable"}
                yield {"ph": "b", "ts": _us(save.at_s), "args": facts, **shared}
                yield {"ph": "e", "ts": _us(save.at_s + save.duration_s), **shared}
        for load in ledger.loads:
            facts = {"tiers": load.tiers, "bytes_read": load.bytes_read, "rejected": list(load.rejected)}
            yield _span(f"load of iteration {load.iteration}", RUN_PID, 3, load.at_s - load.load_s, load.at_s, facts)
        for job in ledger.jobs:
            yield _span(job.job, RUN_PID, 4, job.start_s, job.end_s, {"exit_code": job.exit_code, "reason": job.reason})
        for step in ledger.steps:
            if step.step_s is not None:
                yield _counter("step time (s)", step.at_s, step.step_s)
            if step.loss is not None and abs(step.loss) < float("inf"):  # neither infinite nor NaN
                yield _counter("loss", step.at_s, step.loss)

    def _cycle(self, cycle: CycleSpan) -> Iterator[dict[str, Any]]:
        name = f"cycle {cycle.cycle}"
        facts = {
            "job": cycle.job,
            "world_size": cycle.world_size,
            "from_iteration": cycle.from_iteration,
            "to_iteration": cycle.to_iteration,
            "reason": cycle.reason,
        }
        yield _span(name, RUN_PID, 1, cycle.start_s, cycle.end_s, facts)
        for node in cycle.nodes:
            pid = self._pids[node.node]
            ranks = {"job": cycle.job, "node_rank": node.node_rank, "ranks": ", ".join(number_ranges(node.ranks))}
            for tid in node.ranks if self._has_ranks else (_NODE_TID,):
                yield _span(name, pid, tid, node.start_s, node.end_s, ranks)
                if cycle.steps_start_s is not None and node.start_s <= cycle.steps_start_s <= node.end_s:
                    yield _span("trains", pid, tid, cycle.steps_start_s, node.end_s, {})

    def _mark(self, one: IncidentCost | Warned, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Return an incident as an instant: on its rank, on its node, or on the run's track of incidents."""
        pid = self._pids.get(one.node, RUN_PID)
        tid, scope = _TRACKS.index("incidents"), "g"
        if pid != RUN_PID:
            tid, scope = (one.rank, "t") if one.rank is not None and self._has_ranks else (_NODE_TID, "p")
        return {
            "ph": "i", "ts": _us(one.at_s), "pid": pid, "tid": tid, "s": scope, "cat": "incident", "name": name,
            "args": facts,
        }  # fmt: skip


def _facts(incident: IncidentCost) -> dict[str, Any]:
    return {
        "text": incident.text,
        "recovery_level": incident.recovery_level,
        "reason": incident.reason,
        "cost_s": incident.cost_s,
        "parts": incident.parts,
        "lost_iterations": incident.lost_iterations,
        "detected_after_s": incident.detected_after_s,
        "recovered_after_s": incident.recovered_after_s,
    }


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 1)


def _span(name: str, pid: int, tid: int, start_s: float, end_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    begin = _us(start_s)
    args = {key: value for key, value in facts.items() if value not in (None, "", [], {})}
    return {
        "ph": "X", "ts": begin, "dur": max(0.0, round(_us(end_s) - begin, 1)), "pid": pid, "tid": tid, "name": name,
        "args": args,
    }  # fmt: skip


def _counter(name: str, at_s: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "ts": _us(at_s), "pid": RUN_PID, "tid": 0, "name": name, "args": {"value": value}}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _order(kind: str, pid: int, tid: int, place: int) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": {"sort_index": place}}
