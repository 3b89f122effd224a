"""The copies that the ranks could load: of every checkpoint in every tier, listed without reading their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from outlast.checkpoint import protocol as f
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.manifest import GlobalManifest
from outlast.checkpoint.directory import TRACKER, part_name
from outlast.checkpoint.manifest import SHARD_PART, CopyKey, Manifest, decode_manifest
from outlast.checkpoint.places import Peers, Places, group_of
from outlast.checkpoint.replica.parity import PARITY_PART
from outlast.checkpoint.shard import shard_name
from outlast.checkpoint.verification import check_origin, check_shard
from outlast.checkpoint.writer_client import WriterClient
from outlast.errors import CheckpointError, Incomplete, Unavailable, Untrusted
from outlast.policy.lineage import Branch, Lineage, SavedPoint, branch_of
from outlast.policy.recovery_point import Copy, Tier
from outlast.runtime.storage_calls import CallProgress, StorageCalls, in_threads, is_outage

LIST_TIMEOUT_S = 30.0
NUM_LISTERS = 8
UNLISTED = -1
"""Replaces the iteration if a place could not be listed."""
PARITY = "parity"
"""Replaces the holder's name if the copy has to be rebuilt from shards and parities of several nodes."""


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected copy, and the reason."""

    checkpoint: int
    tier: str
    rank: int
    file: str
    reason: str
    kind: str
    """Name of the error: ``Incomplete``, ``Corrupt``, ``Untrusted`` or ``CheckpointError``; ``Unavailable``: its place
    does not respond; ``NotFinite``: intact, but with infinities or NaN, while an older checkpoint has none;
    ``Superseded``: training has abandoned its branch."""
    node: str = ""
    """The rank's node, if its place does not respond."""

    def __str__(self) -> str:
        if self.checkpoint == UNLISTED:
            return f"tier {self.tier}, rank {self.rank}, {self.file} cannot be listed: {self.reason}"
        return f"checkpoint {self.checkpoint}, tier {self.tier}, rank {self.rank}, {self.file}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A loaded checkpoint."""

    iteration: int
    """Number of optimizer steps that the loaded state had done."""
    checkpoint: int
    attempt: str
    """The attempt that had saved it."""
    tier: str
    """Source of this rank's part: ``memory``, ``local``, ``replica`` or ``global``; ``kept`` = its state was this
    checkpoint already and was not changed."""
    tiers: tuple[str, ...]
    """The source of every rank's part."""
    rejected: list[Rejection]
    """Rejected copies of this checkpoint and newer ones; the same on every rank."""
    load_s: float
    bytes_read: dict[str, int]
    """Bytes that this rank read, by tier."""
    finite: bool = True
    """Whether no number in the checkpoint is infinite or NaN, on any rank."""


class HeldCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: int
    attempt: str
    restored_attempt: str | None
    tier: Tier
    ranks: tuple[int, ...]
    groups: dict[int, tuple[int, ...]] = {}
    """Ranks whose parities are there, with the ranks that share each of them."""
    world_size: int = 0
    """Number of ranks that saved it; any number can load it from the global tier."""
    finite: bool = True
    """Whether no number in it is infinite or NaN."""


class _Listing(msgspec.Struct):
    held: list[HeldCheckpoint] = []
    rejected: list[Rejection] = []
    is_durable: bool = False
    """Whether a directory shows that a checkpoint was, or may have been, committed to it."""
    saved: list[SavedPoint] = []
    """All checkpoints of this run on the node, on its leader, and, on rank 0, in the global tier, including those of
    other numbers of ranks. The one of the newest branch is first."""
    branch: Branch | None = None

    def note_saved(self, manifest: Manifest | GlobalManifest, *, is_global: bool = False) -> None:
        point = SavedPoint(manifest.iteration, manifest.attempt, manifest.era, is_global)
        self._note(point, branch_of(manifest))

    def _note(self, point: SavedPoint, branch: Branch | None) -> None:
        if self.saved and point.age_key <= self.saved[0].age_key:
            self.saved.append(point)
        else:
            self.saved.insert(0, point)
            self.branch = branch

    def add(self, other: _Listing) -> None:
        self.held += other.held
        self.rejected += other.rejected
        self.is_durable |= other.is_durable
        for number, point in enumerate(other.saved):
            self._note(point, other.branch if number == 0 else None)


