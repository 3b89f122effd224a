"""Lists and verifies the contents of a checkpoint directory of either kind.

Local tier: one node's folder, or all of them side by side; each holds its node's ranks and copies of others'. A
checkpoint is judged by the folders that are here; ranks of absent nodes are "elsewhere". A global directory, on a file
system or in an object store, holds all ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from outlast.checkpoint import verification
from outlast.checkpoint.catalogue.entries import (
    Checkpoint,
    DirectoryListing,
    Leftover,
    ListedCheckpoint,
    ListedLeftover,
    ListedPlace,
    NodeHolding,
    Problem,
    check_hint,
    describe_error,
    describe_manifest,
    list_leftovers,
    mark_abandoned,
)
from outlast.checkpoint.dcp.directory import GlobalDirectory, is_attempt_file
from outlast.checkpoint.dcp.manifest import METADATA, FileEntry, GlobalManifest, decode_global_manifest, find_torn
from outlast.checkpoint.dcp.store import is_remote, local_path, open_store
from outlast.checkpoint.directory import RUN, SUSPECT, TRACKER, Directory, owner_of
from outlast.checkpoint.manifest import MANIFEST, Manifest
from outlast.checkpoint.shard import shard_name
from outlast.checkpoint.verification import (
    PIECE_BYTES,
    StoredFile,
    VerifiedFiles,
    check_origin,
    check_shard,
    read_path,
    shard_file,
)
from outlast.env import clean_name
from outlast.errors import CheckpointError, ConfigError, Incomplete, Untrusted
from outlast.policy.checkpoint_plan import parity_groups

_SHARD = re.compile(r"rank-(\d{5,})\.safetensors")
_PARITY = re.compile(r"parity-(\d{5,})\.bin")


@dataclass(slots=True)
class NodeCopy:
    """One node's folder of a checkpoint."""

    node: str
    directory: Directory
    name: str
    """Folder name relative to the listed directory."""
    iteration: int
    manifest: Manifest | None = None
    """``None``: the manifest cannot be read or trusted."""
    sha256: str = ""
    problem: Problem | None = None
    ranks: list[int] = field(default_factory=list)
    """Ranks whose files exist, valid or not."""
    parities: list[int] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0

    @property
    def path(self) -> Path:
        return self.directory.checkpoint(self.iteration)


def _read_copy(directory: Directory, node: str, prefix: str, run: str | None, iteration: int) -> NodeCopy:
    """Scan one folder of a checkpoint.

    Args:
        run: The run that owns the node's folder; ``None`` = unknown.
    """
    copy = NodeCopy(node, directory, f"{prefix}step-{iteration}", iteration)
    try:
        for entry in os.scandir(copy.path):
            copy.num_files += 1
            copy.num_bytes += entry.stat(follow_symlinks=False).st_size
            if match := _SHARD.fullmatch(entry.name):
                copy.ranks.append(int(match[1]))
            elif match := _PARITY.fullmatch(entry.name):
                copy.parities.append(int(match[1]))
        copy.ranks.sort()
        copy.parities.sort()
        manifest, copy.sha256 = directory.manifest(iteration)
        check_origin(manifest, iteration=iteration, run=run)
        copy.manifest = manifest
    except (OSError, CheckpointError) as error:
        copy.problem = describe_error(error, f"{copy.name}/{MANIFEST}", node=node)
    return copy


def _group_copies(copies: Iterable[NodeCopy]) -> list[list[NodeCopy]]:
    """Return the folders of each checkpoint, newest first.

    A folder without a valid manifest belongs to the checkpoint of its iteration if there is only one.
    """
    attempts: dict[int, dict[str, list[NodeCopy]]] = {}
    for copy in copies:
        name = "" if copy.manifest is None else copy.manifest.attempt
        attempts.setdefault(copy.iteration, {}).setdefault(name, []).append(copy)
    groups = []
    for _, of_iteration in sorted(attempts.items(), reverse=True):
        unnamed = of_iteration.pop("", [])
        named = [group for _, group in sorted(of_iteration.items(), reverse=True)]
        if len(named) == 1:
            named[0].extend(unnamed)
        elif unnamed:
            named.append(unnamed)
        groups += named
    return groups


