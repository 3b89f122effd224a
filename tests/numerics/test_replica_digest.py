"""Replicas that diverge are detected, and the divergent one is identified."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks

from outlast.errors import ConfigError
from outlast.numerics import Agreement, Replica, ReplicaDigest
from outlast.numerics.replica_digest import _factor, find_minority, find_replicated

SCENES = ("flips", "poisoned_training", "hsdp", "fsdp", "tensor_parallel_groups", "lost_state")


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    """The results of all scenes on 4 ranks, which run them one after the other."""
    return run_ranks("replica_ranks", SCENES, 4)


def test_factors_of_holders_sum_to_zero() -> None:
    """Digests of equal replicas cancel in the sum over all ranks, for any number of replicas."""
    for num_holders in (2, 3, 4, 7, 64, 1000):
        factors = [_factor(index, num_holders) for index in range(num_holders)]
        assert sum(factors) % 2**64 == 0
        assert all(factor % 2**16 for factor in factors)


@pytest.mark.parametrize(
    ("digests", "num_replicas", "expected"),
    [
        ({0: 1, 1: 2}, 2, None),
        ({0: 1, 1: 1, 2: 2}, 3, (0, [2])),
        ({0: 1, 3: 2, 5: 2}, 3, (3, [0])),
        ({0: 1, 1: 2, 2: 3}, 3, None),
        ({0: 1, 1: 1, 2: 2, 3: 2}, 4, None),
        ({0: 1, 1: 1, 2: 1, 3: 2, 4: 3}, 5, (0, [3, 4])),
        ({0: 1, 1: 1}, 4, None),
    ],
)
def test_only_more_than_half_is_a_majority(
    digests: dict[int, int], num_replicas: int, expected: tuple[int, list[int]] | None
) -> None:
    """A root cause is identified only if more than half of all replicas agree with each other."""
    assert find_minority(digests, num_replicas) == expected


def test_single_rank_compares_nothing() -> None:
    """Without torch.distributed a check reports that nothing was compared, and the number of bytes."""
    model = torch.nn.Linear(3, 4)
    found = ReplicaDigest({"model": model}).check(7)
    assert (found.agrees, found.iteration, found.num_replicas) == (True, 7, 1)
    assert (found.num_bytes, found.num_single_bytes) == (0, 4 * 16)
    assert "nothing to compare" in found.describe()


def test_check_is_due_at_the_interval() -> None:
    """A check is due at each multiple of the interval and never with 0; a negative interval is rejected."""
    digest = ReplicaDigest([], interval=3)
    assert [iteration for iteration in range(10) if digest.should_check(iteration)] == [3, 6, 9]
    assert not any(ReplicaDigest([]).should_check(iteration) for iteration in range(10))
    with pytest.raises(ConfigError, match="interval -1"):
        ReplicaDigest([], interval=-1)


def test_parameters_and_optimizer_state_are_compared_once() -> None:
    """Tied parameters are compared once, buffers and plain values never, and optimizer state under its parameter's
    name."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    loose = torch.nn.Parameter(torch.ones(3))
    optim = torch.optim.Adam([*model.parameters(), loose])
    model(torch.randn(4, 2)).sum().backward()
    loose.grad = torch.ones(3)
    optim.step()
    found = find_replicated({"net": {"model": model}, "optim": optim, "epoch": 3, "rng": torch.zeros(3)}, (0, 1))
    names = [tensor.name for tensor in found]
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias"]
    assert names[:5] == [f"net.model.{name}" for name in parameters]
    expected = [f"optim.net.model.{name}.{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")]
    assert names[5:] == [*expected, "optim.5", "optim.5.step", "optim.5.exp_avg", "optim.5.exp_avg_sq"]
    assert {tensor.ranks for tensor in found} == {(0, 1)}


