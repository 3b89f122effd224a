"""A shutdown request while a resumed run loads its checkpoint: the checkpoint still exists, and the job is requeued."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from outlast.errors import ExitReason
from outlast.testing import Cluster

SCRIPT = """
import pathlib, sys, threading
import torch, outlast

here, job = pathlib.Path(sys.argv[1]), sys.argv[2]


class Sampler:
    def state_dict(self):
        return {"position": 1}

    def load_state_dict(self, state):
        (here / "loading").touch()
        threading.Event().wait(500)


checkpoint = outlast.CheckpointConfig(directory=str(here / "checkpoints"), save_interval=1, async_save=False)
with outlast.init(outlast.Config(checkpoint=checkpoint)) as run:
    for iteration in run.steps({"sampler": Sampler(), "weight": torch.zeros(8)}, total=4):
        if iteration == 2:
            raise SystemExit(1)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_job_shut_down_during_its_restore_is_requeued(tmp_path: Path) -> None:
    """The first job commits checkpoints and fails. SIGTERM ends the next one during its restore: exit code 75,
    although this job has saved nothing."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--max-restarts=0", "--ft-shutdown-grace=1"]
    settings = {"run_dir": tmp_path / "run", "num_nodes": 1, "nproc_per_node": 1, "options": options}
    with Cluster(script, str(tmp_path), "first", **settings) as job:
        assert job.wait(timeout_s=250) != [0]
    with Cluster(script, str(tmp_path), "second", **settings) as job:
        job.wait_for(lambda _: (tmp_path / "loading").exists(), timeout_s=250)
        job.agent(0).signal(signal.SIGTERM)
        assert job.wait(timeout_s=250) == [ExitReason.PREEMPTED]
        assert "nothing was saved" not in job.agent(0).output()
