"""A failure that recurs after each load of the same checkpoint leads to a load from another tier before the run
stops."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]

SCRIPT = """
import os, sys
import torch
import outlast

folder, heals = sys.argv[1], sys.argv[2] == "heals"
checkpoint = outlast.CheckpointConfig(
    directory=os.path.join(folder, "global"), save_interval=10, non_persistent_save_interval=5, async_save=False
)
run = outlast.init(outlast.Config(checkpoint=checkpoint))
state = {"weight": torch.zeros(1000), "table": torch.zeros(4)}
for iteration in run.steps(state, total=20):
    if iteration == 14 and os.environ["OUTLAST_CYCLE"] == "0":
        state["table"] += 7  # the state is wrong, and finite: every digest is right
    if iteration == 17 and (state["table"].any() or not heals):
        raise IndexError("index 7 is out of range")
    state["weight"] += 1
print("ends with", state["weight"][0].item(), flush=True)
"""


def _run(tmp_path: Path, kind: str) -> tuple[list[int], str, Cluster]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Cluster(script, str(tmp_path), kind, run_dir=tmp_path / "run", num_nodes=1) as cluster:
        return cluster.wait(timeout_s=500), "".join(agent.output() for agent in cluster.agents), cluster


def test_last_restart_loads_from_the_next_tier(tmp_path: Path) -> None:
    """The node-local copy of iteration 15 makes every cycle fail at 17. The last restart of the budget loads
    iteration 10 from the global tier, and the run finishes with the right state."""
    codes, output, cluster = _run(tmp_path, "heals")
    assert codes == [0], output
    assert output.count("ends with 20.0") == 2
    assert "this is the same failure at the same iteration after the same copy was loaded" in output
    restored = [event for event in cluster.events() if event.kind == EventKind.RESTORED and event.rank == 0]
    assert [(event.iteration, event.data["tier"]) for event in restored] == [
        (15, "memory"),
        (15, "memory"),
        (10, "global"),
    ]
    incidents = [
        msgspec.convert(event.data["incident"], Incident)
        for event in cluster.events()
        if event.kind == EventKind.INCIDENT
    ]
    (excluded,) = [one for one in incidents if one.kind == IncidentKind.COPY_UNTRUSTED]
    assert (excluded.evidence["generation"], excluded.iteration) == (15, 17)


def test_failure_independent_of_the_tier_ends_with_93(tmp_path: Path) -> None:
    """If the other copy leads to the same exception, the run stops with 93 after the allowed number of restarts."""
    codes, output, _ = _run(tmp_path, "stays")
    assert codes == [93], output
    assert "IndexError: index 7 is out of range" in output
