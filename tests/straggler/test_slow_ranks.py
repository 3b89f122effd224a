"""Four real ranks: the slow one is named, in time, by all of them alike, and nobody else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.incidents import EventKind, IncidentKind
from outlast.journal import read
from outlast.testing.ranks import RankProcesses

SCRIPT = Path(__file__).with_name("slow_ranks.py")
SCENES = ("slowed", "stopped", "paced", "missing", "kernels")

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run directory, and what 4 ranks told of all scenes, which they play one after the other."""
    made = tmp_path_factory.mktemp("slow")
    nodes = [f"node-{rank}" for rank in range(4)]
    with RankProcesses(
        SCRIPT,
        *(str(made / "run"), str(made), *SCENES),
        world_size=4,
        nodes=nodes,
        directory=made / "logs",
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ) as ranks:
        codes = ranks.wait(timeout_s=200)
    output = (next((made / "logs").glob("*0*"))).read_text()
    assert codes == [0, 0, 0, 0], output[-3000:]
    (made / "output.txt").write_text(output)
    return made


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank told, by scene."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_a_slowed_rank_is_named_within_three_windows(told: list[dict[str, Any]]) -> None:
    """Rank 2 at 1.3 times is named in the third window, relatively and individually, where it is slow; the three
    others, which wait for it, never are."""
    reports = told[0]["slowed"]
    assert [report["named"] for report in reports[:6]] == [[]] * 6
    assert [report["named"] for report in reports[6:]] == [[2], [2]]
    assert reports[6]["bases"] == ["individual", "relative"]
    assert reports[6]["sections"] == ["forward"]


def test_all_ranks_say_the_same(told: list[dict[str, Any]]) -> None:
    """Every rank comes to the same findings, so that all of them can act on these without another word."""
    for scene in ("slowed", "stopped", "missing"):
        for reports in zip(*(rank[scene] for rank in told), strict=True):
            for one in reports:
                del one["text"]  # the time that it took is each rank's own
            assert all(one == reports[0] for one in reports)


def test_the_machine_of_a_named_rank_is_checked_once(told: list[dict[str, Any]]) -> None:
    """When a rank is named, and only then, the report says that its machine is slow, or that it is not."""
    assert [report["machines"] for report in told[0]["slowed"][:8]] == [*[[]] * 6, [[2, "machine"]], []]
    ((rank, cause),) = told[0]["stopped"][1]["machines"]
    assert rank == 1
    assert cause in ("work", "link")  # messages are real ones


def test_training_is_to_stop_only_below_the_threshold(told: list[dict[str, Any]]) -> None:
    """With stop_if_detected a rank at half the speed is one to stop for once it is named; all ranks know."""
    assert [[report["stop"] for report in rank["stopped"]] for rank in told] == [[False, True]] * 4
    assert not any(report["stop"] for report in told[0]["slowed"])


def test_reports_come_after_the_same_steps_without_a_word(told: list[dict[str, Any]]) -> None:
    """Ranks that differ in speed make their reports after the same steps, about as often as configured."""
    assert all(rank["paced"] == told[0]["paced"] for rank in told)
    iterations = told[0]["paced"]
    assert iterations[0] == 19
    assert len(iterations) >= 2  # how many more is a matter of how busy the machine is


def test_a_section_that_a_rank_never_enters_is_said(told: list[dict[str, Any]]) -> None:
    """The note names the rank and the section."""
    assert told[0]["missing"][0]["notes"] == [
        "rank 3 never entered section 'augment', which 3 of 4 ranks entered: not compared there"
    ]


def test_ranks_tell_each_other_once_a_report(told: list[dict[str, Any]]) -> None:
    """Steps gather nothing, and a report gathers once."""
    assert all(rank["missing"][0]["gathered"] == [0, 1] for rank in told)


def test_operators_are_timed_and_collectives_are_not(told: list[dict[str, Any]]) -> None:
    """Torch's profiler looks at two steps of the window, which are not timed otherwise; scores come of operators."""
    found = told[0]["kernels"]
    assert found["num_steps"] == [6] * 4
    assert sorted(found["relative"]) == ["0", "1", "2", "3"]
    for names in found["names"]:
        assert "aten::addmm" in names
        assert not any("gloo" in name or "allreduce" in name for name in names)


def test_rank_0_logs_the_report_and_keeps_it_in_the_journal(folder: Path) -> None:
    """The log has the reference's layout, a warning for the named rank and its machine; the journal has the reports,
    and one incident for the rank that was named."""
    output = (folder / "output.txt").read_text()
    assert "\nCPU relative performance:\n  Rank=" in output
    assert "\nCPU individual performance:\n  Rank=" in output
    assert "\nStraggler report processing time: 0." in output
    assert "STRAGGLER DETECTION WARNING: Some CPUs have worse relative performance. Affected ranks: 2 (ref" in output
    assert "STRAGGLER DETECTION WARNING: Some CPUs performance dropped. Affected ranks: 2 (reference: its own" in output
    assert "Rank=2 Node=node-2: the node is slow (matrix product 2.00 and memory copy 1.00 times" in output
    assert "gpu_relative_perf/min 0." in output
    events = list(read(folder / "run"))
    reports = [event for event in events if event.kind == EventKind.STRAGGLER_REPORT]
    assert [event.data["named"] for event in reports] == [[]] * 6 + [[2]] * 2
    (incident,) = [event.data["incident"] for event in events if event.kind == EventKind.INCIDENT]
    assert (incident["kind"], incident["rank"], incident["node"]) == (IncidentKind.STRAGGLER, 2, "node-2")
    assert incident["evidence"]["cause"] == "machine"
