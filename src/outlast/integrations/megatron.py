"""Megatron-LM's and Megatron-Bridge's settings as ours, and what their loops take: a wrap, a manager, a callback.

The config classes are called as in Megatron-Bridge and have its fields and defaults; :func:`outlast_config` makes one
``outlast.Config`` of a Bridge ``ConfigContainer``, or of Megatron-LM's parsed arguments. What Megatron imports from
``nvidia_resiliency_ext`` (timeouts, stragglers, local checkpoints, restarts in process) is offered by
:func:`outlast.integrations.nvrx.install`; nothing here is needed for that.

Bridge's modules are imported only when its manager is made, so that settings can be read where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

from outlast import config as ours
from outlast.config import (
    Config,
    FaultToleranceConfig,
    InProcessRestartConfig,
    PreemptionConfig,
    StragglerDetectionConfig,
)
from outlast.config.base import require
from outlast.errors import ConfigError
from outlast.inprocess.rank import Wrapper
from outlast.monitor.rank_monitor import RankMonitor, open_monitor

if importlib.util.find_spec("megatron") is None:
    raise ImportError(
        "outlast.integrations.megatron needs Megatron-Core, which is not installed: pip install 'outlast[megatron]'",
        name="megatron",
    )

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

__all__ = [
    "BridgeCallback",
    "BridgeCheckpointManager",
    "BridgeRerunStateMachineConfig",
    "CheckpointConfig",
    "FaultToleranceConfig",
    "InProcessRestartConfig",
    "MegatronCheckpointConfig",
    "NVRxStragglerDetectionConfig",
    "RerunStateMachineConfig",
    "as_outlast",
    "maybe_wrap_for_inprocess_restart",
    "outlast_config",
]

NVRxStragglerDetectionConfig = StragglerDetectionConfig
"""Bridge's name; its own ``StragglerDetectionConfig`` is that of Megatron-LM's older detector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeRerunStateMachineConfig(ours.RerunStateMachineConfig):
    """Ours with Bridge's default; Megatron-LM's is ``validate_results``, as ours.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    rerun_mode: str = "disabled"
    """As ours; nothing is judged unless it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCheckpointConfig:
    """The settings of Bridge's ``CheckpointConfig`` that say where and how often is saved; the others are the model's.

    Raises:
        ConfigError: A value has no counterpart here, or contradicts another.
    """

    save: str | None = None
    """Folder that every rank sees."""
    load: str | None = None
    """Folder to load from when ``save`` holds nothing yet."""
    save_interval: int | None = None
    """Iterations between two saves to it; ``None`` = none."""
    most_recent_k: int | None = -1
    """Newest generations to keep there; -1 = all, 1 is refused."""
    save_retain_interval: int | None = None
    """Generations whose iteration is a multiple of it are kept forever."""
    async_save: bool = False
    """Save beside training."""
    async_strategy: str = "nvrx"
    """``nvrx`` or ``mcore``: the engine saves by itself, whichever it is."""
    ckpt_format: str = "torch_dist"
    """Only this one."""
    non_persistent_save_interval: int | None = None
    """Iterations between two saves near the ranks."""
    non_persistent_ckpt_type: str | None = None
    """``local``: to ``non_persistent_local_ckpt_dir``; ``in_memory``: to memory alone; ``global`` is refused."""
    non_persistent_global_ckpt_dir: str | None = None
    """Refused."""
    non_persistent_local_ckpt_dir: str | None = None
    """A folder on a disk of each node, or in memory."""
    non_persistent_local_ckpt_algo: str = "fully_parallel"
    """``fully_parallel`` or ``atomic``; each rank's file holds all of its own state with both."""
    replication: bool = False
    """Copy local generations to other nodes."""
    replication_jump: int | None = None
    """Ranks between a rank and the one whose node gets its copy; ``None`` = the ranks of a node."""
    replication_factor: int = 2
    """Nodes that hold each part."""
    verify_integrity: bool = False
    """Every byte is compared with its digest before it is loaded, with this and without."""
    custom_manager_class: str | None = None
    """Only :class:`BridgeCheckpointManager`, by its full name."""

    def __post_init__(self) -> None:
        text = f"async_strategy={self.async_strategy!r} must be nvrx or mcore; the engine saves by itself with both"
        require(self.async_strategy in ("nvrx", "mcore"), text)
        text = (
            f"non_persistent_global_ckpt_dir={self.non_persistent_global_ckpt_dir!r} is not supported: non-persistent "
            "generations stay near their ranks; set non_persistent_local_ckpt_dir, or a shorter save_interval"
        )
        require(self.non_persistent_global_ckpt_dir is None, text)
        own = f"{__name__}.{BridgeCheckpointManager.__name__}"
        text = f"custom_manager_class={self.custom_manager_class!r} is not outlast's; leave it out, or write {own}"
        require(self.custom_manager_class in (None, own), text)
        require(
            not self.async_save or self.ckpt_format == "torch_dist",
            f"async_save works with ckpt_format='torch_dist' only, not {self.ckpt_format!r}",
        )
        if self.save is not None or self.non_persistent_local_ckpt_dir is not None:
            self.to_outlast()  # its checks

    def to_outlast(self) -> ours.CheckpointConfig | None:
        """Return ours; ``None`` when nothing is saved.

        Raises:
            ConfigError: A value has no counterpart, or contradicts another.
        """
        if self.save is None and self.non_persistent_local_ckpt_dir is None:
            return None
        kind = self.non_persistent_ckpt_type
        return ours.CheckpointConfig(
            directory=self.save,
            load=self.load if self.load != self.save else None,
            save_interval=self.save_interval or 0,
            most_recent_k=self.most_recent_k if self.most_recent_k is not None else -1,
            save_retain_interval=self.save_retain_interval or 0,
            async_save=self.async_save,
            ckpt_format=self.ckpt_format,
            non_persistent_save_interval=self.non_persistent_save_interval or 0,
            non_persistent_ckpt_type=None if kind == "None" else kind,
            local_directory=self.non_persistent_local_ckpt_dir,
            non_persistent_local_ckpt_algo=self.non_persistent_local_ckpt_algo,
            replication=self.replication,
            replication_jump=self.replication_jump,
            replication_factor=self.replication_factor,
        )


