"""A session detects slow ranks: only the slow rank is reported, and all ranks exit for it if that is configured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from slowed import SCRIPT

from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind, IncidentKind
from outlast.journal import read
from outlast.policy.rerun import Finding
from outlast.runtime.diagnoses import read_diagnosis

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
SLOWED_AT = 28


def train(folder: Path, world_size: int, **options: Any) -> tuple[list[int], list[str]]:
    """Run the script in ``folder``; return exit codes and outputs."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(folder), json.dumps(options), world_size=world_size) as ranks:
        return ranks.end(400)


def slow_from(iteration: int, rank: int) -> list[dict[str, Any]]:
    return [{"kind": "slow", "rank": rank, "iteration": iteration, "factor": 4.0}]


def events(folder: Path, kind: EventKind) -> list[Event]:
    return [event for event in read(folder / "run") if event.kind == kind]


@pytest.mark.extended
@pytest.mark.slow
def test_only_the_slow_rank_is_reported(tmp_path: Path) -> None:
    """Rank 2 becomes slow and is reported after three such windows, relatively and individually. The ranks that wait
    for it are not reported, nor a rank that evaluates within its steps, nor one with a section around a forward pass
    that is timed anyway. A section of only one rank is reported."""
    options: dict[str, Any] = {"total": 50, "evaluates": 1, "sections": 3, "augments": True}
    codes, outputs = train(tmp_path, 4, plan=slow_from(SLOWED_AT, 2), **options)
    assert codes == [0] * 4, "\n".join(outputs)
    reports = events(tmp_path, EventKind.STRAGGLER_REPORT)
    assert len(reports) >= 6, "a report as often as there are steps for one"
    named = [set(report.data["named"]) for report in reports]
    assert all(ranks <= {2} for ranks in named), outputs[0]
    begins = [0, *(report.iteration or 0 for report in reports)]
    assert [begin for ranks, begin in zip(named, begins, strict=False) if ranks and begin >= SLOWED_AT], outputs[0]
    assert not [begin for ranks, begin in zip(named, begins, strict=False) if ranks and begin < SLOWED_AT], outputs[0]
    incidents = [event.data["incident"] for event in events(tmp_path, EventKind.INCIDENT)]
    assert {(incident["kind"], incident["rank"]) for incident in incidents} == {(IncidentKind.STRAGGLER, 2)}
    for text in ("Some CPUs have worse relative performance", "Some CPUs performance dropped"):
        assert f"STRAGGLER DETECTION WARNING: {text}. Affected ranks: 2" in outputs[0]
    assert "CPU relative performance:\n  Rank=2 " in outputs[0]
    assert "only rank 0 of 4 ranks entered section 'augment'" in outputs[0]
    assert not any("evaluation" in note for report in reports for note in report.data["notes"])


@pytest.mark.slow
def test_all_ranks_exit_for_a_slow_one_without_loss(tmp_path: Path) -> None:
    """With stop_if_detected all ranks save after the same iteration, report the slow rank to the launcher and exit
    with 18; the next start resumes from there."""
    codes, outputs = train(tmp_path / "hit", 2, total=60, stop=True, plan=slow_from(6, 1))
    assert codes == [ExitReason.STRAGGLER] * 2, "\n".join(outputs)
    ended = {event.iteration for event in events(tmp_path / "hit", EventKind.SESSION_ENDED)}
    (stopped_after,) = ended
    assert stopped_after is not None
    assert 6 < stopped_after < 60
    (named,) = [
        event.data["incident"]
        for event in events(tmp_path / "hit", EventKind.INCIDENT)
        if event.data["incident"]["kind"] == IncidentKind.STRAGGLER
    ]
    assert (named["rank"], named["section"]) == (1, "forward")
    job = events(tmp_path / "hit", EventKind.SESSION_ENDED)[0].job
    for rank in range(2):
        diagnosis = read_diagnosis(tmp_path / "hit" / "run", job, 0, rank)
        assert diagnosis is not None
        assert (diagnosis.finding, diagnosis.rank, diagnosis.iteration) == (Finding.SLOW, 1, stopped_after)
    codes, outputs = train(tmp_path / "hit", 2, total=60, stop=True)
    assert codes == [0] * 2, "\n".join(outputs)
    (restored,) = {event.iteration for event in events(tmp_path / "hit", EventKind.RESTORED)}
    assert restored == stopped_after
    assert json.loads((tmp_path / "hit" / "result.json").read_text())["seen"] == [*range(60)]
