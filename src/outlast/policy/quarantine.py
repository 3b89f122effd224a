"""Which copies are not loaded again, because results turned invalid soon after they were.

Within ``suspect_window`` iterations of a load an invalid result casts doubt on what was loaded:

* Loaded from a near tier (memory, local, replica): the generation's near copies are distrusted, and everything that was
  saved by a cycle that trained on them. The other near copies of the cycle that had saved it are doubtful. The next
  load goes down to the global tier or to what an older cycle saved; to doubtful copies only if there is nothing else.
* Loaded from the global tier: the generation is distrusted in every tier, and everything that descends from it. The
  next load takes an older one. A second time, no copy is at fault: stop, with the diagnosis.

All near copies of an attempt are distrusted at once. They were verified against the same digests, so they are the same
bytes, and a replica that was fetched has become a memory copy by the time of the next load. What spoiled one on its way
may have spoiled all that its cycle saved nearby, and trying them one by one would cost a cycle each. The global tier's
copies are other files with digests of their own: they get their chance.

Lineage has two sources. A manifest names the attempt that its processes had loaded; and a cycle that loaded a
distrusted copy taints whatever it saved, even where a link between was deleted since. A copy from the global tier may
be sound where the near ones of the same attempt are not, so what was saved after *it* was loaded is not tainted.

It comes to an end: a copy is distrusted once, :data:`MAX_OPEN` judgements may be open, one of them of the global tier.
One is settled when training committed a generation beyond the iteration at which the result had been invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from outlast.decoding import from_json
from outlast.policy.recovery_point import Copy, Tier
from outlast.wording import count

__all__ = [
    "MAX_OPEN",
    "Distrusted",
    "Judgement",
    "Load",
    "TierName",
    "decode_distrusted",
    "encode_distrusted",
    "is_distrusted",
    "is_doubtful",
    "judge",
    "settle",
    "tier_of_load",
]

TierName: TypeAlias = Literal["memory", "local", "replica", "global"]
MAX_OPEN = 3
"""Judgements in a row after which an invalid result is no copy's fault any more."""
_GLOBAL = str(Tier.GLOBAL)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a cycle loaded."""

    cycle: str
    """Name of the cycle, ``<job>-<number>``: what it saved has names that begin with it."""
    generation: int
    attempt: str
    """The attempt that had saved it."""
    tier: TierName
    """See :func:`tier_of_load`."""
    suspect_window: int = 0
    """Iterations after the load in which an invalid result casts doubt on it."""


class Distrusted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Copies that are not loaded again: a generation's near ones or, with ``tier="global"``, all of them."""

    generation: int
    attempt: str
    tier: TierName
    """Where it was loaded from when the result was invalid."""
    iteration: int = 0
    """Number of optimizer steps done when the result was invalid."""
    cycle: str = ""
    """The cycle in which it was."""
    why: str = ""
    """One line for people."""
    tainted: tuple[str, ...] = ()
    """Names of the cycles that trained on it, or on what descends from it; empty = not known, then all of its
    descendants count."""
    settled: bool = False
    """Training has since committed a generation beyond ``iteration``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an invalid result shows about what was loaded."""

    distrusted: Distrusted | None
    """What is not loaded again; then the run is restarted. ``None``: it is not the copy's fault, the run stops."""
    reason: str
    """Part of a sentence, for people."""


def tier_of_load(tiers: Iterable[str]) -> TierName:
    """Return the tier that a load is judged by: the farthest near one that a rank used, else the global tier.

    Args:
        tiers: Each rank's tier.
    """
    used = sorted({Tier[tier.upper()] for tier in tiers} - {Tier.GLOBAL})
    names: tuple[TierName, ...] = ("memory", "local", "replica", "global")
    return names[used[-1]] if used else "global"


