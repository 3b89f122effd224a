"""Which state all ranks resume from: a checkpoint's copies in the tiers, or the state that they still hold in memory.

A *copy* is one rank's part of a checkpoint in one place. Two attempts at the same iteration are two checkpoints; their
parts are never mixed. The rule: the newest checkpoint of which every rank has a copy that was not refused; of each
rank's copies of it, the one in the nearest tier. Doubtful copies come after all others, and before them checkpoints
with numbers that are infinite or NaN: such a state may be right, with masks for example, but then all of its
checkpoints have them, so a newer one is skipped only for an older one that is finite.

**Excluded copies** are not loaded again, because results became invalid within ``suspect_window`` iterations of their
load:

* Loaded from a node-local tier (memory, local, replica): the checkpoint's node-local copies are excluded, and
  everything saved by a cycle that trained on them. The other node-local copies of the cycle that had saved it are
  doubtful. The next load uses the global tier or what an older cycle saved; doubtful copies only if there is nothing
  else.
* Loaded from the global tier: the checkpoint is excluded in every tier, with all of its descendants. The next load
  takes an older one. The second time no copy is at fault: the run stops with the diagnosis.

All node-local copies of an attempt are excluded at once: they were verified against the same digests, so they are the
same bytes, and trying them one by one would cost a cycle each. The global tier's copies are other files with their own
digests.

Lineage has two sources: a manifest names the attempt that its processes had loaded, and a cycle that loaded an excluded
copy taints whatever it saved, even if a link between was deleted. A copy from the global tier may be sound where the
node-local ones of the same attempt are not, so what was saved after *its* load is not tainted.

**The same failure twice.** If the same failure follows the load of the same node-local copy twice at the same
iteration, and one restart is left, the checkpoint's node-local copies are put last (:func:`exclude_after_failure`): the
last restart uses another tier. They are not verified bad, so they are loaded if nothing else is left.

This terminates: a copy is excluded once, at most :data:`MAX_OPEN` exclusions are open, one of them of the global tier.
One is settled when training committed a checkpoint beyond the iteration of the invalid result.

**After an in-process restart** (:func:`plan_in_place`) each rank reports the iteration at which its part of the state
is *complete*: as that many optimizer steps left it, with no update begun since. Per-rank state (random numbers,
position in the data) is kept separately, for the last two iterations, and also by neighbours on the node, so that it
outlives the rank. The ranks resume from the newest iteration at which each has its part, or another rank has the same
part, and at which the per-rank state of every rank exists. In any doubt all ranks load from the checkpoint tiers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, TypeAlias

import msgspec

from outlast.decoding import from_json
from outlast.wording import count


class Tier(IntEnum):
    """Where a copy is stored, nearest first."""

    MEMORY = 0
    """Memory of this node's checkpoint writer."""
    LOCAL = 1
    """This node's disk."""
    REPLICA = 2
    """Memory or disk of another node."""
    GLOBAL = 3
    """The global directory or object store."""

    def __str__(self) -> str:
        return self.name.lower()


class Copy(msgspec.Struct, rename={"checkpoint": "generation"}, frozen=True, order=True):
    """One rank's part of a checkpoint in one place."""

    checkpoint: int
    attempt: str
    tier: Tier
    holder: str = ""
    """The node that holds it; empty for the global tier."""


class RecoveryPoint(msgspec.Struct, rename={"checkpoint": "generation"}, frozen=True):
    """The checkpoint that all ranks load."""

    checkpoint: int
    attempt: str
    copies: tuple[Copy, ...]
    """The copy that each rank loads, by rank."""


Copies: TypeAlias = Sequence[Collection[Copy]]