def _remove_copies(copies: Sequence[NodeCopy]) -> None:
    """Delete a checkpoint's folders.

    Raises: CheckpointError (a folder has changed since it was listed: a run is using it); OSError (a folder cannot be
    deleted).
    """
    for copy in copies:
        if not copy.path.exists():
            continue  # the owning run deleted it first
        sha256 = ""
        with contextlib.suppress(CheckpointError):
            sha256 = copy.directory.manifest(copy.iteration)[1]
        if sha256 != copy.sha256:
            raise CheckpointError(f"{copy.name} has changed meanwhile and is left alone")
        with contextlib.suppress(FileNotFoundError):  # the owning run deleted it first
            copy.directory.remove(copy.iteration)


def _examine_local(
    copies: list[NodeCopy], nodes: tuple[str, ...], pool: ThreadPoolExecutor, *, suspect: bool
) -> ListedCheckpoint:
    """Judge a checkpoint of the local tier by its files' sizes and headers."""
    named = [copy for copy in copies if copy.manifest is not None]
    remove = partial(_remove_copies, copies)
    entry = Checkpoint(
        iteration=copies[0].iteration,
        tier="local",
        suspect=suspect,
        valid=False,
        num_files=sum(copy.num_files for copy in copies),
        num_bytes=sum(copy.num_bytes for copy in copies),
        problems=tuple(copy.problem for copy in copies if copy.problem is not None),
    )
    if not named or named[0].manifest is None:
        is_own = all(copy.directory.is_own(copy.iteration) for copy in copies)
        return ListedCheckpoint(entry=entry, files=(), judge=lambda problems: entry, remove=remove, is_own=is_own)
    manifest = named[0].manifest
    good = [copy for copy in named if copy.sha256 == named[0].sha256]
    owners = _name_owners(manifest, {copy.node: copy.ranks for copy in good}, nodes)
    expected = [
        (copy, rank)
        for copy in good
        for rank in sorted({*copy.ranks, *(rank for rank, owner in owners.items() if owner == copy.node)})
    ]  # the existing files and the expected ones
    outcomes = list(pool.map(lambda one: _check(one[0], one[1], manifest), expected))
    files = tuple(outcome for outcome in outcomes if isinstance(outcome, StoredFile))
    problems = [
        *_of_folders(copies, named[0], owners),
        *(outcome for outcome in outcomes if isinstance(outcome, Problem)),
        *_lost_copies(manifest, owners, good),
    ]
    described = describe_manifest(entry, manifest, problems)

    def judge(more: Sequence[Problem]) -> Checkpoint:
        """Return the entry judged by the valid files without those in ``more``."""
        bad = {problem.file for problem in more}
        held = {(file.node, file.rank) for file in files if file.name not in bad}
        present = {rank for _, rank in held if rank is not None}
        absent = [rank for rank in range(manifest.world_size) if rank not in present]
        rebuildable = _list_rebuildable(manifest, present, {rank for copy in good for rank in copy.parities})
        missing = tuple(rank for rank in absent if rank in owners and rank not in rebuildable)
        here = [(copy, [rank for rank in copy.ranks if (copy.node, rank) in held]) for copy in good]
        return msgspec.structs.replace(
            described,
            valid=not missing and bool(present),
            held=tuple(
                NodeHolding(
                    node=copy.node,
                    own=tuple(rank for rank in ranks if owners.get(rank) == copy.node),
                    replicas=tuple(rank for rank in ranks if owners.get(rank) != copy.node),
                    parities=tuple(copy.parities),
                )
                for copy, ranks in here
            ),
            elsewhere=tuple(rank for rank in absent if rank not in owners and rank not in rebuildable),
            rebuildable=rebuildable,
            missing=missing,
            problems=(*described.problems, *more),
        )

    return ListedCheckpoint(entry=judge(()), files=files, judge=judge, remove=remove)


def _of_folders(copies: list[NodeCopy], first: NodeCopy, owners: Mapping[int, str]) -> Iterator[Problem]:
    """Yield the problems of whole folders: invalid or differing manifests, and nodes without a folder."""
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
    """Return the folder that each rank saved into; ranks of absent nodes are left out.

    A folder has its node's name, but may have been copied under another; then its node is the one with most of its
    ranks. Two machines of one name are distinguished in the manifest by a numeric suffix.
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
    name = f"{copy.name}/{shard_name(rank)}"
    if rank >= manifest.world_size:
        stray = Untrusted(f"belongs to no rank: there were {manifest.world_size}")
        return describe_error(stray, name, node=copy.node, rank=rank)
    try:
        check_shard(copy.path / shard_name(rank), manifest, rank, read_head=True)
    except CheckpointError as error:
        return describe_error(error, name, node=copy.node, rank=rank)
    read = partial(read_path, copy.path / shard_name(rank))
    return shard_file(manifest.shards[rank], read, name=name, room_bytes=PIECE_BYTES, node=copy.node)


def _list_rebuildable(manifest: Manifest, present: Collection[int], parities: Collection[int]) -> tuple[int, ...]:
    """Return the ranks without a copy here whose group's other shards and parities are all here."""
    if not manifest.parity:
        return ()
    ranks: list[int] = []
    for group in parity_groups(manifest.nodes, manifest.parity):
        absent = set(group).difference(present)
        others = set(group) - absent
        if len(absent) == 1 and others and others.issubset(parities):
            ranks += absent
    return tuple(sorted(ranks))


