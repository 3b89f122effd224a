"""A checkpoint is loaded from the nearest tier that has it, and from the next one if that copy is corrupt."""

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
    """Writers of two nodes."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(WriterProcess())) for name in ("one", "two")}


def _save(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any], world: int = 2) -> list[Any]:
    results = start(folder, f"CONFIG = {config!r}\n" + SAVE, world=world, nodes=nodes)
    assert [code for code, _ in results] == [-9] * world, results
    return [report["saved"] for _, report in results]


def _load(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any], world: int = 2) -> list[Any]:
    results = start(folder, f"CONFIG = {config!r}\n" + LOAD, world=world, cycle=1, nodes=nodes)
    assert [code for code, _ in results] == [0] * world, results
    return [report for _, report in results]


@pytest.mark.slow
@pytest.mark.process
def test_killed_workers_load_from_memory(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """After SIGKILL of all workers the writers still hold the newest checkpoint; no byte is read from disk."""
    saved = _save(tmp_path / "ckpt", nodes, {})
    shutil.rmtree(tmp_path / "ckpt")
    for rank, report in enumerate(_load(tmp_path / "ckpt", nodes, {})):
        assert report["iteration"] == 2
        assert report["tiers"] == ["memory", "memory"]
        assert list(report["read"]) == ["memory"]
        assert report["loaded"] == saved[rank]["2"]


@pytest.mark.slow
@pytest.mark.process
def test_a_replaced_node_loads_its_replica(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A node that lost memory and disk loads its shard from the other node, and then holds it in memory."""
    folder = tmp_path / "ckpt"
    saved = _save(folder, nodes, {})
    shutil.rmtree(folder / "two")
    nodes["two"].close()
    nodes["two"] = WriterProcess()
    try:
        for rank, report in enumerate(_load(folder, nodes, {})):
            assert (report["iteration"], report["tiers"]) == (2, ["memory", "replica"])
            assert report["loaded"] == saved[rank]["2"]
        assert _load(folder, nodes, {})[1]["tier"] == "memory"
    finally:
        nodes["two"].close()


@pytest.mark.slow
@pytest.mark.process
def test_without_disks_replicas_are_held_in_memory(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """Without a local tier, the partner's memory holds the replica, and the newest checkpoint survives a lost node."""
    folder = tmp_path / "ckpt"
    config = {"local_directory": None, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    shutil.rmtree(tmp_path / "global")
    nodes["one"].close()
    nodes["one"] = WriterProcess()
    try:
        for rank, report in enumerate(_load(folder, nodes, config)):
            assert (report["iteration"], report["tiers"]) == (2, ["replica", "memory"])
            assert report["loaded"] == saved[rank]["2"]
    finally:
        nodes["one"].close()


@pytest.mark.slow
@pytest.mark.process
def test_corrupt_copies_fall_back_tier_by_tier(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """Without memory and with a corrupt local file, the replica is loaded; if that is corrupt, the global tier."""
    folder = tmp_path / "ckpt"
    config = {"directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    nodes["two"].close()
    nodes["two"] = WriterProcess()
    try:
        _flip(folder / "two" / "step-2" / "rank-00001.safetensors")
        first = _load(folder, nodes, config)
        assert [report["tiers"] for report in first] == [["memory", "replica"]] * 2
        assert "differs from its digest" in first[0]["rejected"][0]
        nodes["two"].close()
        nodes["two"] = WriterProcess()
        _flip(folder / "one" / "step-2" / "rank-00001.safetensors")
        second = _load(folder, nodes, config)
        assert [report["tiers"] for report in second] == [["memory", "global"]] * 2
        for rank, report in enumerate(second):
            assert report["iteration"] == 2
            assert report["loaded"] == saved[rank]["2"]
            assert len(report["rejected"]) == 2
    finally:
        nodes["two"].close()


@pytest.mark.slow
@pytest.mark.process
def test_a_corrupt_copy_in_memory_is_dropped(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A rank with a corrupt copy in memory loads from its local disk and drops the copy."""
    saved = _save(tmp_path / "ckpt", nodes, {})
    for path in memory_files(nodes["two"].pid, "outlast-arena"):
        _flip(Path(path))
    first, second = (_load(tmp_path / "ckpt", nodes, {}) for _ in range(2))
    for loaded, num_rejected in ((first, 1), (second, 0)):
        for rank, report in enumerate(loaded):
            assert (report["iteration"], report["tiers"]) == (2, ["memory", "local"])
            assert report["loaded"] == saved[rank]["2"]
            assert len(report["rejected"]) == num_rejected, report["rejected"]


@pytest.mark.slow
@pytest.mark.process
def test_another_world_size_loads_the_global_tier(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """One rank loads a checkpoint of two ranks from the global tier, with the weights and moments of both."""
    folder = tmp_path / "ckpt"
    config = {"directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    ((report,)) = _load(folder, {"one": nodes["one"]}, config, world=1)
    assert (report["iteration"], report["tier"]) == (2, "global")
    assert report["loaded"][0] in (saved[0]["2"][0], saved[1]["2"][0])


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_a_tier_without_the_loaded_checkpoint_gets_it(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """Saving the loaded iteration again writes only the global tier, which lacks it after a kill before its commit."""
    folder = tmp_path / "ckpt"
    config = {"directory": str(tmp_path / "global")}
    _save(folder, nodes, config)
    shutil.rmtree(tmp_path / "global" / "step-2")
    manifest = (folder / "one" / "step-2" / "manifest.json").read_bytes()
    load_and_save = f"CONFIG = {config!r}\n" + LOAD.replace(
        "manager.close()",
        "manager.save(state, restored.iteration).wait(100)\nmanager.save(state, restored.iteration).wait(100)\n"
        "manager.close()",
    )
    results = start(folder, load_and_save, world=2, cycle=1, nodes=nodes)
    assert [(code, report["tiers"]) for code, report in results] == [(0, ["memory", "memory"])] * 2, results
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
