"""Which tensors may be copied late, and that no optimizer steps before they are."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from outlast.checkpoint.arena import Arena, Stager
from outlast.checkpoint.copy_guard import CopyGuard, changed_only_by_step
from outlast.checkpoint.shard import Identity
from outlast.checkpoint.state import capture, flatten
from outlast.errors import CheckpointError

SIDE = 600
"""Its square is more than the 1 MiB below which all is copied at once."""
IDENTITY = Identity(run="run", topology="t", rank=0, world_size=1, iteration=7, attempt="7-a")


def provide(num_bytes: int) -> Arena:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return Arena(fd)


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

    changed: str | None = None

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


def test_an_optimizer_whose_step_is_in_a_graph_is_never_copied_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay changes the tensors of an optimizer without a call of the hook. The next step may be a replay, even if
    the last ones were not: once a step was captured, all later saves copy the optimizer's tensors at once."""
    guard = CopyGuard()
    _, optimizer = trained()
    guard.stepping({"optim": optimizer})
    with monkeypatch.context() as capturing:
        capturing.setattr("outlast.checkpoint.copy_guard.is_capturing", lambda: True)
        optimizer.step()
    assert guard.stepping({"optim": optimizer}, 1) == []
    optimizer.step()
    assert guard.stepping({"optim": optimizer}, 2) == []


@pytest.mark.parametrize(
    ("kind", "settings", "may_be_captured"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.AdamW, {"capturable": True}, True),
        (torch.optim.AdamW, {}, False),  # torch refuses to capture the step
    ],
    ids=["sgd", "capturable", "not_capturable"],
)
@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "no_graphs"])
def test_a_graph_from_before_the_hook_may_contain_a_step(
    monkeypatch: pytest.MonkeyPatch, kind: Any, settings: dict[str, Any], may_be_captured: bool, has_graphs: bool
) -> None:
    """A graph that exists before the first save, or the load, may contain a step of any optimizer that torch allows to
    be captured: its tensors are never copied late."""
    monkeypatch.setattr("outlast.checkpoint.copy_guard.has_graphs", lambda: has_graphs)
    guard = CopyGuard()
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([parameter], lr=0.1, **settings)
    guard.stepping({"optim": optimizer})
    optimizer.step()  # without a gradient: the CPU has no capturable step
    assert guard.stepping({"optim": optimizer}, 1) == ([] if has_graphs and may_be_captured else [optimizer])


@pytest.mark.extended
@pytest.mark.parametrize("is_inner", [False, True], ids=["step", "function"])
def test_a_compiled_step_waits_each_time(is_inner: bool) -> None:
    """torch.compile does not trace the hook: each call of a compiled step waits for copies, not only the first."""
    torch._dynamo.reset()
    _, optimizer = trained()
    guard = CopyGuard()
    state = {"optim": optimizer}
    guard.stepping(state)

    def train() -> None:
        optimizer.step()

    step = torch.compile(train if is_inner else optimizer.step, backend="eager")
    for iteration in range(1, 5):
        copies = Copies()
        watched(guard, copies)
        step()
        assert copies.calls == ["hold_back"]
        assert guard.stepping(state, iteration) == [optimizer]


@pytest.mark.parametrize("is_detected_by", ["copy", "step"])
def test_a_tensor_that_changes_during_its_copy_fails_the_save(is_detected_by: str) -> None:
    """A copy of a tensor that anything but a step changed meanwhile may hold values of two moments: the save fails with
    the tensor's name, and later saves copy everything at once. The end of the copy detects the change, or the next
    step, whichever is first."""
    model, optimizer = trained()
    state, guard = {"model": model, "optim": optimizer}, CopyGuard()
    guard.stepping(state)
    optimizer.step()
    flat = flatten({"state": capture(state)})
    late = changed_only_by_step(guard.stepping(state, 1), flat)
    with closing(Stager()) as stager:
        staged = stager.stage(flat, IDENTITY, provide, deferred=late)
        guard.watch(staged)
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)  # type: ignore[index,operator]
        if is_detected_by == "step":
            optimizer.step()
        with pytest.raises(CheckpointError, match=r"0\.weight' was changed outside optimizer\.step"):
            staged.finish()
        staged.arena.close()
    optimizer.step()
    assert guard.stepping(state, 2) == []


def test_a_step_after_the_copy_is_not_a_change() -> None:
    """Neither a step that waits for the copy nor a change after that step fails the save."""
    model, optimizer = trained()
    state, guard = {"model": model, "optim": optimizer}, CopyGuard()
    guard.stepping(state)
    optimizer.step()
    flat = flatten({"state": capture(state)})
    with closing(Stager()) as stager:
        staged = stager.stage(flat, IDENTITY, provide, deferred=changed_only_by_step([optimizer], flat))
        guard.watch(staged)
        optimizer.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)  # type: ignore[index,operator]
        staged.finish()
        staged.arena.close()
    assert guard.stepping(state, 1) == [optimizer]


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
