"""A checkpoint is loaded from the nearest tier that still has it, and the next one when that proves bad."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from saving_ranks import start

from outlast.checkpoint.writer_client import WriterProcess
from outlast.runtime.files import memory_files

SAVE = """
manager = manage(config=CONFIG)
saved = {}
for iteration in (1, 2):
    train()
    manager.save(state, iteration).wait(100)
    saved[iteration] = content()
tell(saved=saved)
kill_all()
"""
LOAD = """
manager = manage(config=CONFIG)
restored = manager.load_latest(state)
tell(
    iteration=restored.iteration, loaded=content(), tier=restored.tier, tiers=restored.tiers,
    read=restored.bytes_read, rejected=[str(one) for one in restored.rejected],
)
manager.close()
"""


@pytest.fixture
def nodes() -> Iterator[dict[str, WriterProcess]]:
    """Two nodes' writers."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(WriterProcess())) for name in ("one", "two")}


def _save(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any], world: int = 2) -> list[Any]:
    ended = start(folder, f"CONFIG = {config!r}\n" + SAVE, world=world, nodes=nodes)
    assert [code for code, _ in ended] == [-9] * world, ended
    return [told["saved"] for _, told in ended]


def _load(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any], world: int = 2) -> list[Any]:
    ended = start(folder, f"CONFIG = {config!r}\n" + LOAD, world=world, cycle=1, nodes=nodes)
    assert [code for code, _ in ended] == [0] * world, ended
    return [told for _, told in ended]


@pytest.mark.slow
@pytest.mark.process
def test_killed_workers_come_back_from_memory(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """After SIGKILL of all workers the writers still hold the newest checkpoint; not a byte is read from disk."""
    saved = _save(tmp_path / "ckpt", nodes, {})
    shutil.rmtree(tmp_path / "ckpt")
    for rank, told in enumerate(_load(tmp_path / "ckpt", nodes, {})):
        assert told["iteration"] == 2
        assert told["tiers"] == ["memory", "memory"]
        assert list(told["read"]) == ["memory"]
        assert told["loaded"] == saved[rank]["2"]


@pytest.mark.slow
@pytest.mark.process
def test_a_lost_node_comes_back_from_its_replica(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A node that lost memory and disk gets its shard from the other node; the other keeps to its own memory. What it
    got is then held here, too: after another death it needs no other node."""
    folder = tmp_path / "ckpt"
    saved = _save(folder, nodes, {})
    shutil.rmtree(folder / "two")
    nodes["two"].close()
    nodes["two"] = WriterProcess()
    try:
        for rank, told in enumerate(_load(folder, nodes, {})):
            assert (told["iteration"], told["tiers"]) == (2, ["memory", "replica"])
            assert told["loaded"] == saved[rank]["2"]
        assert _load(folder, nodes, {})[1]["tier"] == "memory"
    finally:
        nodes["two"].close()


@pytest.mark.slow
@pytest.mark.process
def test_without_disks_replicas_are_held_in_memory(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """Without a local tier the partner's writer holds the copy in memory, and the newest checkpoint survives a node."""
    folder = tmp_path / "ckpt"
    config = {"local_directory": None, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    shutil.rmtree(tmp_path / "global")
    nodes["one"].close()
    nodes["one"] = WriterProcess()
    try:
        for rank, told in enumerate(_load(folder, nodes, config)):
            assert (told["iteration"], told["tiers"]) == (2, ["replica", "memory"])
            assert told["loaded"] == saved[rank]["2"]
    finally:
        nodes["one"].close()


@pytest.mark.slow
@pytest.mark.process
def test_bad_copies_lead_down_the_tiers(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """Memory gone and the local file flipped: the replica; that flipped too: the global tier, by this rank alone."""
    folder = tmp_path / "ckpt"
    config = {"directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    nodes["two"].close()
    nodes["two"] = WriterProcess()
    try:
        _flip(folder / "two" / "step-2" / "rank-00001.safetensors")
        first = _load(folder, nodes, config)
        assert [told["tiers"] for told in first] == [["memory", "replica"]] * 2
        assert "differs from its digest" in first[0]["rejected"][0]
        nodes["two"].close()
        nodes["two"] = WriterProcess()
        _flip(folder / "one" / "step-2" / "rank-00001.safetensors")
        second = _load(folder, nodes, config)
        assert [told["tiers"] for told in second] == [["memory", "global"]] * 2
        for rank, told in enumerate(second):
            assert told["iteration"] == 2
            assert told["loaded"] == saved[rank]["2"]
            assert len(told["rejected"]) == 2
    finally:
        nodes["two"].close()


@pytest.mark.slow
@pytest.mark.process
def test_a_corrupt_copy_in_memory_is_dropped_at_once(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A rank whose copy in memory is corrupt loads from its local disk, and the copy is dropped: the next load, without
    a save in between, does not read and reject it again."""
    saved = _save(tmp_path / "ckpt", nodes, {})
    for path in memory_files(nodes["two"].pid, "outlast-arena"):
        _flip(Path(path))
    first, second = (_load(tmp_path / "ckpt", nodes, {}) for _ in range(2))
    for loaded, num_rejected in ((first, 1), (second, 0)):
        for rank, told in enumerate(loaded):
            assert (told["iteration"], told["tiers"]) == (2, ["memory", "local"])
            assert told["loaded"] == saved[rank]["2"]
            assert len(told["rejected"]) == num_rejected, told["rejected"]


@pytest.mark.slow
@pytest.mark.process
def test_another_number_of_ranks_loads_the_global_tier(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """Two ranks saved; one loads what only the global tier can give it: the weights and moments of all."""
    folder = tmp_path / "ckpt"
    config = {"directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    ((told,)) = _load(folder, {"one": nodes["one"]}, config, world=1)
    assert (told["iteration"], told["tier"]) == (2, "global")
    assert told["loaded"][0] in (saved[0]["2"][0], saved[1]["2"][0])


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_a_tier_that_lacks_the_loaded_checkpoint_gets_it(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """Killed between the commit to the node-local tiers and the one to the global tier, training that finished comes
    back and saves the same iteration once more: only the global tier, which lacks it, is written."""
    folder = tmp_path / "ckpt"
    config = {"directory": str(tmp_path / "global")}
    _save(folder, nodes, config)
    shutil.rmtree(tmp_path / "global" / "step-2")
    manifest = (folder / "one" / "step-2" / "manifest.json").read_bytes()
    again = f"CONFIG = {config!r}\n" + LOAD.replace(
        "manager.close()",
        "manager.save(state, restored.iteration).wait(100)\nmanager.save(state, restored.iteration).wait(100)\n"
        "manager.close()",
    )
    ended = start(folder, again, world=2, cycle=1, nodes=nodes)
    assert [(code, told["tiers"]) for code, told in ended] == [(0, ["memory", "memory"])] * 2, ended
    assert (tmp_path / "global" / "step-2" / "manifest.json").exists()
    assert (folder / "one" / "step-2" / "manifest.json").read_bytes() == manifest
    assert not list((tmp_path / "global").glob("*.tmp-*"))


def _flip(path: Path) -> None:
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        data[len(data.rstrip(b"\0")) // 2] ^= 1
        file.seek(0)
        file.write(data)
    os.utime(path)
