"""Changes by a run of a step are restored, and everything else is unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from outlast.numerics.replay import Rewinder
from outlast.runtime.random_numbers import RandomSnapshot, capture_random, restore_random


class Counting(torch.nn.Module):
    """Buffers of every kind: changed in place, without a version change, by assignment, from None, never."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(3))
        self.register_buffer("traceless", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("late", None)
        self.register_buffer("fixed", torch.arange(3.0))
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self) -> None:
        self.counted += 1
        self.traceless.data += 1
        self.assigned = self.assigned + 1
        self.late = torch.ones(2)

    def values(self) -> list[list[float] | None]:
        names = ("counted", "traceless", "assigned", "late", "fixed")
        return [None if (value := getattr(self, name)) is None else value.tolist() for name in names]


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_buffers_are_restored(num_before: int) -> None:
    """Rewinding restores a buffer's initial value, however and in whichever run it changed."""
    module, rewinder = Counting(), Rewinder()
    rewinder.watch([module])
    for _ in range(num_before):
        module.late = None
        rewinder.begin()
        module()
        rewinder.end_run()
    module.late = None
    before = module.values()
    rewinder.begin()
    for _ in range(2):
        module()
        rewinder.end_run()
        assert module.values() != before
        rewinder.rewind()
        assert module.values() == before


@pytest.mark.parametrize("module", [torch.nn.BatchNorm1d(4), torch.nn.Sequential(torch.nn.BatchNorm1d(4))])
def test_late_changing_statistics_are_restored(module: torch.nn.Module) -> None:
    """BatchNorm that was constant for many runs is restored once a run changes it."""
    rewinder = Rewinder()
    rewinder.watch([module.eval()])
    for _ in range(6):
        rewinder.begin()
        module(torch.randn(8, 4))
        rewinder.end_run()
    module.train()
    for _ in range(6):
        rewinder.begin()
        before = [value.clone() for value in module.buffers()]
        module(torch.randn(8, 4) * float("nan"))
        rewinder.end_run()
        rewinder.rewind()
        assert all(torch.equal(a, b) for a, b in zip(module.buffers(), before, strict=True))
        module(torch.randn(8, 4))


def test_untraced_buffer_is_learned_in_training_mode() -> None:
    """A buffer that changes only in training mode, without a version change, is restored once training mode is on."""
    module, rewinder = Counting().eval(), Rewinder()
    rewinder.watch([module])
    for _ in range(6):
        rewinder.begin()
        rewinder.end_run()
    module.train()
    for _ in range(6):
        module.late = None
        rewinder.begin()
        before = module.values()
        module()
        rewinder.end_run()
        rewinder.rewind()
        assert module.values() == before
        module()


def test_buffers_changed_between_runs_keep_new_values() -> None:
    """Changes of the script outside steps, such as an average of the weights, are kept."""
    module, rewinder = torch.nn.Module(), Rewinder()
    module.register_buffer("average", torch.zeros(2))
    rewinder.watch([module])
    for number in range(6):
        rewinder.begin()
        rewinder.end_run()
        if number == 5:
            rewinder.rewind()
        assert module.average.tolist() == [number, number]
        module.average += 1


def test_gradients_are_restored() -> None:
    """None becomes None again, a changed gradient zero, and an unchanged one keeps its values."""
    none, zeros, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    zeros.grad, other.grad = torch.zeros(2), torch.full((2,), 7.0)
    rewinder = Rewinder()
    rewinder.watch([torch.nn.ParameterList([none, zeros, other])])
    kept = zeros.grad
    rewinder.begin()
    (none * zeros).sum().backward()
    assert zeros.grad.tolist() == [1.0, 1.0]
    rewinder.rewind()
    assert none.grad is None
    assert zeros.grad is kept
    assert zeros.grad.tolist() == [0.0, 0.0]
    assert other.grad.tolist() == [7.0, 7.0]


def draw() -> list[float]:
    """Draw from every generator, an odd number of normally distributed numbers of numpy's among them."""
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), np.random.rand(), float(torch.rand(1))]


def test_random_numbers_are_repeated() -> None:
    """After rewinding every generator gives the same numbers, including those kept for a next call."""
    rewinder = Rewinder()
    for _ in range(5):
        rewinder.begin()
        drawn = draw()
        rewinder.rewind()
        assert draw() == drawn


