"""Recovery: all ranks agree on one checkpoint, and every rank verifies its copy before any live state is changed.

Every rank lists its copies, and the lists are gathered (:mod:`outlast.checkpoint.tiers`). All ranks make the same
choice (``policy.recovery_point``), each verifies its copy (:mod:`outlast.checkpoint.restore`), all vote; one "no"
rejects that copy, and all choose again. Ranks may load from different tiers, never different checkpoints.

A rank whose live state already is a checkpoint needs no copy of it while others load it: its state counts as one more
copy of that rank, the nearest of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from outlast.checkpoint import protocol as f
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.directory import SUSPECT, Directory
from outlast.checkpoint.fit import listed
from outlast.checkpoint.layouts import OtherLayout
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.outage import OutageWait
from outlast.checkpoint.places import (
    Committed,
    Peers,
    Places,
    agree_source,
    is_newest_of_run,
    raise_outage,
    storage_calls,
)
from outlast.checkpoint.restore import OPEN_TIMEOUT_S, CopyProver, VerifiedCopy
from outlast.checkpoint.tiers import PARITY, UNLISTED, Rejection, Restored, Table, gather_copies, reject
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    Mismatch,
    NotFinite,
    OutlastError,
    Unavailable,
    Untrusted,
)
from outlast.policy.lineage import Lineage
from outlast.policy.recovery_point import (
    Copy,
    Exclusion,
    RecoveryPoint,
    Tier,
    choose_best_point,
    choose_recovery_point,
    is_doubtful,
    is_excluded,
    is_last_resort,
)
from outlast.runtime.random_numbers import restore_random
from outlast.runtime.storage_calls import is_outage

log = logging.getLogger(__name__)
_LIVE_STATE = ""
"""Holder of a live state (all copies in its tier have a holder); sorts before every node's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCheckpoint:
    point: RecoveryPoint
    copy: VerifiedCopy
    rejected: list[Rejection]
    finite: bool
    committed: Committed
    """This checkpoint and older ones that all ranks could load according to the listings, with their tiers (the
    node-local ones counted together); and all checkpoints, including newer ones, that are not finite."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load and release the checkpoint. Raises: CheckpointError, when a file changed; ``state`` is then unusable."""
        try:
            random = self.copy.restore(state)
        finally:
            self.copy.close()
        if random is not None:
            restore_random(random)

    def describe(self, rank: int, *, load_s: float) -> Restored:
        tiers = tuple("kept" if is_kept(copy) else str(copy.tier) for copy in self.point.copies)
        return Restored(
            iteration=self.point.checkpoint,
            checkpoint=self.point.checkpoint,
            attempt=self.point.attempt,
            tier=tiers[rank],
            tiers=tiers,
            rejected=self.rejected,
            load_s=load_s,
            bytes_read={} if tiers[rank] == "kept" else {tiers[rank]: self.copy.num_bytes_read},
            finite=self.finite,
        )


class _Vote(msgspec.Struct, frozen=True):
    rejection: Rejection | None = None
    fatal: str | None = None
    """Why the checkpoint does not fit the live state; older ones are not tried."""
    other_layout: bool = False
    """It was saved in another layout over the ranks: node-local tiers are unusable, the global one is resharded."""
    missing: tuple[str, ...] = ()
    """Names in the live state that it lacks, and that keep their present values."""


