"""Whether a rank's kept training state is consistent, and which parts of it are restored."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from outlast.inprocess.call import Handle, RestartRequested
from outlast.inprocess.kept_state import KeptTrainingState
from outlast.inprocess.rank_local_state import CAPACITY_BYTES, RankLocalState, SharedBuffer
from outlast.inprocess.restore import Restore
from outlast.runtime.interruption import SignalInterruption


class Training:
    """A small model with optimizer, schedule and other state."""

    def __init__(self, *, norm: bool = False) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)]
        self.model = torch.nn.Sequential(*layers, *([torch.nn.BatchNorm1d(4)] if norm else []))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state: dict[str, Any] = {
            "model": self.model,
            "nested": {"optimizer": self.optimizer, "schedule": self.schedule},
            "ema": torch.zeros(3),
            "seen": (),
        }

    def forward(self) -> torch.Tensor:
        noise = random.gauss(0, 1) + float(np.random.random())
        output: torch.Tensor = self.model(torch.randn(8, 4)) + noise
        return output.square().mean()

    def step(self) -> None:
        loss = self.forward()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.state["ema"] += 1
        self.state["seen"] = (*self.state["seen"], loss.item())

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


@pytest.fixture
def kept() -> Iterator[KeptTrainingState]:
    keeper = KeptTrainingState()
    yield keeper
    keeper.close()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _begin(kept: KeptTrainingState, training: Training, num_steps: int = 2) -> None:
    kept.watch(training.state, {}, rank=0, world_size=1)
    kept.note(0)
    for number in range(num_steps):
        training.step()
        kept.note(number + 1)


def test_state_before_an_update_is_consistent(kept: KeptTrainingState) -> None:
    """If the forward or backward pass is interrupted, the state is the one after the last step."""
    training = Training()
    _begin(kept, training)
    training.forward().backward()
    kept.release()
    assert kept.look(training.state)[0] == 2


def test_an_interrupted_update_makes_the_state_inconsistent(kept: KeptTrainingState) -> None:
    """If an optimizer's step, or the rest of the body after it, is interrupted, the state is not used and the reason
    is reported."""
    training = Training()
    _begin(kept, training)
    training.step()
    kept.release()
    iteration, reason, _ = kept.look(training.state)
    assert iteration is None
    assert "after an optimizer's step" in reason
    _begin(kept, training)
    hook = training.optimizer.register_step_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        training.step()
    hook.remove()
    kept.release()
    iteration, reason, _ = kept.look(training.state)
    assert iteration is None
    assert "within an optimizer's step" in reason


class Mark:
    """Stands for a CUDA event, which needs a GPU."""

    device = torch.device("cpu")

    def __init__(self, *results: bool) -> None:
        self._results = list(results)

    def query(self) -> bool:
        return self._results.pop(0) if len(self._results) > 1 else self._results[0]


@pytest.mark.parametrize(("mark", "expected"), [(Mark(False), None), (Mark(False, False, True), 2), (None, 2)])
def test_state_with_pending_device_work_is_inconsistent(
    kept: KeptTrainingState, monkeypatch: pytest.MonkeyPatch, mark: Mark | None, expected: int | None
) -> None:
    """Steps count when they are submitted to the device; behind an aborted collective the device computes wrong
    values."""
    interruption = SignalInterruption(RestartRequested, _fail.__code__)
    call = Handle(Any, interruption=interruption, page=Any, on_first_ping=_fail, kept={})  # type: ignore[arg-type]
    monkeypatch.setattr("outlast.inprocess.kept_state.current_handle", lambda: call)
    monkeypatch.setattr("outlast.runtime.device.mark_work", lambda: mark)
    training = Training()
    _begin(kept, training)
    call.look_before_abort()
    kept.release()
    iteration, reason, _ = kept.look(training.state)
    assert iteration == expected
    assert ("had not computed" in reason) == (expected is None)


class BrokenMark:
    """Stands for an event of a device that has failed."""

    device = torch.device("cpu")

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_state_of_a_failed_device_is_inconsistent(kept: KeptTrainingState, monkeypatch: pytest.MonkeyPatch) -> None:
    """State of a device that raises on a query is not used."""
    call = Handle(
        Any, interruption=SignalInterruption(RestartRequested, _fail.__code__), page=Any, on_first_ping=_fail, kept={}
    )  # type: ignore[arg-type]
    monkeypatch.setattr("outlast.inprocess.kept_state.current_handle", lambda: call)
    monkeypatch.setattr("outlast.runtime.device.mark_work", BrokenMark)
    training = Training()
    _begin(kept, training)
    with pytest.raises(RuntimeError):
        call.look_before_abort()
    kept.release()
    assert kept.look(training.state)[0] is None


def test_other_writes_to_the_state_are_detected(kept: KeptTrainingState) -> None:
    """Weights that were changed outside of an optimizer, in the step or after the call, or other objects make the
    state inconsistent."""
    training = Training()
    _begin(kept, training)
    with torch.no_grad():
        next(training.model.parameters()).clamp_(-0.1, 0.1)
    kept.release()
    assert "outside of an optimizer" in kept.look(training.state)[1]
    _begin(kept, training)
    kept.release()
    next(training.model.parameters()).data[0, 0] += 1
    assert "something wrote to it" in kept.look(training.state)[1]
    _begin(kept, training)
    kept.release()
    assert "another object" in kept.look(Training().state)[1]
    assert not kept.is_used(Training().state)
    assert kept.is_used(training.state)


def test_buffers_are_restored(kept: KeptTrainingState) -> None:
    """Running statistics that a forward pass has changed are restored, and other ranks do not count as having the
    same values."""
    training = Training(norm=True)
    _begin(kept, training)
    before = training.weights()
    training.forward()
    assert not all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    kept.release()
    assert kept.look(training.state)[0] == 2
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    assert kept.has_changing_buffers


def test_a_released_state_is_not_referenced(kept: KeptTrainingState) -> None:
    """A script that does not keep its objects has them once in memory, not twice; the hooks are removed."""
    training = Training()
    _begin(kept, training)
    kept.release()
    assert not training.optimizer._optimizer_step_pre_hooks
    import gc
    import weakref

    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None


def test_rank_local_state_is_restored_exactly() -> None:
    """Random number generators of python, numpy and torch including buffered normal numbers, schedules, learning
    rates, tensors and plain values are restored."""
    training = Training()
    local_state = RankLocalState(training.state, {"optimizer": training.optimizer})
    for _ in range(3):
        training.step()
        data = local_state.take()
        rate, seen, ema = (
            training.optimizer.param_groups[0]["lr"],
            training.state["seen"],
            training.state["ema"].clone(),
        )
        betas = training.optimizer.param_groups[0]["betas"]
        expected = (
            random.gauss(0, 1),
            random.random(),
            np.random.random(),
            np.random.normal(),
            torch.randn(2).tolist(),
        )
        training.optimizer.param_groups[0]["lr"] = 7.0
        training.schedule.last_epoch = 99
        training.state["seen"] = "lost"
        training.state["ema"] += 5
        local_state.put_back(data)
        assert training.optimizer.param_groups[0]["lr"] == rate
        assert training.optimizer.param_groups[0]["betas"] == betas
        assert training.schedule.last_epoch == len(training.state["seen"])
        assert training.state["seen"] == seen
        assert torch.equal(training.state["ema"], ema)
        repeated = (
            random.gauss(0, 1),
            random.random(),
            np.random.random(),
            np.random.normal(),
            torch.randn(2).tolist(),
        )
        assert repeated == expected
        local_state.put_back(data)


def test_plain_containers_are_restored_in_place() -> None:
    """A script's reference to a plain dict or list of the state stays valid after a restore."""
    meta: dict[str, Any] = {"epoch": 1, "seen": [1, 2]}
    state = {"meta": meta, "history": [0.5]}
    own = RankLocalState(state, {})
    data = own.take()
    seen, history = meta["seen"], state["history"]
    meta["epoch"] = 2
    meta["seen"].append(3)
    state["history"].append(0.25)
    own.put_back(data)
    assert state["meta"] is meta
    assert meta["seen"] is seen
    assert state["history"] is history
    assert state == {"meta": {"epoch": 1, "seen": [1, 2]}, "history": [0.5]}


