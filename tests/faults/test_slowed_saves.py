"""A save holds the state of its call in every tier, however late it is written and whatever training does meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gated_nodes import GatedNodes, empty_memory
from obedient_ranks import Ranks

pytestmark = pytest.mark.extended

NODES = ("one", "two")


def _nothing(root: Path, nodes: GatedNodes) -> None:
    """All tiers stay."""


def _lose_memory(root: Path, nodes: GatedNodes) -> None:
    for name in NODES:
        empty_memory(nodes.writers[name])


def _lose_a_node(root: Path, nodes: GatedNodes) -> None:
    empty_memory(nodes.writers["two"])
    shutil.rmtree(root / "local" / "two")


def _lose_all_nodes(root: Path, nodes: GatedNodes) -> None:
    _lose_memory(root, nodes)
    shutil.rmtree(root / "local")


@pytest.mark.process
@pytest.mark.parametrize("overlap", [False, True], ids=["copied at once", "copied beside training"])
def test_every_tier_holds_the_state_of_the_call(tmp_path: Path, overlap: bool) -> None:
    """Saved at step 1 while the writers wait, and trained on to step 3: from memory, disk, replica and global tier
    alike comes what step 1 was, bit by bit, the optimizer's ``step`` included."""
    config: dict[str, Any] = {
        "local_directory": os.fspath(tmp_path / "local"),
        "directory": os.fspath(tmp_path / "global"),
        "overlap_staging": overlap,
        "save_timeout": 60.0,
    }
    losses: list[tuple[Callable[[Path, GatedNodes], None], list[str]]] = [
        (_nothing, ["memory", "memory"]),
        (_lose_memory, ["local", "local"]),
        (_lose_a_node, ["local", "replica"]),
        (_lose_all_nodes, ["global", "global"]),
    ]
    with (
        GatedNodes.open(NODES, tmp_path) as nodes,
        Ranks(nodes.writers, tmp_path / "log", width=640) as ranks,  # matrices of more than 1 MiB
    ):
        begun = ranks.tell(do="begin", config=config, iteration=1, num_more=2, journal=os.fspath(tmp_path / "run"))
        for told in begun:
            assert not told["done"], "the writer wrote, though it was to wait"
            assert told["now"] != told["saved"]
            assert told["step"] == 3
        with nodes.opened():
            assert ranks.tell(do="finish", leave=True) == [{"error": None}] * 2
        for lose, tiers in losses:
            lose(tmp_path, nodes)
            for before, told in zip(begun, ranks.tell(do="load", config=config), strict=True):
                assert told["tiers"] == tiers, told
                assert told["step"] == 1
                assert told["digest"] == before["saved"]
