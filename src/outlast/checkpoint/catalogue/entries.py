"""The catalogue's entries: a directory, its checkpoints, problems, files and leftovers; and what may be deleted.

The ``msgspec.Struct`` classes are the documented JSON of ``outlast ckpt``; the dataclasses carry the operations of a
command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from outlast.checkpoint.dcp.manifest import GlobalManifest
from outlast.checkpoint.directory import RUN, holds_own_files
from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.verification import StoredFile
from outlast.errors import CheckpointError, Corrupt, Incomplete
from outlast.policy.checkpoint_plan import choose_kept
from outlast.policy.lease import DirectoryRun
from outlast.policy.lineage import UNKNOWN_ERA, Era, Fork, Lineage, SavedPoint, branch_of


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """Name of the error: ``Incomplete``, ``Corrupt``, ``Untrusted`` or ``CheckpointError`` (cannot be read)."""
    reason: str
    file: str
    """Relative to the listed directory."""
    node: str | None = None
    rank: int | None = None
    chunk: int | None = None
    """Number of the 8 MiB piece, from 0; ``None`` = the whole file."""
    tensors: tuple[str, ...] = ()
    """Tensors in that chunk."""

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class NodeHolding(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a checkpoint in one node's folder; ranks whose file passed the check."""

    node: str
    own: tuple[int, ...]
    """Ranks that ran on this node."""
    replicas: tuple[int, ...] = ()
    """Ranks of other nodes."""
    parities: tuple[int, ...] = ()
    """Ranks whose parity of other nodes' shards is stored here."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint in one directory."""

    iteration: int
    tier: Literal["local", "global"]
    suspect: bool = False
    """Saved for diagnosis only; never loaded automatically."""
    valid: bool
    """Whether each expected rank has a copy here that passed the check; ``problems`` may list other, damaged copies."""
    attempt: str | None = None
    """``None``, like the following fields: the manifest cannot be read."""
    run: str | None = None
    world_size: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    """Bytes in this directory, including replicas and manifests."""
    held: tuple[NodeHolding, ...] = ()
    """By node; empty for the global tier."""
    elsewhere: tuple[int, ...] = ()
    """Ranks whose nodes have no folder here and of which no copy is here: their state is unknown."""
    rebuildable: tuple[int, ...] = ()
    """Ranks without a copy here that can be rebuilt from the other shards and parities of their group."""
    missing: tuple[int, ...] = ()
    """Ranks that should have a valid copy here but do not."""
    restored_from: int | None = None
    """Iteration of the checkpoint that the saving processes had loaded."""
    restored_attempt: str | None = None
    era: Era = UNKNOWN_ERA
    """Era of the branch that saved the checkpoint; see ``policy.lineage``."""
    forks: tuple[Fork, ...] = ()
    """The branches that this branch descends from."""
    abandoned: str | None = None
    """Why no run loads the checkpoint, by the listed directories: its branch was abandoned; ``None`` = loadable."""
    finite: bool | None = None
    """Whether no number is infinite or NaN."""
    unverified: tuple[str, ...] = ()
    """Files, relative to the directory, that cannot be verified: earlier versions stored no digest of them."""
    problems: tuple[Problem, ...] = ()


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Data outside committed checkpoints: a failed or running attempt, or the remains of a deletion."""

    name: str
    """Relative to the listed directory."""
    kind: Literal["attempt", "aside", "deletion"]
    """``aside``: a checkpoint that another attempt at its iteration replaced."""
    iteration: int
    attempt: str | None = None
    num_bytes: int = 0
    modified_ns: int | None = None
    """When a file in it last changed, in nanoseconds since the epoch; ``None`` = not reported by the object store."""


class ListedPlace(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    tier: Literal["local", "global", "empty"]
    run: str | None = None
    latest: int | None = None
    """The newest commit according to the tracker."""
    nodes: tuple[str, ...] = ()
    """The nodes that have a folder here."""
    problems: tuple[Problem, ...] = ()
    """Problems of the directory itself; its checkpoints can be loaded nevertheless."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Newest first, those for diagnosis last."""
    leftovers: tuple[Leftover, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint and the operations on it."""

    entry: Checkpoint
    files: tuple[StoredFile, ...]
    """The files to verify; files with a known problem are left out."""
    judge: Callable[[Sequence[Problem]], Checkpoint]
    """Return the entry with additional problems of files, as before :func:`mark_abandoned`."""
    remove: Callable[[], None]
    """Delete the checkpoint so that a partial deletion is never loaded.

    Raises: CheckpointError (changed since it was listed), OSError.
    """
    is_own: bool = True
    """Whether this package wrote the checkpoint; other programs also name folders ``step-<n>``."""
    is_abandoned_for_certain: bool = False
    """Whether the checkpoint is abandoned, whatever other checkpoints of the run exist elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLeftover:
    entry: Leftover
    remove: Callable[[], None]
    is_own: bool = True
    """Whether a run of this package left it, judging by attempt and file names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryListing:
    """The result of scanning a directory."""

    place: ListedPlace
    """The directory without its contents."""
    found: tuple[ListedCheckpoint, ...]
    remains: tuple[ListedLeftover, ...]

    @property
    def entry(self) -> ListedPlace:
        """The directory with its contents."""
        checkpoints = tuple(one.entry for one in self.found)
        return structs.replace(self.place, checkpoints=checkpoints, leftovers=tuple(one.entry for one in self.remains))


def mark_abandoned(looked: Sequence[DirectoryListing]) -> list[DirectoryListing]:
    """Mark the checkpoints of abandoned branches, judging by all listed directories of each run."""
    known: dict[str | None, list[tuple[Checkpoint, bool]]] = {}
    for place in looked:
        for found in place.found:
            if found.entry.attempt is not None and not found.entry.suspect:
                known.setdefault(found.entry.run, []).append((found.entry, place.place.tier == "global"))
    branches = {
        run: Lineage.of(
            [SavedPoint(one.iteration, str(one.attempt), one.era, is_global) for one, is_global in entries],
            [branch_of(one) for one, _ in entries],
        )
        for run, entries in known.items()
    }
    return [_mark(place, branches) for place in looked]


def _mark(place: DirectoryListing, branches: Mapping[str | None, Lineage]) -> DirectoryListing:
    found = []
    for one in place.found:
        attempt, lineage, marked = one.entry.attempt, branches.get(one.entry.run), one
        if lineage is not None and attempt is not None and not one.entry.suspect:
            entry = structs.replace(one.entry, abandoned=lineage.why_superseded(attempt))
            marked = replace(one, entry=entry, is_abandoned_for_certain=lineage.is_superseded_for_certain(attempt))
        found.append(marked)
    return replace(place, found=tuple(found))


def check_hint(
    hint: str | None,
    owner: DirectoryRun | None,
    *,
    is_there: bool,
    verified: Collection[str] = (),
    prefix: str = "",
    node: str | None = None,
) -> tuple[Problem, ...]:
    """Return the problem of ``run.json``, which names a directory's run without a digest.

    Args:
        hint: The run named there; ``None``: missing or unreadable.
        is_there: Whether the file exists.
        verified: Runs named by manifests of any sibling folder: one of them may have taken this folder over.
    """
    if owner is None or not owner.is_verified or hint == owner.run or hint in verified:
        return ()
    rest = f"; the manifests name run {owner.run}, and its next save writes it again"
    differs = Corrupt(f"{'cannot be read' if hint is None else f'names run {hint}'}{rest}")
    error = differs if is_there else Incomplete(f"is missing{rest}")
    return (describe_error(error, f"{prefix}{RUN}", node=node),)


def describe_manifest(
    entry: Checkpoint, manifest: Manifest | GlobalManifest, problems: Iterable[Problem]
) -> Checkpoint:
    """Return an entry with its manifest's fields and with problems."""
    same = ("attempt", "run", "world_size", "restored_from", "restored_attempt", "era", "forks", "finite")
    found = {name: getattr(manifest, name) for name in same}
    return structs.replace(entry, **found, problems=tuple(problems))


def describe_error(error: Exception, file: str, *, node: str | None = None, rank: int | None = None) -> Problem:
    if not isinstance(error, CheckpointError):
        error = CheckpointError(f"cannot be read ({error})")
    return Problem(kind=type(error).__name__, reason=str(error), file=file, node=node, rank=rank)


_LEFT = re.compile(r"step-(?P<iteration>\d+)\.(?:(?P<kind>tmp|aside)-(?P<attempt>.+)|doomed)")


def list_leftovers(folder: Path, prefix: str) -> Iterator[ListedLeftover]:
    """Yield the contents of a folder outside committed checkpoints.

    Args:
        prefix: The folder's name relative to the listed directory, with a slash; may be empty.
    """
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if (match := _LEFT.fullmatch(name)) is None:
            continue
        num_bytes, modified_ns = _measure(folder / name)
        entry = Leftover(
            name=f"{prefix}{name}",
            kind={"tmp": "attempt", "aside": "aside", None: "deletion"}[match["kind"]],  # type: ignore[arg-type]
            iteration=int(match["iteration"]),
            attempt=match["attempt"],
            num_bytes=num_bytes,
            modified_ns=modified_ns,
        )
        is_own = match["attempt"] is None or _ATTEMPT.fullmatch(match["attempt"]) is not None
        yield ListedLeftover(
            entry=entry,
            remove=partial(_remove_tree, folder / name),
            is_own=is_own and holds_own_files(folder / name),
        )


def _measure(path: Path) -> tuple[int, int]:
    """Return a folder's bytes and newest modification time; files that vanish meanwhile are left out."""
    num_bytes, modified_ns = 0, 0
    for folder, _, names in os.walk(path):
        for one in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                status = os.lstat(one)
            except FileNotFoundError:
                continue
            modified_ns = max(modified_ns, status.st_mtime_ns)
            num_bytes += 0 if one == folder else status.st_size
    return num_bytes, modified_ns


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # the owning run deleted it first
        shutil.rmtree(path)


_ATTEMPT = re.compile(r"(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The retention rule of a pruning."""

    most_recent_k: int | None = None
    """Newest valid checkpoints to keep; -1 = all; ``None`` = delete no checkpoint."""
    retain_interval: int = 0
    suspect_window: int = 0
    suspects: bool = False
    """Whether to delete saves for diagnosis."""
    leftovers: bool = False
    """Whether to delete leftovers that no process can be using."""
    older_than_s: float = 86400.0
    """Age in seconds from which a leftover of unknown owner counts as abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    checkpoints: tuple[ListedCheckpoint, ...]
    remains: tuple[ListedLeftover, ...]

    @property
    def num_bytes(self) -> int:
        checkpoints = sum(found.entry.num_bytes for found in self.checkpoints)
        return checkpoints + sum(remains.entry.num_bytes for remains in self.remains)


def plan_pruning(looked: DirectoryListing, rule: Rule, *, now_ns: int) -> Plan:
    """Choose what to delete.

    Checkpoints that are valid and not abandoned are counted for retention. Older than the newest counted one, these are
    deleted: counted checkpoints that the retention does not keep and the tracker does not name, torn ones, and ones
    certainly abandoned. The newest counted one and all newer ones stay: they may be in use. A checkpoint that cannot be
    read or trusted stays: it may belong to another program, or its disk may recover. Without a counted checkpoint none
    is deleted.

    Args:
        now_ns: Nanoseconds since the epoch, as files' times are.
    """
    committed = [found for found in looked.found if not found.entry.suspect]
    counted = [found.entry for found in committed if found.entry.valid and found.entry.abandoned is None]
    checkpoints: list[ListedCheckpoint] = []
    if rule.most_recent_k is not None and counted:
        kept = choose_kept(
            [entry.iteration for entry in counted],
            most_recent_k=rule.most_recent_k,
            retain_interval=rule.retain_interval,
            suspect_window=rule.suspect_window,
            not_finite=[entry.iteration for entry in counted if entry.finite is False],
        )
        newest = max(entry.iteration for entry in counted)
        checkpoints = [
            found
            for found in committed
            if found.entry.iteration < newest and _goes(found, kept, latest=looked.place.latest)
        ]
    if rule.suspects:
        checkpoints += [found for found in looked.found if found.entry.suspect]
    attempts = [found.entry.attempt for found in looked.found if found.entry.attempt is not None]
    before_ns = now_ns - int(rule.older_than_s * 1e9)
    remains = looked.remains if rule.leftovers else ()
    remains = tuple(one for one in remains if one.is_own and _is_abandoned(one.entry, attempts, before_ns))
    return Plan(checkpoints=tuple(checkpoints), remains=remains)


def _goes(found: ListedCheckpoint, kept: Collection[int], *, latest: int | None) -> bool:
    """Return whether to delete a checkpoint that is older than the newest counted one."""
    entry = found.entry
    if not entry.valid:
        torn = (Incomplete.__name__, Corrupt.__name__)
        return found.is_own and bool(entry.problems) and all(problem.kind in torn for problem in entry.problems)
    if entry.iteration == latest:
        return False
    return found.is_abandoned_for_certain if entry.abandoned is not None else entry.iteration not in kept


def _is_abandoned(leftover: Leftover, attempts: Iterable[str], before_ns: int) -> bool:
    """Return whether no process can be using a leftover: the remains of a deletion, an attempt older than a later
    attempt of the same processes or cycle of the same job, or files unchanged for long.
    """
    if leftover.kind == "deletion" or (leftover.modified_ns is not None and leftover.modified_ns < before_ns):
        return True
    if (mine := _ATTEMPT.fullmatch(leftover.attempt or "")) is None:
        return False
    for match in filter(None, map(_ATTEMPT.fullmatch, attempts)):
        order = "ordinal" if match["token"] == mine["token"] else "cycle"
        if match["job"] == mine["job"] and int(mine[order]) < int(match[order]):
            return True
    return False
