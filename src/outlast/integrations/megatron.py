"""Settings of Megatron-LM and Megatron-Bridge as outlast's, and the wrap, manager and callback for their loops.

The config classes have Megatron-Bridge's names, fields and defaults (:mod:`outlast.integrations.bridge_config`);
:func:`outlast_config` converts a ``ConfigContainer``, Bridge's or the one here, or Megatron-LM's parsed arguments.
Megatron's imports from ``nvidia_resiliency_ext`` are served by :func:`outlast.integrations.nvrx.install` and need
nothing from this module.

Megatron's modules are imported only when Bridge's manager is created, so that settings can be read without a GPU and
without Megatron.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from outlast import config as ours
from outlast.config import Config, PreemptionConfig
from outlast.config.base import Changeable
from outlast.errors import ConfigError, ExitReason
from outlast.inprocess.rank import Wrapper
from outlast.integrations.bridge_config import BridgeCheckpointConfig as CheckpointConfig
from outlast.integrations.bridge_config import BridgeFaultToleranceConfig as FaultToleranceConfig
from outlast.integrations.bridge_config import BridgeInProcessRestartConfig as InProcessRestartConfig
from outlast.integrations.bridge_config import BridgeRerunStateMachineConfig as RerunStateMachineConfig
from outlast.integrations.bridge_config import BridgeStragglerDetectionConfig as NVRxStragglerDetectionConfig
from outlast.integrations.bridge_config import ConfigContainer, MegatronCheckpointConfig, TrainingConfig
from outlast.monitor.rank_monitor import RankMonitor, open_monitor
from outlast.runtime.diagnoses import leave_diagnosis
from outlast.session.checks import FiniteEnd

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

__all__ = [
    "BridgeCallback",
    "BridgeCheckpointManager",
    "CheckpointConfig",
    "ConfigContainer",
    "FaultToleranceConfig",
    "InProcessRestartConfig",
    "NVRxStragglerDetectionConfig",
    "RerunStateMachineConfig",
    "TrainingConfig",
    "as_outlast",
    "maybe_wrap_for_inprocess_restart",
    "outlast_config",
]

# -- settings -----------------------------------------------------------------------------------------------------

_SECTIONS: Mapping[str, type] = {
    "ft": ours.FaultToleranceConfig,
    "nvrx_straggler": ours.StragglerDetectionConfig,
    "rerun_state_machine": ours.RerunStateMachineConfig,
    "inprocess_restart": ours.InProcessRestartConfig,
}
"""Sections of Bridge's container, and outlast's class for each."""
_PREEMPTION = (
    *("exit_signal_handler", "exit_signal", "exit_signal_handler_for_dataloader"),
    *("exit_interval", "exit_duration_in_mins"),
)
_OF_LM = {"check_for_nan_in_loss_and_grad": "check_for_nan_in_loss"}
"""Megatron-LM's names of settings that have another name in Bridge."""
_RESUMES_OTHERWISE: Mapping[str, bool | None] = {
    **{"ckpt_step": None, "finetune": False, "pretrained_checkpoint": None, "exit_on_missing_checkpoint": False},
    **{"save_optim": True, "save_rng": True, "load_optim": True, "load_rng": True},
    **{"no_save_optim": False, "no_save_rng": False, "no_load_optim": False, "no_load_rng": False},  # Megatron-LM's
}
"""Checkpoint settings that change what is resumed, and the only supported value of each."""


