"""All ranks rerun a step with one rank's invalid result, and identify the same root cause."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from rerun_ranks import NUM_STEPS

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks("rerun_ranks", ["transient", "reproduced", "earliest"], 2)


@pytest.mark.parametrize("bad", [0, 5])
def test_one_ranks_rejection_reruns_all_ranks(results: list[dict[str, Any]], bad: int) -> None:
    """A NaN on rank 1 only: both ranks run that step twice and no other, and end bit-identical to training without a
    NaN."""
    runs = [2 if iteration == bad else 1 for iteration in range(NUM_STEPS)]
    for rank, one in enumerate(results):
        corrupted = one["transient"][str(bad)]
        assert corrupted["runs"] == runs
        assert corrupted["end"] == one["transient"]["calm"]
        assert corrupted["found"] == ({"transient": 1} if rank == 1 else {})


def test_all_ranks_exit_with_the_same_diagnosis(results: list[dict[str, Any]]) -> None:
    """Reproduced on rank 1: all ranks save and exit with 16 and rank 1 as the root cause, and no rank's state has
    changed."""
    for one in (rank["reproduced"] for rank in results):
        assert (one["exit_code"], one["must_save"]) == (16, True)
        assert "loss of rank 1 on node node-1 (device node-1/cpu-0) at iteration 3, validation 0" in one["text"]
        assert one["rejected_ranks"] == [1]
        assert all(one["gradients"])
        assert one["end"] == one["calm"]


@pytest.mark.parametrize(("case", "finding"), [("bad", "correct"), ("good", "persistent")])
def test_all_ranks_judge_by_the_root_causes_device(results: list[dict[str, Any]], case: str, finding: str) -> None:
    """Rank 1 on another device: both ranks exit with 17 and the same finding about rank 1."""
    for one in (rank["reproduced"][case] for rank in results):
        assert (one["exit_code"], one["finding"], one["rank"]) == (17, finding, 1)


def test_valid_replay_on_the_same_device_continues(results: list[dict[str, Any]]) -> None:
    """Rank 1 on its device, valid now: both ranks continue, bit-identical to undisturbed training."""
    for one in (rank["reproduced"] for rank in results):
        assert one["gone"]["exit_code"] is None
        assert one["gone"]["end"] == one["through"]


def test_earliest_rejected_validation_is_the_root_cause(results: list[dict[str, Any]]) -> None:
    """If several ranks reject, the one with the earliest validation in the step is the root cause; all are listed."""
    assert [rank["earliest"] for rank in results] == [{"rank": 1, "call": 0, "ranks": [0, 1]}] * 2