def test_sharded_state_without_placement_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Sharded state without a placement is not compared, and one warning lists it."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), momentum=0.9)
    optim.consolidate_state_dict = lambda to: None  # type: ignore[attr-defined]
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    digest = ReplicaDigest([model, optim])
    with caplog.at_level(logging.WARNING, logger="outlast"):
        digest.check(0)
        digest.check(1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1.0.weight.momentum_buffer" in caplog.text


def test_agreement_is_described_in_one_line() -> None:
    """The line contains the ranks that differ, the place, and whether a majority exists."""
    one = Replica(rank=3, node="b", device="b/cpu-1", tensor="model.weight")
    common = {"iteration": 12, "num_replicas": 4, "num_bytes": 80, "num_single_bytes": 20}
    good = Agreement(agrees=True, **common)
    bad = Agreement(agrees=False, deviating=(one,), undecided=(one,), **common)
    assert good.describe() == (
        "replicas agree at iteration 12: 80 bytes, up to 4 replicas; 20 bytes are on no other rank"
    )
    assert bad.describe() == (
        "replicas differ at iteration 12: from the majority rank 3 on node b (device b/cpu-1) in model.weight; "
        "without a majority rank 3 on node b (device b/cpu-1) in model.weight"
    )
    assert (good.tensor, bad.tensor) == ("", "model.weight")


@pytest.mark.process
def test_each_flipped_bit_identifies_its_rank(four_ranks: list[dict[str, Any]]) -> None:
    """Of 4 replicas, all ranks identify the one with a flipped bit in a weight or a moment in 100 of 100 trials."""
    results = [scenes["flips"] for scenes in four_ranks]
    assert all(len(trials) == 100 for trials in results)
    for trials in zip(*results, strict=True):
        for found in trials:
            assert not found["agrees"]
            assert [(one["rank"], one["node"]) for one in found["deviating"]] == [
                (found["victim"], f"node-{found['victim']}")
            ]
            assert found["tensor"] == found["flipped"]
            assert found["undecided"] == []
            assert found["agrees_again"]
    assert len({found["victim"] for found in results[0]}) == 4


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize(
    ("scene", "num_checks"), [("briefly_clean", 100), pytest.param("clean", 1000, marks=pytest.mark.campaign)]
)
def test_clean_steps_raise_no_alarm(scene: str, num_checks: int) -> None:
    """Ranks that train on different batches agree after each of many steps, though their buffers differ."""
    results = [scenes[scene] for scenes in run_ranks("replica_ranks", [scene], 4)]
    assert [(found["num_checks"], found["num_alarms"]) for found in results] == [(num_checks, 0)] * 4
    assert {found["num_replicas"] for found in results} == {4}
    assert results[0]["stats"] != results[1]["stats"]


@pytest.mark.process
def test_flipped_bit_is_identified_after_more_training(four_ranks: list[dict[str, Any]]) -> None:
    """Averaged gradients do not repair a changed weight: the next check, steps later, identifies the rank."""
    for checks in (scenes["poisoned_training"] for scenes in four_ranks):
        assert [found["agrees"] for found in checks] == [True, False]
        assert [one["rank"] for one in checks[1]["deviating"]] == [2]
        assert checks[1]["iteration"] == 8


@pytest.mark.process
def test_two_replicas_differ_without_a_root_cause() -> None:
    """With two replicas the disagreement and its tensor are reported, without a root cause."""
    for scenes in run_ranks("replica_ranks", ["flips"], 2):
        for found in scenes["flips"]:
            assert not found["agrees"]
            assert found["deviating"] == []
            assert [one["rank"] for one in found["undecided"]] == [0, 1]
            assert found["tensor"] == found["flipped"]
            assert found["agrees_again"]


@pytest.mark.process
def test_hybrid_shards_are_compared_with_replicas_only(four_ranks: list[dict[str, Any]]) -> None:
    """With 2 x 2 ranks a shard is compared with its replica only; equal changes of both replicas are not a
    difference."""
    results = [scenes["hsdp"] for scenes in four_ranks]
    for found in results:
        assert found["before"]["agrees"]
        assert found["before"]["num_single_bytes"] == 0
        assert found["after"]["agrees"] is False
        assert found["after"]["deviating"] == []
        assert [one["rank"] for one in found["after"]["undecided"]] == [1, 3]
        assert found["after"]["tensor"] == "model.0.weight"
        assert found["both"]["agrees"]
    assert results[0]["before"]["num_bytes"] > 0


@pytest.mark.process
def test_pure_shards_are_not_compared(four_ranks: list[dict[str, Any]]) -> None:
    """With one replica of each shard a check reports that no shard was compared; replicated counters are."""
    for found in (scenes["fsdp"] for scenes in four_ranks):
        assert found["fresh"]["agrees"]
        assert (found["fresh"]["num_replicas"], found["fresh"]["num_bytes"]) == (1, 0)
        assert found["fresh"]["num_single_bytes"] > 0
        assert "nothing to compare" in found["fresh"]["text"]
        assert found["shard"]["agrees"]
        assert found["shard"]["num_replicas"] == 4
        assert [one["rank"] for one in found["step"]["deviating"]] == [1]
        assert found["step"]["tensor"] == "optim.model.0.weight.step"


@pytest.mark.process
def test_group_limits_the_comparison_of_plain_tensors(four_ranks: list[dict[str, Any]]) -> None:
    """Tensors that differ by design between tensor-parallel ranks are compared among data-parallel ones only."""
    for found in (scenes["tensor_parallel_groups"] for scenes in four_ranks):
        assert found["mesh"]["agrees"]
        assert found["group"]["agrees"]
        assert found["mesh"]["num_replicas"] == 2
        assert not found["all"]["agrees"]


@pytest.mark.process
def test_rank_without_optimizer_state_is_identified(four_ranks: list[dict[str, Any]]) -> None:
    """Tensors that one replica lacks are a difference, and the first of them is reported."""
    for found in (scenes["lost_state"] for scenes in four_ranks):
        assert [one["rank"] for one in found["deviating"]] == [3]
        assert found["tensor"] == "optim.model.module.0.weight.step"
