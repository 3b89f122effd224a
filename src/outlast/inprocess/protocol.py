"""Messages between ranks, their monitor processes and the hub; msgpack, never pickle.

* When a guard begins the duty: :class:`MonitorTask`.
* Between a rank and its monitor process: a ``SOCK_SEQPACKET`` pair, one message a packet. The rank sends
  :class:`Connect` once, then what it reports (:data:`~outlast.policy.inprocess_protocol.Report`); it receives
  :class:`Listening` first, then orders, and in between who could host the hub (:class:`HubCandidates`), so that it
  can start another monitor process where its first one is gone (:class:`Reconnect`).
* Under ``outlast run`` the coordinator is the hub: between a monitor process and its agent's relay
  (:mod:`outlast.launch.rank_relay`) a Unix socket, on which a :class:`JoinRelay` comes first, then reports (and
  :class:`Gone`) one way and orders the other.
* Elsewhere between monitor processes and the hub: a :data:`HubChannel`, after the proof of the group's key; a
  :class:`HubLink` is its place in an event loop.

A :class:`MemberRecord` remembers what a member was ordered and reported, so that a new hub or monitor process can
resume from it. Nothing here imports torch.
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
    HubCandidate,
    Left,
    MemberStanding,
    Order,
    RankFault,
    RankReady,
    Report,
    Restart,
    RestartLimits,
)
from outlast.runtime.wire import BufferedChannel, SelectedChannel

if TYPE_CHECKING:
    from outlast.config.training import InProcessRestartConfig
    from outlast.env import WorkerEnv


HUB = "inprocess hub"
"""Names the connections to the hub in their proofs, and what their key is derived for."""


class MonitorTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a monitor duty has to do, as JSON."""

    pid: int
    """The rank's process."""
    initial_rank: int
    initial_world_size: int
    node: str
    host: str
    """Address of this machine at which monitor processes of other machines reach this one."""
    limits: RestartLimits
    soft_timeout_s: float
    """Seconds without progress of the main thread while the interpreter is free."""
    hard_timeout_s: float
    """Seconds without progress after which the rank is ended."""
    thread_interval_s: float
    """Seconds between two beats of the rank's monitor thread."""
    process_interval_s: float
    """Longest time between two looks of the monitor process."""
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    """Of the link to the hub."""
    termination_grace_s: float
    """Seconds between SIGTERM and SIGKILL for a rank that is ended while its main thread still runs."""
    relay: str = ""
    """Address of the agent's relay, over which the coordinator is the hub; empty: one of the monitor processes is."""
    cycle: int = 0
    """The launcher's cycle."""
    call: int = 0
    """Which of the process's calls of a wrapped function it is, from 0."""
    bootstrap_key: str = ""
    """Of the bootstrap by which the ranks learn where the hub is; empty: it has no proxy if the rank dies."""
    labels: dict[str, str] = {}
    """What this rank reports of its place beyond its node, for those who assign ranks."""
    log_path: str = ""
    """File to which the monitor process writes its log; empty: the rank's standard error."""
    pid_path: str = ""
    """File to which it writes its process id; empty: none."""

    @classmethod
    def of(
        cls,
        config: InProcessRestartConfig,
        place: WorkerEnv,
        *,
        host: str,
        call: int,
        bootstrap_key: str,
        labels: Mapping[str, str],
    ) -> MonitorTask:
        """Return what the monitor duty for this very process has to do.

        Args:
            config: The settings.
            place: This process's place at its start.
            host: Address of this machine.
            call: Which of the process's calls of a wrapped function it is, from 0.
            bootstrap_key: Key of the bootstrap; empty: there is none.
            labels: What this rank reports of its place.
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
            bootstrap_key=bootstrap_key,
            labels=dict(labels),
            log_path="" if folder is None else os.path.join(folder, f"inprocess-{clean_name(place.node)}.log"),
            pid_path=(config.monitor_process_pidfile or "").replace("{rank}", str(place.global_rank)),
        )


MAX_PACKET_BYTES = 1 << 20


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The monitor process runs, and could host the hub at this address."""

    address: str
    """``host port``."""


class MemberPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a living member's process is."""

    node: str
    space: str
    """Names the machine and the name space in which ``pid`` means something."""
    pid: int
    address: str
    """``host port`` where its monitor process listens."""
    labels: dict[str, str] = {}
    """What the rank reports of its place beyond its node."""


