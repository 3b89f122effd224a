"""Megatron's settings become outlast's or are rejected by name; its hooks behave as documented."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pages
import pytest
import torch

from outlast.config import Config, InProcessRestartConfig, PreemptionConfig, StragglerDetectionConfig
from outlast.config import RerunStateMachineConfig as OwnRerunConfig
from outlast.errors import CheckpointError, ConfigError, ExitReason
from outlast.inprocess import Wrapper
from outlast.integrations import megatron
from outlast.integrations.nvrx.async_calls import AsyncCallsQueue, AsyncRequest
from outlast.monitor.rank_monitor import RankMonitor, open_monitor
from outlast.runtime.board import RankState
from outlast.straggler import StragglerDetector
from outlast.testing import RankProcesses


def bridge_ft(**changes: Any) -> SimpleNamespace:
    """Return an object with the fields of Bridge's FaultToleranceConfig."""
    values = {"enable_ft_package": False, "calc_ft_timeouts": False, "simulate_fault": False}
    values |= {"simulated_fault_type": "random", "simulated_fault_rank": None, "simulated_fault_base_delay": 0}
    return SimpleNamespace(**{**values, **changes})


def test_bridge_container_is_converted() -> None:
    """Sections with Bridge's names are converted value by value; settings of the model are ignored."""
    local = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "/local", "replication": True}
    container = SimpleNamespace(
        checkpoint=SimpleNamespace(
            save="/ckpt", load="/ckpt", save_interval=100, async_save=True, replication_jump=8,
            fully_parallel_save=True, non_persistent_save_interval=10, **local,
        ),
        ft=bridge_ft(enable_ft_package=True, calc_ft_timeouts=True),
        nvrx_straggler=megatron.NVRxStragglerDetectionConfig(enabled=True, stop_if_detected=True),
        rerun_state_machine=megatron.RerunStateMachineConfig(),
        inprocess_restart=megatron.InProcessRestartConfig(enabled=True, soft_timeout=50.0),
        train=SimpleNamespace(exit_signal_handler=True, exit_signal=signal.SIGUSR1, exit_interval=7, train_iters=9),
    )  # fmt: skip
    config = megatron.outlast_config(container, run_dir="/run")
    assert config.run_dir == "/run"
    saved = config.checkpoint
    assert saved is not None
    assert (saved.directory, saved.load, saved.save_interval, saved.async_save) == ("/ckpt", None, 100, True)
    assert (saved.local_directory, saved.non_persistent_save_interval) == ("/local", 10)
    assert (saved.replication, saved.replication_jump, saved.most_recent_k) == (True, 8, -1)
    assert config.fault_tolerance is not None
    assert config.fault_tolerance.calc_ft_timeouts
    assert config.straggler_detection is not None
    assert config.straggler_detection.stop_if_detected
    assert config.rerun_state_machine is not None
    assert config.rerun_state_machine.rerun_mode == "disabled"
    assert OwnRerunConfig().rerun_mode == "validate_results"
    assert config.in_process
    assert config.preemption is not None
    assert (config.preemption.exit_signal, config.preemption.exit_interval) == ("SIGUSR1", 7)


