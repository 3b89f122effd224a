"""The example trains on the GPU to bit-identical results, with and without faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_runs import DETERMINISTIC, EXAMPLE, LAUNCHED, PATIENCE_S, PROGRAMS, read_facts, run_alone

from outlast.chaos import Fault, FaultPlan, verify_fired
from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.testing import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.process]

TOTAL, SAVE_INTERVAL, FAULT_AT = 14, 4, 10
SETTINGS = """
fault_plan = "{folder}/plan.toml"
[checkpoint]
directory = "{folder}/saved"
save_interval = {interval}
async_save = false
"""


def train_undisturbed(folder: Path) -> dict[str, Any]:
    """Return the result of the example without a fault."""
    out = folder / "undisturbed.json"
    words = [f"--iterations={TOTAL}", f"--save-interval={SAVE_INTERVAL}", f"--checkpoint-dir={folder / 'undisturbed'}"]
    run_alone(EXAMPLE, *words, f"--out={out}", folder=folder / "undisturbed-output")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))


def check_equal(found: dict[str, Any], undisturbed: dict[str, Any], folder: Path) -> None:
    """Check that two results are bit-identical; if not, report whether two undisturbed runs are."""
    if found != undisturbed:
        repeats = train_undisturbed(folder) == undisturbed
        why = "the restart changes the result" if repeats else "this device repeats not even an undisturbed run"
        pytest.fail(f"{why}: {found} instead of {undisturbed}")


def start(folder: Path, plan: FaultPlan) -> Cluster:
    """Return a cluster of one rank that trains under a plan of faults."""
    (folder / "plan.toml").write_text(plan.to_toml())
    (folder / "outlast.toml").write_text(SETTINGS.format(folder=folder, interval=SAVE_INTERVAL))
    words = [f"--config={folder / 'outlast.toml'}", f"--iterations={TOTAL}", f"--out={folder / 'result.json'}"]
    return Cluster(
        EXAMPLE,
        *words,
        run_dir=folder / "run",
        num_nodes=1,
        nproc_per_node=1,
        options=LAUNCHED,
        environment=DETERMINISTIC,
    )


def restored(folder: Path) -> list[int | None]:
    """Return the iterations at which the run resumed."""
    return [event.iteration for event in read(folder / "run") if event.kind == EventKind.RESTORED]


def test_a_killed_rank_changes_no_bit(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """A rank that is killed halfway resumes from the newest checkpoint: weights, optimizer state and losses are those
    of an undisturbed run."""
    plan = FaultPlan(faults=[Fault(kind="kill", rank=0, iteration=FAULT_AT)])
    with start(tmp_path, plan) as cluster:
        assert cluster.wait(PATIENCE_S) == [0], cluster.tails()
    assert verify_fired(plan, tmp_path / "run") == []
    assert restored(tmp_path) == [FAULT_AT // SAVE_INTERVAL * SAVE_INTERVAL]
    check_equal(json.loads((tmp_path / "result.json").read_text()), undisturbed, tmp_path)


def test_a_preemption_changes_no_bit(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """After SIGTERM the step is finished and saved, and the exit code reports the preemption; the restarted run resumes
    at that iteration and ends like an undisturbed one."""
    plan = FaultPlan(faults=[Fault(kind="sigterm", rank=0, iteration=FAULT_AT)])
    with start(tmp_path, plan) as cluster:
        assert cluster.wait(PATIENCE_S / 2) == [ExitReason.PREEMPTED], cluster.tails()
    assert not (tmp_path / "result.json").exists()
    assert verify_fired(plan, tmp_path / "run") == []
    with start(tmp_path, plan) as cluster:
        assert cluster.wait(PATIENCE_S / 2) == [0], cluster.tails()
    (resumed,) = restored(tmp_path)
    assert resumed in (FAULT_AT, FAULT_AT + 1)
    check_equal(json.loads((tmp_path / "result.json").read_text()), undisturbed, tmp_path)


def test_an_in_process_restart_changes_no_bit(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """An exception between backward and the optimizer's step is recovered in the same process, from the state in device
    memory, at the same iteration; the result is that of the example, which has no wrapper."""
    program = PROGRAMS / "gpt_in_process.py"
    output = run_alone(program, str(EXAMPLE), str(tmp_path), str(TOTAL), str(FAULT_AT), folder=tmp_path)
    calls = read_facts(output)
    assert [(one["call"], one["begins"]) for one in calls] == [(0, 0), (1, FAULT_AT)], output
    assert len({one["pid"] for one in calls}) == 1
    tiers = [event.data["tier"] for event in read(tmp_path / "run") if event.kind == EventKind.RESTORED]
    assert tiers == ["in_place"]
    check_equal(json.loads((tmp_path / "result.json").read_text()), undisturbed, tmp_path)
