"""Callbacks that protect a training with Lightning's or NeMo's Trainer: one session, driven from the trainer's hooks.

The first of the callbacks of a trainer opens the session and drives it (:mod:`outlast.integrations.lightning_host`);
the others only contribute settings.

With a checkpoint directory, and a strategy in which each rank's state is whole, the session saves and restores.
Otherwise, for example with NeMo's MegatronStrategy, it only monitors: the trainer's own checkpoints are used, also for
a shutdown.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

if importlib.util.find_spec("lightning") is None:
    raise ImportError(
        "outlast.integrations.lightning needs Lightning, which is not installed: pip install 'outlast[lightning]'",
        name="lightning",
    )

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from outlast import env
from outlast.config import CheckpointConfig, Config, PreemptionConfig, StragglerDetectionConfig
from outlast.config.base import nearest, require
from outlast.errors import ConfigError, ExitReason
from outlast.integrations.hosted_session import (
    HostedConfig,
    hosted_config,
    log_on_rank_0,
    require_directory,
    touch_finished_flag,
    with_fault_tolerance,
)
from outlast.integrations.lightning_host import (
    LOCAL_OPTIONS,
    IterationOf,
    ResumableDistributedSampler,
    TrainerHost,
    unwrapped,
    with_infinite,
    without_infinite,
)
from outlast.runtime.process_groups import current_place
from outlast.session.session import Session

log = logging.getLogger(__name__)
_SHARDED_OPTIONS = {"local_ckpt_algo", "parallelization_group"}
__all__ = [
    "FaultToleranceCallback",
    "FaultToleranceSectionsCallback",
    "HierarchicalCheckpointIO",
    "LocalCheckpointCallback",
    "LocalTier",
    "PreemptionCallback",
    "ResumableDistributedSampler",
    "SimulatedFaultParams",
    "StragglerDetectionCallback",
    "get_iteration_from_checkpoint",
    "straggler_det_callback",
    "update_trainer_local_checkpoint_io",
]


@dataclasses.dataclass(frozen=True)
class SimulatedFaultParams:
    """A fault to inject, once per run."""

    fault_type: str
    """``rank_killed`` (SIGKILL), ``rank_hung`` (SIGSTOP), or ``random``."""
    base_delay: float
    """Minimum seconds from the session's start to the fault."""
    rand_delay: float = 0.0
    """Maximum additional seconds, drawn at random."""
    rank_to_fail: int | None = None
    """Global rank; ``None`` = drawn at random."""


def _calling(method: str, *, in_sanity_check: bool = True) -> Callable[..., None]:
    """Return a Lightning hook that calls a method of the trainer's host, if this callback drives the session."""

    def hook(self: _HostedCallback, trainer: Any, *_: Any, **__: Any) -> None:
        if self._host is not None and (in_sanity_check or not trainer.sanity_checking):
            getattr(self._host, method)()

    return hook


class _HostedCallback(Callback):
    """A callback that contributes to the trainer's session; the first one of a trainer drives it."""

    _host: TrainerHost | None = None

    def __init__(self, config: HostedConfig = None) -> None:
        self._config = config

    @property
    def session(self) -> Session | None:
        """The session while the trainer fits; ``None`` otherwise, and in callbacks that do not drive it."""
        return None if self._host is None else self._host.session

    def _adapt(self, config: Config, trainer: Any) -> Config:
        """Return the settings with the changes of this callback."""
        raise NotImplementedError

    # -- Lightning's hooks, in their order --------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the session, if the trainer fits."""
        if stage == "fit":
            hosted = [callback for callback in trainer.callbacks if isinstance(callback, _HostedCallback)]
            if hosted[0] is self:
                self._host = _open_host(trainer, hosted)
                # First in each hook: other callbacks then see restored state, and count no step that is not saved.
                trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]

    on_fit_start = _calling("restore")
    on_sanity_check_start = _calling("take_signals")
    on_train_start = _calling("training_starts")
    on_train_epoch_start = _calling("epoch_starts")
    on_train_batch_start = _calling("batch_starts")
    on_before_optimizer_step = _calling("judge_loss")
    on_train_batch_end = _calling("batch_ends")
    on_validation_start = _calling("validation_starts", in_sanity_check=False)
    on_validation_batch_end = _calling("heartbeat")
    on_validation_end = _calling("validation_ends", in_sanity_check=False)
    on_train_end = _calling("training_ends")
    on_fit_end = _calling("finish")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self._host is not None:
            self._host.take_loss(loss)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the session without waiting for other ranks."""
        host, self._host = self._host, None
        if host is not None:
            host.fail(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the session, if it is still open."""
        host, self._host = self._host, None
        if host is not None:
            host.close()


