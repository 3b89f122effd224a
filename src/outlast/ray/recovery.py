"""Recovery: from lost actors to a group that works again, each phase with a limit; its report and its journal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from ray import cloudpickle

from outlast import clock, env
from outlast.config import RecoveryConfig
from outlast.errors import ActorFailed, SparesExhausted
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.actor_recovery import ActorFacts, Formation, MissingSlots, ends_call, fill_slots, shrink_slots
from outlast.ray.mesh import AXES, Mesh, shrunk
from outlast.ray.node_keeper import NodeKeepers
from outlast.ray.pool import Pool
from outlast.ray.protocol import Aborted, ActorAssignment, CallFailed, FailureKind, Joined
from outlast.ray.watch import (
    Actor,
    Gathered,
    LossKind,
    LostActor,
    ReplyFault,
    Watch,
    await_replies,
    describe_error,
    lose,
)
from outlast.runtime.journal import Journal
from outlast.wording import count

__all__ = ["Incarnation", "LossKind", "LostActor", "Recovery", "RecoveryJournal", "RecoveryReport", "cause_of"]


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tell what one recovery did."""

    incarnation: int
    """The one that it ended with."""
    method: str
    """The call that was interrupted; empty: none was."""
    lost: tuple[LostActor, ...]
    """Who failed, failures within the recovery included; those that only raised were kept."""
    kept: dict[int, int]
    """Rank to process id of those that went on in their processes."""
    replaced: dict[int, int]
    """Rank to process id of those that took a seat."""
    loaded: tuple[int, ...]
    """Ranks that loaded their state; the others kept it."""
    generation: int | None
    """Iteration of the generation that was loaded; ``None``: nobody loaded."""
    begun_at: int | None
    """Iteration at which the interrupted call began; ``None``: the actors keep no state."""
    iteration: int | None
    """Iteration at which the group stands now."""
    mesh_before: dict[str, int]
    mesh_after: dict[str, int]
    rounds: int
    """Attempts; more than one where something failed within the recovery."""
    phases_s: dict[str, float]
    """Seconds by phase: ``detect`` (from the last sign of life to the evidence, where known), ``abort``, ``fill``,
    ``store``, ``join`` (which includes ``connect`` and ``load``, as the slowest actor measured them)."""
    total_s: float
    """Seconds from the evidence to the new incarnation."""
    repeated: bool
    """The interrupted call is repeated; else the group went back to another iteration, or there was no call."""

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
            f"{who or 'nobody was lost'} -> ranks kept: {kept}; replaced: {replaced}; {loaded}; "
            f"iteration {self.iteration}; {self.total_s:.3f} s ({phases})"
        )


log = logging.getLogger(__name__)
_KINDS = {
    LossKind.DIED: IncidentKind.WORKER_FAILED,
    LossKind.RAISED: IncidentKind.WORKER_FAILED,
    LossKind.SILENT: IncidentKind.WORKER_HUNG,
    LossKind.HUNG: IncidentKind.WORKER_HUNG,
    LossKind.STUCK: IncidentKind.WORKER_HUNG,
}


class RecoveryJournal:
    """Log recoveries, and write them into the journal of the run directory.

    Args:
        run_dir: The run directory; ``None``: nothing is written.
        group: Name of the group.

    Thread: one.
    """

    def __init__(self, run_dir: str | None, group: str) -> None:
        self._group = group
        self._journal = Journal(run_dir, run_id=group, job=group, node=env.node_name(), proc="driver")

    def note(self, report: RecoveryReport) -> None:
        """Write down a recovery: an incident for each loss, and what was done."""
        log.warning("incarnation %d of %s: %s", report.incarnation, self._group, report.describe())
        for lost in report.lost:
            incident = Incident(
                kind=_KINDS[lost.kind],
                job=self._group,
                cycle=report.incarnation - 1,
                node=lost.node,
                rank=lost.rank,
                pid=lost.pid,
                iteration=report.begun_at,
                detected_after_s=lost.detected_after_s,
                evidence={"summary": lost.evidence},
            )
            self._journal.write(EventKind.INCIDENT, incident=msgspec.to_builtins(incident))
        self._journal.write(
            EventKind.ACTORS_RECOVERED,
            cycle=report.incarnation,
            iteration=report.iteration,
            report=msgspec.to_builtins(report, str_keys=True),
        )

    def note_keeper(self, node: str) -> None:
        """Write down that the keeper of a node's checkpoint writer died, and that another one is on its way."""
        summary = "its keeper died; another one takes its place, what the writer held in memory is gone"
        incident = Incident(kind=IncidentKind.WRITER_LOST, job=self._group, node=node, evidence={"summary": summary})
        log.warning("%s: %s", self._group, incident.describe())
        self._journal.write(EventKind.INCIDENT, incident=msgspec.to_builtins(incident))

    def close(self) -> None:
        """Close the journal. Idempotent."""
        self._journal.close()


