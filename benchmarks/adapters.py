"""Benchmark ``adapters``: the cost of a trainer's adapter per step without faults.

Whole small trainings take turns, bare and with the adapter, in the same ranks, as a trainer's steps differ more between
processes than the measured cost. This process holds their heartbeat memory, as an agent does.
"""

from __future__ import annotations

import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.measuring import MeasuredRounds, Progress, measure_rounds, median, process_group, take_turns
from benchmarks.results import installed_version
from outlast import clock, env
from outlast.config import Config
from outlast.runtime.board import Board
from outlast.simulate.benchmark_results import Bar, BenchResult
from outlast.wording import count

_TIMEOUT_S = 600.0
_RANKS = (1, 2)
_BAR_US = 100.0
_NUM_TURNS = 8
_STEPS, _WARM = 300, 50
"""Steps of a training, and the uncounted ones among them."""
_WIDTH, _BATCH = 32, 8


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Measure each installed framework's adapter, on one rank and on two.

    Raises:
        OutlastError: A worker failed, or was too slow.

    Blocks: about a minute a round.
    """
    bars: list[Bar] = []
    notes = []
    for package, name, work in (
        ("lightning", "lightning_us_per_step", measure_lightning),
        ("transformers", "transformers_us_per_step", measure_transformers),
    ):
        if installed_version(package) is None:
            progress(f"{package} is not installed: pip install 'outlast[{package}]'")
            bars += [Bar(name, None, "us", _BAR_US), Bar(f"{name}_2", None, "us", _BAR_US)]
            continue
        for num_ranks in _RANKS:
            ranks = count(num_ranks, "rank")
            progress(f"trainings with {package} in turns, {ranks}, {repeats} rounds and one that is dropped")
            found = _measure(work, num_ranks, repeats=repeats, progress=progress)
            called = f"a step of {package} alone, {ranks}"
            figure = name if num_ranks == 1 else f"{name}_{num_ranks}"
            bars.append(found.bar(figure, "cost_us", "us", _BAR_US, called=called, peer="bare_us"))
        notes.append(f"{package} {installed_version(package)}")
    return BenchResult("adapters", tuple(bars), tuple(notes))


def _measure(
    work: Callable[[str, str], Iterator[dict[str, float]]], num_ranks: int, *, repeats: int, progress: Progress
) -> MeasuredRounds:
    with closing(Board.create(num_ranks=num_ranks)) as board:
        variables = {env.BOARD: board.path, env.RUN_ID: "bench", "HF_HUB_OFFLINE": "1"}
        return measure_rounds(
            work,
            num_ranks,
            repeats=repeats,
            progress=progress,
            timeout_s=_TIMEOUT_S,
            num_ranks=num_ranks,
            variables=variables,
        )


class _StepTimer:
    """Time the steps of one training, from the first that counts to the last."""

    def __init__(self) -> None:
        self._num = self._begin_ns = self._end_ns = 0

    def note_step(self) -> None:
        self._num += 1
        if self._num == _WARM:
            self._begin_ns = clock.now_ns()
        self._end_ns = clock.now_ns()

    @property
    def step_s(self) -> float:
        return (self._end_ns - self._begin_ns) / (self._num - _WARM) / 1e9


def _in_turns(train: Callable[[bool], float], num_rounds: str, num_ranks: int) -> Iterator[dict[str, float]]:
    """Yield the microseconds per step of each round; the order within a turn is drawn, equally on all ranks."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    order = random.Random(0)
    with process_group() if num_ranks > 1 else nullcontext():
        for _ in range(int(num_rounds)):
            turns = take_turns({"bare": lambda: train(False), "ours": lambda: train(True)}, _NUM_TURNS, order)
            cost_s = median(ours - bare for ours, bare in zip(turns["ours"], turns["bare"], strict=True))
            us = {f"{name}_us": median(seconds) * 1e6 for name, seconds in turns.items()}
            yield {**us, "cost_us": cost_s * 1e6}


def _examples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(_STEPS * _BATCH * max(_RANKS), _WIDTH, generator=drawn)
    return list(zip(rows, rows.sum(1, keepdim=True), strict=True))


def measure_lightning(num_rounds: str, num_ranks: str) -> Iterator[dict[str, float]]:
    """Yield the duration of Lightning's step, bare and with ``FaultToleranceCallback``. Collective: all ranks."""
    import lightning

    from outlast.integrations.lightning import FaultToleranceCallback

    class LightningModel(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(_WIDTH, 1)

        def training_step(self, batch: Sequence[torch.Tensor], _: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class LightningTimer(lightning.Callback):
        def __init__(self) -> None:
            self.watch = _StepTimer()

        def on_train_batch_start(self, *_: Any) -> None:
            self.watch.note_step()

    loader: Any = DataLoader(_examples(), batch_size=_BATCH)  # type: ignore[arg-type]

    def train(is_ours: bool) -> float:
        timer = LightningTimer()
        ours = [FaultToleranceCallback(autoresume=False, calculate_timeouts=False)] if is_ours else []
        callbacks: list[Any] = [timer, *ours]
        trainer = lightning.Trainer(
            max_steps=_STEPS,
            accelerator="cpu",
            devices=int(num_ranks),
            strategy="ddp" if int(num_ranks) > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        trainer.fit(LightningModel(), loader)
        return timer.watch.step_s

    yield from _in_turns(train, num_rounds, int(num_ranks))


def measure_transformers(num_rounds: str, num_ranks: str) -> Iterator[dict[str, float]]:
    """Yield the duration of the ``Trainer``'s step, bare and protected. Collective: all ranks."""
    import transformers

    from outlast.integrations.transformers import protect

    class TransformersModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(_WIDTH, 1)

        def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.layer(rows), labels)}

    class TransformersTimer(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.watch = _StepTimer()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.watch.note_step()

    examples = [{"rows": rows, "labels": labels} for rows, labels in _examples()]

    def train(is_ours: bool) -> float:
        timer = TransformersTimer()
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
            arguments = transformers.TrainingArguments(
                folder,
                max_steps=_STEPS,
                per_device_train_batch_size=_BATCH,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            )
            trainer = transformers.Trainer(TransformersModel(), arguments, train_dataset=examples, callbacks=[timer])
            if is_ours:
                protect(trainer, Config())
            trainer.train()
        return timer.watch.step_s

    yield from _in_turns(train, num_rounds, int(num_ranks))
