"""Hugging Face's ``Trainer`` with a session: a script only calls :func:`protect`.

The ``Trainer`` owns its loop. A callback after all other callbacks starts and ends the session's steps. Some methods of
the instance are replaced while it trains (:data:`_REPLACED`). The Trainer's own resumption is used; only the source of
the state differs.

``train()`` opens the session; ``_init_training_state`` restores as soon as model, optimizer and scheduler exist;
``_run_epoch`` skips trained steps; ``_load_rng_state`` restores random numbers after the first batch is fetched;
``training_step`` validates the loss before the optimizer steps; ``_maybe_log_save_evaluate`` saves after the step's
logs and before its evaluation; ``_finalize_training`` commits the last save.

A checkpoint is saved before the evaluation and the Trainer's own save of the same step, so that a failure there costs
no step. The checkpoint records what was due, which a resumed run does first.

Rejected: a folder like the Trainer's with ``resume_from_checkpoint`` (its files are pickled, and read before they can
be verified), and saving when the next step starts (a shutdown would wait for an evaluation and for data).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple, TypeVar

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    raise ImportError(
        "outlast.integrations.transformers needs transformers and accelerate: pip install 'outlast[transformers]'",
        name="transformers",
    )

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from outlast.config import Config, RerunStateMachineConfig
from outlast.config.base import require
from outlast.decoding import parse_json
from outlast.errors import ConfigError, OutlastError
from outlast.integrations.hosted_session import (
    HostedConfig,
    HostedSession,
    KeptRandom,
    hosted_config,
    log_on_rank_0,
)
from outlast.runtime.loader_workers import SeededBatches
from outlast.runtime.random_numbers import RandomSnapshot, capture_random, restore_random
from outlast.session.session import Session
from outlast.session.step import Attempt, StepDecision

__all__ = ["protect"]

log = logging.getLogger(__name__)
TrainerT = TypeVar("TrainerT", bound=transformers.Trainer)
_TESTED = "5.23.0"
_COLLATED_TO_KNOW = 8
"""Batches after which a collator that has drawn no random number counts as deterministic."""
_REPLACED = {
    "_init_training_state": "_restore",
    "_prepare_for_training": "_give_prepared",
    "_run_epoch": "_run_epoch",
    "_load_rng_state": "_put_random_back",
    "_maybe_log_save_evaluate": "_save_between",
    "_save_checkpoint": "_save_checkpoint",
    "_finalize_training": "_finish",
    "evaluate": "_evaluate",
    "log": "_log_with_metrics",
    "training_step": "_validated_step",
}
"""Methods of the ``Trainer``, and the method of :class:`TrainerProtection` that replaces each while it trains."""


def protect(trainer: TrainerT, config: HostedConfig = None) -> TrainerT:
    """Protect the next ``trainer.train()``, and return the trainer.

    ``train()`` then opens a session, resumes from the newest trusted checkpoint, saves as ``config`` sets, and stops on
    all ranks, by ``SystemExit(75)``, when one of them receives a preemption notice. Another ``train()`` needs another
    ``protect()`` with another ``checkpoint.directory``. ``evaluate()`` and ``predict()`` alone are unchanged.

    Args:
        trainer: A ``transformers.Trainer`` or one of a derived class, complete with its callbacks.
        config: The settings, or a ``.toml``, ``.yaml`` or ``.json`` file, as for :func:`outlast.init`; ``None`` = the
            file of ``outlast run --config``.

    Returns:
        ``trainer`` itself.

    Raises:
        ConfigError: A setting is invalid, or the trainer uses a feature that cannot be protected; the message names it.

    Collective: no; ``train()`` is, for all ranks.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(f"protect() takes a transformers.Trainer, not {type(trainer).__name__}")
    made = hosted_config(config)
    before = getattr(trainer.train, "__self__", None)
    if isinstance(before, TrainerProtection) and not before.is_used:
        raise ConfigError("this Trainer is protected already; call protect() once for each train()")
    if missing := [name for name in _REPLACED if not callable(getattr(trainer, name, None))]:
        raise ConfigError(
            f"transformers {transformers.__version__} has no Trainer.{missing[0]}, which protect() builds on; "
            f"install {_TESTED}, with which it is tested"
        )
    _refuse_what_cannot_be(trainer)
    train = before.original_train if isinstance(before, TrainerProtection) else trainer.train
    trainer.train = TrainerProtection(trainer, made, train).train
    return trainer


