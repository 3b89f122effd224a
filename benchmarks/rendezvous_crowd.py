"""The part of benchmark ``rendezvous`` with thousands of agents: crowds in one thread each, and one coordinator.

The coordinator has a separate process, so that its memory can be measured; it writes its journal as usual. Each
simulated agent has its own connection with the whole handshake, sends a heartbeat every second and answers messages as
an agent of ``outlast run`` does; a thread for each would measure the threads.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import worker_ranks
from outlast import clock, env
from outlast.config.sources import LayeredSettings
from outlast.decoding import parse_json
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity, join_handshake
from outlast.launch.control_link import listen
from outlast.launch.coordinator_server import CoordinatorServer
from outlast.launch.job_settings import JobSettings
from outlast.runtime.addresses import Endpoint
from outlast.runtime.processes import raise_descriptor_limit
from outlast.runtime.run_key import RunKey
from outlast.runtime.wire import BufferedChannel, SelectedChannel
from outlast.testing.ranks import RankProcesses, free_port
from outlast.version import __version__

NUM_LOST = 64
HOST = "127.0.0.1"
NPROC = 8
_NUM_CROWDS = 2
TIMEOUT_S = 240.0
_BEAT_S = 1.0
_SILENCE_S = 30.0
"""Limit without an answer to heartbeats; a crowd in one thread responds more slowly than a separate agent."""
_ANSWER = "simulated crowd: "
Channel = SelectedChannel[m.OnAgent]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdFigures:
    """The result of one meeting of many agents."""

    connected_s: float
    """From the first connection until the coordinator has welcomed all."""
    formed_s: float
    """From the order to join until the last agent has its rank."""
    lost_s: float
    """From the end of some agents until the last one has its rank in the next cycle."""
    rss_mib: float
    """Peak memory of the coordinator's process."""
    node_kib: float
    """Growth of that memory per node."""

    def __str__(self) -> str:
        return (
            f"{self.formed_s:.3g} s, the next cycle {self.lost_s:.3g} s, connected in {self.connected_s:.3g} s, "
            f"{self.rss_mib:.3g} MiB, {self.node_kib:.3g} KiB a node"
        )


def meet(num_agents: int) -> CrowdFigures:
    """Let agents form a cycle, lose some of them at once, and let the others form the next one with spares.

    Raises:
        OutlastError: Not every agent got a rank, in either cycle.

    Blocks: several minutes at most.
    """
    with (
        tempfile.TemporaryDirectory(prefix="outlast-bench-rendezvous-") as run_dir,
        worker_ranks(run_party, num_ranks=1 + _NUM_CROWDS, stdin=True) as processes,
    ):
        crowds = range(1, 1 + _NUM_CROWDS)
        num_all = num_agents + NUM_LOST
        shares = [range(number, num_all, _NUM_CROWDS) for number in range(_NUM_CROWDS)]
        job = {"run_id": f"bench-{clock.now_ns()}", "port": free_port(), "run_dir": run_dir}
        empty_mib = order(processes, [0], "serve", job, num_agents)[0]
        began_ns = clock.now_ns()
        for crowd, share in zip(crowds, shares, strict=True):
            send_order(processes, crowd, "connect", job, share.start, share.stop, share.step)
        collect(processes, crowds, "connect")
        connected_ns = clock.now_ns()
        # Agents with a lower number join first: the others are the spares.
        ordered_ns = clock.now_ns()
        first = order(processes, crowds, "join", num_agents)
        _check(first, num_agents)
        order(processes, crowds, "wait_as_spare")
        lost_ns = clock.now_ns()
        order(processes, crowds, "lose", num_agents - NUM_LOST, num_agents)
        second = order(processes, crowds, "rejoin")
        _check(second, num_agents)
        full_mib = order(processes, [0], "measure")[0]
        order(processes, crowds, "finish")
        order(processes, [0], "end")
    return CrowdFigures(
        connected_s=(connected_ns - began_ns) / 1e9,
        formed_s=(max(ranked_ns for _, ranked_ns in first) - ordered_ns) / 1e9,
        lost_s=(max(ranked_ns for _, ranked_ns in second) - lost_ns) / 1e9,
        rss_mib=full_mib,
        node_kib=(full_mib - empty_mib) * 1024 / num_all,
    )


def _check(answers: Sequence[tuple[list[int], int]], num_agents: int) -> None:
    ranks = sorted(rank for some, _ in answers for rank in some)
    if ranks != list(range(num_agents)):
        raise OutlastError(f"{num_agents} agents met and their ranks are not 0 to {num_agents - 1}")


# -- orders to processes -----------------------------------------------------------------------------------------


def send_order(processes: RankProcesses, process: int, name: str, *arguments: object) -> None:
    """Send an order to a process; :func:`collect` returns the answer. Raises: OutlastError: the process died."""
    try:
        processes.send(process, json.dumps([name, arguments]))
    except BrokenPipeError:
        raise OutlastError(f"a process of simulated agents died\n{processes.tails()}") from None


