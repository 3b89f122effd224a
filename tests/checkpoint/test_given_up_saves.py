"""A save that fails because the surrounding call is abandoned is not an incident."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.checkpoint.directory import Refusal, SaveAttempt
from outlast.checkpoint.outcomes import Outcomes
from outlast.checkpoint.save import Save, SaveHandle
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError
from outlast.runtime.journal import Journal


def outcomes_of(folder: Path, is_left: Callable[[], bool] | None = None) -> Outcomes:
    """Return outcomes with a journal in a folder; no save of this test has memory to release."""
    journal = Journal(folder, run_id="r", job="j", node="n", proc="rank-0")
    return Outcomes(WorkerEnv(node="n"), journal, None, Refusal(), suspect_window=0, is_left=is_left)  # type: ignore[arg-type]


def journal_text(folder: Path) -> str:
    """Return the contents of the journal."""
    return "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.jsonl"))


def fail(outcomes: Outcomes) -> SaveHandle:
    """Fail a save."""
    handle = SaveHandle(3, limit_s=1.0)
    save = Save(
        iteration=3,
        attempt=SaveAttempt(job="j", cycle=0, token="t", ordinal=0),
        handle=handle,
        started_ns=0,
        stall_s=0.0,
        tiers=frozenset(),
    )
    outcomes.failed(save, "local", CheckpointError("a connection ended"))
    return handle


def test_a_failure_outside_a_call_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failed save is logged, counted and written to the journal."""
    outcomes = outcomes_of(tmp_path / "journal")
    assert fail(outcomes).error is not None
    assert outcomes.num_failures == 1
    assert [record.getMessage() for record in caplog.records] == ["save failed: a connection ended"]
    assert "save_failed" in journal_text(tmp_path / "journal")


def test_a_failure_of_an_abandoned_call_is_not_an_incident(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save that fails while the call is abandoned is neither an incident nor counted.

    This also holds if the peers' exit is detected before this rank's.
    """
    call_states = iter([False, False, True, True])
    outcomes = outcomes_of(tmp_path / "journal", is_left=lambda: next(call_states))
    with caplog.at_level(logging.INFO):
        assert fail(outcomes).error is not None
    assert outcomes.num_failures == 0
    assert ["abandoned" in record.getMessage() for record in caplog.records] == [True]
    assert "save_failed" not in journal_text(tmp_path / "journal")
