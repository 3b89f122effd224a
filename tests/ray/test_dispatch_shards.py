"""Which samples of a call each actor receives, and which results are returned."""

from __future__ import annotations

import collections
import functools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import ConfigError
from outlast.ray import Dispatch, Mesh, MeshDispatch, MeshRank, PassThroughDispatch, Whole, concat, register_dispatch
from outlast.ray.dispatch import copy_for_later, find_dispatch, takes_weights


def meshes(max_actors: int = 16) -> Iterator[Mesh]:
    """Yield every factorisation of every mesh size up to ``max_actors``."""
    for pp in range(1, max_actors + 1):
        for dp in range(1, max_actors // pp + 1):
            for cp in range(1, max_actors // (pp * dp) + 1):
                for tp in range(1, max_actors // (pp * dp * cp) + 1):
                    yield Mesh(pp=pp, dp=dp, cp=cp, tp=tp)


def received(mesh: Mesh, *args: Any, **kwargs: Any) -> dict[int, tuple[Any, dict[str, Any]]]:
    """Return what each rank receives: the parcel's bytes as they leave the Ray object store."""
    dispatch = MeshDispatch()
    parcels = dispatch.split(mesh, args, kwargs, takes_weights=True)
    stored = [pickle.dumps(parcel) for parcel in parcels]
    return {rank: pickle.loads(stored[dispatch.parcel_of(mesh.place(rank))]) for rank in range(mesh.size)}


@pytest.mark.extended
@pytest.mark.parametrize("num_samples", [1, 5, 16, 27])
def test_every_sample_is_in_exactly_one_data_shard(num_samples: int) -> None:
    """On all meshes of up to 16 actors each sample is real once, padding has weight 0, and peers receive the same
    bytes."""
    for mesh in meshes():
        got = received(mesh, torch.arange(num_samples))
        shards = collections.defaultdict(set)
        real: list[int] = []
        for rank, ((samples,), kwargs) in got.items():
            place = mesh.place(rank)
            weights = kwargs["weights"]
            assert weights.dtype == torch.float32
            assert set(weights.tolist()) <= {0.0, 1.0}
            shards[place.dp].add((tuple(samples.tolist()), tuple(weights.tolist())))
            if MeshDispatch().wants_result(place):
                real += samples[weights == 1].tolist()
                assert (samples[weights == 0] == num_samples - 1).all()
        assert sorted(shards) == list(range(mesh.dp))
        assert all(len(kinds) == 1 for kinds in shards.values())
        assert len({len(samples) for kinds in shards.values() for samples, _ in kinds}) == 1
        assert real == list(range(num_samples))


def test_results_come_in_order_from_the_last_stage() -> None:
    """On all meshes the list has one result for each data shard, from slice 0 of the last stage."""
    dispatch = MeshDispatch()
    for mesh in meshes():
        expected_ranks = {rank: rank for rank in range(mesh.size) if dispatch.wants_result(mesh.place(rank))}
        assert set(expected_ranks) == set(mesh.ranks(tp=0, cp=0, pp=mesh.pp - 1))
        assert dispatch.collect(mesh, expected_ranks) == [
            mesh.ranks(tp=0, cp=0, pp=mesh.pp - 1, dp=shard)[0] for shard in range(mesh.dp)
        ]


def test_results_follow_the_last_virtual_stage() -> None:
    """With a folded schedule the first actor has the last virtual stage, and its results are returned."""
    first = MeshDispatch(result_stage=0)
    for mesh in meshes():
        expected_ranks = {rank: rank for rank in range(mesh.size) if first.wants_result(mesh.place(rank))}
        assert first.collect(mesh, expected_ranks) == [mesh.ranks(tp=0, cp=0, pp=0, dp=dp)[0] for dp in range(mesh.dp)]
    with pytest.raises(ConfigError, match="invalid result_stage=2: a mesh with pp=2 has the stages -2 to 1"):
        MeshDispatch(result_stage=2).split(Mesh(pp=2), (), {}, takes_weights=False)


@pytest.mark.extended
@pytest.mark.parametrize("num_samples", [3, 16, 21])
def test_gradients_are_those_of_one_process(num_samples: int) -> None:
    """Weighted gradients summed over the shards, divided by the sum of weights, equal those of the entire batch on all
    meshes."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    inputs, targets = torch.randn(num_samples, 4).double(), torch.randn(num_samples, 1).double()
    (model(inputs) - targets).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for mesh in meshes():
        model.zero_grad()
        total = 0.0
        for rank, ((shard,), kwargs) in received(mesh, {"inputs": inputs, "targets": targets}).items():
            if MeshDispatch().wants_result(mesh.place(rank)):
                losses = (model(shard["inputs"]) - shard["targets"]).square().mean(dim=1)
                (losses * kwargs["weights"]).sum().backward()  # sums in .grad, as an all-reduce would
                total += kwargs["weights"].sum().item()
        assert total == num_samples
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad / total, gradient)


@settings(deadline=None, max_examples=150)
@given(
    mesh=st.sampled_from(list(meshes())),
    num_samples=st.integers(0, 40),
    kinds=st.lists(st.sampled_from(["tensor", "array", "list", "scalar", "text", "whole"]), min_size=1, max_size=4),
    as_keywords=st.booleans(),
    nested=st.booleans(),
)
def test_joined_shards_equal_the_arguments(
    mesh: Mesh, num_samples: int, kinds: list[str], as_keywords: bool, nested: bool
) -> None:
    """For any mixture and nesting of argument kinds, joined shards equal the arguments, and other values arrive
    complete."""
    make: Mapping[str, Any] = {
        "tensor": torch.arange(num_samples * 2).reshape(num_samples, 2),
        "array": np.arange(num_samples, dtype=np.int16),
        "list": [str(number) for number in range(num_samples)],
        "scalar": 7,
        "text": "to all",
        "whole": Whole([1, 2, 3]),
    }
    values: list[Any] = [make[kind] for kind in kinds]
    if nested:
        values = [{"fields": (value, {"deep": value})} for value in values]
    named = {f"name{number}": value for number, value in enumerate(values)}
    got = received(mesh, **named) if as_keywords else received(mesh, *values)
    results = [got[rank] for rank in range(mesh.size) if MeshDispatch().wants_result(mesh.place(rank))]
    parts = [[kwargs[name] for name in named] if as_keywords else list(args) for args, kwargs in results]
    for number, kind in enumerate(kinds):
        column = [part[number] for part in parts]
        if nested:
            assert all(repr(field["fields"][0]) == repr(field["fields"][1]["deep"]) for field in column)
            column = [field["fields"][0] for field in column]
        if kind in ("tensor", "array", "list"):
            joined = concat(column, num_samples)
            assert np.array_equal(np.asarray(joined), np.asarray(make[kind]))
        else:
            plain = make[kind].value if kind == "whole" else make[kind]
            assert all(value == plain for value in column)


def test_a_shard_contains_only_its_own_bytes() -> None:
    """A shard is stored without the rest of its batch, in lists and for single samples too."""
    batch = torch.zeros(64, 1024)
    for value in (batch, list(batch), {"x": (batch, list(batch))}):
        parcels = MeshDispatch().split(Mesh(dp=64), (value,), {}, takes_weights=False)
        assert all(len(pickle.dumps(parcel)) < 16384 for parcel in parcels)
    parcels = MeshDispatch().split(Mesh(dp=2), (batch[0, 0], Whole(batch[1])), {}, takes_weights=False)
    assert all(len(pickle.dumps(parcel)) < 8192 for parcel in parcels)


def test_shards_are_detached_from_the_graph() -> None:
    """A batch that is part of an autograd graph is cut without the graph."""
    weight = torch.ones(4, requires_grad=True)
    (args, _), *_ = MeshDispatch().split(Mesh(dp=2), (weight * 2,), {}, takes_weights=False)
    assert not args[0].requires_grad
    assert pickle.loads(pickle.dumps(args[0])).tolist() == [2, 2]


def test_a_call_without_a_batch_is_one_parcel() -> None:
    """Arguments that all ranks receive are one object, which is stored once, and no weights are added."""
    parcels = MeshDispatch().split(Mesh(dp=8), (3, "a"), {"flag": None, "w": Whole([1])}, takes_weights=True)
    assert len(parcels) == 8
    assert len({id(parcel) for parcel in parcels}) == 1
    assert parcels[0] == ((3, "a"), {"flag": None, "w": [1]})


def test_the_callers_weights_are_cut_and_padded() -> None:
    """A caller's weights stay with their samples; padding has weight 0."""
    parcels = MeshDispatch().split(
        Mesh(dp=2), ([1, 2, 3],), {"weights": torch.tensor([0.5, 2.0, 4.0]), "iteration": 9}, takes_weights=True
    )
    assert [kwargs["weights"].tolist() for _, kwargs in parcels] == [[0.5, 2.0], [4.0, 0.0]]
    assert [kwargs["iteration"] for _, kwargs in parcels] == [9, 9]


def test_padding_without_weights_is_rejected() -> None:
    """A batch that cannot be divided is never padded for a method that takes no weights."""
    with pytest.raises(ConfigError, match=r"5 samples cannot be divided among dp=2: .*'weights'"):
        MeshDispatch().split(Mesh(dp=2), (torch.zeros(5),), {}, takes_weights=False)
    assert len(MeshDispatch().split(Mesh(dp=2), (torch.zeros(4),), {}, takes_weights=False)) == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([1, 2], {"x": torch.zeros(3)}), {}, r"argument 0 has 2 samples, argument 1\['x'\] has 3.*Whole"),
        (((torch.zeros(4), np.zeros(5)),), {}, r"argument 0\[0\] has 4 samples, argument 0\[1\] has 5"),
        (([1, 2],), {"sizes": [64, 64, 64]}, r"argument 0 has 2 samples, sizes has 3"),
        (([torch.zeros(4, 3), torch.zeros(4)],), {}, r"list of tensors of different kinds.*tuple"),
        (([1, 2],), {"weights": [1.0, 2.0]}, "weights must be a tensor"),
    ],
)
def test_batches_of_different_lengths_are_rejected(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    """The error has both names; for fields in a list it has the remedy."""
    with pytest.raises(ConfigError, match=message):
        MeshDispatch().split(Mesh(dp=2), args, kwargs, takes_weights=True)


class Pair(NamedTuple):
    x: Any
    y: Any


def test_containers_keep_their_class() -> None:
    """Named tuples and mappings of other classes arrive as the same class."""
    default = collections.defaultdict(functools.partial(int), x=torch.arange(4))
    ordered = collections.OrderedDict(b=[1, 2, 3, 4], a=torch.arange(4))
    user = collections.UserDict({"x": [1, 2, 3, 4]})
    got = received(Mesh(dp=2), Pair([1, 2, 3, 4], 5), default, ordered, user)
    (pair, default_part, ordered_part, user_part), _ = got[1]
    assert pair == Pair([3, 4], 5)
    assert default_part["x"].tolist() == [2, 3]
    assert default_part["absent"] == 0
    assert list(ordered_part) == ["b", "a"]
    assert user_part["x"] == [3, 4]
    assert user["x"] == [1, 2, 3, 4]


def test_pass_through_sends_all_ranks_the_same() -> None:
    """Nothing is cut, there is one parcel, and the results of all ranks are returned in the order of ranks."""
    dispatch, mesh = PassThroughDispatch(), Mesh(dp=2, tp=2)
    parcels = dispatch.split(mesh, ([1, 2, 3], Whole(4)), {"x": 5}, takes_weights=True)
    assert list(parcels) == [(([1, 2, 3], 4), {"x": 5})]
    assert {dispatch.parcel_of(mesh.place(rank)) for rank in range(4)} == {0}
    assert all(dispatch.wants_result(mesh.place(rank)) for rank in range(4))
    assert dispatch.collect(mesh, {3: "d", 1: "b", 0: "a", 2: "c"}) == ["a", "b", "c", "d"]


class FirstStageDispatch(Dispatch):
    """A user's dispatch: the argument to all ranks, the results of the first stage."""

    def split(
        self, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_weights: bool
    ) -> Sequence[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(tuple(args), dict(kwargs))]

    def parcel_of(self, place: MeshRank) -> int:
        return 0

    def wants_result(self, place: MeshRank) -> bool:
        return place.pp == 0

    def collect(self, mesh: Mesh, results: Mapping[int, Any]) -> Any:
        return sum(results.values())


def test_a_registered_dispatch_is_found_by_name() -> None:
    """A registered class or object is used for calls; the error for an unknown name has the nearest name."""
    register_dispatch("first_stage", FirstStageDispatch)
    found = find_dispatch("first_stage")
    assert isinstance(found, FirstStageDispatch)
    assert find_dispatch("first_stage") is found
    replacement = FirstStageDispatch()
    register_dispatch("first_stage", replacement)
    assert find_dispatch("first_stage") is replacement
    assert find_dispatch(replacement) is replacement
    assert isinstance(find_dispatch("mesh"), MeshDispatch)
    assert isinstance(find_dispatch("pass_through"), PassThroughDispatch)
    with pytest.raises(ConfigError, match="unknown dispatch 'mash'; did you mean 'mesh'"):
        find_dispatch("mash")


def test_only_a_dispatch_can_be_registered() -> None:
    """Built-in names cannot be replaced, and an object without the required methods is rejected."""
    with pytest.raises(ConfigError, match="built in"):
        register_dispatch("mesh", PassThroughDispatch())
    with pytest.raises(ConfigError, match="not a subclass"):
        register_dispatch("mine", object())  # type: ignore[arg-type]


def test_the_signature_decides_whether_weights_are_passed() -> None:
    """Only a parameter named ``weights`` that accepts a keyword counts."""

    class Methods:
        def with_default(self, batch: Any, weights: Any = None) -> None: ...
        def keyword(self, batch: Any, *, weights: Any) -> None: ...
        def positional(self, weights: Any, /) -> None: ...
        def swallows(self, batch: Any, **weights: Any) -> None: ...

    assert takes_weights(Methods.with_default)
    assert takes_weights(Methods.keyword)
    assert not takes_weights(Methods.positional)
    assert not takes_weights(Methods.swallows)


def test_deferred_arguments_are_copies() -> None:
    """Values that a thread sends later are independent of the caller's; an object reference stays the same object."""
    reference = ray.ObjectRef(b"\x01" * 28)
    batch, names = torch.zeros(2), ["a"]
    kept = copy_for_later((batch, {"names": names, "reference": reference}))
    batch.add_(1)
    names.append("b")
    assert kept[0].tolist() == [0.0, 0.0]
    assert kept[1]["names"] == ["a"]
    assert kept[1]["reference"] is reference
