"""A step's batches come again, in the same order, and are stored without running anybody's code."""

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
def test_every_step_gets_the_next_batches_and_its_second_run_the_same(steps: list[tuple[int, int, bool]]) -> None:
    """Whatever the runs of a step draw, none is lost and none comes twice, but in a second run of the same step."""
    data = ReplayableIterator(iter(range(1000)))
    position = 0
    for first, second, again in steps:
        assert [next(data) for _ in range(first)] == list(range(position, position + first))
        if again:
            data.rewind()
            assert [next(data) for _ in range(second)] == list(range(position, position + second))
        data.end_step()
        position += second if again else first


def test_end_of_the_data_comes_again() -> None:
    """Data that end within a step end at the same place in its second run."""
    data = ReplayableIterator([1])
    for _ in range(2):
        assert list(data) == [1]
        data.rewind()


def test_nothing_is_kept_where_nothing_is_run_again() -> None:
    """Without recording, batches go through and are not held."""
    data = ReplayableIterator([torch.ones(1), torch.ones(1)])
    data.is_recording = False
    next(data)
    assert data.drawn == ()


def test_ranks_without_data_take_part() -> None:
    """None, and several iterators with None among them, are what some ranks have."""
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
def test_plain_batches_come_back(value: Any) -> None:
    """Tensors, arrays, numbers and texts in containers are given back as they were, and have the same fingerprint."""
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
def test_foreign_values_are_named_and_not_stored(value: Any, problem: str) -> None:
    """What could come back only by running code, or not as it was, is named by its place and type."""
    assert replay.store(value) == (None, [problem])


def test_fingerprint_tells_batches_apart() -> None:
    """A value, a type, a shape or a key more or less gives another fingerprint."""
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
