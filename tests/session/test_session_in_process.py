"""A session within a function that is called again: what training goes on from, and that no bit is lost by it."""

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
"""Of one run; some tests have two."""
MAX_ARENAS = 6
"""Pieces of memory for saves that a rank may hold: they grow with the saves that are under way at once, to a bound."""
pytestmark = pytest.mark.timeout(2 * PATIENCE_S + 50)


class Played:
    """What ranks did; started as plain processes, or by ``outlast run`` on one node."""

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
        said = [json.loads(line) for path in folder.glob("said-*") for line in path.read_text().splitlines()]
        said.sort(key=lambda one: one["call"])
        self.held = [one for one in said if "held" in one]
        self.begins = [one for one in said if "begins" in one]
        self.ends = {(one["digest"], one["rate"]) for one in said if "digest" in one}
        self.tiers = {
            (event.rank, event.data["tier"]) for event in read(folder / "run") if event.kind == EventKind.RESTORED
        }
        self.incidents = [
            event.data["incident"]["kind"] for event in read(folder / "run") if event.kind == EventKind.INCIDENT
        ]

    def at(self, call: int) -> dict[int, tuple[int, int]]:
        """Return for each rank of a call where it began, and its pid."""
        return {one["rank"]: (one["begins"], one["pid"]) for one in self.begins if one["call"] == call}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, float]]:
    """What four ranks have in the end when nothing goes wrong."""
    played = Played(tmp_path_factory.mktemp("calm"), 4, {})
    assert played.codes == [0] * 4, played.tails
    assert len(played.ends) == 1
    return played.ends


@pytest.mark.slow
@pytest.mark.process
def test_after_an_exception_training_goes_on_in_place(tmp_path: Path, calm: set[tuple[str, float]]) -> None:
    """One of four ranks raises in its forward pass: the same processes go on from that very iteration, with model,
    optimizer, schedule, sampler and random numbers as they were, and end with the same bits."""
    played = Played(tmp_path, 4, {"fault": "raise"})
    assert played.codes == [0] * 4, played.tails
    assert {begins for begins, _ in played.at(1).values()} == {7}, played.tails
    assert {rank: pid for rank, (_, pid) in played.at(1).items()} == {
        rank: pid for rank, (_, pid) in played.at(0).items()
    }
    assert played.tiers == {(rank, "in_place") for rank in range(4)}
    assert played.ends == calm


