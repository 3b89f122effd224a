"""An agent whose coordinator and fork server are simulated: what a test puts in is what the agent receives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing import LogsDest

from outlast.config import HealthConfig
from outlast.config.sources import LayeredSettings
from outlast.launch import protocol as m
from outlast.launch.checkups import Occasion
from outlast.launch.control_link import LinkUp
from outlast.launch.coordinator_client import CoordinatorClient
from outlast.launch.cycle import Cycle, WorkerLaunch
from outlast.launch.in_process_recovery import InProcessRecovery
from outlast.launch.node_agent import AgentState, NodeAgent
from outlast.launch.options import parse_options
from outlast.launch.workers import NodeWorkers, WorkerProcess
from outlast.runtime.board import Board
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.fork_server import Clear, Cleared, SendSignal
from outlast.runtime.postmortem import Postmortem


def simulated_cycle(folder: Path, number: int = 0, *, num_workers: int = 2, **layers: Any) -> Cycle:
    """Return a cycle with heartbeat memory and without processes.

    Args:
        layers: Settings by layer, as for :class:`LayeredSettings`.
    """
    workers = {key: WorkerProcess(local_rank=key, global_rank=key) for key in range(num_workers)}
    board = Board.create(num_ranks=num_workers)
    start = m.Start(
        cycle=number,
        term=0,
        node_rank=0,
        num_nodes=1,
        base_rank=0,
        world_size=num_workers,
        master_addr="n",
        master_port=1,
        place=m.SlotPlace(cycle=number, num_slots=1, slot=0),
    )
    options: Any = SimpleNamespace(layers=LayeredSettings(**layers), run_dir=folder)
    logs: Any = SimpleNamespace(start=lambda: None, stop=lambda **_: None, destinations=LogsDest())
    return Cycle(
        start=start,
        options=options,
        job="job",
        node="n",
        board=board,
        logs=logs,
        workers=workers,
        spawns=[],
        in_process=InProcessRecovery(board=board, workers=workers, is_alone=True, job="job", cycle=number, node="n"),
        postmortem=Postmortem(num_workers),
    )


class SimulatedForkServer:
    """A fork server without workers; :attr:`events` receives what it reports, ``None`` for its death."""

    pid = 1

    def __init__(self) -> None:
        self.events = Mailbox[Any]()
        self.requests: list[Any] = []
        """The requests of the agent."""
        self.before_receive: Callable[[], object] = lambda: None
        """Called between the wait for an event and its receipt."""

    def fileno(self) -> int:
        return self.events.fileno()

    def send(self, request: Any, fds: Any = ()) -> None:
        self.requests.append(request)

    def receive(self) -> Any:
        self.before_receive()
        (event,) = self.events.take_all()
        return event

    def close(self) -> None:
        self.events.close()

    @property
    def num_clears(self) -> int:
        """Number of requests to kill and reap the remaining workers."""
        return sum(isinstance(one, Clear) for one in self.requests)

    @property
    def signals(self) -> list[int]:
        """The signals that the agent sent to workers."""
        return [one.signal for one in self.requests if isinstance(one, SendSignal)]


class SimulatedAgent:
    """An agent of two workers, and its messages to the coordinator in :attr:`sent`.

    Args:
        folder: Folder of the run directory.
        arguments: Options of ``outlast run``.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.checkups = Mock(config=HealthConfig(before_joining=False))
        """Its ``begin`` receives the health checks to make, which have no results."""
        (folder / "train.py").touch()
        self.options = parse_options(
            ["--nproc-per-node=2", f"--run-dir={folder / 'run'}", *arguments, str(folder / "train.py")]
        )
        self.sent: list[Any] = []
        self.mailbox, self.fork_server = Mailbox[object](), SimulatedForkServer()
        self.memory = Mock(waited_s=0.0, is_awaited=False)
        """Waits for device memory."""
        link: Any = Mock(node="n", epoch="e", endpoint="n:1", endpoints=(), recovery_state=None, relay=None)
        link.send = self.sent.append
        self.client = CoordinatorClient(link, addr="n", nproc=2, wish=None)
        spec: Any = Mock(local_world_size=2)
        self.agent = NodeAgent(
            WorkerLaunch(options=self.options, kind="exec", argv=(), env={}, spec=spec, logs=Mock()),
            workers=NodeWorkers(self.fork_server, self._replace_fork_server),  # type: ignore[arg-type]
            writer=None,
            client=self.client,
            checkups=self.checkups,
            memory=self.memory,
            mailbox=self.mailbox,
            began_s=0.0,
        )

    @property
    def state(self) -> AgentState:
        return self.agent.outlook().state

    def receive(self, message: object) -> None:
        """Let the agent receive a message of the coordinator, or an event of another thread."""
        self.mailbox.put(message)
        self.handle_next()

    def report(self, event: Any) -> None:
        """Let the agent receive an event of the fork server; ``None``: the fork server died."""
        self.fork_server.events.put(event)
        self.handle_next()

    def handle_next(self) -> None:
        """Wait for an event or a timer and handle it."""
        self.agent.wait_and_handle()

    def join(self) -> None:
        """Let the agent reach the coordinator and request a slot."""
        self.receive(LinkUp(job="job", is_host=False, is_first=True))
        assert self.state == AgentState.JOINING

    def run(self, cycle: Cycle) -> None:
        """Let the agent start a cycle, after the end of the cycle that runs."""
        if self.state == AgentState.OUTSIDE:
            self.join()
        if self.state == AgentState.RUNNING:
            self.end_cycle()
            self.report(Cleared())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Cycle, "prepare", lambda *_, **__: cycle)
            self.receive(cycle.start)
        assert self.state == AgentState.RUNNING

    def end_cycle(self) -> None:
        """Let the agent receive that its cycle is over."""
        number = self.agent.outlook().cycle.number  # type: ignore[union-attr]
        self.receive(m.CycleOver(cycle=number, reason="it failed elsewhere"))

    @property
    def gpu_checks(self) -> list[bool]:
        """Whether each health check after a fault includes the GPUs."""
        calls = self.checkups.begin.call_args_list
        return [call.kwargs["gpus"] for call in calls if call.args == (Occasion.FAULT,)]

    def sent_of(self, kind: type[Any]) -> list[Any]:
        """Return the sent messages of a kind."""
        return [one for one in self.sent if isinstance(one, kind)]

    def close(self) -> None:
        self.mailbox.close()
        self.fork_server.close()

    def _replace_fork_server(self) -> SimulatedForkServer:
        self.fork_server = SimulatedForkServer()
        return self.fork_server
