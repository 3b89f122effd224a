"""Decisions after an invalid result, from the step to the end of the run, with real processes and a real launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attempted import SCRIPT
from ranks import Ranks

from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind, Incident, IncidentKind
from outlast.policy.rerun import Diagnosis
from outlast.testing import Cluster

pytestmark = [pytest.mark.process]

WITHIN_S = 120.0
ON_ONE_DEVICE = {"kind": "nan", "target": "activation", "iteration": 5, "device": "victim", "persistent": True}
FLIP = {"kind": "bit_flip", "target": "weight", "iteration": 5, "rank": 1, "bit": 3}


class RunOutcome:
    """A run of the script that has ended."""

    def __init__(self, folder: Path, codes: list[int], events: list[Event], tails: str) -> None:
        self.folder, self.codes, self.events, self.tails = folder, codes, events, tails
        path = folder / "result.json"
        self.result: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None

    @property
    def cycles(self) -> int:
        """Number of cycles that were started."""
        return len({event.cycle for event in self.events if event.kind == EventKind.CYCLE_STARTED})

    @property
    def begins(self) -> list[dict[str, Any]]:
        """The first iteration and state of each process that ran a step, by cycle and rank."""
        lines = (self.folder / "begins.jsonl").read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda begin: (begin["cycle"], begin["rank"]))

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The launcher's decisions, in order."""
        return [event.data["verdict"] for event in self.events if event.kind == EventKind.DECISION]

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """The workers' diagnoses of invalid results, in order."""
        incidents = [
            msgspec.convert(event.data["incident"], Incident)
            for event in self.events
            if event.kind == EventKind.INCIDENT and event.proc.startswith("rank")
        ]
        return [
            msgspec.convert(one.evidence["diagnosis"], Diagnosis)
            for one in incidents
            if one.kind == IncidentKind.INVALID_RESULT
        ]

    def node_of(self, cycle: int, rank: int) -> str:
        """Return the node that ran a rank."""
        return next(str(one["node"]) for one in self.begins if (one["cycle"], one["rank"]) == (cycle, rank))


def run_script(
    folder: Path,
    *,
    num_nodes: int = 2,
    num_spares: int = 0,
    nproc_per_node: int = 1,
    lost_rank: int | None = None,
    **options: Any,
) -> RunOutcome:
    """Run the script in ``folder`` under ``outlast run`` until all agents have ended.

    Args:
        lost_rank: Rank whose node is killed once a fault of the plan was injected.
        options: Options of the script. Saves are synchronous, so that they are committed before a fault.
    """
    options["checkpoint"] = {"async_save": False, **options.get("checkpoint", {})}
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with Cluster(
        script,
        str(folder),
        json.dumps({**options, "gate": True}),
        run_dir=folder / "run",
        num_nodes=num_nodes,
        num_spares=num_spares,
        nproc_per_node=nproc_per_node,
    ) as cluster:
        for number in range(num_nodes + num_spares):
            cluster.wait_for(_is_joined(f"node-{number}"), WITHIN_S)
        (folder / "go").touch()
        if lost_rank is not None:
            cluster.wait_for(lambda event: event.kind == EventKind.FAULT_SIMULATED, WITHIN_S)
            node = next(
                event.node
                for event in cluster.events()
                if event.kind == EventKind.CYCLE_STARTED and lost_rank in event.data["ranks"]
            )
            cluster.agent(node).kill()
        codes = cluster.wait(WITHIN_S)
        return RunOutcome(folder, codes, cluster.events(), cluster.tails())


def _is_joined(name: str) -> Any:
    return lambda event: event.kind == EventKind.NODE_JOINED and event.data["name"] == name


def start(folder: Path, world_size: int, **options: Any) -> dict[str, Any]:
    """Run the script without a launcher; return its result."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(folder), json.dumps(options), world_size=world_size) as ranks:
        codes, outputs = ranks.end(WITHIN_S)
    assert codes == [0] * world_size, outputs
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.fixture(scope="module")
def undisturbed_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the final state of two ranks without a fault."""
    digest: str = start(tmp_path_factory.mktemp("calm") / "two", 2)["digest"]
    return digest


def checkpoints(folder: Path) -> list[str]:
    """Return the committed checkpoints of a directory."""
    return sorted(path.parent.name for path in folder.glob("step-*/manifest.json"))


