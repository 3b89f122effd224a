"""The actors of a group: placement, starts, spares, drained nodes. Every wait has a limit.

Each actor has a bundle of resources, which its successor reuses. Ray moves the bundles of a lost node to nodes with
room; actors to be started there wait for it. Checkpoint writers of the nodes: :mod:`outlast.ray.keepers`.

Ray starts nothing on a node that it drains, so spares there get no slot and bundles there stay empty until Ray moves
them after the node has ended. If there are too few spares elsewhere, actors are started in extra bundles.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import ray
from ray._private import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outlast import clock
from outlast.config import RecoveryConfig
from outlast.config.base import nearest
from outlast.errors import ActorFailed, ConfigError, DeadlineExceeded, SparesExhausted
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.ray.keepers import NodeKeepers
from outlast.ray.protocol import ActorIdentity
from outlast.ray.replies import ActorPing, Reply, ReplyFault, await_replies, describe_error, read_reply
from outlast.runtime.journal import Journal

_Key = TypeVar("_Key")
log = logging.getLogger(__name__)
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_MAX_FAILED_STARTS = 3
"""Failed starts in a row after which a bundle stays empty."""
_POLL_S = 0.2
_RESERVE_POLL_S = 0.5
_CHOICE_S = 0.05
_DRAIN_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Actor:
    """An actor that has started and is alive."""

    number: int
    """Number of the actor within its group; never reused."""
    bundle: int
    """Its bundle of resources."""
    handle: Any
    """Ray's handle of the actor's shell."""
    identity: ActorIdentity

    @property
    def node(self) -> str:
        """Ray's node id."""
        return self.identity.node_id

    @property
    def pid(self) -> int:
        return self.identity.pid


class DrainNotices:
    """Tracks the nodes that Ray drains (preempted spot nodes, or nodes drained by an operator).

    Thread: its own queries Ray, which may take long; any thread may read ``nodes``.
    """

    def __init__(self) -> None:
        self.nodes: Mapping[str, float] = {}
        """Ray's node id to the deadline on the monotonic clock; infinite = unknown."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-drain-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent. Blocks: never; a pending query is abandoned."""
        self._closing.set()

    def _run(self) -> None:
        ask = getattr(ray_state.state, "get_draining_nodes", None)
        if ask is None:
            log.warning("this version of Ray does not report which nodes it drains: actors stay there until they die")
            return
        last_found: dict[str, int] = {}
        while not self._closing.wait(_DRAIN_POLL_S):
            try:
                found: dict[str, int] = ask()
            except Exception as error:  # noqa: BLE001 - Ray raises various errors when it is shut down or unreachable
                log.debug("cannot query Ray for the nodes that it drains: %s", error)
                continue
            known = self.nodes
            self.nodes = {
                # Converted once unless Ray changes it: the deadline is wall-clock time, which may be adjusted.
                node: known[node] if last_found.get(node) == epoch_ms else _ends_s(epoch_ms)
                for node, epoch_ms in found.items()
            }
            last_found = found


def _ends_s(epoch_ms: int) -> float:
    """Convert Ray's deadline to the monotonic clock."""
    return clock.now_s() + clock.seconds_until(epoch_ms / 1e3) if epoch_ms else math.inf


def by_deadline(draining: Mapping[str, float]) -> list[str]:
    """Return the draining nodes of one response of Ray, the earliest deadline first."""
    return sorted(draining, key=draining.__getitem__)


def describe_drain(ends_s: float) -> str:
    """Return a line with the seconds until a drained node ends."""
    text = "its node is drained"
    return text if math.isinf(ends_s) else f"{text}, and goes in {max(0.0, ends_s - clock.now_s()):.0f} s"


class GroupClosed(Exception):
    """Raised by waits while the group is being closed."""


@dataclass(slots=True, kw_only=True)
class _Starting:
    number: int
    bundle: int
    handle: Any
    identity: Any
    """Reference to the :class:`~outlast.ray.protocol.ActorIdentity`."""


