"""Under stock torchrun the agent process of the node ends a hung rank, and torchrun restarts it."""

import json
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
    """The hung rank is reported and killed, both ranks start again and finish, and torchrun exits with 0."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    options = ["--standalone", "--monitor-interval=0.1", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", *options],
        env={**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.glob("done-*")) == ["done-0-1", "done-1-1"]
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} ERROR \[agent\] rank 1 \(node", done.stderr, re.MULTILINE), done.stderr
    assert "section 'step' exceeded 0.5 s" in done.stderr
    assert "train.py" in (out / "stacks" / "cycle-0" / "rank-1.txt").read_text()
    assert not (out / "stacks" / "cycle-0" / "rank-0.txt").exists()


SWITCHED_ON = """
import os, time
import outlast

cycle = os.environ["TORCHELASTIC_RESTART_COUNT"]
shorter = {"rank_heartbeat_timeout": 1.0} if cycle == "0" else {}
run = outlast.init(outlast.Config(fault_tolerance=outlast.FaultToleranceConfig(enable_ft_package=True, **shorter)))
for iteration in run.steps({}, total=3):
    if cycle == "0" and iteration == 1:
        time.sleep(3600)
print("trained in cycle", cycle, flush=True)
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_enable_ft_package_alone_is_enforced_under_torchrun(tmp_path: Path) -> None:
    """With a shorter heartbeat timeout the hung rank is killed and torchrun restarts it; without any timeout the
    defaults of NVRx are enforced by the agent process, and no warning reports that hangs are not detected."""
    script = tmp_path / "train.py"
    script.write_text(SWITCHED_ON)
    options = ["--standalone", "--monitor-interval=0.1", "--max-restarts=1", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained in cycle 1") == 1
    assert "time since the last heartbeat exceeded 1.0 s" in done.stderr
    assert "out of section: not enforced; heartbeats: first 1800.0 s, later 300.0 s" in done.stderr
    assert "a hung rank is not detected" not in done.stderr


LEARNING = """
import os, time
from outlast.config import FaultToleranceConfig
from outlast.monitor import RankMonitor

settings = FaultToleranceConfig(calc_ft_timeouts=True, num_warmup_iterations=0, safety_factor=2.0)
monitor = RankMonitor(config=settings, run_dir=os.environ["OUT"])
for number in range(18):
    with monitor.section("step"):
        if number == 17 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
            time.sleep(3600)  # a long step, which nothing tells from a hang
print("trained", flush=True)
monitor.finish()
monitor.close()
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(400)
def test_torchrun_doubles_and_then_drops_a_learned_timeout(tmp_path: Path) -> None:
    """The agent process doubles a learned timeout after an unexplained hang; after the second one the third cycle
    trains without it, and no option suggests it."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(LEARNING)
    out.mkdir()
    known = {"version": 1, "cycle": "", "before": {}, "seen": {}, "learned": {"sections": {"step": 3.0}}}
    (out / "ft_state.json").write_text(json.dumps(known))
    options = ["--standalone", "--monitor-interval=0.1", "--max-restarts=2", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *options],
        env={**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "section 'step' exceeded 10.0 s" in done.stderr
    assert "the learned timeout of section step was exceeded, and nothing shows a hang: it is doubled" in done.stderr
    assert "section 'step' exceeded 20.0 s" in done.stderr
    assert "nothing shows a hang: it is not used any more" in done.stderr
    assert "suggested timeouts" not in done.stderr
    learned = json.loads((out / "ft_state.json").read_text())["learned"]
    assert learned["num_hangs"] == {"section step": 2}
    assert "step" not in learned.get("sections", {})
