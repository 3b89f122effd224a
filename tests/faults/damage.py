"""Faults of checkpoint copies: the change to bytes, files and folders, and the copies that become unusable.

Which copies a fault spoils is derived from its location, not from the code that detects it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from world_of_copies import ITERATIONS, NEWEST, Node, Spot, World

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.shard import shard_name
from outlast.policy.recovery_point import Tier

__all__ = ["Fault", "draw_decoy", "draw_fault"]

Change: TypeAlias = Callable[[Random, bytes], bytes]
FORGED = 9
"""A checkpoint that was never saved."""


@dataclass(frozen=True)
class Fault:
    """One fault that is not yet injected."""

    name: str
    spoils: frozenset[Spot]
    """Copies that are unusable afterwards."""
    strike: Callable[[], object]
    is_told: bool = False
    """Whether a load reads the damaged copy, so that it must report the damage."""


def draw_fault(dice: Random, world: World, spot: Spot) -> Fault:
    """Return a fault that spoils a copy, and possibly others with it."""
    if spot.tier == Tier.GLOBAL:
        return dice.choice(list(_global_faults(dice, world, spot)))
    node = next(node for node in world.nodes if node.name == spot.node)
    if spot.tier == Tier.MEMORY or node.folder is None:
        return dice.choice(list(_memory_faults(dice, world, node, spot)))
    return dice.choice(list(_folder_faults(dice, world, node.folder, spot, _shard_of(node.folder, spot))))


def draw_decoy(dice: Random, world: World) -> tuple[str, Callable[[], object]]:
    """Return a decoy: files that resemble a newer checkpoint or must not be read, and that must not affect a load."""
    place = dice.choice(world.places)
    newest, forged = world.whole(place) / f"step-{NEWEST}", place / f"step-{FORGED}"
    manifest = newest / "manifest.json"
    attempt = place / f"step-{FORGED}.tmp-{_manifest(manifest)['attempt']}"
    metadata = Path(world.config["directory"]) / f"step-{NEWEST}" / ".metadata"
    trap = pickle.dumps(Trap(os.fspath(world.root / "trapped")))
    decoys: dict[str, Callable[[], object]] = {
        "a whole attempt that was never renamed": partial(_forge, newest, attempt),
        "a newer generation without manifest": partial(_copy_without, newest, forged, "manifest.json"),
        "a newer generation with nothing but a manifest": partial(_put, forged / "manifest.json", manifest.read_bytes),
        "an empty newer generation": forged.mkdir,
        "the tracker names nothing": partial(_put, place / "latest", lambda: b"step-9\n"),
        "the tracker is garbage": partial(_put, place / "latest", lambda: dice.randbytes(40)),
        "the tracker is gone": partial(_delete, place / "latest"),
        "no .metadata": partial(_delete, metadata),
        ".metadata is garbage": partial(_put, metadata, lambda: dice.randbytes(500)),
        ".metadata runs a program": partial(_put, metadata, lambda: trap),
    }
    if not _is_global(world, place):  # a file of the global tier is verified by its digests, not by its header
        decoys["a newer generation under a forged manifest"] = partial(_forge, newest, forged)
    name = dice.choice(sorted(decoys))
    return f"{name} ({place.name})", decoys[name]


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


# -- locations of faults ----------------------------------------------------------------------------------------


def _memory_faults(dice: Random, world: World, node: Node, spot: Spot) -> Iterator[Fault]:
    key = next(key for key in node.parts if key.rank == spot.rank)
    only = frozenset({spot})
    for name, change in _SAME_LENGTH.items():
        yield Fault(f"{name} in {spot}", only, partial(_change_memory, node, key, change, dice), True)
    for name, read in _others(world, spot):
        yield Fault(f"{name} in {spot}", only, partial(_replace_memory, node, key, read), True)
    held = {other for other in world.spots if other.node == node.name and other.tier == Tier.MEMORY}
    if not world.has_disks:
        held |= {other for other in world.spots if other.node == node.name and other.tier == Tier.REPLICA}
    yield Fault(f"all memory of {node.name} is lost", frozenset(held), node.empty_memory)


def _folder_faults(dice: Random, world: World, place: Path, spot: Spot, file: Path) -> Iterator[Fault]:
    """Yield faults of a checkpoint's file, manifest and folder."""
    folder = place / f"step-{spot.checkpoint}"
    together = frozenset(
        other for other in world.spots if _lies_in(other, spot) and other.checkpoint == spot.checkpoint
    )
    only = frozenset(other for other in together if file in _files_of(world, other, place))
    for name, change in _SAME_LENGTH.items():
        yield Fault(f"{name} in {spot}", only, partial(_change, file, change, dice), True)
    for name, change in _OTHER_LENGTH.items():
        if spot.tier != Tier.GLOBAL or name != _TOO_LONG:  # only files in the manifest are read in the global tier
            yield Fault(f"{name} in {spot}", only, partial(_change, file, change, dice))
    for name, source in _namesakes(world, spot, file):
        yield Fault(f"{name} as {spot}", only, partial(shutil.copyfile, source, file), spot.tier != Tier.REPLICA)
    yield Fault(f"no file for {spot}", only, partial(_delete, file))
    yield Fault(f"a folder in place of {spot}", only, partial(_make_folder, file))
    yield Fault(f"a link to nowhere in place of {spot}", only, partial(_link_nowhere, file))
    where, manifest = f"{place.name}/{folder.name}", folder / "manifest.json"
    attempt = _manifest(world.whole(manifest))["attempt"]
    for name, read in _bad_manifests(dice, world, manifest):
        yield Fault(f"{name} in {where}", together, partial(_put, manifest, read))
    yield Fault(f"no manifest in {where}", together, partial(_delete, manifest))
    yield Fault(f"nothing but a manifest in {where}", together, partial(_leave_only, folder, "manifest.json"))
    yield Fault(f"{where} is gone", together, partial(_delete, folder))
    yield Fault(f"{where} is empty", together, partial(_leave_only, folder, ""))
    yield Fault(f"{where} is a file", together, partial(_put_file, folder))
    yield Fault(f"{where} has its attempt's name", together, partial(_rename_back, folder, attempt))
    yield Fault(f"{where} is another run's", together, partial(_replace, folder, world.foreign(folder)))
    other = dice.choice([checkpoint for checkpoint in ITERATIONS if checkpoint != spot.checkpoint])
    both = together | {one for one in world.spots if _lies_in(one, spot) and one.checkpoint == other}
    yield Fault(f"{where} has changed places with generation {other}", both, partial(_swap, world, folder, other))


