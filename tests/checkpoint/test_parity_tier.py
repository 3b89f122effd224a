"""With XOR parities instead of copies, a lost node is rebuilt from the others at a fraction of the memory."""

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

SAVE = """
manager = manage(config=CONFIG)
for iteration in (1, 2):
    train()
    manager.save(state, iteration).wait(100)
tell(saved=content())
kill_all()
"""
LOAD = """
manager = manage(config=CONFIG)
restored = manager.load_latest(state)
tell(
    iteration=restored.iteration, loaded=content(), tiers=restored.tiers, read=restored.bytes_read,
    rejected=[str(one) for one in restored.rejected],
)
manager.close()
"""
NAMES = ("one", "two", "three")


@pytest.fixture
def nodes() -> Iterator[dict[str, WriterProcess]]:
    """Writers of three nodes."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(WriterProcess())) for name in NAMES}


def _save(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any]) -> list[Any]:
    results = start(folder, f"CONFIG = {config!r}\n" + SAVE, world=3, nodes=nodes)
    assert [code for code, _ in results] == [-9] * 3, results
    return [report["saved"] for _, report in results]


def _load(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any]) -> list[Any]:
    results = start(folder, f"CONFIG = {config!r}\n" + LOAD, world=3, cycle=1, nodes=nodes)
    assert [code for code, _ in results] == [0] * 3, results
    return [report for _, report in results]


def _replace_node(folder: Path, nodes: dict[str, WriterProcess], name: str) -> None:
    """Replace a node by an empty one, without its memory and disk."""
    shutil.rmtree(folder / name, ignore_errors=True)
    nodes[name].close()
    nodes[name] = WriterProcess()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("lost", "on_disk"), [pytest.param(0, False, marks=pytest.mark.campaign), (2, True)])
def test_a_lost_node_is_rebuilt(tmp_path: Path, nodes: dict[str, WriterProcess], lost: int, on_disk: bool) -> None:
    """The shard of any lost node is rebuilt bit by bit from the other nodes, without reading the global tier."""
    folder = tmp_path / "ckpt"
    config: dict[str, Any] = {"replication_parity": 2}
    if not on_disk:
        config |= {"local_directory": None, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    shutil.rmtree(tmp_path / "global", ignore_errors=True)
    _replace_node(folder, nodes, NAMES[lost])
    try:
        tiers = ["memory"] * 3
        tiers[lost] = "replica"
        for rank, report in enumerate(_load(folder, nodes, config)):
            assert (report["iteration"], report["tiers"]) == (2, tiers)
            assert report["loaded"] == saved[rank]
        again = _load(folder, nodes, config)[lost]
        assert again["tiers"] == ["memory"] * 3  # the node holds the rebuilt shard
        assert again["loaded"] == saved[lost]
    finally:
        nodes[NAMES[lost]].close()


@pytest.mark.slow
@pytest.mark.process
def test_a_shard_from_a_corrupt_parity_is_rejected(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A shard rebuilt from a corrupt parity does not match its digests; the global tier is used instead."""
    folder = tmp_path / "ckpt"
    config = {"replication_parity": 2, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    parity = folder / "three" / "step-2" / "parity-00002.bin"
    data = bytearray(parity.read_bytes())
    data[len(data) // 3] ^= 1
    parity.write_bytes(data)
    os.utime(parity)
    lost = "two"
    _replace_node(folder, nodes, lost)
    try:
        for rank, report in enumerate(_load(folder, nodes, config)):
            assert (report["iteration"], report["tiers"]) == (2, ["memory", "global", "memory"])
            assert report["loaded"] == saved[rank]
            assert "rebuilt from nodes one, three is not what was saved" in " ".join(report["rejected"])
    finally:
        nodes[lost].close()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_two_lost_nodes_load_the_global_tier(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A parity covers one lost node; after the loss of two, their ranks load the global tier."""
    folder = tmp_path / "ckpt"
    config = {"replication_parity": 2, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    for name in NAMES[:2]:
        _replace_node(folder, nodes, name)
    try:
        for rank, report in enumerate(_load(folder, nodes, config)):
            assert (report["iteration"], report["tiers"]) == (2, ["global", "global", "memory"])
            assert report["loaded"] == saved[rank]
    finally:
        for name in NAMES[:2]:
            nodes[name].close()
