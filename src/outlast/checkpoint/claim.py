"""A run's claim to a directory: made once, atomically, and compared at every save. Nothing here imports torch.

Whose a directory is, ``policy.directory_owner`` says; here it is asked, and ``run.json`` is read and written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from outlast.decoding import from_json
from outlast.errors import Untrusted
from outlast.policy.lease import ClaimStep, DirectoryRun, find_owner, judge_claim

__all__ = [
    "NEW",
    "RUN",
    "Claim",
    "ClaimedPlace",
    "DirectoryContent",
    "DirectoryRefused",
    "Held",
    "decode_hint",
    "encode_hint",
    "look_at",
    "owner_of",
]

RUN = "run.json"
"""Names the run that a directory belongs to; a hint, since it has no digest."""
MAX_TRIES = 3
"""To be the first in a directory where others try, too."""


class DirectoryRefused(Untrusted):
    """The directory is another run's: no save of this run can go there, now or later."""


class ClaimedPlace(Protocol):
    """A folder of the local tier, or the global tier."""

    @property
    def url(self) -> str: ...

    def generations(self) -> list[int]: ...

    def hint(self) -> str | None: ...

    def named_runs(self) -> Iterator[str]: ...

    def create_hint(self, run: str) -> bool: ...

    def write_hint(self, run: str) -> None: ...


class Held(Protocol):
    """A lease on a directory."""

    def hold(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DirectoryContent:
    """What lay in a directory when a run began: nothing, unless it is said."""

    hint: str | None = None
    generations: tuple[int, ...] = ()


NEW = DirectoryContent()
"""An empty directory."""


class _RunHint(msgspec.Struct, frozen=True):
    run: str


def encode_hint(run: str) -> bytes:
    """Return the content of ``run.json``."""
    return msgspec.json.encode(_RunHint(run))


def decode_hint(data: bytes) -> str | None:
    """Return the run that ``run.json`` names; ``None``: it cannot be read."""
    try:
        return from_json(data, _RunHint).run or None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def look_at(place: ClaimedPlace) -> DirectoryContent:
    """Return what lies in a directory. Raises: CheckpointError, OSError."""
    return DirectoryContent(place.hint(), tuple(place.generations()))


def owner_of(place: ClaimedPlace) -> DirectoryRun | None:
    """Return the run that a directory belongs to, by its manifests and hint; ``None`` = nobody's.

    Raises:
        CheckpointError: A store does not answer.
    """
    return find_owner(place.hint(), place.named_runs())


class Claim:
    """A run's right to save into a directory.

    Args:
        place: The directory.
        run: The run.
        seen: What lay there when the run began; ``None`` = that is not known.
        lease: Keeps other living writers away; ``None`` = nothing does.

    Thread: one.
    """

    def __init__(self, place: ClaimedPlace, run: str, seen: DirectoryContent | None, lease: Held | None = None) -> None:
        self._place, self._run, self._seen, self._lease = place, run, seen, lease
        self._left: Counter[str] | None = None
        self.is_held = False
        """Whether the directory was this run's when it was last looked at."""

    def hold(self) -> None:
        """Make the claim, or compare it with what lies there now; a hint that is lost or wrong is written again.

        Raises:
            DirectoryRefused: The directory is another run's.
            CheckpointError: A store does not answer.
            OSError: A folder cannot be written to.
        """
        if self._lease is not None:
            self._lease.hold()
        for _ in range(MAX_TRIES):
            if self._place.hint() == self._run and self.is_held and self._is_as_left():
                return
            if self._take():
                self.is_held = True
                return
        self._place.write_hint(self._run)  # what is there is no claim: it cannot be read
        self.is_held = True

    def _is_as_left(self) -> bool:
        """Return whether a run whose claim was taken over has committed nothing since; it may have been about to."""
        if self._left is None:
            return True
        runs = Counter(self._place.named_runs())
        if self._run in runs:
            self._left = None  # a manifest proves this run: others look at that
            return True
        return runs <= self._left

    def _take(self) -> bool:
        """Do what is to be done; return whether the directory is this run's now."""
        seen = look_at(self._place)
        owner = find_owner(seen.hint, self._place.named_runs(), own=self._run)
        step = judge_claim(self._run, owner, seen.hint, is_unchanged=not self.is_held and seen == self._seen)
        if step is ClaimStep.CREATE:
            return self._place.create_hint(self._run)
        if step is ClaimStep.WRITE:
            if owner is not None and owner.run != self._run:
                self._left = Counter(self._place.named_runs())
                if look_at(self._place) != seen:
                    return False  # it changed meanwhile
            self._place.write_hint(self._run)
        elif step is ClaimStep.REFUSE:
            assert owner is not None
            self.is_held = False
            raise DirectoryRefused(
                f"{self._place.url} belongs to run {owner.run}, which saves there; this training is run {self._run} "
                "and saves nothing there; give it a directory of its own"
            )
        return True
