"""Small training runs of many kinds: undisturbed, interrupted, and resumed, in one process per rank.

As a script, ``hf_variants.py FOLDER NAME...`` runs the named variants, and each rank writes their results to
``FOLDER/rank-N.json``.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState

import outlast
from outlast.integrations.transformers import protect
from outlast.monitor.rank_monitor import PlacedRankMonitor, open_monitor

VOCABULARY = 64


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of random words, the same for each index; of several lengths if ``varied``."""

    def __init__(self, number: int = 40, *, varied: bool = False) -> None:
        self.number, self.varied = number, varied

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.number:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        length = 6 + index % 5 if self.varied else 8
        words = torch.randint(1, VOCABULARY, (length,), generator=generator)
        return {"input_ids": words, "labels": words.clone()}


class Augmented(Sentences):
    """Sentences in which the loader's workers change words, with random numbers of torch, numpy and python."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sentence = super().__getitem__(index)
        words = sentence["input_ids"]
        words[torch.randint(8, (1,))] = random.randrange(VOCABULARY)
        words[np.random.randint(8)] = int(torch.randint(VOCABULARY, (1,)))
        worker = get_worker_info()
        words[0] = (worker.seed - worker.id) % VOCABULARY
        return sentence


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Sentences without an index; the stream ends before the training, and restarts."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Sentences(28)[index] for index in range(28))


def pad(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad short sentences."""

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([one[name] for one in batch], batch_first=True, padding_value=value)

    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", -100)}


