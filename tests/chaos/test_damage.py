"""Injected damage changes one element in place, of any tensor, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from outlast.chaos import Fault, FaultPlan
from outlast.chaos.model_faults import can_damage, damage
from outlast.chaos.plan import Occurrence, planned_faults
from outlast.errors import ConfigError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def occurrence(iteration: int = 3, seed: int = 0, **fault: Any) -> Occurrence:
    plan = FaultPlan(seed=seed, faults=[Fault(target="weight", iteration=iteration, **fault)])
    return Occurrence(next(planned_faults(plan)), iteration)


def bits(tensor: torch.Tensor) -> int:
    return int.from_bytes(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()), "little")


@given(data=st.data(), dtype=st.sampled_from(DTYPES), seed=st.integers(min_value=0, max_value=10_000))
def test_a_bit_flip_changes_one_bit_and_is_reversible(data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    """For any element type exactly one bit of the tensor differs, and none after the same flip again."""
    shape = data.draw(st.lists(st.integers(min_value=1, max_value=5), max_size=3))
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype)
    if dtype == torch.bool:
        tensor.fill_(False)
    before = bits(tensor)
    flip = occurrence(kind="bit_flip", seed=seed)
    assert can_damage("bit_flip", tensor)
    damage(tensor, flip)
    assert (before ^ bits(tensor)).bit_count() == 1
    damage(tensor, flip)
    assert bits(tensor) == before


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
def test_the_given_bit_of_the_given_element_is_flipped(bit: int) -> None:
    """Elements count row by row and bits from the least significant one, also in a tensor that is not contiguous."""
    tensor = torch.arange(6.0).reshape(2, 3).t()
    done = damage(tensor, occurrence(kind="bit_flip", element=3, bit=bit))
    expected = torch.arange(6.0).reshape(2, 3).t().contiguous()
    expected.view(torch.int32)[1, 1] ^= -(2**31) if bit == 31 else 1 << bit
    assert torch.equal(tensor, expected)
    assert (done.element, done.bit, done.before, done.after) == (3, bit, 4.0, expected[1, 1].item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_inf_and_sign_change_one_element(dtype: torch.dtype) -> None:
    """Each kind changes one element as its name says; a flipped sign is never that of a zero."""
    weight = torch.tensor([0.0, 0.0, 2.0, 0.0], dtype=dtype)
    done = damage(weight, occurrence(kind="sign_flip"))
    assert weight.tolist() == [0.0, 0.0, -2.0, 0.0]
    assert (done.element, done.before, done.after) == (2, 2.0, -2.0)
    assert math.isnan(damage(weight, occurrence(kind="nan", element=0)).after)
    assert damage(weight, occurrence(kind="inf", element=1)).after == math.inf
    assert math.isnan(weight[0])
    assert math.isinf(weight[1])


def test_a_parameter_is_changed_in_place() -> None:
    """A leaf that requires gradients keeps its identity, and its graph can still run backward."""
    weight = torch.nn.Parameter(torch.ones(4))
    loss = (weight * 2).sum()
    damage(weight, occurrence(kind="sign_flip", element=1))
    loss.backward()
    assert weight.tolist() == [1, -1, 1, 1]
    assert weight.grad is not None


def test_a_distributed_tensor_is_changed_in_its_local_shard() -> None:
    """The shard of this rank has the damage."""
    local = torch.ones(3)
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    tensor = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    damage(tensor, occurrence(kind="sign_flip", element=2))
    assert local.tolist() == [1, 1, -1]


def test_can_damage_excludes_unsuitable_tensors() -> None:
    """An empty tensor has no element, and an integer tensor cannot hold a NaN."""
    assert not can_damage("bit_flip", torch.empty(0))
    assert not can_damage("nan", torch.ones(2, dtype=torch.int64))
    assert can_damage("bit_flip", torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("fault", [{"element": 4}, {"bit": 16, "kind": "bit_flip"}])
def test_an_index_out_of_range_is_rejected(fault: dict[str, Any]) -> None:
    """An element or a bit beyond the tensor's range is an error that names how many there are."""
    with pytest.raises(ConfigError, match=r"there are 4 on this rank|has 16 bits"):
        damage(torch.ones(4, dtype=torch.bfloat16), occurrence(**{"kind": "nan", **fault}))
