"""Incidents, decisions and events are plain facts with a JSON round trip and one-line descriptions."""

from __future__ import annotations

import ast
import inspect

import msgspec
import pytest

from outlast.incidents import Decision, Event, EventKind, Incident, IncidentKind, RecoveryLevel


@pytest.mark.parametrize("kind", IncidentKind)
def test_every_kind_is_described_in_one_line(kind: IncidentKind) -> None:
    """Each kind of incident has a one-line description with the node."""
    line = Incident(kind=kind, node="b", exit_code=1).describe()
    assert "node b" in line
    assert "\n" not in line


def test_description_contains_all_facts() -> None:
    """The description contains rank, node, pid, section, iteration and evidence."""
    incident = Incident(
        kind=IncidentKind.WORKER_HUNG,
        node="worker-1",
        rank=3,
        pid=4711,
        section="step/allreduce",
        iteration=57,
        evidence={"summary": "train.py:88 in all_reduce"},
    )
    assert incident.describe() == (
        "rank 3 on node worker-1 (pid 4711) hangs in section 'step/allreduce' at iteration 57: "
        "train.py:88 in all_reduce"
    )


def test_description_of_a_death_contains_the_signal() -> None:
    """A worker ended by a signal is described with the signal's name."""
    incident = Incident(kind=IncidentKind.WORKER_DIED, node="a", rank=0, exit_code=-11)
    assert incident.describe() == "rank 0 on node a was ended by SIGSEGV"


def test_incident_survives_json() -> None:
    """An incident read from the journal or received from another agent equals the original."""
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="a", rank=0, exit_code=1, evidence={"x": [1]})
    assert msgspec.json.decode(msgspec.json.encode(incident), type=Incident) == incident


def test_decision_survives_json() -> None:
    """A decision equals the original after a JSON round trip."""
    decision = Decision(recovery_level=RecoveryLevel.STOP, reason="over", exit_code=93, quarantine=("a",))
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision


def test_event_of_an_unknown_kind_is_rejected() -> None:
    """A line of an unknown kind is not an event."""
    line = b'{"kind":"surprise","wall_ns":1,"mono_ns":1,"run_id":"r","job":"j","node":"n","proc":"p"}'
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(line, type=Event)


def test_recovery_levels_are_ordered_by_cost() -> None:
    """The recovery policy's levels are ordered from cheap to expensive."""
    assert list(RecoveryLevel) == sorted(RecoveryLevel)
    assert RecoveryLevel.RERUN_STEP < RecoveryLevel.RESTART_WORKERS < RecoveryLevel.REPLACE_NODE < RecoveryLevel.STOP


@pytest.mark.parametrize("enum", [RecoveryLevel, IncidentKind, EventKind])
def test_every_enum_member_is_documented(enum: type) -> None:
    """Each recovery level, kind of incident and kind of event has a docstring."""
    body = ast.parse(inspect.getsource(enum)).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            assert isinstance(following, ast.Expr), f"{ast.unparse(statement)} has no docstring"