@pytest.mark.extended
@pytest.mark.slow
def test_a_broken_device_is_identified_and_quarantined(tmp_path: Path, undisturbed_digest: str) -> None:
    """A NaN that recurs on one device is saved for diagnosis and replayed on the spare, where it does not recur; the
    first device's node is quarantined, and the run completes without it, bit-identical, in three cycles."""
    outcome = run_script(tmp_path / "run", num_spares=1, plan=[ON_ONE_DEVICE])
    assert outcome.result is not None, outcome.tails
    assert outcome.result["digest"] == undisturbed_digest
    assert outcome.cycles == 3, outcome.tails
    broken = outcome.node_of(0, 1)
    assert [(one.finding, one.iteration, one.rank) for one in outcome.diagnoses] == [
        ("reproduced", 5, 1),
        ("persistent", 5, 1),
    ]
    assert outcome.diagnoses[1].node == broken, outcome.diagnoses
    assert outcome.decisions[0]["hold_back"] == [broken]
    assert outcome.decisions[1]["quarantine"] == [broken]
    assert outcome.begins[2]["iteration"] == 5, "the replay goes on from what was saved for diagnosis"
    assert broken not in {begin["node"] for begin in outcome.begins if begin["cycle"] > 0}
    assert [begin["iteration"] for begin in outcome.begins if begin["cycle"] == 2] == [4, 4]


@pytest.mark.extended
@pytest.mark.slow
def test_a_bad_batch_stops_the_run_with_its_diagnosis(tmp_path: Path) -> None:
    """If the batch gives NaN on another device too, the run exits with 17 and fingerprint, rank, call and iteration,
    without a further restart; the tracker is unchanged, and suspect/ has the state for an analysis."""
    outcome = run_script(tmp_path / "run", num_spares=1, bad_batch=6)
    assert outcome.result is None, outcome.tails
    assert ExitReason.FAILED_VALIDATION in outcome.codes, outcome.tails
    assert outcome.cycles == 2
    reproduced, correct = outcome.diagnoses
    for fact in ("rank", "call", "iteration", "batch"):
        assert getattr(reproduced, fact) == getattr(correct, fact)
    assert (correct.finding, correct.rank, correct.call, correct.iteration) == ("correct", 0, 0, 5)
    assert correct.batch
    assert correct.replayed_on != correct.device
    last = outcome.decisions[-1]
    assert last["exit_code"] == ExitReason.FAILED_VALIDATION
    for fact in (correct.batch, "rank 0", "iteration 5", "validation 0"):
        assert fact in last["reason"], last["reason"]
    store = tmp_path / "run" / "global"
    assert (store / "latest").read_text().strip() == "step-4"
    assert checkpoints(store) == ["step-4"]
    assert [path.name for path in (store / "suspect").glob("step-*")] == ["step-5"]


@pytest.mark.extended
@pytest.mark.slow
def test_without_another_device_the_same_one_replays_twice(tmp_path: Path) -> None:
    """The first run and at most two replays of the suspect save run on the same device; then the run stops with 17."""
    outcome = run_script(tmp_path / "run", num_nodes=1, nproc_per_node=2, bad_batch=6)
    assert outcome.codes == [ExitReason.FAILED_VALIDATION], outcome.tails
    assert outcome.cycles == 3, outcome.tails
    assert [begin["iteration"] for begin in outcome.begins if begin["rank"] == 0] == [0, 5, 5]
    assert [one.tries for one in outcome.diagnoses] == [0, 1, 2]
    assert {one.batch for one in outcome.diagnoses} == {outcome.diagnoses[0].batch}
    assert (tmp_path / "run" / "global" / "latest").read_text().strip() == "step-4"


@pytest.mark.extended
@pytest.mark.slow
def test_corrupt_replicas_do_not_cause_an_endless_loop(tmp_path: Path, undisturbed_digest: str) -> None:
    """A node-local checkpoint was corrupt before its digest was computed. A node is lost, the copies verify and lead
    to NaN again: the second cycle after the loss loads the global checkpoint and completes, bit-identical."""
    stop = {"kind": "stop", "rank": 1, "iteration": 7}
    settings = {"prefer_finite": False}  # otherwise the checkpoint is not loaded
    outcome = run_script(tmp_path / "run", num_spares=1, plan=[stop], poisoned_save=6, checkpoint=settings, lost_rank=1)
    assert outcome.result is not None, outcome.tails
    assert outcome.result["digest"] == undisturbed_digest
    assert outcome.cycles == 3, "the one that was hit, the one that met the bad copy, the one that completed"
    first, second = ([b for b in outcome.begins if b["cycle"] == cycle] for cycle in (1, 2))
    assert [begin["iteration"] for begin in first] == [6, 6]
    assert [begin["iteration"] for begin in second] == [4, 4]
    assert {begin["latest"] for begin in (*first, *second)} == {"step-4"}
    tiers = {(event.cycle, event.data["tier"]) for event in outcome.events if event.kind == EventKind.RESTORED}
    assert "replica" in {tier for cycle, tier in tiers if cycle == 1}
    assert {tier for cycle, tier in tiers if cycle == 2} == {"global"}
    (diagnosis,) = outcome.diagnoses
    assert (diagnosis.finding, diagnosis.iteration) == ("reproduced", 6)