_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """Who works in one incarnation."""

    incarnation: int
    mesh: Mesh
    members: Mapping[int, Actor]
    """Rank to actor."""
    iteration: int | None
    """Iteration at which it began; ``None``: the actors keep no state."""


@dataclass(slots=True, kw_only=True)
class _Round:
    """What one recovery has found and done so far."""

    method: str
    begun_at: int | None
    first_mesh: Mesh
    first_members: Mapping[int, Actor]
    lost: list[LostActor] = field(default_factory=list)
    untrusted: set[int] = field(default_factory=set)
    """Numbers of actors that are not to keep their state."""
    phases_s: dict[str, float] = field(default_factory=dict)
    begun_s: float = field(default_factory=clock.now_s)
    number: int = 0

    def time(self, phase: str, since_s: float) -> float:
        """Add the time since then to a phase, and return the time now."""
        now_s = clock.now_s()
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + now_s - since_s
        return now_s


class Recovery:
    """Make incarnations: the first one, and each that has to follow.

    Args:
        config: Limits.
        pool: Where actors come from.
        watch: Waits for those that join.
        idle: Called between phases; may raise to end the recovery.
        keepers: Has a checkpoint writer on each node; ``None``: there is no place where generations are saved.

    Thread: one.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        pool: Pool,
        watch: Watch,
        idle: Callable[[], None],
        *,
        keepers: NodeKeepers | None,
    ) -> None:
        self._config, self._pool, self._watch, self._idle, self._keepers = config, pool, watch, idle, keepers
        self._incarnation = -1

    def form(self, mesh: Mesh) -> Incarnation:
        """Make the first incarnation, of the actors that have started, ordered by node and device.

        Raises:
            ActorFailed: The user's ``setup`` raises, or actors are lost again and again.
            SparesExhausted: Actors were lost, and there is nobody in their place.

        Blocks: up to ``join_timeout``, and longer if actors are lost meanwhile.
        """
        spares = sorted(self._pool.spares, key=lambda one: one.number)[: mesh.size]
        nodes = list(dict.fromkeys(one.node for one in spares))
        ordered = sorted(spares, key=lambda one: (nodes.index(one.node), one.hello.device, one.number))
        members = dict(enumerate(ordered))
        self._pool.take([one.number for one in ordered])
        work = _Round(method="", begun_at=None, first_mesh=mesh, first_members=members)
        crew = self._new_crew(mesh, members)
        gathered, joined = self._join(crew, {}, work)
        if gathered.is_whole:
            return _standing(crew, joined)
        return self._recover(crew, gathered, work)[0]

    def recover(
        self, crew: Incarnation, gathered: Gathered, *, method: str, begun_at: int | None
    ) -> tuple[Incarnation, RecoveryReport]:
        """Make the incarnation that follows ``crew``.

        Args:
            crew: The one that failed.
            gathered: What its call came to.
            method: The call.
            begun_at: Iteration at which the call began.

        Raises:
            SparesExhausted: There is nobody to fill a seat.
            ActorFailed: It failed ``max_rounds`` times.

        Blocks: as the limits of the phases say; a second or less where a spare is there.
        """
        return self._recover(
            crew,
            gathered,
            _Round(method=method, begun_at=begun_at, first_mesh=crew.mesh, first_members=dict(crew.members)),
        )

    def _recover(self, crew: Incarnation, gathered: Gathered, work: _Round) -> tuple[Incarnation, RecoveryReport]:
        while work.number < self._config.max_rounds:
            work.number += 1
            self._idle()
            since_s = clock.now_s()
            lost = dict(gathered.lost)
            for rank in lost:
                self._pool.discard(crew.members[rank])
            exact = self._abort(crew, lost)
            self._note_losses(crew, gathered, lost, work)
            survivors = {
                rank: ActorFacts(actor=crew.members[rank].number, node=crew.members[rank].node, iteration=iteration)
                for rank, iteration in self._trusted(crew, exact, gathered, work).items()
            }
            since_s = work.time("abort", since_s)
            mesh, formation = self._fill(crew, survivors)
            members, has = self._seat(crew, formation)
            crew = self._new_crew(mesh, members)
            work.time("fill", since_s)
            gathered, joined = self._join(crew, has, work)
            if gathered.is_whole:
                crew = _standing(crew, joined)
                return crew, self._report(crew, joined, work)
        cause = cause_of(gathered)
        texts = "; ".join(one.evidence for one in work.lost[-4:])
        raise ActorFailed(
            f"{work.number} attempts to form the group again failed (max_rounds={self._config.max_rounds}): {texts}; "
            "see the actors' logs"
        ) from cause

    def _abort(self, crew: Incarnation, lost: dict[int, LostActor]) -> dict[int, int | None]:
        """Have everybody who lives leave the call; return rank to exact iteration, and add to ``lost``."""
        deadline_s = clock.now_s() + self._config.abort_timeout
        left = {rank: actor for rank, actor in crew.members.items() if rank not in lost}
        exact: dict[int, int | None] = {}
        while left:
            wait_s = max(0.05, deadline_s - clock.now_s())
            refs = {rank: one.handle.abort.remote(crew.incarnation, wait_s) for rank, one in left.items()}
            # An actor says itself when its call does not end; the margin is for its answer.
            answers = await_replies(refs, wait_s + self._config.examine_timeout)
            is_over = clock.now_s() >= deadline_s
            for rank, answer in answers.items():
                actor, aborted = left[rank], answer.value
                if isinstance(aborted, Aborted):
                    del left[rank]
                    if aborted.call_ended:
                        exact[rank] = aborted.iteration
                    else:
                        text = f"it did not leave the interrupted call within {self._config.abort_timeout:g} s"
                        if aborted.waited_for:
                            text += f" ({aborted.waited_for})"
                        lost[rank] = lose(rank, actor, LossKind.STUCK, text)
                elif answer.fault == ReplyFault.DIED:
                    del left[rank]
                    lost[rank] = lose(rank, actor, LossKind.DIED, describe_error(answer.error))
                elif answer.fault == ReplyFault.RAISED:
                    del left[rank]
                    lost[rank] = lose(rank, actor, LossKind.STUCK, f"aborting raised {describe_error(answer.error)}")
                elif is_over:
                    del left[rank]
                    text = f"no answer within {self._config.abort_timeout:g} s when it was to leave the call"
                    lost[rank] = lose(rank, actor, LossKind.SILENT, text)
            for rank in lost.keys() & refs.keys():
                self._pool.discard(crew.members[rank])
            if left:
                time.sleep(_AGAIN_S)  # cannot be reached, or its answer was lost: try again
                self._idle()
        return exact

    def _note_losses(self, crew: Incarnation, gathered: Gathered, lost: Mapping[int, LostActor], work: _Round) -> None:
        work.lost.extend(lost[rank] for rank in sorted(lost))
        for rank, failed in gathered.failed.items():
            if rank not in lost and failed.kind == FailureKind.RAISED:
                work.lost.append(lose(rank, crew.members[rank], LossKind.RAISED, failed.summary))
        times = [one.detected_after_s for one in lost.values() if one.detected_after_s is not None]
        if times and work.number == 1:
            work.phases_s["detect"] = max(times)

    def _trusted(
        self, crew: Incarnation, exact: Mapping[int, int | None], gathered: Gathered, work: _Round
    ) -> dict[int, int | None]:
        """Return the iterations that may be kept: not that of an actor whose own code raised, if it can load."""
        if self._keepers is not None:
            raised = [rank for rank, failed in gathered.failed.items() if failed.kind == FailureKind.RAISED]
            work.untrusted.update(crew.members[rank].number for rank in raised)
        return {
            rank: None if crew.members[rank].number in work.untrusted else iteration
            for rank, iteration in exact.items()
        }

    def _fill(self, crew: Incarnation, survivors: Mapping[int, ActorFacts]) -> tuple[Mesh, Formation]:
        before = {rank: actor.node for rank, actor in crew.members.items()}
        num_missing = len(before) - len(survivors)
        spares = self._spares(num_missing)
        formation = fill_slots(before, survivors, spares)
        if isinstance(formation, Formation):
            return crew.mesh, formation
        smaller = shrunk(crew.mesh, len(survivors) + len(spares)) if self._config.allow_shrink else None
        if smaller is not None:
            formation = shrink_slots(smaller.size, survivors, spares)
            assert isinstance(formation, Formation)
            log.warning("no spare is left for ranks %s; continuing as %s", _missing(before, survivors, spares), smaller)
            return smaller, formation
        wait_s = self._config.spare_wait
        log.warning(
            "no spare is left; waiting up to %g s for %s to start",
            wait_s,
            count(self._pool.num_starting, "actor"),
        )
        deadline_s = clock.now_s() + wait_s
        while clock.now_s() < deadline_s and (self._pool.num_starting or self._pool.spares):
            self._idle()
            if self._pool.wait_for_spares(num_missing, min(_AGAIN_S * 5, deadline_s - clock.now_s())):
                formation = fill_slots(before, survivors, self._spares(num_missing))
                if isinstance(formation, Formation):
                    return crew.mesh, formation
            elif not self._pool.num_starting:
                time.sleep(_AGAIN_S)  # until a spare that does not answer is given up, and another one started
        ranks = _missing(before, survivors, list(map(_facts, self._pool.spares)))
        raise SparesExhausted(
            f"no actor is left for ranks {ranks}, and none started within {wait_s:g} s; give the group more spares "
            f"(num_spares), room in the cluster for new actors, or let it shrink (allow_shrink)",
            rank=ranks[0] if ranks else None,
        )

    def _spares(self, num: int) -> list[ActorFacts]:
        return [_facts(one) for one in self._pool.answering(num, self._config.ping_timeout)] if num else []

    def _seat(self, crew: Incarnation, formation: Formation) -> tuple[dict[int, Actor], dict[int, int | None]]:
        present = {actor.number: actor for actor in crew.members.values()}
        wanted = {seat.actor for seat in formation.seats}
        present |= self._pool.take(wanted - present.keys())
        dismissed = [present[number] for number in formation.dismissed]
        await_replies({one.number: one.handle.leave.remote() for one in dismissed}, self._config.abort_timeout)
        self._pool.give(dismissed)
        return (
            {seat.rank: present[seat.actor] for seat in formation.seats},
            {seat.rank: seat.has for seat in formation.seats},
        )

    def _new_crew(self, mesh: Mesh, members: Mapping[int, Actor]) -> Incarnation:
        self._incarnation += 1
        return Incarnation(incarnation=self._incarnation, mesh=mesh, members=members, iteration=None)

    def _join(
        self, crew: Incarnation, has: Mapping[int, int | None], work: _Round
    ) -> tuple[Gathered, dict[int, Joined]]:
        """Have everybody join the new incarnation."""
        since_s = clock.now_s()
        answer = await_replies({0: crew.members[0].handle.host_store.remote()}, self._config.store_timeout)[0]
        since_s = work.time("store", since_s)
        if answer.fault is not None:
            kind = LossKind.DIED if answer.fault == ReplyFault.DIED else LossKind.STUCK
            text = f"it could not open the store of the incarnation: {describe_error(answer.error)}"
            return Gathered(lost={0: lose(0, crew.members[0], kind, text)}), {}
        addr, port = answer.value
        refs = {
            rank: crew.members[rank].handle.join.remote(one)
            for rank, one in self._assign(crew, has, addr, port).items()
        }
        gathered = self._watch.gather(crew.members, refs, timeout_s=self._config.join_timeout)
        work.time("join", since_s)
        return gathered, gathered.values

    def _assign(
        self, crew: Incarnation, has: Mapping[int, int | None], addr: str, port: int
    ) -> dict[int, ActorAssignment]:
        nodes: dict[str, list[int]] = {}
        for rank in sorted(crew.members):
            nodes.setdefault(crew.members[rank].node, []).append(rank)
        node_ranks = {node: number for number, node in enumerate(nodes)}
        writers = {} if self._keepers is None else self._keepers.ensure(list(nodes), self._config.store_timeout)
        return {
            rank: ActorAssignment(
                incarnation=crew.incarnation,
                rank=rank,
                mesh=crew.mesh,
                local_rank=nodes[actor.node].index(rank),
                local_world_size=len(nodes[actor.node]),
                node_rank=node_ranks[actor.node],
                store_addr=addr,
                store_port=port,
                timeout_s=self._config.collective_timeout,
                has=has.get(rank),
                writer=writers.get(actor.node),
            )
            for rank, actor in crew.members.items()
        }

    def _report(self, crew: Incarnation, joined: Mapping[int, Joined], work: _Round) -> RecoveryReport:
        before = {actor.number for actor in work.first_members.values()}
        kept = {rank: actor.pid for rank, actor in crew.members.items() if actor.number in before}
        replaced = {rank: actor.pid for rank, actor in crew.members.items() if actor.number not in before}
        for phase in sorted({name for one in joined.values() for name in one.phases}):
            work.phases_s[phase] = max(one.phases.get(phase, 0.0) for one in joined.values())
        loaded = tuple(sorted(rank for rank, one in joined.items() if one.loaded))
        return RecoveryReport(
            incarnation=crew.incarnation,
            method=work.method,
            lost=tuple(work.lost),
            kept=kept,
            replaced=replaced,
            loaded=loaded,
            generation=next((joined[rank].generation for rank in loaded), None),
            begun_at=work.begun_at,
            iteration=crew.iteration,
            mesh_before=_sizes(work.first_mesh),
            mesh_after=_sizes(crew.mesh),
            rounds=work.number,
            phases_s={name: round(seconds, 4) for name, seconds in work.phases_s.items()},
            total_s=round(clock.now_s() - work.begun_s, 4),
            repeated=bool(work.method) and not ends_call(work.begun_at, [crew.iteration]),
        )


def cause_of(gathered: Gathered) -> BaseException | None:
    """Return the exception of the user's code that made a call fail, ``None`` if there is none."""
    for failed in sorted(gathered.failed.values(), key=lambda one: one.kind != FailureKind.RAISED):
        if failed.error is not None:
            return _unpickle(failed)
    return None


