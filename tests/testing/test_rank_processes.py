"""Plain ranks of a script: what they are told, what can be done to them, and that nothing is left of them."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from outlast.errors import DeadlineExceeded
from outlast.testing import RankProcesses

SCRIPT = """
import os, signal, subprocess, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OUTLAST_NODE", "MASTER_ADDR")
print("place", *(os.environ.get(name) for name in names), *sys.argv[1:])
if "leave-child" in sys.argv:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if "end" not in sys.argv:
    print("waiting")
    signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.process
def test_ranks_are_told_their_places(script: Path, tmp_path: Path) -> None:
    """Each rank gets the variables of its rank, counted on its own node where nodes are named; output stays."""
    with RankProcesses(script, "end", world_size=3, directory=tmp_path / "out", nodes=["a", "b", "a"]) as ranks:
        assert ranks.wait(timeout_s=15) == [0, 0, 0]
    places = [(tmp_path / "out" / f"rank-{rank}.log").read_text().strip() for rank in range(3)]
    assert places == [
        "place 0 0 2 3 a 127.0.0.1 end",
        "place 1 0 1 3 b 127.0.0.1 end",
        "place 2 1 2 3 a 127.0.0.1 end",
    ]


@pytest.mark.process
def test_nothing_of_the_ranks_is_left(script: Path) -> None:
    """Ranks, stopped ones too, and what they started in sessions of their own end with the block."""
    ranks = RankProcesses(script, "leave-child", world_size=2)
    with pytest.raises(KeyError):
        look_and_fail(ranks)
    assert not ranks.processes()


def look_and_fail(ranks: RankProcesses) -> None:
    with ranks:
        ranks.wait_for("waiting", timeout_s=15, ranks=range(2))
        ranks.stop(1)
        assert len(ranks.processes()) == 4
        raise KeyError


@pytest.mark.process
def test_one_rank_is_killed_and_the_others_are_not(script: Path) -> None:
    """A signal goes to one rank alone; a wait that cannot end says so, with everybody's output."""
    with RankProcesses(script, world_size=2) as ranks:
        ranks.wait_for("waiting", timeout_s=15, ranks=range(2))
        ranks.kill(0)
        assert ranks.wait(timeout_s=1, ranks=[0]) == [-signal.SIGKILL]
        ranks.stop(1)
        ranks.resume(1)
        assert ranks.running(1)
        with pytest.raises(DeadlineExceeded, match=r"(?s)rank 1 still runs.*rank 0 \(ended with -9\).*waiting"):
            ranks.wait(timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match="ranks ended without 'more' from ranks"):
            ranks.wait_for("more", timeout_s=15, ranks=[0])


@pytest.mark.process
def test_failed_start_leaves_nobody(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a rank cannot be started, those before it are ended."""
    started = []
    start = subprocess.Popen

    def fail_second(*args: object, **options: object) -> object:
        if started:
            raise OSError("no more processes")
        started.append(start(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", fail_second)
    with pytest.raises(OSError, match="no more"), RankProcesses(script, world_size=2):
        pass
    assert started[0].returncode == -signal.SIGKILL


def test_nodes_must_be_as_many_as_ranks() -> None:
    """A list of nodes of another length is refused."""
    with pytest.raises(ValueError, match="names 1 nodes for 2 ranks"):
        RankProcesses("x.py", world_size=2, nodes=["a"])
