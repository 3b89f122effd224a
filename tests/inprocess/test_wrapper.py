"""A wrapped function is called again on all ranks and returns what it would have returned without a fault: as plain
processes, under ``torchrun`` and under ``outlast run``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from outlast import inprocess
from outlast.errors import ConfigError
from outlast.incidents import Event, EventKind, RecoveryLevel
from outlast.testing import Cluster
from outlast.testing.ranks import TOKEN, RankProcesses, end_processes, processes_with

RANKS = Path(__file__).with_name("restarting_ranks.py")
PATIENCE_S = 250

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

Host = Literal["plain", "torchrun", "python -m torch.distributed.run", "outlast run"]
SIZES: dict[Host, tuple[int, int]] = {
    "plain": (3, 2),
    "torchrun": (2, 2),
    "python -m torch.distributed.run": (2, 2),
    "outlast run": (5, 4),
}
"""World size, and number of active ranks. ``torchrun`` ends all ranks when one of them ends, also for a spare."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    codes: list[int]
    """Exit codes of the ranks, or of the launcher."""
    outputs: str
    reports: list[list[str]]
    """Lines that each initial rank has reported."""
    events: list[Event]

    def returned(self, rank: int) -> str | None:
        """Return what the function returned on an initial rank, as text."""
        return next(
            (line.removeprefix("returned ") for line in self.reports[rank] if line.startswith("returned")), None
        )

    def calls(self, rank: int) -> list[dict[str, int]]:
        """Return iteration, rank, world size and pid of each call of an initial rank."""
        lines = [line.split() for line in self.reports[rank] if line.startswith("call")]
        return [dict(zip(words[::2], map(int, words[1::2]), strict=True)) for words in lines]

    def data(self, kind: EventKind) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind == kind]


def run(folder: Path, host: Host, fault: str, victim: int, world_size: int, active: int) -> Result:
    reports = folder / "reports"
    reports.mkdir(parents=True)
    arguments = [str(reports), fault, str(victim), str(active)]
    events: list[Event] = []
    if host == "plain":
        with RankProcesses(RANKS, *arguments, world_size=world_size, directory=folder) as ranks:
            is_last = fault in ("stop", "gil")  # its agent process ends the victim, and the others do not wait for it
            others = [rank for rank in range(world_size) if not (is_last and rank == victim)]
            codes = ranks.wait(timeout_s=PATIENCE_S, ranks=others)
            if is_last:
                codes.insert(victim, ranks.wait(timeout_s=PATIENCE_S, ranks=[victim])[0])
            outputs = str(ranks.tails())
    elif host == "outlast run":
        with Cluster(RANKS, *arguments, run_dir=folder / "run", num_nodes=1, nproc_per_node=world_size) as job:
            codes, outputs, events = job.wait(timeout_s=PATIENCE_S), job.tails(), list(job.events())
    else:
        codes, outputs = run_with_torch(host, world_size, arguments, f"torchrun-{os.getpid()}-{folder.name}")
    paths = [reports / f"rank-{rank}" for rank in range(world_size)]
    lines = [path.read_text().splitlines() if path.exists() else [] for path in paths]
    return Result(codes=codes, outputs=outputs, reports=lines, events=events)


