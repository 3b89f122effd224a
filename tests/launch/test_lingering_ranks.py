"""Ranks that do not exit after the first clean exit of their cycle are reported with their stacks and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.incidents import EventKind
from outlast.policy.deadlines import ExitLimit, LateRank
from outlast.testing import Cluster

STUCK_AT_THE_END = """
import os, threading
class Model:
    def __del__(self):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
if os.environ["RANK"] == "1" and os.environ["OUTLAST_CYCLE"] == "0":
    model = Model()
print("the script is done", flush=True)
"""
S = 10**9


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_rank_that_hangs_at_its_exit_is_ended(num_nodes: int, tmp_path: Path) -> None:
    """A rank that blocks while its interpreter exits is reported with its native stack and ended as hung, also where
    the rank that exited with 0 is on another node; the next cycle exits with 0."""
    script = tmp_path / "train.py"
    script.write_text(STUCK_AT_THE_END)
    options = ["--ft-exit-timeout=2"]
    run_dir = tmp_path / "run"
    with Cluster(
        script, run_dir=run_dir, num_nodes=num_nodes, nproc_per_node=2 // num_nodes, options=options
    ) as cluster:
        assert cluster.wait(timeout_s=300) == [0] * num_nodes
        incident = next(e.data["incident"] for e in cluster.events() if e.kind == EventKind.INCIDENT)
        assert (incident["kind"], incident["rank"]) == ("worker_hung", 1)
        assert "did not exit within 2 s after another rank exited with 0" in incident["evidence"]["summary"]
        assert {e.cycle for e in cluster.events() if e.kind == EventKind.CYCLE_STARTED} == {0, 1}
        output = "".join(agent.output() for agent in cluster.agents)
        assert "rank 1 still runs" in output
        stack = (run_dir / "stacks" / "cycle-0" / "exit-rank-1.txt").read_text()
        assert "PyThread_acquire_lock_timed" in stack
        assert "__del__" in stack


@pytest.mark.parametrize(
    ("exit_s", "is_configured", "rank", "at_s", "ended"),
    [
        (60.0, True, LateRank(global_rank=1), 59, False),
        (60.0, True, LateRank(global_rank=1), 60, True),
        (60.0, True, LateRank(global_rank=1, last_heartbeat_ns=130 * S), 60, False),
        (60.0, True, LateRank(global_rank=1, last_active_ns=130 * S), 60, True),
        (60.0, False, LateRank(global_rank=1, last_active_ns=130 * S), 60, False),
        (60.0, False, LateRank(global_rank=1, last_active_ns=130 * S), 90, True),
        (None, True, LateRank(global_rank=1), 10**6, False),
    ],
)
def test_the_timeout_of_an_exit(
    exit_s: float | None, is_configured: bool, rank: LateRank, at_s: int, ended: bool
) -> None:
    """A configured timeout counts from the first clean exit or the last heartbeat; the default timeout applies to idle
    processes only."""
    now_ns = (100 + at_s) * S
    assert ExitLimit(exit_s, is_configured).overdue([rank], first_exit_ns=100 * S, now_ns=now_ns) == [rank] * ended