@pytest.mark.campaign
@pytest.mark.process
def test_an_update_that_is_under_way_elsewhere_is_finished(tmp_path: Path, calm: set[tuple[str, float]]) -> None:
    """One rank raises while the others are still within the optimizer's step before: they finish it, and nothing has
    to be loaded."""
    played = Played(tmp_path, 4, {"fault": "raise", "others_dawdle": True})
    assert played.codes == [0] * 4, played.tails
    assert {begins for begins, _ in played.at(1).values()} == {7}, played.tails
    assert played.tiers == {(rank, "in_place") for rank in range(4)}
    assert played.ends == calm


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("on", [0, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_spare_is_given_the_state_of_a_survivor(tmp_path: Path, calm: set[tuple[str, float]], on: int) -> None:
    """SIGKILL of a rank: the spare takes its place with a survivor's weights and the dead rank's own random numbers
    and sampler, the others go on in place, all at the iteration of the fault, and end with the same bits."""
    played = Played(tmp_path, 5, {"fault": "kill", "on": on, "active": 4})
    assert sorted(played.codes) == [-signal.SIGKILL, 0, 0, 0, 0], played.tails
    before, after = played.at(0), played.at(1)
    assert {begins for begins, _ in after.values()} == {7}, played.tails
    assert {rank for rank in before if before[rank][1] != after[rank][1]} == {on}
    assert played.tiers == {(rank, "peer" if rank == on else "in_place") for rank in range(4)}
    assert played.ends == calm


@pytest.mark.slow
@pytest.mark.process
def test_under_the_launcher_nothing_but_the_dead_rank_is_lost(tmp_path: Path, calm: set[tuple[str, float]]) -> None:
    """Under ``outlast run`` a rank is killed: one cycle, exit code 0, a spare in its place, the same bits."""
    played = Played(tmp_path, 5, {"fault": "kill", "on": 2, "active": 4}, is_launched=True)
    assert played.codes == [0], played.tails
    before, after = played.at(0), played.at(1)
    assert {begins for begins, _ in after.values()} == {7}, played.tails
    assert {rank for rank in before if before[rank][1] != after[rank][1]} == {2}
    assert played.tiers == {(rank, "peer" if rank == 2 else "in_place") for rank in range(4)}
    assert played.ends == calm
    assert {event.cycle for event in read(tmp_path / "run") if event.kind == EventKind.RESTORED} == {0}


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize("fault", ["torn", "late"])
def test_a_torn_state_is_loaded_from_the_tiers(tmp_path: Path, calm: set[tuple[str, float]], fault: str) -> None:
    """Left within an optimizer's step, or after it in the same iteration, nothing of memory is trusted: all ranks load
    the newest checkpoint, and end with the same bits."""
    played = Played(tmp_path, 4, {"fault": fault})
    assert played.codes == [0] * 4, played.tails
    assert {begins for begins, _ in played.at(1).values()} == {5}, played.tails
    assert {tier for _, tier in played.tiers} <= {"local", "memory", "global"}
    assert played.ends == calm


@pytest.mark.campaign
@pytest.mark.process
def test_objects_that_are_made_anew_are_loaded(tmp_path: Path, calm: set[tuple[str, float]]) -> None:
    """Without handle.keep() each call has a model of its own: it is loaded from the newest checkpoint."""
    played = Played(tmp_path, 4, {"fault": "raise", "keeps": False})
    assert played.codes == [0] * 4, played.tails
    assert {begins for begins, _ in played.at(1).values()} == {5}, played.tails
    assert played.ends == calm


@pytest.mark.campaign
@pytest.mark.process
def test_what_is_torn_and_not_saved_is_given_up(tmp_path: Path) -> None:
    """Without a checkpoint a torn model is never trained on: the restart is left to the launcher."""
    played = Played(tmp_path, 2, {"fault": "torn", "saves": False})
    assert 0 not in played.codes
    assert not played.ends
    assert "RestartAbort" in played.tails


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("num_faults", [10, pytest.param(22, marks=pytest.mark.campaign)])
def test_twenty_restarts_leave_nothing_behind(tmp_path: Path, num_faults: int) -> None:
    """A fault at many iterations in a row: descriptors and threads after the fifth restart stay what they are, the
    weights are those of two ranks without any fault, and no save that was under way is said to have failed."""
    total = num_faults + 10
    calm = Played(tmp_path / "calm", 2, {"total": total})
    options = {"fault": "raise", "num_faults": num_faults, "total": total, "closes_slowly": True}
    played = Played(tmp_path / "faults", 2, options)
    assert played.codes == [0] * 2, played.tails
    assert played.ends == calm.ends
    assert IncidentKind.SAVE_FAILED not in played.incidents, played.tails
    for rank in range(2):
        mine = [one for one in played.begins if one["rank"] == rank]
        assert [one["begins"] for one in mine] == [0, *range(7, 7 + num_faults)]
        before, after = (one for one in played.held if one["rank"] == rank)
        arenas = [sum("outlast-arena" in name for name in one["files"]) for one in (before, after)]
        for one, num_arenas in zip((before, after), arenas, strict=True):
            one["held"]["fds"] -= num_arenas  # as many as saves were ever under way at once
        assert arenas[1] <= MAX_ARENAS
        kinds = [Counter(re.sub(r"[0-9]+", "N", name) for name in one["files"]) for one in (before, after)]
        assert all(after["held"][what] <= before["held"][what] for what in ("fds", "threads", "tasks")), (
            *(before["held"], after["held"]),
            kinds[1] - kinds[0],
        )


def test_in_process_needs_a_wrapped_function() -> None:
    """Outside of a wrapped function the option is refused with what to do."""
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
@pytest.mark.parametrize(("how", "lines"), [("closes", "written returned"), ("returns", "returned written")])
def test_a_session_that_ends_in_order_has_its_figures_written(tmp_path: Path, how: str, lines: str) -> None:
    """A sink that needs longer for its last than an exit waits gets the time, whether the function closes the session
    or leaves that to the process's end."""
    script = tmp_path / "train.py"
    script.write_text(WITH_SINK)
    with RankProcesses(script, how, world_size=1, directory=tmp_path / "out") as ranks:
        assert ranks.wait(timeout_s=PATIENCE_S) == [0], ranks.tails()
        text = ranks.tails()
    assert " ".join(re.findall(r"^(written|returned)$", str(text), re.MULTILINE)) == lines, text