class FaultToleranceCallback(_HostedCallback):
    """Protect a training: heartbeats, verified saves, and resumption from the newest trusted checkpoint.

    Parameters and defaults are those of NVRx's callback.

    Args:
        autoresume: Save and restore checkpoints if a directory is known; ``False`` is the same as
            ``trainer_saves=True``.
        calculate_timeouts: Learn timeouts from the durations of this run, and keep them for its next start: next to the
            checkpoints, else in ``exp_dir``, else in the run directory.
        simulated_fault_params: A fault to inject, or a mapping of its fields.
        exp_dir: Where learned timeouts are kept; also the run directory, if neither the launcher nor the settings name
            one.
        logger_name: Logger of this callback's own lines.
        exc_handling_policy: Called with the exception that ends training; returns NVRx's ``WorkloadControlRequest``, or
            the name of an action: ``Continue`` (restart, as without a policy) or ``ShutdownWorkload`` (exit with code
            93, which nothing restarts, and write the finished flag).
        config: Settings, or a config file; ``None`` = the file of ``outlast run --config``.
        calculate_timeout: Another name of ``calculate_timeouts``.
        trainer_saves: Use the trainer's own checkpoints; ``False`` = refuse where the session cannot save; ``None`` =
            use them where the session cannot save, since no directory is known or the strategy shards its state.

    Raises:
        ConfigError: A value is invalid.
    """

    def __init__(
        self,
        autoresume: bool = True,
        calculate_timeouts: bool = True,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = None,
        exc_handling_policy: Callable[[Exception], Any] | None = None,
        *,
        config: HostedConfig = None,
        calculate_timeout: bool | None = None,
        trainer_saves: bool | None = None,
    ) -> None:
        super().__init__(config)
        text = "trainer_saves=False has no effect with autoresume=False; drop one of them"
        require(autoresume or trainer_saves is not False, text)
        self.trainer_saves = trainer_saves if autoresume else True
        self._learns = calculate_timeouts if calculate_timeout is None else calculate_timeout
        self._fault = _fault_of(simulated_fault_params)
        self._exp_dir = None if exp_dir is None else os.fspath(exp_dir)
        self._logger = logging.getLogger(logger_name or __name__)
        self._policy = exc_handling_policy

    def _adapt(self, config: Config, trainer: Any) -> Config:
        if self._exp_dir is not None and config.run_dir is None and current_place().run_dir is None:
            config = dataclasses.replace(config, run_dir=self._exp_dir)
        saves, given = config.checkpoint, config.fault_tolerance
        directory = None if saves is None else saves.directory
        kept_in = (config.run_dir, current_place().run_dir, directory)
        if self._learns and any(where is not None for where in kept_in):
            config = with_fault_tolerance(config, calc_ft_timeouts=True)
            is_placed = given is not None and given.state_directory is not None
            if self._exp_dir is not None and directory is None and not is_placed:
                config = with_fault_tolerance(config, state_directory=os.path.abspath(self._exp_dir))
        if (fault := self._fault) is not None:
            config = with_fault_tolerance(
                config,
                simulate_fault=True,
                simulated_fault_type=fault.fault_type,
                simulated_fault_rank=fault.rank_to_fail,
                simulated_fault_base_delay=fault.base_delay + random.Random().uniform(0, fault.rand_delay),
            )
        if self.trainer_saves is False:
            require_directory(config, f"{type(self).__name__}(trainer_saves=False)")
        return config

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the session, and act on the policy's decision."""
        super().on_exception(trainer, pl_module, exception)
        if self._policy is None or not isinstance(exception, Exception):
            return
        action = _action_name(self._policy(exception))
        if action == "ShutdownWorkload":
            self._logger.error("exc_handling_policy ends the run after %s: %s", type(exception).__name__, exception)
            touch_finished_flag()
            raise SystemExit(int(ExitReason.NO_PROGRESS)) from exception
        if action != "Continue":
            self._logger.error(
                "exc_handling_policy requests %s, which is not supported (the launcher decides about nodes); return "
                "Continue or ShutdownWorkload",
                action,
            )


