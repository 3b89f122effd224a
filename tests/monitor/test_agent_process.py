"""One agent process for all ranks of a node: its election, lifetime and replacement."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from outlast.testing import RankProcesses

pytestmark = [pytest.mark.process, pytest.mark.cold]
PATIENCE_S = 100.0
WATCHED = "watches rank"

RANK = """
import errno, subprocess, sys
from outlast.config import FaultToleranceConfig
from outlast.monitor import RankMonitor

how = sys.argv[1]
if how == "alone":

    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    subprocess.Popen = refuse
monitor = RankMonitor(FaultToleranceConfig(rank_section_timeouts={"step": 2.0}, num_warmup_iterations=0))
print("begun", flush=True)
with monitor.section("other"):
    sys.stdin.readline()
with monitor.section("step"):
    sys.stdin.readline()
print("over", flush=True)
"""


class Node(RankProcesses):
    """Ranks of one or more nodes on this machine."""

    def __init__(self, num: int, *, how: str = "", environments: list[Mapping[str, str]] | None = None) -> None:
        debug = {"OUTLAST_LOG_LEVEL": "debug", "OUTLAST_NODE": "n"}
        super().__init__(RANK, how, world_size=num, code=True, stdin=True, environment=debug, environments=environments)

    def agents(self) -> list[int]:
        """Return the process id of each rank's agent process, once all have one."""
        lines = [self.next_line(rank, PATIENCE_S, containing=WATCHED) for rank in range(self.world_size)]
        return [int(re.search(r"agent process (\d+) of node", line)[1]) for line in lines]  # type: ignore[index]


def has_ended(pid: int, timeout_s: float = PATIENCE_S) -> bool:
    end_s = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def test_simultaneous_ranks_elect_one_agent_process() -> None:
    """Eight ranks that start together elect one agent process, which exits soon after they were all killed."""
    with Node(8) as node:
        (agent,) = set(node.agents())
        for rank in range(8):
            node.kill(rank)
        node.wait(PATIENCE_S)
        assert has_ended(agent)


def test_each_node_has_its_own_agent_process() -> None:
    """Two nodes of one job on one machine have an agent process each."""
    environments_of_ranks = [{"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2)} for rank in range(4)]
    with Node(4, environments=environments_of_ranks) as node:
        agents = node.agents()
        assert len(set(agents)) == 2
        assert agents[0] == agents[1] != agents[2] == agents[3]


def test_the_agent_process_survives_the_rank_that_started_it() -> None:
    """After a SIGKILL of the rank that started the agent process, a hang of the other rank is still ended."""
    with Node(2) as node:
        (agent,) = set(node.agents())
        starter = psutil.Process(agent).ppid()
        (rank,) = [one for one in range(2) if node.pid(one) == starter]
        node.kill(rank)
        assert node.wait(PATIENCE_S, ranks=[rank]) == [-signal.SIGKILL]
        other = 1 - rank
        node.send(other, "into the step")
        assert node.wait(PATIENCE_S, ranks=[other]) == [-signal.SIGKILL]
        assert f"rank {other} (pid {node.pid(other)}) is ended with SIGKILL" in node.output(rank) + node.output(other)
        assert has_ended(agent)


def test_a_killed_agent_process_has_one_successor() -> None:
    """After a SIGKILL of the agent process all ranks share one new agent process, which ends a hung rank."""
    with Node(3) as node:
        (agent,) = set(node.agents())
        os.kill(agent, signal.SIGKILL)
        lines = [node.next_line(rank, PATIENCE_S, containing="ended: agent process") for rank in range(3)]
        (successor,) = {int(line.partition("ended: agent process ")[2].split()[0]) for line in lines}
        assert successor != agent
        node.send(1, "into the step")
        assert node.wait(PATIENCE_S, ranks=[1]) == [-signal.SIGKILL]


def test_training_continues_without_child_processes() -> None:
    """Where child processes are forbidden, the node logs one warning, and the ranks exit with 0."""
    with Node(2, how="alone") as node:
        for rank in range(2):
            node.next_line(rank, PATIENCE_S, containing="begun")
            node.send(rank, "1\n2")
        assert node.wait(PATIENCE_S) == [0, 0]
        log = node.output(0) + node.output(1)
        assert log.count("WARNING") == 1
        assert "no agent process can be started, so hangs are not detected" in log


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_a_socket_name_bound_by_another_user_is_skipped() -> None:
    """The ranks of the node report the other user and share an agent process under the next name."""
    environments_of_ranks: list[Mapping[str, str]] = [{"MASTER_PORT": "29511"}] * 2
    with Node(2, environments=environments_of_ranks) as node:
        (agent,) = set(node.agents())
        owned = {os.readlink(fd) for fd in Path(f"/proc/{agent}/fd").iterdir()}
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        (name,) = {line[-1] for line in sockets if f"socket:[{line[6]}]" in owned and "-agent-" in line[-1]}
    assert has_ended(agent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        os.seteuid(65534)  # the kernel records the user that listens
        try:
            squatter.bind(f"\0{name[1:]}")
            squatter.listen()
        finally:
            os.seteuid(0)
        with Node(2, environments=environments_of_ranks) as node:
            assert len(set(node.agents())) == 1
            assert "user 65534 of this machine has bound the name of the agent process" in node.output(0)
