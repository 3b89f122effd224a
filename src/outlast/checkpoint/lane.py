"""A lane writes saves to some of their tiers, in a separate thread, in step with the same lane of all ranks.

:class:`~outlast.checkpoint.node_lanes.MemoryLane` gets every save first and passes it on to
:class:`~outlast.checkpoint.node_lanes.LocalLane` and :class:`~outlast.checkpoint.dcp.global_lane.GlobalLane`, which do
not wait for each other. All share the thread, the exchange between the ranks, the claim to a directory, the outcome,
which is the same on all ranks, and the work after a commit (tracker, retention, cleaning up).

The latter two are :class:`RetryingLane`: their tier may be slow, full or unavailable for hours, and training must not
wait for it. Such a lane writes one save at a time, in turns that rank 0 begins, and queues at most the newest other one
(a save that ``save_retain_interval`` retains is replaced only by another of these). A failed save is retried until a
newer one replaces it. A turn has no time limit on ranks other than 0: a rank that decided by itself could count a save
as failed that rank 0 commits. Rejected: a queue of all saves, which needs memory for each; and a time limit that ends a
turn everywhere, which needs synchronised clocks.

The ranks exchange keys of a store, never collectives: training's collectives and these messages cannot mix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import msgspec

from outlast import clock
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.directory import Claim, ClaimedPlace, DirectoryRefused
from outlast.checkpoint.outcomes import Outcomes
from outlast.checkpoint.places import Committed, Places
from outlast.checkpoint.replica.client import CopyOutcome
from outlast.checkpoint.save import PeerSilent, Replaced, Save
from outlast.checkpoint.writer_client import WriterClient
from outlast.decoding import from_json
from outlast.errors import CheckpointError
from outlast.policy.checkpoint_plan import RetentionRules, choose_removed
from outlast.policy.recovery_point import Tier
from outlast.runtime.injection import reach

log = logging.getLogger(__name__)
GRACE_S = 10.0
"""Seconds that ranks wait for rank 0's messages longer than rank 0 waits for theirs, so that outcomes agree."""
POLL_S = 0.02
MAX_POLL_S = 1.0
"""Longest pause between two checks of a wait without a time limit."""
POLL_SHARE = 0.02
"""Pause of such a wait, as a share of the time waited so far."""
RENEW_S = 3.0
"""Seconds in which the ranks' store has to be reached again."""
RETRY_S = 5.0
"""Seconds before the first retry of a save; doubled for each further one."""
MAX_RETRY_S = 60.0
MAX_POLLING_RANKS = 1024
"""More ranks waiting for one message poll less often, to limit the load of the store."""
FAN_OUT = 16
"""Children per node of the tree that gathers messages: 16,384 ranks are four levels, up to 17 ranks one."""
LEVEL_S = 1.0
"""Seconds that waits are longer for each level of the tree below, so that the silent rank itself is identified."""
T = TypeVar("T", bound=msgspec.Struct)
A = TypeVar("A", bound="RankAnswer")
G = TypeVar("G", bound="SaveOutcome")


class Unstaged(CheckpointError):
    """A rank has staged nothing of a save, so the save is not retried."""


_KINDS = {kind.__name__: kind for kind in (PeerSilent, DirectoryRefused, Unstaged, Replaced)}
"""Error classes that the other ranks have to distinguish."""


class SaveOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    error: str | None = None
    kind: str = ""
    """Name of the error's class, if in :data:`_KINDS`."""
    lacks_copies: bool = False
    """The save is committed, but some rank has no copy on another node."""

    @classmethod
    def of(cls, error: Exception, text: str | None = None, **fields: Any) -> Self:
        kind = type(error).__name__
        return cls(error=text or str(error), kind=kind if kind in _KINDS else "", **fields)

    def failure(self, text: str, *, rank: int | None = None, iteration: int | None = None) -> CheckpointError:
        return _KINDS.get(self.kind, CheckpointError)(text, rank=rank, iteration=iteration)


class RankAnswer(SaveOutcome, frozen=True, kw_only=True, omit_defaults=True):
    iteration: int


