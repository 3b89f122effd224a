"""The real Megatron-Bridge, as far as it runs on CPU: settings, hooks, wrap, fault tolerance, straggler manager."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import run_python

from outlast.testing.ranks import free_port

pytestmark = [pytest.mark.overlay, pytest.mark.process]

BEGIN = """
import importlib, importlib.abc, importlib.machinery, os, sys, types, warnings
warnings.simplefilter("ignore")
from outlast.integrations import megatron as ours, nvrx
assert nvrx.install()

class Stub(types.ModuleType):
    # Bridge's models need Transformer Engine: what is imported of them is a class that nobody uses.
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {"__init__": lambda self, *args, **more: None}))
        return getattr(self, name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        parts = ("models", "peft", "data", "recipes", "inference")
        if name.startswith((*(f"megatron.bridge.{part}" for part in parts), "modelopt")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
import megatron.core
for name in ("megatron.bridge", "megatron.bridge.training"):  # not what their __init__ imports
    module = types.ModuleType(name)
    below = name.removeprefix("megatron.bridge").replace(".", "/")
    folders = [f"{folder}/megatron/bridge{below}" for folder in sys.path]
    module.__path__ = [folder for folder in folders if os.path.isdir(folder)]
    sys.modules[name] = module
"""


def run(code: str, folder: Path, *arguments: str) -> str:
    """Run code in a separate process; return its output."""
    (script := folder / "script.py").write_text(BEGIN + code)
    completed = run_python(script, *arguments, timeout_s=250, cwd=folder, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return completed.stdout + completed.stderr


SETTINGS = """
import dataclasses
from megatron.bridge.training import config as bridge

def differences(theirs, own):
    have = {one.name: getattr(own(), one.name) for one in dataclasses.fields(own) if one.init}
    for one in dataclasses.fields(theirs):
        if one.name not in have or have[one.name] != one.default:
            yield one.name

assert list(differences(bridge.FaultToleranceConfig, ours.FaultToleranceConfig)) == []
assert list(differences(bridge.NVRxStragglerDetectionConfig, ours.NVRxStragglerDetectionConfig)) == ["logger_name"]
assert list(differences(bridge.RerunStateMachineConfig, ours.RerunStateMachineConfig)) == []
assert list(differences(bridge.InProcessRestartConfig, ours.InProcessRestartConfig)) == []
known = {one.name for one in dataclasses.fields(bridge.CheckpointConfig)}
for one in dataclasses.fields(ours.CheckpointConfig):
    if one.name in known:  # the others came with later versions
        theirs = next(other for other in dataclasses.fields(bridge.CheckpointConfig) if other.name == one.name)
        assert getattr(ours.CheckpointConfig(), one.name) == theirs.default, one.name

container = types.SimpleNamespace(
    checkpoint=bridge.CheckpointConfig(
        save="/ckpt", save_interval=100, async_save=True, non_persistent_ckpt_type="local",
        non_persistent_local_ckpt_dir="/local", non_persistent_save_interval=10, replication=True),
    ft=bridge.FaultToleranceConfig(enable_ft_package=True, calc_ft_timeouts=True),
    nvrx_straggler=bridge.NVRxStragglerDetectionConfig(enabled=True),
    rerun_state_machine=bridge.RerunStateMachineConfig(rerun_mode="validate_results"),
    inprocess_restart=bridge.InProcessRestartConfig(enabled=True, granularity="rank"),
    straggler=bridge.StragglerDetectionConfig(),
    train=bridge.TrainingConfig(exit_signal_handler=True, exit_interval=9),
)
config = ours.outlast_config(container)
assert (config.checkpoint.directory, config.checkpoint.local_directory) == ("/ckpt", "/local")
assert config.fault_tolerance.enable_ft_package and config.straggler_detection.enabled
assert config.in_process_restart.granularity == "rank" and config.preemption.exit_interval == 9
print("settings agree")
"""

HOOKS = """
from megatron.bridge.training import callbacks, checkpointing, config, inprocess_restart, pretrain
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

manager = ours.BridgeCallback().register(callbacks.CallbackManager())
state = types.SimpleNamespace(cfg=types.SimpleNamespace(ft=None), train_state=types.SimpleNamespace(step=3))
context = callbacks.CallbackContext(state=state, model=[])
for event in ("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"):
    assert callbacks.should_fire(manager, event)
    manager.fire(event, context)

local = config.CheckpointConfig(non_persistent_ckpt_type="local", non_persistent_local_ckpt_dir=sys.argv[0] + "-local")
made = checkpointing.init_checkpointing_context(local)["local_checkpoint_manager"]
assert type(made) is LocalCheckpointManager and made.find_latest() == -1
print("hooks run")
made.close()
"""

RESTART = """
import socket
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", TORCH_CPP_LOG_LEVEL="error")
with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(found.getsockname()[1])
from megatron.bridge.training import config, inprocess_restart

class GlobalState:
    async_calls_queue, resets = None, 0
    def reset_for_restart(self):
        self.resets += 1

def pretrain(state, store=None, inprocess_call_wrapper=None):
    calls.append(store)
    if len(calls) == 1:
        raise RuntimeError("example fault")
    return "trained"

settings = config.InProcessRestartConfig(enabled=True, granularity="rank", active_world_size=1, empty_cuda_cache=False)
for wrap in (inprocess_restart.inprocess_restart, ours.maybe_wrap_for_inprocess_restart):
    calls, state = [], GlobalState()
    sys.modules["megatron.bridge.training.initialize"] = types.SimpleNamespace(destroy_global_state=lambda: None)
    wrapped = wrap(pretrain, settings, state)
    wrapped = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    assert wrapped(state) == "trained" and len(calls) == 2, calls
    print(wrap.__module__, "restarted; resets:", state.resets)
"""


CALLBACKS = """
import json
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
"""


@pytest.mark.slow
def test_settings_match_bridges(tmp_path: Path) -> None:
    """Names, fields and defaults are Bridge's except for the logger's name; its objects become a session's settings."""
    assert "settings agree" in run(SETTINGS, tmp_path)


@pytest.mark.slow
def test_bridge_calls_outlasts_hooks(tmp_path: Path) -> None:
    """Bridge's callback manager calls outlast's hooks; its checkpointing context creates outlast's local manager."""
    assert "hooks run" in run(HOOKS, tmp_path)


@pytest.mark.slow
def test_both_wraps_restart_the_function(tmp_path: Path) -> None:
    """Bridge's own wrap over outlast's extension, and outlast's wrap, both call the function again."""
    output = run(RESTART, tmp_path)
    assert "megatron.bridge.training.inprocess_restart restarted; resets:" in output
    assert "outlast.integrations.megatron restarted; resets: 1" in output


@pytest.mark.slow
def test_bridges_own_callbacks_run_over_outlast(tmp_path: Path) -> None:
    """Bridge's fault tolerance callbacks, set up twice, and its straggler manager run over outlast's extension."""
    assert "driven" in run(CALLBACKS, tmp_path, str(free_port())).splitlines()
