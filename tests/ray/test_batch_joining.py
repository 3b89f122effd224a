"""Results of data shards are joined to one result."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from outlast.ray import concat


class Output(NamedTuple):
    logits: torch.Tensor
    loss: float


def test_samples_are_joined_and_padding_is_dropped() -> None:
    """Tensors, arrays and lists are joined at any depth; a loss becomes a list with the value of each shard."""
    results = [
        {"logits": torch.tensor([[1.0], [2.0]]), "names": ["a", "b"], "deep": (np.array([1, 2]), 0.5)},
        {"logits": torch.tensor([[3.0], [3.0]]), "names": ["c", "c"], "deep": (np.array([3, 3]), 0.25)},
    ]
    joined = concat(results, num_samples=3)
    assert joined["logits"].tolist() == [[1.0], [2.0], [3.0]]
    assert joined["names"] == ["a", "b", "c"]
    assert joined["deep"][0].tolist() == [1, 2, 3]
    assert joined["deep"][1] == [0.5, 0.25]


def test_named_tuples_keep_their_class() -> None:
    """A result of a named tuple class is returned as that class."""
    joined = concat([Output(torch.zeros(2), 1.0), Output(torch.ones(2), 2.0)])
    assert joined.logits.tolist() == [0, 0, 1, 1]
    assert joined.loss == [1.0, 2.0]


def test_0d_tensors_and_plain_objects_are_listed() -> None:
    """Values without samples are returned as a list, one for each shard."""
    assert concat([None, None]) == [None, None]
    assert [loss.item() for loss in concat([torch.tensor(1.0), torch.tensor(2.0)])] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("results", "num_samples", "message"),
    [
        ([], None, "no results"),
        ([torch.zeros(2), [1, 2]], None, "different kinds"),
        ([{"a": 1}, {"b": 1}], None, "different keys"),
        ([(1, 2), (1, 2, 3)], None, "different lengths"),
        ([[1, 2], [3, 4]], 5, "4 samples in all, not 5"),
    ],
)
def test_inconsistent_results_are_rejected(results: list[Any], num_samples: int | None, message: str) -> None:
    """Results are either joined completely or rejected."""
    with pytest.raises(ValueError, match=message):
        concat(results, num_samples)
