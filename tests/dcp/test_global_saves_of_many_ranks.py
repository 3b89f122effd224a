"""Saves of many ranks to the global tier: messages go through a tree, equal data is sent once, all ranks get the
same outcome."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import Lanes, flat_state
from torch.distributed import HashStore

from outlast.checkpoint import lane as lane_module
from outlast.checkpoint.dcp import global_lane, items
from outlast.checkpoint.dcp.assemble import Assemble, Assembled, assemble
from outlast.checkpoint.dcp.items import dump_metadata, make_metadata
from outlast.checkpoint.dcp.manifest import FileEntry, GlobalManifest, Item, TensorPiece, Where
from outlast.checkpoint.dcp.reader import read_rank
from outlast.checkpoint.lane import FAN_OUT, child_above, children, num_levels
from outlast.checkpoint.save import PeerSilent
from outlast.checkpoint.state import FlatState, decode
from outlast.checkpoint.verification import VerifiedFiles

WORLD = 70
NUM_TENSORS = 200


class _CountedStore:
    """A rank's view of the ranks' HashStore that counts the bytes that the rank reads and posts."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.read: list[int] = []
        self.posted: dict[str, int] = {}

    def get(self, key: str) -> bytes:
        data = bytes(self._store.get(key))
        self.read.append(len(data))
        return data

    def set(self, key: str, value: str) -> None:
        self.posted[key] = len(value)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _flats(seed: float = 0.0) -> list[FlatState]:
    """Return the ranks' states: many equal tensors, a random number generator state that differs, a plain value."""
    shared_tensors = {f"layer.{number}.weight": torch.full((16,), seed + number) for number in range(NUM_TENSORS)}
    return [flat_state({**shared_tensors, "step": 7}, {"cpu": torch.full((4,), seed + rank)}) for rank in range(WORLD)]


def test_every_rank_loads_its_saved_state(tmp_path: Path) -> None:
    """Each of 70 ranks loads identical tensors, and each shared tensor is stored once."""
    flats = _flats()
    with Lanes(str(tmp_path), WORLD) as lanes:
        assert lanes.save(flats, 10) == [None] * WORLD
        manifest = lanes.directory.manifest(10)
        files = VerifiedFiles(lanes.directory, manifest)
        for rank in (0, 1, 16, 17, 33, WORLD - 1):
            found = read_rank(files, rank)
            loaded = decode(found.tree, found.tensors.__getitem__)
            state = loaded["state"]
            assert torch.equal(loaded["random"]["cpu"], torch.full((4,), float(rank)))
            assert all(
                torch.equal(state[f"layer.{number}.weight"], torch.full((16,), float(number)))
                for number in range(NUM_TENSORS)
            )
            assert state["step"] == 7
        metadata = pickle.loads(lanes.directory.read("step-10/.metadata"))
    assert metadata == make_metadata(manifest)
    weights = [item for item in manifest.items if item.name.startswith("layer.")]
    assert [len(item.pieces) for item in weights] == [1] * NUM_TENSORS


def test_equal_data_is_sent_once(tmp_path: Path) -> None:
    """One table of 200 tensors serves 70 ranks: each rank adds little, and no rank reads a message of every other
    rank."""
    store = HashStore()
    stores = [_CountedStore(store) for _ in range(WORLD)]
    with Lanes(str(tmp_path), WORLD, store_of=stores.__getitem__) as lanes:
        assert lanes.save(_flats(), 10) == [None] * WORLD
    posted = {key: size for one in stores for key, size in one.posted.items()}
    shared = sorted(size for key, size in posted.items() if "/shared/" in key)
    assert len(shared) == 2  # names and shapes; digests
    assert shared[0] > 8 * NUM_TENSORS
    responses = [size for key, size in posted.items() if key.rpartition("/")[0].endswith("/has")]
    assert len(responses) == WORLD - 1
    assert sum(responses) < 2 * 300 * WORLD
    orders = [size for key, size in posted.items() if "/order/" in key]
    assert len(orders) == WORLD - 1
    assert sum(orders) < 2 * 150 * WORLD
    for rank in range(1, WORLD):
        reads = stores[rank].read
        assert len(reads) <= 2 * FAN_OUT + 3
        if not children(rank, WORLD):
            assert sum(reads) < 1000


@pytest.mark.extended
@pytest.mark.parametrize("rank", [0, 1, 16, 17, WORLD - 1])
def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path, rank: int) -> None:
    """For every position in the tree, all ranks get the failed rank's error, its files are removed, and the next
    save succeeds."""
    full = threading.Event()

    def writer(one: int, request: Assemble, image: memoryview) -> Assembled:
        if one == rank and full.is_set():
            return Assembled(error=f"{request.name}: No space left on device")
        return assemble(request, image)

    with Lanes(str(tmp_path), WORLD, writer=writer) as lanes:
        full.set()
        errors = lanes.save(_flats(1.0), 10)
        assert len({str(error) for error in errors}) == 1
        assert f"rank {rank} on node node: __{rank}_0.distcp: No space left on device" in str(errors[0])
        assert lanes.directory.checkpoints() == []
        full.clear()
        assert lanes.save(_flats(2.0), 20) == [None] * WORLD
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run.json", "step-20"]