def choose_recovery_point(
    copies: Copies, refused: Mapping[int, Collection[Copy]] | None = None
) -> RecoveryPoint | None:
    """Choose a checkpoint and each rank's copy; every rank that is given the same facts chooses the same.

    Args:
        copies: For each rank, the copies that it could load.
        refused: For each rank, copies that failed its verification or are known to be bad.

    Returns:
        The newest complete checkpoint, each rank's part from the nearest tier; ``None`` = there is none. Of two
        attempts at the newest iteration the one with the nearer copies is chosen, then the one whose name is last.
    """
    if not copies:
        return None
    best: list[dict[tuple[int, str], Copy]] = []
    for rank, held in enumerate(copies):
        usable = set(held).difference((refused or {}).get(rank, ()))
        farthest_first = sorted(usable, key=lambda copy: (copy.tier, copy.holder), reverse=True)
        best.append({(copy.checkpoint, copy.attempt): copy for copy in farthest_first})
    complete = set(best[0]).intersection(*best[1:])
    if not complete:
        return None
    checkpoint = max(key[0] for key in complete)
    attempts = sorted(key[1] for key in complete if key[0] == checkpoint)
    attempt = min(reversed(attempts), key=lambda name: sum(nearest[checkpoint, name].tier for nearest in best))
    return RecoveryPoint(checkpoint, attempt, tuple(nearest[checkpoint, attempt] for nearest in best))


def choose_best_point(
    copies: Copies,
    refused: Mapping[int, Collection[Copy]],
    *,
    doubtful: Copies = (),
    not_finite: Collection[tuple[int, str]] = (),
    last: Copies = (),
) -> RecoveryPoint | None:
    """Choose as :func:`choose_recovery_point`, with questionable copies only if nothing else is left.

    Args:
        copies: For each rank, the copies that it could load.
        refused: For each rank, copies that are never loaded.
        doubtful: For each rank, copies that are loaded if there are no others; empty = none.
        not_finite: Iteration and attempt of checkpoints with numbers that are infinite or NaN; loaded only if there are
            no others, doubtful or not.
        last: For each rank, copies that are loaded only if nothing else is complete; empty = none.
    """
    if any(last):
        without = {rank: {*refused.get(rank, ()), *last[rank]} for rank in range(len(copies))}
        if (point := choose_best_point(copies, without, doubtful=doubtful, not_finite=not_finite)) is not None:
            return point
    unsure = [set(doubtful[rank]) if doubtful else set() for rank in range(len(copies))]
    infinite = [{copy for copy in held if (copy.checkpoint, copy.attempt) in not_finite} for held in copies]
    for left_out in ((unsure, infinite), (infinite,), (unsure,), ()):
        bad = {rank: set(refused.get(rank, ())).union(*(one[rank] for one in left_out)) for rank in range(len(copies))}
        if (point := choose_recovery_point(copies, bad)) is not None:
            return point
    return None


TierName: TypeAlias = Literal["memory", "local", "replica", "global"]
NONE_DURABLE = -1
"""In place of the newest durable iteration: no cycle of the run has committed one. Checkpoints of other jobs are not
counted."""
MAX_OPEN = 3
"""Open exclusions after which an invalid result is not attributed to a copy any more."""
_GLOBAL = str(Tier.GLOBAL)


class Load(msgspec.Struct, rename={"checkpoint": "generation"}, frozen=True, kw_only=True):
    """What the ranks of a cycle loaded."""

    cycle: str
    """Name of the cycle, ``<job>-<number>``, with which the names of its saves begin."""
    checkpoint: int
    attempt: str
    """The attempt that had saved it."""
    tier: TierName
    """See :func:`tier_of_load`."""
    suspect_window: int = 0
    """Iterations after the load in which an invalid result casts doubt on it."""


