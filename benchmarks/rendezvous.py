"""Benchmark ``rendezvous``: the time until many agents have their ranks, compared with torch's c10d rendezvous.

A few processes of this machine simulate hundreds of agents, without workers: those of outlast drive the same link as
``outlast run``, the peer's the same handler as ``torchrun``. :mod:`benchmarks.rendezvous_crowd` simulates thousands.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from benchmarks import rendezvous_crowd as crowd
from benchmarks.measuring import Progress, median, run_rounds, worker_ranks
from outlast import clock, env
from outlast.config.sources import LayeredSettings
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity
from outlast.launch.control_link import ControlLink, LinkDown, LinkEvent, LinkFailed, LinkUp
from outlast.launch.job_settings import JobSettings
from outlast.runtime.addresses import Endpoint
from outlast.runtime.processes import raise_descriptor_limit
from outlast.runtime.run_key import RunKey
from outlast.runtime.store import TCPStore, open_cycle_store
from outlast.simulate.benchmark_results import Bar, BenchResult
from outlast.testing.ranks import RankProcesses, free_port

_NUM_PROCESSES = 4
"""In addition to the process of the first agent, which hosts the store."""
_MOST_CROWD_ROUNDS = 3
_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks up each peer's name, which takes long without a name server
}


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Let 64 to 4,096 simulated agents meet.

    Raises:
        OutlastError: Not every agent got a rank.

    Blocks: about 15 s a round.
    """
    hundreds = _measure_hundreds(repeats, progress)
    thousands = _measure_thousands(min(repeats, _MOST_CROWD_ROUNDS), progress)
    return BenchResult("rendezvous", (*hundreds.bars, *thousands.bars), (*hundreds.notes, *thousands.notes))


def _measure_hundreds(repeats: int, progress: Progress) -> BenchResult:
    with worker_ranks(run_agents, num_ranks=1 + _NUM_PROCESSES, variables=_VARIABLES, stdin=True) as processes:
        found = run_rounds(
            {
                "outlast, 64 agents": partial(_meet, processes, "outlast", 64),
                "c10d, 64 agents": partial(_meet, processes, "c10d", 64),
                "outlast, 256 agents": partial(_meet, processes, "outlast", 256),
                "outlast, 512 agents": partial(_meet, processes, "outlast", 512),
            },
            repeats=repeats,
            progress=progress,
        )
    few_s, peer_s, many_s, most_s = (median(some) for some in found.values())
    return BenchResult(
        "rendezvous",
        (
            Bar("rendezvous_512_s", most_s, "s", 60.0),
            Bar("rendezvous_growth_256_to_512", most_s / many_s, "x", 2.6),
            Bar("rendezvous_vs_c10d_64", few_s / peer_s, "x", 1.0, "torch c10d, 64 agents (s)", peer_s),
        ),
        (
            f"from the order to join to the last rank: outlast {few_s:.3f} s with 64, {many_s:.3f} s with 256, "
            f"{most_s:.3f} s with 512 agents; c10d {peer_s:.3f} s with 64",
        ),
    )


def _measure_thousands(repeats: int, progress: Progress) -> BenchResult:
    meetings = {f"outlast, {num:,} agents": partial(crowd.meet, num) for num in (2048, 4096)}
    few, many = run_rounds(meetings, repeats=repeats, progress=progress).values()
    few_s, many_s = (median([one.formed_s for one in some]) for some in (few, many))
    connected_s, node_kib = (median([getattr(one, name) for one in many]) for name in ("connected_s", "node_kib"))
    return BenchResult(
        "rendezvous",
        (
            Bar("rendezvous_4096_s", many_s, "s", 60.0),
            Bar("rendezvous_growth_2048_to_4096", many_s / few_s, "x", 3.0),
            Bar("lose_64_of_4096_s", median([one.lost_s for one in many]), "s", 30.0),
            Bar("coordinator_rss_4096_mib", median([one.rss_mib for one in many]), "MiB", 128.0),
        ),
        (
            f"4,096 agents and {crowd.NUM_LOST} spares connect at once: all are welcomed after {connected_s:.3f} s; "
            f"the coordinator's memory grows by {node_kib:.1f} KiB for each",
        ),
    )


