"""A run never ends as finished with weights that are NaN or infinite, whatever was judged before."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

from outlast.checkpoint.catalogue.listing import look_into
from outlast.errors import ExitReason

SCRIPT = """
import math, sys
import torch
import outlast

folder, how = sys.argv[1:]
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


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for iteration in run.steps({"model": model, "optimizer": optimizer}, total=12):
    bad = math.nan if iteration >= 8 and run.global_rank == 1 and how != "sound" else 1.0
    if how in ("sound", "plain"):
        loss = model(torch.ones(1, 2)).sum() * bad
        loss.backward()
    else:
        for attempt in run.attempts():
            loss = model(torch.ones(1, 2)).sum() * bad
            loss.backward()
            attempt.validate(loss)
    optimizer.step()
    optimizer.zero_grad()
print("finished", flush=True)
"""


def train(folder: Path, how: str) -> tuple[list[int], str]:
    """Train on two ranks; return the exit codes and all that was printed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(folder), how, world_size=2) as ranks:
        codes, outputs = ranks.end()
    return codes, "\n".join(outputs)


@pytest.mark.process
def test_a_mask_of_infinities_is_no_error(tmp_path: Path) -> None:
    """A buffer that is infinite from the start belongs to the model: the run finishes, and no line warns of it."""
    codes, output = train(tmp_path, "sound")
    assert codes == [0, 0], output
    assert "infinite" not in output


@pytest.mark.process
@pytest.mark.parametrize("how", ["plain", "unjudged"])
def test_weights_that_are_nan_at_the_end_are_an_error(tmp_path: Path, how: str) -> None:
    """Without validation, and with one that accepts NaN, all ranks end with 17 once the last iteration is saved; a
    non-finite loss that is seen is reported once."""
    codes, output = train(tmp_path, how)
    assert codes == [ExitReason.FAILED_VALIDATION] * 2, output
    assert "finished" not in output
    assert "weights that are NaN or infinite on rank 1" in output
    assert "weights that are NaN or infinite on this rank: model.weight, model.bias" in output
    assert output.count("loss is nan on rank 1 at iteration 8") == (how == "unjudged")
    assert 12 in {found.entry.iteration for found in look_into(str(tmp_path / "checkpoints")).found}


@pytest.mark.process
def test_a_nan_loss_raises_where_nothing_is_run_again(tmp_path: Path) -> None:
    """With rerun_mode disabled a rejected loss raises before a weight moves, as in Megatron."""
    codes, output = train(tmp_path, "disabled")
    assert 0 not in codes, output
    assert "NotFinite: loss of iteration 8 is nan on rank 1" in output
    assert "finished" not in output