def _unpickle(failed: CallFailed) -> BaseException | None:
    try:
        error = cloudpickle.loads(failed.error or b"")
    except Exception as why:  # noqa: BLE001 - of a class that this process cannot import, say
        log.debug("the exception %s cannot be read here: %s", failed.summary, why)
        return None
    return error if isinstance(error, BaseException) else None


def _standing(crew: Incarnation, joined: Mapping[int, Joined]) -> Incarnation:
    iterations = {one.iteration for one in joined.values()}
    if len(iterations) != 1:
        raise ActorFailed(f"the actors stand at different iterations after joining: {sorted(map(str, iterations))}")
    return Incarnation(
        incarnation=crew.incarnation, mesh=crew.mesh, members=crew.members, iteration=next(iter(iterations))
    )


def _facts(actor: Actor) -> ActorFacts:
    return ActorFacts(actor=actor.number, node=actor.node)


def _missing(before: Mapping[int, str], survivors: Mapping[int, ActorFacts], spares: list[ActorFacts]) -> list[int]:
    missing = fill_slots(before, survivors, spares)
    return list(missing.ranks) if isinstance(missing, MissingSlots) else []


def _sizes(mesh: Mesh) -> dict[str, int]:
    return dict(zip(AXES, mesh.sizes, strict=True))
