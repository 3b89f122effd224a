"""The torchtitan recipe with a substitute package: torchtitan itself does not run without a GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from pages import python_blocks

from outlast.errors import ExitReason
from outlast.testing import Cluster

WITHIN_S = 120.0

BASE = '''
"""What a checkpoint manager of torchtitan 0.3.0 derives from, as far as the recipe uses it."""
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
import torch

class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **things):
            return self._owner(config=replace(self), **things)
    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls

class ModelWrapper:
    def __init__(self, model):
        self.model = [model] if isinstance(model, torch.nn.Module) else model
    def state_dict(self):
        return {name: value for model in self.model for name, value in model.state_dict().items()}
    def load_state_dict(self, state):
        for model in self.model:
            model.load_state_dict(state, strict=False)

class BaseCheckpointManager(Configurable, ABC):
    def load(self, step=-1):
        return self._load(step) if self.enable else False
    def save(self, curr_step, last_step=False):
        return self._save(curr_step, last_step) if self.enable else False
    def maybe_wait_for_staging(self):
        if self.enable:
            self._maybe_wait_for_staging()
    def maybe_wait_for_saving(self):
        if self.enable and self.save_future is not None:
            self._wait_for_saving()
    def close(self):
        if getattr(self, "enable", False):
            self._close()
    @abstractmethod
    def _wait_for_saving(self): ...
    @abstractmethod
    def _load(self, step=-1): ...
    @abstractmethod
    def _save(self, curr_step, last_step=False): ...
    @abstractmethod
    def _maybe_wait_for_staging(self): ...
    @abstractmethod
    def _close(self): ...
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        keep_latest_k: int = 10
        load_step: int = -1
        exclude_from_loading: list = field(default_factory=list)
'''
REGISTRY = """
from dataclasses import dataclass
from torchtitan.components.checkpointer import BaseCheckpointManager

@dataclass
class Config:
    checkpoint: object
    steps: int = 400

def llama3_8b():
    return Config(checkpoint=None)
"""
TRAIN = """
import hashlib, os, signal, sys, torch
import torch.distributed as dist
from my_models import llama3_8b_kept_alive

class Loader:
    # Random batches that it can go on with.
    def __init__(self):
        self.position = 0
    def __next__(self):
        self.position += 1
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(self.position * 10 + dist.get_rank()))
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

class Trainer:
    # The order of calls is that of torchtitan 0.3.0.
    def __init__(self, config):
        dist.init_process_group("gloo")
        torch.manual_seed(7)
        self.config, self.step = config, 0
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer)
        self.loader = Loader()
        self.checkpointer = config.checkpoint.build(
            dataloader=self.loader, model_parts=[self.model], optimizers=self.optimizer, lr_schedulers=self.scheduler,
            states={"train_state": self}, sd_adapter=None, base_folder="outputs",
        )
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]
    def train(self):
        self.checkpointer.load(step=-1)
        print("starts at", self.step, flush=True)
        while self.step < self.config.steps:
            self.step += 1
            self.optimizer.zero_grad()
            loss = self.model(next(self.loader)).square().mean()
            loss.backward()
            for weight in self.model.parameters():
                dist.all_reduce(weight.grad)
            self.checkpointer.maybe_wait_for_staging()
            self.optimizer.step()
            self.scheduler.step()
            fault = os.environ.get("FAULT", "").split()
            if fault and int(fault[1]) == self.step and dist.get_rank() == 1 and os.environ["OUTLAST_CYCLE"] == "0":
                os.kill(os.getpid(), getattr(signal, fault[0]))
            self.checkpointer.save(self.step, last_step=self.step == self.config.steps)
    def close(self):
        self.checkpointer.close()

trainer = Trainer(llama3_8b_kept_alive())
try:
    trainer.train()
except Exception:
    trainer.close()
    raise
else:
    trainer.close()
    weights = b"".join(weight.detach().numpy().tobytes() for weight in trainer.model.parameters())
    print("trained", trainer.step, hashlib.sha256(weights).hexdigest(), flush=True)
    dist.destroy_process_group()
"""


def write_substitute(folder: Path) -> None:
    """Write the substitute for torchtitan, both blocks of the page, and a trainer that uses them."""
    usage, recipe = python_blocks("torchtitan.md")
    for package in ("torchtitan", "torchtitan/components", "torchtitan/models", "torchtitan/models/llama3"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("")
    checkpointer = folder / "torchtitan" / "components" / "checkpointer"
    checkpointer.mkdir()
    (checkpointer / "base.py").write_text(BASE)
    (checkpointer / "__init__.py").write_text("from .base import BaseCheckpointManager\n")
    (folder / "torchtitan" / "models" / "llama3" / "config_registry.py").write_text(REGISTRY)
    (folder / "keep_alive.py").write_text(recipe)
    (folder / "my_models.py").write_text(usage)
    (folder / "train.py").write_text(TRAIN)
    (folder / "outlast.toml").write_text('[checkpoint]\ndirectory = "ckpt"\nsave_interval = 20\n')


def run_training(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], str]:
    """Run two ranks under outlast run in a folder; return the agents' exit codes and the output."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FAULT", fault)
    with Cluster(folder / "train.py", run_dir=folder / "run", num_nodes=1, nproc_per_node=2) as cluster:
        codes = cluster.wait(WITHIN_S)
        return codes, cluster.agents[0].output()


@pytest.mark.campaign
@pytest.mark.process
def test_recipe_survives_preemption_and_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGTERM with exit code 75, and a SIGKILL of a rank in the next job, the weights are those of an
    undisturbed training."""
    ends = []
    for name in ("undisturbed", "disturbed"):
        folder = tmp_path / name
        folder.mkdir()
        write_substitute(folder)
        codes, text = run_training(folder, "" if name == "undisturbed" else "SIGTERM 8", monkeypatch)
        if name == "disturbed":
            assert codes == [ExitReason.PREEMPTED], text
            (stopped_at,) = {int(found) for found in re.findall(r"stopping after iteration (\d+)", text)}
            assert 8 <= stopped_at < 300, text
            codes, text = run_training(folder, f"SIGKILL {stopped_at + 90}", monkeypatch)
            starts = [int(found) for found in re.findall(r"starts at (\d+)", text)][2:]  # except those of the first job
            assert starts[:2] == [stopped_at, stopped_at], text
            assert starts[2] == starts[3] >= stopped_at, text
        assert codes == [0], text
        ends.append(set(re.findall(r"trained \d+ \w{64}", text)))
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]


def test_unsupported_torchtitan_settings_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of torchtitan without effect are rejected by name; a disabled manager does nothing."""
    write_substitute(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import keep_alive

    parts = dict.fromkeys(("dataloader", "model_parts", "optimizers", "lr_schedulers"))
    with pytest.raises(ValueError, match=r"checkpoint.interval, keep_latest_k: outlast saves and loads here"):
        keep_alive.KeptAlive.Config(enable=True, interval=5, keep_latest_k=2).build(**parts, states={})
    idle = keep_alive.KeptAlive.Config().build(**parts, states={})
    assert idle.load() is idle.save(1) is False
    idle.close()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("keep_alive", "torchtitan")]:
        monkeypatch.delitem(sys.modules, name)