def _lost_copies(manifest: Manifest, owners: Mapping[int, str], copies: list[NodeCopy]) -> Iterator[Problem]:
    """Yield the ranks with fewer copies than were committed; known only if all nodes are here."""
    if manifest.parity or len(manifest.num_copies) != manifest.world_size or len(owners) != manifest.world_size:
        return
    for rank, committed in enumerate(manifest.num_copies):
        left = sum(rank in copy.ranks and copy.node != owners[rank] for copy in copies)
        if left < committed:
            lost = Incomplete(f"{left} of {committed} copies on other nodes are left")
            yield describe_error(lost, f"step-{manifest.iteration}/{shard_name(rank)}", rank=rank)


NUM_THREADS = 8


def _is_node_folder(path: Path) -> bool:
    """Return whether a folder directly contains checkpoints or is marked as a checkpoint folder."""
    names = os.listdir(path)
    return any(_STEP.fullmatch(name) for name in names) or RUN in names or SUSPECT in names


def find_node_folders(path: Path) -> list[Path]:
    """Return the nodes' folders by name: the given folder, or those in it.

    An empty folder next to a node's folder also counts: its node was replaced, or has just started.
    """
    if _is_node_folder(path):
        return [path]
    below = [path / name for name in sorted(os.listdir(path)) if name != "lost+found" and (path / name).is_dir()]
    if not any(_is_node_folder(folder) for folder in below):
        return []
    return [folder for folder in below if _is_node_folder(folder) or not os.listdir(folder)]


def look_into_folders(path: Path, folders: list[Path]) -> DirectoryListing:
    """List the contents of nodes' folders. Raises OSError if a folder cannot be read."""
    nodes = tuple(folder.name for folder in folders)
    owners = {folder: owner_of(Directory(folder)) for folder in folders}
    runs = {folder: None if owner is None else owner.run for folder, owner in owners.items()}
    verified = {owner.run for owner in owners.values() if owner is not None and owner.is_verified}
    problems: list[Problem] = []
    for folder, owner in owners.items():
        prefix = "" if folder == path else f"{folder.relative_to(path)}/"
        hint, is_there = Directory(folder).hint(), (folder / RUN).exists()
        problems += check_hint(hint, owner, is_there=is_there, verified=verified, prefix=prefix, node=folder.name)
    found: list[ListedCheckpoint] = []
    remains: list[ListedLeftover] = []
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-list") as pool:
        for suspect in (False, True):
            copies: list[NodeCopy] = []
            for folder in folders:
                directory = Directory(folder / SUSPECT if suspect else folder)
                prefix = "" if directory.path == path else f"{directory.path.relative_to(path)}/"
                copies += pool.map(
                    partial(_read_copy, directory, folder.name, prefix, runs[folder]), directory.checkpoints()
                )
                remains += list_leftovers(directory.path, prefix)
            for group in _group_copies(copies):
                found.append(_examine_local(group, nodes, pool, suspect=suspect))
    latest = [iteration for folder in folders if (iteration := Directory(folder).latest()) is not None]
    place = ListedPlace(
        path=os.fspath(path),
        tier="local" if folders else "empty",
        run=", ".join(sorted({run for run in runs.values() if run is not None})) or None,
        latest=max(latest, default=None),
        nodes=nodes,
        problems=tuple(problems),
    )
    return DirectoryListing(place=place, found=tuple(found), remains=tuple(remains))


_FILE = re.compile(rf"(?P<above>{SUSPECT}/)?step-(?P<iteration>\d+)/(?P<name>.+)")


