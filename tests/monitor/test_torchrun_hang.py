"""Stock torchrun, without an agent of ours: a hung rank is ended by its guard process, and torchrun restarts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, os, time
from outlast.config import FaultToleranceConfig
from outlast.monitor import RankMonitor

logging.basicConfig(level=logging.INFO)
timeouts = FaultToleranceConfig(rank_section_timeouts={"step": 0.5}, num_warmup_iterations=0)
monitor = RankMonitor(config=timeouts, run_dir=os.environ["OUT"])
rank, cycle = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with monitor.section("step"):
    if rank == "1" and cycle == "0":
        time.sleep(3600)
if rank == "0" and cycle == "0":
    time.sleep(3600)  # outside of every section: torchrun ends this one
open(f"{os.environ['OUT']}/done-{rank}-{cycle}", "w").close()
monitor.close()
"""


@pytest.mark.process
def test_torchrun_restarts_a_hung_rank(tmp_path: Path) -> None:
    """The hung rank is named and killed, both ranks start again and finish, and torchrun exits with 0."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    rest = ["--standalone", "--monitor-interval=0.1", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", *rest],
        env={**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.glob("done-*")) == ["done-0-1", "done-1-1"]
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} ERROR \[monitor rank 1\] rank 1 \(node", done.stderr, re.MULTILINE), (
        done.stderr
    )
    assert "section 'step' exceeded 0.5 s" in done.stderr
    assert "train.py" in (out / "stacks" / "cycle-0" / "rank-1.txt").read_text()
    assert not (out / "stacks" / "cycle-0" / "rank-0.txt").exists()