class CheckpointRecovery:
    """Find, verify and agree on a checkpoint.

    Args:
        reclaim: Takes the leases on directories that did not respond before, on all ranks, once they respond.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        places: Places,
        peers: Peers,
        writer: WriterClient,
        arenas: ArenaPool,
        *,
        reclaim: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._places, self._peers = config, places, peers
        self._writer, self._arenas, self._reclaim = writer, arenas, reclaim
        self._calls = storage_calls(config, rank=peers.rank, node=places.node)
        self._is_global_known = places.global_error is None
        self.branches = Lineage()

    def newest(
        self,
        state: Mapping[str, Any],
        excluded: Sequence[Exclusion],
        has: tuple[int, str] | None = None,
        *,
        keeps_missing: bool = False,
    ) -> tuple[VerifiedCheckpoint | None, bool]:
        """Verify the newest checkpoint that all ranks have.

        If nothing can be loaded because saves into memory were interrupted (by a restart before all ranks had it, or by
        the loss of the node with the only copy) and nothing was ever committed to a directory, the run starts from
        scratch.

        If a place does not respond, the ranks load from the others if those hold the newest checkpoint of this job.
        Otherwise they wait, up to ``restore_timeout``.

        Args:
            state: The live state, which it must fit.
            has: Iteration and attempt that the live state of this rank is; ``None`` = none.

        Returns:
            The checkpoint, ``None`` if there is none at all; and whether it is in this run's directories.

        Raises:
            CheckpointError: There are checkpoints, but none that all ranks can load, or it does not fit.
            Unavailable: A place did not respond, and no other has a checkpoint that all ranks can load.
            PeerLost: A peer is gone.

        Collective: all ranks.
        Blocks: until all ranks have read their copies; up to ``restore_timeout`` longer where a place does not respond.
        """
        places = self._places
        wait = OutageWait(self._peers, limit_s=max(0.0, self._config.restore_timeout - places.waited_s))
        while True:
            table = self._gather(places)
            self.branches = table.branches
            kept = gather_kept(has, table, self._peers)
            if (away := self._unlisted(table)) and not self._holds_newest(table, kept, excluded):
                if wait.pause(str(away[0])):
                    continue
                if self._peers.rank == 0:
                    log.warning("%s; the start continues with what the other tiers hold", away[0])
            elif not away and not self._is_global_known:
                self._is_global_known = True
                self._reclaim()
                continue  # an earlier owner may have committed meanwhile
            if not table.seen:
                break
            rejected = list(table.rejected)
            verified = self._agree(table, places, state, excluded, rejected, kept, keeps_missing=keeps_missing)
            if verified is not None:
                if places.memory:
                    self._inform_writer(f.KeepPart, verified.point)
                return verified, True
            if blocked := _blocked(rejected):
                if self._is_new(table):
                    break
                self._wait_or_raise(wait, blocked)
                continue
            harmless = (Incomplete.__name__, "Superseded")
            if table.is_durable or any(rejection.kind not in harmless for rejection in rejected):
                raise _nothing_left(self._places, rejected)
            if self._peers.rank == 0:
                log.warning(
                    "training starts from the beginning: no checkpoint was ever committed to a directory, and those in "
                    "memory are incomplete: %s",
                    _reasons(rejected),
                )
            break
        if self._config.load is None:
            return None, True
        wait = OutageWait(self._peers, limit_s=self._config.restore_timeout)
        while True:
            other = self._other_place(self._config.load)
            table = self._gather(other)
            rejected = list(table.rejected)
            verified = self._agree(table, other, state, excluded, rejected, keeps_missing=keeps_missing)
            if verified is None and (blocked := _blocked(rejected)):
                self._wait_or_raise(wait, blocked)
                continue
            if verified is None and table.seen:
                raise _nothing_left(other, rejected)
            return verified, False

    def _unlisted(self, table: Table) -> list[Rejection]:
        """Return the places that could not be listed and may hold a newer checkpoint than the others.

        That is the global tier; without one, any node's folder.
        """
        away = [one for one in table.rejected if one.checkpoint == UNLISTED and one.kind == Unavailable.__name__]
        if self._places.directory is not None:
            return [one for one in away if one.tier == str(Tier.GLOBAL)]
        return away

    def _holds_newest(self, table: Table, kept: Sequence[Copy | None], excluded: Sequence[Exclusion]) -> bool:
        """Return whether all ranks can load a node-local checkpoint that must be the newest one.

        If the launcher knows the newest durable iteration, the checkpoint must not be older; if none was durable, it
        must be of this job, which checked the global tier at its start. Otherwise it must be the newest that any rank
        sees, and of this job, since saves of other jobs are unknown.
        """
        held = [
            {copy for copy in copies if copy.tier != Tier.GLOBAL} | ({own} if own is not None else set())
            for copies, own in zip(table.copies, kept or [None] * len(table.copies), strict=True)
        ]
        refused = _excluded_copies(dataclasses.replace(table, copies=held), excluded)
        point = choose_recovery_point(held, refused)
        job, durable = self._places.job, self._places.durable_iteration
        if point is None or not is_newest_of_run(point.checkpoint, point.attempt, job=job, durable=durable):
            return False
        # A newer incomplete checkpoint, whose save was interrupted, is not in the global tier either.
        return durable is not None or point.checkpoint >= max(table.seen, default=UNLISTED)

    def _is_new(self, table: Table) -> bool:
        """Return whether nothing was ever committed, although a node's folder could not be listed.

        The global tier was listed and is empty.
        """
        is_listed = self._places.directory is not None and not any(
            one.tier == str(Tier.GLOBAL) for one in table.rejected
        )
        return (
            is_listed
            and all(one.checkpoint == UNLISTED and one.tier == str(Tier.LOCAL) for one in _blocked(table.rejected))
            and not any(table.copies)
            and table.seen <= {UNLISTED}
        )

    def _wait_or_raise(self, wait: OutageWait, blocked: list[Rejection]) -> None:
        """Wait before another attempt, or raise that places did not respond.

        If a directory does not respond for some ranks only, their nodes are at fault and the ranks do not wait again;
        an object store may have just returned.
        """
        first = blocked[0]
        ranks = sorted({one.rank for one in blocked if one.tier == first.tier and one.checkpoint != UNLISTED})
        blamed = [] if not ranks or len(ranks) == self._peers.world_size else ranks
        problem = str(first)
        if blamed:
            first = next(one for one in blocked if one.rank == blamed[0])
            problem = f"rank {first.rank} on node {first.node} cannot load {first.file} ({first.reason})"
        is_store = self._places.directory is not None and self._places.directory.is_remote
        has_time = not blamed or (is_store and first.tier == str(Tier.GLOBAL))
        if has_time and wait.pause(problem, partial_limit_s=self._config.response_timeout if blamed else None):
            return
        waited_s = self._places.waited_s + wait.waited_s
        raise_outage(problem, waited_s, blamed, rank=self._peers.rank, node=self._places.node)

    def _inform_writer(self, request: type[f.KeepPart | f.DropPart], about: RecoveryPoint | Copy) -> None:
        """Have the writer keep or drop this rank's part in memory; after an error, the next save or load does so."""
        part = CopyKey(about.checkpoint, about.attempt, self._peers.rank)
        try:
            self._writer.ask(request(key=part), f.Done, timeout_s=OPEN_TIMEOUT_S)
        except CheckpointError as error:
            log.debug("the writer did not take %s of iteration %d: %s", request.__name__, about.checkpoint, error)

    def suspect(
        self, state: Mapping[str, Any], iteration: int, excluded: Sequence[Exclusion]
    ) -> VerifiedCheckpoint | None:
        """Verify the save for diagnosis of ``iteration``; ``None`` when not all ranks have it.

        Raises: CheckpointError, when it does not fit the live state; PeerLost. Collective: all ranks.
        """
        committed = self.committed(iteration, excluded)
        places = self._places
        local = Directory(places.local.path / SUSPECT) if places.local is not None else None
        directory = places.directory.suspects if places.directory is not None else None
        places = dataclasses.replace(places, directory=directory, local=local, memory=False, targets={})
        table = gather_copies(places, self._peers, self._writer, self._calls)  # any branch
        table.not_finite.clear()  # these saves may be not finite
        for copies in table.copies:
            copies.intersection_update([copy for copy in copies if copy.checkpoint == iteration])
        try:
            rejected = list(table.rejected)
            verified = self._agree(table, places, state, (), rejected)
            if verified is None and table.seen:
                raise _nothing_left(places, rejected)
        except CheckpointError as error:
            log.warning("the state that was saved for diagnosis is unavailable: %s", error)
            return None
        return None if verified is None else dataclasses.replace(verified, committed=committed)

    def committed(self, newest: int, excluded: Sequence[Exclusion]) -> Committed:
        """Return the committed checkpoints up to ``newest`` that all ranks could load. Raises: PeerLost. Collective."""
        table = self._gather(self._places)
        self.branches = table.branches
        return _committed(table, _excluded_copies(table, excluded), newest)

    def _gather(self, places: Places) -> Table:
        table = gather_copies(places, self._peers, self._writer, self._calls)
        table.exclude_superseded()
        return table

    def _other_place(self, url: str) -> Places:
        directory, limit_s = GlobalDirectory.open(url), self._config.restore_timeout
        run = agree_source(url, directory, self._places, self._peers, calls=self._calls, limit_s=limit_s)
        return dataclasses.replace(self._places, directory=directory, local=None, memory=False, run=run)

    def _agree(
        self,
        table: Table,
        places: Places,
        state: Mapping[str, Any],
        excluded: Sequence[Exclusion],
        rejected: list[Rejection],
        kept: Sequence[Copy | None] = (),
        *,
        keeps_missing: bool = False,
    ) -> VerifiedCheckpoint | None:
        """Find the newest checkpoint that all ranks can verify, and return this rank's verified copy.

        Args:
            rejected: Copies that are already rejected; further ones are appended.
            kept: By rank, the checkpoint that its live state already is, so that it needs no copy of it.

        Raises:
            Mismatch: The checkpoint does not fit a rank's live state; older ones are not tried.
            PeerLost: A peer left.

        Collective: all ranks.
        Blocks: until all ranks have read their copies.
        """
        committed, refused = table, _excluded_copies(table, excluded)
        for rank, copies in refused.items():
            for copy in sorted(copies):
                error = Untrusted("led to invalid results, or descends from what did")
                rejected.append(reject(error, copy.checkpoint, copy.tier, rank, f"attempt {copy.attempt}"))
        if any(kept):
            trusted = [{one} if one and not is_excluded(one, table.lineage, excluded) else set() for one in kept]
            with_kept = [held | own for held, own in zip(table.copies, trusted, strict=True)]
            table = dataclasses.replace(table, copies=with_kept)
        prover = CopyProver(
            config=self._config,
            places=places,
            peers=self._peers,
            writer=self._writer,
            arenas=self._arenas,
            table=committed,
            calls=self._calls,
            state=state,
            keeps_missing=keeps_missing,
        )
        resharded: set[str] = set()
        doubtful = [{copy for copy in copies if is_doubtful(copy, excluded)} for copies in table.copies]
        put_off = table.not_finite if self._config.prefer_finite else set[tuple[int, str]]()
        last = [{copy for copy in copies if is_last_resort(copy, excluded)} for copies in table.copies]
        while (
            point := choose_best_point(table.copies, refused, doubtful=doubtful, not_finite=put_off, last=last)
        ) is not None:
            verified, vote = self._prove_and_vote(prover, point, reshard=point.attempt in resharded)
            with contextlib.ExitStack() as unused:  # closed also when a peer leaves, or the checkpoint does not fit
                if verified is not None:
                    unused.callback(verified.close)
                votes: list[_Vote] = self._peers.gather(_Vote, vote)
                against = [(rank, vote.rejection) for rank, vote in enumerate(votes) if vote.rejection is not None]
                if not against:
                    for rank, vote in enumerate(votes):
                        if vote.fatal is not None:
                            text = f"checkpoint {point.checkpoint} does not fit rank {rank}: {vote.fatal}"
                            raise Mismatch(text, rank=rank)
                    assert verified is not None
                    unused.pop_all()
                    if self._peers.rank == 0:
                        _warn_of_missing(point.checkpoint, votes)
                    rejected += _put_last(last, point)
                    if (point.checkpoint, point.attempt) not in put_off:
                        rejected += _not_finite(table, refused, point, put_off)
                    newer = [rejection for rejection in rejected if rejection.checkpoint >= point.checkpoint]
                    return VerifiedCheckpoint(
                        point=point,
                        copy=verified,
                        finite=(point.checkpoint, point.attempt) not in committed.not_finite,
                        rejected=sorted(newer, key=lambda one: (-one.checkpoint, one.rank, one.tier)),
                        committed=_committed(committed, refused, point.checkpoint),
                    )
            has_other_layout = any(vote.other_layout for vote in votes)
            for rank, rejection in against:
                rejected.append(rejection)
                copy = point.copies[rank]
                if rank == self._peers.rank and rejection.kind == Corrupt.__name__ and copy.tier == Tier.MEMORY:
                    self._inform_writer(f.DropPart, copy)
                if not has_other_layout:
                    refused[rank].add(copy)
                    if rejection.kind == Unavailable.__name__ and copy.tier in (Tier.LOCAL, Tier.GLOBAL):
                        # The rank would wait as long for each older copy in the same place.
                        refused[rank] |= {one for one in table.copies[rank] if one.tier == copy.tier}
            if has_other_layout:
                # All ranks load their parts of the global copy together, or none does.
                is_tried = point.attempt in resharded
                for rank, copies in enumerate(table.copies):
                    of_point = {copy for copy in copies if copy.attempt == point.attempt}
                    refused[rank] |= {
                        copy for copy in of_point if is_tried or is_kept(copy) or copy.tier != Tier.GLOBAL
                    }
                resharded.add(point.attempt)
        return None

    def _prove_and_vote(
        self, prover: CopyProver, point: RecoveryPoint, *, reshard: bool
    ) -> tuple[VerifiedCopy | None, _Vote]:
        """Verify this rank's copy, or, with ``reshard``, its part in the live state's layout."""
        rank = self._peers.rank
        copy = point.copies[rank]

        def no(error: CheckpointError) -> Rejection:
            node = self._places.node
            return reject(error, copy.checkpoint, copy.tier, rank, _where(copy, rank), node=node)

        try:
            verified = VerifiedCopy() if is_kept(copy) else prover.prove(copy, reshard)
        except CheckpointError as error:
            return None, _Vote(no(error), other_layout=isinstance(error, OtherLayout))
        except (OSError, MemoryError, RuntimeError, ValueError) as error:  # lack of memory is a RuntimeError in torch
            if is_outage(error):
                return None, _Vote(no(Unavailable(f"cannot be read ({error})")))
            return None, _Vote(no(CheckpointError(f"cannot be read ({error})")))
        except OutlastError:  # such as PeerLost: the vote is not possible
            raise
        except Exception as error:  # noqa: BLE001 - resharding calls the live state, as below
            return None, _Vote(fatal=f"{type(error).__name__}: {error}")
        try:
            verified.check(prover.state)
        except OtherLayout as error:
            return verified, _Vote(no(error), other_layout=True)
        except Exception as error:  # noqa: BLE001 - a state_dict() may raise anything; the peers wait for the vote
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            return verified, _Vote(fatal=f"{kind}{error}")
        return verified, _Vote(missing=tuple(verified.missing))