@dataclass(slots=True)
class Table:
    """All copies, the same on all ranks."""

    copies: list[set[Copy]]
    lineage: dict[str, str | None]
    """Maps each attempt to the one that its processes had loaded."""
    world_sizes: dict[str, int]
    """Number of ranks that saved each attempt in the global tier."""
    rejected: list[Rejection]
    members: dict[str, dict[int, str]] = field(default_factory=dict)
    """For each attempt, the ranks whose shard and parity are on the same node, and that node."""
    not_finite: set[tuple[int, str]] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    """Checkpoints that exist anywhere, intact or damaged."""
    is_durable: bool = True
    """Whether a directory shows that a checkpoint was, or may have been, committed to it: by its tracker, by any
    content of the global tier, because it cannot be read, or by a copy that descends from a loaded checkpoint."""
    branches: Lineage = field(default_factory=Lineage)

    def exclude_superseded(self) -> None:
        """Remove the copies of abandoned branches; add one rejection per checkpoint."""
        superseded = {
            attempt: why
            for attempt in self.branches.saved
            if (why := self.branches.why_superseded(attempt)) is not None
        }
        if not superseded:
            return
        tiers: dict[str, Tier] = {}
        for copy in (copy for copies in self.copies for copy in copies):
            tiers[copy.attempt] = min(copy.tier, tiers.get(copy.attempt, copy.tier))
        for copies in self.copies:
            copies.difference_update([copy for copy in copies if copy.attempt in superseded])
        points = {attempt: self.branches.saved[attempt] for attempt in superseded}
        others = {point.iteration for attempt, point in self.branches.saved.items() if attempt not in superseded}
        only = {point.iteration for point in points.values()} - others
        self.rejected = [rejection for rejection in self.rejected if rejection.checkpoint not in only]
        self.rejected += [
            Rejection(
                checkpoint=point.iteration,
                tier=str(tiers.get(attempt, Tier.GLOBAL if point.is_global else Tier.LOCAL)),
                rank=0,
                file=f"attempt {attempt}",
                reason=superseded[attempt],
                kind="Superseded",
            )
            for attempt, point in points.items()
        ]


def gather_copies(places: Places, peers: Peers, writer: WriterClient, calls: StorageCalls) -> Table:
    """List this node's tiers and, on rank 0, the global tier; return all ranks' results.

    A place that does not respond results in a rejection of kind ``Unavailable``.

    Raises:
        PeerLost: A peer is gone.

    Collective: all ranks.
    Blocks: up to the calls' timeout where a place does not respond.
    """
    mine = _Listing()
    _list_memory(mine, places, writer, leads=places.is_leader(peers.rank))
    if places.local is not None:
        url = places.local.url
        mine.add(_list(calls, url, Tier.LOCAL, places, peers.rank, partial(_list_local, places=places, own=peers.rank)))
    if peers.rank == 0 and places.directory is not None:
        url, work = places.directory.url, partial(_list_global, directory=places.directory, places=places)
        mine.add(_list(calls, url, Tier.GLOBAL, places, 0, work))
    listings: list[_Listing] = peers.gather(_Listing, mine)
    table = Table(
        copies=[set() for _ in listings],
        lineage={held.attempt: held.restored_attempt for one in listings for held in one.held},
        world_sizes={held.attempt: held.world_size for held in listings[0].held if held.tier == Tier.GLOBAL},
        rejected=[rejection for one in listings for rejection in one.rejected],
        not_finite={(held.checkpoint, held.attempt) for one in listings for held in one.held if not held.finite},
    )
    for rank, listing in enumerate(listings):
        gives_copies = places.is_leader(rank) and places.nodes[rank] in places.targets
        for held in listing.held:
            _enter(table, held, rank, places, gives_copies=gives_copies)
        if gives_copies:
            _note_members(table, listing.held, places.nodes[rank])
    for held in (held for one in listings for held in one.held):
        _enter_rebuildable(table, held)
    table.seen = {held.checkpoint for one in listings for held in one.held if held.ranks or held.tier == Tier.GLOBAL}
    table.seen |= {rejection.checkpoint for rejection in table.rejected}
    table.is_durable = any(one.is_durable for one in listings) or any(table.lineage.values())
    table.branches = Lineage.of(
        [point for one in listings for point in one.saved],
        [one.branch for one in listings if one.branch is not None],
    )
    table.rejected += _lacking(table)
    return table