class Exclusion(msgspec.Struct, rename={"checkpoint": "generation"}, frozen=True, kw_only=True, omit_defaults=True):
    """Copies that are not loaded again: a checkpoint's node-local ones or, with ``tier="global"``, all of them."""

    checkpoint: int
    attempt: str
    tier: TierName
    """Tier of the load that led to the invalid result."""
    iteration: int = 0
    """Number of optimizer steps done when the result was invalid."""
    cycle: str = ""
    """Cycle of the invalid result."""
    why: str = ""
    """One line for messages."""
    tainted: tuple[str, ...] = ()
    """Names of the cycles that trained on it, or on its descendants; empty = not known, then all descendants count."""
    settled: bool = False
    """Training has since committed a checkpoint beyond ``iteration``."""
    is_last_resort: bool = False
    """Not verified bad: the same failure followed its load twice. Loaded only if nothing else is left; descendants
    count as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an invalid result shows about the loaded copy."""

    excluded: Exclusion | None
    """The copies to exclude, with a restart; ``None`` = no copy is at fault, the run stops."""
    reason: str
    """Part of a sentence for messages."""


def tier_of_load(tiers: Iterable[str]) -> TierName:
    """Return the tier that a load is judged by: the ranks' farthest node-local tier, else the global tier."""
    used = sorted({Tier[tier.upper()] for tier in tiers} - {Tier.GLOBAL})
    names: tuple[TierName, ...] = ("memory", "local", "replica", "global")
    return names[used[-1]] if used else "global"


def judge(load: Load | None, iteration: int | None, *, known: Sequence[Exclusion], loads: Sequence[Load]) -> Judgement:
    """Return what an invalid result shows about the copy that the cycle had loaded.

    Args:
        load: What the cycle loaded; ``None`` = nothing, or not known.
        iteration: Number of optimizer steps done when the result was invalid; ``None`` = not known.
        known: Copies that are excluded already.
        loads: What earlier cycles of the run loaded.
    """
    known = [one for one in known if not one.is_last_resort]
    if load is None or iteration is None:
        why = f"{len(known)} copies are excluded already" if known else "so no copy can be at fault"
        return Judgement(excluded=None, reason=f"nothing was loaded, {why}")
    since = iteration - load.checkpoint
    what = f"checkpoint {load.checkpoint} ({load.tier} tier, attempt {load.attempt})"
    if not 0 <= since <= load.suspect_window:
        where = f"{count(since, 'iteration')} after {what} was loaded"
        return Judgement(excluded=None, reason=f"{where}, beyond the suspect window of {load.suspect_window}")
    is_global = load.tier == _GLOBAL
    if any(one.attempt == load.attempt and (one.tier == _GLOBAL or not is_global) for one in known):
        return Judgement(excluded=None, reason=f"{what} is excluded already and was loaded nevertheless")
    pending = [one for one in known if not one.settled]
    if is_global and any(one.tier == _GLOBAL for one in pending):
        return Judgement(
            excluded=None, reason=f"{what} is the second one from the global tier that led to an invalid result"
        )
    if len(pending) >= MAX_OPEN:
        return Judgement(excluded=None, reason=f"{len(pending)} other copies led to an invalid result before {what}")
    distance = f"{since} iteration{'' if since == 1 else 's'} after it was loaded"
    why = f"an invalid result at iteration {iteration}, {distance} from the {load.tier} tier in cycle {load.cycle}"
    excluded = Exclusion(
        checkpoint=load.checkpoint,
        attempt=load.attempt,
        tier=load.tier,
        iteration=iteration,
        cycle=load.cycle,
        why=why,
        tainted=_tainted(load, loads),
    )
    scope = "it" if is_global else "its copies in memory, local tier and replicas"
    return Judgement(
        excluded=excluded, reason=f"{distance}, {what} is excluded: {scope}, and all that descends from it"
    )


def exclude_after_failure(load: Load, iteration: int, *, known: Sequence[Exclusion]) -> Exclusion | None:
    """Return the copies to exclude after the same failure has followed the load of the same copy twice.

    Args:
        load: What the cycle loaded.
        iteration: Number of optimizer steps done at the failure.
        known: Copies that are excluded already.

    Returns:
        The checkpoint's node-local copies; ``None`` = it came from the global tier, or they are excluded already.
    """
    if load.tier == _GLOBAL or any(one.attempt == load.attempt for one in known):
        return None
    return Exclusion(
        checkpoint=load.checkpoint,
        attempt=load.attempt,
        tier=load.tier,
        iteration=iteration,
        cycle=load.cycle,
        why=f"the same failure at iteration {iteration} after each load of it from the {load.tier} tier",
        is_last_resort=True,
    )


