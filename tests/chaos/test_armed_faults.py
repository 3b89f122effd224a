"""Armed faults are injected when and where the plan says, and the journal records them."""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.chaos import ArmedFaults, Fault, FaultPlan, SimulatedError, verify_fired
from outlast.chaos.armed import arm_here
from outlast.chaos.plan import claim_marker, marker_of, planned_faults
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.runtime.journal import Journal


def arm(
    run_dir: Path | None, *faults: Fault, rank: int = 0, cycle: int = 0, device: str = "cpu-0", node: str = "node-0"
) -> ArmedFaults:
    run = None if run_dir is None else str(run_dir)
    place = WorkerEnv(global_rank=rank, world_size=4, cycle=cycle, node=node, run_dir=run)
    journal = Journal(run_dir, run_id="run", job="job", node=node, proc=f"rank-{rank}-{cycle}")
    journal.cycle = cycle
    return arm_here(FaultPlan(faults=faults), place, journal, device=device)


def injections(run_dir: Path) -> list[dict[str, Any]]:
    events = [event for event in read(run_dir) if event.kind == EventKind.FAULT_SIMULATED]
    return [{"iteration": event.iteration, "rank": event.rank, **event.data} for event in events]


class Training:
    """Two linear layers whose weights are all 1 before any step."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(1.0)
        self.state = {"model": self.model, "steps": torch.ones(3)}

    def step(self, armed: ArmedFaults, iteration: int, num_attempts: int = 1) -> list[float]:
        """Do one step without an optimizer; return the losses that its attempts validated."""
        losses = []
        armed.before_step(iteration, self.state)
        for _ in range(num_attempts):
            self.model.zero_grad()
            loss = self.model(torch.ones(1, 2)).sum()
            loss.backward()
            losses.append(armed.on_loss(iteration, loss).item())
            armed.after_backward(iteration, self.state)
        armed.after_step(iteration + 1, self.state)
        return losses


@pytest.mark.parametrize("persistent", [False, True])
def test_loss_fault_is_injected_once_or_each_time(tmp_path: Path, persistent: bool) -> None:
    """A transient fault spares the re-run of the step and the next cycle; a persistent fault is injected in both."""
    fault = Fault(kind="nan", target="loss", rank=0, iteration=2, persistent=persistent)
    again = math.nan if persistent else 7.0
    for cycle in range(2):
        armed, training = arm(tmp_path, fault, cycle=cycle), Training()
        assert training.step(armed, 1) == [7.0]
        first = again if cycle else math.nan
        assert training.step(armed, 2, num_attempts=2) == pytest.approx([first, again], nan_ok=True)
        assert training.step(armed, 3) == [7.0]
        assert len(armed.fired) == (1 if cycle == 0 or persistent else 0), "a re-run adds no line to the journal"
    recorded = injections(tmp_path)
    assert len(recorded) == (2 if persistent else 1)
    assert (
        recorded[0].items() >= {"fault": "nan", "target": "loss", "element": 0, "before": 7.0, "after": "nan"}.items()
    )


def test_loss_fault_is_injected_into_a_float(tmp_path: Path) -> None:
    """A validated loss may be a float; the result is then a float too."""
    armed = arm(tmp_path, Fault(kind="sign_flip", target="loss", rank=0, iteration=0))
    assert armed.on_loss(0, 2.5) == -2.5
    assert armed.on_loss(0, 2.5) == 2.5


def test_loss_fault_keeps_the_gradients(tmp_path: Path) -> None:
    """A backward after the injection runs and yields the gradients of an undisturbed step."""
    armed = arm(tmp_path, Fault(kind="inf", target="loss", rank=0, iteration=0))
    weight = torch.ones(2, requires_grad=True)
    loss = armed.on_loss(0, weight.sum() * 3)
    loss.backward()
    assert loss.item() == math.inf
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]


def test_weight_fault_precedes_the_forward_and_persists(tmp_path: Path) -> None:
    """One element of the weight that the pattern matches is changed, and the loss of the same step shows it."""
    fault = Fault(kind="sign_flip", target="weight", tensor="model.1.b*", element=0, rank=0, iteration=1)
    armed, training = arm(tmp_path, fault), Training()
    assert [training.step(armed, iteration)[0] for iteration in range(3)] == [7.0, 5.0, 5.0]
    expected = {"tensor": "model.1.bias", "element": 0, "before": 1.0, "after": -1.0, "device": "cpu-0", "rank": 0}
    (recorded,) = injections(tmp_path)
    assert recorded.items() >= expected.items()
    assert [weight.tolist() for weight in training.model[0].parameters()] == [[[1, 1], [1, 1]], [1, 1]]


def test_without_a_pattern_any_state_tensor_is_drawn() -> None:
    """Over many seeds each parameter and plain tensor of the state is drawn; the journal has the fault's own name."""
    names = set()
    for number in range(40):
        fault = Fault(kind="bit_flip", target="weight", rank=0, iteration=0, name=f"number {number}")
        journal = Journal(None, run_id="run", job="job", node="node", proc="rank-0")
        armed = arm_here(FaultPlan(seed=number, faults=[fault]), WorkerEnv(), journal, device="cpu-0")
        armed.before_step(0, Training().state)
        (event,) = armed.fired
        names.add(event.details["tensor"])
        assert event.fault == f"number {number}"
    assert names == {"steps", "model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}


def test_gradient_fault_follows_the_backward(tmp_path: Path) -> None:
    """The parameters stay unchanged; a tensor without a gradient is never drawn."""
    armed, training = arm(tmp_path, Fault(kind="nan", target="gradient", rank=0, iteration=0)), Training()
    assert training.step(armed, 0) == [7.0]
    grads = torch.cat([weight.grad.flatten() for weight in training.model.parameters() if weight.grad is not None])
    assert grads.isnan().sum() == 1
    assert all((weight == 1).all() for weight in training.model.parameters())
    training.step(armed, 0)
    assert not any(weight.grad.isnan().any() for weight in training.model.parameters() if weight.grad is not None)


def test_activation_fault_is_injected_in_the_forward(tmp_path: Path) -> None:
    """Only the planned step is affected, its backward still runs, and no hook remains on the model."""
    fault = Fault(kind="sign_flip", target="activation", tensor="model.0", element=1, rank=0, iteration=1)
    armed, training = arm(tmp_path, fault), Training()
    before = pickle.dumps(training.model)
    assert [training.step(armed, iteration)[0] for iteration in range(3)] == [7.0, 1.0, 7.0]
    assert injections(tmp_path)[0].items() >= {"target": "activation", "tensor": "model.0", "before": 3.0}.items()
    assert pickle.dumps(training.model) == before


def test_model_has_no_hook_while_no_fault_is_due(tmp_path: Path) -> None:
    """Before the fault's step, on other ranks, and for other targets, the model has no added hook."""
    fault = Fault(kind="nan", target="activation", rank=0, iteration=5)
    for rank, iteration in [(0, 4), (0, 6), (1, 5)]:
        training = Training()
        before = pickle.dumps(training.model)
        arm(tmp_path, fault, rank=rank).before_step(iteration, training.state)
        assert pickle.dumps(training.model) == before


@pytest.mark.parametrize(
    "output",
    [
        lambda tensor: (None, tensor),
        lambda tensor: [torch.ones(2, dtype=torch.int64), tensor],
        lambda tensor: {"logits": tensor, "other": 3},
        lambda tensor: torch.return_types.max((tensor, torch.ones(2))),
    ],
    ids=["tuple", "list", "dict", "named"],
)
def test_activation_fault_keeps_the_output_structure(tmp_path: Path, output: Any) -> None:
    """The fault is injected into the first suitable tensor of a tuple, list or dict; the structure stays the same."""

    class Parts(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> Any:
            return output(value)

    parts = Parts()
    armed = arm(tmp_path, Fault(kind="nan", target="activation", rank=0, iteration=0))
    armed.before_step(0, {"model": parts})
    given = torch.ones(2)
    injected = parts(given)
    assert type(injected) is type(output(given))
    values = injected.values() if isinstance(injected, dict) else injected
    assert sum(torch.isnan(value).any().item() for value in values if isinstance(value, torch.Tensor)) == 1
    assert given.tolist() == [1, 1], "what the module was given is not changed"


def test_a_pattern_without_a_match_is_an_error(tmp_path: Path) -> None:
    """The message has the nearest existing name."""
    fault = Fault(kind="nan", target="weight", tensor="model.0.wieght", rank=0, iteration=0)
    with pytest.raises(ConfigError, match=r"did you mean 'model\.0\.weight'"):
        arm(tmp_path, fault).before_step(0, Training().state)


def test_device_fault_stays_with_the_device(tmp_path: Path) -> None:
    """The fault is injected in every cycle into whichever rank computes on that device, and into no rank elsewhere."""
    fault = Fault(kind="nan", target="loss", device="bad", iteration=1, persistent=True)
    where = [(0, "bad"), (0, "bad"), (0, "good"), (3, "bad")]
    for cycle, (rank, device) in enumerate(where):
        loss = arm(tmp_path, fault, rank=rank, cycle=cycle, device=device).on_loss(1, torch.ones(1))
        assert bool(loss.isnan().any()) == (device == "bad")
    assert [(strike["rank"], strike["device"]) for strike in injections(tmp_path)] == [
        (0, "bad"),
        (0, "bad"),
        (3, "bad"),
    ]


@pytest.mark.parametrize(
    ("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("sigterm", signal.SIGTERM)]
)
def test_signal_is_sent_once_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    """The signal arrives between two steps at the planned iteration, also where the run begins at it."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    for cycle in range(3):
        armed = arm(tmp_path, Fault(kind=kind, rank=0, iteration=2), cycle=cycle)
        for iteration in range(1 if cycle else 2, 5):
            armed.before_step(iteration, {})
            assert sent == ([number] if iteration >= 2 or cycle else [])
            armed.after_step(iteration + 1, {})
    assert [strike["target"] for strike in injections(tmp_path)] == ["rank 0"]


def test_exceptions_and_exits_are_raised(tmp_path: Path) -> None:
    """The script receives the exception, or exits with the planned code."""
    with pytest.raises(SimulatedError, match="rank 0 after iteration 0"):
        arm(tmp_path, Fault(kind="exception", rank=0, iteration=0)).before_step(0, {})
    with pytest.raises(SystemExit) as caught:
        arm(tmp_path, Fault(kind="exit", rank=0, iteration=1, exit_code=9)).after_step(1, {})
    assert caught.value.code == 9


def test_section_fault_is_injected_on_entry(tmp_path: Path) -> None:
    """Another section, the same section at another iteration, and the ends of the step are spared."""
    armed = arm(tmp_path, Fault(kind="exception", rank=0, iteration=2, section="checkpointing"))
    assert armed.sections == {"checkpointing"}
    for iteration in (1, 2):
        armed.after_step(iteration, {})
        armed.enter_section("step", iteration)
        if iteration == 1:
            armed.enter_section("checkpointing", iteration)
    with pytest.raises(SimulatedError):
        armed.enter_section("checkpointing", 2)
    armed.enter_section("checkpointing", 2)


@pytest.mark.parametrize("kind", ["sleep", "hold_gil"])
def test_a_held_gil_stops_other_threads_but_a_sleep_does_not(tmp_path: Path, kind: str) -> None:
    """While the GIL is held no other thread runs; during a sleep all threads run."""
    plan = FaultPlan(faults=[Fault(kind=kind, rank=0, iteration=0, duration_s=0.3)])
    turns, over = [0], threading.Event()
    before: list[int] = []
    armed = ArmedFaults(plan, run_dir=tmp_path, record=lambda _: before.append(turns[0]))

    def take_turns() -> None:
        while not over.wait(0.001):
            turns[0] += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        armed.before_step(0, {})
        taken = turns[0] - before[0]
    finally:
        over.set()
        thread.join()
    assert (taken > 5) == (kind == "sleep"), taken
    assert len(armed.fired) == 1


def test_slow_rank_fault_stretches_forwards_until_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its iteration on each forward lasts a multiple of its own time, also for timers that were started before the
    injection; a re-run of the plan in the next cycle has full speed."""
    slept: list[float] = []
    ended: list[int] = []
    monkeypatch.setattr("outlast.chaos.model_faults.time.sleep", slept.append)
    armed = arm(tmp_path, Fault(kind="slow", rank=0, iteration=1, factor=1e6))
    training = Training()
    training.model.register_forward_hook(lambda *_: ended.append(len(slept)))
    for iteration in range(3):
        training.step(armed, iteration)
    assert len(slept) == 2
    assert all(seconds > 0 for seconds in slept)
    assert ended == [0, 1, 2]
    armed.close()
    training.step(armed, 3)
    training.step(arm(tmp_path, Fault(kind="slow", rank=0, iteration=1, factor=1e6), cycle=1), 1)
    assert len(slept) == 2
    assert [(strike["fault"], strike["iteration"]) for strike in injections(tmp_path)] == [("slow", 1)]


def test_slow_rank_fault_ends_after_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After duration_s the forwards have their former speed, though the fault is still armed."""
    slept: list[float] = []
    monkeypatch.setattr("outlast.chaos.model_faults.time.sleep", slept.append)
    armed = arm(tmp_path, Fault(kind="slow", rank=0, iteration=0, factor=3, duration_s=1e-9))
    Training().step(armed, 0)
    assert slept == []
    assert len(armed.fired) == 1


@pytest.mark.parametrize("moment", [{"at_s": 3.0}, {"on_request": True}])
def test_a_waiting_fault_is_injected_after_its_release(tmp_path: Path, moment: dict[str, Any]) -> None:
    """The fault is injected in the first step after its release, once per run."""
    fault = Fault(kind="nan", target="loss", rank=0, **moment)
    (planned,) = planned_faults(FaultPlan(faults=[fault]))
    armed, training = arm(tmp_path, fault), Training()
    assert training.step(armed, 4) == [7.0]
    assert claim_marker(marker_of(tmp_path, planned.fault_id, due=True))
    assert math.isnan(training.step(armed, 5)[0])
    assert training.step(armed, 6) == [7.0]
    assert Training().step(arm(tmp_path, fault, cycle=1), 0) == [7.0]
    assert [strike["iteration"] for strike in injections(tmp_path)] == [5]


def test_rate_injects_each_drawn_iteration_once_per_run(tmp_path: Path) -> None:
    """Of all ranks one is affected at each drawn iteration; a second pass over the same iterations is clean."""
    plan = FaultPlan(faults=[Fault(kind="nan", target="loss", rate=0.2)])
    for cycle in range(2):
        for rank in range(4):
            armed = arm(tmp_path, *plan.faults, rank=rank, cycle=cycle)
            for iteration in range(40):
                armed.before_step(iteration, {})
                armed.on_loss(iteration, 1.0)
                armed.after_step(iteration + 1, {})
    injected = [strike["iteration"] for strike in injections(tmp_path)]
    assert len(injected) == len(set(injected)) > 2
    assert len({strike["rank"] for strike in injections(tmp_path)}) > 1
    assert verify_fired(plan, tmp_path) == []


def test_without_a_run_directory_only_the_first_cycle_is_hit() -> None:
    """Without a run directory a transient fault is never injected after a restart; a persistent fault is."""
    transient = Fault(kind="nan", target="loss", rank=0, iteration=0)
    persistent = Fault(kind="nan", target="loss", rank=0, iteration=0, persistent=True)
    for fault, cycle, is_injected in [(transient, 0, True), (transient, 1, False), (persistent, 1, True)]:
        assert math.isnan(arm(None, fault, cycle=cycle).on_loss(0, 1.0)) == is_injected


def test_a_missing_rank_is_rejected(tmp_path: Path) -> None:
    """The error names the fault and the last rank; a rank that a later, smaller world lacks is not an error."""
    fault = Fault(kind="kill", rank=4, iteration=0)
    with pytest.raises(ConfigError, match=r"faults\[0\]: rank=4 does not exist, ranks end at 3"):
        arm(tmp_path, fault)
    arm(tmp_path, fault, cycle=1)


def test_a_fault_that_was_not_injected_is_reported(tmp_path: Path) -> None:
    """Planned faults without a journal event are listed, with the iteration that the run reached."""
    faults = [
        Fault(kind="nan", target="loss", rank=0, iteration=1),
        Fault(kind="kill", node="elsewhere", iteration=1),
        Fault(kind="nan", target="activation", rank=0, iteration=90),
        Fault(kind="inf", target="loss", rate=1e-9),
    ]
    training, armed = Training(), arm(tmp_path, *faults)
    for iteration in range(3):
        training.step(armed, iteration)
    missing = verify_fired(FaultPlan(faults=faults), tmp_path)
    assert [entry.index for entry in missing] == [1, 2, 3]
    assert missing[1].describe() == (
        "faults[2] was not injected: nan in the activation on rank 0 at iteration 90; the run reached 1"
    )


def test_close_removes_hooks_and_disarms_faults(tmp_path: Path) -> None:
    """After close() no fault is injected, and the model has no hooks."""
    training = Training()
    armed = arm(tmp_path, Fault(kind="nan", target="activation", rank=0, iteration=0, persistent=True))
    armed.before_step(0, training.state)
    armed.close()
    assert training.step(armed, 0) == [7.0]
    assert armed.fired == ()
