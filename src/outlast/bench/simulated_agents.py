"""Simulated agents: what an agent of each launcher does to learn its rank, and nothing of its workers.

Ours drive the same link as ``outlast run``, the peer's the same handler as ``torchrun``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from outlast import clock
from outlast.config.flags import LayeredSettings
from outlast.errors import DeadlineExceeded
from outlast.launch import protocol as m
from outlast.launch.coordinator_client import ControlLink, JobInProgress, LinkDown, LinkFailed, LinkUp, News
from outlast.launch.coordinator_server import CoordinatorServer
from outlast.launch.membership import JobSettings
from outlast.launch.torchrun_backend import open_cycle_store
from outlast.runtime.addresses import Endpoint
from outlast.runtime.store import TCPStore

__all__ = ["C10dAgent", "OutlastAgent", "SimulatedAgent"]

_HOST = "127.0.0.1"
_TIMEOUT_S = 240.0
_NPROC = 8


class SimulatedAgent(ABC):
    """One agent that meets the others once.

    The first one made hosts the store, and must be connected before others are made.
    """

    def __init__(self) -> None:
        self.rank = -1
        """Its node rank, once it has one."""
        self.ranked_ns = 0
        """When it had its rank, in monotonic nanoseconds."""
        self._connected, self._ranked = threading.Event(), threading.Event()
        self._error: str | None = None

    def wait_until_connected(self, deadline_s: float) -> None:
        """Return once it could join. Blocks: until the deadline.

        Raises:
            DeadlineExceeded: It could not, or failed.
        """
        self._wait(self._connected, deadline_s, "was not connected")

    @abstractmethod
    def join(self) -> None:
        """Begin to join; returns at once."""

    def wait_until_ranked(self, deadline_s: float) -> None:
        """Return once it has its rank. Blocks: until the deadline.

        Raises:
            DeadlineExceeded: It has none, or failed.
        """
        self._wait(self._ranked, deadline_s, "got no rank")

    @abstractmethod
    def finish(self) -> None:
        """Say that its work is done; returns at once."""

    @abstractmethod
    def close(self, deadline_s: float) -> None:
        """Leave, and free everything."""

    def _wait(self, event: threading.Event, deadline_s: float, what: str) -> None:
        if not event.wait(max(0.0, deadline_s - clock.now_s())) or self._error is not None:
            raise DeadlineExceeded(f"an agent {what}: {self._error or 'no answer in time'}")

    def _take_rank(self, rank: int) -> None:
        self.ranked_ns = clock.now_ns()
        self.rank = rank
        self._ranked.set()

    def _fail(self, error: str) -> None:
        self._error = error
        self._connected.set()
        self._ranked.set()


class OutlastAgent(SimulatedAgent):
    """An agent of ``outlast run``, at its defaults."""

    def __init__(self, number: int, *, num_agents: int, port: int, run_id: str) -> None:
        super().__init__()
        self._over = threading.Event()
        self._cycle = 0
        self._cycle_store: TCPStore | None = None
        settings = JobSettings(job=run_id, num_slots=num_agents, join_timeout_s=_TIMEOUT_S)
        node = f"node-{number}"

        def serve(store: TCPStore, _former: JobInProgress | None) -> CoordinatorServer:
            return CoordinatorServer(
                store,
                settings,
                run_dir=None,
                run_id=run_id,
                node=node,
                layers=LayeredSettings(),
                on_error=lambda error: self._fail(f"the coordinator ended: {error!r}"),
            )

        self._link = ControlLink(
            [Endpoint(_HOST, port)],
            node=node,
            deliver=self._on_news,
            serve=serve,
            beat_interval_s=1.0,
            connect_timeout_s=_TIMEOUT_S,
        )
        self._link.start()

    def join(self) -> None:
        """Begin to join; returns at once."""
        self._link.send(m.JoinRequest(node=self._link.node, epoch=self._link.epoch, addr=_HOST, nproc=_NPROC))

    def finish(self) -> None:
        """Say that its work is done; returns at once."""
        facts = m.CycleFacts(cycle=self._cycle)
        self._link.send(m.Finished(node=self._link.node, epoch=self._link.epoch, facts=facts))

    def close(self, deadline_s: float) -> None:
        """Leave once the job is over for all, and free everything."""
        self._wait(self._over, deadline_s, "did not hear of the job's end")
        self._link.close()
        self._cycle_store = None

    def _on_news(self, news: News) -> None:
        match news:
            case LinkUp():
                self._connected.set()
            case m.Prepare():
                self._cycle_store = store = open_cycle_store(_HOST)
                self._link.send(
                    m.Master(
                        node=self._link.node,
                        epoch=self._link.epoch,
                        cycle=news.cycle,
                        addr=_HOST,
                        port=store.port,
                    )
                )
            case m.Start():
                self._cycle = news.cycle
                self._take_rank(news.node_rank)
            case m.Stop():
                self._over.set()
            case LinkFailed() | LinkDown():
                self._fail(news.error)
            case m.CycleOver():
                self._fail(f"the cycle ended: {news.reason}")
            case m.Wait():
                pass


class C10dAgent(SimulatedAgent):
    """An agent of ``torchrun --rdzv-backend=c10d``, at its defaults."""

    def __init__(self, number: int, *, num_agents: int, port: int, run_id: str) -> None:
        super().__init__()
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"{_HOST}:{port}",
            run_id=run_id,
            min_nodes=num_agents,
            max_nodes=num_agents,
            local_addr=_HOST,
            is_host=str(number == 0),
            join_timeout=str(int(_TIMEOUT_S)),
        )
        self._joining = threading.Event()
        self._handler: RendezvousHandler | None = None
        self._thread = threading.Thread(target=self._run, args=(parameters,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Begin to join; returns at once."""
        self._joining.set()

    def finish(self) -> None:
        """Do nothing: torch's agents leave one by one."""

    def close(self, deadline_s: float) -> None:
        """Leave, and free everything."""
        self._thread.join(max(0.0, deadline_s - clock.now_s()))
        if self._handler is not None:
            self._handler.shutdown()
            self._handler = None

    def _run(self, parameters: RendezvousParameters) -> None:
        try:
            backend, store = create_backend(parameters)
            self._handler = create_handler(store, backend, parameters)
            self._connected.set()
            if self._joining.wait(_TIMEOUT_S):
                self._take_rank(self._handler.next_rendezvous().rank)
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            self._fail(f"{type(error).__name__}: {error}")
