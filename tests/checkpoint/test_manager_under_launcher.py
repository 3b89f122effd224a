"""A script with only a checkpoint manager has the launcher's recovery policy: progress, and excluded copies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.process]

WITHIN_S = 120.0
SCRIPT = """
import os, sys
import torch
import outlast
from outlast.checkpoint import CheckpointManager

folder, what, cycle = sys.argv[1], sys.argv[2], int(os.environ["OUTLAST_CYCLE"])
manager = CheckpointManager(outlast.CheckpointConfig(directory=folder + "/ckpt", async_save=False))
state = {"weight": torch.zeros(3)}
restored = manager.load_latest(state)
begin = 0 if restored is None else restored.iteration
print("cycle", cycle, "from", begin, restored and restored.tier, flush=True)
if what == "invalid" and cycle == 1:
    sys.exit(16)  # the result of the first step was invalid, twice
for iteration in range(begin, 12):
    state["weight"] += 1
    if what != "never":
        manager.save(state, iteration + 1)
    if iteration + 1 == begin + 2 and not (what == "invalid" and cycle):
        os.kill(os.getpid(), 9)
print("ended with", state["weight"].tolist(), flush=True)
manager.close()
"""


def run_script(tmp_path: Path, mode: str, *options: str) -> tuple[list[int], Cluster, str]:
    """Run the script on one node; return exit codes, the cluster and the log."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Cluster(
        script,
        *(str(tmp_path), mode),
        run_dir=tmp_path / "run",
        num_nodes=1,
        nproc_per_node=1,
        options=options,
    ) as cluster:
        codes = cluster.wait(WITHIN_S)
        return codes, cluster, cluster.agents[0].output()


@pytest.mark.slow
def test_a_commit_without_a_session_resets_the_restart_budget(tmp_path: Path) -> None:
    """A repeatedly killed script finishes with a budget of one restart, because each commit resets the budget."""
    codes, _, text = run_script(tmp_path, "kill", "--max-restarts=1")
    assert codes == [0], text
    begins = [int(found) for found in re.findall(r"cycle \d+ from (\d+)", text)]
    assert begins == [0, 2, 4, 6, 8, 10, 12]
    assert "ended with [12.0, 12.0, 12.0]" in text


@pytest.mark.slow
def test_the_restart_budget_is_not_reset_without_a_commit(tmp_path: Path) -> None:
    """The same script without saves ends after one restart."""
    codes, _, text = run_script(tmp_path, "never", "--max-restarts=1")
    assert codes != [0], text
    assert [int(found) for found in re.findall(r"cycle (\d+) from", text)] == [0, 1]


@pytest.mark.slow
def test_a_copy_with_an_invalid_result_is_excluded(tmp_path: Path) -> None:
    """After exit code 16 the launcher excludes the loaded copy, and the manager of the next cycle loads another one."""
    codes, cluster, text = run_script(tmp_path, "invalid")
    assert codes == [0], text
    begins = re.findall(r"^cycle (\d+) from (\d+) (\S+)", text, re.MULTILINE)
    assert begins == [("0", "0", "None"), ("1", "2", "memory"), ("2", "2", "global")], text
    assert "ended with [12.0, 12.0, 12.0]" in text
    decisions = [event.data["verdict"]["reason"] for event in cluster.events() if event.kind == EventKind.DECISION]
    assert any("checkpoint 2 (memory tier" in reason and "is excluded" in reason for reason in decisions), decisions


TWO = """
import os, sys
import torch
import outlast

folder, cycle = sys.argv[1], int(os.environ["OUTLAST_CYCLE"])
for name in ("first", "second"):
    saves = outlast.CheckpointConfig(directory=f"{folder}/{name}", save_interval=2, async_save=False)
    with outlast.init(outlast.Config(checkpoint=saves)) as run:
        state = {"weight": torch.zeros(3)}
        for iteration in run.steps(state, total=6):
            if iteration in (0, 2, 4):
                print(name, "cycle", cycle, "at", iteration, flush=True)
            if (name, iteration, cycle) == ("second", 4, 0):
                os.kill(os.getpid(), 9)
            state["weight"] += 1 if name == "first" else 10
        print(name, "ended with", state["weight"].tolist(), flush=True)
"""


@pytest.mark.slow
def test_two_sessions_of_one_process_do_not_share_memory(tmp_path: Path) -> None:
    """Of two trainings in one script, each continues after a kill from the checkpoints of its own directory."""
    script = tmp_path / "script.py"
    script.write_text(TWO)
    with Cluster(script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        codes = cluster.wait(WITHIN_S)
        text = cluster.agents[0].output()
    assert codes == [0], text
    begins = re.findall(r"(first|second) cycle (\d) at (\d)", text)
    assert begins == [
        *[("first", "0", at) for at in "024"],
        *[("second", "0", at) for at in "024"],
        ("second", "1", "4"),
    ], text
    assert text.count("first ended with [6.0, 6.0, 6.0]") == 2
    assert "second ended with [60.0, 60.0, 60.0]" in text