class Turn(msgspec.Struct, frozen=True):
    ordinal: int
    iteration: int
    retry: int
    is_committed: bool = False


class Subtree(msgspec.Struct, frozen=True, array_like=True):
    """Messages of a rank and its descendants in the tree."""

    answers: list[tuple[int, msgspec.Raw]]
    """With their ranks; incomplete after an error or a timeout."""
    silence: str | None = None


def shared_name(data: bytes) -> str:
    """Return the digest that names a value which many ranks share."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def children(place: int, num_places: int) -> range:
    return range(min(num_places, FAN_OUT * place + 1), min(num_places, FAN_OUT * (place + 1) + 1))


def child_above(place: int, top: int) -> int:
    """Return the child of ``top`` that ``place`` is, or descends from."""
    while (parent := (place - 1) // FAN_OUT) != top:
        place = parent
    return place


def num_levels(place: int, num_places: int) -> int:
    levels = 0
    while (place := FAN_OUT * place + 1) < num_places:
        levels += 1
    return levels


class Reached(NamedTuple):
    tiers: frozenset[Tier]
    """Tiers that the save is committed to now and was not before."""
    failures: tuple[CopyOutcome, ...] = ()


class Lane(ABC):
    """Writes saves to some of their tiers, in order.

    Args:
        timeout_s: Longest time from the beginning of a save to its outcome.
        claim: Claim to the directory, on a rank that commits there; ``None`` elsewhere.
        outcomes: Called in the lane's thread with the outcome of each save.
        next_lanes: Each gets the saves that go to its tiers, once this lane has committed or failed them.

    Collective: all ranks, with the same saves in the same order.
    """

    name: ClassVar[str] = ""
    _tier: ClassVar[Tier]
    """Tier whose checkpoints the retention counts."""
    tiers: frozenset[Tier]
    """Tiers that the lane commits to."""

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
        next_lanes: Sequence[Lane] = (),
    ) -> None:
        self._places, self._rank, self._world_size = places, rank, len(places.nodes)
        self._writer, self._timeout_s, self._next_lanes = writer, timeout_s, next_lanes
        self._claim, self._retention, self._outcomes = claim, retention, outcomes
        self._committed = Committed()
        self._foreign: set[int] = set()
        self._must_sweep = True
        self._end_ns = 0
        self._is_decided = True
        """Whether the outcome of the current save is known, or other ranks cannot have committed it."""
        self._turn = 0
        """Number of the turn, part of the messages' keys."""
        self._stop = threading.Event()
        self._store, self._is_store_lost, self._was_unreachable = store, False, False
        self._posted: list[tuple[int, str]] = []
        self._open()
        self._thread = threading.Thread(target=self._run, name=f"outlast-{self.name}", daemon=True)
        self._thread.start()  # it waits for the first save, which comes after the constructor

    @abstractmethod
    def _open(self) -> None:
        """Create what the thread needs."""

    def start_from(self, committed: Committed) -> None:
        self._committed = committed.copy()

    def has(self, save: Save) -> bool:
        """Return whether a save is in all of its tiers that belong to this lane. Thread: any."""
        return not self._missing(save)

    def takes(self, save: Save) -> bool:
        return bool(save.tiers & self.tiers)

    def _missing(self, save: Save) -> frozenset[Tier]:
        """Return those of its tiers that a save is not in; saves for diagnosis do not count as committed."""
        wanted = save.tiers & self.tiers
        return wanted if save.suspect else self._committed.missing(save.iteration, wanted)

    def _wanted(self, save: Save) -> frozenset[Tier]:
        """Return the tiers to which the save of this turn is to be committed; the same on all ranks."""
        return self._missing(save)

    @abstractmethod
    def submit(self, save: Save) -> None:
        """Queue a save. Thread: any, but on all ranks in the same order."""

    def stop(self, timeout_s: float) -> bool:
        self._stop.set()
        self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _where(self) -> str:
        """Return the tier and its place, for people."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake the thread."""

    def _run(self) -> None:
        while (save := self._next()) is not None:
            try:
                self._take(save)
            except Exception:  # not an error of the save; the next save must be tried
                log.exception("reporting the save of iteration %d failed", save.iteration)
            self._turn += 1

    @abstractmethod
    def _next(self) -> Save | None:
        """Return the next save; ``None`` = the lane is stopping. Blocks: until there is one."""

    def _take(self, save: Save) -> None:
        self._renew_store()
        self._outcomes.late.begin(self.name, save.iteration, self._describe_folder(self._rank))
        try:
            reached = self._commit(save)
        except Exception as error:  # noqa: BLE001 - no error may end saving without a report
            if not isinstance(error, CheckpointError):
                text = f"saving iteration {save.iteration} failed: {type(error).__name__}: {error}"
                error = self._error(save, text)
            try:
                # While the outcome is unknown, others may have committed, and load this rank's part.
                if self._is_decided and not self._stop.is_set():
                    self._clear_up(save)
            finally:
                self._fail(save, error)
            return
        self._succeed(save, reached)

    def _succeed(self, save: Save, reached: Reached) -> None:
        self._outcomes.committed(save, self.name, reached.tiers, reached.failures)
        self._hand_on(save)

    def _fail(self, save: Save, error: CheckpointError) -> None:
        self._outcomes.failed(save, self.name, error)
        if isinstance(error, Unstaged):
            for lane in self._next_lanes:
                if lane.takes(save):
                    self._outcomes.failed(save, lane.name, error)
        else:
            self._hand_on(save)

    def _error(self, save: Save, text: str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
        return kind(text, rank=self._rank, iteration=save.iteration)

    def _closing(self, save: Save) -> CheckpointError:
        return self._error(save, f"the save of iteration {save.iteration} is abandoned: this rank is closing")

    def _hand_on(self, save: Save) -> None:
        for lane in self._next_lanes:
            if lane.takes(save):
                lane.submit(save)

    @abstractmethod
    def _commit(self, save: Save) -> Reached:
        """Commit one save to this lane's tiers. Collective. Raises: CheckpointError, the same on all ranks."""

    @abstractmethod
    def _clear_up(self, save: Save) -> None:
        """Remove the files of a failed save."""

    @staticmethod
    def _check_staged(save: Save) -> Arena:
        """Return the memory of a save, once it is fully copied. Raises: Unstaged, or Replaced by a newer save."""
        if save.arena is None:
            raise (Replaced if save.is_replaced else Unstaged)(save.error or "nothing was staged")
        if save.guard is not None:
            try:
                save.guard()
            except CheckpointError as error:
                raise Unstaged(str(error)) from error
        return save.arena

    # -- between the ranks -------------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        self._end_ns = clock.now_ns() + int(self._timeout_s * 1e9)

    def _left_s(self) -> float:
        return (self._end_ns - clock.now_ns()) / 1e9

    def post(self, name: str, value: msgspec.Struct) -> None:
        """Post a message about a save. Raises: PeerSilent, when the ranks' store is gone."""
        key = self._store_key(name)
        with self._store_errors():
            self._store.set(key, msgspec.json.encode(value).decode())
        self._posted.append((self._turn, key))

    def _share(self, value: msgspec.Struct) -> str:
        """Post a value that many ranks share, once; return its digest, by which it can be received.

        Raises: PeerSilent, when the ranks' store is gone.
        """
        data = msgspec.json.encode(value)
        name = shared_name(data)
        claims, key = self._store_key(f"claims/{name}"), self._store_key(f"shared/{name}")
        with self._store_errors():
            if self._store.add(claims, 1) == 1:  # before this rank's message
                self._store.set(key, data.decode())
                self._posted += [(self._turn, claims), (self._turn, key)]
        return name

    def receive(
        self,
        save: Save,
        name: str,
        kind: type[T],
        *,
        grace_s: float = 0.0,
        poll_s: float = POLL_S,
        is_limited: bool = True,
    ) -> T:
        """Return a message posted in this turn.

        Args:
            grace_s: Seconds to wait beyond the save's deadline.
            is_limited: Wait until the deadline; otherwise until this lane stops, see :class:`RetryingLane`.

        Raises:
            PeerSilent: Nothing was posted in time, or the ranks' store is gone.
            CheckpointError: This lane stops.
        """
        self._wait_for(save, name, grace_s=grace_s, poll_s=poll_s, is_limited=is_limited)
        with self._store_errors():
            word = bytes(self._store.get(self._store_key(name)))
        try:
            return from_json(word, kind)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"what a rank posted of the save ({name}) is malformed: {error}") from error

    def _wait_for(
        self,
        save: Save,
        *names: str,
        grace_s: float = 0.0,
        poll_s: float = POLL_S,
        is_limited: bool = True,
    ) -> str:
        """Return the first of these names under which a message was posted; see :meth:`receive`."""
        begin_s, pause_s, is_reported = clock.now_s(), 0.001, False
        end_s = begin_s + self._left_s() + grace_s
        while True:
            now_s = clock.now_s()
            is_late = now_s >= end_s
            for name in names:
                with self._store_errors():
                    if self._store.check([self._store_key(name)]):
                        return name
            if is_late and not is_reported:
                text = (
                    f"iteration {save.iteration}: no response ({names[0]}) after {self._timeout_s:g} s (save_timeout)"
                )
                silence = self._error(save, f"{text}; see the log of that rank", PeerSilent)
                if is_limited:
                    raise silence
                is_reported = True
                self._outcomes.failed(save, self.name, silence, is_retried=True)
            if self._stop.wait(pause_s):
                raise self._closing(save)
            longest_s = poll_s if is_limited else max(poll_s, min(MAX_POLL_S, POLL_SHARE * (now_s - begin_s)))
            pause_s = min(longest_s, 2 * pause_s)

    @staticmethod
    def poll_pause_s(num_ranks: int) -> float:
        return POLL_S * max(1.0, num_ranks / MAX_POLLING_RANKS)

    def _gather_up(
        self, save: Save, name: str, mine: G, members: Sequence[int], *, waits_for_all: bool = False
    ) -> list[tuple[int, G]]:
        """Gather messages by a tree: each rank posts its own and its descendants' together.

        A rank with an error posts at once, without waiting for the rest, since an error ends the save.

        Args:
            members: Participating ranks, including this one; the first is the root.

        Returns:
            On the root, the members' messages by rank: all, or some including an error. Elsewhere an empty list.

        Raises:
            PeerSilent: On the root: a rank did not respond in time, or the ranks' store is gone.
            CheckpointError: This lane stops.

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
                self._outcomes.late.wait_for(self.name, self._describe_folder(members[child]))
                subtree = self.receive(save, f"{name}/{members[child]}", Subtree, grace_s=grace_s)
            except PeerSilent as error:
                silence = silence or str(error)
                continue
            known += [(rank, from_json(data, type(mine))) for rank, data in subtree.answers]
            silence = silence or subtree.silence
        self._outcomes.late.wait_for(self.name, self._describe_folder(self._rank))
        if place == 0:
            if silence is not None and all(answer.error is None for _, answer in known):
                raise self._error(save, silence, PeerSilent)
            return sorted(known, key=lambda one: one[0])
        packed = [(rank, msgspec.Raw(msgspec.json.encode(answer))) for rank, answer in known]
        self.post(f"{name}/{self._rank}", Subtree(packed, silence))
        return []

    def _gather_answers(self, save: Save, name: str, mine: A, *, waits_for_all: bool = False) -> list[A]:
        """Gather all ranks' messages, see :meth:`_gather_up`. Raises: CheckpointError, if a rank reports an error."""
        gathered = self._gather_up(save, name, mine, range(self._world_size), waits_for_all=waits_for_all)
        for rank, answer in gathered:
            if answer.iteration != save.iteration:
                raise CheckpointError(
                    f"rank {rank} saves iteration {answer.iteration} meanwhile; all ranks must save the same ones"
                )
            if answer.error is not None:
                raise answer.failure(answer.error)
        return [answer for _, answer in gathered]

    def _hold_claim(self) -> None:
        """Check that the directory is this run's, before data is written and before the commit. Raises:
        DirectoryRefused.
        """
        if self._claim is not None:
            self._claim.hold()

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} on node {self._places.nodes[rank]}"

    def _describe_folder(self, rank: int) -> str:
        folder = self._places.folders.get(self._places.nodes[rank]) if Tier.LOCAL in self.tiers else None
        return f"{self._describe_rank(rank)}{f' ({folder})' if folder else ''}"

    def _conclude(self, save: Save, what: str, *, is_limited: bool = True) -> SaveOutcome:
        """Wait for rank 0's outcome. Raises: CheckpointError, the same on all ranks unless the ranks' store is gone."""
        poll_s = self.poll_pause_s(self._world_size)
        outcome = self.receive(save, "outcome", SaveOutcome, grace_s=GRACE_S, poll_s=poll_s, is_limited=is_limited)
        self._is_decided = True
        is_refused = outcome.kind == DirectoryRefused.__name__
        if is_refused:
            self.part(save)
        if outcome.error is not None:
            text = outcome.error if is_refused else f"{what}: {outcome.error}"
            raise outcome.failure(text, rank=self._rank, iteration=save.iteration)
        self.forget(self._turn)
        return outcome

    def part(self, save: Save) -> None:
        """Acknowledge the outcome of a save after which ranks exit.

        Rank 0, which may host the store, waits up to ``GRACE_S`` for all others, so that each of them can read the
        outcome.
        """
        self._end_ns = clock.now_ns() + int(GRACE_S * 1e9)
        with contextlib.suppress(CheckpointError):  # only the outcome matters
            self._gather_up(save, "acknowledged", SaveOutcome(), range(self._world_size), waits_for_all=True)

    def forget(self, before: int) -> None:
        """Delete this rank's messages of earlier turns; all ranks have taken part in a later one."""
        try:
            for turn, key in self._posted:
                if turn < before:
                    self._store.delete_key(key)
        except RuntimeError as error:
            log.debug("the store is gone, with all that was posted there: %s", error)
        self._posted = [(turn, key) for turn, key in self._posted if turn >= before]

    def _renew_store(self) -> None:
        """Reconnect to the ranks' store after a lost connection.

        Not while the lane stops: the store may be gone, and nothing could end the wait for a connection.

        Blocks: up to :data:`RENEW_S`.
        """
        if not self._is_store_lost or self._stop.is_set() or self._outcomes.is_call_left:
            return
        try:
            self._store.set_timeout(datetime.timedelta(seconds=min(RENEW_S, self._timeout_s)))
            self._store, self._is_store_lost = self._store.clone(), False
            self._store.set_timeout(datetime.timedelta(seconds=self._timeout_s))
            self._was_unreachable = False
        except (AttributeError, RuntimeError) as error:
            what = (str(error).splitlines() or [type(error).__name__])[0]
            log.log(
                logging.DEBUG if self._was_unreachable else logging.WARNING,
                "the ranks' store cannot be reached again (%s); saves fail until it can",
                what,
            )
            self._was_unreachable = True

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's DistNetworkError and others
            self._is_store_lost = True
            what = (str(error).splitlines() or [type(error).__name__])[0]
            raise PeerSilent(
                f"rank 0, which hosts the ranks' store, is gone ({what}); see the log of that rank"
            ) from None

    def _store_key(self, name: str) -> str:
        return f"outlast/checkpoint/{self._places.token}/{self.name}/{self._turn}/{name}"

    # -- after a commit ----------------------------------------------------------------------------------------

    def _follow_up(self, save: Save, place: ClaimedPlace) -> None:
        """Update the tracker, remove old checkpoints and stale files; errors do not undo the commit."""
        try:
            if not save.suspect:
                self._committed.add(save.iteration, frozenset({self._tier}))
                reach("checkpoint.tracker", attempt=str(save.attempt))
                place.point_to(save.iteration)
                self._remove_old(save, place)
            if self._must_sweep:
                if removed := place.remove_stale(save.attempt):
                    log.debug("removed files of earlier attempts: %s", ", ".join(removed))
                self._must_sweep = not place.is_remote  # object stores charge for listings
        except (CheckpointError, OSError) as error:
            log.warning("iteration %d is committed, but cleaning up failed: %s", save.iteration, error)

    def _remove_old(self, save: Save, place: ClaimedPlace) -> None:
        assert self._claim is not None  # only ranks with a claim commit
        removed = choose_removed(
            place.checkpoints(),
            self._committed.checkpoints(self._tier),
            committed=save.iteration,
            rules=self._retention,
            not_finite=self._committed.not_finite,
        )
        foreign = {checkpoint for checkpoint in removed if not place.is_own(checkpoint)}
        for checkpoint in sorted(foreign - self._foreign):
            log.warning("%s/step-%d is not a checkpoint of outlast: it is never removed", place.url, checkpoint)
        self._foreign |= foreign
        removed = [checkpoint for checkpoint in removed if checkpoint not in foreign]
        self._claim.retire(removed)
        for checkpoint in removed:
            log.debug("removed checkpoint %d from %s", checkpoint, place.url)


