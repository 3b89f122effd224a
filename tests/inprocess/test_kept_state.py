"""Whether what a rank keeps of its training state is whole, and what is put back of it."""

from __future__ import annotations

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
    """A small model with everything around it."""

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


def test_between_steps_and_before_the_update_it_is_whole(kept: KeptTrainingState) -> None:
    """Left in the forward or backward pass, the state is that of the steps done."""
    training = Training()
    _begin(kept, training)
    training.forward().backward()
    kept.release()
    assert kept.look(training.state)[0] == 2


def test_an_update_that_began_tears_it(kept: KeptTrainingState) -> None:
    """Left within an optimizer's step or after it, before the body's end, nothing is whole."""
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
    """Stands for a CUDA event, which this needs a GPU for."""

    device = torch.device("cpu")

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)

    def query(self) -> bool:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@pytest.mark.parametrize(("mark", "expected"), [(Mark(False), None), (Mark(False, False, True), 2), (None, 2)])
def test_what_a_device_has_not_computed_is_not_whole(
    kept: KeptTrainingState, monkeypatch: pytest.MonkeyPatch, mark: Mark | None, expected: int | None
) -> None:
    """Steps are counted when they are given to the device; behind an aborted collective it computes garbage."""
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


def test_what_a_device_that_failed_has_computed_is_not_whole(
    kept: KeptTrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that cannot be asked any more is trusted with nothing."""
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


def test_what_else_writes_is_noticed(kept: KeptTrainingState) -> None:
    """Weights changed outside of an optimizer, in the step or after the call, or other objects: not whole."""
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


def test_buffers_become_what_they_were(kept: KeptTrainingState) -> None:
    """A forward pass has moved running statistics: they are put back, and no other rank counts as having the same."""
    training = Training(norm=True)
    _begin(kept, training)
    before = training.weights()
    training.forward()
    assert not all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    kept.release()
    assert kept.look(training.state)[0] == 2
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    assert kept.has_changing_buffers


def test_nothing_of_a_released_state_is_held(kept: KeptTrainingState) -> None:
    """Who does not keep his objects has them once, not twice; hooks are gone."""
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


def test_own_things_come_back_exactly() -> None:
    """Random numbers of python, numpy and torch, half-used pairs of normal numbers included, schedules, learning rates,
    tensors and plain values."""
    training = Training()
    things = RankLocalState(training.state, {"optimizer": training.optimizer})
    for _ in range(3):
        training.step()
        data = things.take()
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
        things.put_back(data)
        assert training.optimizer.param_groups[0]["lr"] == rate
        assert training.optimizer.param_groups[0]["betas"] == betas
        assert training.schedule.last_epoch == len(training.state["seen"])
        assert training.state["seen"] == seen
        assert torch.equal(training.state["ema"], ema)
        again = (random.gauss(0, 1), random.random(), np.random.random(), np.random.normal(), torch.randn(2).tolist())
        assert again == expected
        things.put_back(data)


def test_plain_containers_are_filled_in_place() -> None:
    """A reference of the script to a plain dict or list of the state stays valid when a copy is put back."""
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


def test_the_page_holds_two_iterations_for_a_neighbour() -> None:
    """Another process reads them by pid and descriptor; one that is being written is not there."""
    page = SharedBuffer.create()
    other = SharedBuffer.open(os.getpid(), page.fd)
    assert other.iterations() == ()
    for iteration in range(3):
        page.write(iteration, bytes([iteration]) * 1000)
    assert other.iterations() == (1, 2)
    assert (other.read(2), other.read(1), other.read(0)) == (b"\2" * 1000, b"\1" * 1000, None)
    page._map[100] = 7  # a byte of the older one: the rank died while it wrote
    assert other.read(2) is None
    page.write(3, b"x" * CAPACITY_BYTES)
    assert other.iterations() == (3,)
    page.close()
    assert other.read(3) == b"x" * CAPACITY_BYTES
    other.close()
    other.close()


def test_one_rank_goes_on_and_ends_with_the_same_bits() -> None:
    """Interrupted in a forward pass and resumed, training ends as if nothing had happened."""
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


def test_too_much_beside_the_model_is_not_kept(kept: KeptTrainingState) -> None:
    """What would make every step expensive is left to the checkpoint, and the reason says so."""
    training = Training()
    training.state["large"] = torch.zeros(CAPACITY_BYTES)
    _begin(kept, training)
    kept.release()
    assert f"{CAPACITY_BYTES} are kept" in kept.look(training.state)[1]