def run_with_torch(host: Host, world_size: int, arguments: list[str], token: str) -> tuple[list[int], str]:
    """Run the ranks under torch's launcher; all their processes have ended afterwards."""
    launcher = [sys.executable, *host.split()[1:]] if " " in host else [str(Path(sys.executable).with_name(host))]
    command = [*launcher, "--standalone", f"--nproc-per-node={world_size}", str(RANKS), *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, TOKEN: token, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        psutil.wait_procs(processes_with(token), timeout=PATIENCE_S)
        assert not processes_with(token)
    finally:
        end_processes(token)
    return [done.returncode], done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return a function for the result of so many ranks without a fault."""
    known: dict[int, str] = {}

    def result_of(world_size: int) -> str:
        if world_size not in known:
            result = run(tmp_path_factory.mktemp("undisturbed"), "plain", "nothing", 0, world_size, world_size)
            assert result.codes == [0] * world_size, result.outputs
            known[world_size] = str(result.returned(0))
        return known[world_size]

    return result_of


def check_journal(result: Result, victim: int, kind: str) -> None:
    """``outlast run`` has charged one restart inside the processes, to the rank with the fault."""
    first, last = result.data(EventKind.DECISION)
    levels = [one["verdict"]["rung"] for one in (first, last)]
    assert levels == [RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.STOP]
    assert (first["incident"]["rank"], first["incident"]["kind"]) == (victim, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "fault", "victim"),
    [
        ("outlast run", "exception", 1),
        *(
            pytest.param(*other, marks=pytest.mark.extended)
            for other in (
                ("plain", "exception", 1),
                ("plain", "swallow", 1),
                ("python -m torch.distributed.run", "exception", 1),
            )
        ),
        *(
            pytest.param(*other, marks=pytest.mark.campaign)
            for other in (
                ("plain", "sleep", 1),
                ("outlast run", "sleep", 3),
                ("torchrun", "exception", 1),
                ("torchrun", "sleep", 1),
            )
        ),
    ],
)
def test_recoverable_ranks_are_called_again(
    tmp_path: Path, undisturbed: Callable[[int], str], host: Host, fault: str, victim: int
) -> None:
    """After an exception, an endless sleep and code that suppresses all exceptions, the same processes are called
    again with the same ranks; a spare stays a spare, and the weights are those of an undisturbed run."""
    world_size, active = SIZES[host]
    result = run(tmp_path, host, fault, victim, world_size, active)
    assert set(result.codes) == {0}, result.outputs
    expected = [undisturbed(active)] * active + ["None"] * (world_size - active)
    assert [result.returned(rank) for rank in range(world_size)] == expected
    for rank in range(active):
        first, second = result.calls(rank)
        assert (first["call"], second["call"]) == (0, 1)
        assert first | {"call": 1} == second == {**second, "rank": rank, "of": active}
    assert not any(result.calls(spare) for spare in range(active, world_size))
    if host == "outlast run":
        check_journal(result, victim, "worker_hung" if fault == "sleep" else "worker_failed")
        incident = result.data(EventKind.DECISION)[0]["incident"]
        assert RANKS.name in incident["evidence"]["summary"]
    elif host != "plain":
        assert result.outputs.count("torchrun ends all ranks when one process ends") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "fault", "victim"),
    [
        ("plain", "kill", 0),
        *(
            pytest.param(*other, marks=pytest.mark.extended)
            for other in (("plain", "kill", 1), ("plain", "gil", 0), ("outlast run", "kill", 0))
        ),
        *(
            pytest.param(*other, marks=pytest.mark.campaign)
            for other in (
                ("plain", "stop", 0),
                ("plain", "stop", 1),
                ("plain", "gil", 1),
                ("outlast run", "kill", 1),
                ("outlast run", "stop", 2),
            )
        ),
    ],
)
def test_a_spare_replaces_a_lost_rank(
    tmp_path: Path, undisturbed: Callable[[int], str], host: Host, fault: str, victim: int
) -> None:
    """A rank that is killed, stopped or holds the interpreter's lock is replaced, also rank 0, which hosts the store;
    the other ranks keep processes and ranks, and the weights are those of an undisturbed run."""
    world_size, active = SIZES[host]
    result = run(tmp_path, host, fault, victim, world_size, active)
    spare, survivors = active, set(range(active)) - {victim}
    assert {result.returned(rank) for rank in survivors | {spare}} == {undisturbed(active)}, result.outputs
    for rank in survivors:
        first, second = result.calls(rank)
        assert first | {"call": 1} == second == {**second, "rank": rank, "of": active}
    (replacing,) = result.calls(spare)
    assert replacing == {**replacing, "call": 1, "rank": victim, "of": active}
    if host == "plain":
        assert result.codes.pop(victim) == -(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
    assert set(result.codes) == {0}, result.outputs
    if host == "outlast run":
        check_journal(result, victim, "worker_hung" if fault == "stop" else "worker_died")
        (restarted,) = result.data(EventKind.RESTARTED_IN_PROCESS)
        assert (restarted["restart_iteration"], restarted["replaced"]) == (1, {str(victim): spare})
        assert {event.cycle for event in result.events if event.kind == EventKind.CYCLE_STARTED} == {0}


@pytest.mark.slow
def test_a_single_rank_is_called_again(tmp_path: Path) -> None:
    """A world of one rank needs no store, and its function is called again."""
    result = run(tmp_path, "plain", "exception", 0, 1, 1)
    assert result.codes == [0], result.outputs
    assert [(call["call"], call["rank"], call["of"]) for call in result.calls(0)] == [(0, 0, 1), (1, 0, 1)]


def test_a_plugin_that_is_not_callable_is_rejected() -> None:
    """A plug-in that is not callable is a ConfigError with its name."""
    with pytest.raises(ConfigError, match="finalize="):
        inprocess.Wrapper(finalize=3)  # type: ignore[arg-type]