def _meet(processes: RankProcesses, kind: str, num_agents: int) -> float:
    """Return the seconds from the order to join until the last agent had its rank.

    Args:
        processes: The processes of the simulated agents.
        kind: ``outlast`` or ``c10d``.
        num_agents: Number of agents.

    Raises:
        OutlastError: Not every agent got a rank.

    Blocks: several minutes at most.
    """
    first, others = range(1), range(1, 1 + _NUM_PROCESSES)
    everyone = (*first, *others)
    job = {"num_agents": num_agents, "port": free_port(), "run_id": f"bench-{clock.now_ns()}"}
    for some in (first, others):  # the others need the store of the first process
        crowd.order(processes, some, "gather", kind, job)
    joined_ns = clock.now_ns()
    ranked: list[tuple[int, int]] = [one for some in crowd.order(processes, everyone, "join") for one in some]
    if sorted(rank for rank, _ in ranked) != list(range(num_agents)):
        raise OutlastError(f"{num_agents} agents of {kind} met and their ranks are not 0 to {num_agents - 1}")
    crowd.order(processes, everyone, "finish")
    crowd.order(processes, others, "leave")
    crowd.order(processes, first, "leave")  # the store's host leaves last
    return (max(ranked_ns for _, ranked_ns in ranked) - joined_ns) / 1e9


def run_agents() -> None:
    """Simulate agents; carry out the orders on standard input, one per line, until it ends."""
    raise_descriptor_limit()
    agents = _ProcessAgents()
    for line in sys.stdin:
        crowd.carry_out(agents, line)
    os._exit(0)  # do not wait for threads of torch's handlers and stores


class _ProcessAgents:
    """The simulated agents of one process, and its orders."""

    def __init__(self) -> None:
        self._agents: list[_SimulatedAgent] = []

    def gather(self, kind: str, job: dict[str, Any]) -> None:
        """Make this process's agents and connect them; the first process has only the first agent."""
        made = {"outlast": _OutlastAgent, "c10d": _C10dAgent}[kind]
        rank = env.read_worker().global_rank
        for number in range(rank, job["num_agents"], _NUM_PROCESSES) if rank else range(1):
            self._agents.append(made(number, **job))
            # One by one: torch looks up a name for each connection, and some name servers do not answer hundreds at
            # once.
            self._agents[-1].wait_until("connected", clock.now_s() + crowd.TIMEOUT_S)

    def join(self) -> list[tuple[int, int]]:
        """Make the agents join; return each one's rank, and when it had it."""
        deadline_s = clock.now_s() + crowd.TIMEOUT_S
        for agent in self._agents:
            agent.join()
        for agent in self._agents:
            agent.wait_until("ranked", deadline_s)
        return [(agent.rank, agent.ranked_ns) for agent in self._agents]

    def finish(self) -> None:
        for agent in self._agents:
            agent.finish()

    def leave(self) -> None:
        deadline_s = clock.now_s() + crowd.TIMEOUT_S
        for agent in self._agents:
            agent.close(deadline_s)
        self._agents.clear()


class _SimulatedAgent(ABC):
    """One agent that joins once; the first one hosts the store, and must be connected before others are made."""

    def __init__(self) -> None:
        self.rank = -1
        """The node rank; -1: none yet."""
        self.ranked_ns = 0
        """When it had its rank, in monotonic nanoseconds."""
        self._reached = {name: threading.Event() for name in ("connected", "ranked", "over")}
        self._error: str | None = None

    def wait_until(self, what: str, deadline_s: float) -> None:
        """Wait until the agent is connected, ranked, or its job is over.

        Raises:
            DeadlineExceeded: It is not, or failed.

        Blocks: until the deadline.
        """
        if not self._reached[what].wait(max(0.0, deadline_s - clock.now_s())) or self._error is not None:
            raise DeadlineExceeded(f"an agent is not {what}: {self._error or 'no response in time'}")

    @abstractmethod
    def join(self) -> None:
        """Begin to join; returns at once."""

    @abstractmethod
    def finish(self) -> None:
        """Report that the work is done; returns at once."""

    @abstractmethod
    def close(self, deadline_s: float) -> None:
        """Leave and close everything."""

    def _take_rank(self, rank: int) -> None:
        self.ranked_ns = clock.now_ns()
        self.rank = rank
        self._reached["ranked"].set()

    def _fail(self, error: str) -> None:
        self._error = error
        for event in self._reached.values():
            event.set()


