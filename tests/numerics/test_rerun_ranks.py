"""One rank's invalid result concerns all: they run the step again together, and name the same root cause."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from rerun_ranks import NUM_STEPS

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return run_ranks("rerun_ranks", ["transient", "reproduced", "earliest"], 2)


@pytest.mark.parametrize("bad", [0, 5])
def test_one_ranks_rejection_makes_all_run_again(told: list[dict[str, Any]], bad: int) -> None:
    """A NaN on rank 1 alone: both ranks run that step twice and no other, and end bit-identical to no NaN at all."""
    runs = [2 if iteration == bad else 1 for iteration in range(NUM_STEPS)]
    for rank, one in enumerate(told):
        struck = one["transient"][str(bad)]
        assert struck["runs"] == runs
        assert struck["end"] == one["transient"]["calm"]
        assert struck["found"] == ({"transient": 1} if rank == 1 else {})


def test_all_ranks_leave_with_the_same_diagnosis(told: list[dict[str, Any]]) -> None:
    """Reproduced on rank 1: all ranks save and leave with 16, all name rank 1, and no rank's state has moved."""
    for one in (rank["reproduced"] for rank in told):
        assert (one["exit_code"], one["must_save"]) == (16, True)
        assert "loss of rank 1 on node node-1 (device node-1/cpu-0) at iteration 3, validation 0" in one["text"]
        assert one["rejected_ranks"] == [1]
        assert all(one["gradients"])
        assert one["end"] == one["calm"]


@pytest.mark.parametrize(("case", "finding"), [("bad", "correct"), ("good", "persistent")])
def test_all_ranks_judge_by_where_the_root_cause_runs(told: list[dict[str, Any]], case: str, finding: str) -> None:
    """Rank 1 on another device: both ranks leave with 17 and the same finding about rank 1."""
    for one in (rank["reproduced"][case] for rank in told):
        assert (one["exit_code"], one["finding"], one["rank"]) == (17, finding, 1)


def test_all_ranks_go_on_when_the_same_device_clears_it(told: list[dict[str, Any]]) -> None:
    """Rank 1 on its device, valid now: both ranks train on, bit-identical to training without any of it."""
    for one in (rank["reproduced"] for rank in told):
        assert one["gone"]["exit_code"] is None
        assert one["gone"]["end"] == one["through"]


def test_earliest_validation_is_named(told: list[dict[str, Any]]) -> None:
    """When several ranks reject, the one whose validation came first in the step is the root cause; all are listed."""
    assert [rank["earliest"] for rank in told] == [{"rank": 1, "call": 0, "ranks": [0, 1]}] * 2