def settle(known: Sequence[Exclusion], durable_iteration: int | None) -> tuple[Exclusion, ...]:
    """Return the exclusions after a cycle whose end cast no doubt on what it had loaded.

    Args:
        durable_iteration: The newest checkpoint that the cycle committed; ``None`` = none.
    """
    return tuple(
        msgspec.structs.replace(one, settled=True)
        if durable_iteration is not None and durable_iteration > one.iteration
        else one
        for one in known
    )


def is_excluded(copy: Copy, lineage: Mapping[str, str | None], excluded: Iterable[Exclusion]) -> bool:
    """Return whether a copy led to invalid results, or descends from one that did.

    Args:
        copy: A rank's copy of a checkpoint.
        lineage: Attempt to the attempt that its processes had loaded; ``None`` = they had loaded nothing.
        excluded: The exclusions.
    """
    ancestors = list(_ancestry(copy.attempt, lineage))
    return any(_covers(one, copy, ancestors) for one in excluded if not one.is_last_resort)


def is_last_resort(copy: Copy, excluded: Iterable[Exclusion]) -> bool:
    """Return whether a copy is loaded only if nothing else is left, as the same failure followed its load twice."""
    return copy.tier != Tier.GLOBAL and any(one.is_last_resort and one.attempt == copy.attempt for one in excluded)


def is_doubtful(copy: Copy, excluded: Iterable[Exclusion]) -> bool:
    """Return whether a node-local copy was saved by a cycle of which another node-local copy led to invalid results."""
    bad = {_cycle_of(one.attempt) for one in excluded if one.tier != _GLOBAL}
    return copy.tier != Tier.GLOBAL and _cycle_of(copy.attempt) in bad


def decode_excluded(text: str | None) -> tuple[Exclusion, ...]:
    """Return the exclusions from the text that workers are given; ``None`` = none.

    Raises:
        msgspec.DecodeError: The text is invalid.
    """
    return from_json(text, tuple[Exclusion, ...]) if text else ()


def _covers(one: Exclusion, copy: Copy, ancestors: Sequence[str]) -> bool:
    if copy.attempt == one.attempt:
        return one.tier == _GLOBAL or copy.tier != Tier.GLOBAL
    if any(_cycle_of(attempt) in one.tainted for attempt in (copy.attempt, *ancestors) if attempt != one.attempt):
        return True
    return (one.tier == _GLOBAL or not one.tainted) and one.attempt in ancestors


def _ancestry(attempt: str, lineage: Mapping[str, str | None]) -> Iterable[str]:
    """Yield the ancestors of an attempt, nearest first, as far as known."""
    seen = {attempt}
    parent = lineage.get(attempt)
    while parent is not None and parent not in seen:
        yield parent
        seen.add(parent)
        parent = lineage.get(parent)


def _tainted(load: Load, loads: Sequence[Load]) -> tuple[str, ...]:
    """Return the cycles that trained on what was loaded, or on what such cycles saved."""
    cycles = {load.cycle}
    while True:
        more = {
            other.cycle
            for other in loads
            if (other.attempt == load.attempt and (load.tier == _GLOBAL or other.tier != _GLOBAL))
            or _cycle_of(other.attempt) in cycles
        }
        if more <= cycles:
            return tuple(sorted(cycles))
        cycles |= more


def _cycle_of(attempt: str) -> str:
    """Return the name of the cycle that made an attempt, ``<job>-<cycle>-<token>.<ordinal>``."""
    return attempt.rpartition("-")[0]


class Origin(msgspec.Struct, rename={"checkpoint": "generation"}, frozen=True, kw_only=True):
    """A checkpoint that was loaded."""

    checkpoint: int
    attempt: str
    """The attempt that had saved it."""
    tiers: tuple[str, ...]
    """For each rank, the tier of its part."""


