"""Messages between ranks, their node's agent process and the coordinator; msgpack, never pickle.

* :class:`MonitorTask` begins the duty for a rank.
* Between a rank and its duty: packets. The rank sends :class:`Connect` once, then its reports
  (:data:`~outlast.policy.inprocess_protocol.Report`). It receives :class:`Listening` first, then orders and
  :class:`Coordinators`, so that another agent process can take the place of one that is gone (:class:`Reconnect`).
  Under ``outlast run`` it receives only orders.
* Between a duty and its node's relay (:mod:`outlast.launch.rank_relay`): a Unix socket with :class:`JoinRelay`, then
  reports (and :class:`Gone`) one way and orders the other.
* Between nodes and the coordinator: :mod:`outlast.launch.protocol` under ``outlast run``, else
  :data:`outlast.inprocess.coordinator.OnLink`.

A :class:`MemberRecord` keeps the standing of a member, from which a new coordinator or duty resumes. Nothing here
imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from outlast.decoding import from_msgpack
from outlast.env import clean_name
from outlast.errors import OutlastError
from outlast.policy.inprocess_protocol import (
    Completed,
    Go,
    Left,
    MemberStanding,
    Order,
    RankFault,
    RankReady,
    Report,
    Restart,
    RestartLimits,
)

if TYPE_CHECKING:
    from outlast.config.training import InProcessRestartConfig
    from outlast.env import WorkerEnv


COORDINATION = "in-process restarts"
"""Name of the protocol in the handshakes with the coordinator, and purpose of the derived key."""


class MonitorTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pid: int
    initial_rank: int
    initial_world_size: int
    node: str
    host: str
    """Address of this machine for agent processes of other machines."""
    limits: RestartLimits
    soft_timeout_s: float
    """Seconds without progress of the main thread while the interpreter is free."""
    hard_timeout_s: float
    """Seconds without progress after which the rank is ended."""
    thread_interval_s: float
    """Seconds between two heartbeats of the rank's monitor thread."""
    process_interval_s: float
    """Longest time in seconds between two checks of the agent process."""
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    """Of the connection to the coordinator; agents of ``outlast run`` have their own."""
    termination_grace_s: float
    """Seconds between SIGTERM and SIGKILL for a rank that is ended."""
    relay: str = ""
    """Address of the relay of ``outlast run``'s agent; empty: the agent process has one."""
    cycle: int = 0
    call: int = 0
    """Number of the process's call of a wrapped function, from 0."""
    labels: dict[str, str] = {}
    log_path: str = ""
    """Log file of the agent process; empty: the rank's standard error."""
    pid_path: str = ""
    """File for the process id of the agent process; empty: none."""

    @classmethod
    def of(
        cls,
        config: InProcessRestartConfig,
        place: WorkerEnv,
        *,
        host: str,
        call: int,
        labels: Mapping[str, str],
    ) -> MonitorTask:
        """Return the task for this very process.

        Args:
            config: The settings.
            place: This process's place at its start.
            host: Address of this machine.
            call: Number of the process's call of a wrapped function, from 0.
            labels: Labels of the place of this rank.
        """
        folder = config.monitor_process_logdir
        return cls(
            pid=os.getpid(),
            initial_rank=place.global_rank,
            initial_world_size=place.world_size,
            node=place.node,
            host=host,
            limits=RestartLimits(
                max_iterations=config.max_iterations,
                max_no_progress_restarts=config.max_no_progress_restarts,
                barrier_timeout_s=config.barrier_timeout,
                completion_timeout_s=config.completion_timeout,
                last_call_wait_s=config.last_call_wait,
            ),
            soft_timeout_s=config.soft_timeout,
            hard_timeout_s=config.hard_timeout,
            thread_interval_s=config.monitor_thread_interval,
            process_interval_s=config.monitor_process_interval,
            heartbeat_interval_s=config.heartbeat_interval,
            heartbeat_timeout_s=config.heartbeat_timeout,
            termination_grace_s=config.termination_grace_time,
            relay=place.relay or "",
            cycle=place.cycle,
            call=call,
            labels=dict(labels),
            log_path="" if folder is None else os.path.join(folder, f"inprocess-{clean_name(place.node)}.log"),
            pid_path=(config.monitor_process_pidfile or "").replace("{rank}", str(place.global_rank)),
        )


