"""A lane: the way of saves to some of their tiers, in a thread of its own, in step with the same lane of all ranks.

There are two: :mod:`outlast.checkpoint.near_lane` (memory, local, replicas) and, behind it,
:mod:`outlast.checkpoint.dcp.global_lane`. What both need is here: the thread and its queue, the exchange between the
ranks, the claim to a directory, the outcome that all ranks share, and what follows a commit (tracker, retention,
sweeping up).

The ranks exchange keys of a store, never collectives: training's collectives and these messages cannot mix, and nobody
waits longer than its deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from outlast import clock
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.directory import Claim, Directory, DirectoryRefused
from outlast.checkpoint.places import Committed, Places
from outlast.checkpoint.protocol import CopyFailure
from outlast.checkpoint.save import Outcomes, PeerSilent, Save
from outlast.checkpoint.writer_client import WriterClient
from outlast.decoding import from_json
from outlast.errors import CheckpointError
from outlast.policy.checkpoint_plan import RetentionRules, choose_removed
from outlast.policy.recovery_point import Tier
from outlast.runtime.injection import reach

log = logging.getLogger(__name__)
GRACE_S = 10.0
"""Ranks wait this much longer for rank 0's messages than rank 0 does for theirs: better late than contradictory."""
POLL_S = 0.02
MAX_POLLING_RANKS = 1024
"""More ranks that wait for the same message look less often, so that the store has no more to answer."""
FAN_OUT = 16
"""Of the tree that answers are gathered by: 16,384 ranks are four levels, up to 17 ranks one."""
LEVEL_S = 1.0
"""Waits end this much later for each further level of the tree below: so the rank that is silent is named."""
T = TypeVar("T", bound=msgspec.Struct)
A = TypeVar("A", bound="RankAnswer")
G = TypeVar("G", bound="_Failable")


class _Failable(Protocol):
    """An answer that may be an error, which ends the save."""

    @property
    def error(self) -> str | None: ...


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank has of a save, or why it has nothing."""

    iteration: int
    error: str | None = None
    is_refused: bool = False
    """The error is that the directory is another run's."""


def check_answer(answer: A, rank: int, iteration: int) -> A:
    """Return a rank's answer. Raises: CheckpointError, when it has nothing, or another iteration."""
    if answer.iteration != iteration:
        raise CheckpointError(
            f"rank {rank} saves iteration {answer.iteration} meanwhile; all ranks must save the same ones"
        )
    if answer.error is not None:
        raise (DirectoryRefused if answer.is_refused else CheckpointError)(answer.error)
    return answer


class SaveOutcome(msgspec.Struct, frozen=True):
    """What became of a save, or of a node's part of it."""

    error: str | None = None
    is_silence: bool = False
    """A rank is gone, or did not answer in time."""
    is_refused: bool = False
    """The directory is another run's."""

    @classmethod
    def of(cls, error: Exception, text: str | None = None) -> SaveOutcome:
        """Return the outcome of a save that failed."""
        return cls(text or str(error), isinstance(error, PeerSilent), isinstance(error, DirectoryRefused))

    def failure(self, what: str, *, rank: int, iteration: int) -> CheckpointError:
        """Return the error of a save that failed."""
        if self.is_refused:
            return DirectoryRefused(self.error or what, rank=rank, iteration=iteration)
        kind = PeerSilent if self.is_silence else CheckpointError
        return kind(f"{what}: {self.error}", rank=rank, iteration=iteration)


class Subtree(msgspec.Struct, frozen=True, array_like=True):
    """What a rank, and those below it in the tree, have of a save."""

    answers: list[tuple[int, msgspec.Raw]]
    """Each with its rank; some are missing where one of them ends the save, or a rank is silent."""
    silence: str | None = None
    """Which rank below gave no answer in time."""


