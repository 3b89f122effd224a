"""A session in a wrapped function that is called again: where training resumes, with identical results."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ConfigError
from outlast.incidents import EventKind, IncidentKind
from outlast.journal import read
from outlast.testing import Cluster
from outlast.testing.ranks import RankProcesses

SCRIPT = Path(__file__).parent / "restarting.py"
PATIENCE_S = 250
"""Limit for one run; some tests have two runs."""
MAX_ARENAS = 6
"""Limit for a rank's buffers for saves: their number grows with the number of concurrent saves, to a bound."""
pytestmark = pytest.mark.timeout(2 * PATIENCE_S + 50)


class RunResult:
    """The reports of ranks that were started as plain processes, or by ``outlast run`` on one node."""

    def __init__(self, folder: Path, world_size: int, options: Mapping[str, Any], *, is_launched: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        arguments = [str(folder), json.dumps(options)]
        if is_launched:
            with Cluster(SCRIPT, *arguments, run_dir=folder / "run", num_nodes=1, nproc_per_node=world_size) as job:
                self.codes = job.wait(timeout_s=PATIENCE_S)
                self.tails = job.tails()
        else:
            with RankProcesses(SCRIPT, *arguments, world_size=world_size, directory=folder / "out") as ranks:
                self.codes = ranks.wait(timeout_s=PATIENCE_S)
                self.tails = ranks.tails()
        reports = [json.loads(line) for path in folder.glob("said-*") for line in path.read_text().splitlines()]
        reports.sort(key=lambda one: one["call"])
        self.held = [one for one in reports if "held" in one]
        self.begins = [one for one in reports if "begins" in one]
        self.ends = {(one["digest"], one["rate"]) for one in reports if "digest" in one}
        self.tiers = {
            (event.rank, event.data["tier"]) for event in read(folder / "run") if event.kind == EventKind.RESTORED
        }
        self.incidents = [
            event.data["incident"]["kind"] for event in read(folder / "run") if event.kind == EventKind.INCIDENT
        ]

    def at(self, call: int) -> dict[int, tuple[int, int]]:
        """Return the first iteration and the pid of each rank of a call."""
        return {one["rank"]: (one["begins"], one["pid"]) for one in self.begins if one["call"] == call}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, float]]:
    """Return the final state of four ranks without a fault."""
    result = RunResult(tmp_path_factory.mktemp("calm"), 4, {})
    assert result.codes == [0] * 4, result.tails
    assert len(result.ends) == 1
    return result.ends


@pytest.mark.slow
@pytest.mark.process
def test_after_an_exception_training_resumes_in_place(tmp_path: Path, undisturbed: set[tuple[str, float]]) -> None:
    """If one of four ranks raises in its forward pass, the same processes resume at that iteration with the same
    model, optimizer, schedule, sampler and random numbers, and end with identical weights."""
    result = RunResult(tmp_path, 4, {"fault": "raise"})
    assert result.codes == [0] * 4, result.tails
    assert {begins for begins, _ in result.at(1).values()} == {7}, result.tails
    assert {rank: pid for rank, (_, pid) in result.at(1).items()} == {
        rank: pid for rank, (_, pid) in result.at(0).items()
    }
    assert result.tiers == {(rank, "in_place") for rank in range(4)}
    assert result.ends == undisturbed


@pytest.mark.campaign
@pytest.mark.process
def test_a_running_update_of_another_rank_is_finished(tmp_path: Path, undisturbed: set[tuple[str, float]]) -> None:
    """If one rank raises while the other ranks are still in the optimizer's step before, they finish the step, and
    nothing is loaded."""
    result = RunResult(tmp_path, 4, {"fault": "raise", "others_dawdle": True})
    assert result.codes == [0] * 4, result.tails
    assert {begins for begins, _ in result.at(1).values()} == {7}, result.tails
    assert result.tiers == {(rank, "in_place") for rank in range(4)}
    assert result.ends == undisturbed


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("on", "is_launched"),
    [
        (2, True),
        pytest.param(0, False, marks=pytest.mark.extended),
        pytest.param(2, False, marks=pytest.mark.campaign),
    ],
)
def test_a_spare_gets_the_state_of_a_surviving_rank(
    tmp_path: Path, undisturbed: set[tuple[str, float]], on: int, is_launched: bool
) -> None:
    """After SIGKILL of a rank, the spare continues with a surviving rank's weights and the dead rank's random
    numbers and sampler, the other ranks resume in place at the same iteration, and all end with identical weights;
    under ``outlast run`` in the same cycle and with exit code 0."""
    result = RunResult(tmp_path, 5, {"fault": "kill", "on": on, "active": 4}, is_launched=is_launched)
    assert sorted(result.codes) == ([0] if is_launched else [-signal.SIGKILL, 0, 0, 0, 0]), result.tails
    before, after = result.at(0), result.at(1)
    assert {begins for begins, _ in after.values()} == {7}, result.tails
    assert {rank for rank in before if before[rank][1] != after[rank][1]} == {on}
    assert result.tiers == {(rank, "peer" if rank == on else "in_place") for rank in range(4)}
    assert result.ends == undisturbed
    if is_launched:
        assert {event.cycle for event in read(tmp_path / "run") if event.kind == EventKind.RESTORED} == {0}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize("fault", ["torn", "late"])