@pytest.mark.slow
def test_a_flipped_bit_quarantines_its_node(tmp_path: Path) -> None:
    """Of three replicas on three nodes one differs in a bit: its rank is identified, the iteration is not saved, a
    spare gets its node's slot, and the run completes, bit-identical, in two cycles."""
    undisturbed = start(tmp_path / "calm", 3)["digest"]
    outcome = run_script(tmp_path / "run", num_nodes=3, num_spares=1, plan=[FLIP], digest=1)
    assert outcome.result is not None, outcome.tails
    assert outcome.result["digest"] == undisturbed
    assert outcome.cycles == 2
    (diagnosis,) = outcome.diagnoses
    assert (diagnosis.finding, diagnosis.rank, diagnosis.iteration) == ("persistent", 1, 6)
    flipped = outcome.node_of(0, 1)
    assert diagnosis.node == flipped
    assert outcome.decisions[0]["quarantine"] == [flipped]
    assert flipped not in {begin["node"] for begin in outcome.begins if begin["cycle"] == 1}


@pytest.mark.extended
@pytest.mark.slow
def test_two_differing_replicas_roll_back(tmp_path: Path, undisturbed_digest: str) -> None:
    """Without a root cause among two replicas, the run rolls back to the last checkpoint once, and completes
    bit-identical."""
    outcome = run_script(tmp_path / "run", num_nodes=1, nproc_per_node=2, plan=[FLIP], digest=1)
    assert outcome.result is not None, outcome.tails
    assert outcome.result["digest"] == undisturbed_digest
    assert outcome.cycles == 2
    first, *_ = outcome.diagnoses
    assert (first.finding, first.rejected_ranks, first.iteration) == ("split", (0, 1), 6)
    assert "replicas differ at iteration 6" in outcome.decisions[0]["reason"]
    assert "root cause unknown" in outcome.decisions[0]["reason"]
    assert [begin["iteration"] for begin in outcome.begins if begin["cycle"] == 1] == [4, 4]


@pytest.mark.extended
@pytest.mark.slow
def test_a_replay_without_the_suspect_save_still_decides(tmp_path: Path, undisturbed_digest: str) -> None:
    """With a local tier only, the spare does not have the suspect save: it trains from the newest checkpoint to the
    iteration, and the broken device is identified."""
    settings = {"directory": None}
    outcome = run_script(tmp_path / "run", num_spares=1, plan=[ON_ONE_DEVICE], checkpoint=settings)
    assert outcome.result is not None, outcome.tails
    assert outcome.result["digest"] == undisturbed_digest
    assert outcome.cycles == 3, outcome.tails
    assert [begin["iteration"] for begin in outcome.begins if begin["cycle"] == 1] == [4, 4]
    assert [one.finding for one in outcome.diagnoses] == ["reproduced", "persistent"]
    broken = outcome.node_of(0, 1)
    assert outcome.decisions[1]["quarantine"] == [broken]
    assert broken not in {begin["node"] for begin in outcome.begins if begin["cycle"] > 0}


@pytest.mark.extended
@pytest.mark.slow
def test_a_script_that_detects_nan_rolls_back(tmp_path: Path, undisturbed_digest: str) -> None:
    """With ``NonFiniteDetector`` and ``run.roll_back()`` the launcher restarts the ranks once from the last
    checkpoint, and the run completes, bit-identical."""
    transient = {"kind": "nan", "target": "activation", "iteration": 7, "rank": 0}
    outcome = run_script(tmp_path / "run", num_nodes=1, nproc_per_node=2, plan=[transient], detector=True)
    assert outcome.result is not None, outcome.tails
    assert outcome.result["digest"] == undisturbed_digest
    assert outcome.cycles == 2
    assert [begin["iteration"] for begin in outcome.begins if begin["cycle"] == 1] == [6, 6]


@pytest.mark.extended
@pytest.mark.slow
def test_half_as_many_ranks_resume_from_a_global_checkpoint(tmp_path: Path) -> None:
    """Two ranks load a checkpoint of four ranks from the global tier with the saved weights, moments, losses,
    position and session state."""
    transient = {"kind": "nan", "target": "activation", "iteration": 5, "rank": 0}
    saved = start(tmp_path / "run", 4, total=8, plan=[transient])
    (tmp_path / "run" / "local").rename(tmp_path / "gone")
    (tmp_path / "run" / "begins.jsonl").unlink()
    start(tmp_path / "run", 2, total=12)
    begins = RunOutcome(tmp_path / "run", [], [], "").begins
    assert [begin["iteration"] for begin in begins] == [8, 8]
    assert {begin["digest"] for begin in begins} == {saved["digest"]}
    assert {begin["position"] for begin in begins} == {8}
    assert begins[0]["own"]["transient"] == 1