CheckpointConfig = MegatronCheckpointConfig
"""Bridge's name."""
RerunStateMachineConfig = BridgeRerunStateMachineConfig
"""Bridge's name."""


# -- settings -----------------------------------------------------------------------------------------------------

_SECTIONS: Mapping[str, type] = {
    "ft": FaultToleranceConfig,
    "nvrx_straggler": StragglerDetectionConfig,
    "rerun_state_machine": ours.RerunStateMachineConfig,
    "inprocess_restart": InProcessRestartConfig,
}
"""Sections of Bridge's container, and what each becomes."""
_PREEMPTION = (
    *("exit_signal_handler", "exit_signal", "exit_signal_handler_for_dataloader"),
    *("exit_interval", "exit_duration_in_mins"),
)
_OF_LM = {"check_for_nan_in_loss_and_grad": "check_for_nan_in_loss"}
"""Megatron-LM's names of settings that Bridge calls otherwise."""


def outlast_config(megatron: Any, *, run_dir: str | None = None) -> Config:
    """Return a session's settings from Megatron's.

    Args:
        megatron: Bridge's ``ConfigContainer``, or anything with sections of its names (``checkpoint``, ``ft``,
            ``nvrx_straggler``, ``rerun_state_machine``, ``inprocess_restart``, ``train``), each an object with Bridge's
            fields; or the ``argparse.Namespace`` of Megatron-LM.
        run_dir: The run directory.

    Raises:
        ConfigError: A setting of these sections has no counterpart here, or contradicts another.
    """
    sections = _sections_of(megatron) if isinstance(megatron, argparse.Namespace) else megatron
    found: dict[str, Any] = {
        name: as_outlast(getattr(sections, name, None), kind, name) for name, kind in _SECTIONS.items()
    }
    checkpoint = _known(getattr(sections, "checkpoint", None), MegatronCheckpointConfig)
    saved = MegatronCheckpointConfig(**checkpoint).to_outlast()
    straggler, older = found["nvrx_straggler"], getattr(sections, "straggler", None)
    if straggler is not None and straggler.enabled and getattr(older, "log_straggler", False):
        raise ConfigError("nvrx_straggler.enabled and straggler.log_straggler are both on; switch the older one off")
    if found["ft"] is not None and found["ft"].enable_ft_package and saved is None:
        raise ConfigError("ft.enable_ft_package is on, but nothing is saved: set checkpoint.save")
    preemption = _known(getattr(sections, "train", None), None, _PREEMPTION)
    if (number := preemption.get("exit_signal")) is not None and not isinstance(number, str):
        preemption["exit_signal"] = signal.Signals(number).name
    return Config(
        run_dir=run_dir,
        checkpoint=saved,
        fault_tolerance=found["ft"],
        straggler_detection=straggler,
        rerun_state_machine=found["rerun_state_machine"],
        in_process_restart=found["inprocess_restart"],
        preemption=PreemptionConfig(**preemption) if preemption else None,
    )


