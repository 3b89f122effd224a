"""Loading: every rank proves its part of a generation before any rank's live state is touched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from outlast.checkpoint.directory import Directory
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.peers import Peers
from outlast.checkpoint.shard import shard_name
from outlast.checkpoint.shard_reader import Shard, check_shard, read_shard
from outlast.errors import CheckpointError, Corrupt, Incomplete, Untrusted
from outlast.policy.recovery_point import choose_recovery_point

__all__ = ["Loaded", "Rejection", "Restored", "agree_and_read"]

log = logging.getLogger(__name__)
TIER = "local"


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """One copy that was passed over, and why."""

    generation: int
    tier: str
    rank: int
    file: str
    reason: str
    kind: str
    """Name of the error: ``Incomplete``, ``Corrupt``, ``Untrusted`` or ``CheckpointError``."""

    def __str__(self) -> str:
        return f"generation {self.generation}, tier {self.tier}, rank {self.rank}, {self.file}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A generation that was loaded."""

    iteration: int
    """Number of optimizer steps that the loaded state had done."""
    generation: int
    tier: str
    rejected: list[Rejection]
    """Copies of newer generations that were passed over, of all ranks; the same on every rank."""
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A verified shard in memory, agreed upon by all ranks."""

    generation: int
    shard: Shard
    rejected: list[Rejection]
    held: frozenset[int]
    """This generation and the older ones that all ranks have a whole copy of, as far as can be told unread."""


class _Listing(msgspec.Struct, frozen=True):
    copies: dict[int, str]
    rejected: list[Rejection]


class _Vote(msgspec.Struct, frozen=True):
    rejection: Rejection | None
    fatal: str | None = None


def agree_and_read(
    directory: Directory, peers: Peers, *, run: str, topology: str, usable: Callable[[Shard], None]
) -> Loaded | None:
    """Find the newest generation that all ranks can prove, and return this rank's part of it.

    Args:
        usable: Raises CheckpointError when the shard does not fit the live state; then nothing older is tried.

    Raises:
        CheckpointError: There are generations, but none that all ranks can prove.
        PeerLost: A peer left.

    Collective: all ranks.
    Blocks: until all ranks have read their parts.
    """
    mine = _list(directory, peers, run=run, topology=topology)
    listings = [msgspec.json.decode(data, type=_Listing) for data in peers.gather(msgspec.json.encode(mine))]
    copies = [listing.copies for listing in listings]
    seen = {generation for copy in copies for generation in copy}
    rejected = [rejection for listing in listings for rejection in listing.rejected]
    seen |= {rejection.generation for rejection in rejected}
    rejected += _lacking(copies, rejected, seen)
    refused: set[int] = set()
    while (generation := choose_recovery_point(copies, refused)) is not None:
        shard, vote = _read_and_vote(directory, peers, generation, usable, run=run, topology=topology)
        votes = [msgspec.json.decode(data, type=_Vote) for data in peers.gather(msgspec.json.encode(vote))]
        against = [vote.rejection for vote in votes if vote.rejection is not None]
        if not against:
            for rank, vote in enumerate(votes):
                if vote.fatal is not None:
                    raise CheckpointError(f"generation {generation} does not fit rank {rank}: {vote.fatal}", rank=rank)
            assert shard is not None
            newer = [rejection for rejection in rejected if rejection.generation > generation]
            return Loaded(
                generation=generation,
                shard=shard,
                rejected=sorted(newer, key=lambda rejection: (-rejection.generation, rejection.rank)),
                held=frozenset(
                    number
                    for number, sha in copies[0].items()
                    if number <= generation and all(copy.get(number) == sha for copy in copies)
                ),
            )
        del shard
        refused.add(generation)
        rejected += against
    if not seen:
        return None
    raise _nothing_left(directory, rejected)


def _nothing_left(directory: Directory, rejected: list[Rejection]) -> CheckpointError:
    kinds = {rejection.kind for rejection in rejected}
    known = {"Incomplete": Incomplete, "Corrupt": Corrupt, "Untrusted": Untrusted}
    kind = known.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    first: dict[int, Rejection] = {}
    for rejection in rejected:
        first.setdefault(rejection.generation, rejection)
    reasons = "; ".join(str(first[generation]) for generation in sorted(first, reverse=True))
    return kind(
        f"{directory.path} holds generations, but none that all ranks can load: {reasons}. "
        "Repair or move them away; to start from scratch, give an empty directory"
    )


def _lacking(copies: list[dict[int, str]], rejected: list[Rejection], seen: set[int]) -> list[Rejection]:
    """Name the ranks that lack a generation which others have, or have another attempt of it."""
    found = []
    named = {(rejection.generation, rejection.rank) for rejection in rejected}
    for generation in seen:
        attempts = [copy[generation] for copy in copies if generation in copy]
        for rank, copy in enumerate(copies):
            if (generation, rank) in named or (generation in copy and copy[generation] == attempts[0]):
                continue
            reason = "belongs to another attempt" if generation in copy else "this rank has no copy"
            found.append(_reject(Incomplete(reason), generation, rank))
    return found


def _reject(error: CheckpointError, generation: int, rank: int, file: str | None = None) -> Rejection:
    return Rejection(
        generation=generation,
        tier=TIER,
        rank=rank,
        file=file or f"step-{generation}/{shard_name(rank)}",
        reason=str(error),
        kind=type(error).__name__,
    )


def _list(directory: Directory, peers: Peers, *, run: str, topology: str) -> _Listing:
    copies, rejected = {}, []
    for generation in directory.generations():
        file = f"step-{generation}/manifest.json"
        try:
            manifest, sha = directory.manifest(generation)
            _check_manifest(manifest, peers, generation, run=run, topology=topology)
            file = f"step-{generation}/{shard_name(peers.rank)}"
            check_shard(directory.path / file, manifest, peers.rank)
        except CheckpointError as error:
            rejected.append(_reject(error, generation, peers.rank, file))
        else:
            copies[generation] = sha
    return _Listing(copies, rejected)


def _check_manifest(manifest: Manifest, peers: Peers, generation: int, *, run: str, topology: str) -> None:
    if manifest.run != run:
        raise Untrusted(f"belongs to run {manifest.run}, this directory to run {run}")
    if manifest.world_size != peers.world_size:
        raise Untrusted(
            f"was saved by {manifest.world_size} ranks and cannot be loaded by {peers.world_size}; "
            f"start with {manifest.world_size} ranks"
        )
    if manifest.topology != topology:
        raise Untrusted(f"was saved by ranks of topology {manifest.topology}, these have {topology}")
    if manifest.iteration != generation:
        raise Untrusted(f"is the manifest of iteration {manifest.iteration}")


def _read_and_vote(
    directory: Directory,
    peers: Peers,
    generation: int,
    usable: Callable[[Shard], None],
    *,
    run: str,
    topology: str,
) -> tuple[Shard | None, _Vote]:
    try:
        manifest, _ = directory.manifest(generation)
        shard = read_shard(directory.generation(generation), manifest, peers.rank)
    except CheckpointError as error:
        return None, _Vote(_reject(error, generation, peers.rank))
    except (OSError, MemoryError, RuntimeError) as error:  # torch's lack of memory is a RuntimeError
        return None, _Vote(_reject(CheckpointError(f"cannot be read ({error})"), generation, peers.rank))
    try:
        usable(shard)
    except CheckpointError as error:
        return None, _Vote(None, str(error))
    except Exception as error:  # noqa: BLE001 - a state_dict() may raise anything; the peers wait for the vote
        return None, _Vote(None, f"{type(error).__name__}: {error}")
    return shard, _Vote(None)