def look_into_store(url: str) -> DirectoryListing:
    """List the contents of a global directory.

    Raises: CheckpointError (the object store does not respond); ConfigError (the directory is empty); OSError (a folder
    cannot be read). Blocks: up to the store's time limit for one listing, and one manifest for every ``NUM_THREADS``
    checkpoints.
    """
    directory = GlobalDirectory.open(url)
    sizes = directory.sizes("")
    if not sizes and directory.is_remote:
        raise ConfigError(f"{url} is empty or does not exist; give a directory that contains checkpoints")
    owner = owner_of(directory)
    run = None if owner is None else owner.run
    folders: dict[tuple[bool, int], dict[str, int]] = {}
    for name, size in sizes.items():
        if match := _FILE.fullmatch(name):
            folders.setdefault((match["above"] is None, int(match["iteration"])), {})[match["name"]] = size

    def examine(one: tuple[bool, int]) -> ListedCheckpoint | ListedLeftover:
        return _examine_global(directory, one[1], folders[one], suspect=not one[0], run=run)

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-list") as pool:
        outcomes = list(pool.map(examine, sorted(folders, reverse=True)))
    remains = [one for one in outcomes if isinstance(one, ListedLeftover)]
    if not directory.is_remote:  # in an object store, an unfinished checkpoint already has its final name
        path = Path(directory.url)
        remains += [*list_leftovers(path, ""), *list_leftovers(path / SUSPECT, f"{SUSPECT}/")]
    found = tuple(one for one in outcomes if isinstance(one, ListedCheckpoint))
    place = ListedPlace(
        path=url,
        tier="global",
        run=run,
        latest=directory.latest() if TRACKER in sizes else None,
        problems=check_hint(directory.hint(), owner, is_there=RUN in sizes),
    )
    return DirectoryListing(place=place, found=found, remains=tuple(remains))


def _examine_global(
    directory: GlobalDirectory, iteration: int, sizes: Mapping[str, int], *, suspect: bool, run: str | None
) -> ListedCheckpoint | ListedLeftover:
    folder = f"{SUSPECT}/step-{iteration}" if suspect else f"step-{iteration}"
    entry = Checkpoint(
        iteration=iteration,
        tier="global",
        suspect=suspect,
        valid=False,
        num_files=len(sizes),
        num_bytes=sum(sizes.values()),
    )
    data = None
    try:
        if MANIFEST not in sizes:
            if directory.is_remote:
                return _unfinished(directory.url, folder, iteration, sizes)
            raise Incomplete("there is no manifest")
        data = directory.read(f"{folder}/{MANIFEST}")
        manifest = decode_global_manifest(data)
        check_origin(manifest, iteration=iteration, run=run)
    except (OSError, CheckpointError) as error:
        bad = msgspec.structs.replace(entry, problems=(describe_error(error, f"{folder}/{MANIFEST}"),))
        remove = partial(_remove, directory, folder, iteration, data)
        is_own = (directory.suspects if suspect else directory).is_own(iteration)
        return ListedCheckpoint(entry=bad, files=(), judge=lambda problems: bad, remove=remove, is_own=is_own)
    problems = [
        describe_error(error, f"{folder}/{file.name}")
        for file, error in find_torn(_all_files(manifest), sizes)
        if file is not manifest.metadata or file.name in sizes
    ]
    if METADATA not in sizes:
        lacks = Incomplete("is missing; outlast does not need it, other readers of the format do")
        problems.append(describe_error(lacks, f"{folder}/{METADATA}"))
    torn = {problem.file for problem in problems}
    entry = msgspec.structs.replace(
        describe_manifest(entry, manifest, problems),
        valid=not torn - {f"{folder}/{METADATA}"},
        unverified=() if manifest.metadata is not None else (f"{folder}/{METADATA}",),
    )

    def judge(more: Sequence[Problem]) -> Checkpoint:
        """Return the entry with problems of files; only ``.metadata`` is not needed for loading."""
        is_torn = any(not problem.file.endswith(f"/{METADATA}") for problem in more)
        return msgspec.structs.replace(entry, valid=entry.valid and not is_torn, problems=(*entry.problems, *more))

    verified = VerifiedFiles(directory, manifest, folder)
    files = [
        verified.stored(file, index if index < len(manifest.files) else None)
        for index, file in enumerate(_all_files(manifest))
    ]
    return ListedCheckpoint(
        entry=entry,
        files=tuple(file for file in files if file.name not in torn),
        judge=judge,
        remove=partial(_remove, directory, folder, iteration, data),
    )


