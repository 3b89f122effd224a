"""Gathers over a gloo group: by a tree, with values of any length, and without waiting for a dead rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.testing.ranks import RankProcesses

SCRIPT = Path(__file__).with_name("gathering_ranks.py")
pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_all_ranks_get_all_values(tmp_path: Path) -> None:
    """With 19 ranks, two levels of the tree: values of any length, also empty, in the order of the ranks."""
    with RankProcesses(SCRIPT, "all", world_size=19, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=200) == [0] * 19


def test_dead_rank_ends_the_gather_on_all_ranks(tmp_path: Path) -> None:
    """The death of a rank ends the gather with an error on every other rank before the timeout."""
    with RankProcesses(SCRIPT, "one dies", world_size=4, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=300) == [3, 3, 3, -9]
