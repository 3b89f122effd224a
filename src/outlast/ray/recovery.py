"""Forms the group again after actors were lost, with a limit for each phase; reports and records the recovery."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec
from ray import cloudpickle

from outlast import clock
from outlast.config import RecoveryConfig
from outlast.errors import ActorFailed, SparesExhausted
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.actor_recovery import ActorFacts, Formation, ends_call, fill_slots, shrink_slots
from outlast.ray.pool import Actor, Pool
from outlast.ray.protocol import Aborted, ActorAssignment, FailureKind, Joined, Mesh, shrunk, timed
from outlast.ray.replies import ReplyFault, await_replies, describe_error
from outlast.ray.watch import Gathered, LossKind, LostActor, Watch, lose
from outlast.runtime.journal import Journal
from outlast.wording import count

log = logging.getLogger(__name__)
_AGAIN_S = 0.1


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one recovery did."""

    incarnation: int
    """The new incarnation."""
    method: str
    """The interrupted call; empty: none."""
    lost: tuple[LostActor, ...]
    """Lost actors, including failures during the recovery; actors that only raised were kept."""
    kept: dict[int, int]
    """Rank to process id of the actors that continued in their processes."""
    replaced: dict[int, int]
    """Rank to process id of the replacements."""
    loaded: tuple[int, ...]
    """Ranks that loaded their state; the others kept it."""
    checkpoint: int | None
    """Iteration of the loaded checkpoint; ``None``: no rank loaded."""
    begun_at: int | None
    """Iteration at which the interrupted call began; ``None``: the actors keep no state."""
    iteration: int | None
    """Iteration of the group after the recovery."""
    mesh_before: dict[str, int]
    mesh_after: dict[str, int]
    rounds: int
    """Attempts; more than one if something failed during the recovery."""
    phases_s: dict[str, float]
    """Seconds by phase: ``detect`` (from the last heartbeat to the detection, where known), ``abort``, ``fill``,
    ``store``, ``join`` (includes ``connect`` and ``load``, as measured by the slowest actor).
    """
    total_s: float
    """Seconds from the detection to the new incarnation."""
    repeated: bool
    """Whether the interrupted call is repeated; otherwise the iteration changed, or there was no call."""

    def describe(self) -> str:
        """Return one line for people."""
        who = "; ".join(
            f"rank {one.rank} (pid {one.pid}, node {one.node[:8]}) {one.kind}: {one.evidence}" for one in self.lost
        )
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        kept = ", ".join(map(str, sorted(self.kept))) or "none"
        replaced = ", ".join(f"{rank} (pid {pid})" for rank, pid in sorted(self.replaced.items())) or "none"
        loaded = "nothing was loaded"
        if self.loaded:
            loaded = f"rank{'s' * (len(self.loaded) > 1)} {', '.join(map(str, self.loaded))} loaded"
        return (
            f"{who or 'no rank was lost'} -> ranks kept: {kept}; replaced: {replaced}; {loaded}; "
            f"iteration {self.iteration}; {self.total_s:.3f} s ({phases})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """The actors that work together, from one formation to the next."""

    number: int
    mesh: Mesh
    members: Mapping[int, Actor]
    """Rank to actor."""
    iteration: int | None = None
    """Iteration of the actors between two calls; ``None``: they keep no state."""


@dataclass(slots=True, kw_only=True)
class Progress:
    method: str
    first: Incarnation
    """The failed incarnation, as it was when the call began."""
    lost: list[LostActor] = field(default_factory=list)
    untrusted: set[int] = field(default_factory=set)
    """Numbers of actors that must not keep their state."""
    phases_s: dict[str, float] = field(default_factory=dict)
    begun_s: float = field(default_factory=clock.now_s)
    num_rounds: int = 0


class Recovery:
    """Forms the first incarnation and recovers failed ones. Thread: one."""

    def __init__(self, config: RecoveryConfig, pool: Pool, watch: Watch) -> None:
        self._config, self._pool, self._watch = config, pool, watch
        self._number = -1

    def form(self, mesh: Mesh) -> Incarnation:
        """Form the first incarnation of the started actors, ordered by node and device.

        Raises: ActorFailed (the user's ``setup`` raises, or actors are lost repeatedly); SparesExhausted (actors were
        lost, and no spare can take their slots). Blocks: up to ``join_timeout``, and longer if actors are lost
        meanwhile.
        """
        spares = sorted(self._pool.usable, key=lambda one: one.number)[: mesh.size]
        nodes = list(dict.fromkeys(one.node for one in spares))
        ordered = sorted(spares, key=lambda one: (nodes.index(one.node), one.identity.device, one.number))
        self._pool.take([one.number for one in ordered])
        first = self._next(mesh, dict(enumerate(ordered)))
        progress = Progress(method="", first=first)
        gathered = self.join_members(first, {}, progress)
        return _started(first, gathered) if gathered.is_whole else self.recover_in_rounds(first, gathered, progress)[0]

    def recover(self, failed: Incarnation, gathered: Gathered, *, method: str) -> tuple[Incarnation, RecoveryReport]:
        """Form the next incarnation.

        Raises: SparesExhausted (no spare can take an empty slot); ActorFailed (``max_rounds`` attempts failed). Blocks:
        up to the limits of the phases; a second or less with an available spare.
        """
        return self.recover_in_rounds(failed, gathered, Progress(method=method, first=failed))

    def recover_in_rounds(
        self, current: Incarnation, gathered: Gathered, progress: Progress
    ) -> tuple[Incarnation, RecoveryReport]:
        while progress.num_rounds < self._config.max_rounds:
            progress.num_rounds += 1
            self._pool.idle()
            with timed(progress.phases_s, "abort"):
                for rank in gathered.lost:
                    self._pool.discard(current.members[rank])
                exact = self.abort_members(current, gathered)
                survivors = self._note_losses(current, exact, gathered, progress)
            with timed(progress.phases_s, "fill"):
                mesh, formation = self._fill(current, survivors)
                current = self._next(mesh, self._assign_slots(current, formation))
            has = {slot.rank: slot.has for slot in formation.slots}
            gathered = self.join_members(current, has, progress)
            if gathered.is_whole:
                started = _started(current, gathered)
                return started, self._report(started, gathered.values, progress)
        texts = "; ".join(one.evidence for one in progress.lost[-4:])
        raise ActorFailed(
            f"{progress.num_rounds} attempts to form the group again failed (max_rounds={self._config.max_rounds}): "
            f"{texts}; see the actors' logs"
        ) from cause_of(gathered)

    def abort_members(self, current: Incarnation, gathered: Gathered) -> dict[int, int | None]:
        """Abort the call on all living actors; return rank to iteration, and record those that stay in the call."""
        limit_s = self._config.abort_timeout
        deadline_s = clock.now_s() + limit_s
        left = {rank: actor for rank, actor in current.members.items() if rank not in gathered.lost}
        exact: dict[int, int | None] = {}
        while left:
            wait_s = max(0.05, deadline_s - clock.now_s())
            refs = {rank: one.handle.abort.remote(current.number, wait_s) for rank, one in left.items()}
            # An actor itself reports a call that does not end; the margin is for that reply.
            replies = await_replies(refs, wait_s + self._config.examine_timeout)
            is_over = clock.now_s() >= deadline_s
            for rank, reply in replies.items():
                actor, aborted = left[rank], reply.value
                if isinstance(aborted, Aborted) and aborted.call_ended:
                    exact[rank] = aborted.iteration
                elif isinstance(aborted, Aborted):
                    where = f" ({aborted.waited_for})" if aborted.waited_for else ""
                    text = f"it did not leave the interrupted call within {limit_s:g} s{where}"
                    gathered.lost[rank] = lose(rank, actor, LossKind.STUCK, text)
                elif reply.fault == ReplyFault.DIED:
                    gathered.lost[rank] = lose(rank, actor, LossKind.DIED, describe_error(reply.error))
                elif reply.fault == ReplyFault.RAISED:
                    text = f"aborting raised {describe_error(reply.error)}"
                    gathered.lost[rank] = lose(rank, actor, LossKind.STUCK, text)
                elif is_over:
                    text = f"no response within {limit_s:g} s to the request to leave the call"
                    gathered.lost[rank] = lose(rank, actor, LossKind.SILENT, text)
                else:
                    continue  # unreachable, or the reply was lost: try again
                del left[rank]
                if rank in gathered.lost:
                    self._pool.discard(actor)
            if left:
                time.sleep(_AGAIN_S)
                self._pool.idle()
        return exact

    def _note_losses(
        self, current: Incarnation, exact: Mapping[int, int | None], gathered: Gathered, progress: Progress
    ) -> dict[int, ActorFacts]:
        """Add the losses to the report; return the survivors with the iteration of the state that each may keep.

        An actor whose own code raised does not keep its state if it can load.
        """
        progress.lost.extend(gathered.lost[rank] for rank in sorted(gathered.lost))
        raised = [rank for rank, failed in gathered.failed.items() if failed.kind == FailureKind.RAISED]
        for rank in raised:
            if rank not in gathered.lost:
                summary = gathered.failed[rank].summary
                progress.lost.append(lose(rank, current.members[rank], LossKind.RAISED, summary))
        times = [one.detected_after_s for one in gathered.lost.values() if one.detected_after_s is not None]
        if times and progress.num_rounds == 1:
            progress.phases_s["detect"] = max(times)
        if self._pool.keepers is not None:
            progress.untrusted.update(current.members[rank].number for rank in raised)
        return {
            rank: _facts(current.members[rank], None if current.members[rank].number in progress.untrusted else kept)
            for rank, kept in exact.items()
        }

    def _fill(self, current: Incarnation, survivors: Mapping[int, ActorFacts]) -> tuple[Mesh, Formation]:
        before = {rank: actor.node for rank, actor in current.members.items()}
        num_missing = len(before) - len(survivors)
        spares = self._spares(num_missing)
        formation = fill_slots(before, survivors, spares)
        if isinstance(formation, Formation):
            return current.mesh, formation
        smaller = shrunk(current.mesh, len(survivors) + len(spares)) if self._config.allow_shrink else None
        if smaller is not None:
            log.warning("no spare is left for ranks %s; continuing as %s", list(formation.ranks), smaller)
            shrunken = shrink_slots(smaller.size, survivors, spares)
            assert isinstance(shrunken, Formation)
            return smaller, shrunken
        if self._pool.draining:
            self._pool.ask_for_spares(num_missing)
        wait_s = self._config.spare_wait
        starting = count(self._pool.num_starting, "actor")
        log.warning("no spare is left; waiting up to %g s for %s to start", wait_s, starting)
        deadline_s = clock.now_s() + wait_s
        while clock.now_s() < deadline_s and (self._pool.num_starting or self._pool.usable):
            self._pool.idle()
            if self._pool.wait_for_spares(num_missing, min(_AGAIN_S * 5, deadline_s - clock.now_s())):
                formation = fill_slots(before, survivors, self._spares(num_missing))
                if isinstance(formation, Formation):
                    return current.mesh, formation
            elif not self._pool.num_starting:
                time.sleep(_AGAIN_S)  # until an unresponsive spare is replaced
        raise SparesExhausted(
            f"no actor is left for ranks {list(formation.ranks)}, and none started within {wait_s:g} s; give the group "
            "more spares (num_spares), room in the cluster for new actors, or let it shrink (allow_shrink)",
            rank=formation.ranks[0],
        )

    def _spares(self, num: int) -> list[ActorFacts]:
        return [_facts(one) for one in self._pool.answering(num, self._config.ping_timeout)] if num else []

    def _assign_slots(self, current: Incarnation, formation: Formation) -> dict[int, Actor]:
        """Return rank to actor; actors without a slot become spares."""
        present = {actor.number: actor for actor in current.members.values()}
        present |= self._pool.take({slot.actor for slot in formation.slots} - present.keys())
        self._pool.give(present[number] for number in formation.dismissed)
        return {slot.rank: present[slot.actor] for slot in formation.slots}

    def _next(self, mesh: Mesh, members: Mapping[int, Actor]) -> Incarnation:
        self._number += 1
        return Incarnation(number=self._number, mesh=mesh, members=members)

    def join_members(self, new: Incarnation, has: Mapping[int, int | None], progress: Progress) -> Gathered:
        host = new.members[0]
        with timed(progress.phases_s, "store"):
            reply = await_replies({0: host.handle.host_store.remote()}, self._config.store_timeout)[0]
        if reply.fault is not None:
            kind = LossKind.DIED if reply.fault == ReplyFault.DIED else LossKind.STUCK
            text = f"it could not open the store of the incarnation: {describe_error(reply.error)}"
            return Gathered(lost={0: lose(0, host, kind, text)})
        with timed(progress.phases_s, "join"):
            assignments = self._assign(new, has, *reply.value)
            refs = {rank: actor.handle.join.remote(assignments[rank]) for rank, actor in new.members.items()}
            return self._watch.gather(new.members, refs, timeout_s=self._config.join_timeout)

    def _assign(
        self, new: Incarnation, has: Mapping[int, int | None], addr: str, port: int
    ) -> dict[int, ActorAssignment]:
        nodes: dict[str, list[int]] = {}
        for rank in sorted(new.members):
            nodes.setdefault(new.members[rank].node, []).append(rank)
        node_ranks = list(nodes)
        keepers = self._pool.keepers
        writers = {} if keepers is None else keepers.ensure(nodes, self._config.store_timeout)
        return {
            rank: ActorAssignment(
                incarnation=new.number,
                rank=rank,
                mesh=new.mesh,
                local_rank=nodes[actor.node].index(rank),
                local_world_size=len(nodes[actor.node]),
                node_rank=node_ranks.index(actor.node),
                store_addr=addr,
                store_port=port,
                timeout_s=self._config.collective_timeout,
                has=has.get(rank),
                writer=writers.get(actor.node),
            )
            for rank, actor in new.members.items()
        }

    def _report(self, new: Incarnation, joined: Mapping[int, Joined], progress: Progress) -> RecoveryReport:
        before = {actor.number for actor in progress.first.members.values()}
        for phase in sorted({name for one in joined.values() for name in one.phases}):
            progress.phases_s[phase] = max(one.phases.get(phase, 0.0) for one in joined.values())
        loaded = tuple(sorted(rank for rank, one in joined.items() if one.loaded))
        return RecoveryReport(
            incarnation=new.number,
            method=progress.method,
            lost=tuple(progress.lost),
            kept={rank: actor.pid for rank, actor in new.members.items() if actor.number in before},
            replaced={rank: actor.pid for rank, actor in new.members.items() if actor.number not in before},
            loaded=loaded,
            checkpoint=next((joined[rank].checkpoint for rank in loaded), None),
            begun_at=progress.first.iteration,
            iteration=new.iteration,
            mesh_before=progress.first.mesh.by_axis,
            mesh_after=new.mesh.by_axis,
            rounds=progress.num_rounds,
            phases_s={name: round(seconds, 4) for name, seconds in progress.phases_s.items()},
            total_s=round(clock.now_s() - progress.begun_s, 4),
            repeated=bool(progress.method) and not ends_call(progress.first.iteration, [new.iteration]),
        )


def journal_recovery(report: RecoveryReport, journal: Journal) -> None:
    """Log a recovery; write an incident for each loss, and the report, to the group's journal."""
    log.warning("incarnation %d of %s: %s", report.incarnation, journal.job, report.describe())
    for lost in report.lost:
        if lost.kind == LossKind.DRAINED:
            continue  # recorded with the preemption notice
        has_ended = lost.kind in (LossKind.DIED, LossKind.RAISED)
        incident = Incident(
            kind=IncidentKind.WORKER_FAILED if has_ended else IncidentKind.WORKER_HUNG,
            job=journal.job,
            cycle=report.incarnation - 1,
            node=lost.node,
            rank=lost.rank,
            pid=lost.pid,
            iteration=report.begun_at,
            detected_after_s=lost.detected_after_s,
            evidence={"summary": lost.evidence},
        )
        journal.write(EventKind.INCIDENT, incident=msgspec.to_builtins(incident))
    journal.write(
        EventKind.ACTORS_RECOVERED,
        cycle=report.incarnation,
        iteration=report.iteration,
        report=msgspec.to_builtins(report, str_keys=True),
    )


def cause_of(gathered: Gathered) -> BaseException | None:
    """Return the user's exception that made a call fail; ``None`` if there is none."""
    for failed in sorted(gathered.failed.values(), key=lambda one: one.kind != FailureKind.RAISED):
        if failed.error is None:
            continue
        try:
            error = cloudpickle.loads(failed.error)
        except Exception as why:  # noqa: BLE001 - for example, its class cannot be imported here
            log.debug("the exception %s cannot be read here: %s", failed.summary, why)
            return None
        return error if isinstance(error, BaseException) else None
    return None


def _started(new: Incarnation, gathered: Gathered) -> Incarnation:
    iterations = {one.iteration for one in gathered.values.values()}
    if len(iterations) != 1:
        raise ActorFailed(f"the actors are at different iterations after joining: {sorted(map(str, iterations))}")
    return replace(new, iteration=iterations.pop())


def _facts(actor: Actor, iteration: int | None = None) -> ActorFacts:
    return ActorFacts(actor=actor.number, node=actor.node, iteration=iteration)