class FaultToleranceSectionsCallback(FaultToleranceCallback):
    """:class:`FaultToleranceCallback` with a section ``setup`` from the trainer's setup to the first batch.

    Both callbacks have the sections ``step`` and ``checkpointing``.
    """


class StragglerDetectionCallback(_HostedCallback):
    """Detect slow ranks, and pass the scores to the trainer's loggers.

    Parameters are those of NVRx's callback, in their order. The loggers get ``gpu_relative_perf/min``, ``/median``,
    ``/max``, and ``gpu_individual_perf/...``.

    Args:
        report_time_interval: Seconds between reports.
        calc_relative_gpu_perf: Compare ranks with each other.
        calc_individual_gpu_perf: Compare ranks with their own past.
        num_gpu_perf_scores_to_print: Worst and best ranks in a report; 0 = print only when a straggler is detected.
        gpu_relative_perf_threshold: Score, 0 to 1, below which a rank is a straggler.
        gpu_individual_perf_threshold: The same for the individual score.
        stop_if_detected: Save and exit with code 18 on detection, so that a spare takes the node's slot.
        enable_ptl_logging: Pass the scores to the trainer's loggers.
        profiling_interval: Time one of this many steps.
        logger_name: Logger of the reports.
        confirmations: Reports in a row in which a rank must be slow. 1 is NVRx's meaning; a higher number filters
            noise.
        config: As for :class:`FaultToleranceCallback`. If it has ``[straggler_detection]``, that takes precedence,
            except over parameters given here with values other than their defaults.

    Raises:
        ConfigError: A value is invalid.
    """

    def __init__(
        self,
        report_time_interval: float = 300.0,
        calc_relative_gpu_perf: bool = True,
        calc_individual_gpu_perf: bool = True,
        num_gpu_perf_scores_to_print: int = 5,
        gpu_relative_perf_threshold: float = 0.7,
        gpu_individual_perf_threshold: float = 0.7,
        stop_if_detected: bool = False,
        enable_ptl_logging: bool = True,
        profiling_interval: int = 1,
        logger_name: str | None = None,
        *,
        confirmations: int = 1,
        config: HostedConfig = None,
    ) -> None:
        given = locals()
        known = {one.name for one in dataclasses.fields(StragglerDetectionConfig)}
        super().__init__(config)
        self.logs = enable_ptl_logging
        self.detection: dict[str, Any] = {name: value for name, value in given.items() if name in known}
        self.detection |= {"enabled": True, "enable_logging": enable_ptl_logging}
        if logger_name is None:
            del self.detection["logger_name"]
        StragglerDetectionConfig(**self.detection)  # refuse an invalid value here

    def _adapt(self, config: Config, trainer: Any) -> Config:
        if config.straggler_detection is None:
            return dataclasses.replace(config, straggler_detection=StragglerDetectionConfig(**self.detection))
        usual = StragglerDetectionCallback().detection
        named = {name: value for name, value in self.detection.items() if value != usual.get(name)}
        changed = dataclasses.replace(config.straggler_detection, **{"enabled": True, **named})
        return dataclasses.replace(config, straggler_detection=changed)


class PreemptionCallback(_HostedCallback):
    """Save and exit with code 75, all ranks after the same step, when any rank receives the signal.

    Without a checkpoint directory the trainer's own ``ModelCheckpoint`` saves.

    Args:
        sig: The signal; ``None`` = SIGTERM.
        config: As for :class:`FaultToleranceCallback`.

    Raises:
        ConfigError: The signal does not exist, or cannot be handled.
    """

    def __init__(self, sig: int | None = None, *, config: HostedConfig = None) -> None:
        super().__init__(config)
        try:
            self._signal = None if sig is None else signal.Signals(sig).name
        except ValueError:
            raise ConfigError(f"sig={sig!r} is not a signal; give one of signal.Signals, or None for SIGTERM") from None
        PreemptionConfig(exit_signal=self._signal)

    def _adapt(self, config: Config, trainer: Any) -> Config:
        changes: dict[str, Any] = {"exit_signal_handler": True}
        if self._signal is not None:
            changes["exit_signal"] = self._signal
        given = config.preemption or PreemptionConfig()
        return dataclasses.replace(config, preemption=dataclasses.replace(given, **changes))


