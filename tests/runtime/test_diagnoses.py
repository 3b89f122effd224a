"""The diagnosis that a worker writes is read by its agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.policy.rerun import Diagnosis, Finding
from outlast.runtime.diagnoses import read_diagnosis, write_diagnosis

DIAGNOSIS = Diagnosis(finding=Finding.CORRECT, rank=3, node="n1", device="n1/cpu-1", iteration=7, first="nan")


def test_diagnosis_is_read_by_job_cycle_and_rank(tmp_path: Path) -> None:
    """Job, cycle and rank select the diagnosis; other values find none."""
    path = write_diagnosis(tmp_path, "job/1", 2, 3, DIAGNOSIS)
    assert path.name == "job_1-cycle-2-rank-3.json"
    assert read_diagnosis(tmp_path, "job/1", 2, 3) == DIAGNOSIS
    assert read_diagnosis(tmp_path, "job/1", 3, 3) is None
    assert read_diagnosis(tmp_path / "nowhere", "job/1", 2, 3) is None


@pytest.mark.parametrize("data", [b"", b"{", b'{"finding": "odd", "rank": 0, "iteration": 0}', b"\xff"])
def test_unreadable_diagnosis_is_none(tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file loses the diagnosis and is logged, and does not end the agent."""
    write_diagnosis(tmp_path, "j", 0, 0, DIAGNOSIS).write_bytes(data)
    assert read_diagnosis(tmp_path, "j", 0, 0) is None
    assert "cannot be read" in caplog.text
