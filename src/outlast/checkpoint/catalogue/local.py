"""The generations in nodes' folders: of one node, or of all whose folders lie side by side.

A folder of one node holds that node's ranks, and copies of other nodes' ranks. What lies on nodes whose folders are not
here cannot be judged from here; it is said to be elsewhere.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from outlast.checkpoint.catalogue.entries import Found, Looked, Place, Problem, Remains, check_hint
from outlast.checkpoint.catalogue.leftovers import list_leftovers
from outlast.checkpoint.catalogue.local_generation import examine
from outlast.checkpoint.catalogue.node_copy import NodeCopy, group_copies, read_copy
from outlast.checkpoint.claim import RUN, owner_of
from outlast.checkpoint.directory import SUSPECT, TRACKER, Directory

__all__ = ["find_node_folders", "is_node_folder", "look_into_folders", "read_tracker"]

NUM_THREADS = 8
_STEP = re.compile(r"step-\d+(?:\..+)?")


def is_node_folder(path: Path) -> bool:
    """Return whether a folder directly holds generations, or is marked as doing so."""
    names = os.listdir(path)
    return any(_STEP.fullmatch(name) for name in names) or RUN in names or SUSPECT in names


def find_node_folders(path: Path) -> list[Path]:
    """Return the nodes' folders: the given one, or those in it; by name.

    Beside a node's folder an empty one is a node's too: of one that was replaced, or has just begun.
    """
    if is_node_folder(path):
        return [path]
    below = [path / name for name in sorted(os.listdir(path)) if name != "lost+found" and (path / name).is_dir()]
    if not any(is_node_folder(folder) for folder in below):
        return []
    return [folder for folder in below if is_node_folder(folder) or not os.listdir(folder)]


def look_into_folders(path: Path, folders: list[Path]) -> Looked:
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
    found: list[Found] = []
    remains: list[Remains] = []
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-list") as pool:
        for suspect in (False, True):
            copies: list[NodeCopy] = []
            for folder in folders:
                directory = Directory(folder / SUSPECT if suspect else folder)
                prefix = "" if directory.path == path else f"{directory.path.relative_to(path)}/"
                copies += pool.map(
                    partial(read_copy, directory, folder.name, prefix, runs[folder]), directory.generations()
                )
                remains += list_leftovers(directory.path, prefix)
            for group in group_copies(copies):
                found.append(examine(group, nodes, pool, suspect=suspect))
    latest = [iteration for folder in folders if (iteration := read_tracker(folder)) is not None]
    place = Place(
        path=os.fspath(path),
        tier="local" if folders else "empty",
        run=", ".join(sorted({run for run in runs.values() if run is not None})) or None,
        latest=max(latest, default=None),
        nodes=nodes,
        problems=tuple(problems),
        generations=tuple(one.entry for one in found),
        leftovers=tuple(one.entry for one in remains),
    )
    return Looked(entry=place, found=tuple(found), remains=tuple(remains))


def read_tracker(folder: Path) -> int | None:
    """Return the generation that a folder's tracker names; ``None``: there is none that can be read."""
    try:
        text = (folder / TRACKER).read_text("utf-8", errors="replace").strip()
    except OSError:
        return None
    number = text.removeprefix("step-")
    return int(number) if number.isdecimal() else None