def _global_faults(dice: Random, world: World, spot: Spot) -> Iterator[Fault]:
    place = Path(world.config["directory"])
    yield from _folder_faults(dice, world, place, spot, dice.choice(_files_of(world, spot, place)))


def _lies_in(other: Spot, spot: Spot) -> bool:
    """Return whether two copies are stored in the same folders on disk."""
    if spot.tier == Tier.GLOBAL:
        return other.tier == Tier.GLOBAL
    return other.node == spot.node and other.tier in (Tier.LOCAL, Tier.REPLICA)


def _is_global(world: World, place: Path) -> bool:
    return place == Path(world.config["directory"])


def _files_of(world: World, spot: Spot, place: Path) -> list[Path]:
    """Return the files of a checkpoint that a rank needs."""
    folder = place / f"step-{spot.checkpoint}"
    if spot.tier != Tier.GLOBAL:
        return [_shard_of(place, spot)]
    manifest = _manifest(world.whole(folder) / "manifest.json")
    return [folder / manifest["files"][index]["name"] for index in sorted(_needed(manifest, spot.rank))]


def _needed(manifest: dict[str, Any], rank: int) -> set[int]:
    """Return the indexes of a checkpoint's files that hold data of a rank; a place is [file, start, ...]."""
    own = manifest["ranks"][rank]
    places = [own["tree"], *(tensor["where"] for tensor in own.get("tensors", ()))]
    mine = {tensor["name"] for tensor in own.get("tensors", ())}
    for item in manifest["items"]:
        if item["dtype"] is None or "state." + ".".join(map(str, item["path"])) in mine:
            continue  # plain values are in the rank's tree, and a rank-local tensor needs no other file
        for _, _, where, *ranks in item["pieces"]:
            if not (ranks and ranks[0]) or rank in ranks[0]:
                places.append(where)
    return {place[0] for place in places if place is not None}


