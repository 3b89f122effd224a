"""The test cluster with a substitute launcher: its observations, and its cleanup of processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from outlast.errors import DeadlineExceeded
from outlast.incidents import EventKind
from outlast.testing import Cluster, cluster

STAND_IN = """
import os, signal, subprocess, sys
from outlast.incidents import EventKind
from outlast.runtime.journal import Journal

_parent, _run, *words = sys.argv[1:]
options = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--"))
script, *args = [word for word in words if not word.startswith("--")]
node = options["node-name"]
journal = Journal(options["run-dir"], run_id=options["rdzv-id"], job="j", node=node, proc="agent")
worker = subprocess.Popen([sys.executable, script], start_new_session=True)
rank = int(node.rpartition("-")[2])
signal.signal(signal.SIGTERM, lambda *_: (worker.kill(), os._exit(75)))
journal.write(EventKind.CYCLE_STARTED, cycle=0, ranks=[rank], pids=[worker.pid])
print(f"{node} started with {args}", flush=True)
sys.exit(worker.wait())
"""
SLEEPS = "import time; time.sleep(600)"

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the launcher with a program that starts one worker and writes the agent's journal events."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(cluster, "_COMMAND", (sys.executable, str(tmp_path / "stand_in.py")))


def write(folder: Path, code: str) -> Path:
    script = folder / "train.py"
    script.write_text(code)
    return script


def test_cluster_reports_events_worker_pids_and_output(tmp_path: Path) -> None:
    """Events, worker pids and the output of every node are available while the nodes run."""
    with Cluster(write(tmp_path, SLEEPS), "fast", run_dir=tmp_path / "run", num_nodes=2) as nodes:
        assert nodes.wait_for("node-1 started with ['fast']", timeout_s=300) is None
        event = nodes.wait_for(lambda event: event.data.get("ranks") == [0], timeout_s=300)
        assert event is not None
        assert event.kind == EventKind.CYCLE_STARTED
        assert nodes.worker_pid(0) == event.data["pids"][0]
        assert psutil.Process(nodes.worker_pid(1)).ppid() == nodes.agent("node-1").pid
        with pytest.raises(LookupError, match="no cycle has started rank 7"):
            nodes.worker_pid(7)
        nodes.agent(0).signal(signal.SIGTERM)
        assert nodes.agent(0).wait(timeout_s=300) == 75
    assert nodes.processes() == []


def test_orphans_of_a_killed_agent_are_reported_and_killed(tmp_path: Path) -> None:
    """A worker that outlives its agent is reported as an orphan, and is killed at the end of the block."""
    with Cluster(write(tmp_path, SLEEPS), run_dir=tmp_path / "run", num_nodes=2) as nodes:
        for rank in range(2):
            nodes.wait_for(lambda event, rank=rank: event.data.get("ranks") == [rank], timeout_s=300)
        nodes.assert_no_orphans(within_s=0)
        orphan = nodes.worker_pid(0)
        nodes.agent(0).kill()
        with pytest.raises(AssertionError, match=str(orphan)):
            nodes.assert_no_orphans(within_s=0.2)
        assert [process.pid for process in nodes.orphans()] == [orphan]
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
    nodes.assert_no_orphans(within_s=0)


def test_stopped_agents_are_killed(tmp_path: Path) -> None:
    """An agent that hangs under SIGSTOP is killed at the end of the block."""
    with Cluster(write(tmp_path, SLEEPS), run_dir=tmp_path / "run", num_nodes=1) as nodes:
        nodes.wait_for("started", timeout_s=300)
        nodes.agent(0).signal(signal.SIGSTOP)
    assert nodes.agent(0).wait(timeout_s=0) == -signal.SIGKILL
    assert nodes.processes() == []


def test_failed_wait_reports_the_output_of_every_node(tmp_path: Path) -> None:
    """The error of a failed wait contains the reason and the end of each node's output."""
    script = write(tmp_path, "print('worker was here'); raise SystemExit(3)")
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=2) as nodes:
        with pytest.raises(DeadlineExceeded) as caught:
            nodes.wait_for("never printed", timeout_s=300)
        assert "all agents ended without 'never printed'" in str(caught.value)
        for name in ("node-0", "node-1"):
            assert f"--- {name} (ended with 3) ---" in str(caught.value)
        assert str(caught.value).count("worker was here") == 2
        assert nodes.wait(timeout_s=300) == [3, 3]


def test_restarted_node_appends_to_its_log(tmp_path: Path) -> None:
    """A node may be added at any time; a node that restarts under the same name appends to its output."""
    with Cluster(write(tmp_path, "raise SystemExit(0)"), run_dir=tmp_path / "run", num_nodes=1) as nodes:
        assert nodes.wait(timeout_s=300) == [0]
        nodes.add_node("node-0")
        assert nodes.wait(timeout_s=300) == [0, 0]
        assert nodes.agent("node-0").output().count("started") == 2


def test_waits_are_bounded(tmp_path: Path) -> None:
    """A wait for an event that does not occur fails at its timeout; the nodes keep running."""
    with Cluster(write(tmp_path, SLEEPS), run_dir=tmp_path / "run", num_nodes=1) as nodes:
        nodes.wait_for("started", timeout_s=300)
        with pytest.raises(DeadlineExceeded, match=r"agent node-0 still runs after"):
            nodes.wait(timeout_s=0.1)
        with pytest.raises(DeadlineExceeded, match=r"0.1 s passed without the event"):
            nodes.wait_for(lambda event: event.kind == EventKind.JOB_ENDED, timeout_s=0.1)
        assert nodes.agent(0).running
