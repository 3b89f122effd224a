"""A save that fails because the call around it is left is no trouble of its own."""

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
    """Return outcomes that write their events into a folder; no save of this test has memory to give back."""
    journal = Journal(folder, run_id="r", job="j", node="n", proc="rank-0")
    return Outcomes(WorkerEnv(node="n"), journal, None, Refusal(), suspect_window=0, is_left=is_left)  # type: ignore[arg-type]


def written(folder: Path) -> str:
    """Return what the journal holds."""
    return "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.jsonl"))


def fail(outcomes: Outcomes) -> SaveHandle:
    """Have a save fail."""
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


def test_without_a_call_every_failure_is_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported, and counts."""
    outcomes = outcomes_of(tmp_path / "journal")
    assert fail(outcomes).error is not None
    assert outcomes.num_failures == 1
    assert [record.getMessage() for record in caplog.records] == ["save failed: a connection ended"]
    assert "save_failed" in written(tmp_path / "journal")


def test_what_fails_as_the_call_is_left_is_abandoned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is neither an incident nor counted, also where the peers' leaving is noticed before one's own."""
    looks = iter([False, False, True, True])
    outcomes = outcomes_of(tmp_path / "journal", is_left=lambda: next(looks))
    with caplog.at_level(logging.INFO):
        assert fail(outcomes).error is not None
    assert outcomes.num_failures == 0
    assert ["abandoned" in record.getMessage() for record in caplog.records] == [True]
    assert "save_failed" not in written(tmp_path / "journal")
