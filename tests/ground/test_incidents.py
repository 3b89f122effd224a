"""Incidents, decisions and events: plain facts that survive JSON and read well."""

from __future__ import annotations

import ast
import inspect

import msgspec
import pytest

from outlast.incidents import Decision, Event, EventKind, Incident, IncidentKind, RecoveryLevel


@pytest.mark.parametrize("kind", IncidentKind)
def test_every_kind_reads_as_one_line(kind: IncidentKind) -> None:
    """Each kind of trouble is described in one line that names the node."""
    line = Incident(kind=kind, node="b", exit_code=1).describe()
    assert "node b" in line
    assert "\n" not in line


def test_description_tells_who_where_when_and_why() -> None:
    """An incident's line names rank, node, pid, section, iteration, and what was seen."""
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


def test_description_of_a_death_names_the_signal() -> None:
    """A worker ended by a signal is described with that signal's name."""
    incident = Incident(kind=IncidentKind.WORKER_DIED, node="a", rank=0, exit_code=-11)
    assert incident.describe() == "rank 0 on node a was ended by SIGSEGV"


def test_incident_survives_json() -> None:
    """An incident read back from the journal or from another agent is the same."""
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="a", rank=0, exit_code=1, evidence={"x": [1]})
    assert msgspec.json.decode(msgspec.json.encode(incident), type=Incident) == incident


def test_decision_survives_json() -> None:
    """A decision read back is the same."""
    decision = Decision(recovery_level=RecoveryLevel.STOP, reason="over", exit_code=93, quarantine=("a",))
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision


def test_event_of_an_unknown_kind_is_refused() -> None:
    """One schema for everything: a line of another kind is no event."""
    line = b'{"kind":"surprise","wall_ns":1,"mono_ns":1,"run_id":"r","job":"j","node":"n","proc":"p"}'
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(line, type=Event)


def test_level_go_from_cheap_to_dear() -> None:
    """The recovery policy's recovery levels are ordered by their cost."""
    assert list(RecoveryLevel) == sorted(RecoveryLevel)
    assert RecoveryLevel.RERUN_STEP < RecoveryLevel.RESTART_WORKERS < RecoveryLevel.REPLACE_NODE < RecoveryLevel.STOP


@pytest.mark.parametrize("enum", [RecoveryLevel, IncidentKind, EventKind])
def test_every_word_is_explained(enum: type) -> None:
    """Each recovery level, kind of incident and kind of event has its meaning written under it."""
    body = ast.parse(inspect.getsource(enum)).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            assert isinstance(following, ast.Expr), f"{ast.unparse(statement)} has no text under it"