@pytest.fixture
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Increase the time per tree level: the ranks are threads of one process and begin a save at different times on
    a busy machine, and a rank that begins first must not time out first."""
    monkeypatch.setattr(lane_module, "LEVEL_S", 10.0)
    for module in (lane_module, global_lane):
        monkeypatch.setattr(module, "GRACE_S", 60.0)


@pytest.mark.slow
@pytest.mark.usefixtures("long_timeouts")
@pytest.mark.parametrize("silent", [1, *(pytest.param(rank, marks=pytest.mark.extended) for rank in (17, WORLD - 1))])
def test_a_rank_that_does_not_take_part_is_identified(tmp_path: Path, silent: int) -> None:
    """If a leaf or an inner node of the tree is silent, all other ranks get the same error with its rank, including
    those below it; the older checkpoint stays."""
    with Lanes(str(tmp_path), WORLD, timeout_s=30.0) as lanes:
        assert lanes.save(_flats(), 10) == [None] * WORLD
        errors = lanes.save(_flats(1.0), 20, leave_out=[silent])
        assert {type(error) for error in errors} == {PeerSilent}
        assert {f"no response (has/{silent})" in str(error) for error in errors} == {True}
        assert lanes.directory.checkpoints() == [10]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.usefixtures("long_timeouts")
@pytest.mark.parametrize("rank", [1, WORLD - 1])
def test_a_rank_that_writes_too_long_is_identified(tmp_path: Path, rank: int) -> None:
    """If the writer of a leaf or an inner node does not end, all ranks get the same error with its rank, and nothing
    is committed."""
    is_over = threading.Event()

    def writer(one: int, request: Assemble, image: memoryview) -> Assembled:
        if one == rank:
            is_over.wait(60.0)
        return assemble(request, image)

    def release(one: int, *_: object) -> None:
        if one == 0:
            is_over.set()

    with Lanes(str(tmp_path), WORLD, writer=writer, timeout_s=30.0, on_outcome=release) as lanes:
        errors = lanes.save(_flats(), 10)
        assert {f"no response (wrote/{rank})" in str(error) for error in errors} == {True}
        assert lanes.directory.checkpoints() == []


def test_ranks_time_out_without_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rank 0 the other ranks wait for the save's timeout plus the grace period, and nothing is written."""
    monkeypatch.setattr(lane_module, "GRACE_S", 1.0)
    monkeypatch.setattr(global_lane, "GRACE_S", 1.0)
    with Lanes(str(tmp_path), WORLD, timeout_s=2.0) as lanes:
        errors = lanes.save(_flats(), 10, leave_out=[0])
        assert {type(error) for error in errors} == {PeerSilent}
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_places", [1, 2, 17, 18, WORLD, 1025, 16384])
def test_the_tree_contains_each_rank_once(num_places: int) -> None:
    """Each place but the root has one parent, the path down reaches each place, and the tree has few levels."""
    found = [child for place in range(num_places) for child in children(place, num_places)]
    assert found == list(range(1, num_places))
    assert num_levels(0, num_places) <= 4
    assert all(child_above(place, 0) in children(0, num_places) for place in range(1, num_places))
    for top in children(0, num_places):
        assert all(child_above(place, top) == place for place in children(top, num_places))
        assert num_levels(top, num_places) < num_levels(0, num_places)


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2**70), st.integers(0, 2**63 - 1))
def test_composed_metadata_equals_pickled_metadata(shape: list[int], start: int, length: int) -> None:
    """Metadata is identical for any shapes, offsets beyond 32 bits, tensors in several pieces or without elements,
    and plain values."""
    pieces = (
        TensorPiece((0,) * len(shape), tuple(shape), Where(0, start, length, start, 0)),
        TensorPiece((length,) * len(shape), tuple(shape), Where(1, 0, 1, 0, 1)),
        TensorPiece((9,) * len(shape), (0,) * len(shape), None),
    )
    value = TensorPiece((), (), Where(0, 0, 1, 0, 1))
    manifest = GlobalManifest(
        schema=1,
        run="r",
        topology="t",
        world_size=2,
        iteration=1,
        attempt="a",
        restored_from=None,
        finite=True,
        files=tuple(FileEntry(name=name, num_bytes=1, chunks=()) for name in ("f", "offset")),
        items=(
            Item(name="w", path=("w", 0), dtype="BF16", shape=tuple(shape), pieces=pieces),
            Item(name="offset", path=("offset",), dtype=None, shape=(), pieces=(value,)),
            Item(name="outlast/x", path=(), dtype="F32", shape=(1,), pieces=(value,)),
        ),
        ranks=(),
    )
    assert items.knows_classes()
    assert pickle.loads(dump_metadata(manifest)) == make_metadata(manifest)


def test_metadata_of_another_torch_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch's classes pickle to another format than the composed one, the metadata is pickled from the classes."""
    manifest = GlobalManifest(
        schema=1,
        run="r",
        topology="t",
        world_size=1,
        iteration=1,
        attempt="a",
        restored_from=None,
        finite=True,
        files=(FileEntry(name="f", num_bytes=1, chunks=()),),
        items=(Item(name="v", path=("v",), dtype=None, shape=(), pieces=(TensorPiece((), (), Where(0, 0, 1, 0, 1)),)),),
        ranks=(),
    )
    items.knows_classes.cache_clear()
    monkeypatch.setattr(items, "_put_together", lambda _: b"another format")
    try:
        assert pickle.loads(dump_metadata(manifest)) == make_metadata(manifest)
    finally:
        items.knows_classes.cache_clear()