class _OutlastAgent(_SimulatedAgent):
    """An agent of ``outlast run``, with default settings."""

    def __init__(self, number: int, *, num_agents: int, port: int, run_id: str) -> None:
        super().__init__()
        self._cycle = 0
        self._cycle_store: TCPStore | None = None
        self._link = ControlLink(
            [Endpoint(crowd.HOST, port)],
            JobSettings(job=run_id, num_slots=num_agents, join_timeout_s=crowd.TIMEOUT_S, host=f"node-{number}"),
            JobIdentity(run_id=run_id, key=RunKey.of_run_id(run_id)),
            deliver=self._on_event,
            layers=LayeredSettings(),
            has_loop=False,
        )
        self._link.start()

    def join(self) -> None:
        self._send(m.JoinRequest, addr=crowd.HOST, nproc=crowd.NPROC)

    def finish(self) -> None:
        self._send(m.Finished, facts=m.CycleFacts(cycle=self._cycle))

    def close(self, deadline_s: float) -> None:
        self.wait_until("over", deadline_s)
        self._link.close()
        self._cycle_store = None

    def _send(self, message: Callable[..., Any], **fields: object) -> None:
        self._link.send(message(node=self._link.node, epoch=self._link.epoch, **fields))

    def _on_event(self, event: LinkEvent) -> None:
        match event:
            case LinkUp():
                self._reached["connected"].set()
            case m.Prepare():
                self._cycle_store = store = open_cycle_store(crowd.HOST)
                self._send(m.Master, cycle=event.cycle, addr=crowd.HOST, port=store.port)
            case m.Start():
                self._cycle = event.cycle
                self._take_rank(event.node_rank)
                self._send(m.Running, cycle=event.cycle)
            case m.Stop():
                self._reached["over"].set()
            case LinkFailed() | LinkDown():
                self._fail(event.error)
            case m.CycleOver():
                self._fail(f"the cycle ended: {event.reason}")
            case _:
                pass


class _C10dAgent(_SimulatedAgent):
    """An agent of ``torchrun --rdzv-backend=c10d``, with default settings."""

    def __init__(self, number: int, *, num_agents: int, port: int, run_id: str) -> None:
        super().__init__()
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"{crowd.HOST}:{port}",
            run_id=run_id,
            min_nodes=num_agents,
            max_nodes=num_agents,
            local_addr=crowd.HOST,
            is_host=str(number == 0),
            join_timeout=str(int(crowd.TIMEOUT_S)),
        )
        self._joining = threading.Event()
        self._handler: RendezvousHandler | None = None
        self._thread = threading.Thread(target=self._run, args=(parameters,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._joining.set()

    def finish(self) -> None:
        """Do nothing: torch's agents leave one by one."""

    def close(self, deadline_s: float) -> None:
        self._thread.join(max(0.0, deadline_s - clock.now_s()))
        if self._handler is not None:
            self._handler.shutdown()
            self._handler = None

    def _run(self, parameters: RendezvousParameters) -> None:
        try:
            backend, store = create_backend(parameters)
            self._handler = create_handler(store, backend, parameters)
            self._reached["connected"].set()
            if self._joining.wait(crowd.TIMEOUT_S):
                self._take_rank(self._handler.next_rendezvous().rank)
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            self._fail(f"{type(error).__name__}: {error}")