class LocalCheckpointCallback(_HostedCallback):
    """Save to each node's own disk between the saves to the global tier.

    Needs :func:`update_trainer_local_checkpoint_io`, or ``checkpoint.local_directory`` in the settings; without both,
    no local checkpoints are saved, which is logged.

    Args:
        every_n_train_steps: Optimizer steps between two local saves.
        train_time_interval: Time between two local saves, by the clock of rank 0; all ranks save after the same step.
        config: As for :class:`FaultToleranceCallback`.

    Raises:
        ConfigError: Neither or both intervals are given, or one is not above 0.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        *,
        config: HostedConfig = None,
    ) -> None:
        super().__init__(config)
        steps, interval = every_n_train_steps, train_time_interval
        text = "LocalCheckpointCallback takes every_n_train_steps or train_time_interval: give one"
        require((steps is None) != (interval is None), text)
        require(steps is None or steps >= 1, f"every_n_train_steps={steps} must be at least 1")
        require(interval is None or interval > timedelta(0), f"train_time_interval={interval} must be above 0")
        self.every_n_train_steps = steps
        self.interval_s = None if interval is None else interval.total_seconds()

    def _adapt(self, config: Config, trainer: Any) -> Config:
        if config.checkpoint is None or config.checkpoint.local_directory is None:
            if (wrapper := _hierarchical(trainer)) is None or wrapper.local_tier is not None:
                log.warning(
                    "LocalCheckpointCallback has no local folder and saves nothing: call "
                    "update_trainer_local_checkpoint_io(trainer, folder, ...) before trainer.fit(), or give it "
                    "checkpoint.local_directory"
                )
            return config
        if self.every_n_train_steps is None:
            return config
        checkpoint = dataclasses.replace(config.checkpoint, non_persistent_save_interval=self.every_n_train_steps)
        return dataclasses.replace(config, checkpoint=checkpoint)


def straggler_det_callback(
    straggler_report_time_interval: float = 300,
    stop_if_detected_straggler: bool = True,
    gpu_relative_perf_threshold: float = 0.7,
    gpu_individual_perf_threshold: float = 0.7,
) -> StragglerDetectionCallback:
    """Return a callback that detects slow ranks, with the defaults of NeMo's recipe of this name.

    For a ``run.Partial`` use the function of this name in :mod:`outlast.integrations.nemo_run`, which returns a
    ``run.Config``.

    Args:
        straggler_report_time_interval: Seconds between reports.
        stop_if_detected_straggler: Save and exit with code 18 once a rank is slow, so that a spare takes its place.
        gpu_relative_perf_threshold: Score, 0 to 1, below which a rank is a straggler.
        gpu_individual_perf_threshold: The same for the score of a rank against its own past.

    Raises:
        ConfigError: A value is invalid.
    """
    return StragglerDetectionCallback(
        straggler_report_time_interval,
        gpu_relative_perf_threshold=gpu_relative_perf_threshold,
        gpu_individual_perf_threshold=gpu_individual_perf_threshold,
        stop_if_detected=stop_if_detected_straggler,
    )


@dataclasses.dataclass(frozen=True)
class LocalTier:
    """Location and options of local checkpoints; see :func:`update_trainer_local_checkpoint_io`."""

    base_dir: str
    """A folder on a disk of each node."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ``CheckpointConfig``, such as ``replication``."""

    @property
    def directory(self) -> str:
        """The folder that contains a folder for each node."""
        return os.path.join(self.base_dir, "local_ckpt")