def _enter(table: Table, held: HeldCheckpoint, rank: int, places: Places, *, gives_copies: bool) -> None:
    if held.tier == Tier.GLOBAL:
        for copies in table.copies:
            copies.add(Copy(held.checkpoint, held.attempt, Tier.GLOBAL))
        return
    node = places.nodes[rank]
    if rank in held.ranks:
        table.copies[rank].add(Copy(held.checkpoint, held.attempt, held.tier, node))
    for other in held.ranks if gives_copies else ():
        if other < len(table.copies) and places.nodes[other] != node:
            table.copies[other].add(Copy(held.checkpoint, held.attempt, Tier.REPLICA, node))


def _note_members(table: Table, helds: list[HeldCheckpoint], node: str) -> None:
    """Record ranks whose shard and parity are both on a node, which rebuilding needs."""
    shards = {(held.attempt, rank) for held in helds for rank in held.ranks}
    for held in helds:
        for rank in held.groups:
            if (held.attempt, rank) in shards:
                table.members.setdefault(held.attempt, {})[rank] = node


def _enter_rebuildable(table: Table, held: HeldCheckpoint) -> None:
    there = table.members.get(held.attempt, {})
    for group in set(held.groups.values()):
        for rank in group:
            if rank < len(table.copies) and all(other in there for other in group if other != rank):
                table.copies[rank].add(Copy(held.checkpoint, held.attempt, Tier.REPLICA, PARITY))


def _list_memory(mine: _Listing, places: Places, writer: WriterClient, *, leads: bool) -> None:
    if not places.memory:
        return
    try:
        listed, _ = writer.ask(f.List(), f.Listed, timeout_s=LIST_TIMEOUT_S)
    except CheckpointError:
        return  # a writer that died holds nothing
    for checkpoint in listed.checkpoints:
        try:
            manifest, _ = decode_manifest(checkpoint.manifest)
            if manifest.home != places.home:
                continue  # of another session of these processes, which has other directories
            if leads and manifest.run == places.run:
                mine.note_saved(manifest)
            check_manifest(manifest, places)
        except CheckpointError:
            continue  # of another run or number of ranks; not reported for memory
        ranks = tuple(sorted(part.rank for part in checkpoint.parts if part.part == SHARD_PART))
        parities = [part.rank for part in checkpoint.parts if part.part == PARITY_PART]
        mine.held.append(_held(manifest, Tier.MEMORY, ranks, parities))


def _list(
    calls: StorageCalls,
    url: str,
    tier: Tier,
    places: Places,
    own: int,
    work: Callable[[_Listing, CallProgress], None],
) -> _Listing:
    found, progress = _Listing(), CallProgress()
    try:
        calls.run(url, partial(work, found, progress), operation="list", progress=progress)
        return found
    except (CheckpointError, OSError) as error:
        rejection = reject(error, UNLISTED, tier, own, url, node=places.nodes[own])
        return _Listing(is_durable=True, rejected=[rejection])  # its content is unknown


def _list_local(mine: _Listing, progress: CallProgress, *, places: Places, own: int) -> None:
    assert places.local is not None
    leads, node = places.is_leader(own), places.nodes[own]
    mine.is_durable = (places.local.path / TRACKER).exists()
    for checkpoint in places.local.checkpoints():
        progress.add()
        file = f"step-{checkpoint}/manifest.json"
        try:
            manifest, _ = places.local.manifest(checkpoint)
            check_origin(manifest, iteration=checkpoint, run=None)
            if leads and manifest.run == places.run:
                mine.note_saved(manifest)
            check_manifest(manifest, places)
        except CheckpointError as error:
            mine.rejected.append(reject(error, checkpoint, Tier.LOCAL, own, file, node=node))
            continue
        folder = places.local.checkpoint(checkpoint)
        is_own_here = not manifest.nodes or manifest.nodes[own] == places.node
        present = []
        for rank in range(manifest.world_size) if leads else [own]:
            path = folder / shard_name(rank)
            progress.add()
            try:
                check_shard(path, manifest, rank)
                present.append(rank)
            except CheckpointError as error:
                if rank == own and (is_own_here or not isinstance(error, Incomplete) or path.exists()):
                    file = f"step-{checkpoint}/{shard_name(rank)}"
                    mine.rejected.append(reject(error, checkpoint, Tier.LOCAL, rank, file, node=node))
        parities = []
        if leads and manifest.parity:
            keys = [CopyKey(checkpoint, manifest.attempt, rank, PARITY_PART) for rank in range(manifest.world_size)]
            parities = [key.rank for key in keys if (folder / part_name(key)).exists()]
        mine.held.append(_held(manifest, Tier.LOCAL, tuple(present), parities))


