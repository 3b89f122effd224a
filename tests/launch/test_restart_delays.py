"""A delayed restart: nodes join and are lost, a shutdown request ends the delay, and the budget is kept."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_coordinator import Job, ranks

from outlast import clock
from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.launch import protocol as m
from outlast.testing import Cluster

WITHIN_S = 300.0
SCRIPT = """
import os, sys
print("cycle", os.environ["OUTLAST_CYCLE"], "began", flush=True)
sys.exit(7)
"""


def _waiting_job() -> Job:
    """Return a job of two nodes whose fourth cycle waits for 5 s."""
    job = Job(join_timeout_s=60.0)
    for name in ("a", "b"):
        job.join(name)
    job.fail("a")
    assert ranks(job) == {"a": 0, "b": 1}, "the first restart does not wait"
    job.fail("a")
    job.pass_time(1)
    job.fail("a")
    assert not job.running
    return job


def test_restart_waits_until_its_deadline() -> None:
    """The cycle starts at its deadline and not before; no message is sent in the meantime."""
    job = _waiting_job()
    job.pass_time(4)
    assert not job.running
    assert job.coordinator.deadline_s == job.now_s + 1.0
    job.pass_time(1)
    assert {start.cycle for start in job.running.values()} == {3}
    assert job.coordinator.deadline_s is None


def test_spare_replaces_a_node_lost_during_the_delay() -> None:
    """A node dies during the delay and a new one joins: the cycle starts with the new node at the deadline."""
    job = _waiting_job()
    job.die("b")
    job.join("s")
    job.pass_time(30)
    assert set(job.running) == {"a", "s"}


def test_shutdown_request_ends_a_delayed_restart() -> None:
    """The job stops at once, and no further cycle starts."""
    job = _waiting_job()
    job.say(m.Leave(node="a", epoch="a-1", saved=False, signal=signal.SIGTERM, facts=None, whole_job=True))
    assert job.coordinator.stop is not None
    job.pass_time(10)
    assert not job.running


@pytest.mark.process
@pytest.mark.slow
def test_restart_delays_grow(tmp_path: Path) -> None:
    """A script that fails at once restarts after 0, 1 and 5 s; each delay is logged and recorded in the journal."""
    (script := tmp_path / "train.py").write_text(SCRIPT)
    with Cluster(
        script, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=["--max-restarts=3"]
    ) as cluster:
        assert cluster.wait(WITHIN_S) == [ExitReason.FAILED], cluster.tails()
        output = cluster.agent(0).output()
        decisions = [event for event in cluster.events() if event.kind == EventKind.DECISION]
    delays = [event.data["verdict"].get("delay_s", 0.0) for event in decisions]
    assert delays == [0.0, 1.0, 5.0, 0.0]
    assert "restarting in 5 s" in output
    starts = [event for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED]
    assert len(starts) == 4
    for (before, after), delay_s in zip(pairwise(starts), delays, strict=False):
        assert (after.mono_ns - before.mono_ns) / 1e9 >= delay_s


@pytest.mark.process
@pytest.mark.slow
def test_sigterm_ends_a_job_during_a_restart_delay(tmp_path: Path) -> None:
    """An agent that receives SIGTERM during a delay of 15 s exits within that time."""
    (script := tmp_path / "train.py").write_text(SCRIPT)
    options: dict[str, Any] = {"num_nodes": 1, "nproc_per_node": 1, "options": ["--max-restarts=9"]}
    with Cluster(script, run_dir=tmp_path / "run", **options) as cluster:
        cluster.wait_for("restarting in 15 s", timeout_s=WITHIN_S)
        cluster.agent(0).signal(signal.SIGTERM)
        cluster.wait_for("received SIGTERM: shutting down", timeout_s=WITHIN_S)
        began_s = clock.now_s()
        assert cluster.wait(WITHIN_S) == [128 + signal.SIGTERM]
        took_s = clock.now_s() - began_s
        assert "cycle 5 began" not in cluster.agent(0).output()
        assert took_s < 60.0, took_s
