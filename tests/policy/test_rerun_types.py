"""Diagnoses and replays: descriptions and their JSON round trips."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.decoding import from_json
from outlast.env import WorkerEnv
from outlast.policy.rerun import (
    Diagnosis,
    Finding,
    Replay,
    relative_difference,
    to_json_number,
    to_number,
)

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@given(FLOATS)
def test_every_number_survives_json(value: float) -> None:
    """NaN, infinity and every other number are equal after a JSON round trip."""
    diagnosis = Diagnosis(finding=Finding.REPRODUCED, rank=1, iteration=5, first=to_json_number(value))
    back = to_number(from_json(msgspec.json.encode(diagnosis), Diagnosis).first)
    assert back is not None
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_replay_survives_the_environment() -> None:
    """A worker decodes the replay that the launcher wrote, and None if it wrote none."""
    replay = Replay(iteration=5, attempt="j-1-ab.3", device="gpu-1", node="n1", rank=2, call=1, first="nan", tries=1)
    assert from_json(msgspec.json.encode(replay).decode(), Replay) == replay
    assert WorkerEnv().replay is None


def test_description_contains_all_facts() -> None:
    """One line contains rank, node, device, iteration, validation, both values, the batch and the decision."""
    line = Diagnosis(
        finding=Finding.PERSISTENT,
        rank=3,
        node="n1",
        device="gpu-7",
        iteration=120,
        call=2,
        what="loss",
        message="not finite",
        first="nan",
        second=2.5,
        batch="ab12",
        replayed_on="gpu-9",
        rejected_ranks=(2, 3),
    ).describe()
    assert line == (
        "loss of rank 3 on node n1 (device gpu-7) at iteration 120, validation 2, was nan (not finite), then 2.5 when "
        "it was replayed on gpu-9: a persistent fault of that device, since another one gives a valid result; batch "
        "ab12; invalid on rank 2 too"
    )


def test_replica_difference_is_described_without_a_value() -> None:
    """A diagnosis from a comparison of replicas describes neither a rejected value nor a replay."""
    described = "replicas differ at iteration 24: from the majority rank 1 on node n1 in model.w"
    blamed = Diagnosis(finding=Finding.PERSISTENT, rank=1, iteration=24, what="model.w", message=described)
    assert blamed.describe() == f"{described}: a fault of that device, as the others agree"
    open_question = Diagnosis(finding=Finding.UNDECIDED, rank=1, iteration=24, what="model.w", message=described)
    assert open_question.describe() == f"{described}: undecided"
    split = Diagnosis(
        finding=Finding.SPLIT, rank=0, iteration=24, what="model.w", message="replicas differ at iteration 24"
    )
    assert split.describe() == (
        "replicas differ at iteration 24: root cause unknown, as no majority shows which replica is bad"
    )


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        (1.0, 1.0, 0.0),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.inf, math.inf),
        (0.0, -0.0, 0.0),
        (1.0, -1.0, math.inf),
        (1.0, 3.0, 1.0),
        (3.0, 1.0, 1.0),
        (1e308, 1.5e308, 0.4),
        (1.7e308, -1.7e308, math.inf),
    ],
)
def test_relative_difference_of_two_results(a: float, b: float, difference: float) -> None:
    """Equal results and two NaNs: 0; one not a number: infinite; else relative to their mean, however large they
    are."""
    assert relative_difference(a, b) == pytest.approx(difference, rel=1e-12)


@given(FLOATS, FLOATS)
def test_difference_is_symmetric_and_never_nan(a: float, b: float) -> None:
    """The order of the results does not matter, and the difference is always a number."""
    assert relative_difference(a, b) == relative_difference(b, a) >= 0
