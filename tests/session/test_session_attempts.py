"""A session runs a step with an invalid result again before the weights change; the final state is not affected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attempted import SCRIPT
from ranks import Ranks

from outlast.errors import ExitReason
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.journal import read

pytestmark = [pytest.mark.process]


def train(folder: Path, world_size: int = 1, **options: Any) -> tuple[list[int], Any]:
    """Run the script in ``folder``; return the exit codes and the result, or the outputs if there is none."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    with Ranks(script, str(folder), json.dumps(options), world_size=world_size) as ranks:
        codes, outputs = ranks.end()
    return codes, json.loads(result.read_text()) if result.exists() else outputs


def invalid_results(folder: Path) -> list[Incident]:
    """Return the incidents of invalid results in the run's journal."""
    incidents = [
        msgspec.convert(event.data["incident"], Incident)
        for event in read(folder / "run")
        if event.kind == EventKind.INCIDENT
    ]
    return [incident for incident in incidents if incident.kind == IncidentKind.INVALID_RESULT]


def nan_at(iteration: int, **more: Any) -> dict[str, Any]:
    return {"kind": "nan", "target": "activation", "iteration": iteration, "rank": 0, **more}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_transient_nan_changes_no_bit(tmp_path: Path, world_size: int) -> None:
    """At the first step of a process, in the middle, and at the first step after a restore, the step gets the same
    batch and random numbers again; weights, moments, batch statistics and losses are those of the undisturbed run."""
    codes, undisturbed = train(tmp_path / "calm", world_size)
    assert codes == [0] * world_size, undisturbed
    plan = [nan_at(0), nan_at(5), nan_at(8)]
    codes, first = train(tmp_path / "hit", world_size, plan=plan, total=8)
    assert codes == [0] * world_size, first
    assert [entry for entry in first["seen"] if entry[0] in (0, 5)] == [[0, 0, 1], [0, 1, 1], [5, 0, 6], [5, 1, 6]]
    codes, second = train(tmp_path / "hit", world_size, plan=plan)
    assert codes == [0] * world_size, second
    assert second["seen"][:2] == [[8, 0, 9], [8, 1, 9]]
    assert second["digest"] == undisturbed["digest"]
    found = [incident.evidence["diagnosis"] for incident in invalid_results(tmp_path / "hit")]
    assert [(one["iteration"], one["finding"], one["rank"]) for one in found] == [
        (iteration, "transient", 0) for iteration in (0, 5, 8)
    ]


@pytest.mark.slow
def test_a_reproducible_nan_ends_the_run_with_a_suspect_save(tmp_path: Path) -> None:
    """If the same batch gives the same NaN, all ranks exit with 16, checkpoints and tracker are unchanged, and
    suspect/ has the state before the step."""
    codes, output = train(tmp_path / "run", 2, bad_batch=6)
    assert codes == [ExitReason.RESUME_TO_DISAMBIGUATE] * 2, output
    store = tmp_path / "run" / "global"
    assert sorted(path.name for path in store.glob("step-*")) == ["step-4"]
    assert (store / "latest").read_text().strip() == "step-4"
    assert [path.name for path in (store / "suspect").glob("step-*")] == ["step-5"]
    (incident,) = invalid_results(tmp_path / "run")
    diagnosis = incident.evidence["diagnosis"]
    assert (diagnosis["finding"], diagnosis["iteration"], diagnosis["rank"]) == ("reproduced", 5, 0)
    assert (diagnosis["first"], diagnosis["second"]) == ("nan", "nan")
    assert diagnosis["batch"]


@pytest.mark.slow
def test_determinism_is_reported_at_the_end(tmp_path: Path) -> None:
    """If each step runs twice to measure determinism, the journal has the report at the end, and the result is that
    of an ordinary run."""
    codes, undisturbed = train(tmp_path / "calm")
    assert codes == [0], undisturbed
    codes, measured = train(tmp_path / "twice", rerun={"rerun_mode": "report_determinism_stats"})
    assert codes == [0], measured
    assert measured["digest"] == undisturbed["digest"]
    (event,) = [e for e in read(tmp_path / "twice" / "run") if e.kind == EventKind.DETERMINISM_REPORT]
    found = event.data["report"]["loss"]
    assert (found["num_compared"], found["num_different"]) == (12, 0)


@pytest.mark.campaign
def test_differing_replicas_are_not_saved(tmp_path: Path) -> None:
    """After a bit flip in the weights of one of three replicas, all ranks exit with 17 at the next save, and the
    journal identifies the rank; without a majority they exit with 16."""
    flip = {"kind": "bit_flip", "target": "weight", "iteration": 5, "rank": 1, "bit": 3}
    codes, output = train(tmp_path / "three", 3, plan=[flip], digest=100)
    assert codes == [ExitReason.FAILED_VALIDATION] * 3, output
    assert sorted(path.name for path in (tmp_path / "three" / "global").glob("step-*")) == ["step-4"]
    (incident,) = invalid_results(tmp_path / "three")
    assert (incident.rank, incident.evidence["diagnosis"]["finding"]) == (1, "persistent")
    codes, output = train(tmp_path / "two", 2, plan=[flip], digest=1)
    assert codes == [ExitReason.RESUME_TO_DISAMBIGUATE] * 2, output
    (incident,) = invalid_results(tmp_path / "two")
    assert incident.iteration == 6
    assert incident.evidence["diagnosis"]["finding"] == "split"
