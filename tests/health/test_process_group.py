"""The check of the process group distinguishes responding, dead, silent and wrong ranks, identifies them, and does
not affect other groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ConfigError
from outlast.health import check_process_group
from outlast.testing import RankProcesses

pytestmark = [pytest.mark.process]
RANKS = Path(__file__).with_name("checked_ranks.py")


def found(folder: Path, rank: int) -> list[list[Any]]:
    result: list[list[Any]] = json.loads((folder / f"found-{rank}.json").read_text())
    return result


def run(folder: Path, kind: str, timeout_s: float) -> RankProcesses:
    return RankProcesses(RANKS, str(folder), kind, str(timeout_s), world_size=3, directory=folder)


def test_responding_ranks_pass(tmp_path: Path) -> None:
    """Responding ranks pass each check."""
    with run(tmp_path, "alive", 20) as ranks:
        assert ranks.wait(timeout_s=300) == [0, 0, 0]
    for rank in range(3):
        assert [one[:2] for one in found(tmp_path, rank)] == [["ok", "all 3 ranks responded"]] * 4


def test_dead_rank_is_identified(tmp_path: Path) -> None:
    """A killed rank is reported as lost, not silent, long before the timeout, and other groups keep working."""
    with run(tmp_path, "killed", 30) as ranks:
        ranks.wait_for("ready", timeout_s=300, ranks=range(3))
        ranks.kill(2)
        (tmp_path / "go").touch()
        ranks.wait_for("done", timeout_s=300, ranks=range(2))
    for rank in range(2):
        first, second, third = found(tmp_path, rank)
        assert first[0] == "ok"
        assert second[0] == "lost", second
        assert second[2] == {"absent_ranks": [2]}
        assert "rank 2 did not come" in second[1]
        assert second[3] < 30
        assert third == second, "a group that failed is not asked again"


@pytest.mark.slow
def test_silent_rank_is_identified(tmp_path: Path) -> None:
    """All ranks report a stopped rank as silent, not lost, and do not take a peer that gave up for a dead one."""
    with run(tmp_path, "stopped", 10) as ranks:
        ranks.wait_for("ready", timeout_s=300, ranks=range(3))
        ranks.stop(2)
        (tmp_path / "go").touch()
        ranks.wait_for("done", timeout_s=300, ranks=range(2))
    for rank in range(2):
        _, second, _ = found(tmp_path, rank)
        assert second[0] == "timed_out", second
        assert second[2] == {"absent_ranks": [2]}


def test_rank_with_a_wrong_response_is_identified(tmp_path: Path) -> None:
    """All other ranks identify a rank that computes a wrong value."""
    with run(tmp_path, "wrong", 20) as ranks:
        assert ranks.wait(timeout_s=300) == [0, 0, 0]
    for rank in (0, 2):
        assert found(tmp_path, rank)[1][:3] == [
            "failed",
            "rank 1 responded with a wrong number",
            {"wrong_ranks": [1]},
        ]


def test_missing_process_group_is_reported() -> None:
    """Before torch.distributed is initialised, the error has the remedy."""
    with pytest.raises(ConfigError, match="init_process_group"):
        check_process_group(1.0)
