"""The session behind Lightning's hooks: position of the trainer, saved state, and resumption.

Save point: ``on_train_batch_end`` is too early, since the module's own hook, other callbacks, a validation and the end
of an epoch may follow, and a resumed run would skip them. So a due save is done at the next point between two steps:
before the next batch, before the next epoch, or at the end of training. Only a shutdown does not wait for a validation:
it saves before the validation, which runs after the restart.

The state is that of Lightning's own checkpoints, of each rank, plus random numbers. The prefetched batch does not count
as fetched. Random numbers are restored where they were captured (before the batch, the epoch or the validation), since
Lightning draws some in between: for loaders and for its sanity check.

Lightning's loops have no public API for this; private names are used in this module only, and a test runs all of it
with the installed version.

Monitoring only: without checkpoint settings the trainer's own checkpoints are used and none of the above is done. A
shutdown that all ranks agreed on is carried out at the end of the batch, after all other callbacks, with a save by the
trainer's ``ModelCheckpoint``.
"""

from __future__ import annotations

import logging
import math
import signal
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import StrEnum
from typing import Any, NoReturn, TypeAlias

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from outlast import clock
from outlast.config import Config
from outlast.errors import ConfigError, ExitReason, OutlastError
from outlast.integrations.hosted_session import HostedSession, log_on_rank_0
from outlast.monitor.rank_monitor import RankMonitor, open_monitor
from outlast.runtime.process_groups import current_place
from outlast.runtime.random_numbers import capture_random, restore_random
from outlast.session.step import StepDecision

log = logging.getLogger(__name__)
IterationOf: TypeAlias = Callable[[Any], int]
"""Returns the number of optimizer steps of the Lightning checkpoint at a path."""
_PREEMPTED = "Preemption detected, saving checkpoint and exiting"
_BITS = "outlast_bits_of"
"""Key of the dtype of a tensor that is saved as its bits."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes."""
LOCAL_OPTIONS = "local_checkpoint_options"
"""Key in ``storage_options`` for a save by a local checkpoint manager; NVRx's name."""
_HPARAMS = ("hyper_parameters", "hparams_name", "hparams_type")


class ResumableDistributedSampler(DistributedSampler[Any]):
    """Yield a rank's indices in an order that depends only on seed and epoch, from any position.

    Torch's ``DistributedSampler``, with the same indices, which also works with one rank. The callbacks of this module
    set the position when training resumes within an epoch. Other loops use :meth:`load_state_dict`, or
    :meth:`resume_at` with the number of trained samples, since a loader's workers prefetch.

    Args:
        dataset: As for ``DistributedSampler``.
        num_replicas: Number of ranks that share the dataset; ``None`` = all ranks.
        rank: This rank's number among them; ``None`` = its global rank.
        shuffle: Shuffle again in each epoch.
        seed: Seed of the order, the same on all ranks.
        drop_last: Drop the remainder that cannot be divided evenly; ``False``: repeat some samples.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        place = current_place()
        num_replicas = place.world_size if num_replicas is None else num_replicas
        super().__init__(dataset, num_replicas, place.global_rank if rank is None else rank, shuffle, seed, drop_last)
        self._start = self._position = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices of the epoch from the set position on; the next epoch starts at 0."""
        start, self._start = self._start, 0
        self._position = start
        for index in list(super().__iter__())[start:]:
            self._position += 1
            yield index

    def resume_at(self, position: int) -> None:
        """Skip the first ``position`` samples of this rank in the next iteration."""
        self._start = self._position = position

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, and the number of samples of this rank that were yielded in it."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a result of :meth:`state_dict`."""
        self.seed = int(state["seed"])
        self.set_epoch(int(state["epoch"]))
        self.resume_at(int(state["position"]))


class _RestOfEpoch(Sampler[Any]):
    """A sampler that skips its first indices, once."""

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self._sampler, self._num_skipped = sampler, num_skipped

    def __iter__(self) -> Iterator[Any]:
        skipped, self._num_skipped = self._num_skipped, 0
        for number, index in enumerate(self._sampler):
            if number >= skipped:
                yield index

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class Place(StrEnum):
    """Point between two steps at which a state was saved, named by what follows."""

    BATCH = "batch"
    VALIDATION = "validation"
    EPOCH = "epoch"