def collect(processes: RankProcesses, which: Sequence[int], name: str) -> list[Any]:
    """Return the answers of processes to an order. Raises: OutlastError: one failed."""
    results = []
    for process in which:
        line = processes.next_line(process, TIMEOUT_S + 10.0, containing=_ANSWER)
        error, result = parse_json(line.partition(_ANSWER)[2])
        if error is not None:
            raise OutlastError(f"simulated agents failed to {name}: {error}")
        results.append(result)
    return results


def order(processes: RankProcesses, which: Sequence[int], name: str, *arguments: object) -> list[Any]:
    """Make processes carry out an order at the same time; return all answers."""
    for process in which:
        send_order(processes, process, name, *arguments)
    return collect(processes, which, name)


def carry_out(target: object, line: str) -> None:
    """Call the method of ``target`` that an order names, and print the answer."""
    name, arguments = parse_json(line)
    error, result = None, None
    try:
        result = getattr(target, name)(*arguments)
    except (OutlastError, OSError, RuntimeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    print(_ANSWER + json.dumps([error, result]), flush=True)


# -- in the processes ------------------------------------------------------------------------------------------


def run_party() -> None:
    """Run the coordinator (rank 0) or a crowd; carry out the orders on standard input, one per line."""
    raise_descriptor_limit()
    with closing(_Crowd() if env.read_worker().global_rank else _Host()) as party:
        while (line := party.next_line()) is not None:
            carry_out(party, line)


class _Host:
    def __init__(self) -> None:
        self._server: CoordinatorServer | None = None
        self._errors: list[BaseException] = []

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def next_line(self) -> str | None:
        """Return the next order; ``None``: there are no more."""
        return sys.stdin.readline() or None

    def serve(self, job: dict[str, Any], num_slots: int) -> float:
        """Start the coordinator; return the process's memory before any agent connected."""
        self._server = CoordinatorServer(
            listen(Endpoint(HOST, job["port"])),
            JobSettings(job="bench", num_slots=num_slots, join_timeout_s=TIMEOUT_S, host="host"),
            JobIdentity(run_id=job["run_id"], key=RunKey.of_run_id(job["run_id"]), run_dir=Path(job["run_dir"])),
            layers=LayeredSettings(),
            on_error=self._errors.append,
        )
        self._server.start()
        return _peak_mib()

    def measure(self) -> float:
        return _peak_mib()

    def end(self) -> None:
        """Wait until the job is over for all agents."""
        assert self._server is not None
        if not self._server.closed.wait(TIMEOUT_S) or self._errors:
            raise DeadlineExceeded(f"the coordinator did not end as it should: {self._errors or 'agents are left'}")
        self._server.close()


def _peak_mib() -> float:
    # Not getrusage: its value includes the process that this one was forked from.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


class _Crowd:
    """Many agents in one loop, which also waits for orders."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._agents: dict[int, _CrowdAgent] = {}
        self._beats: deque[tuple[float, _CrowdAgent]] = deque()
        """Time and agent of the next heartbeats."""
        self._input = b""
        self._is_over = False
        self._error: str | None = None
        self.num_welcomed = self.num_ranked = self.num_spares = self.num_stopped = 0
        self.cycle = 0
        self.ranked_ns = 0
        self.job: dict[str, Any] = {}
        self.handshake_key: RunKey | None = None
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._on_input)

    def close(self) -> None:
        for agent in self._agents.values():
            agent.close()
        self._selector.close()

    def next_line(self) -> str | None:
        """Return the next order; ``None``: there are no more. The agents run meanwhile."""
        self._run_until(lambda: b"\n" in self._input or self._is_over, within_s=None)
        line, found, self._input = self._input.partition(b"\n")
        return line.decode() if found else None

    # -- orders ------------------------------------------------------------------------------------------------

    def connect(self, job: dict[str, Any], start: int, stop: int, step: int) -> None:
        """Connect agents, all at once."""
        self.job, self.handshake_key = job, RunKey.of_run_id(job["run_id"])
        for number in range(start, stop, step):
            agent = self._agents[number] = _CrowdAgent(self, number, self._selector)
            agent.connect()
        self._run_until(lambda: self.num_welcomed == len(self._agents))
        now_s = clock.now_s()
        for place, agent in enumerate(self._agents.values()):
            self._beats.append((now_s + _BEAT_S * place / len(self._agents), agent))

    def join(self, num_slots: int) -> tuple[list[int], int]:
        """Make the first agents join; return their ranks, and when the last one had its rank."""
        joining = [agent for number, agent in self._agents.items() if number < num_slots]
        for agent in joining:
            agent.join(None)
        return self._await_ranks(joining, 0)

    def wait_as_spare(self) -> None:
        """Make the others join as spares."""
        spares = [agent for agent in self._agents.values() if agent.rank is None]
        for agent in spares:
            agent.join(None)
        self._run_until(lambda: self.num_spares == len(spares))

    def lose(self, start: int, stop: int) -> None:
        """End agents' connections, as the kernel does for a killed process."""
        for number in range(start, stop):
            if (agent := self._agents.pop(number, None)) is not None:
                agent.close()

    def rejoin(self) -> tuple[list[int], int]:
        """Return the ranks of all remaining agents in the next cycle, and when the last one had its rank."""
        return self._await_ranks(list(self._agents.values()), 1)

    def finish(self) -> None:
        """Report that all work is done, and leave once the job is over."""
        for agent in self._agents.values():
            agent.send(m.Finished(facts=m.CycleFacts(cycle=self.cycle)))
        self._run_until(lambda: self.num_stopped == len(self._agents))

    # -- the loop ----------------------------------------------------------------------------------------------

    def fail(self, error: str) -> None:
        """Make the current order fail."""
        self._error = error

    def _await_ranks(self, agents: Sequence[_CrowdAgent], cycle: int) -> tuple[list[int], int]:
        self._run_until(lambda: self.num_ranked >= len(agents) and self.cycle == cycle)
        return [agent.rank for agent in agents if agent.rank is not None], self.ranked_ns

    def _run_until(self, is_done: Callable[[], bool], within_s: float | None = TIMEOUT_S) -> None:
        end_s = None if within_s is None else clock.now_s() + within_s
        while not is_done():
            if self._error is not None:
                raise OutlastError(self._error)
            now_s = clock.now_s()
            if end_s is not None and now_s > end_s:
                raise DeadlineExceeded(
                    f"no response in time: {self.num_welcomed} welcomed, {self.num_ranked} with a rank in cycle "
                    f"{self.cycle}, {self.num_stopped} stopped"
                )
            self._heartbeat(now_s)
            wait_s = self._beats[0][0] - now_s if self._beats else _BEAT_S
            for key, events in self._selector.select(min(max(0.0, wait_s), _BEAT_S)):
                key.data(events)

    def _heartbeat(self, now_s: float) -> None:
        while self._beats and self._beats[0][0] <= now_s:
            due_s, agent = self._beats.popleft()
            if not agent.is_closed:
                agent.heartbeat()
                self._beats.append((max(due_s + _BEAT_S, now_s), agent))

    def _on_input(self, _: int) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        self._input += data
        if not data:
            self._is_over = True
            self._selector.unregister(sys.stdin.fileno())


class _CrowdAgent:
    def __init__(self, crowd: _Crowd, number: int, selector: selectors.BaseSelector) -> None:
        self._crowd, self._selector, self._node = crowd, selector, f"node-{number}"
        self._channel: Channel | None = None
        self._count = 0
        self._listener: socket.socket | None = None
        self.rank: int | None = None
        self.is_closed = False

    def connect(self) -> None:
        crowd = self._crowd
        connection = socket.create_connection((HOST, crowd.job["port"]), timeout=TIMEOUT_S)
        handshake = join_handshake(crowd.job["run_id"], crowd.handshake_key)
        channel: BufferedChannel[m.OnAgent] = BufferedChannel(connection, m.OnAgent, handshake=handshake)
        self._channel = Channel(self._selector, channel, self._on_messages, self._on_broken)
        who = {"run_id": crowd.job["run_id"], "node": self._node, "epoch": "1", "command": "", "command_text": ""}
        hello = m.Hello(**who, version=__version__)
        self._channel.send(hello)

    def join(self, ended: m.CycleFacts | None) -> None:
        self.send(m.JoinRequest(addr=HOST, nproc=NPROC, ended=ended))

    def heartbeat(self) -> None:
        self._count += 1
        self.send(m.AgentHeartbeat(count=self._count))

    def send(self, message: m.FromNode | m.AgentHeartbeat) -> None:
        assert self._channel is not None
        self._channel.send(message)

    def close(self) -> None:
        self.is_closed = True
        if self._channel is not None:
            self._channel.close()
        if self._listener is not None:
            self._listener.close()

    def _on_broken(self, channel: Channel, error: OSError) -> None:
        channel.close()
        self._crowd.fail(f"{self._node}: {error}")

    def _on_messages(self, _: Channel, came: list[m.OnAgent]) -> None:
        crowd = self._crowd
        for message in came:
            match message:
                case m.Welcome():
                    crowd.num_welcomed += 1
                case m.Refused():
                    crowd.fail(f"{self._node} was refused: {message.reason}")
                case m.Prepare():
                    self._listener = socket.create_server((HOST, 0))
                    port = self._listener.getsockname()[1]
                    self.send(m.Master(cycle=message.cycle, addr=HOST, port=port))
                case m.Start():
                    self._take_rank(message)
                case m.Wait() if self.rank is None and message.place is None:
                    crowd.num_spares += 1
                case m.CycleOver():
                    self.join(m.CycleFacts(cycle=message.cycle))
                case m.Stop():
                    crowd.num_stopped += 1
                    self.send(m.Bye())
                case _:
                    pass

    def _take_rank(self, start: m.Start) -> None:
        crowd = self._crowd
        if start.cycle > crowd.cycle:
            crowd.cycle, crowd.num_ranked = start.cycle, 0
        self.rank = start.node_rank
        crowd.num_ranked += 1
        crowd.ranked_ns = clock.now_ns()
        self.send(m.Running(cycle=start.cycle))
