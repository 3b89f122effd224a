"""Train with Lightning and save at each step, resume from each checkpoint, and compare the results, in one process.

    python lightning_positions.py FOLDER CASE [EVERY]

Prints, for each case, the checkpoints from which a resumed training ended differently; ``EVERY`` tests every N-th
only.
"""

import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, Dataset

import outlast
from outlast.integrations.lightning import FaultToleranceCallback, PreemptionCallback, ResumableDistributedSampler

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Noisy(Dataset):
    """Draws random numbers for its samples."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(8) * 0.1 + index


class Model(pl.LightningModule):
    """Changes a weight in every hook, so that a skipped or repeated hook changes the result."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, index):
        torch.rand(3)
        self.log("val", self.net(batch).mean())

    def move(self, by):
        with torch.no_grad():
            self.net[0].bias += by

    def on_train_batch_end(self, *_):
        self.move(1e-3)
        self.seen.append((self.trainer.global_step, self.trainer.fit_loop.epoch_loop._batches_that_stepped))

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.move(1e-2)

    def on_train_epoch_end(self):
        self.move(1e-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


class Averaged(Model):
    """Does not change weights in hooks, because averaging reads them there."""

    def move(self, by):
        pass


class Finetuned(Averaged):
    """Has a backbone, and an optimizer for the parameters that are not frozen."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.net.insert(0, self.backbone)

    def configure_optimizers(self):
        return torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), lr=1e-2)


class Manual(Model):
    """Has two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[0].parameters(), lr=1e-2)
        return [first, torch.optim.SGD(self.net[2].parameters(), lr=1e-4)]


class Signal(pl.Callback):
    """Send SIGTERM to the process in a step, after a number of batches that stepped."""

    def __init__(self, num_before):
        self.num_before = num_before

    def on_train_batch_start(self, trainer, *_):
        if trainer.fit_loop.epoch_loop._batches_that_stepped == self.num_before:
            os.kill(os.getpid(), signal.SIGTERM)


class Scales(pl.Callback):
    """Stores a float8 tensor that changes with every batch in its state."""

    def __init__(self):
        self.scales = torch.ones(2).to(torch.float8_e4m3fn)

    def on_train_batch_end(self, trainer, *_):
        self.scales = torch.tensor([trainer.global_step % 7 + 1.0, -1.0]).to(torch.float8_e4m3fn)

    def state_dict(self):
        return {"scales": self.scales}

    def load_state_dict(self, state):
        self.scales = state["scales"]


def sampled():
    return DataLoader(Noisy(), batch_size=4, sampler=ResumableDistributedSampler(Noisy(), seed=1))


def in_order():
    return DataLoader(Noisy(), batch_size=4)


def stateful():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Noisy(), batch_size=4, shuffle=True)


CASES = {
    "epochs": ({"max_epochs": 3}, sampled, Model),
    "steps": ({"max_steps": 15}, sampled, Model),
    "validations": ({"max_epochs": 2, "val_check_interval": 2}, in_order, Model),
    "validations-steps": ({"max_steps": 15, "val_check_interval": 2}, sampled, Model),
    "accumulation": ({"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 3}, sampled, Model),
    "manual": ({"max_epochs": 2}, sampled, Manual),
    "no-validation": ({"max_epochs": 3, "limit_val_batches": 0}, sampled, Model),
    "stateful": ({"max_epochs": 3}, stateful, Model),
    "averaging": ({"max_epochs": 4}, sampled, Averaged),
    "scheduled": ({"max_epochs": 3}, sampled, Model),
    "finetuned": ({"max_epochs": 4}, sampled, Finetuned),
}
SCRIPT_CALLBACKS = {
    "averaging": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
    "scheduled": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})],
    "finetuned": lambda: [BackboneFinetuning(1, train_bn=False)],
}
"""Callbacks that a script passes before outlast's."""


def train(folder, case, signal_at=None):
    """Train in a child process; return its exit code, the result, and the steps."""
    folder.mkdir(parents=True, exist_ok=True)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code, *rest = train_in_process(folder, case, signal_at)
            (folder / "result.json").write_text(json.dumps(rest))
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, *json.loads((folder / "result.json").read_text())


def train_in_process(folder, case, signal_at):
    options, loader, kind = CASES[case]
    torch.manual_seed(3)
    model = kind()
    saves = outlast.CheckpointConfig(
        directory=str(folder / "ckpt"), save_interval=1, most_recent_k=-1, async_save=False, resume_from_other_run=True
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        callbacks=[
            *SCRIPT_CALLBACKS.get(case, list)(),
            FaultToleranceCallback(config=outlast.Config(checkpoint=saves, run_dir=str(folder / "run"))),
            PreemptionCallback(),
            EarlyStopping("val", patience=50, strict=False),
            scales := Scales(),
            *([] if signal_at is None else [Signal(signal_at)]),
        ],
        **options,
    )
    code = 0
    try:
        trainer.fit(model, loader(), DataLoader(Noisy(), batch_size=8))
    except SystemExit as exit_code:
        code = int(exit_code.code)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    waited = [callback.wait_count for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]
    counts = (trainer.global_step, trainer.current_epoch, waited, scales.scales.float().tolist())
    result = (hashlib.sha256(weights).hexdigest(), *counts)
    return code, result, model.seen


def main():
    root, case, every = Path(sys.argv[1]) / sys.argv[2], sys.argv[2], int([*sys.argv, "1"][3])
    code, expected, seen = train(root / "undisturbed", case)
    assert code == 0
    saved = sorted(
        (path.name for path in (root / "undisturbed" / "ckpt").glob("step-*")), key=lambda name: int(name[5:])
    )
    print(case, expected[1], "steps,", len(saved), "generations", flush=True)
    for name in saved:
        if not json.loads((root / "undisturbed" / "ckpt" / name / "manifest.json").read_text())["manifest"]["finite"]:
            print("not finite:", name)
    for number, name in enumerate(saved[:-1]):
        if (number + 1) % every:
            continue
        folder = root / name
        shutil.copytree(root / "undisturbed" / "ckpt", folder / "ckpt")
        for later in saved[number + 1 :]:
            shutil.rmtree(folder / "ckpt" / later)
        code, resumed, rest = train(folder, case)
        if (code, resumed) != (0, expected) or rest != seen[-len(rest) :] or len(rest) >= len(seen):
            print("differs:", name, resumed, expected, rest[:2], flush=True)
        if number + 3 >= len(saved):
            continue  # a preemption notice in the last step has no effect
        exit_code, _, before = train(root / f"left-{name}", case, signal_at=rest[0][1])
        code, resumed, rest = train(root / f"left-{name}", case)
        if (exit_code, code, resumed) != (75, 0, expected) or before + rest != seen:
            print(
                "differs after a notice:", name, exit_code, code, resumed, expected, before[-2:], rest[:2], flush=True
            )


if __name__ == "__main__":
    main()
