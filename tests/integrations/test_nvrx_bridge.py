"""Megatron-Bridge's own callbacks of fault tolerance and its straggler manager, over our extension."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.testing.ranks import free_port

pytestmark = [pytest.mark.overlay, pytest.mark.process, pytest.mark.slow]

SCRIPT = '''
import importlib, importlib.abc, importlib.machinery, json, os, sys, types, warnings
warnings.simplefilter("ignore")


class Stub(types.ModuleType):
    """Bridge's models need Transformer Engine: what is imported of them is a class that nobody uses."""
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {"__init__": lambda self, *args, **more: None}))
        return getattr(self, name)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        parts = ("models", "peft", "data", "recipes", "inference")
        if name.startswith((*(f"megatron.bridge.{part}" for part in parts), "modelopt")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Stubs())
import megatron.core
for name in ("megatron.bridge", "megatron.bridge.training"):  # not what their __init__ imports
    module = types.ModuleType(name)
    below = name.removeprefix("megatron.bridge").replace(".", "/")
    folders = [f"{folder}/megatron/bridge{below}" for folder in sys.path]
    module.__path__ = [folder for folder in folders if os.path.isdir(folder)]
    sys.modules[name] = module

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: "cpu"
from megatron.bridge.training import config, fault_tolerance as ft, nvrx_straggler
for name in ("checkpointing", "inprocess_restart", "train"):
    importlib.import_module(f"megatron.bridge.training.{name}")
from megatron.bridge.training.state import FaultToleranceState
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

settings = types.SimpleNamespace(
    checkpoint=types.SimpleNamespace(save="ckpt", async_save=False),
    ft=config.FaultToleranceConfig(enable_ft_package=True, calc_ft_timeouts=True),
)
state = types.SimpleNamespace(rank_monitor_client=None, fault_tolerance_state=FaultToleranceState())
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")


def train():
    ft.setup(settings, state)
    ft.maybe_setup_simulated_fault(settings.ft)
    ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
    for _ in range(20):
        ft.on_training_step_start(state)
        ft.on_training_step_end(state)
    for _ in range(3):
        ft.on_eval_step_start(state)
        ft.on_eval_step_end(state)
    ft.on_checkpointing_start(state)
    ft.on_checkpointing_end(is_async_finalization=False, global_state=state)


train()
first = state.rank_monitor_client
assert isinstance(first, RankMonitorClient) and first.is_initialized
assert first.section_timeouts.calculated_sections == {"setup", "step", "checkpointing"}
train()  # as after a restart in process: it shuts the first client down, and makes another
assert not first.is_initialized and state.rank_monitor_client is not first
timeouts = dict(state.rank_monitor_client.section_timeouts.section)
ft.shutdown(state)
assert state.rank_monitor_client is None
saved = json.load(open("ckpt/ft_state.json"))["current_timeouts"]["section"]
assert saved["is_out_of_section_calculated"] and saved["section"].keys() == timeouts.keys()

manager = nvrx_straggler.NVRxStragglerDetectionManager(config.NVRxStragglerDetectionConfig(
    enabled=True, report_time_interval=1e-6, stop_if_detected=True))
manager.initialize()
step = manager.wrap_train_step_function(lambda: torch.mm(torch.ones(64, 64), torch.ones(64, 64)).sum().item())
seen = []
manager._handle_straggler_report = (lambda handle: lambda report: seen.append(report) or handle(report))(
    manager._handle_straggler_report)
for _ in range(20):
    assert step() == 64 ** 3
    manager.check_stragglers(0)
assert seen and seen[0].gpu_individual_perf_scores == {0: 1.0}, seen
manager.shutdown()
dist.destroy_process_group()
print("driven")
'''


def test_bridges_own_callbacks_run(tmp_path: Path) -> None:
    """Bridge 0.3.1's fault_tolerance (set up twice, timeouts calculated, written and loaded) and its straggler manager
    run over our extension, and its train, checkpointing and inprocess_restart can be imported with it."""
    (script := tmp_path / "bridge.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "outlast.integrations.nvrx", str(script), str(free_port())],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "driven"
