"""After a restart the saved step is replayed with its own batches, and judged by its device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rerun_training import Disturb, Training, assert_same, undisturbed

from outlast.config import RerunStateMachineConfig
from outlast.errors import OutlastError
from outlast.numerics import ReplayableIterator, RerunStateMachine
from outlast.numerics.rerun_machine import RerunMachine
from outlast.policy.rerun import Diagnosis, Finding, Replay
from outlast.runtime.diagnoses import read_diagnosis

BAD = 3


def always_nan(iteration: int, run: int, loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan if iteration == BAD else loss


def save_of_a_reproduced_nan(**arguments: Any) -> tuple[dict[str, Any], Diagnosis]:
    """Train up to a reproduced NaN; return the diagnostic save and the diagnosis."""
    training = Training(disturb=always_nan, **arguments).steps(BAD)
    decision = training.step()
    assert decision.must_save
    assert decision.diagnosis is not None
    return training.save(), decision.diagnosis


def replay_of(diagnosis: Diagnosis, **changes: Any) -> Replay:
    """Return the replay that the launcher derives from a diagnosis."""
    facts = {
        name: getattr(diagnosis, name) for name in ("iteration", "device", "node", "rank", "call", "what", "first")
    }
    return Replay(**{**facts, "tries": diagnosis.tries, **changes})


@pytest.mark.parametrize(
    ("disturb", "finding"), [(always_nan, Finding.CORRECT), (undisturbed, Finding.PERSISTENT)], ids=["bad", "good"]
)
def test_replay_on_another_device_exits_17(disturb: Disturb, finding: Finding) -> None:
    """Invalid there too: the result is correct; valid there: the first device is at fault. Both exit with 17, and no
    weight changes."""
    saved, diagnosis = save_of_a_reproduced_nan()
    training = Training(disturb=disturb, device="second").load(saved, replay_of(diagnosis))
    decision = training.step()
    assert (decision.exit_code, decision.must_save) == (17, False)
    judged = decision.diagnosis
    assert judged is not None
    assert judged.finding is finding
    assert (judged.device, judged.replayed_on, judged.tries) == ("first/cpu-0", "second/cpu-0", 0)
    assert (judged.iteration, judged.first) == (BAD, "nan")
    assert judged.batch == diagnosis.batch
    for name, value in saved["model"].items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(training.model.state_dict()[name], value)


@pytest.mark.parametrize(("tries", "code"), [(0, 16), (1, 17), (5, 17)])
def test_replays_on_the_same_device_are_bounded(tries: int, code: int) -> None:
    """Reproduced on the same device: 16, and 17 with the last permitted try."""
    saved, diagnosis = save_of_a_reproduced_nan()
    decision = Training(disturb=always_nan).load(saved, replay_of(diagnosis, tries=tries)).step()
    assert (decision.exit_code, decision.must_save) == (code, False)
    assert decision.diagnosis is not None
    assert decision.diagnosis.finding is Finding.REPRODUCED
    assert decision.diagnosis.tries == tries + 1


def test_valid_replay_continues_bit_identically() -> None:
    """Valid on the same device now: the replayed step counts, and training is bit-identical to the undisturbed one."""
    reference = Training().steps(BAD + 3)
    saved, diagnosis = save_of_a_reproduced_nan()
    training = Training().load(saved, replay_of(diagnosis)).steps(3)
    assert training.machine.state_dict()["found"][Finding.TRANSIENT] == 1
    assert_same(reference, training)


def test_replay_uses_the_saved_batches() -> None:
    """The step gets the batches of the save, whatever the loader would give, and later steps the loader's next ones."""
    for behind in (False, True):
        machine, replay = _machine_after_a_reproduced_nan()
        state = machine.state_dict()
        follow = RerunStateMachine()
        follow.load_state_dict(state)
        follow.begin_replay(replay)
        source = iter([torch.tensor([float(n)]) for n in range(6 if behind else 4, 20)])
        data = follow.replayable(source)
        seen = []
        for iteration in (2, 3):
            follow.begin_step(iteration, data)
            while follow.should_run():
                for _ in range(2):
                    seen.append(float(next(data)))
                    follow.validate(1.0)
        assert seen == [4.0, 5.0, 6.0, 7.0]


def _machine_after_a_reproduced_nan() -> tuple[RerunStateMachine, Replay]:
    machine = RerunStateMachine()
    data = machine.replayable([torch.tensor([float(n)]) for n in range(20)])
    for iteration in range(3):
        machine.begin_step(iteration, data)
        while machine.should_run():
            for _ in range(2):
                next(data)
                machine.validate(math.nan if iteration == 2 else 1.0)
    diagnosis = machine.decision.diagnosis
    assert diagnosis is not None
    return machine, replay_of(diagnosis)


