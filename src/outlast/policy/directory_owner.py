"""Whose a directory of generations is, and whether a run may save there.

Every manifest names its run under its own digest. The file ``run.json`` beside them is a hint without a digest: it says
which of several runs is meant, and it is the claim of a run that has committed nothing yet. So a hint that is lost,
torn or changed costs nothing, and of two runs that begin in one empty directory one gets it: who makes the file.

A run looks at a directory when it begins, and takes its name over if a manifest there proves one; a hint alone proves
nothing, since who wrote it may be gone. At every save it compares again:

* The directory is its own: it goes on, and mends the hint if need be.
* It is nobody's: it makes the hint, which one of several can.
* It is another run's, and nothing has changed since this run began beside it (a dead run's hint, or what another run
  left on a node's disk): it takes it over.
* It is another run's, which has come since: it is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

import msgspec

__all__ = ["ClaimStep", "DirectoryRun", "RunEvidence", "choose_run", "find_owner", "judge_claim"]


@dataclass(frozen=True, slots=True)
class DirectoryRun:
    """The run that a directory belongs to."""

    run: str
    is_proven: bool
    """A manifest names it; otherwise nothing but the hint does."""


class RunEvidence(msgspec.Struct, frozen=True, array_like=True):
    """What one place says of the run that it belongs to."""

    hint: str | None = None
    """The run that ``run.json`` names."""
    run: str | None = None
    """The run that its manifests name; see :func:`find_owner`."""
    iteration: int = 0
    """Of its newest generation."""

    def choose(self, proven: Collection[str]) -> str | None:
        """Return the run that it names, given those that any place's manifests name."""
        return self.hint if self.hint in proven else self.run


class ClaimStep(Enum):
    """What a run does before it saves into a directory."""

    HOLD = "hold"
    """Go on: it is its own."""
    WRITE = "write"
    """Write the hint, in place of what is there."""
    CREATE = "create"
    """Make the hint, unless another run is quicker."""
    REFUSE = "refuse"
    """Save nothing: it is another run's."""


def find_owner(hint: str | None, runs: Iterable[str], *, own: str | None = None) -> DirectoryRun | None:
    """Return the run that a directory belongs to; ``None`` = nobody's.

    Args:
        hint: The run that ``run.json`` names; ``None``: it is not there, or cannot be read.
        runs: The runs that manifests name, newest generation first. No more are taken than are needed.
        own: The run that looks, when it has saved there or may have: where the hint names none of the runs, it is
            the directory's if a manifest names it.
    """
    found = list[str]()
    for run in runs:
        if run == hint or (hint is None and own in (None, run)):
            return DirectoryRun(run, is_proven=True)
        found.append(run)
    if found:
        return DirectoryRun(own if own is not None and own in found else found[0], is_proven=True)
    return DirectoryRun(hint, is_proven=False) if hint is not None else None


def judge_claim(run: str, owner: DirectoryRun | None, hint: str | None, *, is_unchanged: bool) -> ClaimStep:
    """Say what a run does before it saves into a directory.

    Args:
        run: The run.
        owner: Whose the directory is.
        hint: The run that ``run.json`` names.
        is_unchanged: The directory is what it was when the run began, which took another name than its owner's.
    """
    if owner is None:
        return ClaimStep.CREATE
    if owner.run == run:
        return ClaimStep.HOLD if hint == run else ClaimStep.WRITE
    return ClaimStep.WRITE if is_unchanged else ClaimStep.REFUSE


def choose_run(global_place: RunEvidence | None, near_places: Iterable[RunEvidence]) -> str | None:
    """Return the run that ranks go on with, whose places may name different ones.

    A hint counts if a manifest names the same run, in whichever place: a manifest that is not the run's, the last that
    can be read in its place, does not decide against all others. A node that took another's place may bring what an
    older run left there.

    Args:
        global_place: What the global tier says.
        near_places: What each node's memory and folder say; a place counts as often as it is given.

    Returns:
        The global tier's run, else what most places name, else what is newest; ``None`` = it is a new one.
    """
    near = list(near_places)
    proven = {place.run for place in (global_place, *near) if place is not None and place.run is not None}
    if global_place is not None and (run := global_place.choose(proven)) is not None:
        return run
    named = [(run, place.iteration) for place in near if (run := place.choose(proven)) is not None]
    count = Counter(run for run, _ in named)
    newest = {run: max(iteration for other, iteration in named if other == run) for run in count}
    return max(count, key=lambda run: (count[run], newest[run], run), default=None)
