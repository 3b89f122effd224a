"""The actors of a group: their placement, those that start, those that wait as spares, and the end of all of them.

Each actor has a bundle of resources, which a successor takes over.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outlast import clock
from outlast.config.base import nearest
from outlast.errors import ActorFailed, ConfigError, DeadlineExceeded, SparesExhausted
from outlast.ray.watch import Actor, Reply, ReplyFault, await_replies, describe_error, read_reply

__all__ = ["STRATEGIES", "Placement", "Pool"]


_RESERVE_LOOK_S = 0.5
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class Placement:
    """Reserve a bundle for each actor, spares included; release all of them.

    When a node is lost, Ray moves its bundles to others that have room, and what is to be started there waits for it.

    Args:
        num_actors: Bundles.
        num_cpus: CPUs of each.
        num_gpus: GPUs of each.
        resources: Custom resources of each.
        strategy: How bundles are spread over nodes, one of ``STRATEGIES``; or a placement group of the caller's own
            with bundles enough, which is not removed in the end.

    Raises:
        ConfigError: There is no such strategy, or the caller's group has too few bundles.

    Thread: one.
    """

    def __init__(
        self,
        num_actors: int,
        *,
        num_cpus: float,
        num_gpus: float,
        resources: Mapping[str, float],
        strategy: str | PlacementGroup,
    ) -> None:
        bundle = {"CPU": num_cpus, "GPU": num_gpus, **resources}
        self._bundle = {name: amount for name, amount in bundle.items() if amount}
        self._num_actors = num_actors
        self._owned = not isinstance(strategy, PlacementGroup)
        self._group: Any = None
        if isinstance(strategy, PlacementGroup):
            if len(strategy.bundle_specs) < num_actors:
                raise ConfigError(
                    f"placement: the group has {len(strategy.bundle_specs)} bundles, but mesh and spares are "
                    f"{num_actors} actors; give each actor one"
                )
            self._group = strategy
        else:
            if strategy not in STRATEGIES:
                raise ConfigError(f"placement={strategy!r} is unknown; {nearest(str(strategy), STRATEGIES)}")
            if self._bundle:  # actors that need nothing can be placed anywhere, and Ray has no empty bundles
                self._group = placement_group([dict(self._bundle)] * num_actors, strategy=strategy)

    def wait(self, timeout_s: float, idle: Callable[[], None]) -> None:
        """Wait until everything is reserved.

        Args:
            timeout_s: Longest wait in seconds.
            idle: Called while it waits; may raise to end the wait, and everything is released.

        Raises:
            SparesExhausted: The cluster has not enough resources; what was reserved is released.

        Blocks: up to ``timeout_s``.
        """
        if self._group is None:
            return
        deadline_s = clock.now_s() + timeout_s
        is_reserved = False
        try:
            while not is_reserved and (left_s := deadline_s - clock.now_s()) > 0:
                idle()
                is_reserved = self._group.wait(min(_RESERVE_LOOK_S, left_s))
        finally:
            if not is_reserved:
                self.close()
        if not is_reserved:
            raise SparesExhausted(
                f"the cluster has no room for {self._num_actors} actors with {self._bundle} each, not within "
                f"{timeout_s:g} s; it has {ray.cluster_resources()}: use fewer actors or spares, or smaller ones"
            )

    def options(self, bundle: int) -> dict[str, Any]:
        """Return the options with which an actor is created in a bundle."""
        options: dict[str, Any] = {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "resources": {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")},
        }
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        return options

    def close(self) -> None:
        """Release everything. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._owned:
            with contextlib.suppress(ValueError):  # removed by somebody else
                remove_placement_group(group)


log = logging.getLogger(__name__)
_MAX_FAILED_STARTS = 3
"""In a row in one bundle; then the bundle stays empty."""
_LOOK_S = 0.2
_CHOICE_S = 0.05


@dataclass(slots=True, kw_only=True)
class _Starting:
    number: int
    bundle: int
    handle: Any
    hello: Any


@dataclass(slots=True, kw_only=True)
class _SparePing:
    ref: Any
    sent_s: float


