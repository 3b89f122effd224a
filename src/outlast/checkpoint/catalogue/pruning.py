"""Which generations and leftovers of a place may go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from outlast.checkpoint.catalogue.entries import DirectoryListing, Leftover, ListedGeneration, ListedLeftover
from outlast.errors import Corrupt, Incomplete
from outlast.policy.checkpoint_plan import choose_kept

__all__ = ["Plan", "Rule", "plan_pruning"]

_ATTEMPT = re.compile(r"(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is to be kept."""

    most_recent_k: int | None = None
    """Newest valid generations to keep; -1 = all; ``None`` = no generation goes."""
    retain_interval: int = 0
    suspect_window: int = 0
    suspects: bool = False
    """Whether saves for diagnosis go."""
    leftovers: bool = False
    """Whether what is no generation goes, as far as nobody can be using it."""
    older_than_s: float = 86400.0
    """Age from which a leftover of unknown owner is taken for abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes; nothing is deleted yet."""

    generations: tuple[ListedGeneration, ...]
    remains: tuple[ListedLeftover, ...]

    @property
    def num_bytes(self) -> int:
        """What deleting it gives back."""
        return sum(found.entry.num_bytes for found in self.generations) + sum(
            remains.entry.num_bytes for remains in self.remains
        )


def plan_pruning(looked: DirectoryListing, rule: Rule, *, now_ns: int) -> Plan:
    """Choose what goes.

    Of the generations older than the newest valid one: the valid ones that the retention does not keep and the tracker
    does not name, and those that are torn. The newest valid one stays in any case, and so does whatever is newer: it
    may be in use. What cannot be read or trusted stays too: it may be another's, or come back with its disk. Without a
    valid generation none goes.

    Args:
        looked: What lies there.
        rule: What is to be kept.
        now_ns: Nanoseconds since the epoch, as files' times are.
    """
    committed = [found for found in looked.found if not found.entry.suspect]
    valid = [found.entry.iteration for found in committed if found.entry.valid]
    generations: list[ListedGeneration] = []
    if rule.most_recent_k is not None and valid:
        kept = choose_kept(
            valid,
            most_recent_k=rule.most_recent_k,
            retain_interval=rule.retain_interval,
            suspect_window=rule.suspect_window,
            not_finite=[found.entry.iteration for found in committed if found.entry.finite is False],
        ) | {looked.entry.latest}
        generations = [
            found
            for found in committed
            if found.entry.iteration < max(valid)
            and (found.entry.iteration not in kept if found.entry.valid else _is_torn(found))
        ]
    if rule.suspects:
        generations += [found for found in looked.found if found.entry.suspect]
    attempts = [found.entry.attempt for found in looked.found if found.entry.attempt is not None]
    remains = [
        one
        for one in looked.remains
        if rule.leftovers and _is_abandoned(one.entry, attempts, now_ns - int(rule.older_than_s * 1e9))
    ]
    return Plan(generations=tuple(generations), remains=tuple(remains))


def _is_torn(found: ListedGeneration) -> bool:
    """Return whether a generation that is not valid is torn for certain."""
    torn = (Incomplete.__name__, Corrupt.__name__)
    return bool(found.entry.problems) and all(problem.kind in torn for problem in found.entry.problems)


def _is_abandoned(leftover: Leftover, attempts: Iterable[str], before_ns: int) -> bool:
    """Return whether nobody can be using a leftover: a deletion's remains, an attempt that a later one of the same
    processes or a later cycle of the same job has outlived, or what nobody touched for long."""
    if leftover.kind == "deletion" or (leftover.modified_ns is not None and leftover.modified_ns < before_ns):
        return True
    mine = _ATTEMPT.fullmatch(leftover.attempt or "")
    if mine is None:
        return False
    for match in filter(None, map(_ATTEMPT.fullmatch, attempts)):
        if match["job"] != mine["job"]:
            continue
        if match["token"] == mine["token"]:
            if int(mine["ordinal"]) < int(match["ordinal"]):
                return True
        elif int(mine["cycle"]) < int(match["cycle"]):
            return True
    return False
