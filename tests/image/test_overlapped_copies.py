"""Which tensors may be copied late, and that no optimizer steps before they are."""

from __future__ import annotations

import gc
import weakref

import torch

from outlast.checkpoint.arena import CopyGuard, changed_only_by_step
from outlast.checkpoint.state import capture, flatten

SIDE = 600
"""Its square is more than the 1 MiB below which all is copied at once."""


def names_of(state: dict[str, object]) -> set[str]:
    return {name.partition(".")[2] for name in changed_only_by_step(state, flatten({"state": capture(state)}))}


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


def test_a_step_waits_for_every_copy_and_once() -> None:
    """The optimizer's step waits for all copies that are under way; the next one has nothing to wait for."""
    model, optimizer = trained()
    guard, waited = CopyGuard(), list[str]()
    before = model[0].weight.detach().clone()  # type: ignore[index]
    seen = []

    def wait(name: str) -> None:
        waited.append(name)
        seen.append(torch.equal(before, model[0].weight))  # type: ignore[index]

    state = {"all": {"optim": optimizer}}
    guard.watch(state, lambda: wait("first"))
    guard.watch(state, lambda: wait("second"))
    assert waited == []
    optimizer.step()
    optimizer.step()
    assert waited == ["first", "second"]
    assert seen == [True, True]
    assert not torch.equal(before, model[0].weight)  # type: ignore[index]
    assert guard.stall_s > 0.0


def test_a_closed_guard_lets_the_optimizer_alone() -> None:
    """Closing waits a last time; afterwards steps are as they were before."""
    _, optimizer = trained()
    guard, waited = CopyGuard(), list[str]()
    guard.watch({"optim": optimizer}, lambda: waited.append("x"))
    guard.close()
    guard.close()
    assert waited == ["x"]
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_at_the_place_of_a_former_one_is_watched() -> None:
    """Nothing is remembered of an optimizer that is gone, so one that takes its place in memory waits for copies."""
    guard, waited = CopyGuard(), list[str]()
    former = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    guard.watch({"optim": former}, lambda: waited.append("x"))
    former.step()
    assert waited.pop() == "x"
    assert len(guard._hooks) == 1
    gone = weakref.ref(former)
    del former
    gc.collect()
    assert gone() is None
    assert not guard._hooks
