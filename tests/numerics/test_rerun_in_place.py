"""A step with an invalid result is run again from the same state, and its first run changes no weight."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rerun_training import Training, assert_same

from outlast.config import RerunStateMachineConfig
from outlast.errors import NotFinite, OutlastError
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.numerics import ReplayableIterator, RerunStateMachine
from outlast.policy.rerun import Finding
from outlast.runtime.journal import Journal

NUM_STEPS = 8


def nan_at(bad: int, *, runs: tuple[int, ...] = (1,)):
    """Return a function that makes the loss NaN, gradients included, in these runs of one step."""

    def disturb(iteration: int, run: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * math.nan if iteration == bad and run in runs else loss

    return disturb


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_transient_nan_does_not_change_training(bad: int) -> None:
    """After a NaN in one run, including the first step's, the result of training equals that of the undisturbed run."""
    undisturbed = Training().steps(NUM_STEPS)
    nan_run = Training(disturb=nan_at(bad)).steps(NUM_STEPS)
    assert nan_run.machine.state_dict()["found"][Finding.TRANSIENT] == 1
    assert_same(undisturbed, nan_run)


def test_first_step_after_a_load_is_rerun() -> None:
    """A NaN in the first step after a checkpoint was loaded is run again like any other."""
    saved = Training().steps(3).save()
    undisturbed = Training().load(saved).steps(4)
    nan_run = Training(disturb=nan_at(3)).load(saved).steps(4)
    assert nan_run.machine.state_dict()["found"][Finding.TRANSIENT] == 1
    assert_same(undisturbed, nan_run)


def test_machine_does_not_change_training() -> None:
    """Training with and without the machine gives the same weights."""
    assert_same(Training().steps(5), Training(RerunStateMachineConfig(rerun_mode="disabled")).steps(5))


def test_reproduced_result_exits_16_with_a_save() -> None:
    """A reproduced NaN ends the process with 16 and a save of the state before the step, including its batches."""
    undisturbed = Training().steps(5)
    nan_run = Training(disturb=nan_at(5, runs=(1, 2))).steps(5)
    decision = nan_run.step()
    assert (decision.exit_code, decision.must_save) == (16, True)
    diagnosis = decision.diagnosis
    assert diagnosis is not None
    assert (diagnosis.finding, diagnosis.rank, diagnosis.iteration) == (Finding.REPRODUCED, 0, 5)
    assert (diagnosis.node, diagnosis.device) == ("n", "first/cpu-0")
    assert (diagnosis.call, diagnosis.what, diagnosis.first, diagnosis.second) == (0, "loss", "nan", "nan")
    assert nan_run.machine.state_dict()["step"]["iteration"] == 5
    assert_same(undisturbed, nan_run)
    with pytest.raises(OutlastError, match="exit code 16; no step follows"):
        nan_run.step()


