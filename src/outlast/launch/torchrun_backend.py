"""The rendezvous for torch's own agents: ``torchrun --rdzv-backend=outlast``.

Uses the same link as the agent of ``outlast run``, but provides only a rendezvous: new stores and ports per cycle,
spares that do not disturb, linear time. Restarts and budgets are torchrun's.
"""

from __future__ import annotations

import logging
import os
import queue
from datetime import timedelta

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from outlast import clock, env
from outlast.config.sources import LayeredSettings
from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity
from outlast.launch.control_link import ControlLink, LinkDown, LinkEvent, LinkFailed, LinkUp
from outlast.launch.coordinator_client import CoordinatorClient
from outlast.launch.job_settings import JobSettings
from outlast.policy.recovery_policy import Limits
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint, address_for_peers, parse_endpoints
from outlast.runtime.run_key import find_run_key
from outlast.runtime.store import TCPStore, open_cycle_store

log = logging.getLogger(__name__)
_UNLIMITED = 1 << 31


class OutlastRendezvous(RendezvousHandler):
    """Serve torch's elastic agent from the coordinator.

    Args:
        params: torchrun's options. ``--rdzv-conf`` takes ``join_timeout`` (600 s: how long a cycle may wait for nodes),
            ``node_timeout`` (5 s) and ``node_name``.

    Thread: torch's agent thread, except where the link delivers.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._params = params
        self._join_timeout_s = float(params.get("join_timeout", 600))
        node_timeout_s = float(params.get("node_timeout", 5))
        node = params.get("node_name") or f"{env.hostname()}-{os.getpid()}"
        endpoints = parse_endpoints(params.endpoint)
        self._addr = params.local_addr or address_for_peers(endpoints, is_one_machine=params.max_nodes == 1)
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self._waiting = 0
        self._closed = False
        self._cycle: int | None = None
        self._store: TCPStore | None = None
        self._hosted: TCPStore | None = None
        settings = JobSettings(
            job=params.run_id,
            num_slots=params.min_nodes,
            max_nodes=params.max_nodes,
            limits=Limits(
                max_restarts=_UNLIMITED, max_no_progress_cycles=_UNLIMITED, max_node_faults=0, max_restart_delay_s=0.0
            ),
            join_timeout_s=self._join_timeout_s,
            node_timeout_s=node_timeout_s,
            heartbeat_interval_s=node_timeout_s / 5,
            host=node,
        )
        identity = JobIdentity(
            run_id=params.run_id,
            key=find_run_key(params.run_id, None, key_file=params.get("run_key_file"), is_one_machine=False),
        )

        self._link = ControlLink(
            endpoints, settings, identity, deliver=self._events.put, layers=LayeredSettings(), has_loop=False
        )
        self._client = CoordinatorClient(self._link, addr=self._addr, nproc=0, wish=None)
        self._link.start()

    def get_backend(self) -> str:
        return "outlast"

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the cycle's store, which the first node's agent hosts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next cycle.

        Raises:
            RendezvousTimeoutError: It was not complete within ``join_timeout`` (spares keep waiting).
            RendezvousConnectionError: The coordinator is out of reach.
            SystemExit: With 0: the job is over and this node was a spare.
        """
        self._store = self._hosted = None
        ended = None
        if self._cycle is not None:
            incident = None
            if not self._waiting:
                incident = Incident(kind=IncidentKind.WORKER_FAILED, cycle=self._cycle, node=self._link.node)
            ended = m.CycleFacts(cycle=self._cycle, incident=incident)
        self._waiting = 0
        self._client.join(ended)
        deadline_s: float | None = clock.now_s() + self._join_timeout_s
        while True:
            try:
                event = self._events.get(timeout=None if deadline_s is None else max(0.0, deadline_s - clock.now_s()))
            except queue.Empty:
                raise RendezvousTimeoutError(
                    f"no cycle was complete within {self._join_timeout_s:.0f} s (--rdzv-conf join_timeout=...)"
                ) from None
            match event:
                case m.Wait():
                    deadline_s = None  # a spare waits as long as the job lasts
                    if event.place is not None:
                        self._client.wait_as_spare(event.place)
                case m.Prepare():
                    self._hosted = open_cycle_store(self._addr)
                    self._link.send(m.Master(cycle=event.cycle, addr=self._addr, port=self._hosted.port))
                case m.Start():
                    if self._client.take_place(event):
                        return self._enter(event)
                case m.Stop():
                    self._closed = True
                    if event.exit_code == ExitReason.FINISHED:
                        # RendezvousGracefulExitError has this meaning, but torch 2.13's launcher fails on it
                        # (AttributeError: 'NoneType' object has no attribute 'is_failed').
                        log.info("%s; this spare was not needed", event.reason)
                        raise SystemExit(0)
                    raise RendezvousClosedError(event.reason)
                case LinkFailed():
                    raise RendezvousConnectionError(event.error)
                case LinkDown():
                    log.warning("the coordinator is out of reach (%s)", event.error)
                    deadline_s = clock.now_s() + self._join_timeout_s
                case _:
                    self._note(event, is_running=False)

    def _note(self, event: LinkEvent, *, is_running: bool) -> None:
        match event:
            case LinkUp():
                self._client.note_term(event.term)
                if not event.is_first:
                    self._client.register(is_running=is_running, is_joining=not is_running, has_finished=False)
            case m.Ran():
                self._client.note_ran(event)
            case m.Decided():
                self._link.recovery_state = event.recovery_state

    def _enter(self, start: m.Start) -> RendezvousInfo:
        self._cycle = start.cycle
        master = Endpoint(start.master_addr, start.master_port)
        self._store = self._hosted or stores.connect(master, timeout_s=30.0, call_timeout_s=600.0)
        self._store.set_timeout(timedelta(seconds=600))
        self._client.send(m.Running(cycle=start.cycle))
        return RendezvousInfo(
            store=PrefixStore("agents", self._store),
            rank=start.node_rank,
            world_size=start.num_nodes,
            bootstrap_store_info=RendezvousStoreInfo(start.master_addr, start.master_port),
        )

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        """End the job for every node."""
        self._closed = True
        self._link.send(m.Leave(whole_job=True))

    def num_nodes_waiting(self) -> int:
        """Return 1 once the running cycle is over elsewhere, otherwise 0: spares are not a reason to restart."""
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return self._waiting
            if isinstance(event, m.CycleOver) and event.cycle == self._cycle:
                self._waiting = 1
            elif isinstance(event, m.Stop):
                self._closed = True
            elif isinstance(event, LinkDown):
                log.warning("the coordinator is out of reach (%s); training continues", event.error)
            else:
                self._note(event, is_running=True)

    def get_run_id(self) -> str:
        return self._params.run_id

    def shutdown(self) -> bool:
        """Leave the job and close everything; a failed node's slot goes to a spare."""
        if self._cycle is not None and not self._closed:
            self._link.send(m.Finished(facts=m.CycleFacts(cycle=self._cycle)))
        self._link.close()
        self._store = self._hosted = None
        return True
