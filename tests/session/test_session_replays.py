"""What becomes of an invalid result, from the step to the end of the run, with real processes and a real launcher."""

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


class Played:
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
        """What each process that came to a step went on from, by cycle and rank."""
        lines = (self.folder / "begins.jsonl").read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda begin: (begin["cycle"], begin["rank"]))

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The launcher's decisions, in order."""
        return [event.data["verdict"] for event in self.events if event.kind == EventKind.DECISION]

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """What workers found out about invalid results, in order."""
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
        """Return the node that carried a rank."""
        return next(str(one["node"]) for one in self.begins if (one["cycle"], one["rank"]) == (cycle, rank))


def play(
    folder: Path,
    *,
    num_nodes: int = 2,
    num_spares: int = 0,
    nproc_per_node: int = 1,
    kills: int | None = None,
    **options: Any,
) -> Played:
    """Run the script in ``folder`` under ``outlast run`` until all agents have ended.

    Args:
        kills: Rank whose node is lost once a fault of the plan has struck.
        options: Those of the script. What was saved is committed as a fault comes, however busy the machine is.
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
        if kills is not None:
            cluster.wait_for(lambda event: event.kind == EventKind.FAULT_SIMULATED, WITHIN_S)
            node = next(
                event.node
                for event in cluster.events()
                if event.kind == EventKind.CYCLE_STARTED and kills in event.data["ranks"]
            )
            cluster.agent(node).kill()
        codes = cluster.wait(WITHIN_S)
        return Played(folder, codes, cluster.events(), cluster.tails())


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
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of what two ranks have in the end when nothing goes wrong."""
    digest: str = start(tmp_path_factory.mktemp("calm") / "two", 2)["digest"]
    return digest


def checkpoints(folder: Path) -> list[str]:
    """Return what is committed in a store."""
    return sorted(path.parent.name for path in folder.glob("step-*/manifest.json"))


@pytest.mark.extended
@pytest.mark.slow
def test_a_broken_device_is_told_by_another_and_loses_its_slot(tmp_path: Path, calm: str) -> None:
    """A NaN that comes each time on one device: saved for diagnosis, replayed on the spare, where it does not come; the
    first device's node is quarantined, and the run completes without it, bit-identical, in three cycles."""
    played = play(tmp_path / "run", num_spares=1, plan=[ON_ONE_DEVICE])
    assert played.result is not None, played.tails
    assert played.result["digest"] == calm
    assert played.cycles == 3, played.tails
    broken = played.node_of(0, 1)
    assert [(one.finding, one.iteration, one.rank) for one in played.diagnoses] == [
        ("reproduced", 5, 1),
        ("persistent", 5, 1),
    ]
    assert played.diagnoses[1].node == broken, played.diagnoses
    assert played.decisions[0]["hold_back"] == [broken]
    assert played.decisions[1]["quarantine"] == [broken]
    assert played.begins[2]["iteration"] == 5, "the replay goes on from what was saved for diagnosis"
    assert broken not in {begin["node"] for begin in played.begins if begin["cycle"] > 0}
    assert [begin["iteration"] for begin in played.begins if begin["cycle"] == 2] == [4, 4]


@pytest.mark.extended
@pytest.mark.slow
def test_a_bad_batch_stops_the_run_with_its_diagnosis(tmp_path: Path) -> None:
    """The batch gives NaN on another device too: 17 with fingerprint, rank, call and iteration, no restart after it,
    the tracker where it was, and what is needed to look into it in suspect/."""
    played = play(tmp_path / "run", num_spares=1, bad_batch=6)
    assert played.result is None, played.tails
    assert ExitReason.FAILED_VALIDATION in played.codes, played.tails
    assert played.cycles == 2
    reproduced, correct = played.diagnoses
    for fact in ("rank", "call", "iteration", "batch"):
        assert getattr(reproduced, fact) == getattr(correct, fact)
    assert (correct.finding, correct.rank, correct.call, correct.iteration) == ("correct", 0, 0, 5)
    assert correct.batch
    assert correct.replayed_on != correct.device
    last = played.decisions[-1]
    assert last["exit_code"] == ExitReason.FAILED_VALIDATION
    for fact in (correct.batch, "rank 0", "iteration 5", "validation 0"):
        assert fact in last["reason"], last["reason"]
    store = tmp_path / "run" / "global"
    assert (store / "latest").read_text().strip() == "step-4"
    assert checkpoints(store) == ["step-4"]
    assert [path.name for path in (store / "suspect").glob("step-*")] == ["step-5"]


@pytest.mark.extended
@pytest.mark.slow
def test_without_another_device_the_same_one_tries_twice(tmp_path: Path) -> None:
    """The first run and two replays of what was saved, never more; then the recovery policy's end, with 17."""
    played = play(tmp_path / "run", num_nodes=1, nproc_per_node=2, bad_batch=6)
    assert played.codes == [ExitReason.FAILED_VALIDATION], played.tails
    assert played.cycles == 3, played.tails
    assert [begin["iteration"] for begin in played.begins if begin["rank"] == 0] == [0, 5, 5]
    assert [one.tries for one in played.diagnoses] == [0, 1, 2]
    assert {one.batch for one in played.diagnoses} == {played.diagnoses[0].batch}
    assert (tmp_path / "run" / "global" / "latest").read_text().strip() == "step-4"


