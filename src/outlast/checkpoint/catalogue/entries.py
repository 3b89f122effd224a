"""The catalogue's entries: a place, its generations, their problems and files, leftovers; and which of them may go.

What is a ``msgspec.Struct`` is the documented JSON of ``outlast ckpt``; the dataclasses beside them carry what a
command does with it.
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
    """One thing that is wrong with a generation."""

    kind: str
    """Name of the error: ``Incomplete``, ``Corrupt``, ``Untrusted`` or ``CheckpointError`` (cannot be read)."""
    reason: str
    file: str
    """Relative to the place."""
    node: str | None = None
    rank: int | None = None
    chunk: int | None = None
    """Number of the 8 MiB piece, from 0; ``None`` = the whole file."""
    tensors: tuple[str, ...] = ()
    """What lies in that chunk."""

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class NodeHolding(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's folder holds of a generation; ranks whose file passed the check."""

    node: str
    own: tuple[int, ...]
    """Ranks that ran on this node."""
    replicas: tuple[int, ...] = ()
    """Ranks of other nodes."""
    parities: tuple[int, ...] = ()
    """Ranks beside which a parity of other nodes' shards lies."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One committed generation in one place."""

    iteration: int
    tier: Literal["local", "global"]
    suspect: bool = False
    """Saved for diagnosis only; never loaded by itself."""
    valid: bool
    """Whether each rank that should be here has a copy here that passed the check; with ``problems`` nevertheless when
    another copy did not."""
    attempt: str | None = None
    """``None``, as what follows: the manifest cannot be read."""
    run: str | None = None
    world_size: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    """On this place, replicas and manifests included."""
    held: tuple[NodeHolding, ...] = ()
    """By node; empty for the global tier."""
    elsewhere: tuple[int, ...] = ()
    """Ranks whose nodes have no folder here, and of which nothing lies here: nothing is known of them."""
    rebuildable: tuple[int, ...] = ()
    """Ranks of which no copy is here, but all that rebuilds theirs: the other shards and parities of their group."""
    missing: tuple[int, ...] = ()
    """Ranks that should be here and of which no good copy is."""
    restored_from: int | None = None
    """The generation that the saving processes had loaded."""
    restored_attempt: str | None = None
    era: Era = UNKNOWN_ERA
    """Of the branch that saved it; see ``policy.lineage``."""
    forks: tuple[Fork, ...] = ()
    """The branches that this branch descends from."""
    abandoned: str | None = None
    """Why no run loads it any more, as far as the listed places show: training has abandoned its branch; ``None`` = it
    can be loaded."""
    finite: bool | None = None
    """Whether no number in it is infinite or NaN."""
    unverified: tuple[str, ...] = ()
    """Files, relative to the place, whose bytes nothing is known of: earlier versions kept no digest of them."""
    problems: tuple[Problem, ...] = ()


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """What is no committed generation: an attempt, failed or under way, or the remains of a deletion."""

    name: str
    """Relative to the place."""
    kind: Literal["attempt", "aside", "deletion"]
    """``aside``: a generation that another attempt at its iteration replaced."""
    iteration: int
    attempt: str | None = None
    num_bytes: int = 0
    modified_ns: int | None = None
    """When something in it last changed, in nanoseconds since the epoch; ``None`` = the store does not tell."""


class ListedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One directory."""

    path: str
    tier: Literal["local", "global", "empty"]
    run: str | None = None
    latest: int | None = None
    """What the tracker names: the newest commit."""
    nodes: tuple[str, ...] = ()
    """The nodes that have a folder here."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with the place itself; its generations can be loaded nevertheless."""
    generations: tuple[Generation, ...] = ()
    """Newest first, those for diagnosis last."""
    leftovers: tuple[Leftover, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGeneration:
    """A generation, and what can be done with it."""

    entry: Generation
    files: tuple[StoredFile, ...]
    """All whose bytes can be verified; those with a problem already are left out."""
    judge: Callable[[Sequence[Problem]], Generation]
    """Return the entry as it is when these problems with files are added."""
    remove: Callable[[], None]
    """Delete it, so that no half of it is ever taken for a generation.

    Raises: CheckpointError (it changed meanwhile), OSError."""
    is_own: bool = True
    """Whether this package wrote it, whole or damaged; other programs name their folders ``step-<n>``, too."""
    is_abandoned_for_certain: bool = False
    """Whether it is abandoned, whatever other checkpoints of the run exist elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLeftover:
    """A leftover, and how to delete it."""

    entry: Leftover
    remove: Callable[[], None]
    is_own: bool = True
    """Whether a run of this package left it, by the names of its attempt and of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryListing:
    """A place that was looked into."""

    place: ListedPlace
    """Without what lies in it."""
    found: tuple[ListedGeneration, ...]
    remains: tuple[ListedLeftover, ...]

    @property
    def entry(self) -> ListedPlace:
        """The place with what lies in it."""
        generations = tuple(one.entry for one in self.found)
        return structs.replace(self.place, generations=generations, leftovers=tuple(one.entry for one in self.remains))


def mark_abandoned(looked: Sequence[DirectoryListing]) -> list[DirectoryListing]:
    """Mark what belongs to branches that training has abandoned, by all that the places of each run hold."""
    known: dict[str | None, list[tuple[Generation, bool]]] = {}
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
        attempt, lineage = one.entry.attempt, branches.get(one.entry.run)
        if lineage is None or attempt is None or one.entry.suspect:
            found.append(one)
            continue
        abandoned = lineage.why_superseded(attempt)
        found.append(
            replace(
                one,
                entry=structs.replace(one.entry, abandoned=abandoned),
                judge=partial(_judge, one.judge, abandoned),
                is_abandoned_for_certain=lineage.is_superseded_for_certain(attempt),
            )
        )
    return replace(place, found=tuple(found))


def _judge(
    judge: Callable[[Sequence[Problem]], Generation], abandoned: str | None, problems: Sequence[Problem]
) -> Generation:
    return structs.replace(judge(problems), abandoned=abandoned)


def check_hint(
    hint: str | None,
    owner: DirectoryRun | None,
    *,
    is_there: bool,
    proven: Collection[str] = (),
    prefix: str = "",
    node: str | None = None,
) -> tuple[Problem, ...]:
    """Return what is wrong with ``run.json``, which names a directory's run without a digest.

    Args:
        hint: The run that it names; ``None``: none that can be read.
        is_there: Whether there is such a file.
        proven: Runs that manifests of any folder beside it name: one of them may have taken this one over.
    """
    if owner is None or not owner.is_proven or hint == owner.run or hint in proven:
        return ()
    rest = f"; the manifests name run {owner.run}, and its next save writes it again"
    differs = Corrupt(f"{'cannot be read' if hint is None else f'names run {hint}'}{rest}")
    error = differs if is_there else Incomplete(f"is missing{rest}")
    return (describe_error(error, f"{prefix}{RUN}", node=node),)


def describe_manifest(
    entry: Generation, manifest: Manifest | GlobalManifest, problems: Iterable[Problem]
) -> Generation:
    """Return an entry with what is in its manifest, and with problems."""
    same = ("attempt", "run", "world_size", "restored_from", "restored_attempt", "era", "forks", "finite")
    found = {name: getattr(manifest, name) for name in same}
    return structs.replace(entry, **found, problems=tuple(problems))


def describe_error(error: Exception, file: str, *, node: str | None = None, rank: int | None = None) -> Problem:
    if not isinstance(error, CheckpointError):
        error = CheckpointError(f"cannot be read ({error})")
    return Problem(kind=type(error).__name__, reason=str(error), file=file, node=node, rank=rank)


_LEFT = re.compile(r"step-(?P<iteration>\d+)\.(?:(?P<kind>tmp|aside)-(?P<attempt>.+)|doomed)")


def list_leftovers(folder: Path, prefix: str) -> Iterator[ListedLeftover]:
    """Yield what lies in a folder and is no committed generation.

    Args:
        prefix: Its name relative to the place, with a slash; may be empty.
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
    """Return the bytes below a folder, and when something in it last changed; what vanishes meanwhile is left out."""
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
    with contextlib.suppress(FileNotFoundError):  # the run that it belongs to was quicker
        shutil.rmtree(path)


_ATTEMPT = re.compile(r"(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is to be kept."""

    most_recent_k: int | None = None
    """Newest valid generations to keep; -1 = all; ``None`` = no generation goes."""
    retain_interval: int = 0
    suspect_window: int = 0
    suspects: bool = False
    """Whether saves for diagnosis go."""
    leftovers: bool = False
    """Whether what is no generation goes, as far as nobody can be using it."""
    older_than_s: float = 86400.0
    """Age from which a leftover of unknown owner is taken for abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes; nothing is deleted yet."""

    generations: tuple[ListedGeneration, ...]
    remains: tuple[ListedLeftover, ...]

    @property
    def num_bytes(self) -> int:
        generations = sum(found.entry.num_bytes for found in self.generations)
        return generations + sum(remains.entry.num_bytes for remains in self.remains)


def plan_pruning(looked: DirectoryListing, rule: Rule, *, now_ns: int) -> Plan:
    """Choose what goes.

    A generation that is valid and not abandoned counts. Of the others, and of those that the retention does not keep
    and the tracker does not name, what is older than the newest that counts goes, if it is torn or abandoned for
    certain. The newest that counts stays in any case, and so does whatever is newer: it may be in use. What cannot be
    read or trusted stays too: it may be another's, or come back with its disk. Where none counts, none goes.

    Args:
        now_ns: Nanoseconds since the epoch, as files' times are.
    """
    committed = [found for found in looked.found if not found.entry.suspect]
    counted = [found.entry for found in committed if found.entry.valid and found.entry.abandoned is None]
    generations: list[ListedGeneration] = []
    if rule.most_recent_k is not None and counted:
        kept = choose_kept(
            [entry.iteration for entry in counted],
            most_recent_k=rule.most_recent_k,
            retain_interval=rule.retain_interval,
            suspect_window=rule.suspect_window,
            not_finite=[entry.iteration for entry in counted if entry.finite is False],
        )
        newest = max(entry.iteration for entry in counted)
        generations = [
            found
            for found in committed
            if found.entry.iteration < newest and _goes(found, kept, latest=looked.place.latest)
        ]
    if rule.suspects:
        generations += [found for found in looked.found if found.entry.suspect]
    attempts = [found.entry.attempt for found in looked.found if found.entry.attempt is not None]
    before_ns = now_ns - int(rule.older_than_s * 1e9)
    remains = looked.remains if rule.leftovers else ()
    remains = tuple(one for one in remains if one.is_own and _is_abandoned(one.entry, attempts, before_ns))
    return Plan(generations=tuple(generations), remains=remains)


def _goes(found: ListedGeneration, kept: Collection[int], *, latest: int | None) -> bool:
    """Return whether a generation that is older than the newest that counts is deleted."""
    entry = found.entry
    if not entry.valid:
        torn = (Incomplete.__name__, Corrupt.__name__)
        return found.is_own and bool(entry.problems) and all(problem.kind in torn for problem in entry.problems)
    if entry.iteration == latest:
        return False
    return found.is_abandoned_for_certain if entry.abandoned is not None else entry.iteration not in kept


def _is_abandoned(leftover: Leftover, attempts: Iterable[str], before_ns: int) -> bool:
    """Return whether nobody can be using a leftover: a deletion's remains, an attempt that a later one of the same
    processes or a later cycle of the same job has outlived, or what nobody touched for long."""
    if leftover.kind == "deletion" or (leftover.modified_ns is not None and leftover.modified_ns < before_ns):
        return True
    if (mine := _ATTEMPT.fullmatch(leftover.attempt or "")) is None:
        return False
    for match in filter(None, map(_ATTEMPT.fullmatch, attempts)):
        order = "ordinal" if match["token"] == mine["token"] else "cycle"
        if match["job"] == mine["job"] and int(mine[order]) < int(match[order]):
            return True
    return False
