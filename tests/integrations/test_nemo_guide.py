"""The code of NeMo's resiliency guide runs unchanged, except for its imports and NeMo's models.

NeMo itself needs GPUs: its trainer is Lightning's, a recipe has the same form (:mod:`guide_recipe`), and
``MegatronStrategy`` is a substitute that saves like NeMo's (:mod:`guide_training`).
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from gated_training import Launch
from pages import run_python
from test_nemo_run import HERE, launch_script

from outlast.errors import ExitReason
from outlast.testing import Cluster

TRAINING = HERE / "guide_training.py"
WITHIN_S = 240.0
OPTIONS = ("--max-restarts=3", "--ft-rank_section_timeouts=setup:120,step:6,checkpointing:60")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def first_steps(folder: Path, rank: int = 0) -> list[int]:
    """Return the first steps of a rank's processes, in order."""
    rows = [tuple(map(int, line.split())) for line in (folder / f"rank-{rank}").read_text().splitlines()]
    before = [(-1, -1), *rows]
    return [step for (cycle, step), (last, old) in zip(rows, before, strict=False) if cycle != last or step != old + 1]


def saved_step(text: str) -> int:
    """Return the step that the trainer saved at a shutdown."""
    (step,) = re.findall(r"stopping after iteration (\d+), on all ranks", text)
    assert f"iteration {step} is saved, nothing is lost; exiting with code 75" in text
    return int(step)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "begin"),
    [
        pytest.param("megatron", ("local", "async"), 9, id="megatron"),
        pytest.param("ddp", (), 8, id="ddp", marks=pytest.mark.campaign),
    ],
)
def test_trainer_with_its_own_saves_is_monitored(
    tmp_path: Path, kind: str, options: tuple[str, ...], begin: int
) -> None:
    """A trainer that writes its own checkpoints survives a stopped rank and SIGTERM (75), and resumes from its own
    or a newer local checkpoint."""
    run = {"run_dir": tmp_path / "run", "num_nodes": 1, "options": OPTIONS}
    with Cluster(TRAINING, str(tmp_path), kind, "20", *options, "@0:1:10", "@1:1:14", **run) as cluster:
        launch = Launch(tmp_path, cluster.agents[0])
        launch.signal_at_gate(0, signal.SIGSTOP)
        launch.signal_at_gate(1, signal.SIGTERM)
        (tmp_path / "open-1").touch()
        codes = cluster.wait(WITHIN_S)
        text = cluster.agents[0].output()
    assert codes == [ExitReason.PREEMPTED], text
    assert len(re.findall(r"monitoring only \((?:MegatronStrategy shards|no checkpoint\.directory)", text)) == 2, text
    assert "checkpoints by the trainer; preemption yes" in text
    assert "checkpoints no" not in text
    assert re.search(r"cycle 0 ended: rank 1 .* hangs in section 'step'", text), text
    assert "Preemption detected, saving checkpoint and exiting" in text
    stopped_at = saved_step(text)
    assert "infinite or NaN" not in text
    assert (tmp_path / "ft_state.json").exists()
    with Cluster(TRAINING, str(tmp_path), kind, "20", *options, **run) as cluster:
        assert cluster.wait(WITHIN_S) == [0], cluster.agents[0].output()
        assert cluster.agents[0].output().count("trained 20 steps") == 2
    assert first_steps(tmp_path, 0) == first_steps(tmp_path, 1) == [0, begin, stopped_at]
    copies = {path.parent.parent.parent.name for path in tmp_path.glob("local/local_ckpt/*/step-*/*.safetensors")}
    assert copies == ({"local_ckpt"} if options else set())


TRAINER = """
import lightning.pytorch as nl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from outlast.integrations.lightning import LocalCheckpointCallback, PreemptionCallback
from outlast.integrations.lightning import straggler_det_callback, update_trainer_local_checkpoint_io
"""
STRAGGLERS = """
trainer = nl.Trainer()
straggler_cb = straggler_det_callback()
trainer.callbacks.append(straggler_cb)
"""
PREEMPTION = """
trainer = nl.Trainer()
trainer.callbacks.append(PreemptionCallback())
"""
LOCAL = """
# Define a function to extract the iteration number from a globally saved checkpoint path
def get_iteration_from_checkpoint(checkpoint_path: str) -> int:
    return torch.load(checkpoint_path, weights_only=False)["global_step"]
# Define the base directory for local checkpoints on each node's filesystem
local_checkpoint_dir = "local"
kwargs = {}
trainer = nl.Trainer(callbacks=[LocalCheckpointCallback(every_n_train_steps=10)], max_steps=25)
update_trainer_local_checkpoint_io(trainer, local_checkpoint_dir, get_iteration_from_checkpoint, **kwargs)
"""
FIT = """
trainer.fit_loop.epoch_loop.max_steps = 25
trainer.limit_val_batches = 0
trainer.fit(BoringModel())
assert trainer.global_step == 25, trainer.global_step
"""


@pytest.mark.extended
@pytest.mark.slow
def test_guides_trainer_code_runs(tmp_path: Path) -> None:
    """A trainer with stragglers, preemption and local checkpoints runs without settings."""
    result = run_python("-c", TRAINER + FIT.join((STRAGGLERS, PREEMPTION, LOCAL, "")), cwd=tmp_path)
    assert result.stderr.count("monitoring only (no checkpoint.directory is known)") == 2, result.stderr
    (node,) = (tmp_path / "local" / "local_ckpt").iterdir()
    assert (node / "step-20").is_dir()


LAUNCH = """\
import sys
from pathlib import Path
import nemo_run as run
from guide_recipe import pretrain_recipe
from outlast.integrations.nemo_run import FaultTolerancePlugin, PreemptionPlugin, straggler_det_callback

if __name__ == "__main__":
    folder, *gates = sys.argv[1:]
    recipe = pretrain_recipe(name="with_fault_tolerance", dir=folder, gates=gates, total=20)
    recipe.trainer.callbacks.append(straggler_det_callback())
    executor = run.LocalExecutor(ntasks_per_node=2)
    run_plugins = [FaultTolerancePlugin(), PreemptionPlugin()]
    run.run(recipe, plugins=run_plugins, executor=executor)
    for plugin in run_plugins:
        plugin.setup(recipe, executor)  # NeMo-Run has done so with a copy
    print("callbacks:", *(one.__fn_or_cls__.__name__ for one in recipe.trainer.callbacks), flush=True)
"""


@pytest.mark.overlay
@pytest.mark.slow
def test_guides_plugins_protect_a_recipe(tmp_path: Path) -> None:
    """Both plug-ins add their callbacks to a recipe, which survives a killed rank and SIGTERM."""
    with launch_script(tmp_path, LAUNCH, str(tmp_path), "@0:1:6", "@1:0:10") as launch:
        launch.signal_at_gate(0, signal.SIGKILL)
        launch.signal_at_gate(1, signal.SIGTERM)
        (tmp_path / "open-1").touch()
        launch.process.wait(300)
        text = launch.process.output()
    stopped_at = saved_step(text)
    assert first_steps(tmp_path) == [0, 4]
    with launch_script(tmp_path, LAUNCH, str(tmp_path)) as launch:
        assert launch.process.wait(300) == 0, launch.process.tail(80)
        text = launch.process.output()
    names = "ModelCheckpoint Gates straggler_det_callback FaultToleranceCallback PreemptionCallback"
    assert f"callbacks: {names}" in text, launch.process.tail(80)
    assert text.count("trained 20 steps") == 2, launch.process.tail(80)
    assert first_steps(tmp_path) == [0, 4, stopped_at]