def mask(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Mask random words for masked language modelling, with the process's random numbers."""
    words = torch.stack([one["input_ids"] for one in batch])
    hidden = torch.rand(words.shape) < 0.4
    return {"input_ids": words.masked_fill(hidden, 0), "labels": words.masked_fill(~hidden, -100)}


class Interrupt(TrainerCallback):
    """Interrupt the training as an error would, after a step or during the evaluation that follows it."""

    def __init__(self, after: int | None, *, in_evaluation: bool = False) -> None:
        self.after, self.in_evaluation = after, in_evaluation
        self.began: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step not in self.began[-1:]:  # an epoch that starts within the step calls this again
            self.began.append(state.global_step)
        if self.after is not None and not self.in_evaluation and state.global_step >= self.after:
            raise InterruptedError

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.after is not None and self.in_evaluation and state.global_step >= self.after:
            raise InterruptedError


class EndEarly(TrainerCallback):
    """End epochs after steps, or end an epoch or the training once between two micro-batches of a step."""

    def __init__(self, *, epochs: tuple[int, ...] = (), epoch_within: int = -1, training_within: int = -1) -> None:
        self.epochs, self.epoch_within, self.training_within = epochs, epoch_within, training_within

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = control.should_epoch_stop or state.global_step in self.epochs

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.training_within
        if state.global_step == self.epoch_within:
            self.epoch_within, control.should_epoch_stop = -1, True


class OpenSections(TrainerCallback):
    """Record the open sections during steps and evaluations."""

    def __init__(self) -> None:
        self.recorded: list[list[str]] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        monitor = open_monitor()
        assert isinstance(monitor, PlacedRankMonitor)
        self.recorded.append([section.name for section in monitor.board_state.sections])

    on_prediction_step = on_substep_end


class DateState(TrainerCallback, ExportableState):
    """A callback whose state contains values without a JSON form."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"day": datetime.date(2026, 1, 2)}}


class CustomSteps(Trainer):
    """A script's trainer with its own step and loss; the step modifies its inputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch) * 1.0


class SometimesNaN(Trainer):
    """A trainer whose loss is NaN in one micro-batch, the first time or always."""

    nan_step, nan_always, recorded = -1, False, 0
    finite = 0
    """Micro-batches of that step that come before it."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        at = self.state.global_step
        if not self.model.training or at != self.nan_step:
            return loss
        self.finite -= 1
        if self.finite < 0 and (self.nan_always or not self.recorded):
            type(self).recorded += 1
            loss = loss * float("nan")
        return loss


class InjectedNaN(Trainer):
    """A trainer whose loss is NaN once, in one micro-batch of one rank, if a session checks the loss."""

    is_injected = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        is_last_rank = self.args.process_index == self.args.world_size - 1
        if "training_step" in vars(self) and is_last_rank and self.state.global_step == 7 and not self.is_injected:
            self.is_injected = True
            loss = loss * float("nan")
        return loss


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        )
    )


def bert() -> BertForMaskedLM:
    """Return a small model with dropout in all layers."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )


def t5() -> T5ForConditionalGeneration:
    """Return a small translation model."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )


EVALUATE = {"eval_strategy": "steps", "eval_steps": 3}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"args": {"max_steps": 11, "logging_steps": 2, **EVALUATE}},
    "accumulation": {"args": {"gradient_accumulation_steps": 3, "num_train_epochs": 3, "logging_steps": 1}},
    "workers": {"args": {"dataloader_num_workers": 2, "num_train_epochs": 2}},
    "persistent": {
        "args": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "num_train_epochs": 3},
        "after": 14,  # in the second epoch
    },
    "augmented": {
        "args": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "num_train_epochs": 3},
        "data": Augmented,
        "after": 14,
        "differs": True,
    },
    "augmented_new_workers": {
        "args": {"dataloader_num_workers": 3, "num_train_epochs": 2},
        "data": Augmented,
        "model": bert,
        "collate": mask,
        "differs": True,
    },
    "by_length": {
        "args": {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2},
        "data": lambda: Sentences(40, varied=True),
        "collate": pad,
    },
    "stream": {"args": {"max_steps": 13}, "data": Stream, "after": 9},
    "stream_accumulation": {"args": {"max_steps": 11, "gradient_accumulation_steps": 3}, "data": Stream},
    "epoch_ended": {"args": {"num_train_epochs": 2}, "callbacks": lambda: [EndEarly(epochs=(4, 14))]},
    "divided": {
        "args": {"max_steps": 9, "gradient_accumulation_steps": 4, "eval_strategy": "epoch"},
        "data": Stream,  # the stream ends within an accumulation
        "model": bert,
        "trainer": InjectedNaN,
        "in_evaluation": True,
    },
    "bf16": {"args": {"bf16": True, "max_steps": 9, "activation_checkpointing": True}},
    "masked": {
        "args": {"gradient_accumulation_steps": 2, "num_train_epochs": 2},
        "model": bert,
        "collate": mask,
        "data": lambda: Sentences(44),
        "after": 10,
    },
    "plateau": {
        "args": {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 1.0},
            "metric_for_best_model": "loss",
            "num_train_epochs": 2,
            **EVALUATE,
        },
        "in_evaluation": True,
    },
    "epochs": {
        "args": {
            "num_train_epochs": 3,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": True,  # the best checkpoint must not be the last one
        },
        "after": 10,
        "in_evaluation": True,
    },
    "stopped_early": {
        "args": {
            "num_train_epochs": 4,
            "metric_for_best_model": "loss",
            "greater_is_better": True,
            "load_best_model_at_end": False,
            "save_strategy": "steps",
            "save_steps": 3,
            **EVALUATE,
        },
        "callbacks": lambda: [EarlyStoppingCallback(early_stopping_patience=3)],
    },
    "stopped_within": {
        "args": {"max_steps": 9, "gradient_accumulation_steps": 2},
        "callbacks": lambda: [EndEarly(training_within=7)],
    },
    "epochs_ended": {
        "args": {"num_train_epochs": 2, "eval_strategy": "epoch"},
        "callbacks": lambda: [EndEarly(epochs=(6, 12))],
    },
    "epoch_ended_within": {
        "args": {"num_train_epochs": 3, "gradient_accumulation_steps": 3},
        "callbacks": lambda: [EndEarly(epoch_within=2)],
        "model": bert,
        "collate": mask,
        "after": 3,
    },
    "model_init": {"args": {"max_steps": 8}, "model_init": bert},
    "own_steps": {"args": {"max_steps": 8, "gradient_accumulation_steps": 2}, "trainer": CustomSteps},
    "injected_nan": {
        "args": {"max_steps": 9, "gradient_accumulation_steps": 3},
        "trainer": InjectedNaN,
        "model": bert,
        "collate": mask,
    },
    "translating": {
        "args": {"max_steps": 8, "predict_with_generate": True, "generation_max_length": 4, **EVALUATE},
        "trainer": Seq2SeqTrainer,
        "arguments": Seq2SeqTrainingArguments,
        "model": t5,
    },
}


def make(name: str, folder: Path, *callbacks: TrainerCallback) -> Any:
    """Return the trainer of a variant with its output in ``folder``."""
    variant = VARIANTS[name]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = variant.get("arguments", TrainingArguments)(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4 // world,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=11,
        learning_rate=3e-2,
        **{"save_strategy": "no", "logging_steps": 1000, **variant["args"]},
    )
    set_seed(11)
    has_init = "model_init" in variant
    return variant.get("trainer", Trainer)(
        model=None if has_init else variant.get("model", llama)(),
        model_init=variant.get("model_init"),
        args=args,
        train_dataset=variant.get("data", Sentences)(),
        eval_dataset=Sentences(8),
        data_collator=variant.get("collate"),
        callbacks=[*variant.get("callbacks", list)(), *callbacks],
    )


def outcome(trainer: Any) -> dict[str, Any]:
    """Return digests of the final weights and of the logged metrics, and the position."""
    weights = b"".join(weight.detach().numpy().tobytes() for weight in trainer.model.parameters())
    names = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch", "step")
    logged = [{name: one[name] for name in names if name in one} for one in trainer.state.log_history]
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "steps": trainer.state.global_step,
        "logged": [one for one in logged if {"loss", "eval_loss"} & one.keys()],
        "best": trainer.state.best_metric,
        "flos": trainer.state.total_flos,
    }


def config(folder: Path, **settings: Any) -> outlast.Config:
    """Return settings that save every second step to ``folder``."""
    checkpoint = outlast.CheckpointConfig(directory=str(folder / "ckpt"), save_interval=2, async_save=False)
    return outlast.Config(checkpoint=checkpoint, **settings)


def end_process(trainer: Any) -> None:
    """Close the resources that remain open until the process ends after a failed protected ``train()``."""
    run = trainer.train.__self__._run
    run._saves.manager.close()
    run._preemption._listener.close()


def run_variant(name: str, folder: Path) -> dict[str, Any]:
    """Train a variant without outlast, with outlast, and interrupted and resumed; return all results."""
    variant = VARIANTS[name]
    recorded = Interrupt(None)
    unprotected = make(name, folder / "unprotected", recorded)
    unprotected.train()
    found: dict[str, Any] = {"unprotected": outcome(unprotected), "steps unprotected": recorded.began}
    undisturbed = protect(make(name, folder / "protected"), config(folder / "protected"))
    undisturbed.train()
    found["protected"] = outcome(undisturbed)
    interrupt = Interrupt(variant.get("after", 6), in_evaluation=variant.get("in_evaluation", False))
    interrupted = protect(make(name, folder / "interrupted", interrupt), config(folder / "interrupted"))
    try:
        interrupted.train()
        raise AssertionError("the training was not interrupted")
    except InterruptedError:
        end_process(interrupted)
    for after in ("resumed", "restarted"):
        recorded = Interrupt(None)
        trainer = protect(make(name, folder / "interrupted", recorded), config(folder / "interrupted"))
        trainer.train()
        found[after] = outcome(trainer)
        found[f"steps {after}"] = recorded.began
    found["steps interrupted"] = interrupt.began
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    results = {one: run_variant(one, place / one) for one in sys.argv[2:]}
    (place / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))
