"""A recipe in NeMo's form for NeMo-Run: ``trainer``, ``log`` and ``model`` of a ``run.Partial``. It needs no GPU."""

import dataclasses

import lightning.pytorch as pl
import nemo_run as run
from guide_training import Gates
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel


@dataclasses.dataclass
class NeMoLogger:
    """The directory of NeMo's loggers and checkpoints."""

    log_dir: str


def pretrain(model: BoringModel, trainer: pl.Trainer, log: NeMoLogger) -> None:
    """Train from the trainer's newest checkpoint, as with NeMo's ``AutoResume``."""
    trainer.fit(model, ckpt_path="last")
    print(f"trained {trainer.global_step} steps", flush=True)


def pretrain_recipe(name: str, dir: str, gates: list[str], total: int) -> run.Partial:
    """Return a recipe with two ranks and its own callbacks and checkpoints."""
    checkpoint = run.Config(ModelCheckpoint, f"{dir}/{name}", every_n_train_steps=4, save_last=True)
    checkpoint.enable_version_counter = False
    options = {"logger": False, "limit_val_batches": 0, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = run.Config(
        pl.Trainer,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=total,
        callbacks=[checkpoint, run.Config(Gates, folder=dir, gates=gates)],
        **options,
    )
    return run.Partial(
        pretrain, model=run.Config(BoringModel), trainer=trainer, log=run.Config(NeMoLogger, log_dir=dir)
    )
