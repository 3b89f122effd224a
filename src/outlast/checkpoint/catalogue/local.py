"""The generations in nodes' folders: of one node, or of all whose folders lie side by side.

A folder of one node holds that node's ranks, and copies of other nodes' ranks. A generation is judged by what each node
that is here has of it; nothing can be known of what lies on nodes whose folders are not here: it is "elsewhere".
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from outlast.checkpoint.catalogue.entries import (
    DirectoryListing,
    Generation,
    ListedGeneration,
    ListedLeftover,
    ListedPlace,
    NodeHolding,
    Problem,
    check_hint,
    describe_error,
    describe_manifest,
    list_leftovers,
)
from outlast.checkpoint.directory import RUN, SUSPECT, TRACKER, Directory, owner_of
from outlast.checkpoint.manifest import MANIFEST, Manifest
from outlast.checkpoint.shard import shard_name
from outlast.checkpoint.verification import PIECE_BYTES, StoredFile, check_origin, check_shard, read_path, shard_file
from outlast.env import clean_name
from outlast.errors import CheckpointError, Incomplete, Untrusted
from outlast.policy.checkpoint_plan import parity_groups

__all__ = ["find_node_folders", "look_into_folders"]

_SHARD = re.compile(r"rank-(\d{5,})\.safetensors")
_PARITY = re.compile(r"parity-(\d{5,})\.bin")


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """One folder of a generation: what one node has of it."""

    node: str
    directory: Directory
    name: str
    """Of the generation's folder, relative to the place."""
    iteration: int
    manifest: Manifest | None
    """``None``: it cannot be read or trusted."""
    sha256: str
    problem: Problem | None
    ranks: tuple[int, ...]
    """Whose files are there, good or not."""
    parities: tuple[int, ...]
    num_files: int
    num_bytes: int


def _read_copy(directory: Directory, node: str, prefix: str, run: str | None, iteration: int) -> NodeCopy:
    """Look into one folder of a generation.

    Args:
        directory: That it lies in.
        node: Whose folder that is.
        prefix: Of its name, relative to the place.
        run: That the node's folder belongs to; ``None`` = that is not known.
        iteration: Of the generation.
    """
    path = directory.generation(iteration)
    ranks, parities, num_files, num_bytes = [], [], 0, 0
    manifest, sha256, problem = None, "", None
    name = f"{prefix}{path.name}"
    try:
        for entry in os.scandir(path):
            num_files += 1
            num_bytes += entry.stat(follow_symlinks=False).st_size
            if match := _SHARD.fullmatch(entry.name):
                ranks.append(int(match[1]))
            elif match := _PARITY.fullmatch(entry.name):
                parities.append(int(match[1]))
        manifest, sha256 = directory.manifest(iteration)
        check_origin(manifest, iteration=iteration, run=run)
    except (OSError, CheckpointError) as error:
        problem = describe_error(error, f"{name}/{MANIFEST}", node=node)
        manifest = None
    return NodeCopy(
        node=node,
        directory=directory,
        name=name,
        iteration=iteration,
        manifest=manifest,
        sha256=sha256,
        problem=problem,
        ranks=tuple(sorted(ranks)),
        parities=tuple(sorted(parities)),
        num_files=num_files,
        num_bytes=num_bytes,
    )


def _group_copies(copies: Iterable[NodeCopy]) -> list[list[NodeCopy]]:
    """Return what belongs to one generation each, newest first.

    A folder without a good manifest belongs to the generation of its iteration when there is only one.
    """
    attempts: dict[int, dict[str, list[NodeCopy]]] = {}
    unnamed: dict[int, list[NodeCopy]] = {}
    for copy in copies:
        if copy.manifest is None:
            unnamed.setdefault(copy.iteration, []).append(copy)
        else:
            attempts.setdefault(copy.iteration, {}).setdefault(copy.manifest.attempt, []).append(copy)
    groups = []
    for iteration in sorted({*attempts, *unnamed}, reverse=True):
        named = [group for _, group in sorted(attempts.get(iteration, {}).items(), reverse=True)]
        rest = unnamed.get(iteration, [])
        if len(named) == 1:
            named[0].extend(rest)
        elif rest:
            named.append(rest)
        groups += named
    return groups


def _remove_copies(copies: Sequence[NodeCopy]) -> None:
    """Delete a generation's folders.

    Raises:
        CheckpointError: One is not what was listed any more: a run is at work there.
        OSError: One cannot be deleted.
    """
    for copy in copies:
        if not copy.directory.generation(copy.iteration).exists():
            continue  # the run that it belongs to was quicker
        try:
            sha256 = copy.directory.manifest(copy.iteration)[1]
        except CheckpointError:
            sha256 = ""
        if sha256 != copy.sha256:
            raise CheckpointError(f"{copy.name} has changed meanwhile and is left alone")
        try:
            copy.directory.remove(copy.iteration)
        except FileNotFoundError:
            continue  # the run that it belongs to was quicker


