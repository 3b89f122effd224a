"""What ranks gather over a gloo group: by a tree, each answer as long as it is, and no wait for who is dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.testing.ranks import RankProcesses

SCRIPT = Path(__file__).with_name("gathering_ranks.py")
pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_all_ranks_get_what_each_gave(tmp_path: Path) -> None:
    """Of 19 ranks, two levels of the tree: answers of any length, empty ones too, in the order of the ranks."""
    with RankProcesses(SCRIPT, "all", world_size=19, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=200) == [0] * 19


def test_a_rank_that_died_is_missed_by_all(tmp_path: Path) -> None:
    """Its death ends the gather on every rank with an error, below it and above it in the tree, before the timeout."""
    with RankProcesses(SCRIPT, "one dies", world_size=4, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=300) == [3, 3, 3, -9]
