"""Two nodes of one rank each, and a spare, on one device: checkpoints are copied from the device to another node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_runs import DETERMINISTIC, LAUNCHED, PATIENCE_S, PROGRAMS

from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.process]

PROGRAM = PROGRAMS / "nodes_on_one_device.py"
NEWEST = 8
"""The iteration of the newest save before the ranks wait."""


def start(folder: Path, fault: str) -> Cluster:
    """Return two nodes and a spare that train."""
    folder.mkdir()
    return Cluster(
        PROGRAM,
        str(folder),
        fault,
        run_dir=folder / "run",
        num_nodes=2,
        num_spares=1,
        nproc_per_node=1,
        options=LAUNCHED,
        environment=DETERMINISTIC,
    )


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_a_spare_loads_a_lost_nodes_state_from_a_replica(tmp_path: Path) -> None:
    """A killed agent's node loses its rank and its checkpoints in memory. The spare receives the rank's checkpoint from
    the other node's memory and verifies it; no checkpoint of that iteration is on disk. Weights and losses are those of
    an undisturbed run. The state is on the GPU, and saves copy it while the next step computes."""
    with start(tmp_path / "undisturbed", "none") as cluster:
        assert cluster.wait(PATIENCE_S / 2) == [0, 0, 0], cluster.tails()
    with start(tmp_path / "lost", "lose") as cluster:
        cluster.wait_for("waits for the loss", PATIENCE_S / 2)
        cluster.wait_for(
            lambda event: event.kind == EventKind.SAVE_COMMITTED and event.iteration == NEWEST, PATIENCE_S / 4
        )
        node = next(event.node for event in cluster.events() if event.rank == 1)
        cluster.agent(node).kill()
        assert sorted(cluster.wait(PATIENCE_S / 2)) == [-9, 0, 0], cluster.tails()
        events = cluster.events()
    restored = {event.rank: event for event in events if event.kind == EventKind.RESTORED}
    assert {rank: (event.iteration, event.data["tier"]) for rank, event in restored.items()} == {
        0: (NEWEST, "memory"),
        1: (NEWEST, "replica"),
    }
    assert restored[1].node != node
    assert result(tmp_path / "lost") == result(tmp_path / "undisturbed")
