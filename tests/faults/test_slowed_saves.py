"""A delayed save holds the state of its call in every tier."""

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


def _lose_nothing(root: Path, nodes: GatedNodes) -> None:
    """Keep all tiers."""


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
def test_each_tier_holds_the_state_of_the_call(tmp_path: Path, overlap: bool) -> None:
    """A save of step 1 whose writes start after step 3 restores step 1 bit by bit from each tier.

    This includes the optimizer's ``step``.
    """
    config: dict[str, Any] = {
        "local_directory": os.fspath(tmp_path / "local"),
        "directory": os.fspath(tmp_path / "global"),
        "overlap_staging": overlap,
        "save_timeout": 60.0,
    }
    losses: list[tuple[Callable[[Path, GatedNodes], None], list[str]]] = [
        (_lose_nothing, ["memory", "memory"]),
        (_lose_memory, ["local", "local"]),
        (_lose_a_node, ["local", "replica"]),
        (_lose_all_nodes, ["global", "global"]),
    ]
    with (
        GatedNodes.open(NODES, tmp_path) as nodes,
        Ranks(nodes.writers, tmp_path / "log", width=640) as ranks,  # matrices of more than 1 MiB
    ):
        started = ranks.tell(do="begin", config=config, iteration=1, num_more=2, journal=os.fspath(tmp_path / "run"))
        for result in started:
            assert not result["done"], "the writer wrote, though it was to wait"
            assert result["now"] != result["saved"]
            assert result["step"] == 3
        with nodes.opened():
            assert ranks.tell(do="finish", leave=True) == [{"error": None}] * 2
        for lose_copies, tiers in losses:
            lose_copies(tmp_path, nodes)
            for saved, result in zip(started, ranks.tell(do="load", config=config), strict=True):
                assert result["tiers"] == tiers, result
                assert result["step"] == 1
                assert result["digest"] == saved["saved"]