class HierarchicalCheckpointIO(_WrappingCheckpointIO):
    """Lightning's checkpoints, with local checkpoints between them.

    On resumption the newer of the two is loaded, the same on all ranks.

    Args:
        wrapped_checkpoint_io: Reads and writes Lightning's own checkpoints.
        local_ckpt_manager: A :class:`LocalTier`: the session saves and restores local checkpoints. Or a manager with
            ``save()``, ``find_latest()`` and ``load()``, NVRx's or
            :class:`outlast.integrations.nvrx.local_checkpoints.LocalCheckpointManager`: for strategies that shard their
            state and save on all ranks.
        get_global_ckpt_iteration_fn: Returns the number of optimizer steps of the Lightning checkpoint at a path.
        async_save: Training continues while a local checkpoint is written. With a manager, a wrapper must finalize the
            request that :meth:`save_checkpoint` returns, as NeMo's ``AsyncFinalizableCheckpointIO`` does.
        local_ckpt_algo: Megatron's algorithm for local state, with a manager.
        parallelization_group: Ranks among which Megatron divides its replicas, with a manager; ``None`` = all.

    Raises:
        ConfigError: ``local_ckpt_manager`` is neither.
    """

    def __init__(
        self,
        wrapped_checkpoint_io: Any,
        local_ckpt_manager: Any,
        get_global_ckpt_iteration_fn: IterationOf,
        async_save: bool = False,
        local_ckpt_algo: str = "fully_parallel",
        parallelization_group: Any = None,
    ) -> None:
        super().__init__(wrapped_checkpoint_io)
        is_tier = isinstance(local_ckpt_manager, LocalTier)
        if not is_tier and not all(
            callable(getattr(local_ckpt_manager, name, None)) for name in ("save", "find_latest", "load")
        ):
            raise ConfigError(
                f"local_ckpt_manager takes a LocalTier, or a manager with save(), find_latest() and load(), not "
                f"{type(local_ckpt_manager).__name__}; update_trainer_local_checkpoint_io() makes the one that fits"
            )
        self.local_tier: LocalTier | None = local_ckpt_manager if is_tier else None
        self.local_ckpt_manager = None if is_tier else local_ckpt_manager
        self.get_global_ckpt_iteration_fn = get_global_ckpt_iteration_fn
        self.async_save = async_save
        self.local_ckpt_algo, self.parallelization_group = local_ckpt_algo, parallelization_group

    def settings(self, config: Config) -> Config:
        """Return the settings with the local tier, if the session saves to it."""
        if self.local_tier is None:
            return config
        changes: dict[str, Any] = {"local_directory": self.local_tier.directory, "async_save": self.async_save}
        changes |= self.local_tier.options
        saves = config.checkpoint
        changed = CheckpointConfig(**changes) if saves is None else dataclasses.replace(saves, **changes)
        return dataclasses.replace(config, checkpoint=changed)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> Any:
        """Save with the local checkpoint manager if ``storage_options`` request that, else with the wrapped IO.

        Returns:
            The manager's request, which must be finalized for asynchronous saves.

        Collective: all ranks, for a local save.
        """
        local = (storage_options or {}).get(LOCAL_OPTIONS)
        if local is None or self.local_ckpt_manager is None:
            return self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        require(path is None, f"a local checkpoint takes no path, and {path} was given; pass None")
        is_async = local.get("is_async", self.async_save)
        callbacks = without_infinite(checkpoint.get("callbacks", {}))  # a best score is infinite at first
        state = self.to_tensor_aware_state_dict({**checkpoint, "callbacks": callbacks})
        return self.local_ckpt_manager.save(state, local["iteration"], is_async=is_async)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the newest local checkpoint if it is at least as new as the one at ``path``, else that one.

        Collective: all ranks, with a manager.
        """
        local = -1 if self.local_ckpt_manager is None else self.local_ckpt_manager.find_latest()
        if local >= 0:
            step = self.get_global_ckpt_iteration_fn(path)
            if local >= step:
                text = "resuming from the local checkpoint of step %d; %s has step %d"
                log_on_rank_0(log, text, local, path, step, level=logging.INFO)
                assert self.local_ckpt_manager is not None
                loaded = self.from_tensor_aware_state_dict(self.local_ckpt_manager.load()[0], **kwargs)
                return {**loaded, "callbacks": with_infinite(loaded.get("callbacks", {}))}
            text = "resuming from %s of step %d: the newest local checkpoint has step %d"
            log_on_rank_0(log, text, path, step, local)
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, *args, **kwargs)
        return found

    def to_tensor_aware_state_dict(self, checkpoint: dict[str, Any]) -> Any:
        """Return the state for the local checkpoint manager from a checkpoint of the strategy.

        Collective: all ranks, with Megatron's state.
        """
        if "sharded_state_dict" not in checkpoint:
            return _nvrx_local().BasicTensorAwareStateDict(checkpoint)
        megatron = importlib.import_module("megatron.core.dist_checkpointing.tensor_aware_state_dict")
        made, _ = megatron.MCoreTensorAwareStateDict.from_state_dict(checkpoint, **self._sharding)
        return made

    def from_tensor_aware_state_dict(
        self, tensor_aware_checkpoint: Any, sharded_state_dict: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Undo :meth:`to_tensor_aware_state_dict`.

        Args:
            tensor_aware_checkpoint: The state that the local checkpoint manager loaded.
            sharded_state_dict: Megatron's, to load into.

        Collective: all ranks, with Megatron's state.
        """
        if isinstance(tensor_aware_checkpoint, _nvrx_local().BasicTensorAwareStateDict):
            return dict(tensor_aware_checkpoint.state_dict)
        loaded: dict[str, Any] = tensor_aware_checkpoint.to_state_dict(sharded_state_dict, **self._sharding)
        return loaded

    @property
    def _sharding(self) -> dict[str, Any]:
        return {"algo": self.local_ckpt_algo, "parallelization_group": self.parallelization_group}


