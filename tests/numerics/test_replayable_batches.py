"""A step's batches are repeated in the same order, and stored without running foreign code."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.numerics import replay
from outlast.numerics.replay import ReplayableIterator, as_iterators


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=12))
def test_second_run_repeats_the_batches_of_its_step(steps: list[tuple[int, int, bool]]) -> None:
    """For any numbers of batches per run, none is lost, and none is repeated except in the second run of the same
    step."""
    data = ReplayableIterator(iter(range(1000)))
    position = 0
    for first, second, again in steps:
        assert [next(data) for _ in range(first)] == list(range(position, position + first))
        if again:
            data.rewind()
            assert [next(data) for _ in range(second)] == list(range(position, position + second))
        data.end_step()
        position += second if again else first


def test_end_of_the_data_is_repeated() -> None:
    """Data that end within a step end at the same place in its second run."""
    data = ReplayableIterator([1])
    for _ in range(2):
        assert list(data) == [1]
        data.rewind()


def test_batches_are_not_kept_without_recording() -> None:
    """Without recording, batches pass through and are not stored."""
    data = ReplayableIterator([torch.ones(1), torch.ones(1)])
    data.is_recording = False
    next(data)
    assert data.drawn == ()


def test_ranks_without_data_take_part() -> None:
    """None, and several iterators of which some are None, are accepted."""
    data = ReplayableIterator([1])
    assert as_iterators(None) == ()
    assert as_iterators([data, None]) == (data,)
    assert as_iterators(data) == (data,)


VALUES: list[Any] = [
    {"ids": torch.arange(6).reshape(2, 3), "meta": [("a", 1, 2.5, None, True, b"x")], 3: np.arange(4.0)},
    torch.zeros(0),
    torch.ones(2, dtype=torch.bfloat16).t(),
    (torch.tensor(1.5), [torch.ones(2, 2)[:, 0]]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_batches_round_trip(value: Any) -> None:
    """Tensors, arrays, numbers and strings in containers are restored unchanged, with the same fingerprint."""
    stored, problems = replay.store(value)
    assert problems == []
    assert stored is not None
    back = replay.give_back(stored, 0)
    assert type(back) is type(value)
    assert replay.fingerprint(back) == replay.fingerprint(value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, {2}]}, "a.1 of type set"),
        (collections.namedtuple("Pair", "x")(1), "the batch of type Pair"),
        ({"w": torch.nn.Parameter(torch.ones(1))}, "w of type Parameter"),
        ([torch.ones(1, requires_grad=True)], "0 of type Tensor"),
        ({"s": torch.ones(2).to_sparse()}, "s of type Tensor"),
        (np.array(["text"]), "the batch of type ndarray"),
        ({("tuple",): 1}, "the batch of type dict"),
    ],
)
def test_foreign_values_are_reported_and_not_stored(value: Any, problem: str) -> None:
    """A value that cannot be restored unchanged without running code is reported with its place and type."""
    assert replay.store(value) == (None, [problem])


def test_fingerprint_distinguishes_batches() -> None:
    """A different value, type, shape or key gives another fingerprint."""
    batches = [
        {"x": torch.zeros(4)},
        {"x": torch.zeros(2, 2)},
        {"x": torch.zeros(4, dtype=torch.float64)},
        {"y": torch.zeros(4)},
        {"x": torch.ones(4)},
        {"x": np.zeros(4, dtype=np.float32)},
        {"x": [0.0] * 4},
        {"x": (0.0,) * 4},
    ]
    assert len({replay.fingerprint(batch) for batch in batches}) == len(batches)