def _warn_of_missing(checkpoint: int, votes: Sequence[_Vote]) -> None:
    if names := list(dict.fromkeys(name for vote in votes for name in vote.missing)):
        log.warning(
            'the checkpoint of iteration %d has no value for %s; present values are kept (missing="keep")',
            checkpoint,
            listed(names),
        )


def is_kept(copy: Copy) -> bool:
    return copy.tier == Tier.MEMORY and copy.holder == _LIVE_STATE


def gather_kept(has: tuple[int, str] | None, table: Table, peers: Peers) -> list[Copy | None]:
    """Return by rank the checkpoint that its live state is; ``None`` = none that counts.

    Uncommitted ones do not count, nor those of another number of ranks, which all ranks have to load together.

    Raises:
        PeerLost: A peer left.

    Collective: all ranks.
    """
    everyone = peers.gather(tuple[int, str] | None, has)
    committed = {(copy.checkpoint, copy.attempt) for copies in table.copies for copy in copies}
    return [
        Copy(one[0], one[1], Tier.MEMORY, _LIVE_STATE)
        if one is not None and one in committed and table.world_sizes.get(one[1], peers.world_size) == peers.world_size
        else None
        for one in everyone
    ]


def _excluded_copies(table: Table, excluded: Sequence[Exclusion]) -> dict[int, set[Copy]]:
    return {
        rank: {copy for copy in copies if is_excluded(copy, table.lineage, excluded)}
        for rank, copies in enumerate(table.copies)
    }