def test_differing_invalid_result_is_not_trained_on() -> None:
    """NaN, then infinity: the result was not reproduced, but training does not continue with it."""

    def disturb(iteration: int, run: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * (math.nan if run == 1 else math.inf) if iteration == 2 else loss

    training = Training(disturb=disturb).steps(2)
    decision = training.step()
    assert (decision.exit_code, decision.must_save) == (16, True)
    assert decision.diagnosis is not None
    assert decision.diagnosis.finding is Finding.UNDECIDED
    assert (decision.diagnosis.first, decision.diagnosis.second) == ("nan", "inf")


def test_rejection_in_the_second_run_only_is_not_trained_on() -> None:
    """Training does not continue with a result that only the second run rejects."""

    def disturb(iteration: int, run: int, loss: torch.Tensor) -> torch.Tensor:
        return loss

    training = Training(disturb=disturb)
    machine = training.machine
    machine.begin_step(0)
    values = iter([(math.nan, 1.0), (1.0, math.nan)])
    while machine.should_run():
        for value in next(values):
            machine.validate(value)
    assert machine.decision.exit_code == 16
    assert machine.decision.diagnosis is not None
    assert machine.decision.diagnosis.finding is Finding.UNDECIDED
    assert machine.decision.diagnosis.call == 1


def test_unreached_validation_is_undecided() -> None:
    """A second run that does not reach the validation neither reproduces nor clears the result."""
    machine = Training().machine
    machine.begin_step(0)
    num_validations = iter([2, 1])
    while machine.should_run():
        for call in range(next(num_validations)):
            machine.validate(math.nan if call == 1 else 1.0, f"value {call}")
    assert machine.decision.exit_code == 16
    diagnosis = machine.decision.diagnosis
    assert diagnosis is not None
    assert (diagnosis.finding, diagnosis.call, diagnosis.second) == (Finding.UNREACHED, 1, None)
    assert "did not reach this validation" in diagnosis.describe()


def test_another_name_is_another_validation() -> None:
    """A value with another name in the second run is no evidence about the first one."""
    machine = Training().machine
    machine.begin_step(0)
    names = iter(["loss", "norm"])
    while machine.should_run():
        name = next(names)
        machine.validate(math.nan if name == "loss" else 1.0, name)
    assert machine.decision.diagnosis is not None
    assert machine.decision.diagnosis.finding is Finding.UNREACHED


def test_tolerance_decides_what_is_reproduced() -> None:
    """Within the tolerance a rejected result is reproduced, even if it is accepted now; beyond it, it is not."""
    for tolerance, code in ((0.1, 16), (0.01, None)):
        machine = Training().machine
        machine.begin_step(0)
        values = iter([100.0, 95.0])
        while machine.should_run():
            value = next(values)
            machine.validate(value, "norm", rejects=lambda norm: norm > 99, message="too large", tolerance=tolerance)
        assert machine.decision.exit_code == code


def test_script_may_reject_results_itself() -> None:
    """A test of the script rejects a value, and its message is in the diagnosis."""
    machine = Training().machine
    machine.begin_step(0)
    while machine.should_run():
        machine.validate(torch.tensor([3.5]), "norm", rejects=lambda norm: norm > 3, message="above 3")
    assert machine.decision.diagnosis is not None
    assert (
        "norm of rank 0 on node n (device first/cpu-0) at iteration 0, validation 0, was 3.5 (above 3), then 3.5"
        in (machine.decision.diagnosis.describe())
    )


def test_tensor_with_many_elements_is_rejected() -> None:
    """A tensor with many elements is not a valid result; the message states what to do."""
    machine = Training().machine
    machine.begin_step(0)
    assert machine.should_run()
    with pytest.raises(ValueError, match="loss has 3 elements; validate one number, such as its mean"):
        machine.validate(torch.ones(3))


def test_reproduced_spike_is_trained_on() -> None:
    """Training continues with a reproduced spike and logs it; a spike that is not reproduced was transient."""
    config = RerunStateMachineConfig(check_for_spiky_loss=True, spike_warmup=3, spike_window=5)
    machine = RerunStateMachine(config)
    values = [[1.0], [2.0], [1.5], [19.9], [300.0, 300.0], [1.0], [4000.0, 1.0], [2000.0]]
    for iteration, runs in enumerate(values):
        machine.begin_step(iteration)
        run = iter(runs)
        while machine.should_run():
            machine.validate(next(run))
        assert next(run, None) is None, f"iteration {iteration} was run too few times"
        assert machine.decision.exit_code is None
    assert machine.state_dict()["found"][Finding.REPRODUCED] == 1
    assert machine.state_dict()["found"][Finding.TRANSIENT] == 1


def test_finding_is_written_to_the_journal(tmp_path: Path) -> None:
    """A transient fault is an incident at the lowest recovery level, with values, device and iteration."""
    journal = Journal(tmp_path, run_id="r", job="j", node="n", proc="rank-0")
    Training(disturb=nan_at(2), journal=journal).steps(4)
    journal.close()
    (event,) = [event for event in read(tmp_path) if event.kind is EventKind.INCIDENT]
    assert event.iteration == 2
    assert event.data["verdict"]["rung"] == 0
    assert event.data["incident"]["kind"] == "invalid_result"
    diagnosis = event.data["incident"]["evidence"]["diagnosis"]
    assert (diagnosis["finding"], diagnosis["first"]) == ("transient", "nan")
    assert math.isfinite(diagnosis["second"])
    json.dumps(event.data, allow_nan=False)


def test_rejection_log_line_contains_all_facts(caplog: pytest.LogCaptureFixture) -> None:
    """The line about a rejected result contains rank, node, device, iteration and value."""
    Training(disturb=nan_at(1)).steps(2)
    assert "rank 0 on node n (device first/cpu-0), iteration 1, validation 0: loss is nan" in caplog.text
    assert "then 0." in caplog.text or "then 1" in caplog.text
    assert "a transient fault" in caplog.text


def test_data_that_cannot_be_rewound_are_rejected() -> None:
    """An iterator that is not wrapped is a TypeError that states how to wrap it."""
    machine = Training().machine
    with pytest.raises(TypeError, match="ReplayableIterator"):
        machine.begin_step(0, iter([1]))  # type: ignore[arg-type]


def test_batch_changed_by_the_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A step that writes into its batch cannot be repeated exactly, and the log reports that."""
    machine = Training().machine
    batches = machine.replayable([{"x": torch.ones(2)}])
    machine.begin_step(0, batches)
    while machine.should_run():
        batch = next(batches)
        batch["x"].mul_(2)
        machine.validate(math.nan)
    assert "changes its batch in place" in caplog.text


class Reference:
    """A loop as written for Megatron's machine."""

    def __init__(self, config: RerunStateMachineConfig | None = None) -> None:
        self.machine = RerunStateMachine(config)
        self.data = [ReplayableIterator(iter(range(100))), None]

    def step(self, *losses: float, **arguments: object) -> tuple[list[int], tuple[bool, bool, int]]:
        values, seen = iter(losses), []
        while self.machine.should_run_forward_backward(self.data):
            seen.append(next(self.data[0]))
            loss = torch.tensor(next(values))
            self.machine.validate_result(loss, torch.isnan, "loss is NaN", **arguments)
        assert next(values, None) is None
        return seen, self.machine.should_checkpoint_and_exit()


def test_megatron_loop_works_unchanged() -> None:
    """With Megatron's names and order of calls, the step is run again with the same batch, then exits 16 with a save if
    reproduced."""
    loop = Reference()
    assert loop.step(1.0) == ([0], (False, False, 0))
    assert loop.step(math.nan, 2.0) == ([1, 1], (False, False, 0))
    assert loop.machine.iteration == 1
    assert loop.step(math.nan, math.nan) == ([2, 2], (True, True, 16))


def test_nonfatal_validation_continues_training() -> None:
    """fatal=False: a reproduced result is taken as correct."""
    loop = Reference()
    assert loop.step(math.nan, math.nan, fatal=False) == ([0, 0], (False, False, 0))
    assert loop.machine.state_dict()["found"][Finding.REPRODUCED] == 1


def test_results_of_any_form_can_be_compared() -> None:
    """With the script's own comparison a result may be anything, and its tolerance applies."""
    machine = RerunStateMachine()
    results = iter([torch.tensor([1.0, math.inf]), torch.tensor([1.2, math.inf])])
    while machine.should_run_forward_backward():
        machine.validate_result(
            next(results),
            lambda result: result.isinf().any(),
            "infinite",
            comparison_func=lambda a, b: float((a[0] - b[0]).abs()),
            tolerance=0.5,
        )
    assert machine.should_checkpoint_and_exit() == (True, True, 16)
    assert machine.decision.diagnosis is not None
    assert machine.decision.diagnosis.finding is Finding.REPRODUCED


def test_disabled_machine_runs_every_step_once() -> None:
    """Disabled: one run of each step, and an invalid result raises before a weight changes, as in Megatron."""
    loop = Reference(RerunStateMachineConfig(rerun_mode="disabled"))
    assert loop.step(1.0) == ([0], (False, False, 0))
    with pytest.raises(NotFinite, match=r"of iteration 1 is nan on rank 0 .* rerun_mode='disabled' runs no step again"):
        loop.step(math.nan)


def test_disabled_machine_that_accepts_nan_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """With check_for_nan_in_loss off training continues with NaN, and the first one is logged."""
    off = RerunStateMachineConfig(rerun_mode="disabled", check_for_nan_in_loss=False)
    trained = Training(off, disturb=nan_at(2)).steps(5)
    assert not all(torch.isfinite(weight).all() for weight in trained.model.parameters())
    assert caplog.text.count("loss is nan on rank 0 at iteration 2") == 1
    assert caplog.text.count("training continues with it") == 1