def _refuse_what_cannot_be(trainer: Any) -> None:
    """Raise :class:`ConfigError` if the trainer cannot be resumed exactly, or handles the signals itself."""
    args = trainer.args
    refused = {
        "protect() cannot save what DeepSpeed's engine holds; train with DDP, or leave DeepSpeed to its own "
        "checkpoints and use outlast run and sections only": trainer.is_deepspeed_enabled,
        "protect() cannot save a model that the Trainer shards with FSDP; train with DDP, or write the loop with "
        "outlast.init() and FSDP2, whose DTensors are saved": trainer.is_fsdp_enabled
        or getattr(trainer, "is_fsdp_xla_enabled", False),
        "protect() cannot save a model that transformers shards as it loads it; load it whole": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "enable_jit_checkpoint handles SIGTERM on one rank only; leave it off: protect() saves with all ranks when a "
        "shutdown is requested": args.enable_jit_checkpoint,
        "auto_find_batch_size begins training again within train(), with another batch size; find the size first, "
        "then set per_device_train_batch_size": args.auto_find_batch_size,
    }
    for why, is_used in refused.items():
        require(not is_used, why)


class _MicroBatch(NamedTuple):
    """One micro-batch of a step, kept to compute the step again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_synced: bool
    """Its gradients are reduced over all ranks."""
    random: dict[str, Any] | None
    """Random numbers before it, if an epoch started with it; ``None`` = those after the previous one."""


class TrainerProtection(TrainerCallback):
    """One protected ``train()``: the callback, and the replacements of the trainer's methods.

    Thread: the thread of the training loop.
    """

    def __init__(self, trainer: Any, config: Config, original_train: Callable[..., Any]) -> None:
        self.original_train = original_train
        self.is_used = False
        """``train()`` was called."""
        self._trainer, self._config = trainer, config
        self._originals: dict[str, Callable[..., Any]] = {}
        self._setup = ExitStack()
        self._host: HostedSession
        self._run: Session
        self._state: dict[str, Any] = {}
        self._model: Any = None
        self._given: str | bool | None = None
        self._ignored_keys: list[str] | None = None
        self._loaded: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._decision: StepDecision | None = None
        self._in_step = False
        # Position.
        self._epoch = self._updates = 0
        self._offset = 0
        self._epoch_random: dict[str, Any] = {}
        self._step_began: dict[str, Any] = {}
        self._has_finished = False
        # Resumption.
        self._resumes_in: str | None = None
        self._random: KeptRandom
        self._collating: RandomSnapshot | None = None
        self._num_refetched: int | None = None
        self._persistent: Any = None
        """The loader whose workers persist over epochs; ``None`` = they do not."""
        self._base_random: torch.Tensor | None = None
        """Generator state from which the base seed of these workers was drawn."""
        self._stops = False
        self._ends_epoch = False
        # Attempts of a step.
        rerun = config.rerun_state_machine or RerunStateMachineConfig()
        self._validates = rerun.rerun_mode != "disabled" or rerun.check_for_nan_in_loss
        self._attempts: Iterator[Attempt] | None = None
        self._attempt: Attempt | None = None
        self._micro_batches: list[_MicroBatch] = []
        self._epoch_begun: dict[str, Any] | None = None
        self._loss: Any = None
        self._has_warned = False
        self._logged_loss: Any = None
        self._num_logged = 0

    # -- the whole training ----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer's own method does, with a session."""
        trainer = self._trainer
        if self.is_used:
            raise ConfigError(
                "this train() was protected and has ended; for another one call protect() again, with another "
                "checkpoint.directory"
            )
        if trainer.hp_search_backend is not None or kwargs.get("trial") is not None or (args and args[0] is not None):
            raise ConfigError(
                "hyperparameter_search() trains many models, and protect() keeps one alive; search with a Trainer "
                "that is not protected"
            )
        self.is_used = True
        self._given = resume_from_checkpoint or None
        self._ignored_keys = kwargs.get("ignore_keys_for_eval", args[1] if len(args) > 1 else None)
        self._host = HostedSession(self._config, log_metrics=self._take_metrics)
        self._random = self._host.random
        with self._host.session as self._run:
            self._setup.enter_context(self._run.section("setup"))
            self._install()
            try:
                return self.original_train(None, *args, **kwargs)
            finally:
                self._uninstall()

    def _install(self) -> None:
        trainer = self._trainer
        for name, own in _REPLACED.items():
            if name != "training_step" or self._validates:
                self._originals[name] = self._host.replace(trainer, name, getattr(self, own))
        trainer.add_callback(self)  # last: the requests of all other callbacks after a step are known here

    def _uninstall(self) -> None:
        self._host.give_back()
        if self in self._trainer.callback_handler.callbacks:
            self._trainer.remove_callback(self)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._host.outside_step("checkpointing", is_in_step=self._in_step):
            return self._originals["_save_checkpoint"](*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._host.outside_step("evaluation", is_in_step=self._in_step):
            return self._originals["evaluate"](*args, **kwargs)

    def _finish(self, *args: Any, **kwargs: Any) -> Any:
        """Commit the training, before the best model is loaded and before other callbacks act on the end."""
        finalize = self._originals["_finalize_training"]
        self._has_finished = True
        if self._in_step:  # a callback ended training between two micro-batches; the last ones moved no weight
            self._in_step = False
            self._run.end_step(is_last=True)
        self._run.finish(self._state)
        self._host.note_finished()
        self._uninstall()
        return finalize(*args, **kwargs)

    # -- restoring -------------------------------------------------------------------------------------------------

    def _restore(self, max_steps: int, num_updates: int, num_epochs: int, _: Any, trial: Any) -> tuple[int, int]:
        """Restore the trainer's state; return the epoch, and the number of its trained batches."""
        trainer, init = self._trainer, self._originals["_init_training_state"]
        place: tuple[int, int] = init(max_steps, num_updates, num_epochs, None, trial)
        self._model = self._originals["_prepare_for_training"](max_steps, None, None)[0]
        self._state = {
            "model": trainer.model,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "lr_scheduler": trainer.lr_scheduler,
            "trainer": self,
        }
        if trainer.accelerator.scaler is not None:
            self._state["scaler"] = trainer.accelerator.scaler
        if self._run.restore(self._state):
            return self._continue(max_steps, num_updates, num_epochs, trial)
        if self._given is None:
            return place
        folder = get_last_checkpoint(trainer.args.output_dir) if self._given is True else self._given
        if folder is None:
            raise ValueError(f"No valid checkpoint found in output directory ({trainer.args.output_dir})")
        trainer._load_from_checkpoint(folder)
        trainer._load_optimizer_and_scheduler(folder)
        trainer._load_scaler(folder)
        place = init(max_steps, num_updates, num_epochs, folder, trial)
        self._resumes_in, self._offset = str(folder), trainer.state.global_step
        self._epoch, self._updates = place[0], place[1] // trainer.args.gradient_accumulation_steps
        return place

    def _continue(self, max_steps: int, num_updates: int, num_epochs: int, trial: Any) -> tuple[int, int]:
        """Restore the trainer's own part of a checkpoint."""
        trainer, loaded = self._trainer, self._loaded
        if self._given is not None:
            text = "resume_from_checkpoint=%r is not used: this run has saved a newer checkpoint"
            log_on_rank_0(log, text, self._given)
        self._random.keep()
        trainer.state = TrainerState(**parse_json(loaded["state"]))
        self._restore_callbacks(trainer.state.stateful_callbacks)
        trainer.state.compute_steps(trainer.args, max_steps)
        trainer.state.init_training_references(trainer, max_steps, num_epochs, trial)
        self._resumes_in, self._offset = "outlast", loaded["offset"]
        self._epoch, self._updates = loaded["epoch"], loaded["updates"]
        self._ends_epoch = bool(loaded.get("has_ended_epoch"))
        self._base_random = loaded.get("base_random")
        if loaded["samples_per_update"] != self._samples_per_update:
            if trainer.args.max_steps > 0:  # the number of steps is fixed, and determines the epochs
                self._epoch, self._updates = divmod(trainer.state.global_step, num_updates)
            else:
                self._updates = self._updates * loaded["samples_per_update"] // self._samples_per_update
            log.warning(
                "an update takes %d samples, it took %d: training continues after %d updates of epoch %d, reordered",
                *(self._samples_per_update, loaded["samples_per_update"], self._updates, self._epoch),
            )
            transformers.set_seed(
                trainer.args.seed + self._run.iteration
            )  # the same on all ranks, so that their order is, too
            self._random.keep()
            self._ends_epoch = self._ends_epoch and trainer.args.max_steps <= 0
        self._stops = loaded["has_stopped"] or trainer.state.global_step >= max_steps
        if loaded["has_finished"]:
            if self._stops:
                return num_epochs, 0
            if self._updates >= num_updates or self._ends_epoch:  # training was extended since
                self._epoch, self._updates, self._ends_epoch = self._epoch + 1, 0, False
        if self._stops:
            self._updates = num_updates
        elif trainer.args.ignore_data_skip:
            self._updates = 0
        return self._epoch, self._updates * trainer.args.gradient_accumulation_steps

    def _restore_callbacks(self, saved: dict[str, Any]) -> None:
        """Restore the state of stateful callbacks, in place."""
        by_name = {name: list(one) if isinstance(one, list) else [one] for name, one in saved.items()}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState) and (left := by_name.get(type(callback).__name__)):
                for name, value in left.pop(0).get("attributes", {}).items():
                    setattr(callback, name, value)

    def _give_prepared(self, _max_steps: int, train_dataloader: Any, _: Any) -> tuple[Any, Any]:
        """Return the model that :meth:`_restore` prepared."""
        self._trainer.callback_handler.train_dataloader = train_dataloader
        loader = getattr(train_dataloader, "base_dataloader", None)
        if loader is None:
            return self._model, train_dataloader
        if loader.num_workers and loader.persistent_workers and loader.generator is None:
            self._persistent = loader
        is_stream = isinstance(loader.dataset, IterableDataset)
        if is_stream and self._persistent is not None:
            log_on_rank_0(
                log,
                "dataloader_persistent_workers with an IterableDataset: random numbers that its workers draw change "
                "after a resumption; leave the setting off, or have the stream draw from a generator that it seeds",
            )
        elif loader.num_workers == 0 and not is_stream:
            self._collate_in_order(loader)
        elif loader.batch_sampler is not None and not is_stream:
            # The loader's __setattr__ refuses it; its iterators read the attribute when each epoch starts.
            object.__setattr__(loader, "batch_sampler", SeededBatches(loader.batch_sampler, self._seed_of_epoch))
        return self._model, train_dataloader

    def _seed_of_epoch(self) -> tuple[int, int, int]:
        """Return the seed, with the batch number, of the random numbers of the loader's workers."""
        args = self._trainer.args
        return abs(args.seed if args.data_seed is None else args.data_seed), self._epoch, self._run.global_rank

    def _keep_base_seed(self) -> None:
        """Give workers that start after the first epoch the base seed that persistent workers keep.

        A loader draws the seed when it starts its workers: with persistent workers in the first epoch only.
        """
        if self._persistent is not None and self._epoch and self._base_random is not None:
            generator = torch.Generator()
            generator.set_state(self._base_random)
            self._persistent.generator = generator

    def _collate_in_order(self, loader: Any) -> None:
        """Collate batches that are fetched again with their former random numbers, for example masks.

        Accelerate fetches one batch ahead: at the end of a step the next one exists. A resumed training collates that
        batch again, followed by the one after it, which had the random numbers after the step.
        """
        collate, taken = loader.collate_fn, RandomSnapshot()
        left = _COLLATED_TO_KNOW

        def collate_in_order(samples: Any) -> Any:
            if self._num_refetched == 0:
                restore_random(self._loaded["collating"])
                self._num_refetched = 1
            elif self._num_refetched == 1:
                self._put_random_back(None)
            nonlocal left
            if not left:  # the collator draws no random numbers
                return collate(samples)
            taken.take()
            self._collating = taken
            batch = collate(samples)
            if left > 0:
                left -= 1
                if _as_bytes(taken.state) != _as_bytes(capture_random()):
                    left = -1
                elif not left:
                    self._collating = None
            return batch

        loader.collate_fn = collate_in_order

    def _put_random_back(self, checkpoint: str | None) -> None:
        """Restore random numbers, once everything before the first step has drawn its own."""
        self._num_refetched = None
        if self._random.is_kept:
            self._random.put_back()
        elif not self._loaded:
            self._originals["_load_rng_state"](checkpoint)

    @property
    def _samples_per_update(self) -> int:
        args = self._trainer.args
        return int(self._trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    @property
    def _position(self) -> dict[str, Any]:
        """The position between two steps. A save within a step, for a diagnosis, has the position at the start of the
        step, since an epoch may have ended since."""
        return {"epoch": self._epoch, "updates": self._updates, "epoch_random": self._epoch_random}

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's own state."""
        trainer = self._trainer
        state, control, handler = trainer.state, trainer.control, trainer.callback_handler
        exportable = [one for one in (*handler.callbacks, control) if isinstance(one, ExportableState)]
        exported = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        for name, one in exported.items():
            _check_callback(name, one)
        return {
            "state": json.dumps(_plain({**vars(state), "stateful_callbacks": exported})),
            **(self._step_began if self._in_step else self._position),
            "samples_per_update": self._samples_per_update,
            "offset": self._offset,
            "has_finished": self._has_finished,
            "has_stopped": bool(control.should_training_stop and state.global_step < state.max_steps),
            "has_ended_epoch": bool(
                control.should_epoch_stop or (self._has_finished and not control.should_training_stop)
            ),
            "due": [bool(control.should_evaluate), bool(control.should_save)],
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "flos": float(trainer.current_flos),
            "collating": {} if self._collating is None else self._collating.state,
            "base_random": self._base_random,
        }

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Keep the state until the trainer can take it."""
        self._loaded = dict(loaded)

    # -- the loop --------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do what was due when the checkpoint was saved; end the setup."""
        trainer, loaded = self._trainer, self._loaded
        self._setup.close()
        if not loaded:
            return
        trainer._tr_loss.fill_(loaded["loss"])
        trainer._total_loss_scalar = -loaded["loss"]  # train() returns the mean loss of its own steps
        trainer._globalstep_last_logged, trainer.current_flos = loaded["last_logged"], loaded["flos"]
        self._random.put_back()
        if not loaded["has_finished"] and any(loaded["due"]):
            control.should_evaluate, control.should_save = loaded["due"]
            maybe = self._originals["_maybe_log_save_evaluate"]
            maybe(trainer._tr_loss, None, self._model, None, self._epoch, self._ignored_keys, 0.0)
            self._stops = self._stops or trainer.control.should_training_stop
            self._ends_epoch = self._ends_epoch or trainer.control.should_epoch_stop
        self._random.keep()
        if self._stops:
            trainer.control.should_training_stop = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the random numbers with which the epoch first started: they determine the order of its samples."""
        self._restore_epoch_random()
        if self._persistent is not None and self._base_random is None:
            self._base_random = self._epoch_random["torch"].clone()

    def _restore_epoch_random(self) -> None:
        if self._random.is_kept and self._updates and self._loaded["epoch_random"]:
            self._epoch_random = self._loaded["epoch_random"]
            restore_random(self._epoch_random)
            return
        if not self._random.is_kept:
            self._epoch_random = capture_random()
            return
        self._random.put_back()
        self._epoch_random = capture_random()
        self._random.keep(self._epoch_random)

    def _run_epoch(self, **of_epoch: Any) -> Any:
        """Run an epoch; the first one after a restart from its position on."""
        if self._resumes_in is not None and (self._stops or self._ends_epoch):
            return self._end_epoch(**of_epoch)
        if self._resumes_in is None:
            self._updates = 0
        else:
            skipped = self._updates * self._trainer.args.gradient_accumulation_steps
            of_epoch.update(
                resume_from_checkpoint=self._resumes_in,
                epochs_trained=of_epoch["epoch"],
                steps_trained_in_current_epoch=skipped,
            )
            if self._random.is_kept and self._updates >= of_epoch["num_update_steps_per_epoch"]:
                self._put_random_back(None)  # no first batch is fetched
            elif skipped and self._loaded.get("collating"):
                self._num_refetched = 0
            self._resumes_in = None
        self._epoch = of_epoch["epoch"]
        self._keep_base_seed()
        return self._originals["_run_epoch"](**of_epoch)

    def _end_epoch(
        self,
        *,
        model: Any,
        epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        **_: Any,
    ) -> None:
        """Do the trainer's work after an epoch that a callback ended after the loaded step."""
        trainer = self._trainer
        self._epoch, self._updates, self._resumes_in = epoch, num_update_steps_per_epoch, None
        self._put_random_back(None)  # no first batch is fetched
        if self._ends_epoch:
            self._ends_epoch, trainer.control.should_epoch_stop = False, True
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the optimizer step, or continue one that the end of an epoch divides."""
        if self._in_step:
            if self._validates:
                self._epoch_begun = capture_random()
            self._run.heartbeat()
            return
        self._step_began, self._in_step = self._position, True
        self._run.begin_step()
        if self._validates:
            self._attempts = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the optimizer step; the decision of the ranks is carried out after the step's logs."""
        self._updates += 1
        self._in_step = False
        self._decision = self._run.end_step(is_last=state.global_step >= state.max_steps)

    def _save_between(self, *args: Any, **kwargs: Any) -> Any:
        """Log, then save or exit as decided, then evaluate and save as the trainer does."""
        maybe, decision = self._originals["_maybe_log_save_evaluate"], self._decision
        if decision is not None:
            self._decision = None
            if decision.stop or decision.save is not None:
                control = self._trainer.control
                if control.should_log:
                    due = control.should_evaluate, control.should_save
                    control.should_evaluate = control.should_save = False
                    maybe(*args, **kwargs)
                    control = self._trainer.control
                    control.should_evaluate, control.should_save = due
                if decision.stop:
                    self._run.leave(self._state)
                self._run.save_due(self._state)
        num_logged = self._trainer._globalstep_last_logged
        result = maybe(*args, **kwargs)
        if self._micro_batches and self._trainer._globalstep_last_logged != num_logged:  # an epoch ended within a step
            self._logged_loss, self._num_logged = self._trainer._tr_loss.clone(), len(self._micro_batches)
        return result

    # -- one step --------------------------------------------------------------------------------------------------

    def _validated_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute one micro-batch; after the last one judge the step's loss, and compute the step again if needed."""
        trainer, step = self._trainer, self._originals["training_step"]
        is_last = trainer.accelerator.gradient_state.sync_gradients
        if self._attempts is None:
            self._attempts = self._run.attempts()
            self._attempt = next(self._attempts)
            self._micro_batches, self._loss, self._epoch_begun, self._num_logged = [], None, None, 0
            if not is_last:
                self._logged_loss = trainer._tr_loss.clone()
        is_synced = getattr(model, "require_backward_grad_sync", True)
        self._micro_batches.append(_MicroBatch((inputs, *args), kwargs, is_synced, self._epoch_begun))
        self._epoch_begun = None
        loss = step(model, copy.copy(inputs), *args, **kwargs)
        self._loss = loss if self._loss is None else self._loss + loss
        if not is_last:
            return loss
        if not self._passes(self._loss):
            if len(self._micro_batches) > 1:
                trainer._tr_loss.copy_(self._logged_loss)
            logged, unlogged = self._compute_again(model)
            loss = unlogged
            self._passes(unlogged if logged is None else logged + unlogged)
        self._micro_batches = []
        return loss

    def _passes(self, loss: Any) -> bool:
        """End an attempt, with all ranks; return whether the step is complete."""
        assert self._attempts is not None
        assert self._attempt is not None
        self._attempt.validate(loss)
        self._attempt = next(self._attempts, None)
        return self._attempt is None

    def _compute_again(self, model: Any) -> tuple[Any, Any]:
        """Compute the step's micro-batches again; return the sum of the losses that the Trainer has logged (``None`` =
        none), and of the others."""
        accelerator = self._trainer.accelerator
        losses: list[Any] = [None, None]
        for number, one in enumerate(self._micro_batches, 1):
            if one.random is not None:
                restore_random(one.random)
            accelerator.gradient_state._set_sync_gradients(number == len(self._micro_batches))
            inputs, *args = one.args
            with nullcontext() if one.is_synced else accelerator.no_sync(model=model):
                loss = self._originals["training_step"](model, copy.copy(inputs), *args, **one.kwargs)
            part = int(number > self._num_logged)
            losses[part] = loss if losses[part] is None else losses[part] + loss
        return losses[0], losses[1]

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _take_metrics(self, metrics: dict[str, float], iteration: int) -> None:
        self._metrics.update(metrics)

    def _log_with_metrics(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """Log the session's metrics with the training loss."""
        if "loss" in logs:
            # The Trainer logs a NaN loss as 0, unless its logging_nan_inf_filter is off.
            seen = {name: float(logs[name]) for name in ("loss", "grad_norm") if name in logs}
            bad = next((name for name, value in seen.items() if not math.isfinite(value)), None)
            if bad is not None and not self._has_warned:
                self._has_warned = True
                text = "%s is %s at step %d, and training continues with it; this is reported once"
                log_on_rank_0(log, text, bad, seen[bad], self._trainer.state.global_step)
            logs.update(self._metrics)
            self._metrics.clear()
        return self._originals["log"](logs, *args, **kwargs)


def _as_bytes(random: dict[str, Any]) -> list[Any]:
    numpy = [part.tobytes() if hasattr(part, "tobytes") else part for part in random["numpy"]]
    return [random["python"], *numpy, random["torch"].numpy().tobytes(), random["device"]]


def _plain(value: Any) -> Any:
    """Return a value as JSON represents it; other objects in the logs, such as a date, become text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _check_callback(name: str, exported: Any) -> None:
    """Raise :class:`OutlastError` if a callback's state cannot be restored as it was."""
    try:
        json.dumps(exported, default=lambda value: value.tolist())
    except (AttributeError, TypeError) as error:
        raise OutlastError(
            f"the callback {name} cannot be saved ({error}); return from its state() what JSON has: numbers, text, "
            "lists and dicts"
        ) from error
