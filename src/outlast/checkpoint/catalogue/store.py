"""The generations of a global directory, on a file system or in an object store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from outlast.checkpoint.catalogue.entries import (
    DirectoryListing,
    Generation,
    Leftover,
    ListedGeneration,
    ListedLeftover,
    ListedPlace,
    Problem,
    check_hint,
    describe_error,
    describe_manifest,
    list_leftovers,
)
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.manifest import METADATA, FileEntry, GlobalManifest, decode_global_manifest
from outlast.checkpoint.dcp.store import open_store
from outlast.checkpoint.directory import RUN, SUSPECT, TRACKER, owner_of
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.verification import VerifiedFiles, check_origin
from outlast.errors import CheckpointError, ConfigError, Incomplete

__all__ = ["look_into_store"]

NUM_THREADS = 8
_FILE = re.compile(rf"(?P<above>{SUSPECT}/)?step-(?P<iteration>\d+)/(?P<name>.+)")


def look_into_store(url: str) -> DirectoryListing:
    """List what lies in a global directory.

    Args:
        url: A path, or what fsspec knows.

    Raises:
        CheckpointError: The store does not answer.
        ConfigError: There is nothing.
        OSError: A folder cannot be read.

    Blocks: up to the store's time limit for one listing, and one manifest for every ``NUM_THREADS`` generations.
    """
    directory = GlobalDirectory.open(url)
    sizes = directory.sizes("")
    if not sizes and directory.is_remote:
        raise ConfigError(f"there is nothing at {url}; name a directory that holds generations")
    owner = owner_of(directory)
    run = None if owner is None else owner.run
    folders: dict[tuple[bool, int], dict[str, int]] = {}
    for name, size in sizes.items():
        if match := _FILE.fullmatch(name):
            folders.setdefault((match["above"] is None, int(match["iteration"])), {})[match["name"]] = size
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-list") as pool:
        outcomes = list(
            pool.map(
                lambda one: _examine(directory, one[1], folders[one], suspect=not one[0], run=run),
                sorted(folders, reverse=True),
            )
        )
    remains = [one for one in outcomes if isinstance(one, ListedLeftover)]
    if not directory.is_remote:  # in a store, what is unfinished has its final name already
        path = Path(directory.url)
        remains += [*list_leftovers(path, ""), *list_leftovers(path / SUSPECT, f"{SUSPECT}/")]
    found = tuple(one for one in outcomes if isinstance(one, ListedGeneration))
    place = ListedPlace(
        path=url,
        tier="global",
        run=run,
        latest=_read_latest(directory) if TRACKER in sizes else None,
        problems=check_hint(directory.hint(), owner, is_there=RUN in sizes),
        generations=tuple(one.entry for one in found),
        leftovers=tuple(one.entry for one in remains),
    )
    return DirectoryListing(entry=place, found=found, remains=tuple(remains))


def _examine(
    directory: GlobalDirectory, iteration: int, sizes: Mapping[str, int], *, suspect: bool, run: str | None
) -> ListedGeneration | ListedLeftover:
    """Judge a generation by its manifest and its files' lengths."""
    folder = f"{SUSPECT}/step-{iteration}" if suspect else f"step-{iteration}"
    entry = Generation(
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
        return ListedGeneration(entry=bad, files=(), judge=lambda problems: bad, remove=remove)
    problems = list(_check_sizes(manifest, folder, sizes))
    torn = {problem.file for problem in problems}
    entry = msgspec.structs.replace(
        describe_manifest(entry, manifest, problems),
        valid=not torn - {f"{folder}/{METADATA}"},
        unverified=() if manifest.metadata is not None else (f"{folder}/{METADATA}",),
    )
    verified = VerifiedFiles(directory, manifest, folder)
    files = [
        verified.stored(file, index if index < len(manifest.files) else None)
        for index, file in enumerate(_all_files(manifest))
    ]
    return ListedGeneration(
        entry=entry,
        files=tuple(file for file in files if file.name not in torn),
        judge=partial(_judge, entry),
        remove=partial(_remove, directory, folder, iteration, data),
    )


def _unfinished(url: str, folder: str, iteration: int, sizes: Mapping[str, int]) -> ListedLeftover:
    """Return a generation's folder without a manifest in an object store: an attempt, under way or not."""
    store = open_store(url)
    entry = Leftover(
        name=folder,
        kind="attempt",
        iteration=iteration,
        num_bytes=sum(sizes.values()),
        modified_ns=store.modified_ns(folder),
    )
    return ListedLeftover(entry=entry, remove=partial(store.remove, [f"{folder}/{name}" for name in sizes]))


def _check_sizes(manifest: GlobalManifest, folder: str, sizes: Mapping[str, int]) -> Iterator[Problem]:
    for file in _all_files(manifest):
        size = sizes.get(file.name)
        if size is None and file is not manifest.metadata:
            yield describe_error(Incomplete("is missing"), f"{folder}/{file.name}")
        elif size is not None and size != file.num_bytes:
            torn = Incomplete(f"is {size} bytes long instead of {file.num_bytes}")
            yield describe_error(torn, f"{folder}/{file.name}")
    if METADATA not in sizes:
        lacks = Incomplete("is missing; outlast does not need it, other readers of the format do")
        yield describe_error(lacks, f"{folder}/{METADATA}")


def _judge(entry: Generation, problems: Sequence[Problem]) -> Generation:
    """Return an entry with problems of its files: each of them holds what no other does, but what ours do not read."""
    is_torn = any(not problem.file.endswith(f"/{METADATA}") for problem in problems)
    return msgspec.structs.replace(entry, valid=entry.valid and not is_torn, problems=(*entry.problems, *problems))


def _all_files(manifest: GlobalManifest) -> tuple[FileEntry, ...]:
    return manifest.files if manifest.metadata is None else (*manifest.files, manifest.metadata)


def _remove(directory: GlobalDirectory, folder: str, iteration: int, listed: bytes | None) -> None:
    """Delete a generation, unless its manifest is another than the listed one."""
    try:
        data = directory.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        data = None
    if data is not None and data != listed:
        raise CheckpointError(f"{folder} has changed meanwhile and is left alone")
    try:
        (directory.suspects if folder.startswith(SUSPECT) else directory).remove(iteration)
    except FileNotFoundError:
        pass  # the run that it belongs to was quicker


def _read_latest(directory: GlobalDirectory) -> int | None:
    try:
        return directory.latest()
    except OSError:
        return None