def test_megatron_lm_arguments_are_converted() -> None:
    """Megatron-LM's flat names are converted, also those that differ from Bridge's."""
    args = argparse.Namespace(
        save="/ckpt", save_interval=5, ckpt_format="torch_dist", rerun_mode="validate_results", tensor_model_parallel=8,
        check_for_nan_in_loss_and_grad=False, inprocess_restart=True, inprocess_soft_timeout=50.0,
        inprocess_hard_timeout=70.0, inprocess_active_world_size=4, exit_signal_handler=True, enable_ft_package=True,
    )  # fmt: skip
    config = megatron.outlast_config(args)
    assert config.checkpoint is not None
    assert config.checkpoint.save_interval == 5
    assert config.rerun_state_machine is not None
    assert not config.rerun_state_machine.check_for_nan_in_loss
    restart = config.in_process_restart
    assert restart is not None
    assert (restart.enabled, restart.soft_timeout, restart.hard_timeout) == (True, 50.0, 70.0)
    assert restart.active_world_size == 4
    assert config.fault_tolerance is not None
    assert config.fault_tolerance.enable_ft_package
    off = megatron.outlast_config(argparse.Namespace(save=None))
    assert off.checkpoint is None
    assert not off.in_process


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"non_persistent_global_ckpt_dir": "/g"}, "non_persistent_global_ckpt_dir='/g' is not supported"),
        ({"save": "/c", "non_persistent_ckpt_type": "global"}, "non_persistent_ckpt_type='global' is not supported"),
        (
            {"async_save": True, "ckpt_format": "zarr"},
            "async_save works with ckpt_format='torch_dist' only, not 'zarr'",
        ),
        ({"save": "/c", "ckpt_format": "zarr"}, "ckpt_format='zarr' is not supported"),
        ({"most_recent_k": 1}, "most_recent_k=1 must be at least 2"),
        ({"load": "/c"}, "load='/c' has no effect, as nothing is saved: set save, or leave load out"),
        ({"non_persistent_ckpt_type": "global"}, "non_persistent_ckpt_type='global' is not supported"),
        (
            {"non_persistent_ckpt_type": "in_memory", "non_persistent_save_interval": 5},
            "non_persistent_save_interval=5 has no effect, as nothing is saved",
        ),
        ({"replication": True}, "replication=True has no effect, as nothing is saved"),
        ({"ckpt_format": "zarr"}, "ckpt_format='zarr' is not supported"),
        ({"async_strategy": "magic"}, "async_strategy='magic' must be nvrx or mcore"),
        ({"custom_manager_class": "a.B"}, "custom_manager_class='a.B' is not outlast's"),
        ({"save": "/c", "replication": True, "replication_factor": 1}, "replication_factor=1 must be at least 2"),
    ],
)
def test_invalid_checkpoint_settings_are_rejected_by_name(values: dict[str, Any], text: str) -> None:
    """Each error is one line with the setting and the remedy, when the config is read."""
    section = megatron.CheckpointConfig(**values)
    for read in (section.finalize, lambda: megatron.outlast_config(megatron.ConfigContainer(checkpoint=section))):
        with pytest.raises(ConfigError, match=text):
            read()


def test_contradicting_sections_are_rejected() -> None:
    """Contradictions between sections, and unknown fields, are rejected by name."""
    with pytest.raises(ConfigError, match=r"ft\.enable_ft_package is on, but nothing is saved: set checkpoint\.save"):
        megatron.outlast_config(SimpleNamespace(ft=bridge_ft(enable_ft_package=True)))
    both = SimpleNamespace(
        nvrx_straggler=megatron.NVRxStragglerDetectionConfig(enabled=True),
        straggler=SimpleNamespace(log_straggler=True),
    )
    with pytest.raises(ConfigError, match="switch the older one off"):
        megatron.outlast_config(both)
    with pytest.raises(ConfigError, match=r"ft\.new_setting=3 has no counterpart in outlast"):
        megatron.outlast_config(SimpleNamespace(ft=bridge_ft(new_setting=3)))
    assert megatron.as_outlast(None, InProcessRestartConfig) is None


@pytest.mark.parametrize(
    "values",
    [
        {"ckpt_step": 100},
        {"finetune": True},
        {"pretrained_checkpoint": "/p"},
        {"exit_on_missing_checkpoint": True},
        {"save_optim": False},
        {"load_rng": False},
        {"no_load_optim": True},
    ],
)
def test_settings_that_change_resumption_are_rejected(values: dict[str, Any]) -> None:
    """A setting that changes the resumed state is rejected, from Bridge or Megatron-LM; its default is accepted."""
    (name, value), unchanged = next(iter(values.items())), {"no_load_optim": None, "finetune": False, "ckpt_step": None}
    text = f"checkpoint.{name}={value!r} is not supported"
    for one in (
        argparse.Namespace(save="/c", **values),
        SimpleNamespace(checkpoint=SimpleNamespace(save="/c", **values)),
    ):
        with pytest.raises(ConfigError, match=text):
            megatron.outlast_config(one)
    assert megatron.outlast_config(argparse.Namespace(save="/c", **unchanged)).checkpoint is not None


def test_outlast_sections_are_accepted() -> None:
    """Sections may be outlast's own classes."""
    preemption = PreemptionConfig(preempt_time=30.0)
    container = SimpleNamespace(checkpoint=megatron.CheckpointConfig(save="/c", save_interval=3), train=preemption)
    config = megatron.outlast_config(container)
    assert config.checkpoint is not None
    assert (config.checkpoint.directory, config.checkpoint.save_interval) == ("/c", 3)
    assert config.preemption is preemption
    assert megatron.outlast_config(SimpleNamespace(checkpoint=config.checkpoint)).checkpoint is config.checkpoint
    with pytest.raises(ConfigError, match=r"ft\.directory='/c' has no counterpart"):
        megatron.as_outlast(config.checkpoint, megatron.FaultToleranceConfig, "ft")


