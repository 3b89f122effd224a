"""With XOR parities instead of copies a lost node comes back from what the others hold, at a part of the memory."""

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
    """Three nodes' writers."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(WriterProcess())) for name in NAMES}


def _save(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any]) -> list[Any]:
    ended = start(folder, f"CONFIG = {config!r}\n" + SAVE, world=3, nodes=nodes)
    assert [code for code, _ in ended] == [-9] * 3, ended
    return [told["saved"] for _, told in ended]


def _load(folder: Path, nodes: dict[str, WriterProcess], config: dict[str, Any]) -> list[Any]:
    ended = start(folder, f"CONFIG = {config!r}\n" + LOAD, world=3, cycle=1, nodes=nodes)
    assert [code for code, _ in ended] == [0] * 3, ended
    return [told for _, told in ended]


def _lose(folder: Path, nodes: dict[str, WriterProcess], name: str) -> None:
    """Take a node's memory and disk away, and put an empty one in its place."""
    shutil.rmtree(folder / name, ignore_errors=True)
    nodes[name].close()
    nodes[name] = WriterProcess()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("lost", "on_disk"), [pytest.param(0, False, marks=pytest.mark.campaign), (2, True)])
def test_a_lost_node_is_rebuilt(tmp_path: Path, nodes: dict[str, WriterProcess], lost: int, on_disk: bool) -> None:
    """Whichever node is lost with all it held, its shard is rebuilt bit by bit from what the others hold, and
    nothing is read from the global tier."""
    folder = tmp_path / "ckpt"
    config: dict[str, Any] = {"replication_parity": 2}
    if not on_disk:
        config |= {"local_directory": None, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    shutil.rmtree(tmp_path / "global", ignore_errors=True)
    _lose(folder, nodes, NAMES[lost])
    try:
        tiers = ["memory"] * 3
        tiers[lost] = "replica"
        for rank, told in enumerate(_load(folder, nodes, config)):
            assert (told["iteration"], told["tiers"]) == (2, tiers)
            assert told["loaded"] == saved[rank]
        again = _load(folder, nodes, config)[lost]
        assert again["tiers"] == ["memory"] * 3  # what was rebuilt is held here now
        assert again["loaded"] == saved[lost]
    finally:
        nodes[NAMES[lost]].close()


@pytest.mark.slow
@pytest.mark.process
def test_a_flipped_parity_is_not_trusted(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A shard rebuilt from a flipped parity differs from the digests of its source; the global tier is used instead."""
    folder = tmp_path / "ckpt"
    config = {"replication_parity": 2, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    parity = folder / "three" / "step-2" / "parity-00002.bin"
    data = bytearray(parity.read_bytes())
    data[len(data) // 3] ^= 1
    parity.write_bytes(data)
    os.utime(parity)
    lost = "two"
    _lose(folder, nodes, lost)
    try:
        for rank, told in enumerate(_load(folder, nodes, config)):
            assert (told["iteration"], told["tiers"]) == (2, ["memory", "global", "memory"])
            assert told["loaded"] == saved[rank]
            assert "rebuilt from nodes one, three is not what was saved" in " ".join(told["rejected"])
    finally:
        nodes[lost].close()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_two_lost_nodes_are_too_many_for_a_parity(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """A parity outlives one node; when two are lost all ranks go to the global tier, and say what they lack."""
    folder = tmp_path / "ckpt"
    config = {"replication_parity": 2, "directory": str(tmp_path / "global")}
    saved = _save(folder, nodes, config)
    for name in NAMES[:2]:
        _lose(folder, nodes, name)
    try:
        for rank, told in enumerate(_load(folder, nodes, config)):
            assert (told["iteration"], told["tiers"]) == (2, ["global", "global", "memory"])
            assert told["loaded"] == saved[rank]
    finally:
        for name in NAMES[:2]:
            nodes[name].close()
