"""On real ranks of a plain DDP script the slow rank, its phase and the subject of the decision are identified, although
all ranks wait for it in the same collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.policy.slowness import OUTSIDE
from outlast.policy.stragglers import Scope
from outlast.testing import Cluster
from outlast.testing.ranks import RankProcesses

SCRIPT = Path(__file__).with_name("phases.py")
SECTIONS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "between": OUTSIDE,
}
"""Section in which a rank is identified that is slow in a phase."""

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.extended]


def read_reports(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Return the reports of rank 0, after a check that all ranks have the same findings."""
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    for reports in of_ranks:
        assert [one["named"] for one in reports] == [one["named"] for one in of_ranks[0]]
    return list(of_ranks[0])


@pytest.mark.extended
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_slow_rank_of_one_host_is_identified_in_each_phase(tmp_path: Path, num_ranks: int) -> None:
    """A rank that is slow in data loading, forward, backward, optimizer or outside of sections is identified, of two
    ranks and of four. On one node the decision is about the rank, and no line blames the node."""
    arguments = (str(tmp_path), json.dumps([[phase, [1]] for phase in SECTIONS]))
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    nodes = ["host"] * num_ranks
    with RankProcesses(
        SCRIPT,
        *arguments,
        world_size=num_ranks,
        nodes=nodes,
        directory=tmp_path / "logs",
        environment=environment,
    ) as ranks:
        codes = ranks.wait(timeout_s=400)
    assert codes == [0] * num_ranks, next((tmp_path / "logs").glob("*0*")).read_text()[-3000:]
    reports = read_reports(tmp_path, num_ranks)
    assert [one["phase"] for one in reports] == list(SECTIONS)
    for one in reports:
        assert one["named"], one
        assert one["named"][0] == [1, SECTIONS[one["phase"]], Scope.RANK], one["text"]
        assert "Reference: relative = the median of the ranks" in one["text"]
        assert "not the node: all ranks that are compared are on one node" in one["text"]
        assert "the node is slow" not in one["text"]


def test_a_node_with_only_slow_ranks_is_identified(tmp_path: Path) -> None:
    """When both ranks of the second of two nodes are slow, the decision is about that node; when one of them is slow,
    it is about the rank."""
    scenes = [["between", [2, 3]], ["between", [3]]]
    arguments = (str(tmp_path), json.dumps(scenes))
    with Cluster(SCRIPT, *arguments, run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=2) as cluster:
        assert cluster.wait(timeout_s=400) == [0, 0], cluster.tails()
    report_of_both, one = read_reports(tmp_path, 4)
    assert {rank: [section, scope] for rank, section, scope in report_of_both["named"] if rank in (2, 3)} == {
        2: [OUTSIDE, Scope.NODE],
        3: [OUTSIDE, Scope.NODE],
    }, report_of_both["text"]
    assert "the decision is about the node: all its ranks (2, 3) are slow compared with" in report_of_both["text"]
    assert one["named"][0] == [3, OUTSIDE, Scope.RANK], one["text"]
    assert "not the node: rank 2 of the same node is not slow" in one["text"]