def test_settings_are_mutable_until_they_are_read() -> None:
    """An unknown name is rejected when it is set, contradictions when the settings are read, and changes afterwards."""
    cfg = megatron.ConfigContainer()
    for section, name, suggestion in (
        (cfg, "checkpont", "'checkpoint'"),
        (cfg.checkpoint, "async_sav", "'async_save'"),
        (cfg.train, "exit_signal_handle", "'exit_signal_handler'"),
    ):
        with pytest.raises(ConfigError, match=f"has no setting '{name}'; did you mean {suggestion}"):
            setattr(section, name, True)
    with pytest.raises(TypeError, match="enable_ft_pakage"):
        megatron.FaultToleranceConfig(enable_ft_pakage=True)  # type: ignore[call-arg]
    cfg.ft = megatron.FaultToleranceConfig(enable_ft_package=True)
    cfg.inprocess_restart = megatron.InProcessRestartConfig(soft_timeout=100.0)  # more than the hard timeout
    with pytest.raises(ConfigError, match=r"soft_timeout=100\.0 must be smaller than hard_timeout=90\.0"):
        cfg.inprocess_restart.finalize()
    cfg.inprocess_restart.hard_timeout = 110.0
    with pytest.raises(ConfigError, match=r"nothing is saved: set checkpoint\.save"):
        megatron.outlast_config(cfg)
    cfg.checkpoint.save = "/ckpt"
    cfg.ft.rank_section_timeouts = {"step": 60.0}
    config = megatron.outlast_config(cfg)
    assert config.fault_tolerance is not None
    assert config.fault_tolerance.given == {"enable_ft_package": True, "rank_section_timeouts": {"step": 60.0}}
    assert config.in_process_restart is not None
    assert config.in_process_restart.hard_timeout == 110.0
    assert (config.preemption and config.preemption.exit_signal_handler) is True
    assert megatron.outlast_config(cfg) == config
    for section, name in (
        (cfg, "nvrx_straggler"),
        (cfg.checkpoint, "save"),
        (cfg.train, "train_iters"),
        (cfg.ft, "calc_ft_timeouts"),
        (cfg.rerun_state_machine, "rerun_mode"),
        (cfg.inprocess_restart, "enabled"),
    ):
        with pytest.raises(ConfigError, match=f"{name}=None is set too late: the settings were read before"):
            setattr(section, name, None)


