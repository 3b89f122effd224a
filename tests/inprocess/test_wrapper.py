"""A wrapped function is called again on all ranks and returns what it would have returned without a fault."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from outlast import inprocess
from outlast.errors import ConfigError
from outlast.testing.ranks import RankProcesses

RANKS = Path(__file__).with_name("restarting_ranks.py")
PATIENCE_S = 250

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def run(tmp_path: Path, fault: str, victim: int, *, world_size: int, active: int) -> tuple[list[int], list[str]]:
    """Run the ranks; return their exit codes and outputs."""
    arguments = [fault, str(victim), str(active)]
    with RankProcesses(RANKS, *arguments, world_size=world_size, directory=tmp_path) as ranks:
        waited = [rank for rank in range(world_size) if not (fault in ("stop", "gil") and rank == victim)]
        codes = ranks.wait(timeout_s=PATIENCE_S, ranks=waited)
        for rank in set(range(world_size)) - set(waited):
            codes.insert(rank, ranks.wait(timeout_s=PATIENCE_S, ranks=[rank])[0])
        return codes, [ranks.output(rank) for rank in range(world_size)]


def returned(output: str) -> str | None:
    found = re.search(r"^returned (.*)$", output, re.MULTILINE)
    return found[1] if found else None


def calls(output: str) -> list[tuple[str, str, str, str]]:
    """Return iteration, rank, world size and pid of each call."""
    return re.findall(r"^call (\d+) rank (\d+) of (\d+) pid (\d+)$", output, re.MULTILINE)


def undisturbed(folder: Path) -> str:
    """Return the weights of a run of two ranks without a fault."""
    codes, outputs = run(folder, "nothing", 0, world_size=2, active=2)
    assert codes == [0, 0], outputs
    weights = returned(outputs[0])
    assert weights is not None
    return weights


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the function's result without a fault."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["exception", pytest.param("sleep", marks=pytest.mark.campaign), "swallow"])
def test_recoverable_ranks_are_called_again(tmp_path: Path, expected: str, fault: str) -> None:
    """After an exception, an endless sleep and code that suppresses all exceptions, the same processes are called
    again with the same ranks; the spare stays a spare, and the weights are those of an undisturbed run."""
    codes, outputs = run(tmp_path, fault, 1, world_size=3, active=2)
    assert codes == [0, 0, 0], outputs
    assert [returned(output) for output in outputs] == [expected, expected, "None"]
    for rank in (0, 1):
        assert len(calls(outputs[rank])) == 2, outputs
        first, second = calls(outputs[rank])
        assert first[1:] == second[1:] == (str(rank), "2", first[3])
    assert calls(outputs[2]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "victim"),
    [("kill", 0)]
    + [pytest.param(*other, marks=pytest.mark.extended) for other in (("kill", 1), ("gil", 0))]
    + [pytest.param(*other, marks=pytest.mark.campaign) for other in (("stop", 0), ("stop", 1), ("gil", 1))],
)
def test_a_spare_replaces_a_lost_rank(tmp_path: Path, expected: str, fault: str, victim: int) -> None:
    """A rank that is killed, stopped or holds the interpreter's lock is replaced, also rank 0; the other ranks keep
    processes and ranks, and the weights are those of an undisturbed run."""
    codes, outputs = run(tmp_path, fault, victim, world_size=3, active=2)
    other = 1 - victim
    assert codes[victim] == -(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
    assert (codes[other], codes[2]) == (0, 0), outputs
    assert returned(outputs[other]) == returned(outputs[2]) == expected
    assert len(calls(outputs[other])) == 2, outputs
    first, second = calls(outputs[other])
    assert first[1:] == second[1:]
    assert [call[:3] for call in calls(outputs[2])] == [("1", str(victim), "2")]


@pytest.mark.slow
def test_a_single_rank_is_called_again(tmp_path: Path) -> None:
    """A world of one rank needs no store, and its function is called again."""
    codes, outputs = run(tmp_path, "exception", 0, world_size=1, active=1)
    assert codes == [0], outputs
    assert [call[:3] for call in calls(outputs[0])] == [("0", "0", "1"), ("1", "0", "1")]


def test_a_plugin_that_is_not_callable_is_rejected() -> None:
    """A plug-in that is not callable is a ConfigError with its name."""
    with pytest.raises(ConfigError, match="finalize="):
        inprocess.Wrapper(finalize=3)  # type: ignore[arg-type]