class HubCandidates(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Who may host the hub, in this order; the first one does. Also the answer to a :class:`JoinHub`."""

    candidates: tuple[HubCandidate, ...]
    version: int = 0
    """Of the members; 0: no one but a candidate gets them, and only after the first :class:`Go`."""
    base: int = 0
    """The version that ``members`` and ``lost`` change; 0: these are all members."""
    members: dict[int, MemberPlace] = {}
    """Living members by initial rank: all, or those whose place is new."""
    lost: tuple[int, ...] = ()
    """Members of the version before that belong to the group no more."""

    def follow(self, known: HubCandidates) -> HubCandidates | None:
        """Return it with all members, from what was known before; ``None``: changes between the two are missing."""
        if self.base == 0:
            return self
        if self.base != known.version:
            return None
        lost = frozenset(self.lost)
        members = {rank: place for rank, place in known.members.items() if rank not in lost}
        return msgspec.structs.replace(self, base=0, lost=(), members={**members, **self.members})


class WantMembers(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A candidate missed a change of the members and needs them all."""


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, omit_defaults=True):
    """Join the hub; the process that gets its own address hosts it."""

    hub: str
    """``host port``."""
    offer: str
    """From which this group of monitor processes derives its key; see :func:`outlast.runtime.run_key.make_offer`."""


class Reconnect(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """JoinHub the hub in place of a monitor process that is gone."""

    offer: str
    known: HubCandidates
    standing: MemberStanding
    final_report: Left | None = None
    """What may not have reached the hub."""


class JoinHub(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """First message on a link: who comes."""

    initial_rank: int
    initial_world_size: int
    place: MemberPlace
    """Of the rank's process."""
    life: str
    """Names the monitor process."""
    wants: str = ""
    """Life of the monitor process that it expects there; empty: any."""
    standing: MemberStanding = MemberStanding()


class NotHub(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The answer of a monitor process that hosts no hub (yet)."""

    life: str
    candidates: tuple[HubCandidate, ...] = ()
    """As far as it knows."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A sign of life."""


class JoinRelay(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """First message to an agent's relay: for which rank a monitor process speaks."""

    cycle: int
    call: int
    initial_rank: int
    initial_world_size: int
    pid: int
    """The rank's process."""
    labels: dict[str, str]
    limits: RestartLimits
    standing: MemberStanding


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The rank's process is gone."""

    fault: RankFault


FromRank = Connect | Reconnect | Report
FromMonitor = Listening | HubCandidates | Order
ToRelay = JoinRelay | Gone | Report
OnLink = JoinHub | NotHub | HubCandidates | WantMembers | Beat | Gone | Report | Order


def encode(message: FromRank | FromMonitor) -> bytes:
    """Return a packet between a rank and its monitor process."""
    return msgspec.msgpack.encode(message)


def decode(packet: bytes, kind: Any) -> Any:
    """Return what a rank (:data:`FromRank`) or a monitor process (:data:`FromMonitor`) sent the other one.

    Raises:
        OutlastError: It is no such message.
    """
    try:
        return from_msgpack(packet, kind)
    except msgspec.DecodeError as error:
        raise OutlastError(f"unreadable message between a rank and its monitor process: {error}") from error


HubChannel = BufferedChannel[OnLink]
"""A connection between a monitor process and the hub."""


HubLink = SelectedChannel[OnLink]
"""A member's or a hub's channel in its process's loop."""


class MemberRecord:
    """Note orders and reports, from which follows where the member stands.

    Args:
        standing: Where it stood before.
    """

    def __init__(self, standing: MemberStanding | None = None) -> None:
        self.standing = MemberStanding() if standing is None else standing

    def reports(self) -> tuple[Report, ...]:
        """Return what the rank reported that may still matter; a hub may get it twice."""
        standing = self.standing
        completed = (Completed(restart_count=standing.completed, exit_code=standing.exit_code),)
        ready = () if standing.ready is None else (standing.ready,)
        return (*standing.faults, *(completed if standing.completed >= 0 else ()), *ready)

    def note_order(self, order: Order) -> None:
        """Note an order that the rank got."""
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
        """Note what the rank reported."""
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
                pass  # its own last words; see Reconnect
