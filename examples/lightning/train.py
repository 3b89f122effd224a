"""Train with Lightning's Trainer, kept alive by two callbacks.

    outlast run --nproc-per-node 2 examples/lightning/train.py /tmp/lightning-example

Kill a rank while it trains (``kill -9``), stop one (``kill -STOP``), or end the run with ``kill -TERM``, and start it
again: it goes on where it was, and prints the same digest as one that was never disturbed.
"""

import argparse
import hashlib
import os
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import outlast
from outlast.integrations.lightning import (
    FaultToleranceCallback,
    LocalCheckpointCallback,
    PreemptionCallback,
    update_trainer_local_checkpoint_io,
)


class Waves(Dataset[torch.Tensor]):
    """Sine waves, made by the loader's workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(33) * (1 + index % 7) / 8)


class NextValue(pl.LightningModule):
    """Predicts a wave's next value; has dropout, so that it needs its random numbers back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def loss(self, wave: torch.Tensor) -> torch.Tensor:
        return (self.net(wave[:, :-1]).squeeze(1) - wave[:, -1]).square().mean()

    def training_step(self, wave: torch.Tensor, index: int) -> torch.Tensor:
        return self.loss(wave)

    def validation_step(self, wave: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.loss(wave), sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def main() -> None:
    """Train, or go on with training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where checkpoints go")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=128, help="waves")
    parser.add_argument("--workers", type=int, default=2, help="of each rank's data loader")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--local-seconds", type=float, help="also save to this node's disk, so often")
    parser.add_argument("--plan", help="file with a plan of faults to cause on purpose")
    arguments = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    config = outlast.Config(
        checkpoint=outlast.CheckpointConfig(directory=str(arguments.folder / "ckpt"), save_interval=4),
        run_dir=str(arguments.folder / "run"),
        fault_plan=arguments.plan,
    )
    callbacks = [FaultToleranceCallback(config=config), PreemptionCallback()]
    if arguments.local_seconds:
        interval = timedelta(seconds=arguments.local_seconds)
        callbacks.append(LocalCheckpointCallback(train_time_interval=interval))
    trainer = pl.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if "LOCAL_WORLD_SIZE" in os.environ else "auto",
        max_epochs=arguments.epochs,
        accumulate_grad_batches=arguments.accumulate,
        val_check_interval=0.5,
        callbacks=callbacks,
        default_root_dir=str(arguments.folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if arguments.local_seconds:
        update_trainer_local_checkpoint_io(trainer, arguments.folder / "local")
    model = NextValue()
    train = DataLoader(Waves(arguments.size), batch_size=4, shuffle=True, num_workers=arguments.workers)
    trainer.fit(model, train, DataLoader(Waves(16), batch_size=8))
    weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in model.parameters())
    print(f"trained {trainer.global_step} steps: {hashlib.sha256(weights).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