def test_bridge_sections_are_accepted_like_outlasts() -> None:
    """A section of Bridge is accepted, checked and frozen wherever one of outlast is."""
    straggler = megatron.NVRxStragglerDetectionConfig(report_time_interval=0.0)
    restart = megatron.InProcessRestartConfig(soft_timeout=100.0)
    for make in (
        lambda: StragglerDetector(straggler),
        lambda: Wrapper(restart),
        lambda: Config(straggler_detection=straggler),
        lambda: megatron.maybe_wrap_for_inprocess_restart(print, restart),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()
    straggler.report_time_interval = 5.0
    assert Config(straggler_detection=straggler).straggler_detection == StragglerDetectionConfig(
        report_time_interval=5.0
    )
    with pytest.raises(ConfigError, match="too late"):
        straggler.report_time_interval = 6.0
    ft = megatron.FaultToleranceConfig(rank_section_timeouts={"step": -1.0})
    with pytest.raises(ConfigError, match="must be above 0 seconds"):
        RankMonitor(ft)
    assert open_monitor() is None


def test_bridge_defaults_are_accepted() -> None:
    """Bridge's defaults, no signal handler with SIGTERM, are not a contradiction."""
    bridge = SimpleNamespace(exit_signal_handler=False, exit_signal=signal.SIGTERM, train_iters=3)
    config = megatron.outlast_config(SimpleNamespace(train=bridge))
    assert config.preemption is not None
    assert not config.preemption.exit_signal_handler
    bridge.exit_signal = signal.SIGUSR1
    with pytest.raises(ConfigError, match="exit_signal='SIGUSR1' has no effect while exit_signal_handler is off"):
        megatron.outlast_config(SimpleNamespace(train=bridge))


RESTART = """
import os
from types import SimpleNamespace
import torch, torch.distributed as dist
from outlast.integrations.megatron import InProcessRestartConfig, maybe_wrap_for_inprocess_restart
started_as = int(os.environ["RANK"])

class Queue:
    def close(self, abort=False):
        print("queue closed", abort, flush=True)

class GlobalState:
    def __init__(self):
        self._async_calls_queue, self.calls = Queue(), 0
    def reset_for_restart(self):
        print("state reset", flush=True)

def pretrain(state, forward_step, store=None, inprocess_call_wrapper=None):
    assert store is None and inprocess_call_wrapper is None
    state.calls += 1
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if state.calls == 1 and dist.get_rank() == 0:
        raise RuntimeError("example fault")
    dist.all_reduce(total)
    return state.calls, total.item()

state = GlobalState()
plain, store = maybe_wrap_for_inprocess_restart(pretrain, InProcessRestartConfig(enabled=False), state)
assert plain is pretrain and store is None
wrapped, store = maybe_wrap_for_inprocess_restart(pretrain, InProcessRestartConfig(enabled=True), state)
print("returned", wrapped(state, None, store=store), flush=True)
"""


@pytest.mark.slow
@pytest.mark.process
def test_wrap_restarts_the_function_and_resets_bridge(tmp_path: Path) -> None:
    """After a failure of rank 0 both functions are called again, with Bridge's state reset and its queue closed."""
    (script := tmp_path / "train.py").write_text(RESTART)
    with RankProcesses(script, world_size=2, directory=tmp_path / "logs") as ranks:
        assert ranks.wait(timeout_s=300) == [0, 0], ranks.tails()
        for rank in range(2):
            output = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
            assert "returned (2, 4.0)" in output, output
            assert output.count("state reset") == output.count("queue closed True") == 1, output


def context(step: int = 0, ft: Any = None) -> SimpleNamespace:
    """Return the context that Bridge passes to its hooks."""
    state = SimpleNamespace(cfg=SimpleNamespace(ft=ft), train_state=SimpleNamespace(step=step), _async_calls_queue=None)
    return SimpleNamespace(state=state, work=lambda: None)


def rank_state(monitor: RankMonitor) -> RankState:
    """Return the state of this worker in the heartbeat memory."""
    return monitor._board.read(0)


def sections(monitor: RankMonitor) -> list[str]:
    """Return the names of the open sections."""
    return [one.name for one in rank_state(monitor).sections]


class BridgeManager:
    """Substitute for the parts of Bridge's manager that outlast calls."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpointing_context: dict[str, Any] = {"config": checkpoint_config}

    def save(self, ctx: Any, callback_manager: Any) -> None:
        monitor = open_monitor()
        assert monitor is not None
        self.checkpointing_context["sections"] = sections(monitor)
        if (queue := ctx.state._async_calls_queue) is not None:
            queue.schedule_async_request(AsyncRequest(ctx.work, (), []))

    def load(self, ctx: Any) -> tuple[int, int]:
        return ctx.state.train_state.step, 1234

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        if state._async_calls_queue is not None:
            state._async_calls_queue.maybe_finalize_async_calls(blocking)
            if terminate:
                state._async_calls_queue.close()


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the modules of Bridge that outlast imports; close the monitor that a test leaves open."""
    modules = {
        "megatron.bridge": {},
        "megatron.bridge.training": {},
        "megatron.bridge.training.checkpointing": {"DefaultCheckpointManager": BridgeManager},
        "megatron.bridge.training.inprocess_restart": {},
        "megatron.bridge.training.callbacks": {"CallbackManager": Callbacks},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent = importlib.import_module(name.rpartition(".")[0])
        monkeypatch.setattr(parent, name.rpartition(".")[2], module, raising=False)
    yield
    if (monitor := open_monitor()) is not None:
        monitor.close()


class Callbacks:
    """Substitute for the parts of Bridge's CallbackManager that outlast calls."""

    def __init__(self) -> None:
        self.called: dict[str, Any] = {}

    def register(self, event_name: str, fn: Any) -> None:
        self.called[event_name] = fn


@pytest.mark.process
def test_hooks_monitor_steps_and_report_durable_saves(bridge: None) -> None:
    """Steps, saves and loads are sections; a saved or loaded iteration is durable; after the training no timeout is
    enforced."""
    callbacks = megatron.BridgeCallback().register(Callbacks()).called
    manager = megatron.BridgeCheckpointManager(SimpleNamespace(async_save=False))
    assert manager.load(context(step=5)) == (5, 1234)
    monitor = open_monitor()
    assert monitor is not None
    assert rank_state(monitor).durable_iteration == 5
    callbacks["on_train_start"](context(step=5))
    callbacks["on_train_step_start"](context(step=5))
    assert sections(monitor) == ["step"]
    callbacks["on_train_step_end"](context(step=5))
    assert (sections(monitor), rank_state(monitor).iteration) == ([], 6)
    manager.save(context(step=6), None)
    assert manager.checkpointing_context["sections"] == ["checkpointing"]
    assert rank_state(monitor).durable_iteration == 6
    assert manager.checkpointing_context["config"] is manager.checkpoint_config
    for event in ("on_eval_start", "on_eval_end", "on_train_end"):
        assert not rank_state(monitor).finished
        callbacks[event](context())
    assert rank_state(monitor).finished
    callbacks["on_train_start"](context(step=6))
    later = open_monitor()
    assert later is not None
    assert not rank_state(later).finished
    with pytest.raises(ConfigError, match="leave BridgeCallback out"):
        megatron.BridgeCallback().on_train_start(context(ft=bridge_ft(enable_ft_package=True)))


@pytest.mark.process
def test_nan_weights_at_the_end_exit_with_17(bridge: None, caplog: pytest.LogCaptureFixture) -> None:
    """A rank whose weights are NaN after the last step exits with 17."""
    callbacks = megatron.BridgeCallback().register(Callbacks()).called
    chunk = torch.nn.Linear(2, 2)
    training = context(step=5)
    training.model = [torch.nn.Linear(2, 2), chunk]
    callbacks["on_train_start"](training)
    chunk.weight.data[0, 0] = float("nan")
    with pytest.raises(SystemExit) as raised:
        callbacks["on_train_end"](training)
    assert raised.value.code == ExitReason.FAILED_VALIDATION
    assert "weights that are NaN or infinite on this rank: model.1.weight" in caplog.text


@pytest.mark.process
def test_only_finalized_saves_are_durable(bridge: None) -> None:
    """A failed asynchronous save is not reported as durable; the next successful one is."""
    queue, may_end = AsyncCallsQueue(), threading.Event()
    manager = megatron.BridgeCheckpointManager(SimpleNamespace(async_save=True))
    state = SimpleNamespace(_async_calls_queue=queue, train_state=SimpleNamespace(step=0))

    def save(step: int, work: Callable[[], Any]) -> None:
        state.train_state.step = step
        manager.save(SimpleNamespace(state=state, work=work))

    def fail() -> None:
        raise OSError("full")

    try:
        save(1, lambda: None)
        monitor = open_monitor()
        assert monitor is not None
        durable_before = rank_state(monitor).durable_iteration
        manager.finalize_async_saves(state, blocking=True)
        assert rank_state(monitor).durable_iteration == 1 != durable_before
        save(2, fail)
        while queue.get_num_unfinalized_calls():  # the failure is logged, and training continues
            manager.finalize_async_saves(state)
        assert rank_state(monitor).durable_iteration == 1
        save(3, fail)
        with pytest.raises(CheckpointError):
            manager.finalize_async_saves(state, blocking=True)
        save(4, lambda: may_end.wait(60))
        manager.finalize_async_saves(state)
        assert rank_state(monitor).durable_iteration == 1
        may_end.set()
        manager.finalize_async_saves(state, blocking=True, terminate=True)
        assert rank_state(monitor).durable_iteration == 4
    finally:
        may_end.set()
        queue.close(abort=True)


@pytest.mark.process
def test_later_monitor_replaces_the_hooks_monitor(bridge: None) -> None:
    """A later monitor continues the open section, and the hooks do not finish it."""
    callbacks = megatron.BridgeCallback().register(Callbacks()).called
    callbacks["on_train_start"](context())
    callbacks["on_train_step_start"](context())
    later = RankMonitor()
    callbacks["on_eval_start"](context())
    assert sections(later) == ["step", "evaluation"]
    callbacks["on_eval_end"](context())
    callbacks["on_train_end"](context())
    assert (sections(later), rank_state(later).finished) == ([], False)


@pytest.mark.slow
def test_documented_code_runs(bridge: None) -> None:
    """Every Python block of the page runs with the substitutes for Bridge's modules."""
    for block in pages.python_blocks("megatron.md"):
        namespace: dict[str, Any] = {"__name__": "page"}
        sys.modules["page"] = ModuleType("page")
        exec(block, namespace)
        if "outlast_config" in namespace:
            assert (namespace["config"].checkpoint.directory, namespace["config"].checkpoint.save_interval) == (
                "/ckpt",
                500,
            )
            assert namespace["config"].fault_tolerance.enable_ft_package
        if "callbacks" in namespace:
            assert set(namespace["callbacks"].called) >= {"on_train_step_start", "on_train_step_end"}
        if "inprocess_restart" in namespace:
            outlast_wrap = megatron.maybe_wrap_for_inprocess_restart
            assert namespace["inprocess_restart"].maybe_wrap_for_inprocess_restart is outlast_wrap