def _unfinished(url: str, folder: str, iteration: int, sizes: Mapping[str, int]) -> ListedLeftover:
    """Return the leftover for a folder without a manifest in an object store: a running or failed attempt."""
    store = open_store(url)
    entry = Leftover(
        name=folder,
        kind="attempt",
        iteration=iteration,
        num_bytes=sum(sizes.values()),
        modified_ns=store.modified_ns(folder),
    )
    own = [name for name in sizes if is_attempt_file(name)]
    return ListedLeftover(
        entry=entry,
        remove=partial(store.remove, [f"{folder}/{name}" for name in (*own, *({METADATA} & set(sizes)))]),
        is_own=bool(own),
    )


def _all_files(manifest: GlobalManifest) -> tuple[FileEntry, ...]:
    return manifest.files if manifest.metadata is None else (*manifest.files, manifest.metadata)


def _remove(directory: GlobalDirectory, folder: str, iteration: int, listed: bytes | None) -> None:
    """Delete a checkpoint unless its manifest has changed since it was listed."""
    data = None
    with contextlib.suppress(FileNotFoundError):
        data = directory.read(f"{folder}/{MANIFEST}")
    if data is not None and data != listed:
        raise CheckpointError(f"{folder} has changed meanwhile and is left alone")
    with contextlib.suppress(FileNotFoundError):  # the owning run deleted it first
        (directory.suspects if folder.startswith(SUSPECT) else directory).remove(iteration)


_STEP = re.compile(r"step-\d+(?:\..+)?")
_TELLING_FILE = re.compile(r"(?P<store>\.metadata|__\d+_\d+\.distcp)|rank-\d+\.safetensors|parity-\d+\.bin")


def look_into(name: str) -> DirectoryListing:
    """List the contents of a directory.

    Args:
        name: Path of a node's folder, of a ``local_directory`` with a folder for each node, or of a global directory;
            or
            the URL of a global directory.

    Raises: ConfigError (the directory is none of these); CheckpointError (the object store cannot be reached); OSError
    (the directory cannot be read).
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{ascii(name)[1:-1]} is not UTF-8; no run saves to such a folder; rename it") from None
    (looked,) = mark_abandoned([_look_into(name)])
    return looked


def _look_into(name: str) -> DirectoryListing:
    if is_remote(name):
        return look_into_store(name)
    path = Path(os.path.abspath(local_path(name)))
    if not path.exists():
        raise ConfigError(f"{name} does not exist; check the path")
    if not path.is_dir():
        raise ConfigError(f"{name} is not a directory; give the directory that contains the checkpoints")
    if (path / MANIFEST).is_file():
        raise ConfigError(f"{name} is a single checkpoint; give its parent directory: {path.parent}")
    if path.name == SUSPECT and find_node_folders(path.parent) == [path.parent]:
        raise ConfigError(f"{name} contains saves for diagnosis; give its parent directory: {path.parent}")
    if _is_store(path):
        return look_into_store(os.fspath(path))
    return look_into_folders(path, find_node_folders(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    entry: Checkpoint
    """With the problems found; ``valid`` is judged by the bytes."""
    num_bytes_read: int


def verify(
    found: ListedCheckpoint, *, num_threads: int, on_read: Callable[[int], None] = lambda num_bytes: None
) -> Verified:
    """Compare every byte of a checkpoint with its digest.

    Args:
        num_threads: Readers; each holds a piece of a file in memory (1 MiB; 8 MiB from an object store).
        on_read: Called in the readers' threads with the number of bytes just read.

    Blocks: until all is read. Ctrl-C ends the call once each reader has read its current piece.
    """
    sizes: list[int] = []

    def count(piece: memoryview, _: int) -> None:
        sizes.append(len(piece))
        on_read(len(piece))

    flaws = verification.verify(found.files, num_threads=num_threads, on_piece=count)
    problems = [
        msgspec.structs.replace(
            describe_error(flaw.error, flaw.file.name, node=flaw.file.node, rank=flaw.file.rank),
            chunk=flaw.chunk,
            tensors=flaw.contents,
        )
        for flaw in flaws
    ]
    judged = msgspec.structs.replace(found.judge(problems), abandoned=found.entry.abandoned)
    return Verified(entry=judged, num_bytes_read=sum(sizes))


def _is_store(path: Path) -> bool:
    """Return whether a folder contains checkpoints of the global tier, judging by the first one with files."""
    for above in (path, path / SUSPECT):
        for name in os.listdir(above) if above.is_dir() else ():
            if _STEP.fullmatch(name) and (above / name).is_dir():
                found = [match for file in os.listdir(above / name) if (match := _TELLING_FILE.fullmatch(file))]
                if found:
                    return any(match["store"] for match in found)
    return False