class TrainerState:
    """State of a Lightning checkpoint other than weights and optimizers, of this rank, and the save point."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.place: Place | None = None
        """Current point between two steps; ``None`` = not at a save point."""
        self.fetch_random: dict[str, Any] | None = None
        """Random numbers before the prefetched batch."""
        self.loader_states: list[dict[str, Any]] = []
        """States of stateful loaders before the prefetched batch."""
        self.has_stopped = False
        """Whether training ended before its last step, for example by early stopping."""
        self._accumulated: int | None = None
        self.holds_weights = False  # and its state_dict() calls the user's hooks
        self.loaded: dict[str, Any] | None = None
        """The loaded state, until training has continued."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; empty unless the trainer is at a save point."""
        if self.place is None:
            return {}
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["optimizer_states"]  # optimizers are saved separately, and so is the module,
        if _are_same(
            checkpoint["state_dict"], trainer.lightning_module.state_dict()
        ):  # unless a hook replaced its state
            del checkpoint["state_dict"]
        for name in _HPARAMS:
            for prefix in ("", "datamodule_"):
                checkpoint.pop(prefix + name, None)
        checkpoint["loops"] = {"fit_loop": self._position(checkpoint["loops"]["fit_loop"])}
        checkpoint["callbacks"] = without_infinite(checkpoint["callbacks"])
        return {
            "place": str(self.place),
            "checkpoint": checkpoint,
            "fetch_random": self.fetch_random if self.place == Place.BATCH else None,
            "callback_metrics": without_infinite({**_metrics(trainer)}),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "has_stopped": self.has_stopped,
            "world_size": trainer.world_size,
            "trainable": self._trainable(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the loaded state for :meth:`apply`."""
        self.loaded = state

    def apply(self) -> None:
        """Restore the loaded state to the trainer, whose module and optimizers are loaded already."""
        assert self.loaded is not None
        trainer, checkpoint = self._trainer, self.loaded["checkpoint"]
        checkpoint["callbacks"] = with_infinite(checkpoint["callbacks"])
        checkpoint.setdefault("state_dict", trainer.lightning_module.state_dict())
        checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in trainer.optimizers]
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint, connector._ckpt_path = {}, None  # the checkpoint passed to fit() is older
        loop = trainer.fit_loop
        loops = checkpoint["loops"]["fit_loop"]
        schedules = any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks)
        if schedules and self.loaded["place"] != Place.EPOCH:
            self._accumulated = self.loaded.get("accumulate_grad_batches")
        loop.load_state_dict(loops)
        trainer.should_stop = trainer.should_stop or self.loaded.get("has_stopped", False)
        if self.loaded["place"] == Place.EPOCH:
            # With max_steps, Lightning treats the end of an epoch as the middle of one.
            loop.epoch_loop.restarting = False
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False

    def continue_accumulation(self, *, is_new_epoch: bool = False) -> None:
        """Restore the number of accumulated batches, which a callback sets when an epoch starts."""
        number, self._accumulated = self._accumulated, None
        if number and not is_new_epoch:
            self._trainer.accumulate_grad_batches = number

    def unfreeze(self) -> None:
        """Restore which parameters are trained, since a callback that freezes parts froze them again."""
        assert self.loaded is not None
        if (trained := self.loaded.get("trainable")) is None:
            return
        module = self._trainer.lightning_module
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained["weights"].get(name, parameter.requires_grad))
        for name, norm in _batch_norms(module):
            norm.track_running_stats = trained["norms"].get(name, norm.track_running_stats)

    def _trainable(self) -> dict[str, dict[str, bool]] | None:
        """Return which parameters are trained, by name, if a callback changes that between epochs."""
        if not any(isinstance(one, BaseFinetuning) for one in self._trainer.callbacks):
            return None
        module = self._trainer.lightning_module
        return {
            "weights": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "norms": {name: norm.track_running_stats for name, norm in _batch_norms(module)},
        }

    def _position(self, loops: dict[str, Any]) -> dict[str, Any]:
        """Return the loops' progress adjusted to the point between two steps."""
        if self.place == Place.EPOCH:
            epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
            for part in ("total", "current"):  # the next epoch has not started
                epochs[part] = {**epochs[part], "ready": epochs[part]["started"]}
            zeros = dict.fromkeys(batches["current"], 0)
            loops["epoch_loop.batch_progress"] = {**batches, "current": zeros, "is_last_batch": False}
        elif self.place == Place.BATCH:
            batches = loops["epoch_loop.batch_progress"]
            changed: dict[str, Any] = {"is_last_batch": False}
            for part in ("total", "current"):  # the prefetched batch is not trained
                changed[part] = {**batches[part], "ready": batches[part]["completed"]}
            loops["epoch_loop.batch_progress"] = {**batches, **changed}
        if self.place != Place.EPOCH and self.loader_states:
            loops["state_dict"] = {**loops["state_dict"], "combined_loader": self.loader_states}
        return loops


def _scale(progress: Any, world_size: int, new_world_size: int, num_batches: float) -> None:
    """Convert an epoch's position in batches to another number of ranks, rounded down, and below the epoch's end.

    Args:
        progress: Lightning's numbers of started and completed batches in this epoch.
        world_size: Ranks that did them.
        new_world_size: Ranks that continue.
        num_batches: Batches of each of these ranks in an epoch; infinite = unknown.
    """
    number = int(max(0, min(progress.completed * world_size // new_world_size, num_batches - 1)))
    progress.ready = progress.started = progress.processed = progress.completed = number


def _batch_norms(module: torch.nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    return ((name, one) for name, one in module.named_modules() if isinstance(one, _BatchNorm))


def without_infinite(state: Any) -> Any:
    """Return a state with tensors that contain NaN or infinity replaced by their bits.

    A best score is infinite until there is one, and only weights and optimizers must be finite in a checkpoint. Tensors
    with elements of 8 bits are always replaced, since torch cannot check all of these types.
    """
    if (
        isinstance(state, torch.Tensor)
        and state.is_floating_point()
        and (state.element_size() == 1 or not state.isfinite().all())
    ):
        bits = state.detach().contiguous().view(_INTEGERS[state.element_size()])
        return {_BITS: str(state.dtype).removeprefix("torch."), "bits": bits}
    if type(state) is dict:
        return {key: without_infinite(value) for key, value in state.items()}
    return [without_infinite(value) for value in state] if type(state) is list else state


def with_infinite(state: Any) -> Any:
    """Undo :func:`without_infinite`."""
    if type(state) is dict:
        if _BITS in state:
            return state["bits"].view(getattr(torch, state[_BITS]))
        return {key: with_infinite(value) for key, value in state.items()}
    return [with_infinite(value) for value in state] if type(state) is list else state


def _metrics(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the last logged metrics, by name; the public property computes running means, with all ranks."""
    found: dict[str, torch.Tensor] = trainer._logger_connector._callback_metrics
    return found


def _are_same(one: Any, other: Mapping[str, Any]) -> bool:
    """Return whether two mappings hold the same tensors, in the same memory."""
    if not isinstance(one, Mapping) or one.keys() != other.keys():
        return False
    for name, value in other.items():
        found = one[name]
        if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
            if found.data_ptr() != value.data_ptr() or found.shape != value.shape:
                return False
        elif found is not value:
            return False
    return True


class _LooseModule:
    """A module with ``strict_loading`` off: keys that its ``state_dict`` omits are not missing."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.wrapped = module

    def state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wrapped.load_state_dict(state, strict=False)


class _LateOptimizer:
    """An optimizer whose groups may change until all callbacks have started, as with ``BackboneFinetuning``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.wrapped = optimizer
        self._late: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state now if the groups match, else in :meth:`finish_loading`."""
        groups = [len(group["params"]) for group in self.wrapped.param_groups]
        if groups == [len(group["params"]) for group in state["param_groups"]]:
            self.wrapped.load_state_dict(state)
        else:
            self._late = state

    def finish_loading(self) -> None:
        state, self._late = self._late, None
        if state is not None:
            self.wrapped.load_state_dict(state)


class _LastCallback(Callback):
    """The last callback of a trainer."""

    def __init__(self, host: TrainerHost) -> None:
        self._host = host

    def on_train_batch_end(self, *_: Any) -> None:
        self._host.batch_is_complete()


def unwrapped(checkpoint_io: Any) -> Iterator[Any]:
    """Yield a checkpoint IO and those that it wraps, outermost first."""
    yield checkpoint_io
    while isinstance(checkpoint_io, _WrappingCheckpointIO):
        checkpoint_io = checkpoint_io.checkpoint_io
        yield checkpoint_io


class TrainerHost:
    """The session of one trainer.

    Args:
        trainer: The trainer, in its hook ``setup``.
        config: The session's settings.
        logs_scores: Pass the scores of slow ranks to the trainer's loggers.
        names_setup: Open the section ``setup`` until the first batch.
        local_steps: Steps between two saves by the trainer's own local checkpoint manager; ``None`` = none by steps.
            The session's own local saves are a setting.
        local_interval_s: Seconds between two local saves; ``None`` = none by time.
        iteration_of: Returns the optimizer steps of a Lightning checkpoint; ``None`` = the run's own checkpoint always
            counts as newer than the checkpoint passed to ``fit()``.

    Raises:
        ConfigError: A setting is invalid.

    Collective: all ranks, for all methods except :meth:`take_signals` and :meth:`fail`.
    Thread: the trainer's thread.
    """

    def __init__(
        self,
        trainer: Any,
        config: Config,
        *,
        logs_scores: bool,
        names_setup: bool,
        local_steps: int | None,
        local_interval_s: float | None,
        iteration_of: IterationOf | None,
    ) -> None:
        self._trainer = trainer
        self._host = HostedSession(
            config,
            log_metrics=self._log_scores if logs_scores else None,
            saved_by="the trainer" if config.checkpoint is None and trainer.checkpoint_callbacks else None,
        )
        self.session, self._random = self._host.session, self._host.random
        self._handler = signal.getsignal(signal.SIGTERM)
        self._setup, self._evaluation = ExitStack(), ExitStack()
        """The open sections ``setup`` and ``evaluation``."""
        if names_setup:
            self._setup.enter_context(self.session.section("setup"))
        self._validates = _validates_loss(config, trainer)
        self._losses: Any = None
        """Sum of the losses of the open step; if losses are not judged, the sum of all losses times 0."""
        self._has_warned = False
        self._is_monitoring = config.checkpoint is None
        self._local_steps, self._local_s = local_steps, local_interval_s
        self._local_ns = clock.now_ns()
        self._iteration_of = iteration_of
        self._state: dict[str, Any] = {}
        self._own = TrainerState(trainer)
        self._optimizers: list[_LateOptimizer] = []
        self._pending: StepDecision | None = None
        self._is_open = self._is_done = False
        self._steps_before = 0
        self._loop = trainer.fit_loop.epoch_loop
        self._max_steps = trainer.fit_loop.max_steps
        self._has_begun = False
        self._unreadable: tuple[Any, Exception] | None = None
        """The checkpoint passed to ``fit()`` that cannot be read, and the error."""
        self._wrap_save()
        self._last = _LastCallback(self)
        if self._is_monitoring:
            trainer.callbacks = [*trainer.callbacks, self._last]
        else:
            self._tolerate_unreadable()

    # -- begin -----------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore the newest checkpoint, and set Lightning's position to it.

        Raises:
            ConfigError: An optimizer's state is not whole on any rank.
            OutlastError: Another rank cannot read the checkpoint passed to ``fit()``, and the run has saved none. The
                rank that failed raises its own error.

        Collective: all ranks.
        """
        if self._is_monitoring:
            return  # the trainer's own state is restored later
        trainer = self._trainer
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                raise ConfigError("a ZeroRedundancyOptimizer's state is not whole on any rank; use a plain optimizer")
        module = trainer.lightning_module
        self._state = {"model": module if module.strict_loading else _LooseModule(module), "trainer": self._own}
        if trainer.optimizers:
            self._optimizers = [_LateOptimizer(one) for one in trainer.optimizers]
            self._state["optimizers"] = {str(number): one for number, one in enumerate(self._optimizers)}
        given = trainer._checkpoint_connector._ckpt_path
        self.session.restore(self._state)
        cannot_read = trainer.strategy.reduce_boolean_decision(self._unreadable is not None, all=False)
        if (loaded := self._own.loaded) is None:
            if cannot_read:
                self._raise_unreadable()
            return
        step = int(loaded["checkpoint"]["global_step"])
        if cannot_read:
            path, why = self._unreadable or (given, "on another rank")
            reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
            log_on_rank_0(
                log,
                "%s, which fit() was given, cannot be read (%s); resuming from step %d, which this run saved, instead",
                *(path, textwrap.shorten(reason, 160), step),
            )
            given = None
        if given and self._iteration_of is not None:
            other = self._iteration_of(given)
            if other > step:
                log_on_rank_0(
                    log, "resuming from %s of step %d, which is newer than the saved step %d", given, other, step
                )
                connector = trainer._checkpoint_connector
                connector.restore_model()
                connector.restore_callbacks()
                self._own.loaded = None
                return
        if given:
            log_on_rank_0(log, "resuming from step %d, which this run saved, instead of from %s", step, given)
        kept = capture_random()
        self._own.apply()
        self._random.keep(kept)
        loop = trainer.fit_loop

        def place_loaders() -> None:
            loop._load_combined_loader_states = original
            if self._place == Place.EPOCH:  # a loader with the state of the last epoch yields the next epoch
                loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
                loop._combined_loader_states_to_load = []
            original()
            self._place_loaders()

        original = self._host.replace(loop, "_load_combined_loader_states", place_loaders)

    def heartbeat(self) -> None:
        self.session.heartbeat()

    def take_signals(self) -> None:
        """Restore the SIGTERM handler that Lightning replaced: Lightning's ends one rank alone, without a save."""
        if self._handler is not None and signal.getsignal(signal.SIGTERM) != self._handler:  # None: not set from Python
            signal.signal(signal.SIGTERM, self._handler)

    def training_starts(self) -> None:
        """Set Lightning's loops to the point at which training continues."""
        self.take_signals()
        if self._is_monitoring:
            return self._begin_monitoring()
        for optimizer in self._optimizers:
            optimizer.finish_loading()
        self._warn_of_loaders()
        loaded, loop = self._own.loaded, self._trainer.fit_loop.epoch_loop
        if loaded is None:
            return
        self._own.unfreeze()
        # Early stopping may read the metrics before the next validation.
        _metrics(self._trainer).update(with_infinite(loaded.get("callback_metrics", {})))
        if self._place == Place.EPOCH:
            return
        if self._place == Place.VALIDATION:
            loop.val_loop.restarting = False
            loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
            return
        if loaded["fetch_random"] is not None and loaded["world_size"] == self._trainer.world_size:
            restore_random(loaded["fetch_random"])
        if loop._should_check_val_fx(self._trainer.fit_loop._data_fetcher) and not loop._should_accumulate():
            loop._batches_that_stepped -= 1  # Lightning counts the step again, as it skips that validation

    # -- steps -----------------------------------------------------------------------------------------------------

    def epoch_starts(self) -> None:
        """Do a due save between two epochs, or restore the random numbers of that point."""
        self._own.continue_accumulation(is_new_epoch=True)
        if self._pending is not None:
            self._act(Place.EPOCH)
        elif self._place == Place.EPOCH:
            self._random.put_back()

    def batch_starts(self) -> None:
        """Do a due save between two batches, and start a step unless one is open."""
        self._setup.close()
        self._own.continue_accumulation()
        self._random.put_back()
        if self._pending is not None:
            self._act(Place.BATCH)
        if self._is_open:
            return self.session.heartbeat()
        if self._local_s is not None and self.session.global_rank == 0 and not self._is_monitoring:
            now_ns = clock.now_ns()
            if now_ns - self._local_ns >= self._local_s * 1e9:
                self._local_ns = now_ns
                self.session.request_save(near=True)
        self._steps_before = self._loop.global_step
        self._is_open = True
        self.session.begin_step()

    def take_loss(self, loss: torch.Tensor) -> None:
        loss = loss.detach()
        if not self._validates:
            loss = loss.float() * 0  # NaN if the loss is not finite; then the sum stays NaN
        self._losses = loss if self._losses is None else self._losses + loss

    def judge_loss(self) -> None:
        """Raise if the losses of the step are not finite, before a weight of this rank moves.

        If losses are not judged, the first one that is not finite is reported once, without waiting for a device.

        Raises:
            OutlastError: They are not finite.

        Blocks: until the device has computed them, if they are judged.
        """
        if not self._validates:
            if self._losses is not None and self._losses.is_cpu:
                self._warn_of_losses()
            return
        losses, self._losses = self._losses, None
        if losses is not None and not math.isfinite(value := losses.item()):
            raise OutlastError(
                f"the loss of step {self.session.iteration + 1} is {value} on rank {self.session.global_rank}; "
                "no weight was moved by it. The next start resumes from the newest checkpoint; "
                "rerun_state_machine.check_for_nan_in_loss=false lets training continue with such a loss",
                rank=self.session.global_rank,
                iteration=self.session.iteration,
            )

    def batch_ends(self) -> None:
        """End the step if an optimizer has stepped, and keep the decision of the ranks."""
        if not self._is_open or (step := self._loop.global_step) == self._steps_before:
            return
        self._is_open = False
        self._own.loaded = None
        decision = self.session.end_step(is_last=self._is_last(step))
        if decision.save is not None or decision.stop:
            self._pending = decision
            if self._is_monitoring:
                return
            self._own.fetch_random = capture_random()
            self._own.loader_states = self._trainer.fit_loop._combined_loader._state_dicts()

    def batch_is_complete(self) -> None:
        """Save with the trainer if a save is due, and exit if all ranks agreed to; monitoring only.

        Raises:
            SystemExit: All ranks agreed to exit.

        Collective: all ranks.
        Blocks: until the trainer has saved.
        """
        decision, self._pending = self._pending, None
        if decision is not None and decision.stop:
            self._announce(decision)
            if (saved := self._save_by_trainer()) is not None:
                self._monitor.set_durable_iteration(saved)
            self.session.leave(self._state)
        if not self._is_open and self._is_local_save_due():
            local = {LOCAL_OPTIONS: {"ckpt_type": "local", "iteration": self._loop.global_step}}
            self._trainer.save_checkpoint(None, weights_only=False, storage_options=local)

    def validation_starts(self) -> None:
        """Exit if all ranks agreed to; restore the random numbers of a run that exited here, and open the section."""
        if self._pending is not None and self._pending.stop:
            self._act(Place.VALIDATION)
        if self._place == Place.VALIDATION:
            self._random.put_back()
        self.session.heartbeat()
        self._evaluation.enter_context(self._host.outside_step("evaluation", is_in_step=self._is_open))

    def validation_ends(self) -> None:
        """Continue the step that the validation interrupted; capture random numbers if a save follows."""
        self._evaluation.close()
        if self._pending is not None:
            self._own.fetch_random = capture_random()

    # -- end -------------------------------------------------------------------------------------------------------

    def training_ends(self) -> None:
        """Save, and wait until everything is committed.

        Raises:
            SystemExit: All ranks agreed to stop after the last step.
        """
        if self._is_open:  # the last batches moved no weight, but the trainer's position
            self._is_open = False
            self._pending = self.session.end_step(is_last=True)
        self._own.place, self._is_done = Place.EPOCH, True
        self._own.has_stopped = bool(self._trainer.should_stop)
        if self._pending is not None and self._pending.stop:
            self._announce(self._pending)
        self._warn_of_losses()
        self.session.finish(self._state)
        self._own.place = None

    def finish(self) -> None:
        if not self._is_done:  # nothing was left to train
            if self._is_monitoring and not self._has_begun:
                self._begin_monitoring()
            self._own.place = Place.EPOCH
            self.session.finish(self._state)
        self.close()
        self._host.note_finished()

    def fail(self, error: BaseException) -> None:
        """Close the session after an exception, without waiting for other ranks."""
        self._release()
        self.session.__exit__(type(error), error, error.__traceback__)

    def close(self) -> None:
        """Close the session. Idempotent."""
        self._release()
        self.session.close()

    # -- the trainer's own checkpoints -----------------------------------------------------------------------------

    @property
    def _monitor(self) -> RankMonitor:
        monitor = open_monitor()
        assert monitor is not None, "the session has closed it"
        return monitor

    def _wrap_save(self) -> None:
        """Run the trainer's saves in a section; monitoring only: a committed save is progress."""

        def save_checkpoint(
            filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None
        ) -> None:
            with self.session.section("checkpointing"):
                save(filepath, weights_only, storage_options)
            if self._is_monitoring and filepath is not None and not weights_only and not self._saves_later():
                self._monitor.set_durable_iteration(self._loop.global_step)

        save = self._host.replace(self._trainer, "save_checkpoint", save_checkpoint)

    def _saves_later(self) -> bool:
        """Return whether a save of the trainer may return before it is committed."""
        return any(
            isinstance(one, AsyncCheckpointIO) or hasattr(one, "maybe_finalize_save_checkpoint")
            for one in unwrapped(self._trainer.strategy.checkpoint_io)
        )

    def _begin_monitoring(self) -> None:
        """Start the session's loop at the position of the trainer's own checkpoint.

        Collective: all ranks.
        """
        trainer = self._trainer
        if isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):  # each rank has complete weights
            self._state = {"model": trainer.lightning_module}
            self._state |= {f"optimizer {number}": one for number, one in enumerate(trainer.optimizers)}
        step = self._loop.global_step
        self.session.restore(self._state, restored_iteration=step)
        self._has_begun = True
        if not step and current_place().cycle and _whole_checkpoint(trainer) is not None:
            log_on_rank_0(
                log,
                "training begins at step 0 although this is restart %d: the trainer has not loaded a checkpoint; "
                "pass ckpt_path='last' to fit()",
                current_place().cycle,
            )

    def _is_local_save_due(self) -> bool:
        """Return whether the trainer's local checkpoint manager saves now, the same on all ranks."""
        if self._local_steps is not None:
            step = int(self._loop.global_step)
            return step > self._steps_before and step % self._local_steps == 0
        if self._local_s is None:
            return False
        now_ns = clock.now_ns()
        is_due: bool = self._trainer.strategy.broadcast(now_ns - self._local_ns >= self._local_s * 1e9)
        if is_due:
            self._local_ns = now_ns
        return is_due

    def _save_by_trainer(self) -> int | None:
        """Save with the trainer's ``ModelCheckpoint``; return the committed step, or ``None``.

        A failure is logged only, since the job is about to end in any case.

        Collective: all ranks.
        """
        trainer = self._trainer
        callback = _whole_checkpoint(trainer)
        if callback is None:
            log_on_rank_0(
                log,
                "the trainer has no ModelCheckpoint that saves more than weights: nothing is saved at this shutdown",
            )
            return None
        try:
            candidates = callback._monitor_candidates(trainer)
            if callback.save_last == "link" or not callback.save_last:
                name = None if callback.save_last else callback.CHECKPOINT_NAME_LAST
                callback._save_checkpoint(trainer, callback.format_checkpoint_name(candidates, name))
            if callback.save_last:
                callback._save_last_checkpoint(trainer, candidates)
            for one in unwrapped(trainer.strategy.checkpoint_io):
                if callable(finalize := getattr(one, "maybe_finalize_save_checkpoint", None)):
                    finalize(blocking=True)
                elif isinstance(one, AsyncCheckpointIO):
                    one.teardown()
        except Exception as error:  # for example a full disk or a lost peer: the exit code reports it
            log.error(
                "the trainer's own save of step %d failed: %s: %s",
                *(self._loop.global_step, type(error).__name__, error),
                exc_info=True,
            )
            return None
        return int(self._loop.global_step)

    def _tolerate_unreadable(self) -> None:
        """Do not fail for an unreadable checkpoint passed to ``fit()`` if the run has saved one of its own."""
        connector = self._trainer._checkpoint_connector

        def resume_start(checkpoint_path: Any = None, **options: Any) -> None:
            try:
                resume(checkpoint_path, **options)
            except Exception as error:  # noqa: BLE001 - reading a file of any content raises it
                self._unreadable = checkpoint_path, error
                connector._ckpt_path, connector._loaded_checkpoint = None, {}

        resume = self._host.replace(connector, "resume_start", resume_start)

    def _raise_unreadable(self) -> NoReturn:
        if self._unreadable is not None:
            raise self._unreadable[1]
        raise OutlastError(
            "another rank cannot read the checkpoint that fit() was given, and this run has saved none; see that "
            "rank's log",
            rank=self.session.global_rank,
        )

    # -- details ---------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Place | None:
        """Save point from which training continues; ``None`` once it has continued."""
        return None if self._own.loaded is None else Place(self._own.loaded["place"])

    def _act(self, place: Place) -> None:
        """Carry out the pending decision at a point between two steps."""
        decision, self._pending = self._pending, None
        assert decision is not None
        self._own.place = place
        if decision.stop:
            self._announce(decision)
            self.session.leave(self._state)
        self._warn_of_losses()  # a save waits for the device anyway
        self.session.save_due(self._state)
        self._own.place, self._own.fetch_random, self._own.loader_states = None, None, []

    def _warn_of_losses(self) -> None:
        """Report the first loss that was not finite, once."""
        if not self._has_warned and self._losses is not None and not math.isfinite(self._losses.item()):
            self._has_warned = True
            log.warning(
                "the loss is NaN or infinite on rank %d at step %d or earlier, and training continues with it; this is "
                "reported once",
                *(self.session.global_rank, self.session.iteration + self._is_open),
            )

    def _announce(self, decision: StepDecision) -> None:
        if decision.reason == ExitReason.PREEMPTED:
            log_on_rank_0(log, _PREEMPTED)

    def _is_last(self, step: int) -> bool:
        """Return whether training is complete with this step."""
        if 0 <= self._max_steps <= step:
            return True
        if not self._loop.batch_progress.is_last_batch:
            return False
        max_epochs = self._trainer.fit_loop.max_epochs
        return max_epochs is not None and 0 <= max_epochs <= self._trainer.current_epoch + 1

    def _place_loaders(self) -> None:
        """Set new loaders to the position within the epoch."""
        loop = self._trainer.fit_loop
        epoch = loop.epoch_progress.current.processed
        batches = loop.epoch_loop.batch_progress
        is_within = (
            self._place != Place.EPOCH and not batches.is_last_batch
        )  # otherwise no further batch is fetched in this epoch
        if is_within and self._own.loaded is not None:
            before, now = self._own.loaded["world_size"], self._trainer.world_size
            if before != now and batches.current.completed:
                log_on_rank_0(
                    log, "%d ranks did what %d do now: some samples of this epoch may come again", before, now
                )
                _scale(batches.current, before, now, min(loop._combined_loader.limits))
        num_done = batches.current.completed if is_within else 0
        for loader in loop._combined_loader.flattened:
            if _has_state(loader) or not isinstance(loader, DataLoader):
                continue
            for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(epoch)
            if not num_done or not _has_known_order(loader):
                continue
            drawn: Any = loader.batch_sampler
            sampler, num_skipped = drawn.sampler, num_done * drawn.batch_size
            if isinstance(sampler, ResumableDistributedSampler):
                sampler.resume_at(num_skipped)
            else:
                drawn.sampler = _RestOfEpoch(sampler, num_skipped)

    def _warn_of_loaders(self) -> None:
        """Log once which loaders cannot resume within an epoch."""
        if self.session.config.checkpoint is None:
            return
        loaders = self._trainer.fit_loop._combined_loader.flattened
        unknown = [one for one in loaders if not _has_state(one) and not _has_known_order(one)]
        if len(loaders) > 1 and any(not _has_state(one) for one in loaders):
            unknown = list(loaders)
        if unknown:
            kinds = {type(getattr(one, "sampler", one)).__name__ for one in unknown}
            log_on_rank_0(
                log,
                "a run that resumes in the middle of an epoch starts again at the epoch's first batch (%s): give the "
                "DataLoader sampler=ResumableDistributedSampler(dataset), or use torchdata's StatefulDataLoader",
                ", ".join(sorted(kinds)),
            )

    def _log_scores(self, metrics: dict[str, float], iteration: int) -> None:
        """Pass scores of slow ranks to the trainer's loggers."""
        if self.session.global_rank:
            return
        scores = {name.removeprefix("outlast/"): value for name, value in metrics.items() if "_perf/" in name}
        if scores:
            for logger in self._trainer.loggers:
                logger.log_metrics(scores, step=self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _release(self) -> None:
        self._host.give_back()
        self._trainer.callbacks = [one for one in self._trainer.callbacks if one is not self._last]


def _whole_checkpoint(trainer: Any) -> ModelCheckpoint | None:
    """Return the ``ModelCheckpoint`` whose checkpoints training can resume from; ``save_last`` takes precedence."""
    whole = [
        one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint) and not one.save_weights_only
    ]
    return next((one for one in whole if one.save_last), whole[0] if whole else None)


def _validates_loss(config: Config, trainer: Any) -> bool:
    """Return whether losses are judged: as configured, and unless a gradient scaler does that."""
    rerun = config.rerun_state_machine
    if rerun is not None and (rerun.rerun_mode == "report_determinism_stats" or not rerun.check_for_nan_in_loss):
        return False
    return getattr(trainer.precision_plugin, "scaler", None) is None


def _has_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _has_known_order(loader: Any) -> bool:
    """Return whether a loader's order depends only on seed and epoch, so that it can resume anywhere."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler: Any = loader.batch_sampler.sampler
    while isinstance(sampler, _RestOfEpoch):
        sampler = sampler._sampler
    return isinstance(sampler, DistributedSampler) or type(sampler) is SequentialSampler