def _committed(table: Table, refused: dict[int, set[Copy]], newest: int) -> Committed:
    def shared(tiers: frozenset[Tier]) -> set[int]:
        held = [
            {(c.checkpoint, c.attempt) for c in copies - refused[rank] if c.tier in tiers}
            for rank, copies in enumerate(table.copies)
        ]
        return {checkpoint for checkpoint, _ in set.intersection(*held) if checkpoint <= newest}

    committed = Committed(not_finite={checkpoint for checkpoint, _ in table.not_finite})
    for tiers in (frozenset({Tier.MEMORY, Tier.LOCAL, Tier.REPLICA}), frozenset({Tier.GLOBAL})):
        for checkpoint in shared(tiers):
            committed.add(checkpoint, tiers)
    for tier in Tier:
        for checkpoint in shared(frozenset({tier})):
            committed.held.setdefault(checkpoint, set()).add(tier)
    return committed


def _put_last(last: Sequence[set[Copy]], point: RecoveryPoint) -> Iterator[Rejection]:
    """Report the copies that were not loaded because the same failure followed their load twice."""
    for rank, copies in enumerate(last):
        for copy in sorted(copies):
            if point.copies[rank] not in copies:
                error = Untrusted("the same failure followed its load twice at the same iteration")
                yield reject(error, copy.checkpoint, copy.tier, rank, f"attempt {copy.attempt}")