def update_trainer_local_checkpoint_io(
    trainer: Any,
    local_checkpoint_base_dir: str | os.PathLike[str],
    get_global_ckpt_iteration_fn: IterationOf | None = None,
    **kwargs: Any,
) -> None:
    """Enable local checkpoints in a trainer with a :class:`LocalCheckpointCallback`.

    They are stored below ``<local_checkpoint_base_dir>/local_ckpt/<hostname>``, are written asynchronously if the
    global save is (``trainer.strategy.async_save``, ``AsyncCheckpointIO``), and are copied to other nodes if there are
    several. Without a :class:`LocalCheckpointCallback` nothing changes.

    With a strategy that shards its state, such as NeMo's ``MegatronStrategy``, they contain the state that the strategy
    itself saves, and are loaded if the checkpoint passed to ``fit()`` is not newer.

    Args:
        trainer: The trainer, before ``fit()``.
        local_checkpoint_base_dir: A folder on a disk of each node.
        get_global_ckpt_iteration_fn: Returns the number of optimizer steps of the Lightning checkpoint at a path;
            ``None`` = :func:`get_iteration_from_checkpoint`.
        kwargs: Fields of ``CheckpointConfig``: ``async_save``, ``replication``, ``replication_jump``,
            ``replication_factor``, ``local_most_recent_k``, and others; with a strategy that shards its state
            ``local_ckpt_algo`` and ``parallelization_group``, as for :class:`HierarchicalCheckpointIO`.

    Raises:
        ConfigError: ``kwargs`` has an unknown field.
    """
    strategy = trainer.strategy
    is_whole = _is_whole(strategy)
    known = {field.name for field in dataclasses.fields(CheckpointConfig)} if is_whole else _SHARDED_OPTIONS
    for name in kwargs:
        if name not in known:
            only = f" with {type(strategy).__name__}" if not is_whole or name in _SHARDED_OPTIONS else ""
            raise ConfigError(
                f"update_trainer_local_checkpoint_io() has no option {name!r}{only}: {nearest(name, known)}"
            )
    if not any(isinstance(callback, LocalCheckpointCallback) for callback in trainer.callbacks):
        return
    folder = LocalTier(os.fspath(local_checkpoint_base_dir), kwargs)
    iteration_of = get_global_ckpt_iteration_fn or get_iteration_from_checkpoint
    own, is_async = strategy.checkpoint_io, bool(getattr(strategy, "async_save", False))
    if is_whole:
        is_async = is_async or isinstance(own, AsyncCheckpointIO)
        strategy.checkpoint_io = HierarchicalCheckpointIO(own, folder, iteration_of, async_save=is_async)
        return
    copies = _nvrx_local().LazyCliqueReplicationStrategy() if trainer.num_nodes > 1 else None
    manager = _nvrx_local().LocalCheckpointManager(folder.directory, repl_strategy=copies)
    # A save can only be asynchronous with a wrapper that finalizes the request that the save returns.
    is_async = is_async and hasattr(own, "maybe_finalize_save_checkpoint")
    wrapped = own.checkpoint_io if is_async else own
    made = HierarchicalCheckpointIO(wrapped, manager, iteration_of, async_save=is_async, **kwargs)
    strategy.checkpoint_io = type(own)(made) if is_async else made