def _examine(
    copies: list[NodeCopy], nodes: tuple[str, ...], pool: ThreadPoolExecutor, *, suspect: bool
) -> ListedGeneration:
    """Judge a generation of the local tier by its files' lengths and headers.

    Args:
        copies: What each node has of it.
        nodes: All nodes' folders that are here.
        pool: Does the looking.
        suspect: It was saved for diagnosis.
    """
    named = [copy for copy in copies if copy.manifest is not None]
    remove = partial(_remove_copies, copies)
    entry = Generation(
        iteration=copies[0].iteration,
        tier="local",
        suspect=suspect,
        valid=False,
        num_files=sum(copy.num_files for copy in copies),
        num_bytes=sum(copy.num_bytes for copy in copies),
        problems=tuple(copy.problem for copy in copies if copy.problem is not None),
    )
    if not named or named[0].manifest is None:
        return ListedGeneration(entry=entry, files=(), judge=lambda problems: entry, remove=remove)
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
    judge = partial(_judge, describe_manifest(entry, manifest, problems), manifest, good, owners, files)
    return ListedGeneration(entry=judge(()), files=files, judge=judge, remove=remove)


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
            NodeHolding(
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
    most. Two machines of one name differ in the manifest by a number behind the name.
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
        check_shard(path, manifest, rank, read_head=True)
    except CheckpointError as error:
        return describe_error(error, name, node=copy.node, rank=rank)
    read = partial(read_path, path)
    return shard_file(manifest.shards[rank], read, name=name, room_bytes=PIECE_BYTES, node=copy.node)


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


NUM_THREADS = 8
_STEP = re.compile(r"step-\d+(?:\..+)?")


def _is_node_folder(path: Path) -> bool:
    """Return whether a folder directly holds generations, or is marked as doing so."""
    names = os.listdir(path)
    return any(_STEP.fullmatch(name) for name in names) or RUN in names or SUSPECT in names


def find_node_folders(path: Path) -> list[Path]:
    """Return the nodes' folders: the given one, or those in it; by name.

    Beside a node's folder an empty one is a node's too: of one that was replaced, or has just begun.
    """
    if _is_node_folder(path):
        return [path]
    below = [path / name for name in sorted(os.listdir(path)) if name != "lost+found" and (path / name).is_dir()]
    if not any(_is_node_folder(folder) for folder in below):
        return []
    return [folder for folder in below if _is_node_folder(folder) or not os.listdir(folder)]


def look_into_folders(path: Path, folders: list[Path]) -> DirectoryListing:
    """List what lies in nodes' folders.

    Args:
        path: The place.
        folders: As found in it.

    Raises:
        OSError: A folder cannot be read.
    """
    nodes = tuple(folder.name for folder in folders)
    owners = {folder: owner_of(Directory(folder)) for folder in folders}
    runs = {folder: None if owner is None else owner.run for folder, owner in owners.items()}
    proven = {owner.run for owner in owners.values() if owner is not None and owner.is_proven}
    problems: list[Problem] = []
    for folder, owner in owners.items():
        prefix = "" if folder == path else f"{folder.relative_to(path)}/"
        hint, is_there = Directory(folder).hint(), (folder / RUN).exists()
        problems += check_hint(hint, owner, is_there=is_there, proven=proven, prefix=prefix, node=folder.name)
    found: list[ListedGeneration] = []
    remains: list[ListedLeftover] = []
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-list") as pool:
        for suspect in (False, True):
            copies: list[NodeCopy] = []
            for folder in folders:
                directory = Directory(folder / SUSPECT if suspect else folder)
                prefix = "" if directory.path == path else f"{directory.path.relative_to(path)}/"
                copies += pool.map(
                    partial(_read_copy, directory, folder.name, prefix, runs[folder]), directory.generations()
                )
                remains += list_leftovers(directory.path, prefix)
            for group in _group_copies(copies):
                found.append(_examine(group, nodes, pool, suspect=suspect))
    latest = [iteration for folder in folders if (iteration := _read_tracker(folder)) is not None]
    place = ListedPlace(
        path=os.fspath(path),
        tier="local" if folders else "empty",
        run=", ".join(sorted({run for run in runs.values() if run is not None})) or None,
        latest=max(latest, default=None),
        nodes=nodes,
        problems=tuple(problems),
        generations=tuple(one.entry for one in found),
        leftovers=tuple(one.entry for one in remains),
    )
    return DirectoryListing(entry=place, found=tuple(found), remains=tuple(remains))


def _read_tracker(folder: Path) -> int | None:
    """Return the generation that a folder's tracker names; ``None``: there is none that can be read."""
    try:
        number = (folder / TRACKER).read_text("utf-8", errors="replace").strip().removeprefix("step-")
    except OSError:
        return None
    return int(number) if number.isdecimal() else None
