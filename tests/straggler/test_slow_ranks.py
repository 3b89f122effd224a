"""On four real ranks the slow one is identified in time, by all of them equally, and no other."""

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
    """A folder with the run directory and the results of 4 ranks, which run one scene after another."""
    results_folder = tmp_path_factory.mktemp("slow")
    nodes = [f"node-{rank}" for rank in range(4)]
    with RankProcesses(
        SCRIPT,
        *(str(results_folder / "run"), str(results_folder), *SCENES),
        world_size=4,
        nodes=nodes,
        directory=results_folder / "logs",
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ) as ranks:
        codes = ranks.wait(timeout_s=200)
    output = (next((results_folder / "logs").glob("*0*"))).read_text()
    assert codes == [0, 0, 0, 0], output[-3000:]
    (results_folder / "output.txt").write_text(output)
    return results_folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """The results of each rank, by scene."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_a_slow_rank_is_identified_within_three_windows(results: list[dict[str, Any]]) -> None:
    """A rank at 1.3 times the duration is identified with its section in the third window, by relative and individual
    score; the ranks that wait for it are not."""
    reports = results[0]["slowed"]
    assert [report["named"] for report in reports[:6]] == [[]] * 6
    assert [report["named"] for report in reports[6:]] == [[2], [2]]
    assert reports[6]["bases"] == ["individual", "relative"]
    assert reports[6]["sections"] == ["forward"]


def test_all_ranks_have_the_same_findings(results: list[dict[str, Any]]) -> None:
    """All ranks compute the same findings, so that they can act without further communication."""
    for scene in ("slowed", "stopped", "missing"):
        for reports in zip(*(rank[scene] for rank in results), strict=True):
            for one in reports:
                del one["text"]  # the processing time differs between ranks
            assert all(one == reports[0] for one in reports)


def test_the_machine_of_an_identified_rank_is_checked_once(results: list[dict[str, Any]]) -> None:
    """Only the report that first identifies a rank states whether its machine is slow."""
    assert [report["machines"] for report in results[0]["slowed"][:8]] == [*[[]] * 6, [[2, "machine"]], []]
    ((rank, cause),) = results[0]["stopped"][1]["machines"]
    assert rank == 1
    assert cause in ("work", "link")  # the messages are real ones


def test_a_stop_is_requested_only_below_the_threshold(results: list[dict[str, Any]]) -> None:
    """With stop_if_detected all ranks request a stop once a rank at half the speed is identified."""
    assert [[report["stop"] for report in rank["stopped"]] for rank in results] == [[False, True]] * 4
    assert not any(report["stop"] for report in results[0]["slowed"])


def test_reports_follow_the_same_steps_on_all_ranks(results: list[dict[str, Any]]) -> None:
    """Ranks of different speed report after the same steps, about as often as configured, without communication."""
    assert all(rank["paced"] == results[0]["paced"] for rank in results)
    iterations = results[0]["paced"]
    assert iterations[0] == 19
    assert len(iterations) >= 2  # how many more depends on how busy the machine is


def test_a_section_missing_on_one_rank_is_reported(results: list[dict[str, Any]]) -> None:
    """The note contains the rank and the section."""
    assert results[0]["missing"][0]["notes"] == [
        "rank 3 never entered section 'augment', which 3 of 4 ranks entered: not compared there"
    ]


def test_ranks_communicate_once_per_report(results: list[dict[str, Any]]) -> None:
    """Steps gather nothing, and a report gathers once."""
    assert all(rank["missing"][0]["gathered"] == [0, 1] for rank in results)


def test_operators_are_timed_and_collectives_are_not(results: list[dict[str, Any]]) -> None:
    """Torch's profiler runs in two steps of the window, which are not timed otherwise; scores are based on
    operators."""
    kernels = results[0]["kernels"]
    assert kernels["num_steps"] == [6] * 4
    assert sorted(kernels["relative"]) == ["0", "1", "2", "3"]
    for names in kernels["names"]:
        assert "aten::addmm" in names
        assert not any("gloo" in name or "allreduce" in name for name in names)


def test_rank_0_logs_reports_and_writes_them_to_the_journal(folder: Path) -> None:
    """The log has the known layout with a warning for the identified rank and its machine; the journal has the reports
    and one incident."""
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