class Pool:
    """Starts an actor in each bundle, replaces lost spares, and keeps a checkpoint writer on the actors' nodes.

    Args:
        create: Creates an actor with the given options and returns its handle.
        num_actors: Actors including spares.
        resources: Resources of each actor, by Ray's names: ``CPU``, ``GPU``, and custom ones.
        strategy: Placement strategy over nodes, or the caller's placement group, which is not removed at the end.
        config: Limits.
        keepers: Keeps a checkpoint writer on each node; ``None``: no checkpoints are saved.
        journal: Records lost writers and preemption notices.

    Thread: one; ``spares`` and ``closing`` may be used by any.
    """

    def __init__(
        self,
        create: Callable[[dict[str, Any]], Any],
        num_actors: int,
        resources: Mapping[str, float],
        strategy: str | PlacementGroup,
        config: RecoveryConfig,
        *,
        keepers: NodeKeepers | None,
        journal: Journal,
    ) -> None:
        self._create, self._num_bundles, self._config = create, num_actors, config
        self._resources = {name: amount for name, amount in resources.items() if amount}
        self._strategy = strategy
        self._placement: Any = strategy if isinstance(strategy, PlacementGroup) else None
        self.keepers, self._journal = keepers, journal
        self._kept_nodes: set[str] = set()
        self._detections: DrainNotices | None = None
        self._detected: set[str] = set()
        self._extra: dict[int, Any] = {}
        self._num_actors = 0
        self._starting: dict[int, _Starting] = {}
        self._pings: dict[int, ActorPing] = {}
        self._failed_starts: dict[int, int] = {}
        self._num_failed_starts = 0
        self._why_failed: BaseException | None = None
        self._all: dict[int, Any] = {}
        self._polled_s = 0.0
        self.spares: tuple[Actor, ...] = ()
        """Started actors without a slot, oldest first."""
        self.closing = threading.Event()
        """Set to end every wait of the group."""

    def open(self) -> None:
        """Reserve all resources, then begin to start the actors.

        Raises: ConfigError (the strategy is unknown, or the caller's placement group has too few bundles);
        SparesExhausted (the cluster has too few resources; the reservation is released); GroupClosed (the group was
        closed meanwhile). Blocks: up to ``start_timeout``.
        """
        self._detections = DrainNotices()
        self._reserve()
        for bundle in range(self._num_bundles):
            self._start(bundle)

    @property
    def num_starting(self) -> int:
        """Actors being started, some perhaps waiting for resources."""
        return len(self._starting)

    @property
    def draining(self) -> Mapping[str, float]:
        """Node ids that Ray drains to the deadline on the monotonic clock; infinite = unknown."""
        return {} if self._detections is None else self._detections.nodes

    @property
    def usable(self) -> tuple[Actor, ...]:
        """Spares on nodes that are not drained."""
        draining = self.draining
        return tuple(spare for spare in self.spares if spare.node not in draining)

    def ask_for_spares(self, num: int) -> None:
        """Start extra actors until ``num`` usable spares exist or are being started.

        Blocks: never. Extra actors wait for resources, which an autoscaler may add.
        """
        num_starting = sum(one.bundle in self._extra for one in self._starting.values())
        for _ in range(num - len(self.usable) - num_starting):
            bundle = self._num_bundles + len(self._extra)
            self._extra[bundle] = placement_group([dict(self._resources)]) if self._resources else None
            log.info("actor %d is started besides, in place of those on drained nodes", self._num_actors)
            self._start(bundle)

    def due_to_leave(self, members: Mapping[_Key, Actor]) -> dict[_Key, str]:
        """Return the members that must leave their nodes now, with the reason; none while there are too few usable
        spares.

        Spares are requested as soon as a node is drained.
        """
        if not (draining := self.draining):
            return {}
        latest_s = clock.now_s() + self._config.drain_margin
        ends_s = {key: draining[one.node] for key, one in members.items() if one.node in draining}
        self.ask_for_spares(len(ends_s))
        due = {key: describe_drain(end_s) for key, end_s in ends_s.items() if end_s <= latest_s}
        return due if len(due) <= len(self.usable) else {}

    def idle(self) -> None:
        """Poll if due; for use while something else is waited for. Blocks: about a millisecond.

        Raises: GroupClosed (the group is being closed).
        """
        self._check_open()
        if clock.now_s() - self._polled_s >= _POLL_S:
            self.poll()

    def poll(self) -> None:
        """Process starts, lost spares, drained nodes and lost writers. Blocks: about a millisecond."""
        self._polled_s = clock.now_s()
        self._note_starts()
        self._ping_spares()
        self._note_drains()
        if self.keepers is None:
            return
        # The writer starts while the spare waits, so that it is ready when the spare takes a slot.
        if new := {spare.node for spare in self.spares} - self._kept_nodes:
            self.keepers.ensure(new, 0.0)
            self._kept_nodes |= new  # permanently: a spare that was taken is in no incarnation until all have joined
        for node in self.keepers.look():
            summary = "its keeper died; another one takes its place, what the writer held in memory is gone"
            incident = Incident(
                kind=IncidentKind.WRITER_LOST, job=self._journal.job, node=node, evidence={"summary": summary}
            )
            log.warning("%s: %s", self._journal.job, incident.describe())
            self._journal.write(EventKind.INCIDENT, incident=msgspec.to_builtins(incident))

    def wait_for_spares(self, num: int, timeout_s: float) -> bool:
        """Wait for ``num`` usable spares; return whether they exist.

        Returns at once if no more actors are being started. Raises: GroupClosed (the group is being closed). Blocks: up
        to ``timeout_s``.
        """
        deadline_s = clock.now_s() + timeout_s
        while True:
            self._check_open()
            self.poll()
            left_s = deadline_s - clock.now_s()
            if len(self.usable) >= num or not self._starting or left_s <= 0:
                return len(self.usable) >= num
            refs = [one.identity for one in self._starting.values()]
            ray.wait(refs, num_returns=1, timeout=min(left_s, _POLL_S), fetch_local=False)

    def require(self, num: int) -> None:
        """Wait until ``num`` actors have started, for the first formation.

        Raises: ActorFailed (the user's constructor raised; that exception is the cause); DeadlineExceeded (fewer actors
        started in time); GroupClosed (the group is being closed). Blocks: up to ``start_timeout``.
        """
        timeout_s = self._config.start_timeout
        deadline_s = clock.now_s() + timeout_s
        while not self.wait_for_spares(num, min(_POLL_S, deadline_s - clock.now_s())):
            if self._num_failed_starts > 1:  # a single failure may be transient
                raise ActorFailed(
                    f"actors do not start: {describe_error(self._why_failed)}; correct the class's constructor"
                ) from self._why_failed
            if clock.now_s() >= deadline_s:
                raise DeadlineExceeded(
                    f"{len(self.usable)} of {num} actors started within {timeout_s} s; see Ray's logs of the others, "
                    "or raise start_timeout"
                )

    def take(self, numbers: Collection[int]) -> dict[int, Actor]:
        taken = {spare.number: spare for spare in self.spares if spare.number in numbers}
        self.spares = tuple(spare for spare in self.spares if spare.number not in taken)
        for number in taken:
            self._pings.pop(number, None)
        return taken

    def give(self, actors: Iterable[Actor]) -> None:
        self.spares = (*self.spares, *actors)

    def answering(self, num: int, timeout_s: float) -> list[Actor]:
        """Return usable spares that respond now, oldest first.

        Blocks: until ``num`` have responded, at most ``timeout_s``.
        """
        self._note_starts()
        deadline_s = clock.now_s() + timeout_s
        refs = {one.number: one.handle.status.remote() for one in self.usable}
        alive: set[int] = set()
        while refs and len(alive) < num and clock.now_s() < deadline_s:
            # Usually all respond within this time, so that there is a choice.
            ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_CHOICE_S, fetch_local=False)
            for spare in [one for one in self.spares if refs.get(one.number) in ready]:
                reply = read_reply(refs.pop(spare.number))
                if reply.fault is None:
                    alive.add(spare.number)
                elif reply.fault == ReplyFault.DIED:
                    self._lose(spare, reply)
        return [spare for spare in self.spares if spare.number in alive]

    def discard(self, actor: Actor) -> None:
        """Kill an actor and start its successor. Blocks: never."""
        ray.kill(actor.handle, no_restart=True)
        self._all.pop(actor.number, None)
        self._start(actor.bundle)

    def close(self) -> None:
        """End all actors and writers; release their resources.

        Ray ends an actor at once; one whose process is stopped, after 5 seconds. Blocks: until all have ended, at most
        ``close_timeout``.
        """
        if self._detections is not None:
            self._detections.close()
        if self.keepers is not None:
            self.keepers.close()
        handles = list(self._all.values())
        self._all.clear()
        self._starting.clear()
        self._pings.clear()
        self.spares = ()
        for handle in handles:
            ray.kill(handle, no_restart=True)
        refs = {number: handle.status.remote() for number, handle in enumerate(handles)}
        await_replies(refs, self._config.close_timeout)
        self._release()

    def _check_open(self) -> None:
        if self.closing.is_set():
            raise GroupClosed

    # -- placement ---------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        if isinstance(self._strategy, PlacementGroup):
            if len(self._strategy.bundle_specs) < self._num_bundles:
                raise ConfigError(
                    f"placement: the group has {len(self._strategy.bundle_specs)} bundles, but mesh and spares are "
                    f"{self._num_bundles} actors; give each actor one"
                )
        elif self._strategy not in _STRATEGIES:
            raise ConfigError(f"placement={self._strategy!r} is unknown; {nearest(str(self._strategy), _STRATEGIES)}")
        if self._placement is None and self._resources:  # Ray has no empty bundles
            self._placement = placement_group([dict(self._resources)] * self._num_bundles, strategy=self._strategy)
        timeout_s, is_reserved = self._config.start_timeout, self._placement is None
        deadline_s = clock.now_s() + timeout_s
        try:
            while not is_reserved and (left_s := deadline_s - clock.now_s()) > 0:
                self._check_open()
                is_reserved = self._placement.wait(min(_RESERVE_POLL_S, left_s))
        finally:
            if not is_reserved:
                self._release()
        if not is_reserved:
            raise SparesExhausted(
                f"the cluster has no room for {self._num_bundles} actors with {self._resources} each, not within "
                f"{timeout_s:g} s; it has {ray.cluster_resources()}: use fewer actors or spares, or smaller ones"
            )

    def _release(self) -> None:
        placement, self._placement = self._placement, None
        own = [placement] if placement is not self._strategy else []
        for one in [*own, *self._extra.values()]:
            if one is not None:
                with contextlib.suppress(ValueError):  # already removed elsewhere
                    remove_placement_group(one)
        self._extra.clear()

    def _start(self, bundle: int) -> None:
        custom = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU")}
        options: dict[str, Any] = {
            "num_cpus": self._resources.get("CPU", 0),
            "num_gpus": self._resources.get("GPU", 0),
            "resources": custom,
        }
        is_extra = bundle in self._extra
        if (placement := self._extra[bundle] if is_extra else self._placement) is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement, placement_group_bundle_index=0 if is_extra else bundle
            )
        number, self._num_actors = self._num_actors, self._num_actors + 1
        handle = self._all[number] = self._create(options)
        identity = handle.identity.remote()
        self._starting[number] = _Starting(number=number, bundle=bundle, handle=handle, identity=identity)

    # -- starts and spares -------------------------------------------------------------------------------------

    def _note_starts(self) -> None:
        refs = [one.identity for one in self._starting.values()]
        if not refs:
            return
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        for one in [one for one in self._starting.values() if one.identity in ready]:
            del self._starting[one.number]
            reply = read_reply(one.identity)
            if reply.fault is None:
                self._failed_starts.pop(one.bundle, None)
                actor = Actor(number=one.number, bundle=one.bundle, handle=one.handle, identity=reply.value)
                self.spares = (*self.spares, actor)
                log.info("actor %d started: pid %d on node %s", actor.number, actor.pid, actor.identity.node)
                continue
            self._all.pop(one.number, None)
            ray.kill(one.handle, no_restart=True)
            failures = self._failed_starts[one.bundle] = self._failed_starts.get(one.bundle, 0) + 1
            self._num_failed_starts += 1
            self._why_failed = reply.error
            text = describe_error(reply.error)
            if failures < _MAX_FAILED_STARTS:
                log.warning("actor %d did not start (%s); a new one is started in its place", one.number, text)
                self._start(one.bundle)
            else:
                log.error(
                    "actor %d did not start (%s), failures=%d in a row there; nothing more is started in its place",
                    one.number,
                    text,
                    failures,
                )

    def _note_drains(self) -> None:
        """Log and record newly drained nodes."""
        for node, ends_s in self.draining.items():
            if node not in self._detected:
                self._detected.add(node)
                reason = f"Ray drains node {node[:8]}"
                log.warning("%s: %s; of an actor there: %s", self._journal.job, reason, describe_drain(ends_s))
                facts: dict[str, Any] = {"source": "ray", "reason": reason, "ray_node": node}
                facts |= {} if math.isinf(ends_s) else {"deadline_s": round(ends_s - clock.now_s(), 3)}
                self._journal.write(EventKind.NOTICE, **facts)

    def _ping_spares(self) -> None:
        for spare in self.spares:
            ping = self._pings.setdefault(spare.number, ActorPing())
            reply = ping.poll(spare.handle.status, self._config.ping_timeout)
            if reply is not None and reply.fault is None:
                ping.note_answer(ping.asked_s + self._config.ping_interval)
            elif reply is not None:
                self._lose(spare, reply)

    def _lose(self, spare: Actor, reply: Reply) -> None:
        log.warning(
            "spare %d (pid %d, node %s) is lost (%s); a new one is started in its place",
            spare.number,
            spare.pid,
            spare.identity.node,
            describe_error(reply.error),
        )
        self.take([spare.number])
        self.discard(spare)