class InPlaceHolding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State that one rank holds in memory."""

    iteration: int | None = None
    """Number of optimizer steps that made its part of the state; ``None`` = it has no complete one."""
    reason: str = ""
    rank: int | None = None
    """Its rank when it came to hold the state; ``None`` = none yet."""
    world_size: int = 0
    """Number of ranks then."""
    digest: str = ""
    is_shared: bool = False
    """All of its part is on other ranks, too."""
    replicas: tuple[int, ...] = ()
    """Current ranks that have the same part, in order, this one included."""
    own: dict[int, tuple[int, ...]] = {}
    """Per-rank state that it can provide: rank of then to iterations."""
    has_loaded: Origin | None = None
    """Checkpoint that its part descends from; ``None`` = never loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlacePlan:
    """Plan of an in-place resume; the same on all ranks."""

    iteration: int | None
    """Where training resumes; ``None`` = from the checkpoint tiers."""
    reason: str = ""
    """Why from the checkpoint tiers; empty = no rank holds anything."""
    part_from: Mapping[int, int] = field(default_factory=dict)
    """Rank without its part to the rank that provides it."""
    own_from: Mapping[int, int] = field(default_factory=dict)
    """Every rank to the one that provides its per-rank state."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Rank without its part to the digest that the received part must have."""
    has_loaded: Origin | None = None


def plan_in_place(holdings: Sequence[InPlaceHolding]) -> InPlacePlan:
    """Return the plan; ``holdings`` are what the current ranks hold, by rank."""
    whole = {rank: one for rank, one in enumerate(holdings) if one.iteration is not None}
    reasons = [f"rank {rank}: {one.reason}" for rank, one in enumerate(holdings) if one.reason]
    if not whole:
        return InPlacePlan(iteration=None, reason="; ".join(reasons[:3]))
    if any(one.world_size != len(holdings) for one in whole.values()):
        return InPlacePlan(iteration=None, reason="the number of ranks has changed")
    first = ""
    for iteration in sorted({one.iteration for one in whole.values() if one.iteration is not None}, reverse=True):
        plan = _plan_at(iteration, holdings)
        if isinstance(plan, InPlacePlan):
            return plan
        first = first or plan
    return InPlacePlan(iteration=None, reason="; ".join([first, *reasons[:3]]))


def _plan_at(iteration: int, holdings: Sequence[InPlaceHolding]) -> InPlacePlan | str:
    """Return the plan to resume from an iteration, or why it is impossible."""
    part_from, own_from, digests = dict[int, int](), dict[int, int](), dict[int, str]()
    for rank in range(len(holdings)):
        givers = [rank, *(other for other in range(len(holdings)) if other != rank)]
        giver = next((one for one in givers if iteration in holdings[one].own.get(rank, ())), None)
        if giver is None:
            return f"no rank has the per-rank state (such as random numbers) of rank {rank} at iteration {iteration}"
        own_from[rank] = giver
        sources = [
            other
            for other, one in enumerate(holdings)
            if one.iteration == iteration
            and (other == rank or rank in one.replicas)
            and (one.rank == rank if other == rank and not one.is_shared else one.is_shared)
        ]
        if not sources:
            return f"no rank that is left has the part of rank {rank} at iteration {iteration}"
        if len({holdings[source].digest for source in sources}) > 1:
            return f"replicas of rank {rank} differ at iteration {iteration}: ranks {sources}"
        if rank not in sources:
            part_from[rank] = sources[0]
            digests[rank] = holdings[sources[0]].digest
    origins = {one.has_loaded for one in holdings if one.iteration == iteration}
    if len(origins) > 1:
        return "the ranks would resume from different checkpoints"
    return InPlacePlan(
        iteration=iteration,
        part_from=part_from,
        own_from=own_from,
        digests=digests,
        has_loaded=next(iter(origins)),
    )
