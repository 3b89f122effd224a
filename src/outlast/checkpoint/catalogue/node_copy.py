"""What one node's folder has of one generation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outlast.checkpoint.catalogue.entries import Problem, describe_error
from outlast.checkpoint.directory import Directory
from outlast.checkpoint.manifest import MANIFEST, Manifest
from outlast.errors import CheckpointError, Untrusted

__all__ = ["NodeCopy", "group_copies", "read_copy", "remove_copies"]

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


def read_copy(directory: Directory, node: str, prefix: str, run: str | None, iteration: int) -> NodeCopy:
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
        if manifest.iteration != iteration:
            raise Untrusted(f"is the manifest of iteration {manifest.iteration}")
        if run is not None and run != manifest.run:
            raise Untrusted(f"belongs to run {manifest.run}, its directory to run {run}")
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


def group_copies(copies: Iterable[NodeCopy]) -> list[list[NodeCopy]]:
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


def remove_copies(copies: Sequence[NodeCopy]) -> None:
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