def test_the_shared_buffer_has_two_iterations_for_a_peer() -> None:
    """Another process reads the last two iterations by pid and descriptor; a partly written one is not returned."""
    page = SharedBuffer.create()
    other = SharedBuffer.open(os.getpid(), page.fd)
    assert other.iterations() == ()
    for iteration in range(3):
        page.write(iteration, bytes([iteration]) * 1000)
    assert other.iterations() == (1, 2)
    assert (other.read(2), other.read(1), other.read(0)) == (b"\2" * 1000, b"\1" * 1000, None)
    with mmap.mmap(page.fd, 0) as memory:
        memory[100] = 7  # a byte of the older iteration: the rank died during the write
    assert other.read(2) is None
    page.write(3, b"x" * CAPACITY_BYTES)
    assert other.iterations() == (3,)
    page.close()
    assert other.read(3) == b"x" * CAPACITY_BYTES
    other.close()
    other.close()


def test_a_resumed_rank_ends_with_identical_weights() -> None:
    """Training that is interrupted in a forward pass and resumed ends with the weights of undisturbed training."""
    undisturbed = Training()
    for _ in range(5):
        undisturbed.step()
    training, restore = Training(), Restore()
    assert restore.resume(training.state) is None
    restore.note(0)
    for number in range(3):
        training.step()
        restore.note(number + 1)
    training.forward().backward()
    restore.release()
    assert restore.resume(training.state) == 3
    assert restore.last is not None
    assert restore.last.sources == ("in_place",)
    for _ in range(2):
        training.step()
    assert all(torch.equal(a, b) for a, b in zip(undisturbed.weights(), training.weights(), strict=True))
    assert training.state["seen"] == undisturbed.state["seen"]
    restore.close()


def test_large_rank_local_state_is_not_kept(kept: KeptTrainingState) -> None:
    """Rank-local state beyond the capacity is not kept at each step, and the reason is reported."""
    training = Training()
    training.state["large"] = torch.zeros(CAPACITY_BYTES)
    _begin(kept, training)
    kept.release()
    assert f"{CAPACITY_BYTES} are kept" in kept.look(training.state)[1]
