"""A script that uses the checkpoint manager alone has the launcher's recovery policy: progress, and distrust of
copies."""

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


def play(tmp_path: Path, what: str, *options: str) -> tuple[list[int], Cluster, str]:
    """Run the script on one node; return exit codes, the cluster, and the log."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Cluster(
        script,
        *(str(tmp_path), what),
        run_dir=tmp_path / "run",
        num_nodes=1,
        nproc_per_node=1,
        options=options,
    ) as cluster:
        codes = cluster.wait(WITHIN_S)
        return codes, cluster, cluster.agents[0].output()


@pytest.mark.slow
def test_a_committed_checkpoint_is_progress_without_a_session(tmp_path: Path) -> None:
    """Killed again and again, with one restart granted without progress, the script comes to its end: each checkpoint
    that its manager commits resets the budget."""
    codes, _, text = play(tmp_path, "kill", "--max-restarts=1")
    assert codes == [0], text
    begins = [int(found) for found in re.findall(r"cycle \d+ from (\d+)", text)]
    assert begins == [0, 2, 4, 6, 8, 10, 12]
    assert "ended with [12.0, 12.0, 12.0]" in text


@pytest.mark.slow
def test_without_a_commit_the_budget_is_not_reset(tmp_path: Path) -> None:
    """The same script that saves nothing is given up after one restart."""
    codes, _, text = play(tmp_path, "never", "--max-restarts=1")
    assert codes != [0], text
    assert [int(found) for found in re.findall(r"cycle (\d+) from", text)] == [0, 1]


@pytest.mark.slow
def test_what_led_to_an_invalid_result_is_skipped_without_a_session(tmp_path: Path) -> None:
    """The launcher knows which copy a manager loaded: after exit code 16 it is excluded, and the manager of the next
    cycle loads another one."""
    codes, cluster, text = play(tmp_path, "invalid")
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
def test_a_second_session_of_a_process_takes_nothing_of_the_first_ones_from_memory(tmp_path: Path) -> None:
    """Two trainings in one script, each with a directory of its own: the second begins at 0, and after a kill each goes
    on from its own checkpoints."""
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