def _list_global(mine: _Listing, progress: CallProgress, *, directory: GlobalDirectory, places: Places) -> None:
    def look(checkpoint: int) -> GlobalManifest | Rejection:
        progress.add()
        try:
            manifest = directory.manifest(checkpoint)
            check_origin(manifest, iteration=checkpoint, run=places.run)
            return manifest
        except (CheckpointError, OSError) as error:
            if is_outage(error):
                raise  # an older checkpoint must not be loaded because the newest one is unreadable at the moment
            return reject(error, checkpoint, Tier.GLOBAL, 0, f"step-{checkpoint}/manifest.json")

    checkpoints = directory.checkpoints()
    mine.is_durable |= bool(checkpoints) or TRACKER in directory.names()
    for found in in_threads(look, checkpoints, num_threads=NUM_LISTERS, name="outlast-list"):
        if isinstance(found, Rejection):
            mine.rejected.append(found)
        else:
            mine.held.append(_held(found, Tier.GLOBAL))
            mine.note_saved(found, is_global=True)


def check_manifest(manifest: Manifest, places: Places) -> None:
    """Check that a memory, local or replica checkpoint belongs to these ranks. Raises: Untrusted."""
    world_size = len(places.nodes)
    if manifest.run != places.run:
        raise Untrusted(f"belongs to run {manifest.run}, this directory to run {places.run}")
    if manifest.world_size != world_size:
        raise Untrusted(
            f"was saved by {manifest.world_size} ranks and cannot be loaded by {world_size}; start with "
            f"{manifest.world_size} ranks, or load from the global tier (directory), which any number can"
        )
    if manifest.topology != places.topology:
        raise Untrusted(f"was saved by ranks of topology {manifest.topology}, these have {places.topology}")


def reject(error: Exception, checkpoint: int, tier: Tier, rank: int, file: str, *, node: str = "") -> Rejection:
    kind = type(error).__name__ if isinstance(error, CheckpointError) else "CheckpointError"
    if is_outage(error):
        kind = Unavailable.__name__
    return Rejection(
        checkpoint=checkpoint, tier=str(tier), rank=rank, file=file, reason=str(error), kind=kind, node=node
    )


def _held(
    found: Manifest | GlobalManifest, tier: Tier, ranks: tuple[int, ...] = (), parities: Sequence[int] = ()
) -> HeldCheckpoint:
    groups = {}
    if isinstance(found, Manifest) and found.parity:
        groups = {rank: group_of(found.nodes, found.parity, rank) for rank in parities}
    return HeldCheckpoint(
        checkpoint=found.iteration,
        attempt=found.attempt,
        restored_attempt=found.restored_attempt,
        tier=tier,
        ranks=ranks,
        finite=found.finite,
        world_size=found.world_size,
        groups=groups,
    )


def _lacking(table: Table) -> Iterator[Rejection]:
    """Report the ranks that lack a checkpoint which others have."""
    named = {(rejection.checkpoint, rejection.rank) for rejection in table.rejected}
    known = {(copy.checkpoint, copy.attempt) for copies in table.copies for copy in copies}
    for checkpoint, attempt in sorted(known):
        for rank, copies in enumerate(table.copies):
            have = {copy.attempt for copy in copies if copy.checkpoint == checkpoint}
            if attempt in have or (checkpoint, rank) in named:
                continue
            reason = f"has another attempt than {attempt}" if have else "this rank has no copy"
            yield reject(Incomplete(reason), checkpoint, Tier.LOCAL, rank, f"step-{checkpoint}/{shard_name(rank)}")