def outlast_config(megatron: Any, *, run_dir: str | None = None) -> Config:
    """Return a session's settings from Megatron's. Settings of the classes here cannot be changed afterwards.

    Args:
        megatron: A ``ConfigContainer``, Bridge's or the one here, or an object with sections of its names
            (``checkpoint``, ``ft``, ``nvrx_straggler``, ``rerun_state_machine``, ``inprocess_restart``, ``train``),
            each an object with Bridge's fields, or one of outlast's; or the ``argparse.Namespace`` of Megatron-LM.
            Other settings in Bridge's ``checkpoint`` and ``train`` are ignored unless they change what is resumed.
        run_dir: The run directory.

    Raises:
        ConfigError: A setting is not supported, or contradicts another.
    """
    sections = _sections_of(megatron) if isinstance(megatron, argparse.Namespace) else megatron
    found: dict[str, Any] = {
        name: _convert(getattr(sections, name, None), kind, name) for name, kind in _SECTIONS.items()
    }
    saved = _read_checkpoint(getattr(sections, "checkpoint", None))
    straggler, older = found["nvrx_straggler"], getattr(sections, "straggler", None)
    if straggler is not None and straggler.enabled and getattr(older, "log_straggler", False):
        raise ConfigError("nvrx_straggler.enabled and straggler.log_straggler are both on; switch the older one off")
    if found["ft"] is not None and found["ft"].enable_ft_package and saved is None:
        raise ConfigError("ft.enable_ft_package is on, but nothing is saved: set checkpoint.save")
    config = Config(
        run_dir=run_dir,
        checkpoint=saved,
        fault_tolerance=found["ft"],
        straggler_detection=straggler,
        rerun_state_machine=found["rerun_state_machine"],
        in_process_restart=found["inprocess_restart"],
        preemption=_read_preemption(getattr(sections, "train", None)),
    )
    for one in (sections, *(getattr(sections, name, None) for name in (*_SECTIONS, "checkpoint", "train"))):
        if isinstance(one, Changeable):
            one.freeze()
    return config


def _checked(section: Any) -> Any:
    return section.checked() if isinstance(section, Changeable) else section


def _read_checkpoint(section: Any) -> ours.CheckpointConfig | None:
    section = _checked(section)
    if isinstance(section, ours.CheckpointConfig):
        return section
    values = _values(section)
    for name, usual in _RESUMES_OTHERWISE.items():
        if (value := values.get(name, usual)) is not None and value != usual:
            raise ConfigError(
                f"checkpoint.{name}={value!r} is not supported: outlast always loads the complete state of the "
                f"newest valid checkpoint; leave {name} out"
            )
    known = [field.name for field in dataclasses.fields(MegatronCheckpointConfig)]
    return MegatronCheckpointConfig(**{name: values[name] for name in known if name in values}).to_outlast()


def _read_preemption(section: Any) -> PreemptionConfig | None:
    section = _checked(section)
    if isinstance(section, PreemptionConfig):
        return section
    values = _values(section)
    given = {name: values[name] for name in _PREEMPTION if name in values}
    if not given.get("exit_signal_handler", True) and given.get("exit_signal") == signal.SIGTERM:
        del given["exit_signal"]  # Megatron's default, not a choice of the user
    if (number := given.get("exit_signal")) is not None and not isinstance(number, str):
        given["exit_signal"] = signal.Signals(number).name
    return PreemptionConfig(**given) if given else None


def as_outlast(section: Any, kind: type[C], name: str = "") -> C | None:
    """Return a section of Megatron's settings as outlast's; ``None`` for none.

    A section of the classes here cannot be changed afterwards.

    Args:
        section: An object with Bridge's fields, a mapping of them, or one of outlast's.
        kind: Outlast's class.
        name: Name of the section, for messages.

    Raises:
        ConfigError: A field unknown to outlast has a value other than its default, or a value is invalid.
    """
    found = _convert(section, kind, name)
    if isinstance(section, Changeable):
        section.freeze()
    return found


def _convert(section: Any, kind: type[C], name: str) -> C | None:
    section = _checked(section)
    if section is None or isinstance(section, kind):
        return section
    known = {field.name for field in dataclasses.fields(cast(Any, kind)) if field.init}
    values = _values(section)
    fields = dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()
    defaults = {field.name: field.default for field in fields}
    for field, value in values.items():
        if field not in known and not field.startswith("_") and value != defaults.get(field):
            where = f"{name}." if name else ""
            raise ConfigError(f"{where}{field}={value!r} has no counterpart in outlast; leave it out")
    return kind(**{field: value for field, value in values.items() if field in known})


def _values(section: Any) -> dict[str, Any]:
    """Return the values of a section by name; empty for ``None``."""
    if section is None or isinstance(section, Mapping):
        return dict(section or {})
    if not dataclasses.is_dataclass(section):
        return dict(vars(section))
    fields = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {**fields, **getattr(section, "__dict__", {})}  # also attributes that are not fields


