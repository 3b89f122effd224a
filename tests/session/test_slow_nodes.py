"""A spare gets the slot of a node with a slow rank, and the run ends with the same result: session, recovery policy
and `outlast run` together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from slowed import SCRIPT

from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind, IncidentKind, RecoveryLevel
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
SLOW = [{"kind": "slow", "rank": 1, "iteration": 6, "factor": 4.0}]


def cluster_of(folder: Path, **shape: Any) -> Cluster:
    """Return a cluster that trains with a rank that becomes slow."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = {"total": 60, "stop": True, "plan": SLOW, "gate": True}
    return Cluster(script, str(folder), json.dumps(options), run_dir=folder / "run", **shape)


def open_gate(cluster: Cluster, folder: Path, num_nodes: int) -> None:
    """Let training begin once so many nodes have joined."""
    joined: set[str] = set()

    def have_all_joined(event: Event) -> bool:
        if event.kind == EventKind.NODE_JOINED:
            joined.add(event.data["name"])
        return len(joined) == num_nodes

    cluster.wait_for(have_all_joined, timeout_s=300)
    (folder / "go").touch()


def stragglers(cluster: Cluster) -> list[dict[str, Any]]:
    incidents = [event.data["incident"] for event in cluster.events() if event.kind == EventKind.INCIDENT]
    return [incident for incident in incidents if incident["kind"] == IncidentKind.STRAGGLER]


def decisions(cluster: Cluster) -> list[dict[str, Any]]:
    return [event.data["verdict"] for event in cluster.events() if event.kind == EventKind.DECISION]


@pytest.mark.extended
@pytest.mark.slow
def test_a_spare_replaces_a_slow_node_without_loss(tmp_path: Path) -> None:
    """The node of the slow rank is quarantined, the spare resumes where all ranks stopped, no other rank is
    reported, every agent exits with 0, and the weights are those of an undisturbed training."""
    undisturbed, faulted = tmp_path / "calm", tmp_path / "hit"
    undisturbed.mkdir()
    (undisturbed / "script.py").write_text(SCRIPT)
    arguments = (str(undisturbed), json.dumps({"total": 60, "enabled": False}))
    with Ranks(undisturbed / "script.py", *arguments, world_size=2) as ranks:
        codes, outputs = ranks.end(400)
    assert codes == [0, 0], "\n".join(outputs)
    with cluster_of(faulted, num_nodes=2, num_spares=1, nproc_per_node=1) as cluster:
        open_gate(cluster, faulted, 3)
        assert cluster.wait(timeout_s=300) == [0, 0, 0], cluster.tails()
        (incident,) = stragglers(cluster)
        assert (incident["rank"], incident["section"]) == (1, "forward")
        replaced, finished = decisions(cluster)
        assert (replaced["rung"], replaced["quarantine"]) == (RecoveryLevel.REPLACE_NODE, [incident["node"]])
        assert f"a spare takes the slot of node {incident['node']}" in replaced["reason"]
        assert (finished["rung"], finished["exit_code"]) == (RecoveryLevel.STOP, ExitReason.FINISHED)
        nodes: dict[int | None, set[str]] = {}
        restored = set()
        stopped_after = set()
        for event in cluster.events():
            if event.kind == EventKind.CYCLE_STARTED:
                nodes.setdefault(event.cycle, set()).add(event.node)
            elif event.kind == EventKind.RESTORED:
                restored.add((event.cycle, event.iteration))
            elif event.kind == EventKind.SESSION_ENDED and event.cycle == 0:
                stopped_after.add(event.iteration)
                assert event.data["exit_code"] == ExitReason.STRAGGLER
        assert list(nodes) == [0, 1]
        assert incident["node"] in nodes[0]
        assert incident["node"] not in nodes[1]
        (iteration,) = stopped_after
        assert restored == {(1, iteration)}
    assert json.loads((faulted / "result.json").read_text()) == json.loads((undisturbed / "result.json").read_text())


@pytest.mark.extended
@pytest.mark.slow
def test_without_a_spare_a_slow_node_stops_the_run(tmp_path: Path) -> None:
    """The state is saved, the exit code is 18, and the recovery state of the run has the quarantined node."""
    with cluster_of(tmp_path, num_nodes=1, nproc_per_node=2) as cluster:
        open_gate(cluster, tmp_path, 1)
        assert cluster.wait(timeout_s=300) == [ExitReason.STRAGGLER], cluster.tails()
        (incident,) = stragglers(cluster)
        (decision,) = decisions(cluster)
        assert (decision["rung"], decision["exit_code"]) == (RecoveryLevel.STOP, ExitReason.STRAGGLER)
        assert "no spare waits for the slot of node node-0" in decision["reason"]
        assert "no spare waits for the slot of node node-0" in cluster.agent(0).output()
        recovery_state = json.loads((tmp_path / "run" / "ladder.json").read_text())
        assert (recovery_state["quarantined"], recovery_state["stopped_with"]) == (["node-0"], ExitReason.STRAGGLER)
        assert (tmp_path / "ckpt" / f"step-{incident['iteration']}").is_dir()
