"""A training program with two ranks as in NeMo's resiliency guide, with Lightning's example module.

    guide_training.py FOLDER STRATEGY TOTAL [OPTION...] [@CYCLE:RANK:STEP...]

The trainer writes its own checkpoints. ``STRATEGY`` is ``ddp`` or ``megatron``, a substitute for NeMo's
``MegatronStrategy``, which needs GPUs. Like NeMo's it is a ``DDPStrategy`` that saves on all ranks with a separate
checkpoint IO and restores after its setup. At a gate, ``@CYCLE:RANK:STEP``, a rank waits for a signal
(:mod:`gated_training`). Option ``local`` adds local checkpoints, and ``async`` finalizes them later, like NeMo's
wrapper.
"""

import os
import shutil
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from gated_training import note, wait_at_gate
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from outlast.integrations.lightning import (
    FaultToleranceCallback,
    LocalCheckpointCallback,
    PreemptionCallback,
    straggler_det_callback,
    update_trainer_local_checkpoint_io,
)


class ShardedIO(CheckpointIO):
    """Writes a folder with one file for each rank."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, self._file(path))

    def load_checkpoint(self, path, map_location=None, **options):
        return torch.load(self._file(path), weights_only=False)

    def remove_checkpoint(self, path):
        shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _file(path):
        return Path(path) / f"{torch.distributed.get_rank()}.pt"


class FinalizableIO(_WrappingCheckpointIO):
    """Finalizes asynchronous saves on request, and before the next save."""

    requests = ()

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.maybe_finalize_save_checkpoint(blocking=True)
        request = self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        self.requests = () if request is None else (request,)

    def maybe_finalize_save_checkpoint(self, blocking=False):
        requests, self.requests = self.requests, ()
        for request in requests:
            request.execute_sync()

    def teardown(self):
        self.maybe_finalize_save_checkpoint(blocking=True)


class MegatronStrategy(DDPStrategy):
    """Saves on all ranks, and restores after its setup."""

    def __init__(self, async_save=False):
        super().__init__(process_group_backend="gloo")
        self.async_save = async_save
        self._own_io = FinalizableIO(ShardedIO()) if async_save else ShardedIO()

    @property
    def checkpoint_io(self):
        return self._own_io

    @checkpoint_io.setter
    def checkpoint_io(self, io):
        self._own_io = io

    @property
    def restore_checkpoint_after_setup(self):
        return True

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        return self.checkpoint_io.load_checkpoint(checkpoint_path)

    def remove_checkpoint(self, filepath):
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)


class Gates(Callback):
    """Records each step, and waits at gates."""

    def __init__(self, folder, gates):
        self.folder, self.gates = Path(folder), gates

    def on_train_batch_start(self, trainer, *_):
        note(self.folder, trainer.global_rank, trainer.global_step)
        wait_at_gate(self.folder, self.gates, trainer.global_rank, trainer.global_step)


def step_of(checkpoint_path):
    """Return the step of a checkpoint, as ``get_iteration_from_checkpoint`` of the guide does."""
    return int(torch.load(Path(checkpoint_path) / "0.pt", weights_only=False)["global_step"])


def main():
    folder, kind, total, *words = sys.argv[1:]
    torch.manual_seed(0)
    callbacks = [
        ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=4, save_last=True, enable_version_counter=False),
        Gates(folder, words),
        FaultToleranceCallback(autoresume=True, calculate_timeouts=True, exp_dir=folder),
        PreemptionCallback(),
    ]
    if "local" in words:
        callbacks.append(LocalCheckpointCallback(every_n_train_steps=3))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=MegatronStrategy("async" in words) if kind == "megatron" else "ddp",
        max_steps=int(total),
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.callbacks.append(straggler_det_callback())
    if "local" in words:
        update_trainer_local_checkpoint_io(trainer, f"{folder}/local", step_of)
    trainer.fit(BoringModel(), ckpt_path="last")
    print(f"trained {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