def test_an_inconsistent_state_is_loaded_from_a_checkpoint(
    tmp_path: Path, undisturbed: set[tuple[str, float]], fault: str
) -> None:
    """After an interruption in an optimizer's step, or after it in the same iteration, all ranks load the newest
    checkpoint and not the state in memory, and end with identical weights."""
    result = RunResult(tmp_path, 4, {"fault": fault})
    assert result.codes == [0] * 4, result.tails
    assert {begins for begins, _ in result.at(1).values()} == {5}, result.tails
    assert {tier for _, tier in result.tiers} <= {"local", "memory", "global"}
    assert result.ends == undisturbed


@pytest.mark.campaign
@pytest.mark.process
def test_new_objects_are_loaded_from_a_checkpoint(tmp_path: Path, undisturbed: set[tuple[str, float]]) -> None:
    """Without handle.keep() each call has a new model, which is loaded from the newest checkpoint."""
    result = RunResult(tmp_path, 4, {"fault": "raise", "keeps": False})
    assert result.codes == [0] * 4, result.tails
    assert {begins for begins, _ in result.at(1).values()} == {5}, result.tails
    assert result.ends == undisturbed


@pytest.mark.campaign
@pytest.mark.process
def test_an_inconsistent_state_without_checkpoints_aborts(tmp_path: Path) -> None:
    """Without a checkpoint, training does not continue with an inconsistent model: the restart is left to the
    launcher."""
    result = RunResult(tmp_path, 2, {"fault": "torn", "saves": False})
    assert 0 not in result.codes
    assert not result.ends
    assert "RestartAbort" in result.tails


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("num_faults", [10, pytest.param(22, marks=pytest.mark.campaign)])
def test_many_restarts_do_not_leak(tmp_path: Path, num_faults: int) -> None:
    """After faults at many iterations in a row, descriptors and threads do not grow after the fifth restart, the
    weights are those of two undisturbed ranks, and no save is reported as failed."""
    total = num_faults + 10
    undisturbed = RunResult(tmp_path / "calm", 2, {"total": total})
    options = {"fault": "raise", "num_faults": num_faults, "total": total, "closes_slowly": True}
    result = RunResult(tmp_path / "faults", 2, options)
    assert result.codes == [0] * 2, result.tails
    assert result.ends == undisturbed.ends
    assert IncidentKind.SAVE_FAILED not in result.incidents, result.tails
    for rank in range(2):
        own_begins = [one for one in result.begins if one["rank"] == rank]
        assert [one["begins"] for one in own_begins] == [0, *range(7, 7 + num_faults)]
        before, after = (one for one in result.held if one["rank"] == rank)
        arenas = [sum("outlast-arena" in name for name in one["files"]) for one in (before, after)]
        for one, num_arenas in zip((before, after), arenas, strict=True):
            one["held"]["fds"] -= num_arenas  # as many as there were concurrent saves
        assert arenas[1] <= MAX_ARENAS
        kinds = [Counter(re.sub(r"[0-9]+", "N", name) for name in one["files"]) for one in (before, after)]
        assert all(after["held"][count] <= before["held"][count] for count in ("fds", "threads", "tasks")), (
            *(before["held"], after["held"]),
            kinds[1] - kinds[0],
        )


def test_in_process_needs_a_wrapped_function() -> None:
    """Outside of a wrapped function the option is an error that says what to do."""
    from outlast import Config, init

    with pytest.raises(ConfigError, match=r"@outlast\.inprocess\.Wrapper"):
        init(Config(in_process=True))


WITH_SINK = """
import sys, threading, torch, outlast
from outlast import inprocess
from outlast.integrations import metrics


class Slow(metrics.BackgroundSink):
    def _open(self, run): pass
    def _write(self, figures, iteration): pass

    def _close(self):
        threading.Event().wait(1.5)
        print("written", flush=True)


sessions = []


@inprocess.Wrapper(outlast.InProcessRestartConfig(granularity="rank"))
def train():
    sessions.append(outlast.init(outlast.Config(in_process=True), log_metrics=Slow()))
    for iteration in sessions[-1].steps({"weight": torch.zeros(1)}, total=3):
        pass
    if sys.argv[1] == "closes":
        sessions[-1].close()
    print("returned", flush=True)


train()
"""


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize(("ending", "lines"), [("closes", "written returned"), ("returns", "returned written")])
def test_a_session_that_ends_normally_writes_its_metrics(tmp_path: Path, ending: str, lines: str) -> None:
    """A metrics sink that needs more time for its last write than an exit waits gets the time, whether the function
    closes the session or the process ends."""
    script = tmp_path / "train.py"
    script.write_text(WITH_SINK)
    with RankProcesses(script, ending, world_size=1, directory=tmp_path / "out") as ranks:
        assert ranks.wait(timeout_s=PATIENCE_S) == [0], ranks.tails()
        text = ranks.tails()
    assert " ".join(re.findall(r"^(written|returned)$", str(text), re.MULTILINE)) == lines, text