class RetryingLane(Lane):
    """A lane to a tier that may be slow, full or unavailable; see the head of this module.

    Thread: the lane's thread owns ``_turn`` and the state below; the waiting saves are shared under ``_changed``.
    """

    retry_s = RETRY_S

    def _open(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Save] = []
        """Saves that wait for a turn: at most one, and one for diagnosis."""
        self._newest = -1
        self._template: Save | None = None
        self._retry = (-1, 0)
        """Ordinal of the save of the last turn, and how often it was tried."""
        self._retry_ns = 0
        """When a failed save is retried, on rank 0."""
        self._pause_s = 0.0
        self._is_there = False
        """Rank 0 has found that the save of this turn is in all of its tiers."""

    def _wanted(self, save: Save) -> frozenset[Tier]:
        return frozenset() if self._is_there else save.tiers & self.tiers

    def submit(self, save: Save) -> None:
        with self._changed:
            # An unstaged save holds no memory, and the other ranks need its error.
            staged = [one for one in self._waiting if one.suspect == save.suspect and one.arena is not None]
            replaced = [one for one in staged if self._is_retained(save) or not self._has_precedence(one)]
            self._waiting = [one for one in self._waiting if one not in replaced] + [save]
            self._newest, self._template = save.attempt.ordinal, save
            self._changed.notify_all()
        for other in replaced:
            self._report_replaced(other, save.iteration)

    def _is_retained(self, save: Save) -> bool:
        interval = self._retention.retain_interval
        return interval > 0 and save.iteration % interval == 0

    def _has_precedence(self, save: Save) -> bool:
        """Return whether a waiting save is written before a newer one; a failed one is not."""
        return self._is_retained(save) and save.attempt.ordinal != self._retry[0]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _report_replaced(self, save: Save, by: int | None) -> None:
        newer = "a newer one" if by is None else f"the save of iteration {by}"
        where = f"the save of iteration {save.iteration} is not written to {self._where()}, which is behind"
        self._outcomes.failed(save, self.name, self._error(save, f"{where}: {newer} takes its place", Replaced))

    def _next(self) -> Save | None:
        num_lost = 0
        while True:
            with self._changed:
                while not self._stop.is_set() and (left_s := self._idle_s()) != 0.0:
                    self._changed.wait(left_s)
            if self._stop.is_set():
                with self._changed:
                    abandoned, self._waiting = self._waiting, []
                for save in abandoned:
                    self._outcomes.failed(save, self.name, self._closing(save))
                return None
            try:
                self._renew_store()
                return self._begin_turn() if self._rank == 0 else self._join_turn()
            except CheckpointError as error:  # the ranks' store is gone; the next attempt may reach it
                if num_lost > 0 or self._outcomes.is_call_left:
                    self._report_silence(error)
                num_lost += 1
                self._stop.wait(POLL_S)

    def _report_silence(self, error: CheckpointError) -> None:
        """Report that the waiting saves failed for now, or finally if the surrounding call has ended."""
        if self._stop.is_set():
            return
        with self._changed:
            failed = list(self._waiting)
            if is_left := self._outcomes.is_call_left:
                self._waiting = []
        for save in failed:
            self._outcomes.failed(save, self.name, error, is_retried=not is_left)

    def _idle_s(self) -> float | None:
        """Return the seconds without work; ``None`` = until a save comes. With ``_changed`` held."""
        if not self._waiting:
            return None
        if self._rank != 0 or self._waiting[0].attempt.ordinal != self._retry[0]:
            return 0.0
        return max(0.0, (self._retry_ns - clock.now_ns()) / 1e9)

    def _begin_turn(self) -> Save:
        with self._changed:
            save = self._waiting[0]  # only this thread removes one; a newer save may replace it
        ordinal = save.attempt.ordinal
        retry = self._retry[1] + 1 if ordinal == self._retry[0] else 0
        self._is_there = self.has(save)
        if self._world_size > 1:
            self.post("turn", Turn(ordinal, save.iteration, retry, self._is_there))
        return self._start(save, retry)

    def _join_turn(self) -> Save:
        with self._changed:
            waiting = self._waiting[0]
        poll_s = self.poll_pause_s(self._world_size)
        self._start_clock()
        turn = self.receive(waiting, "turn", Turn, grace_s=GRACE_S, poll_s=poll_s, is_limited=False)
        self._is_there = turn.is_committed
        with self._changed:
            while self._newest < turn.ordinal:
                if self._stop.is_set():
                    raise CheckpointError("this rank is closing")
                self._changed.wait()
            found = [save for save in self._waiting if save.attempt.ordinal == turn.ordinal]
            template = self._template
        if found:
            return self._start(found[0], turn.retry)
        assert template is not None
        attempt = dataclasses.replace(template.attempt, ordinal=turn.ordinal, retry=turn.retry)
        return _replaced(template, iteration=turn.iteration, attempt=attempt, tiers=self.tiers)

    def _start(self, save: Save, retry: int) -> Save:
        with self._changed:
            is_there = any(one is save for one in self._waiting)
            passed = [one for one in self._waiting if one.arena is None and one.attempt.ordinal < save.attempt.ordinal]
            self._waiting = [one for one in self._waiting if one is not save and one not in passed]
        for one in passed:
            self._outcomes.failed(one, self.name, Unstaged(one.error or "nothing was staged", rank=self._rank))
        self._retry = (save.attempt.ordinal, retry)
        attempt = dataclasses.replace(save.attempt, retry=retry)
        return dataclasses.replace(save, attempt=attempt) if is_there else _replaced(save, attempt=attempt)

    def _succeed(self, save: Save, reached: Reached) -> None:
        self._pause_s = 0.0
        super()._succeed(save, reached)

    def has_newer(self, save: Save) -> bool:
        """Return whether a newer save waits for a turn. Thread: any."""
        with self._changed:
            return any(other.attempt.ordinal > save.attempt.ordinal for other in self._waiting)

    def _fail(self, save: Save, error: CheckpointError) -> None:
        if save.is_replaced:
            return  # reported when the newer save came
        if isinstance(error, Replaced):
            self._report_replaced(save, None)
            return
        is_lost = save.suspect or self._stop.is_set() or isinstance(error, DirectoryRefused | Unstaged)
        if is_lost or self._outcomes.is_call_left:
            self._outcomes.failed(save, self.name, error)
            return
        with self._changed:
            is_newest = all(other.suspect for other in self._waiting)
            if is_newest:
                self._pause_s = max(self.retry_s, min(MAX_RETRY_S, 2 * self._pause_s))
                self._retry_ns = clock.now_ns() + int(self._pause_s * 1e9)
                self._waiting.insert(0, save)
        self._outcomes.failed(save, self.name, error, is_retried=is_newest)


def _replaced(save: Save, **changes: Any) -> Save:
    error = "a newer save has taken its place"
    return dataclasses.replace(save, arena=None, guard=None, error=error, is_replaced=True, **changes)
