"""The generations of a global directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from outlast.checkpoint.catalogue.entries import (
    DirectoryListing,
    Generation,
    ListedGeneration,
    ListedLeftover,
    ListedPlace,
    Problem,
    StoredFile,
    check_hint,
    describe_error,
)
from outlast.checkpoint.catalogue.store_files import Bucket, Disk, Files
from outlast.checkpoint.claim import RUN, owner_of
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.manifest import METADATA, FileEntry, GlobalManifest, decode_global_manifest
from outlast.checkpoint.dcp.store import is_remote, local_path, open_store
from outlast.checkpoint.directory import SUSPECT, TRACKER
from outlast.checkpoint.manifest import MANIFEST
from outlast.errors import CheckpointError, ConfigError, Incomplete, Untrusted

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
    files: Files = Bucket(open_store(url)) if is_remote(url) else Disk(local_path(url))
    sizes = files.sizes()
    if not sizes and is_remote(url):
        raise ConfigError(f"there is nothing at {url}; name a directory that holds generations")
    directory = GlobalDirectory.open(url)
    owner = owner_of(directory)
    run = None if owner is None else owner.run
    folders: dict[tuple[bool, int], dict[str, int]] = {}
    for name, size in sizes.items():
        if match := _FILE.fullmatch(name):
            folders.setdefault((match["above"] is None, int(match["iteration"])), {})[match["name"]] = size
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-list") as pool:
        outcomes = list(
            pool.map(
                lambda one: _examine(files, one[1], folders[one], suspect=not one[0], run=run),
                sorted(folders, reverse=True),
            )
        )
    remains = [
        *files.remains(""),
        *files.remains(SUSPECT),
        *(one for one in outcomes if isinstance(one, ListedLeftover)),
    ]
    found = tuple(one for one in outcomes if isinstance(one, ListedGeneration))
    place = ListedPlace(
        path=url,
        tier="global",
        run=run,
        latest=_read_latest(files) if TRACKER in sizes else None,
        problems=check_hint(directory.hint(), owner, is_there=RUN in sizes),
        generations=tuple(one.entry for one in found),
        leftovers=tuple(one.entry for one in remains),
    )
    return DirectoryListing(entry=place, found=found, remains=tuple(remains))


def _examine(
    files: Files, iteration: int, sizes: Mapping[str, int], *, suspect: bool, run: str | None
) -> ListedGeneration | ListedLeftover:
    """Judge a generation by its manifest and its files' lengths."""
    above = SUSPECT if suspect else ""
    folder = f"{above}/step-{iteration}" if above else f"step-{iteration}"
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
            unfinished = files.unfinished(folder, iteration, [f"{folder}/{name}" for name in sizes], entry.num_bytes)
            if unfinished is not None:
                return unfinished
            raise Incomplete("there is no manifest")
        data = files.read(f"{folder}/{MANIFEST}")
        manifest = decode_global_manifest(data)
        if manifest.iteration != iteration:
            raise Untrusted(f"is the manifest of iteration {manifest.iteration}")
        if run is not None and manifest.run != run:
            raise Untrusted(f"belongs to run {manifest.run}, its directory to run {run}")
    except (OSError, CheckpointError) as error:
        bad = msgspec.structs.replace(entry, problems=(describe_error(error, f"{folder}/{MANIFEST}"),))
        return ListedGeneration(
            entry=bad, files=(), judge=lambda problems: bad, remove=partial(_remove, files, above, iteration, data)
        )
    problems = list(_check_sizes(manifest, folder, sizes))
    torn = {problem.file for problem in problems}
    entry = msgspec.structs.replace(
        entry,
        valid=not torn - {f"{folder}/{METADATA}"},
        unverified=() if manifest.metadata is not None else (f"{folder}/{METADATA}",),
        attempt=manifest.attempt,
        run=manifest.run,
        world_size=manifest.world_size,
        restored_from=manifest.restored_from,
        restored_attempt=manifest.restored_attempt,
        finite=manifest.finite,
        problems=tuple(problems),
    )
    return ListedGeneration(
        entry=entry,
        files=tuple(
            StoredFile(
                name=f"{folder}/{file.name}",
                num_bytes=file.num_bytes,
                chunks=file.chunks,
                tensors=manifest.contents(index) if index < len(manifest.files) else (),
                open=partial(files.open, f"{folder}/{file.name}"),
                piece_bytes=files.piece_bytes,
            )
            for index, file in enumerate(_all_files(manifest))
            if f"{folder}/{file.name}" not in torn
        ),
        judge=partial(_judge, entry),
        remove=partial(_remove, files, above, iteration, data),
    )


def _check_sizes(manifest: GlobalManifest, folder: str, sizes: Mapping[str, int]) -> Iterator[Problem]:
    for file in _all_files(manifest):
        size = sizes.get(file.name)
        if size is None and file is not manifest.metadata:
            yield describe_error(Incomplete("is missing"), f"{folder}/{file.name}")
        elif size is not None and size != file.num_bytes:
            torn = Incomplete(f"is {size} bytes long instead of {file.num_bytes}")
            yield describe_error(torn, f"{folder}/{file.name}")
    if METADATA not in sizes:
        lacks = Incomplete("is missing; outlast needs it not, other readers of the format do")
        yield describe_error(lacks, f"{folder}/{METADATA}")


def _judge(entry: Generation, problems: Sequence[Problem]) -> Generation:
    """Return an entry with problems of its files: each of them holds what no other does, but what ours do not read."""
    is_torn = any(not problem.file.endswith(f"/{METADATA}") for problem in problems)
    return msgspec.structs.replace(entry, valid=entry.valid and not is_torn, problems=(*entry.problems, *problems))


def _all_files(manifest: GlobalManifest) -> tuple[FileEntry, ...]:
    return manifest.files if manifest.metadata is None else (*manifest.files, manifest.metadata)


def _remove(files: Files, above: str, iteration: int, listed: bytes | None) -> None:
    """Delete a generation, unless its manifest is another than the listed one."""
    folder = f"{above}/step-{iteration}" if above else f"step-{iteration}"
    try:
        data = files.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        data = None
    if data is not None and data != listed:
        raise CheckpointError(f"{folder} has changed meanwhile and is left alone")
    files.remove(above, iteration)


def _read_latest(files: Files) -> int | None:
    try:
        number = files.read(TRACKER).decode("utf-8", errors="replace").strip().removeprefix("step-")
    except OSError:
        return None
    return int(number) if number.isdecimal() else None
