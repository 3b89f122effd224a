"""A run that changes its size and loses nodes resumes on the branch that training last continued."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from saving_ranks import start

from outlast.checkpoint.writer_client import WriterProcess

pytestmark = [pytest.mark.process, pytest.mark.slow]

SAVE_BEYOND_THE_GLOBAL_TIER = """
manager = manage(config=CONFIG)
train()
manager.save(state, 20).wait(100)
train()
manager.save(state, 27, tiers=["memory", "local", "replica"]).wait(100)
kill_all()
"""
RESUME_AND_SAVE = """
manager = manage(config=CONFIG)
restored = manager.load_latest(state)
train()
manager.save(state, 26).wait(100)
tell(iteration=restored.iteration, losses=state["losses"])
manager.close()
"""
RESUME = """
manager = manage(config=CONFIG)
restored = manager.load_latest(state)
rejected = [[one.checkpoint, one.rank, one.reason] for one in restored.rejected]
losses = list(state["losses"])
train()
manager.save(state, 30).wait(100)
manager.close()
left = sorted(name for name in os.listdir(os.path.join(folder, os.environ["OUTLAST_NODE"])) if name.startswith("step-"))
tell(iteration=restored.iteration, losses=losses, rejected=rejected, left=left)
"""


def test_an_abandoned_branch_is_not_loaded_again(tmp_path: Path) -> None:
    """Checkpoint 27 of a branch that training abandoned at 20 is not loaded; training resumes from 26.

    Two ranks saved 20 globally and 27 on their nodes, and one rank resumed from 20 and saved 26. One line gives the
    reason, and 27 is deleted after 30 is saved, because it does not count among the newest two.
    """
    config = {"directory": str(tmp_path / "global"), "most_recent_k": -1, "local_most_recent_k": 2}
    head, folder = f"CONFIG = {config!r}\n", tmp_path / "ckpt"
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(closing(WriterProcess())) for name in ("one", "two")}
        assert [code for code, _ in start(folder, head + SAVE_BEYOND_THE_GLOBAL_TIER, world=2, nodes=nodes)] == [-9, -9]
        first_node = {"one": nodes["one"]}
        ((code, one_rank),) = start(folder, head + RESUME_AND_SAVE, world=1, cycle=1, nodes=first_node)
        assert (code, one_rank["iteration"]) == (0, 20), one_rank
        results = start(folder, head + RESUME, world=2, cycle=2, nodes=nodes)
    for code, report in results:
        assert (code, report["iteration"]) == (0, 26), report
        assert report["losses"] == one_rank["losses"]
        assert "step-30" in report["left"]
        assert "step-27" not in report["left"]
        ((_, rank, reason),) = [one for one in report["rejected"] if one[0] == 27]
        assert rank == 0
        assert "later training resumed from iteration 20 without it and saved iteration 26" in reason