@pytest.mark.parametrize(
    ("seed", "draw"), [(np.random.seed, np.random.randn), (random.seed, lambda: random.gauss(0, 1))]
)
def test_kept_random_number_is_restored(seed: Callable[[int], object], draw: Callable[[], float]) -> None:
    """Normally distributed numbers are drawn in pairs and one is kept; a snapshot between the two includes it."""
    snapshot = RandomSnapshot()
    seed(5)
    draw()
    snapshot.take()
    kept = draw()
    snapshot.take()
    fresh = draw()
    snapshot.restore()
    assert draw() == fresh != kept


def set_with_kept(name: str, kept: float | None) -> None:
    """Set a generator to its current words, with another number kept for the next call."""
    if name == "python":
        random.setstate((*random.getstate()[:2], kept))
    else:
        np.random.set_state((*np.random.get_state()[:3], int(kept is not None), kept or 0.0))


@pytest.mark.parametrize("name", ["python", "numpy"])
@pytest.mark.parametrize(("before", "after"), [(None, 0.25), (0.25, None), (0.25, 0.5), (0.25, 0.25)])
def test_changed_kept_number_is_a_new_state(name: str, before: float | None, after: float | None) -> None:
    """A state set to the same words with another kept number, as by restore_random() or a script, is a new one."""
    snapshot, draw = RandomSnapshot(), {"python": lambda: random.gauss(0, 1), "numpy": np.random.randn}[name]
    (random.seed if name == "python" else np.random.seed)(5)
    set_with_kept(name, before)
    snapshot.take()
    set_with_kept(name, after)
    snapshot.take()
    drawn = [draw(), draw()]
    snapshot.restore()
    assert [draw(), draw()] == drawn
    if after is not None:
        assert drawn[0] == after


@pytest.mark.parametrize("first", ["gauss", "words"])
def test_alternating_states_are_detected(first: str) -> None:
    """Alternately set states with the same words, with and without a kept number, are distinguished."""
    random.seed(5)
    np.random.seed(5)
    random.gauss(0, 1)
    np.random.randn()
    kept = capture_random()
    random.gauss(0, 1)
    np.random.randn()
    used = capture_random()
    snapshot = RandomSnapshot()
    for state in (kept, used, kept) if first == "gauss" else (used, kept, used):
        restore_random(state)
        snapshot.take()
        drawn = random.gauss(0, 1), float(np.random.randn())
        snapshot.restore()
        assert (random.gauss(0, 1), float(np.random.randn())) == drawn
        restore_random(state)
        assert (random.gauss(0, 1), float(np.random.randn())) == drawn


@pytest.mark.parametrize(
    ("name", "seed", "draw"), [("numpy", np.random.seed, np.random.rand), ("python", random.seed, random.random)]
)
def test_snapshot_of_an_unused_generator_is_reused(
    name: str, seed: Callable[[int], object], draw: Callable[[], float]
) -> None:
    """While a generator is unused, a snapshot copies nothing; after use, the copy is new."""
    snapshot = RandomSnapshot()
    seed(5)
    snapshot.take()
    first = snapshot.state[name]
    snapshot.take()
    assert snapshot.state[name] is first
    draw()
    snapshot.take()
    assert snapshot.state[name] is not first
    seed(5)
    snapshot.take()
    drawn = draw()
    snapshot.restore()
    assert draw() == drawn


def test_unknown_generator_layout_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an interpreter stores the state of Python's generator elsewhere, each snapshot queries it."""
    monkeypatch.setattr("outlast.runtime.random_numbers.object", type("wide", (), {"__basicsize__": 24}), raising=False)
    snapshot = RandomSnapshot()
    snapshot.take()
    first = snapshot.state["python"]
    snapshot.take()
    assert snapshot.state["python"] == first
    assert snapshot.state["python"] is not first


def test_unknown_kept_number_layout_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """If numpy stores the number for a next call elsewhere, each snapshot queries the state."""
    monkeypatch.setattr("outlast.runtime.random_numbers._keeps_number_within", lambda: False)
    snapshot = RandomSnapshot()
    snapshot.take()
    first = snapshot.state["numpy"]
    snapshot.take()
    assert snapshot.state["numpy"] is not first