def test_batches_that_cannot_be_stored_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A batch with a foreign object is not pickled: the log contains its place and type, and no result is cleared
    later."""

    class Odd:
        pass

    machine = RerunStateMachine()
    data = ReplayableIterator([{"x": torch.ones(2), "meta": [Odd()]}])
    machine.begin_step(0, data)
    while machine.should_run():
        next(data)
        machine.validate(math.nan)
    assert "meta.0 of type Odd" in caplog.text
    state = machine.state_dict()
    assert state["step"]["batches"] is None
    assert machine.decision.diagnosis is not None
    follow = RerunStateMachine()
    follow.load_state_dict(state)
    follow.begin_replay(replay_of(machine.decision.diagnosis))
    follow.begin_step(0, ReplayableIterator([{"x": torch.ones(2)}]))
    while follow.should_run():
        follow.validate(1.0)
    assert follow.decision.exit_code == 16
    assert follow.decision.diagnosis is not None
    assert follow.decision.diagnosis.finding is Finding.UNREACHED


def test_replay_needs_only_the_launchers_facts() -> None:
    """Without the machine's saved facts, as after a load of another script state, the launcher's are compared with the
    result."""
    machine = RerunStateMachine()
    machine.begin_replay(Replay(iteration=4, device="elsewhere", rank=0, call=0, what="loss", first="nan"))
    machine.begin_step(4)
    while machine.should_run():
        machine.validate(math.nan)
    assert machine.decision.exit_code == 17
    assert machine.decision.diagnosis is not None
    assert machine.decision.diagnosis.finding is Finding.CORRECT


@pytest.mark.parametrize(("drawn", "finding"), [(2.0, Finding.PERSISTENT), (3.0, Finding.UNREACHED)])
def test_same_batch_decides_without_the_save(drawn: float, finding: Finding) -> None:
    """If training reaches the step again from an older checkpoint with the rejected batch, a valid result clears it;
    with another batch nothing is cleared."""
    machine = RerunStateMachine()
    data = ReplayableIterator([torch.tensor([2.0])])
    machine.begin_step(4, data)
    while machine.should_run():
        next(data)
        machine.validate(math.nan)
    assert machine.decision.diagnosis is not None
    follow = RerunStateMachine()
    follow.begin_replay(
        replay_of(machine.decision.diagnosis, device="elsewhere", batch=machine.decision.diagnosis.batch)
    )
    data = ReplayableIterator([torch.tensor([drawn])])
    follow.begin_step(4, data)
    while follow.should_run():
        next(data)
        follow.validate(1.0)
    assert follow.decision.diagnosis is not None
    assert (follow.decision.exit_code, follow.decision.diagnosis.finding) == (17, finding)


@pytest.mark.parametrize(("value", "code"), [(math.nan, 17), (1.0, 0)])
def test_megatron_loop_replays_a_diagnostic_save(value: float, code: int) -> None:
    """A loop that loads a diagnostic save replays its step first, once: a reproduced result exits, a valid one
    continues."""
    machine, _ = _machine_after_a_reproduced_nan()
    follow = RerunStateMachine()
    follow.load_state_dict(machine.state_dict())
    data = ReplayableIterator([torch.tensor([float(n)]) for n in range(6, 20)])
    seen = []
    while follow.should_run_forward_backward(data):
        for _ in range(2):
            seen.append(float(next(data)))
            follow.validate(value)
    assert (seen, follow.iteration) == ([4.0, 5.0], 2)
    assert follow.should_checkpoint_and_exit() == (False, code != 0, code)
    if code == 0:
        while follow.should_run_forward_backward(data):
            follow.validate(1.0)
        assert follow.iteration == 3


def test_replay_without_a_save_is_an_error() -> None:
    """A replay request with nothing loaded is an error that states what to do."""
    with pytest.raises(OutlastError, match="load the state of a diagnostic save first"):
        RerunStateMachine().begin_replay()


def test_replay_of_another_step_is_rejected() -> None:
    """A step of another iteration than the save's is rejected with the action to take."""
    machine = RerunStateMachine()
    machine.begin_replay(Replay(iteration=4, device="d", rank=0))
    with pytest.raises(OutlastError, match="iteration 4 is to be replayed, but the step is that of 3"):
        machine.begin_step(3)


def test_idle_state_changes_numbers_only() -> None:
    """Without an incident the state has no tensors, the same keys, and None in place of a step."""
    training = Training()
    before = training.machine.state_dict()
    after = training.steps(3).machine.state_dict()
    assert before.keys() == after.keys()
    assert before["step"] is after["step"] is None
    assert before["found"].keys() == after["found"].keys()


def test_state_survives_a_checkpoint() -> None:
    """A step's facts are plain values and tensors only, so a checkpoint needs no pickling for them."""
    from outlast.checkpoint.state import decode, flatten

    saved, diagnosis = save_of_a_reproduced_nan()
    flattened = flatten(saved["machine"])
    assert b'"o"' not in flattened.tree
    tensors = {named.name: named.tensor for named in flattened.tensors}
    machine = decode(flattened.tree, tensors.__getitem__)
    decision = Training(disturb=always_nan, device="x").load({**saved, "machine": machine}, replay_of(diagnosis)).step()
    assert decision.diagnosis is not None
    assert decision.diagnosis.finding is Finding.CORRECT
    assert decision.diagnosis.batch == diagnosis.batch


def test_spike_threshold_survives_a_checkpoint() -> None:
    """The largest recent value survives a checkpoint."""
    config = RerunStateMachineConfig(check_for_spiky_loss=True, spike_warmup=2, spike_window=4)
    first = RerunStateMachine(config)
    for iteration in range(3):
        first.begin_step(iteration)
        while first.should_run():
            first.validate(2.0)
    second = RerunStateMachine(config)
    second.load_state_dict(first.state_dict())
    second.begin_step(3)
    runs = 0
    while second.should_run():
        runs += 1
        second.validate(20.0)
    assert runs == 2


def test_diagnosis_is_written_for_the_agent(tmp_path: Path) -> None:
    """With a run directory, the diagnosis is stored where the node's agent reads it."""
    from outlast.env import WorkerEnv

    place = WorkerEnv(run_dir=str(tmp_path), job="j", cycle=4, node="n")
    machine = RerunMachine(place)
    machine.begin_step(7)
    while machine.should_run():
        machine.validate(math.inf)
    assert read_diagnosis(tmp_path, "j", 4, 0) == machine.decision.diagnosis