class Pool:
    """Start an actor in each bundle, and another one where one was lost.

    Args:
        placement: The bundles; closed with the pool.
        num_bundles: Their number.
        create: Makes an actor with the options that it is given, and returns its handle.
        start_timeout_s: Seconds that an actor with its resources may take to answer for the first time.
        ping_interval_s: Seconds between two looks at a spare.
        ping_timeout_s: Seconds without an answer after which a spare is lost.

    Thread: one; ``spares`` may be read by any.
    """

    def __init__(
        self,
        placement: Placement,
        num_bundles: int,
        create: Callable[[dict[str, Any]], Any],
        *,
        start_timeout_s: float,
        ping_interval_s: float,
        ping_timeout_s: float,
    ) -> None:
        self._placement = placement
        self._create = create
        self._start_timeout_s = start_timeout_s
        self._ping_interval_s, self._ping_timeout_s = ping_interval_s, ping_timeout_s
        self._num_actors = 0
        self._starting: dict[int, _Starting] = {}
        self._pings: dict[int, _SparePing] = {}
        self._failed_starts: dict[int, int] = {}
        self._num_failed_starts = 0
        self._why_failed: BaseException | None = None
        self._all: dict[int, Any] = {}
        self.spares: tuple[Actor, ...] = ()
        """Actors that have started and have no seat, oldest first."""
        for bundle in range(num_bundles):
            self._start(bundle)

    @property
    def num_starting(self) -> int:
        """Actors that are on their way, some perhaps for want of resources."""
        return len(self._starting)

    def wait_for_spares(self, num: int, timeout_s: float, idle: Callable[[], None] = lambda: None) -> bool:
        """Wait until so many spares are there; return whether they are.

        Returns at once where no more are on their way.

        Args:
            num: How many.
            timeout_s: Longest wait in seconds.
            idle: Called while it waits; may raise to end the wait.

        Blocks: up to ``timeout_s``.
        """
        deadline_s = clock.now_s() + timeout_s
        while True:
            idle()
            self.poll()
            left_s = deadline_s - clock.now_s()
            if len(self.spares) >= num or not self._starting or left_s <= 0:
                return len(self.spares) >= num
            hellos = [one.hello for one in self._starting.values()]
            ray.wait(hellos, num_returns=1, timeout=min(left_s, _LOOK_S), fetch_local=False)

    def require(self, num: int, timeout_s: float, idle: Callable[[], None] = lambda: None) -> None:
        """Wait until so many actors have started, for the first formation.

        Raises:
            ActorFailed: The user's constructor raised; that is the cause.
            DeadlineExceeded: Not so many were there in time.

        Blocks: up to ``timeout_s``.
        """
        deadline_s = clock.now_s() + timeout_s
        while not self.wait_for_spares(num, min(_LOOK_S, deadline_s - clock.now_s()), idle):
            if self._num_failed_starts > 1:  # one may have been an accident
                raise ActorFailed(
                    f"actors do not start: {describe_error(self._why_failed)}; correct the class's constructor"
                ) from self._why_failed
            if clock.now_s() >= deadline_s:
                raise DeadlineExceeded(
                    f"{len(self.spares)} of {num} actors started within {timeout_s} s; see Ray's logs of the others, "
                    "or raise start_timeout"
                )

    def poll(self) -> None:
        """See who has started and which spare is lost; replace those. Blocks: a millisecond or so."""
        self._welcome()
        self._ping_spares()

    def take(self, numbers: Collection[int]) -> dict[int, Actor]:
        """Take spares out of the pool, by their numbers."""
        taken = {spare.number: spare for spare in self.spares if spare.number in numbers}
        self.spares = tuple(spare for spare in self.spares if spare.number not in taken)
        for number in taken:
            self._pings.pop(number, None)
        return taken

    def give(self, actors: Iterable[Actor]) -> None:
        """Let actors that have no seat any more wait as spares."""
        self.spares = (*self.spares, *actors)

    def answering(self, num: int, timeout_s: float) -> list[Actor]:
        """Return spares that answer now, oldest first.

        Args:
            num: How many are needed; once so many have answered the others are not waited for.
            timeout_s: Longest wait in seconds.

        Blocks: until so many have answered, at most ``timeout_s``.
        """
        self._welcome()
        deadline_s = clock.now_s() + timeout_s
        refs = {one.number: one.handle.pulse.remote() for one in self.spares}
        alive: set[int] = set()
        while refs and len(alive) < num and clock.now_s() < deadline_s:
            # All of them usually answer within this, so that there is a choice.
            ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_CHOICE_S, fetch_local=False)
            for spare in [one for one in self.spares if refs.get(one.number) in ready]:
                answer = read_reply(refs.pop(spare.number))
                if answer.fault is None:
                    alive.add(spare.number)
                elif answer.fault == ReplyFault.DIED:
                    self._lose(spare, answer)
        return [spare for spare in self.spares if spare.number in alive]

    def discard(self, actor: Actor) -> None:
        """End an actor, whatever it does, and start another one in its place. Blocks: never."""
        self._kill(actor.handle)
        self._all.pop(actor.number, None)
        self._start(actor.bundle)

    def close(self, timeout_s: float) -> None:
        """End all actors, those that are starting, too, and release their resources.

        Ray ends an actor at once, one whose process is stopped after 5 seconds.

        Blocks: until all are gone, at most ``timeout_s``.
        """
        handles = list(self._all.values())
        self._all.clear()
        self._starting.clear()
        self._pings.clear()
        self.spares = ()
        for handle in handles:
            self._kill(handle)
        await_replies({number: handle.pulse.remote() for number, handle in enumerate(handles)}, timeout_s)
        self._placement.close()

    def _start(self, bundle: int) -> None:
        number, self._num_actors = self._num_actors, self._num_actors + 1
        handle = self._create(self._placement.options(bundle))
        self._all[number] = handle
        self._starting[number] = _Starting(number=number, bundle=bundle, handle=handle, hello=handle.hello.remote())

    def _welcome(self) -> None:
        hellos = [one.hello for one in self._starting.values()]
        if not hellos:
            return
        ready, _ = ray.wait(hellos, num_returns=len(hellos), timeout=0, fetch_local=False)
        for one in [one for one in self._starting.values() if one.hello in ready]:
            del self._starting[one.number]
            answer = read_reply(one.hello)
            if answer.fault is None:
                self._failed_starts.pop(one.bundle, None)
                actor = Actor(number=one.number, bundle=one.bundle, handle=one.handle, hello=answer.value)
                self.spares = (*self.spares, actor)
                log.info("actor %d started: pid %d on node %s", actor.number, actor.pid, actor.hello.node)
                continue
            self._all.pop(one.number, None)
            self._kill(one.handle)
            self._note_failed_start(one, answer)

    def _note_failed_start(self, one: _Starting, answer: Reply) -> None:
        failures = self._failed_starts[one.bundle] = self._failed_starts.get(one.bundle, 0) + 1
        self._num_failed_starts += 1
        self._why_failed = answer.error
        text = describe_error(answer.error)
        if failures < _MAX_FAILED_STARTS:
            log.warning("actor %d did not start (%s); a new one is started in its place", one.number, text)
            self._start(one.bundle)
        else:
            log.error(
                "actor %d did not start (%s), the %dth in a row there; nothing more is started in its place",
                one.number,
                text,
                failures,
            )

    def _ping_spares(self) -> None:
        now_s = clock.now_s()
        for spare in self.spares:
            ping = self._pings.get(spare.number)
            if ping is None:
                self._pings[spare.number] = _SparePing(ref=spare.handle.pulse.remote(), sent_s=now_s)
                continue
            if ping.ref is None:
                if now_s - ping.sent_s >= self._ping_interval_s:
                    self._pings[spare.number] = _SparePing(ref=spare.handle.pulse.remote(), sent_s=now_s)
                continue
            ready, _ = ray.wait([ping.ref], timeout=0, fetch_local=False)
            answer = read_reply(ping.ref) if ready else None
            if answer is not None and answer.fault is None:
                ping.ref = None
            elif answer is not None and answer.fault == ReplyFault.DIED:
                self._lose(spare, answer)
            elif now_s - ping.sent_s >= self._ping_timeout_s:
                self._lose(spare, answer or Reply(fault=ReplyFault.LATE))

    def _lose(self, spare: Actor, answer: Reply) -> None:
        log.warning(
            "spare %d (pid %d, node %s) is lost (%s); a new one is started in its place",
            spare.number,
            spare.pid,
            spare.hello.node,
            describe_error(answer.error),
        )
        self.take([spare.number])
        self.discard(spare)

    def _kill(self, handle: Any) -> None:
        ray.kill(handle, no_restart=True)