def get_iteration_from_checkpoint(checkpoint: Any) -> int:
    """Return the number of optimizer steps of a Lightning checkpoint.

    Args:
        checkpoint: The loaded checkpoint, or its path; a file is read with ``weights_only=True``.
    """
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = torch.load(Path(checkpoint), map_location="meta", weights_only=True)
    return int(checkpoint["global_step"])


def _fault_of(params: SimulatedFaultParams | Mapping[str, Any] | None) -> SimulatedFaultParams | None:
    if params is None or isinstance(params, SimulatedFaultParams):
        return params
    known = {field.name for field in dataclasses.fields(SimulatedFaultParams)}
    for name in params:
        if name not in known:
            raise ConfigError(f"simulated_fault_params has an unknown key {name!r}: {nearest(str(name), known)}")
    missing = {"fault_type", "base_delay"} - set(params)
    require(not missing, f"simulated_fault_params lacks {', '.join(sorted(missing))}")
    return SimulatedFaultParams(**params)


def _action_name(request: Any) -> str:
    """Return the name of a policy's action, which may be NVRx's request, its action, or the name itself."""
    action = getattr(request, "action", request)
    return str(getattr(action, "name", action))


def _nvrx_local() -> Any:
    """Return the module of local checkpoint managers, which only strategies that shard their state need."""
    return importlib.import_module("outlast.integrations.nvrx.local_checkpoints")


def _hierarchical(trainer: Any) -> HierarchicalCheckpointIO | None:
    """Return the :class:`HierarchicalCheckpointIO` of a trainer, if it has one."""
    found = (one for one in unwrapped(trainer.strategy.checkpoint_io) if isinstance(one, HierarchicalCheckpointIO))
    return next(found, None)


def _is_whole(strategy: Any) -> bool:
    """Return whether each rank's state is whole, so that the session can save and restore it."""
    return type(strategy) in (SingleDeviceStrategy, DDPStrategy)