def _not_finite(
    table: Table, refused: dict[int, set[Copy]], point: RecoveryPoint, put_off: set[tuple[int, str]]
) -> Iterator[Rejection]:
    """Report the newer checkpoints that were not loaded only because they contain infinities or NaN."""
    for checkpoint, attempt in sorted(put_off):
        if checkpoint <= point.checkpoint:
            continue
        these = [
            {copy for copy in held if (copy.checkpoint, copy.attempt) == (checkpoint, attempt)} for held in table.copies
        ]
        if (left := choose_recovery_point(these, refused)) is None:
            continue
        yield Rejection(
            checkpoint=checkpoint,
            tier=str(left.copies[0].tier),
            rank=0,
            file=f"step-{checkpoint}/manifest.json",
            reason=f"contains numbers that are infinite or NaN, and checkpoint {point.checkpoint} contains none; "
            "if they are expected, set prefer_finite=false",
            kind=NotFinite.__name__,
        )


def _where(copy: Copy, rank: int) -> str:
    place = ""
    if copy.tier == Tier.REPLICA:
        place = " rebuilt by parity" if copy.holder == PARITY else f" on node {copy.holder}"
    return f"step-{copy.checkpoint}/rank-{rank:05d}{place}"


def _reasons(rejected: list[Rejection]) -> str:
    first: dict[int, Rejection] = {}
    for rejection in rejected:
        first.setdefault(rejection.checkpoint, rejection)
    return "; ".join(str(first[checkpoint]) for checkpoint in sorted(first, reverse=True))


def _blocked(rejected: Sequence[Rejection]) -> list[Rejection]:
    return [one for one in rejected if one.kind == Unavailable.__name__]


def _nothing_left(places: Places, rejected: list[Rejection]) -> CheckpointError:
    kinds = {rejection.kind for rejection in rejected}
    known = {"Incomplete": Incomplete, "Corrupt": Corrupt, "Untrusted": Untrusted}
    kind = known.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    where = " and ".join(
        str(one)
        for one in (places.local.path if places.local else None, places.directory and places.directory.url)
        if one
    )
    return kind(
        f"{where or 'memory'} contains checkpoints, but none that all ranks can load: {_reasons(rejected)}. "
        "Repair or move them away; to start from scratch, give an empty directory"
    )