MAX_PACKET_BYTES = 1 << 20


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The duty runs; its agent process could coordinate."""

    address: str
    offer: str
    """The agent processes derive their key from it; see :func:`outlast.runtime.run_key.make_offer`."""


class Coordinators(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The facts from which another agent process of this node can resume; sent when they change."""

    addresses: tuple[str, ...]
    """Agent processes that may coordinate, each ``host port``; the first one does."""
    ranks: dict[int, int] = {}
    """Initial rank to process id, of the node's ranks in the call."""


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, omit_defaults=True):
    """Join the coordinator: the agent process with the first address."""

    addresses: tuple[str, ...] = ()
    """As in :class:`Coordinators`; empty: the coordinator is that of ``outlast run``."""
    offer: str = ""


class Reconnect(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Join the coordinator in place of an agent process that is gone."""

    connect: Connect
    standing: MemberStanding
    final_report: Left | None = None
    ranks: dict[int, int] = {}
    """As in :class:`Coordinators`."""


class JoinRelay(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    cycle: int
    call: int
    initial_rank: int
    initial_world_size: int
    pid: int
    labels: dict[str, str]
    limits: RestartLimits
    standing: MemberStanding
    ranks: dict[int, int] = {}
    """As in :class:`Coordinators`, where the agent process that had the rank's duty is gone."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The rank's process is gone."""

    fault: RankFault


FromRank = Connect | Reconnect | Report
FromMonitor = Listening | Coordinators | Order
ToRelay = JoinRelay | Gone | Report


def encode(message: FromRank | FromMonitor) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(packet: bytes, kind: Any) -> Any:
    """Return the message of a packet from a rank (:data:`FromRank`) or from its agent process (:data:`FromMonitor`).

    Raises:
        OutlastError: The packet is not such a message.
    """
    try:
        return from_msgpack(packet, kind)
    except msgspec.DecodeError as error:
        raise OutlastError(f"unreadable message between a rank and its agent process: {error}") from error


class MemberRecord:
    """Derive a member's standing from its orders and reports.

    Args:
        standing: The standing before.
    """

    def __init__(self, standing: MemberStanding | None = None) -> None:
        self.standing = MemberStanding() if standing is None else standing

    def reports(self) -> tuple[Report, ...]:
        """Return the reports that may still matter; a coordinator may get one twice."""
        standing = self.standing
        completed = (Completed(restart_count=standing.completed, exit_code=standing.exit_code),)
        ready = () if standing.ready is None else (standing.ready,)
        return (*standing.faults, *(completed if standing.completed >= 0 else ()), *ready)

    def note_order(self, order: Order) -> None:
        match order:
            case Go():
                self.standing = msgspec.structs.replace(
                    self.standing,
                    restart_count=order.restart_count,
                    runs=order.runs,
                    fault_counts=order.fault_counts,
                    ready=None,
                    faults=(),
                )
            case Restart():
                self.standing = msgspec.structs.replace(self.standing, restart=order.restart_count)

    def note_report(self, report: Report) -> None:
        match report:
            case RankReady():
                self.standing = msgspec.structs.replace(self.standing, ready=report)
            case Completed():
                self.standing = msgspec.structs.replace(
                    self.standing, completed=report.restart_count, exit_code=report.exit_code
                )
            case RankFault() if len(self.standing.faults) < 8:
                self.standing = msgspec.structs.replace(self.standing, faults=(*self.standing.faults, report))
            case Left():
                pass  # see Reconnect.final_report
