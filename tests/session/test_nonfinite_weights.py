"""A run does not finish with weights that are NaN or infinite, whatever the validation of results accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

from outlast.checkpoint.catalogue.listing import look_into
from outlast.errors import ExitReason

SCRIPT = """
import math, sys
import numpy as np
import torch
import outlast

folder, how = sys.argv[1:]
NAN_LOSS = ("plain", "unjudged", "disabled", "break")
rerun = {
    "unjudged": outlast.RerunStateMachineConfig(check_for_nan_in_loss=False),
    "disabled": outlast.RerunStateMachineConfig(rerun_mode="disabled"),
}.get(how)
saves = outlast.CheckpointConfig(directory=folder + "/checkpoints", save_interval=5)
run = outlast.init(outlast.Config(checkpoint=saves, run_dir=folder + "/run", rerun_state_machine=rerun))


class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("norm", torch.zeros(2))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
class Average:
    def __init__(self):
        self.average = model.weight.detach().clone()

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


average, history = Average(), torch.full((12,), math.nan)
plain = {"best": torch.tensor(math.inf), "nested": [torch.zeros(2), torch.zeros(2)], "record": np.zeros(2)}
state = {"model": model, "optimizer": optimizer, "average": average, "plain": plain, "history": history}
for iteration in run.steps(state, total=12):
    plain["record"][0] = math.nan  # a metric that has no value
    spoilt = {"list": plain["nested"][1], "buffer": model.norm, "object": average.average}
    spoilt["moment"] = optimizer.state.get(model.weight, {}).get("momentum_buffer")
    if how in spoilt and iteration == 11 and run.global_rank == 1:
        spoilt[how].view(-1)[1] = math.nan
        continue
    if how == "break" and iteration == 10:
        break
    bad = math.nan if iteration >= 8 and run.global_rank == 1 and how in NAN_LOSS else 1.0
    if how not in ("unjudged", "disabled"):
        loss = model(torch.ones(1, 2)).sum() * bad
        loss.backward()
    else:
        for attempt in run.attempts():
            loss = model(torch.ones(1, 2)).sum() * bad
            loss.backward()
            attempt.validate(loss)
    optimizer.step()
    optimizer.zero_grad()
run.close()
print("finished", flush=True)
"""


def train(folder: Path, case: str) -> tuple[list[int], str]:
    """Train on two ranks; return the exit codes and the outputs."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(folder), case, world_size=2) as ranks:
        codes, outputs = ranks.end()
    return codes, "\n".join(outputs)


@pytest.mark.process
def test_a_mask_of_infinities_is_accepted(tmp_path: Path) -> None:
    """A buffer that is infinite from the start, a tensor that has NaN before training, and a NumPy array are
    accepted: the run finishes without a message about the buffer."""
    codes, output = train(tmp_path, "sound")
    assert codes == [0, 0], output
    assert "mask" not in output
    assert "that are NaN or infinite" not in output


@pytest.mark.process
@pytest.mark.parametrize("case", ["plain", "unjudged"])
def test_nan_weights_at_the_end_fail_the_run(tmp_path: Path, case: str) -> None:
    """Without validation, and with validation that accepts NaN, all ranks exit with 17 after the save of the last
    iteration; a detected non-finite loss is reported once."""
    codes, output = train(tmp_path, case)
    assert codes == [ExitReason.FAILED_VALIDATION] * 2, output
    assert "finished" not in output
    assert "weights that are NaN or infinite on rank 1" in output
    assert "weights that are NaN or infinite on this rank: model.weight, model.bias" in output
    assert output.count("loss is nan on rank 1 at iteration 8") == (case == "unjudged")
    assert 12 in {found.entry.iteration for found in look_into(str(tmp_path / "checkpoints")).found}


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("list", "plain.nested.1"),
        ("buffer", "model.norm"),
        ("moment", "optimizer.state.0.momentum_buffer"),
        ("object", "average.state_dict.average"),
    ],
)
def test_nan_in_any_tensor_of_the_state_fails_the_run(tmp_path: Path, case: str, name: str) -> None:
    """Tensors without gradients are checked too: in containers, buffers, an optimizer's moments, and an object's
    state dict."""
    codes, output = train(tmp_path, case)
    assert codes == [ExitReason.FAILED_VALIDATION] * 2, output
    assert f"weights that are NaN or infinite on this rank: {name}" in output


@pytest.mark.process
def test_nan_weights_after_break_fail_the_run(tmp_path: Path) -> None:
    """After ``break`` nothing is saved, and closing the session ends a rank whose weights are NaN with 17."""
    codes, output = train(tmp_path, "break")
    assert codes == [0, ExitReason.FAILED_VALIDATION], output
    assert "weights that are NaN or infinite on this rank: model.weight, model.bias" in output


@pytest.mark.process
def test_a_nan_loss_raises_if_reruns_are_disabled(tmp_path: Path) -> None:
    """With rerun_mode disabled a rejected loss raises before the weights change, as in Megatron."""
    codes, output = train(tmp_path, "disabled")
    assert 0 not in codes, output
    assert "NotFinite: loss of iteration 8 is nan on rank 1" in output
    assert "finished" not in output
