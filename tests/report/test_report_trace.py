"""``trace.json``: a trace that Perfetto and chrome://tracing can read."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from made_ledger import make_ledger

from outlast.goodput.account import StepSample
from outlast.report import trace
from outlast.report.trace import RUN_PID, make_trace

Event = dict[str, Any]


def events_of(made: bytes) -> list[Event]:
    events: list[Event] = json.loads(made)["traceEvents"]
    return events


def check_format(events: list[Event]) -> None:
    """Check the required fields of each event, and that the spans of a thread nest."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    pairs: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "XiMCbe"
        assert isinstance(event["name"], str)
        for name in ("ts", "pid", "tid"):
            assert isinstance(event[name], (int, float)), event
            assert math.isfinite(event[name])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
        elif event["ph"] == "M":
            assert event["args"]
        elif event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            pairs[event["cat"], event["id"]].append(event["ph"])
    assert all(pair == ["b", "e"] for pair in pairs.values())
    for spans in threads.values():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or end <= ends[-1] + 0.2, "spans of one thread overlap without one being in the other"
            ends.append(end)


def test_every_event_has_the_required_fields() -> None:
    """All have ``ph``, ``ts``, ``pid`` and ``tid``; durations are not negative; spans of a thread nest."""
    check_format(events_of(make_trace(make_ledger(num_nodes=3, num_cycles=4))))


def test_nodes_are_processes_and_ranks_are_threads() -> None:
    """Each rank of each node is a named thread with the cycles in which it ran."""
    events = events_of(make_trace(make_ledger(num_nodes=2, ranks_each=2, num_cycles=3)))
    processes = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    assert processes == {"run made": RUN_PID, "node-000": 1, "node-001": 2}
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {key: threads[key] for key in ((1, 0), (1, 1), (2, 2), (2, 3))} == {
        (1, 0): "rank 0",
        (1, 1): "rank 1",
        (2, 2): "rank 2",
        (2, 3): "rank 3",
    }
    on_rank_3 = [one["name"] for one in events if (one["ph"], one["pid"], one["tid"]) == ("X", 2, 3)]
    assert [name for name in on_rank_3 if name.startswith("cycle")] == ["cycle 0", "cycle 1", "cycle 2"]


def test_parts_are_a_track_and_incidents_are_instants() -> None:
    """The parts add up to the wall time; an incident is an instant on its rank, with its cost and the reason of the
    decision."""
    ledger = make_ledger()
    events = events_of(make_trace(ledger))
    parts = [one for one in events if (one["ph"], one["pid"], one["tid"]) == ("X", RUN_PID, 0)]
    assert sum(one["dur"] for one in parts) == pytest.approx(ledger.wall_s * 1e6)
    marks = [one for one in events if one["ph"] == "i" and one["name"].startswith("incident")]
    assert [(one["pid"], one["tid"]) for one in marks] == [(1, 1), (2, 2)]
    assert marks[0]["ts"] == ledger.incidents[0].at_s * 1e6
    assert marks[0]["args"]["cost_s"] == ledger.incidents[0].cost_s
    saves = [one for one in events if one["name"].startswith("save of") and one["ph"] == "X"]
    assert len(saves) == len(ledger.saves)


def test_a_run_of_many_ranks_has_one_thread_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a limit the ranks of a node share a thread, so that a viewer can still open the trace."""
    ledger = make_ledger(num_nodes=4, ranks_each=8, num_cycles=3)
    full = events_of(make_trace(ledger))
    monkeypatch.setattr(trace, "MAX_RANK_SPANS", 10)
    small = events_of(make_trace(ledger))
    check_format(small)
    assert len(small) < len(full) / 2
    assert not [one for one in small if one["name"] == "thread_name" and one["args"]["name"].startswith("rank")]
    assert [one["tid"] for one in small if one["ph"] == "i" and one["pid"] == 1]


def test_losses_that_are_not_finite_are_omitted() -> None:
    """JSON has no NaN: a trace of a run with a NaN or infinite loss stays valid."""
    steps = tuple(StepSample(at_s=1.0, iteration=1, loss=loss) for loss in (math.nan, math.inf, 2.0))
    events = events_of(make_trace(msgspec.structs.replace(make_ledger(), steps=steps)))
    assert [one["args"]["value"] for one in events if one["ph"] == "C"] == [2.0]