def _sections_of(args: argparse.Namespace) -> argparse.Namespace:
    """Return Megatron-LM's flat arguments in Bridge's sections."""
    values = {_OF_LM.get(name, name): value for name, value in vars(args).items()}
    prefix = "inprocess_"
    restart = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    restart["enabled"] = restart.pop("restart", False)

    def pick(kind: type) -> dict[str, Any]:
        return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}

    resumed = {name: values[name] for name in _RESUMES_OTHERWISE if name in values}
    return argparse.Namespace(
        checkpoint={**pick(MegatronCheckpointConfig), **resumed},
        ft=pick(ours.FaultToleranceConfig) or None,
        rerun_state_machine=pick(ours.RerunStateMachineConfig) or None,
        inprocess_restart={name: value for name, value in restart.items() if value is not None},
        train=values,
    )


# -- restart in process --------------------------------------------------------------------------------------------


def maybe_wrap_for_inprocess_restart(
    train_fn: Callable[P, R], config: Any, state: Any = None
) -> tuple[Callable[P, R | None], None]:
    """Return a training function with in-process restart, and ``None`` for the store, which is not needed.

    Replaces the function of this name in Megatron-Bridge (not Megatron-LM's, which is called without a config). Each
    call of the function creates a new store at ``MASTER_ADDR`` and ``MASTER_PORT``; rank 0 may fail, too.

    Args:
        train_fn: The function, such as Bridge's ``_pretrain``, which creates the process groups.
        config: Bridge's ``InProcessRestartConfig``, or outlast's; if disabled, the function is returned as it is.
        state: Bridge's ``GlobalState``: before a restart its queue of asynchronous saves is closed, and it is reset.

    Raises:
        ConfigError: A setting is invalid.
    """
    settings = as_outlast(config, ours.InProcessRestartConfig, "inprocess_restart")
    if settings is None or not settings.enabled:
        return train_fn, None

    def abort(_: Any) -> None:
        if (queue := getattr(state, "_async_calls_queue", None)) is not None:
            state._async_calls_queue = None
            queue.close(abort=True)

    def finalize(_: Any) -> None:
        abort(None)  # the engine does not call it if the function has failed by itself
        for name in ("megatron.bridge.training.initialize", "megatron.training.training"):
            if (destroy := getattr(sys.modules.get(name), "destroy_global_state", None)) is not None:
                destroy()
        if (reset := getattr(state, "reset_for_restart", None)) is not None:
            reset()

    protected = Wrapper(settings, abort=abort, finalize=finalize)(train_fn)

    @functools.wraps(train_fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return protected(*args, **kwargs)

    return wrapped, None


# -- Megatron-Core's re-run state machine --------------------------------------------------------------------------

_RERUN = "megatron.core.rerun_state_machine"
_TRACKERS = (
    ("megatron.training.checkpointing", "get_checkpoint_tracker_filename"),
    ("megatron.bridge.training.checkpointing", "get_checkpoint_tracker_filename"),
    ("megatron.bridge.training.checkpointing", "get_checkpoint_train_state_filename"),
)
"""Functions that return the file in which a save records the newest checkpoint."""
_note_rejection: Callable[[int, int], bool] | None = None


def follow_rerun_machine(note: Callable[[int, int], bool]) -> None:
    """Report an invalid result of Megatron-Core's re-run state machine before the process exits.

    Megatron then saves the state for a diagnosis as its newest checkpoint. If that state descends from a suspect copy,
    the next start would load it instead of an older good one: so the save keeps its files but does not become the
    newest. Without Megatron-Core's re-run state machine in the process nothing is done.

    Args:
        note: Called with the number of optimizer steps done and the exit code, 16 or 17; returns whether the state is
            suspect. Only the function of the last call is used.
    """
    global _note_rejection
    _note_rejection = note
    machine = getattr(sys.modules.get(_RERUN), "RerunStateMachine", None)
    if machine is None or hasattr(machine.should_checkpoint_and_exit, "__wrapped__"):
        return
    decide = machine.should_checkpoint_and_exit

    @functools.wraps(decide)
    def should_checkpoint_and_exit(self: Any) -> tuple[bool, bool, int]:
        saves, exits, code = decide(self)
        if exits and _note_rejection is not None and _note_rejection(self.current_iteration - 1, code) and saves:
            _keep_trackers()
        return saves, exits, code

    machine.should_checkpoint_and_exit = should_checkpoint_and_exit


def _keep_trackers() -> None:
    """Use other tracker files for the next saves of this process, which is about to exit."""
    kept = False
    for module_name, function_name in _TRACKERS:
        module = sys.modules.get(module_name)
        name_file = getattr(module, function_name, None)
        if name_file is None:
            continue
        is_tracker = function_name == "get_checkpoint_tracker_filename"

        def name_other(*args: Any, _name_file: Any = name_file, _is_tracker: bool = is_tracker, **kwargs: Any) -> str:
            path: str = _name_file(*args, **kwargs)
            return f"{path}.diagnostic" if _is_tracker or len(args) + len(kwargs) > 1 else path

        setattr(module, function_name, functools.wraps(name_file)(name_other))
        kept = True
    if kept:
        log.warning("the checkpoint that is saved now is for diagnosis: it does not become the newest one")


# -- Bridge's loop -------------------------------------------------------------------------------------------------


_made: RankMonitor | None = None
"""The monitor that this module created."""


def _own_monitor(config: ours.FaultToleranceConfig | None = None, run_dir: str | None = None) -> RankMonitor:
    """Return the process's monitor; without one create one, which a later session may replace."""
    global _made
    there = open_monitor()
    if there is None:
        there = _made = RankMonitor(config, run_dir)
        there.on_replaced = lambda later: log.debug("the session's monitor takes the place of the hooks'")
    return there


_EVENTS = (
    *("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"),
    *("on_eval_start", "on_eval_end"),
)


class BridgeCallback:
    """Monitor the steps of Bridge's loop: ``pretrain(cfg, step, callbacks=manager)``, see :meth:`register`.

    Each step is a section ``step``, each evaluation ``evaluation``: ``rank_section_timeouts`` detects a hanging rank,
    and a restart reports the last iteration. A rank whose weights are NaN or infinite at the end of training exits with
    17. If ``cfg.ft.enable_ft_package`` is on, Bridge monitors its steps itself, through
    :func:`outlast.integrations.nvrx.install`, and this callback refuses to.

    Args:
        config: Timeouts; ``None`` = those of ``outlast run``.
        run_dir: The run directory; ``None`` = that of ``outlast run``.
    """

    def __init__(self, config: ours.FaultToleranceConfig | None = None, run_dir: str | None = None) -> None:
        self._config, self._run_dir = config, run_dir
        self._section: str | None = None
        self._used: RankMonitor | None = None
        self._is_finished = False
        self._finite_end: FiniteEnd | None = None

    def register(self, manager: Any) -> Any:
        """Register the callback with Bridge's ``CallbackManager``, which is returned."""
        for event in _EVENTS:
            manager.register(event, getattr(self, event))
        return manager

    def on_train_start(self, context: Any) -> None:
        """Start monitoring.

        Raises:
            ConfigError: Bridge monitors its steps itself.
        """
        ft = getattr(context.state.cfg, "ft", None)
        if ft is not None and ft.enable_ft_package:
            raise ConfigError(
                "cfg.ft.enable_ft_package is on, so that Bridge watches its steps; leave BridgeCallback out"
            )
        if self._is_finished and _made is not None and _made is open_monitor():
            _made.close()  # of an earlier training
        self._section, self._is_finished = None, False
        monitor = self._monitor()
        monitor.set_iteration(context.state.train_state.step)
        self._finite_end = FiniteEnd(_models_of(context), monitor.env, is_saved=False)

    def on_train_step_start(self, context: Any) -> None:
        self._start("step")

    def on_train_step_end(self, context: Any) -> None:
        """End the section; Bridge counts the step after this."""
        self._end("step")
        self._monitor().set_iteration(context.state.train_state.step + 1)

    def on_eval_start(self, context: Any) -> None:
        self._start("evaluation")

    def on_eval_end(self, context: Any) -> None:
        self._end("evaluation")

    def on_train_end(self, context: Any) -> None:
        """Stop monitoring; a session's monitor continues until the session ends.

        Raises:
            SystemExit: This rank's weights are NaN or infinite (17).
        """
        monitor = self._monitor()
        monitor.end_all_sections()
        iteration = context.state.train_state.step
        broken = None if self._finite_end is None else self._finite_end.judge(_models_of(context), iteration)
        if broken is not None:
            monitor.set_leaving(ExitReason.FAILED_VALIDATION)
            leave_diagnosis(monitor.env, broken)
            raise SystemExit(int(ExitReason.FAILED_VALIDATION))
        if monitor is _made:
            monitor.finish()
        self._section, self._is_finished = None, True

    def _monitor(self) -> RankMonitor:
        """Return the process's monitor; the open section is opened in a new one."""
        there = _own_monitor(self._config, self._run_dir)
        if there is not self._used:
            self._used = there
            if self._section is not None:
                there.start_section(self._section)
        return there

    def _start(self, name: str) -> None:
        self._monitor().start_section(name)
        self._section = name

    def _end(self, name: str) -> None:
        self._monitor().end_section(name)
        self._section = None


def _models_of(context: Any) -> dict[str, Any]:
    return {"model": getattr(context, "model", None)}


class BridgeCheckpointManager:
    """Bridge's checkpoint manager with monitoring: ``cfg.checkpoint.custom_manager_class`` of Bridge 0.4 and later.

    Bridge saves and loads as without it; local checkpoints are the engine's if
    :func:`outlast.integrations.nvrx.install` was called. Saves and loads are the sections ``checkpointing`` and
    ``setup``. Committed checkpoints are reported, so that a launcher can detect progress and reset its restart budgets.
    Register the name first, as Bridge requires::

        from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

        register_allowed_target_prefix("outlast.")

    Args:
        checkpoint_config: Bridge's.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        checkpointing = importlib.import_module("megatron.bridge.training.checkpointing")
        self.checkpoint_config = checkpoint_config
        self._default = checkpointing.DefaultCheckpointManager(checkpoint_config)
        self._queue: Any = None
        """Bridge's queue of asynchronous saves, once it was used."""
        self._pending: dict[int, int] = {}
        """Iterations of asynchronous saves that are not finalized yet, by the number of the call."""

    @property
    def checkpointing_context(self) -> Any:
        """Bridge's state between saves."""
        return self._default.checkpointing_context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save as Bridge does."""
        monitor = _own_monitor()
        monitor.report_progress()
        before = getattr(getattr(ctx.state, "_async_calls_queue", None), "call_idx", -1)
        with monitor.section("checkpointing"):
            self._default.save(ctx, callback_manager)
        iteration, queue = int(ctx.state.train_state.step), getattr(ctx.state, "_async_calls_queue", None)
        if not self.checkpoint_config.async_save:
            monitor.set_durable_iteration(iteration)
        elif queue is not None and queue.call_idx > before:
            self._follow(queue)
            self._pending[queue.call_idx] = iteration

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load as Bridge does; return the iteration, and the number of floating point operations so far."""
        monitor = _own_monitor()
        monitor.report_progress()
        with monitor.section("setup"):
            iteration, num_operations = self._default.load(ctx)
        if iteration > 0:
            monitor.set_restored()
            monitor.set_durable_iteration(iteration)
        monitor.set_iteration(iteration)
        return iteration, num_operations

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Finalize as Bridge does."""
        with _own_monitor().section("checkpointing") if blocking else contextlib.nullcontext():
            self._default.finalize_async_saves(state, blocking=blocking, terminate=terminate)

    def _follow(self, queue: Any) -> None:
        """Report what a queue finalizes, whichever code requests it; failed calls are never reported."""
        if queue is self._queue:
            return
        self._queue, self._pending = queue, {}
        finalize = queue.maybe_finalize_async_calls

        @functools.wraps(finalize)
        def finalize_and_report(*args: Any, **kwargs: Any) -> list[int]:
            finalized: list[int] = finalize(*args, **kwargs)
            if queue is self._queue:
                self._report(finalized)
            return finalized

        queue.maybe_finalize_async_calls = finalize_and_report

    def _report(self, finalized: list[int]) -> None:
        durable = [self._pending[number] for number in finalized if number in self._pending]
        if durable:
            _own_monitor().set_durable_iteration(max(durable))
            newest = max(finalized)  # calls end in order: older ones have failed
            self._pending = {number: iteration for number, iteration in self._pending.items() if number > newest}