@pytest.mark.extended
@pytest.mark.slow
def test_the_replica_nan_loop_ends_by_itself(tmp_path: Path, calm: str) -> None:
    """A near checkpoint was bad before it was digested. A node dies, the copies verify, and lead to NaN again and
    again: the second cycle after the death loads the global checkpoint and completes, bit-identical."""
    stop = {"kind": "stop", "rank": 1, "iteration": 7}
    settings = {"prefer_finite": False}  # else it is not even loaded
    played = play(tmp_path / "run", num_spares=1, plan=[stop], poisoned_save=6, checkpoint=settings, kills=1)
    assert played.result is not None, played.tails
    assert played.result["digest"] == calm
    assert played.cycles == 3, "the one that was hit, the one that met the bad copy, the one that completed"
    first, second = ([b for b in played.begins if b["cycle"] == cycle] for cycle in (1, 2))
    assert [begin["iteration"] for begin in first] == [6, 6]
    assert [begin["iteration"] for begin in second] == [4, 4]
    assert {begin["latest"] for begin in (*first, *second)} == {"step-4"}
    tiers = {(event.cycle, event.data["tier"]) for event in played.events if event.kind == EventKind.RESTORED}
    assert "replica" in {tier for cycle, tier in tiers if cycle == 1}
    assert {tier for cycle, tier in tiers if cycle == 2} == {"global"}
    (diagnosis,) = played.diagnoses
    assert (diagnosis.finding, diagnosis.iteration) == ("reproduced", 6)


@pytest.mark.slow
def test_a_flipped_bit_costs_its_node_the_slot(tmp_path: Path) -> None:
    """Of three replicas over nodes one differs in a bit: its rank is named, nothing is saved of it, a spare takes its
    node's slot, and the run completes, bit-identical, in two cycles."""
    undisturbed = start(tmp_path / "calm", 3)["digest"]
    played = play(tmp_path / "run", num_nodes=3, num_spares=1, plan=[FLIP], digest=1)
    assert played.result is not None, played.tails
    assert played.result["digest"] == undisturbed
    assert played.cycles == 2
    (diagnosis,) = played.diagnoses
    assert (diagnosis.finding, diagnosis.rank, diagnosis.iteration) == ("persistent", 1, 6)
    flipped = played.node_of(0, 1)
    assert diagnosis.node == flipped
    assert played.decisions[0]["quarantine"] == [flipped]
    assert flipped not in {begin["node"] for begin in played.begins if begin["cycle"] == 1}


@pytest.mark.extended
@pytest.mark.slow
def test_two_replicas_that_differ_go_back(tmp_path: Path, calm: str) -> None:
    """No root cause among two: the run goes back to the last checkpoint, once, and completes bit-identical."""
    played = play(tmp_path / "run", num_nodes=1, nproc_per_node=2, plan=[FLIP], digest=1)
    assert played.result is not None, played.tails
    assert played.result["digest"] == calm
    assert played.cycles == 2
    first, *_ = played.diagnoses
    assert (first.finding, first.rejected_ranks, first.iteration) == ("split", (0, 1), 6)
    assert "replicas differ at iteration 6" in played.decisions[0]["reason"]
    assert "root cause unknown" in played.decisions[0]["reason"]
    assert [begin["iteration"] for begin in played.begins if begin["cycle"] == 1] == [4, 4]


@pytest.mark.extended
@pytest.mark.slow
def test_a_replay_without_its_save_still_decides(tmp_path: Path, calm: str) -> None:
    """There is a local tier only, and the spare has nothing of what was saved for diagnosis: it trains from the newest
    checkpoint up to the iteration, and tells the broken device all the same."""
    settings = {"directory": None}
    played = play(tmp_path / "run", num_spares=1, plan=[ON_ONE_DEVICE], checkpoint=settings)
    assert played.result is not None, played.tails
    assert played.result["digest"] == calm
    assert played.cycles == 3, played.tails
    assert [begin["iteration"] for begin in played.begins if begin["cycle"] == 1] == [4, 4]
    assert [one.finding for one in played.diagnoses] == ["reproduced", "persistent"]
    broken = played.node_of(0, 1)
    assert played.decisions[1]["quarantine"] == [broken]
    assert broken not in {begin["node"] for begin in played.begins if begin["cycle"] > 0}


@pytest.mark.slow
def test_a_script_that_finds_nan_itself_rolls_back(tmp_path: Path, calm: str) -> None:
    """``NonFiniteDetector`` with ``run.roll_back()``: the launcher restarts the ranks once, from the last checkpoint,
    and the run completes, bit-identical."""
    transient = {"kind": "nan", "target": "activation", "iteration": 7, "rank": 0}
    played = play(tmp_path / "run", num_nodes=1, nproc_per_node=2, plan=[transient], detector=True)
    assert played.result is not None, played.tails
    assert played.result["digest"] == calm
    assert played.cycles == 2
    assert [begin["iteration"] for begin in played.begins if begin["cycle"] == 1] == [6, 6]


@pytest.mark.extended
@pytest.mark.slow
def test_half_the_ranks_go_on_from_what_all_had_saved(tmp_path: Path) -> None:
    """A checkpoint of four ranks is loaded from the global tier by two: weights, moments, losses, position and what
    the session keeps for itself are those that were saved."""
    transient = {"kind": "nan", "target": "activation", "iteration": 5, "rank": 0}
    saved = start(tmp_path / "run", 4, total=8, plan=[transient])
    (tmp_path / "run" / "local").rename(tmp_path / "gone")
    (tmp_path / "run" / "begins.jsonl").unlink()
    start(tmp_path / "run", 2, total=12)
    begins = Played(tmp_path / "run", [], [], "").begins
    assert [begin["iteration"] for begin in begins] == [8, 8]
    assert {begin["digest"] for begin in begins} == {saved["digest"]}
    assert {begin["position"] for begin in begins} == {8}
    assert begins[0]["own"]["transient"] == 1