def shared_name(data: bytes) -> str:
    """Return the digest that names what many ranks have alike."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def children(place: int, num_places: int) -> range:
    """Return the places directly below a place of the tree."""
    return range(min(num_places, FAN_OUT * place + 1), min(num_places, FAN_OUT * (place + 1) + 1))


def child_above(place: int, top: int) -> int:
    """Return which of the places directly below ``top`` a place lies below, or is."""
    while (parent := (place - 1) // FAN_OUT) != top:
        place = parent
    return place


def num_levels(place: int, num_places: int) -> int:
    """Return how many levels of the tree are below a place."""
    levels = 0
    while (place := FAN_OUT * place + 1) < num_places:
        levels += 1
    return levels


class Reached(NamedTuple):
    """What a lane has done for a save."""

    tiers: frozenset[Tier]
    """Tiers that the save is committed to now and was not before."""
    failures: tuple[CopyFailure, ...] = ()
    """Copies on other nodes that failed."""
    next_lane: Lane | None = None
    """Which lane takes the save further; ``None``: the save is finished."""
    is_repeated: bool = False
    """An earlier save of the iteration went to all of these tiers, and to the next lane: see :class:`Save`."""


class Lane(ABC):
    """Take saves to some of their tiers, in their order.

    Args:
        places: Where, and who is there.
        rank: This rank.
        store: A connection to the ranks' store for this thread alone.
        writer: The writer process.
        timeout_s: Longest time from the beginning of a save to its outcome.
        claim: To the directory, on a rank that commits there; ``None`` = this rank commits in none.
        retention: What is kept of the directory's generations.
        outcomes: Is called in the lane's thread with what became of each save.
        next_lane: Takes saves further to the tiers that are not this lane's; ``None`` = there are none.

    Collective: all ranks, with the same saves in the same order.
    """

    name: ClassVar[str]
    """Of its thread and in the store."""
    _tier: ClassVar[Tier]
    """Whose generations the retention counts."""

    def __init__(
        self,
        places: Places,
        *,
        rank: int,
        store: Any,
        writer: WriterClient,
        timeout_s: float,
        claim: Claim | None,
        retention: RetentionRules,
        outcomes: Outcomes,
        next_lane: Lane | None = None,
    ) -> None:
        self._places, self._rank, self._world_size = places, rank, len(places.nodes)
        self._writer, self._timeout_s, self._next = writer, timeout_s, next_lane
        self._claim, self._retention, self._outcomes = claim, retention, outcomes
        self._committed = Committed()
        self._foreign: set[int] = set()
        self._must_sweep = True
        self._end_ns = 0
        """When the save under way has to be decided."""
        self._is_decided = True
        """Whether the outcome of the save under way is known, or other ranks cannot have committed it."""
        self._saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._store, self._is_store_lost = store, False
        self._posted: list[tuple[int, str]] = []
        """Keys of the store, by the ordinal of their save."""
        self._thread = threading.Thread(target=self._run, name=f"outlast-{self.name}", daemon=True)
        self._thread.start()  # it waits for the first save, which comes after the constructor

    def start_from(self, committed: Committed) -> None:
        """Count on these generations, and no others, as committed. Only before the first save."""
        self._committed = committed.copy()

    def has(self, save: Save) -> bool:
        """Return whether a save's iteration is known to be in all of its tiers. Thread: any."""
        return not self._missing(save)

    def _missing(self, save: Save) -> frozenset[Tier]:
        """Return those of a save's tiers that it is not in; what is saved for diagnosis lies beside the committed."""
        return save.tiers if save.suspect else self._committed.missing(save.iteration, save.tiers)

    def submit(self, save: Save) -> None:
        """Commit a save. Thread: any, but on all ranks in the same order."""
        self._saves.put(save)

    def stop(self, timeout_s: float) -> bool:
        """Give up what is not committed yet and end the thread; return whether it ended in time."""
        self._stop.set()
        self._saves.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (save := self._saves.get()) is not None:
            try:
                self._take(save)
            except Exception:  # such an error is not the save's, and the next save must be tried
                log.exception("reporting the save of iteration %d failed", save.iteration)

    def _take(self, save: Save) -> None:
        """Commit a save, report what became of it, and hand it on."""
        self._renew_store()
        try:
            reached = self._commit(save)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end saving without a report
            failure = error if isinstance(error, CheckpointError) else None
            if failure is None:
                text = f"saving iteration {save.iteration} failed: {type(error).__name__}: {error}"
                failure = CheckpointError(text, rank=self._rank, iteration=save.iteration)
            try:
                self._clear_up(save)
            finally:
                self._outcomes.failed(save, failure)
            return
        self._outcomes.committed(save, reached.tiers, reached.failures)
        if reached.next_lane is not None:
            reached.next_lane.submit(dataclasses.replace(save, is_repeated=reached.is_repeated))
        else:
            self._outcomes.finished(save)

    @abstractmethod
    def _commit(self, save: Save) -> Reached:
        """Commit one save to this lane's tiers, on all ranks. Raises: CheckpointError, the same on all ranks."""

    @abstractmethod
    def _clear_up(self, save: Save) -> None:
        """Remove what a failed save left, where the commit has not."""

    # -- between the ranks -------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        """Return the seconds left for the save under way."""
        return (self._end_ns - clock.now_ns()) / 1e9

    def _post(self, save: Save, name: str, value: msgspec.Struct) -> None:
        """Send all ranks something about a save. Raises: PeerSilent, when the ranks' store is gone."""
        key = self._store_key(save, name)
        with self._store_errors():
            self._store.set(key, msgspec.json.encode(value).decode())
        self._posted.append((save.attempt.ordinal, key))

    def _share(self, save: Save, value: msgspec.Struct) -> str:
        """Post what many ranks have alike, unless one of them has; return its digest, by which it can be received.

        Raises: PeerSilent, when the ranks' store is gone.
        """
        data = msgspec.json.encode(value)
        name = shared_name(data)
        claims, key = self._store_key(save, f"claims/{name}"), self._store_key(save, f"shared/{name}")
        with self._store_errors():
            if self._store.add(claims, 1) == 1:  # before its own answer: whoever has all answers finds it
                self._store.set(key, data.decode())
                self._posted += [(save.attempt.ordinal, claims), (save.attempt.ordinal, key)]
        return name

    def _receive(self, save: Save, name: str, kind: type[T], *, grace_s: float = 0.0, poll_s: float = POLL_S) -> T:
        """Return what a rank posted.

        Args:
            save: What it is about.
            name: As given to :meth:`_post`, by whichever rank.
            kind: Type of the value.
            grace_s: Seconds to wait beyond the save's deadline.
            poll_s: Longest pause between two looks.

        Raises:
            PeerSilent: Nothing was posted in time, or the ranks' store is gone.
            CheckpointError: This rank leaves.
        """
        self._wait_for(save, name, grace_s=grace_s, poll_s=poll_s)
        with self._store_errors():
            word = bytes(self._store.get(self._store_key(save, name)))
        try:
            return from_json(word, kind)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"what a rank posted of the save ({name}) is malformed: {error}") from error

    def _wait_for(self, save: Save, *names: str, grace_s: float = 0.0, poll_s: float = POLL_S) -> str:
        """Return the first of these names under which something was posted; see :meth:`_receive`."""
        end_s, pause_s = clock.now_s() + self._left_s() + grace_s, 0.001
        while True:
            is_late = clock.now_s() >= end_s
            for name in names:
                with self._store_errors():
                    if self._store.check([self._store_key(save, name)]):
                        return name
            if is_late:
                raise PeerSilent(
                    f"iteration {save.iteration}: no answer ({names[0]}) after {self._timeout_s:g} s (save_timeout); "
                    "see the log of that rank",
                    rank=self._rank,
                    iteration=save.iteration,
                )
            if self._stop.wait(pause_s):
                raise CheckpointError(
                    f"the save of iteration {save.iteration} is abandoned: this rank is closing",
                    rank=self._rank,
                    iteration=save.iteration,
                )
            pause_s = min(poll_s, 2 * pause_s)

    @staticmethod
    def _poll_s(num_ranks: int) -> float:
        """Return the longest pause between two looks of ranks that all wait for one message."""
        return POLL_S * max(1.0, num_ranks / MAX_POLLING_RANKS)

    def _gather_up(
        self, save: Save, name: str, mine: G, members: Sequence[int], *, waits_for_all: bool = False
    ) -> list[tuple[int, G]]:
        """Gather answers by a tree: each rank passes on what it has from those below it, in one message.

        An answer with an error is passed on at once, without those that are still missing: it ends the save.

        Args:
            save: What it is about.
            name: Of the gather.
            mine: This rank's answer.
            members: Who takes part, this rank too; the first is the root.
            waits_for_all: Wait for all answers, also after an error or a silence.

        Returns:
            On the root, the members' answers by rank, all or some with an error among them; nothing elsewhere.

        Raises:
            PeerSilent: On the root: a rank did not answer in time, or the ranks' store is gone.
            CheckpointError: This rank leaves.

        Collective: all members.
        """
        place = members.index(self._rank)
        known: list[tuple[int, G]] = [(self._rank, mine)]
        silence, grace_s = None, LEVEL_S * (num_levels(place, len(members)) - 1)
        for child in children(place, len(members)):
            has_failed = silence is not None or any(answer.error is not None for _, answer in known)
            if has_failed and not waits_for_all:
                break
            try:
                subtree = self._receive(save, f"{name}/{members[child]}", Subtree, grace_s=grace_s)
            except PeerSilent as error:
                silence = silence or str(error)
                continue
            known += [(rank, from_json(data, type(mine))) for rank, data in subtree.answers]
            silence = silence or subtree.silence
        if place == 0:
            if silence is not None and all(answer.error is None for _, answer in known):
                raise PeerSilent(silence, rank=self._rank, iteration=save.iteration)
            return sorted(known, key=lambda one: one[0])
        packed = [(rank, msgspec.Raw(msgspec.json.encode(answer))) for rank, answer in known]
        self._post(save, f"{name}/{self._rank}", Subtree(packed, silence))
        return []

    def _conclude(self, save: Save, what: str) -> None:
        """Wait for the outcome that rank 0 posts. Raises: CheckpointError, when the save failed."""
        outcome = self._receive(save, "outcome", SaveOutcome, grace_s=GRACE_S, poll_s=self._poll_s(self._world_size))
        self._is_decided = True
        if outcome.is_refused:
            self._part(save)
        if outcome.error is not None:
            raise outcome.failure(what, rank=self._rank, iteration=save.iteration)
        self._forget(save.attempt.ordinal)

    def _part(self, save: Save) -> None:
        """Acknowledge the outcome of a save after which ranks leave.

        Rank 0, which may host the store, waits up to ``GRACE_S`` for all others, so that none of them finds it gone.
        """
        self._end_ns = clock.now_ns() + int(GRACE_S * 1e9)
        with contextlib.suppress(CheckpointError):  # the outcome is what counts
            self._gather_up(save, "acknowledged", SaveOutcome(), range(self._world_size), waits_for_all=True)

    def _forget(self, before: int) -> None:
        """Delete what this rank posted about earlier saves: all ranks have taken part in a later one since."""
        try:
            for ordinal, key in self._posted:
                if ordinal < before:
                    self._store.delete_key(key)
        except RuntimeError as error:
            log.debug("the store is gone, with all that was posted there: %s", error)
        self._posted = [(ordinal, key) for ordinal, key in self._posted if ordinal >= before]

    def _renew_store(self) -> None:
        """Connect to the ranks' store again if the last save lost the connection.

        Not while this rank leaves: the store may be gone, and then nothing can end the wait for a connection.
        """
        if not self._is_store_lost or self._stop.is_set() or self._outcomes.is_call_left:
            return
        try:
            self._store, self._is_store_lost = self._store.clone(), False
        except (AttributeError, RuntimeError) as error:
            log.warning("the ranks' store cannot be reached again (%s); saves fail until it can", error)

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise the errors of a store whose host is gone as PeerSilent."""
        try:
            yield
        except RuntimeError as error:  # torch's DistNetworkError and others
            self._is_store_lost = True
            what = (str(error).splitlines() or [type(error).__name__])[0]
            raise PeerSilent(
                f"rank 0, which hosts the ranks' store, is gone ({what}); see the log of that rank"
            ) from None

    def _store_key(self, save: Save, name: str) -> str:
        return f"outlast/checkpoint/{self._places.token}/{self.name}/{save.attempt.ordinal}/{name}"

    # -- after a commit ----------------------------------------------------------------------------------------

    def _follow_up(self, save: Save, place: Directory | GlobalDirectory) -> None:
        """Move the tracker, remove old generations and stale files; none of it can undo the commit."""
        try:
            if not save.suspect:
                self._committed.add(save.iteration, frozenset({self._tier}))
                reach("checkpoint.tracker", attempt=str(save.attempt))
                place.point_to(save.iteration)
                self._remove_old(save, place)
            if self._must_sweep:
                if removed := place.remove_stale(save.attempt):
                    log.debug("removed files of earlier attempts: %s", ", ".join(removed))
                self._must_sweep = not place.is_remote  # a store charges for listings
        except (CheckpointError, OSError) as error:
            log.warning("iteration %d is committed, but cleaning up failed: %s", save.iteration, error)

    def _remove_old(self, save: Save, place: Directory | GlobalDirectory) -> None:
        assert self._claim is not None  # whoever commits in a place has one
        removed = choose_removed(
            place.generations(),
            self._committed.generations(self._tier),
            committed=save.iteration,
            rules=self._retention,
            not_finite=self._committed.not_finite,
        )
        foreign = {generation for generation in removed if not place.is_own(generation)}
        for generation in sorted(foreign - self._foreign):
            log.warning("%s/step-%d is not a checkpoint of outlast: it is never removed", place.url, generation)
        self._foreign |= foreign
        removed = [generation for generation in removed if generation not in foreign]
        self._claim.retire(removed)
        for generation in removed:
            log.debug("removed generation %d from %s", generation, place.url)