def _refuse(trainer: Any) -> None:
    """Check that a trainer can be protected.

    Raises:
        ConfigError: It starts processes itself, has a callback that searches for a batch size or learning rate during
            training, or a local checkpoint manager that its strategy calls on one rank only.
    """
    strategy = trainer.strategy
    name = type(strategy).__name__
    if strategy.launcher is not None and not isinstance(strategy.launcher, _SubprocessScriptLauncher):
        raise ConfigError(
            f"{name} starts its ranks by {type(strategy.launcher).__name__}, which nothing can restart; start the "
            "script with outlast run or torchrun, and use strategy='ddp'"
        )
    environment = getattr(strategy, "cluster_environment", None)
    if trainer.world_size > 1 and isinstance(environment, LightningEnvironment) and "RANK" not in env.environ():
        raise ConfigError(
            f"Lightning itself started the {trainer.world_size} ranks, which nothing can restart, and after the script "
            "made its samplers for one; start it with outlast run or torchrun"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise ConfigError(
                f"{type(callback).__name__} repeats its search at each start and trains during the search; search once "
                "before fit(), with lightning.pytorch.tuner.Tuner, and configure the result"
            )
    wrapper = _hierarchical(trainer)
    manager = None if wrapper is None else wrapper.local_ckpt_manager
    saves_on_one_rank = type(strategy).save_checkpoint is Strategy.save_checkpoint
    if manager is not None and saves_on_one_rank and trainer.world_size > 1:
        raise ConfigError(
            f"{name} saves on rank 0 alone, and {type(manager).__name__} needs all ranks; call "
            "update_trainer_local_checkpoint_io() on a trainer with this strategy"
        )


def _open_host(trainer: Any, callbacks: Sequence[_HostedCallback]) -> TrainerHost:
    _refuse(trainer)
    config, why = merge_settings(trainer, callbacks)
    if trainer.fast_dev_run and config.checkpoint is not None:
        log.warning("fast_dev_run is on: nothing is saved or restored")
        config = dataclasses.replace(config, checkpoint=None)
    detection = next((one for one in callbacks if isinstance(one, StragglerDetectionCallback)), None)
    local = next((one for one in callbacks if isinstance(one, LocalCheckpointCallback)), None)
    wrapper = _hierarchical(trainer)
    has_manager = wrapper is not None and wrapper.local_ckpt_manager is not None
    is_saved_locally = local is not None and (has_manager or config.checkpoint is not None)
    host = TrainerHost(
        trainer,
        config,
        logs_scores=detection is not None and detection.logs and bool(trainer.loggers),
        names_setup=any(isinstance(one, FaultToleranceSectionsCallback) for one in callbacks),
        local_steps=local.every_n_train_steps if local is not None and has_manager else None,
        local_interval_s=local.interval_s if local is not None and is_saved_locally else None,
        iteration_of=wrapper.get_global_ckpt_iteration_fn if wrapper is not None else None,
    )
    if why is not None and host.session.global_rank == 0:
        log.info(
            "monitoring only (%s): outlast handles heartbeats, sections, preemption and slow ranks. Checkpoints are "
            "the trainer's own (ModelCheckpoint, and fit(ckpt_path='last') to resume): outlast does not verify them, "
            "does not copy them to other nodes, and cannot load an older one if the newest is damaged",
            why,
        )
    return host


def merge_settings(trainer: Any, callbacks: Sequence[_HostedCallback]) -> tuple[Config, str | None]:
    """Return the settings of all callbacks of a trainer, and why the session does not save; ``None`` = it saves.

    Raises:
        ConfigError: Callbacks were given different configs, or one needs a feature that another disables.
    """
    given = [callback._config for callback in callbacks if callback._config is not None]
    given = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in given]
    text = "two callbacks of outlast were given different config=; give it to one of them"
    require(all(one == given[0] for one in given), text)
    config = hosted_config(given[0] if given else None)
    if (wrapper := _hierarchical(trainer)) is not None:
        config = wrapper.settings(config)
    kinds = [type(callback) for callback in callbacks]
    twice = next((kind.__name__ for kind in kinds if kinds.count(kind) > 1), None)
    require(twice is None, f"the trainer has {twice} twice; give it one")
    why = _why_trainer_saves(config, trainer, callbacks)
    if why is not None:
        config = dataclasses.replace(config, checkpoint=None)
    for callback in callbacks:
        config = callback._adapt(config, trainer)
    return config, why


def _why_trainer_saves(config: Config, trainer: Any, callbacks: Sequence[_HostedCallback]) -> str | None:
    """Return why the trainer's own checkpoints are used; ``None`` = the session saves.

    Raises:
        ConfigError: The settings request checkpoints that the session cannot save with this strategy.
    """
    strategy = type(trainer.strategy).__name__
    wishes = [one.trainer_saves for one in callbacks if isinstance(one, FaultToleranceCallback)]
    wish = next((one for one in wishes if one is not None), None)
    saves = config.checkpoint
    if not _is_whole(trainer.strategy) and wish is not True and (wish is False or saves is not None):
        where = "" if saves is None else f"checkpoint.directory={saves.directory!r} cannot be used with "
        raise ConfigError(
            f"{where}strategy {strategy}: outlast can only save state that is whole on each rank; use strategy='ddp' "
            "or one device, or have the trainer save: FaultToleranceCallback(trainer_saves=True), or no [checkpoint]"
        )
    if not _is_whole(trainer.strategy) and config.replica_digest is not None:
        raise ConfigError(
            f"replica_digest compares the weights of all ranks, which differ with {strategy}; remove [replica_digest]"
        )
    wrapper = _hierarchical(trainer)
    if wish is True and wrapper is not None and wrapper.local_tier is not None:
        raise ConfigError(
            "update_trainer_local_checkpoint_io() has no effect where the trainer saves; remove it, or "
            "trainer_saves=True and autoresume=False"
        )
    if wish is True:
        return "as requested"
    if saves is not None:
        return None
    return "no checkpoint.directory is known" if _is_whole(trainer.strategy) else f"{strategy} shards its state"