def judge(load: Load | None, iteration: int | None, *, known: Sequence[Distrusted], loads: Sequence[Load]) -> Judgement:
    """Say what an invalid result means for what the cycle had loaded.

    Args:
        load: What the cycle loaded; ``None`` = nothing, or it is not known.
        iteration: Number of optimizer steps done when the result was invalid; ``None`` = not known.
        known: What is distrusted already.
        loads: What earlier cycles of the run loaded.
    """
    if load is None or iteration is None:
        why = f"{len(known)} copies being distrusted already" if known else "so no copy can be at fault"
        return Judgement(distrusted=None, reason=f"nothing was loaded, {why}")
    since = iteration - load.generation
    what = f"generation {load.generation} ({load.tier} tier, attempt {load.attempt})"
    if not 0 <= since <= load.suspect_window:
        where = f"{count(since, 'iteration')} after {what} was loaded"
        return Judgement(distrusted=None, reason=f"{where}, beyond the suspect window of {load.suspect_window}")
    is_global = load.tier == _GLOBAL
    if any(one.attempt == load.attempt and (one.tier == _GLOBAL or not is_global) for one in known):
        return Judgement(distrusted=None, reason=f"{what} is distrusted already and was loaded all the same")
    pending = [one for one in known if not one.settled]
    if is_global and any(one.tier == _GLOBAL for one in pending):
        return Judgement(distrusted=None, reason=f"{what} is the second one from the global tier to give one")
    if len(pending) >= MAX_OPEN:
        return Judgement(distrusted=None, reason=f"{len(pending)} other copies gave one before {what}")
    distance = f"{since} iteration{'' if since == 1 else 's'} after it was loaded"
    why = f"an invalid result at iteration {iteration}, {distance} from the {load.tier} tier in cycle {load.cycle}"
    distrusted = Distrusted(
        generation=load.generation,
        attempt=load.attempt,
        tier=load.tier,
        iteration=iteration,
        cycle=load.cycle,
        why=why,
        tainted=_tainted(load, loads),
    )
    scope = "it" if is_global else "its copies in memory, local tier and replicas"
    return Judgement(
        distrusted=distrusted, reason=f"{distance}, {what} is distrusted: {scope}, and what descends from it"
    )


def settle(known: Sequence[Distrusted], durable_iteration: int | None) -> tuple[Distrusted, ...]:
    """Return what is distrusted after a cycle whose end cast no doubt on what it had loaded.

    Args:
        known: What is distrusted.
        durable_iteration: The newest generation that the cycle committed; ``None`` = none.
    """
    return tuple(
        msgspec.structs.replace(one, settled=True)
        if durable_iteration is not None and durable_iteration > one.iteration
        else one
        for one in known
    )


def is_distrusted(copy: Copy, lineage: Mapping[str, str | None], distrusted: Iterable[Distrusted]) -> bool:
    """Return whether a copy led to invalid results, or descends from one that did.

    Args:
        copy: Some rank's copy of a generation.
        lineage: Attempt to the attempt that its processes had loaded; ``None`` = they had loaded nothing.
        distrusted: What is distrusted.
    """
    ancestors = list(_ancestry(copy.attempt, lineage))
    return any(_covers(one, copy, ancestors) for one in distrusted)


def is_doubtful(copy: Copy, distrusted: Iterable[Distrusted]) -> bool:
    """Return whether a near copy was saved by a cycle of which another near copy led to invalid results.

    Args:
        copy: Some rank's copy of a generation.
        distrusted: What is distrusted.
    """
    bad = {_cycle_of(one.attempt) for one in distrusted if one.tier != _GLOBAL}
    return copy.tier != Tier.GLOBAL and _cycle_of(copy.attempt) in bad


def encode_distrusted(distrusted: Sequence[Distrusted]) -> str:
    """Return a list as the text that workers are given."""
    return msgspec.json.encode(distrusted).decode()


def decode_distrusted(text: str | None) -> tuple[Distrusted, ...]:
    """Return the list that :func:`encode_distrusted` made text of; ``None`` = nothing is distrusted.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return from_json(text, tuple[Distrusted, ...]) if text else ()


def _covers(one: Distrusted, copy: Copy, ancestors: Sequence[str]) -> bool:
    if copy.attempt == one.attempt:
        return one.tier == _GLOBAL or copy.tier != Tier.GLOBAL
    if any(_cycle_of(attempt) in one.tainted for attempt in (copy.attempt, *ancestors) if attempt != one.attempt):
        return True
    return (one.tier == _GLOBAL or not one.tainted) and one.attempt in ancestors


def _ancestry(attempt: str, lineage: Mapping[str, str | None]) -> Iterable[str]:
    """Yield what an attempt descends from, nearest first, as far as it is known."""
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
