"""One generation of the local tier, judged by what each node that is here has of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from outlast.checkpoint.catalogue.entries import (
    Found,
    Generation,
    Held,
    Problem,
    StoredFile,
    describe_error,
)
from outlast.checkpoint.catalogue.node_copy import NodeCopy, remove_copies
from outlast.checkpoint.catalogue.shard_file import PIECE_BYTES, check_shard_file, open_file
from outlast.checkpoint.manifest import MANIFEST, Manifest
from outlast.checkpoint.shard import shard_name
from outlast.env import clean_name
from outlast.errors import CheckpointError, Incomplete, Untrusted
from outlast.policy.partners import parity_groups

__all__ = ["examine"]


def examine(copies: list[NodeCopy], nodes: tuple[str, ...], pool: ThreadPoolExecutor, *, suspect: bool) -> Found:
    """Judge a generation of the local tier by its files' lengths and headers.

    Args:
        copies: What each node has of it.
        nodes: All nodes' folders that are here.
        pool: Does the looking.
        suspect: It was saved for diagnosis.
    """
    named = [copy for copy in copies if copy.manifest is not None]
    remove = partial(remove_copies, copies)
    if not named or named[0].manifest is None:
        entry = Generation(
            iteration=copies[0].iteration,
            tier="local",
            suspect=suspect,
            valid=False,
            num_files=sum(copy.num_files for copy in copies),
            num_bytes=sum(copy.num_bytes for copy in copies),
            problems=tuple(copy.problem for copy in copies if copy.problem is not None),
        )
        return Found(entry=entry, files=(), judge=lambda problems: entry, remove=remove)
    manifest = named[0].manifest
    good = [copy for copy in named if copy.sha256 == named[0].sha256]
    owners = _name_owners(manifest, {copy.node: copy.ranks for copy in good}, nodes)
    outcomes = list(pool.map(lambda one: _check(one[0], one[1], manifest), _expect(good, owners)))
    files = tuple(outcome for outcome in outcomes if isinstance(outcome, StoredFile))
    problems = [
        *_of_folders(copies, named[0], owners),
        *(outcome for outcome in outcomes if isinstance(outcome, Problem)),
        *_lost_copies(manifest, owners, good),
    ]
    entry = Generation(
        iteration=manifest.iteration,
        tier="local",
        suspect=suspect,
        valid=False,
        attempt=manifest.attempt,
        run=manifest.run,
        world_size=manifest.world_size,
        num_files=sum(copy.num_files for copy in copies),
        num_bytes=sum(copy.num_bytes for copy in copies),
        restored_from=manifest.restored_from,
        restored_attempt=manifest.restored_attempt,
        finite=manifest.finite,
        problems=tuple(problems),
    )
    judge = partial(_judge, entry, manifest, good, owners, files)
    return Found(entry=judge(()), files=files, judge=judge, remove=remove)


def _judge(
    entry: Generation,
    manifest: Manifest,
    copies: list[NodeCopy],
    owners: Mapping[int, str],
    files: tuple[StoredFile, ...],
    problems: Sequence[Problem],
) -> Generation:
    """Return an entry with what its good files amount to, once those with problems are left out."""
    bad = {problem.file for problem in problems}
    held = {(file.node, file.rank) for file in files if file.name not in bad}
    present = {rank for _, rank in held if rank is not None}
    absent = [rank for rank in range(manifest.world_size) if rank not in present]
    rebuildable = _list_rebuildable(manifest, present, {rank for copy in copies for rank in copy.parities})
    missing = tuple(rank for rank in absent if rank in owners and rank not in rebuildable)
    return msgspec.structs.replace(
        entry,
        valid=not missing and bool(present),
        held=tuple(
            Held(
                node=copy.node,
                own=tuple(r for r in copy.ranks if (copy.node, r) in held and owners.get(r) == copy.node),
                replicas=tuple(r for r in copy.ranks if (copy.node, r) in held and owners.get(r) != copy.node),
                parities=copy.parities,
            )
            for copy in copies
        ),
        elsewhere=tuple(rank for rank in absent if rank not in owners and rank not in rebuildable),
        rebuildable=rebuildable,
        missing=missing,
        problems=(*entry.problems, *problems),
    )


def _expect(copies: list[NodeCopy], owners: Mapping[int, str]) -> list[tuple[NodeCopy, int]]:
    """Return the files to check: those that are there, and those that should be."""
    return [
        (copy, rank)
        for copy in copies
        for rank in sorted({*copy.ranks, *(rank for rank, owner in owners.items() if owner == copy.node)})
    ]


def _of_folders(copies: list[NodeCopy], first: NodeCopy, owners: Mapping[int, str]) -> Iterator[Problem]:
    """Yield what is wrong with whole folders: bad manifests, manifests that differ, nodes that lost theirs."""
    for copy in copies:
        if copy.problem is not None:
            yield copy.problem
        elif copy.sha256 != first.sha256:
            other = Untrusted(f"differs from that of {first.node}, of the same attempt")
            yield describe_error(other, f"{copy.name}/{MANIFEST}", node=copy.node)
    for node in sorted(set(owners.values()) - {copy.node for copy in copies}):
        lacks = Incomplete("is missing: this node, whose ranks saved it, has nothing of it")
        yield describe_error(lacks, first.name.replace(f"{first.node}/", f"{node}/", 1), node=node)


def _name_owners(manifest: Manifest, present: Mapping[str, Collection[int]], nodes: tuple[str, ...]) -> dict[int, str]:
    """Return which of the folders here each rank saved into; ranks of nodes that are not here are left out.

    A folder has its node's name, but may have been copied under another: then its node is the one of whose ranks it has
    most. Two machines of one name are told apart in the manifest by a number behind the name.
    """
    everyone = manifest.nodes or (nodes[0],) * manifest.world_size
    owners: dict[int, str] = {}
    for folder in nodes:
        same = [name for name in dict.fromkeys(everyone) if re.sub(r"\.\d+$", "", clean_name(name)) == folder]
        same = [name for name in dict.fromkeys(everyone) if clean_name(name) == folder] + same
        if not same and folder in present:
            taken = {clean_name(name) for name in everyone} & set(nodes)
            same = [name for name in dict.fromkeys(everyone) if clean_name(name) not in taken]
        if not same:
            continue
        here = present.get(folder, ())
        chosen = max(same, key=lambda name: sum(everyone[rank] == name for rank in here if rank < len(everyone)))
        owners.update({rank: folder for rank, name in enumerate(everyone) if name == chosen and rank not in owners})
    return owners


def _check(copy: NodeCopy, rank: int, manifest: Manifest) -> Problem | StoredFile:
    path = copy.directory.generation(copy.iteration) / shard_name(rank)
    name = f"{copy.name}/{shard_name(rank)}"
    if rank >= manifest.world_size:
        stray = Untrusted(f"belongs to no rank: there were {manifest.world_size}")
        return describe_error(stray, name, node=copy.node, rank=rank)
    try:
        check_shard_file(path, manifest, rank)
    except CheckpointError as error:
        return describe_error(error, name, node=copy.node, rank=rank)
    shard = manifest.shards[rank]
    return StoredFile(
        name=name,
        num_bytes=shard.num_bytes,
        chunks=shard.chunks,
        tensors=[(tensor.name, tensor.offset, tensor.num_bytes) for tensor in shard.tensors],
        open=partial(open_file, path),
        piece_bytes=PIECE_BYTES,
        node=copy.node,
        rank=rank,
    )


def _list_rebuildable(manifest: Manifest, present: Collection[int], beside: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that have no copy here, but whose group's other shards and parities are all here.

    Args:
        manifest: Of the generation.
        present: Ranks of which a good copy is here.
        beside: Ranks beside which a parity lies.
    """
    if not manifest.parity:
        return ()
    ranks: list[int] = []
    for group in parity_groups(manifest.nodes, manifest.parity):
        absent = set(group).difference(present)
        others = set(group) - absent
        if len(absent) == 1 and others and others.issubset(beside):
            ranks += absent
    return tuple(sorted(ranks))


def _lost_copies(manifest: Manifest, owners: Mapping[int, str], copies: list[NodeCopy]) -> Iterator[Problem]:
    """Yield the ranks that have fewer copies than were committed; known only when all nodes are here."""
    if manifest.parity or len(manifest.num_copies) != manifest.world_size or len(owners) != manifest.world_size:
        return
    for rank, committed in enumerate(manifest.num_copies):
        left = sum(rank in copy.ranks and copy.node != owners[rank] for copy in copies)
        if left < committed:
            lost = Incomplete(f"{left} of {committed} copies on other nodes are left")
            yield describe_error(lost, f"step-{manifest.iteration}/{shard_name(rank)}", rank=rank)
