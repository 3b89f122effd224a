"""Which tensors may be copied late, and that no optimizer steps before they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from outlast.checkpoint.arena import CopyGuard, changed_only_by_step
from outlast.checkpoint.state import capture, flatten

SIDE = 600
"""Its square is more than the 1 MiB below which all is copied at once."""


def names_of(state: dict[str, object]) -> set[str]:
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    return {name.partition(".")[2] for name in changed_only_by_step(optimizers, flatten({"state": capture(state)}))}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.BatchNorm1d(SIDE))
    model.register_buffer("running", torch.zeros(SIDE, SIDE))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, SIDE)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_only_what_step_alone_changes_is_copied_late() -> None:
    """Large parameters and optimizer states wait; buffers, small tensors and what nobody optimizes do not."""
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer, "mine": torch.zeros(SIDE, SIDE)}
    late = names_of(state)
    assert {name.rpartition(".")[2] for name in late} == {"weight", "exp_avg", "exp_avg_sq"}
    assert len(late) == 3
    assert names_of({"model": model}) == set()


class Copies:
    """Stands for staged copies."""

    def __init__(self, *, takes_steps: int = 1, look: Callable[[], None] = lambda: None) -> None:
        self.calls: list[str] = []
        self._left, self._look = takes_steps, look

    def hold_back(self) -> bool:
        self._look()
        self.calls.append("hold_back")
        self._left -= 1
        return self._left <= 0

    def wait(self, limit_s: float | None = None) -> None:
        self.calls.append("wait")


def watched(guard: CopyGuard, *copies: Copies) -> None:
    for one in copies:
        guard.watch(one)  # type: ignore[arg-type]


def test_a_step_waits_for_every_copy_and_once() -> None:
    """The optimizer's step is held back for all copies that are under way, before it changes anything; the next one,
    if they are done, for nothing."""
    model, optimizer = trained()
    guard = CopyGuard()
    before = model[0].weight.detach().clone()  # type: ignore[index]
    seen: list[bool] = []
    first, second = (Copies(look=lambda: seen.append(torch.equal(before, model[0].weight))) for _ in range(2))  # type: ignore[index]
    guard.stepping({"all": {"optim": optimizer}})
    watched(guard, first, second)
    assert first.calls == []
    optimizer.step()
    optimizer.step()
    assert first.calls == second.calls == ["hold_back"]
    assert seen == [True, True]
    assert not torch.equal(before, model[0].weight)  # type: ignore[index]
    assert guard.stall_s > 0.0


def test_steps_are_held_back_until_a_device_has_copied() -> None:
    """A device's copy that is not done holds back every further step, and is awaited at last."""
    _, optimizer = trained()
    guard, copies = CopyGuard(), Copies(takes_steps=9)
    guard.stepping({"optim": optimizer})
    watched(guard, copies)
    optimizer.step()
    optimizer.step()
    guard.wait()
    guard.wait()
    assert copies.calls == ["hold_back", "hold_back", "wait"]


def test_only_optimizers_whose_steps_are_seen_are_trusted() -> None:
    """A step that passes by the hook, as one in a captured graph does, would change what is being copied: an optimizer
    whose step was not seen since the last save is copied at once, also by a second save of the same iteration."""
    guard = CopyGuard()
    (_, one), (_, other) = trained(), trained()
    state = {"one": one, "more": {"other": other}}
    assert guard.stepping(state) == []
    one.step()
    assert guard.stepping(state, 1) == [one]
    assert guard.stepping(state, 1) == [one]
    assert guard.stepping(state, 2) == []
    other.step()
    one.step()
    assert guard.stepping(state, 3) == [one, other]


def test_a_step_that_is_captured_is_not_one_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured the hook is called once for all later replays: that is no step."""
    guard = CopyGuard()
    _, optimizer = trained()
    guard.stepping({"optim": optimizer})
    monkeypatch.setattr("outlast.checkpoint.arena.is_capturing", lambda: True)
    optimizer.step()
    assert guard.stepping({"optim": optimizer}, 1) == []


def test_a_closed_guard_lets_the_optimizer_alone() -> None:
    """Closing waits a last time; afterwards steps are as they were before."""
    _, optimizer = trained()
    guard, copies = CopyGuard(), Copies()
    guard.stepping({"optim": optimizer})
    watched(guard, copies)
    guard.close()
    guard.close()
    assert copies.calls == ["wait"]
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_at_the_place_of_a_former_one_is_watched() -> None:
    """Nothing is remembered of an optimizer that is gone, so one that takes its place in memory waits for copies."""
    guard, copies = CopyGuard(), Copies()
    former = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    guard.stepping({"optim": former})
    watched(guard, copies)
    former.step()
    assert copies.calls == ["hold_back"]
    assert len(guard._hooks) == 1
    gone = weakref.ref(former)
    del former
    gc.collect()
    assert gone() is None
    assert not guard._hooks
