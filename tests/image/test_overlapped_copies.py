"""Deferred copies: which tensors may be copied late, and that optimizer steps wait for them."""

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
"""Its square exceeds the 1 MiB below which tensors are copied at once."""
IDENTITY = Identity(run="run", topology="t", rank=0, world_size=1, iteration=7, attempt="7-a")


def provide(num_bytes: int) -> Arena:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return Arena(fd)


def deferred_names(state: dict[str, object]) -> set[str]:
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    return {name.partition(".")[2] for name in changed_only_by_step(optimizers, flatten({"state": capture(state)}))}


def trained_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.BatchNorm1d(SIDE))
    model.register_buffer("running", torch.zeros(SIDE, SIDE))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, SIDE)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_only_large_optimized_tensors_are_deferred() -> None:
    """Large parameters and optimizer states are deferred; other and small tensors are not."""
    model, optimizer = trained_model()
    state = {"model": model, "optim": optimizer, "mine": torch.zeros(SIDE, SIDE)}
    late = deferred_names(state)
    assert {name.rpartition(".")[2] for name in late} == {"weight", "exp_avg", "exp_avg_sq"}
    assert len(late) == 3
    assert deferred_names({"model": model}) == set()


class FakeCopies:
    """Test double of staged copies."""

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


def watch_all(guard: CopyGuard, *copies: FakeCopies) -> None:
    for first_optimizer in copies:
        guard.watch(first_optimizer)  # type: ignore[arg-type]


def test_a_step_waits_for_each_copy_once() -> None:
    """An optimizer step waits for all copies under way before it changes a tensor; the next step does not wait."""
    model, optimizer = trained_model()
    guard = CopyGuard()
    before = model[0].weight.detach().clone()  # type: ignore[index]
    unchanged_before_step: list[bool] = []
    first, second = (
        FakeCopies(look=lambda: unchanged_before_step.append(torch.equal(before, model[0].weight))) for _ in range(2)
    )  # type: ignore[index]
    guard.stepping({"all": {"optim": optimizer}})
    watch_all(guard, first, second)
    assert first.calls == []
    optimizer.step()
    optimizer.step()
    assert first.calls == second.calls == ["hold_back"]
    assert unchanged_before_step == [True, True]
    assert not torch.equal(before, model[0].weight)  # type: ignore[index]


def test_steps_wait_until_a_device_copy_is_done() -> None:
    """A device copy that is not done delays each further step, and ``wait`` waits for it."""
    _, optimizer = trained_model()
    guard, copies = CopyGuard(), FakeCopies(takes_steps=9)
    guard.stepping({"optim": optimizer})
    watch_all(guard, copies)
    optimizer.step()
    optimizer.step()
    guard.wait()
    guard.wait()
    assert copies.calls == ["hold_back", "hold_back", "wait"]


def test_an_optimizer_without_an_observed_step_is_not_deferred() -> None:
    """An optimizer whose step did not run the hook since the last save is copied at once.

    A step in a captured graph does not run the hook and would change the tensors during the copy. The result is the
    same for a second save of the same iteration.
    """
    guard = CopyGuard()
    (_, first_optimizer), (_, second_optimizer) = trained_model(), trained_model()
    state = {"one": first_optimizer, "more": {"other": second_optimizer}}
    assert guard.stepping(state) == []
    first_optimizer.step()
    assert guard.stepping(state, 1) == [first_optimizer]
    assert guard.stepping(state, 1) == [first_optimizer]
    assert guard.stepping(state, 2) == []
    second_optimizer.step()
    first_optimizer.step()
    assert guard.stepping(state, 3) == [first_optimizer, second_optimizer]


def test_an_optimizer_with_a_captured_step_is_never_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step was captured in a graph, all later saves copy the optimizer's tensors at once.

    A replay changes the tensors without a call of the hook, and any next step may be a replay.
    """
    guard = CopyGuard()
    _, optimizer = trained_model()
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
def test_a_graph_older_than_the_hook_prevents_deferral(
    monkeypatch: pytest.MonkeyPatch, kind: Any, settings: dict[str, Any], may_be_captured: bool, has_graphs: bool
) -> None:
    """If a graph existed before the first save or load, tensors of capturable optimizers are never deferred.

    Such a graph may contain a step of any optimizer that torch allows to be captured.
    """
    monkeypatch.setattr("outlast.checkpoint.copy_guard.has_graphs", lambda: has_graphs)
    guard = CopyGuard()
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([parameter], lr=0.1, **settings)
    guard.stepping({"optim": optimizer})
    optimizer.step()  # without a gradient: the CPU has no capturable step
    assert guard.stepping({"optim": optimizer}, 1) == ([] if has_graphs and may_be_captured else [optimizer])


@pytest.mark.extended
@pytest.mark.parametrize("is_inner", [False, True], ids=["step", "function"])
def test_each_compiled_step_waits_for_copies(is_inner: bool) -> None:
    """Each call of a compiled step waits for copies, although ``torch.compile`` does not trace the hook."""
    torch._dynamo.reset()
    _, optimizer = trained_model()
    guard = CopyGuard()
    state = {"optim": optimizer}
    guard.stepping(state)

    def train() -> None:
        optimizer.step()

    step = torch.compile(train if is_inner else optimizer.step, backend="eager")
    for iteration in range(1, 5):
        copies = FakeCopies()
        watch_all(guard, copies)
        step()
        assert copies.calls == ["hold_back"]
        assert guard.stepping(state, iteration) == [optimizer]


@pytest.mark.parametrize("is_detected_by", ["copy", "step"])
def test_a_tensor_changed_during_its_copy_fails_the_save(is_detected_by: str) -> None:
    """A tensor changed outside ``optimizer.step`` during its copy fails the save; later saves defer nothing.

    The error contains the tensor's name. The end of the copy or the next step detects the change, whichever is first.
    """
    model, optimizer = trained_model()
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


def test_a_step_that_waits_for_the_copy_does_not_fail_the_save() -> None:
    """A step that waits for the copy, and changes after that step, do not fail the save."""
    model, optimizer = trained_model()
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


def test_close_removes_the_optimizer_hooks() -> None:
    """``close`` waits once more and removes its hooks from the optimizer."""
    _, optimizer = trained_model()
    guard, copies = CopyGuard(), FakeCopies()
    guard.stepping({"optim": optimizer})
    watch_all(guard, copies)
    guard.close()
    guard.close()
    assert copies.calls == ["wait"]
    assert not optimizer._optimizer_step_pre_hooks


def test_a_new_optimizer_at_a_reused_address_is_watched() -> None:
    """No state of a deleted optimizer is kept, so an optimizer that reuses its address is watched."""
    guard, copies = CopyGuard(), FakeCopies()
    old_optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    guard.stepping({"optim": old_optimizer})
    watch_all(guard, copies)
    old_optimizer.step()
    assert copies.calls == ["hold_back"]
    assert len(guard.hooks) == 1
    reference = weakref.ref(old_optimizer)
    del old_optimizer
    gc.collect()
    assert reference() is None
    assert not guard.hooks