def _shard_of(folder: Path, spot: Spot) -> Path:
    return folder / f"step-{spot.checkpoint}" / shard_name(spot.rank)


# -- changes of bytes -------------------------------------------------------------------------------------------


def _flip(dice: Random, data: bytes, end: int | None = None) -> bytes:
    changed = bytearray(data)
    changed[dice.randrange(end or len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _lose_page(dice: Random, data: bytes) -> bytes:
    """Return the data with a page of zeros, as after a lost write."""
    start = dice.randrange(-(-len(data) // 4096)) * 4096
    lost = data[:start] + bytes(len(data[start : start + 4096])) + data[start + 4096 :]
    return lost if lost != data else _flip(dice, data)


def _cut(dice: Random, data: bytes) -> bytes:
    return data[: dice.randrange(1, len(data))]


def _shift(dice: Random, data: bytes) -> bytes:
    return data[1:] + data[:1]


_SAME_LENGTH: dict[str, Change] = {
    "a bit flipped": _flip,
    "a bit of the last byte flipped": lambda dice, data: data[:-1] + _flip(dice, data[-1:]),
    "a bit of the head flipped": lambda dice, data: _flip(dice, data, min(4096, len(data))),
    "a page lost": _lose_page,
    "everything shifted by a byte": _shift,
    "nothing but zeros": lambda dice, data: bytes(len(data)),
}
_TOO_LONG = "one byte too long"
_OTHER_LENGTH: dict[str, Change] = {
    "cut off": _cut,
    "one byte short": lambda dice, data: data[:-1],
    _TOO_LONG: lambda dice, data: data + b"\0",
    "empty": lambda dice, data: b"",
    "half of it twice": lambda dice, data: data[: len(data) // 2] * 2 + b"\0" * 7,
}


def _namesakes(world: World, spot: Spot, file: Path) -> Iterator[tuple[str, Path]]:
    """Yield other files with a compatible name or type."""
    whole = world.whole(file)
    for checkpoint in ITERATIONS:
        if checkpoint != spot.checkpoint:
            yield f"checkpoint {checkpoint}'s file", whole.parent.parent / f"step-{checkpoint}" / file.name
    for other in sorted(whole.parent.glob(f"*{file.suffix}")):
        if other.name != file.name:
            yield "another rank's file", other
    yield "another run's file", world.foreign(file)


def _others(world: World, spot: Spot) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield other images of compatible type."""
    for node in world.nodes:
        for key in node.parts:
            if key.rank != spot.rank:
                yield f"the image of rank {key.rank}", partial(node.parts.__getitem__, key)
    own = world.nodes[spot.rank].folder
    if own is not None:
        for checkpoint in ITERATIONS[:-1]:
            older = own / f"step-{checkpoint}" / shard_name(spot.rank)
            yield f"checkpoint {checkpoint}'s image", world.whole(older).read_bytes
        yield "another run's image", world.foreign(own / f"step-{spot.checkpoint}" / shard_name(spot.rank)).read_bytes


def _bad_manifests(dice: Random, world: World, path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    whole = world.whole(path)
    older = dice.choice([one for one in ITERATIONS if path.parent.name != f"step-{one}"])
    yield "a bit of the manifest flipped", lambda: _flip(dice, whole.read_bytes())
    yield "the manifest cut off", lambda: _cut(dice, whole.read_bytes())
    yield "the manifest empty", lambda: b""
    yield "the manifest is garbage", lambda: dice.randbytes(1000)
    yield "the manifest edited", lambda: _edit(whole.read_bytes())
    for name, value in (("iteration", 77), ("run", "another"), ("schema", 99), ("world_size", 5)):
        yield f"the manifest forged: {name}", partial(_reseal, whole, **{name: value})
    if not _is_global(world, path.parent.parent):
        yield "the manifest forged: attempt", partial(_reseal, whole, attempt="job-0-abcd.7")
    if len(world.nodes) == 1 or path.parent.name != f"step-{NEWEST}":
        # For the newest checkpoint, a node sends the others the correct manifest from its memory.
        yield "the manifest forged: digests", partial(_reseal_with_other_digests, whole)
    yield f"checkpoint {older}'s manifest", (whole.parent.parent / f"step-{older}" / path.name).read_bytes
    yield "another run's manifest", world.foreign(path).read_bytes


def _reseal(path: Path, **changed: Any) -> bytes:
    """Return a manifest with other values and a valid SHA-256."""
    body = json.dumps(_manifest(path) | changed, separators=(",", ":"))
    return f'{{"manifest":{body},"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"}}'.encode()


def _edit(data: bytes) -> bytes:
    """Return a manifest with one changed ``finite`` flag and the SHA-256 of the original."""
    for there, other in ((b'"finite":true', b'"finite":false'), (b",true]", b",false]")):  # global, local
        if there in data:
            return data.replace(there, other, 1)
    raise AssertionError("there is nothing to edit")


def _reseal_with_other_digests(path: Path) -> bytes:
    manifest = _manifest(path)
    if "shards" in manifest:
        shards = [[rank, size, _zeros_like(digests), *rest] for rank, size, digests, *rest in manifest["shards"]]
        return _reseal(path, shards=shards)
    for entry in manifest["files"]:
        entry["chunks"] = ["0" * 16 for _ in entry["chunks"]]
    return _reseal(path, files=manifest["files"])


def _zeros_like(digests: str) -> str:
    return base64.b64encode(bytes(len(base64.b64decode(digests)))).decode()


def _manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(path.read_bytes())["manifest"]
    return manifest


# -- changes of files -------------------------------------------------------------------------------------------


def _change_memory(node: Node, key: CopyKey, change: Change, dice: Random) -> None:
    node.write_part(key, change(dice, node.parts[key]))


def _replace_memory(node: Node, key: CopyKey, read: Callable[[], bytes]) -> None:
    length = len(node.parts[key])
    node.write_part(key, read()[:length].ljust(length, b"\0"))


def _change(path: Path, change: Change, dice: Random) -> None:
    path.write_bytes(change(dice, path.read_bytes()))


def _put(path: Path, read: Callable[[], bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(read())


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _leave_only(folder: Path, name: str) -> None:
    for path in folder.iterdir():
        if path.name != name:
            _delete(path)


def _put_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


def _rename_back(folder: Path, attempt: str) -> None:
    folder.rename(folder.with_name(f"{folder.name}.tmp-{attempt}"))


def _replace(folder: Path, source: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(source, folder)


def _swap(world: World, folder: Path, other: int) -> None:
    here, there = folder, folder.with_name(f"step-{other}")
    shutil.rmtree(here, ignore_errors=True)
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(world.whole(here), there)
    shutil.copytree(world.whole(there), here)


def _copy_without(source: Path, target: Path, name: str) -> None:
    shutil.copytree(source, target)
    (target / name).unlink()


def _forge(source: Path, target: Path) -> None:
    """Copy a checkpoint under another number, with a self-consistent manifest."""
    shutil.copytree(source, target)
    (target / "manifest.json").write_bytes(_reseal(source / "manifest.json", iteration=FORGED))