def as_outlast(section: Any, kind: type[C], name: str = "") -> C | None:
    """Return a section of Megatron's settings as ours; ``None`` for none.

    Args:
        section: An object with Bridge's fields, a mapping of them, or one of ours.
        kind: The class of ours.
        name: The section's, for messages.

    Raises:
        ConfigError: It has a field that ours lacks, with another value than its default; or a value is wrong.
    """
    if section is None or isinstance(section, kind):
        return section
    known = {field.name for field in dataclasses.fields(cast(Any, kind)) if field.init}
    values = dict(section) if isinstance(section, Mapping) else dict(vars(section))
    defaults = _defaults(section)
    for field, value in values.items():
        if field not in known and not field.startswith("_") and value != defaults.get(field):
            where = f"{name}." if name else ""
            raise ConfigError(f"{where}{field}={value!r} has no counterpart in outlast; leave it out")
    return kind(**{field: value for field, value in values.items() if field in known})


def _defaults(section: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(section):
        return {}
    return {field.name: field.default for field in dataclasses.fields(section)}


def _known(section: Any, kind: type | None, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return those values of a section that a class, or the names, know; the others are the training's own."""
    if section is None:
        return {}
    if kind is not None:
        names = tuple(field.name for field in dataclasses.fields(kind))
    values = section if isinstance(section, Mapping) else vars(section)
    return {name: values[name] for name in names if name in values}


def _sections_of(args: argparse.Namespace) -> argparse.Namespace:
    """Return Megatron-LM's flat arguments in Bridge's sections."""
    values = {_OF_LM.get(name, name): value for name, value in vars(args).items()}
    prefix = "inprocess_"
    restart = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    restart["enabled"] = restart.pop("restart", False)

    def pick(kind: type) -> dict[str, Any]:
        return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}

    return argparse.Namespace(
        checkpoint=pick(MegatronCheckpointConfig),
        ft=pick(FaultToleranceConfig) or None,
        rerun_state_machine=pick(ours.RerunStateMachineConfig) or None,
        inprocess_restart={name: value for name, value in restart.items() if value is not None},
        train=values,
    )


# -- restart in process --------------------------------------------------------------------------------------------


def maybe_wrap_for_inprocess_restart(
    train_fn: Callable[P, R], config: Any, state: Any = None
) -> tuple[Callable[P, R | None], None]:
    """Return a training function that is restarted in process, and no store, as none is needed.

    In place of the function of this name in Megatron-Bridge and Megatron-LM. Each call of the function meets at a store
    of its own, through ``MASTER_ADDR`` and ``MASTER_PORT``; rank 0 may die, too.

    Args:
        train_fn: The function, such as Bridge's ``_pretrain``. Process groups are made in it.
        config: Bridge's ``InProcessRestartConfig``, or ours; off: the function is returned as it is.
        state: Bridge's ``GlobalState``: its queue of asynchronous saves is closed before a restart, and it is reset.

    Raises:
        ConfigError: A setting is wrong.
    """
    settings = as_outlast(config, InProcessRestartConfig, "inprocess_restart")
    if settings is None or not settings.enabled:
        return train_fn, None

    def abort(_: Any) -> None:
        queue = getattr(state, "_async_calls_queue", None)
        if queue is not None:
            state._async_calls_queue = None
            queue.close(abort=True)

    def finalize(_: Any) -> None:
        abort(None)  # it is not called where the function had failed by itself already
        for name in ("megatron.bridge.training.initialize", "megatron.training.training"):
            destroy = getattr(sys.modules.get(name), "destroy_global_state", None)
            if destroy is not None:
                destroy()
        reset = getattr(state, "reset_for_restart", None)
        if reset is not None:
            reset()

    protected = Wrapper(settings, abort=abort, finalize=finalize)(train_fn)

    @functools.wraps(train_fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return protected(*args, **kwargs)

    return wrapped, None


# -- Bridge's loop -------------------------------------------------------------------------------------------------


def _own_monitor(config: FaultToleranceConfig | None = None, run_dir: str | None = None) -> RankMonitor:
    """Return the process's monitor; where there is none, make one."""
    there = open_monitor()
    return there if there is not None else RankMonitor(config, run_dir)


_EVENTS = (
    *("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"),
    *("on_eval_start", "on_eval_end"),
)


class BridgeCallback:
    """Watch the steps of Bridge's loop: ``pretrain(cfg, step, callbacks=manager)``, see :meth:`register`.

    Each step is the section ``step``, each evaluation ``evaluation``, so that a rank that hangs is found by
    ``rank_section_timeouts``, and a restart says how far training was. Where ``cfg.ft.enable_ft_package`` is on, Bridge
    does that by itself, through :func:`outlast.integrations.nvrx.install`: this callback then refuses.

    Args:
        config: Timeouts; ``None`` = those of ``outlast run``.
        run_dir: The run directory; ``None`` = that of ``outlast run``.
    """

    def __init__(self, config: FaultToleranceConfig | None = None, run_dir: str | None = None) -> None:
        self._config, self._run_dir = config, run_dir

    def register(self, manager: Any) -> Any:
        """Register it with Bridge's ``CallbackManager``, which is returned."""
        for event in _EVENTS:
            manager.register(event, getattr(self, event))
        return manager

    def on_train_start(self, context: Any) -> None:
        """Begin to watch.

        Raises:
            ConfigError: Bridge watches by itself.
        """
        ft = getattr(context.state.cfg, "ft", None)
        if ft is not None and ft.enable_ft_package:
            raise ConfigError(
                "cfg.ft.enable_ft_package is on, so that Bridge watches its steps; leave BridgeCallback out"
            )
        self._monitor = _own_monitor(self._config, self._run_dir)
        self._monitor.set_iteration(context.state.train_state.step)

    def on_train_step_start(self, context: Any) -> None:
        """Begin the section."""
        self._monitor.start_section("step")

    def on_train_step_end(self, context: Any) -> None:
        """End it; Bridge counts the step after this."""
        self._monitor.end_section("step")
        self._monitor.set_iteration(context.state.train_state.step + 1)

    def on_eval_start(self, context: Any) -> None:
        """Begin the section."""
        self._monitor.start_section("evaluation")

    def on_eval_end(self, context: Any) -> None:
        """End it."""
        self._monitor.end_section("evaluation")

    def on_train_end(self, context: Any) -> None:
        """Watch no longer."""
        self._monitor.end_all_sections()


class BridgeCheckpointManager:
    """Bridge's checkpoint manager, watched: ``cfg.checkpoint.custom_manager_class`` of Bridge 0.4 and later.

    Bridge saves and loads as it does without; local checkpoints are the engine's where
    :func:`outlast.integrations.nvrx.install` was called. Saves and loads are the sections ``checkpointing`` and
    ``setup``, and what is committed is reported, so that a launcher knows progress from its absence and resets its
    budgets. Register the name first, as Bridge asks for::

        from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

        register_allowed_target_prefix("outlast.")

    Args:
        checkpoint_config: Bridge's.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        checkpointing = importlib.import_module("megatron.bridge.training.checkpointing")
        self.checkpoint_config = checkpoint_config
        self._default = checkpointing.DefaultCheckpointManager(checkpoint_config)
        self._pending: list[int] = []
        """Iterations whose asynchronous saves are not finalized yet."""

    @property
    def checkpointing_context(self) -> Any:
        """What Bridge keeps between saves."""
        return self._default.checkpointing_context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save as Bridge does."""
        monitor = _own_monitor()
        monitor.report_progress()
        with monitor.section("checkpointing"):
            self._default.save(ctx, callback_manager)
        self._pending.append(int(ctx.state.train_state.step))
        if not self.checkpoint_config.async_save:
            self._commit()

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load as Bridge does; return the iteration, and the floating point operations so far."""
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
        queue = getattr(state, "_async_calls_queue", None)
        self._commit(keep=0 if queue is None or terminate else queue.get_num_unfinalized_calls())

    def _commit(self, keep: int = 0) -> None:
        """Report what was saved, but for the newest ``keep``."""
        done = self._pending[: len(self._pending) - keep]
        if done:
            _own_monitor().set_durable_iteration(done[-1])
            del self._pending[: len(done)]
