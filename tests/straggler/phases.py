"""A plain DDP training script in which some ranks are slow in one phase after another.

Arguments: a folder for the reports of each rank, and the scenes: phases, each with the ranks that are slow in it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from outlast import StragglerDetectionConfig
from outlast.straggler import StragglerDetector

HEALTHY_S, SLOW_S = 0.01, 0.06
CONFIG = StragglerDetectionConfig(report_time_interval=0.001, noticeable_score=0.6, confirmations=2)
"""A report every few steps; on a busy machine a healthy rank is less than twice as slow in a section with a relevant
share of a step."""
NUM_STEPS = 27
"""Enough steps for more than two reports."""


class Phase:
    """Spends the time of this rank's phases; a slow rank spends more in one of them."""

    def __init__(self) -> None:
        self.is_slow = False
        self.name = ""

    def spend(self, name: str) -> None:
        time.sleep(SLOW_S if self.is_slow and self.name == name else HEALTHY_S / 5)


class Data(Dataset[torch.Tensor]):
    def __init__(self, phase: Phase) -> None:
        self.phase = phase

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.phase.spend("data")
        return torch.full((8,), index % 7 / 7)


class Model(torch.nn.Module):
    def __init__(self, phase: Phase) -> None:
        super().__init__()
        self.phase = phase
        self.first, self.norm, self.last = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
        self.first.weight.register_hook(lambda _: phase.spend("backward"))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.phase.spend("forward")
        return self.last(self.norm(self.first(batch)))


class Optimizer(torch.optim.SGD):
    def __init__(self, phase: Phase, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.phase = phase

    def step(self, closure: Any = None) -> Any:
        self.phase.spend("optimizer")
        return super().step(closure)


class Training:
    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.model = DistributedDataParallel(Model(phase))
        self.optim = Optimizer(phase, self.model)
        self.state = {"model": self.model, "optim": self.optim}
        self.batches = iter(DataLoader(Data(phase), batch_size=1, sampler=range(1 << 20)))
        self.model.eval()  # one sample has no variance; the buffers are broadcast all the same

    def do_step(self) -> None:
        loss = self.model(next(self.batches)).square().mean()
        self.optim.zero_grad()
        loss.backward()
        self.phase.spend("between")
        self.optim.step()
        dist.all_reduce(loss.detach())  # as for a log: all ranks wait for the slowest one


def detect(training: Training, rank: int, scenes: list[tuple[str, list[int]]]) -> Iterator[dict[str, Any]]:
    """Train in each scene with a detector, and yield the content of its last report."""
    for name, slow_ranks in scenes:
        training.phase.name, training.phase.is_slow = name, rank in slow_ranks
        detector = StragglerDetector(CONFIG, num_warmup_steps=1)
        detector.watch(training.state)
        report = None
        for iteration in range(NUM_STEPS):
            with detector.step(iteration):
                training.do_step()
            report = detector.report_if_due() or report
        detector.close()
        assert report is not None
        yield {
            "phase": name,
            "named": [[one.rank, one.section, one.scope] for one in report.findings.named],
            "text": report.render(),
        }


def main() -> None:
    folder, scenes = sys.argv[1], json.loads(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(folder, f"{rank}.json").write_text(json.dumps(list(detect(Training(Phase()), rank, scenes))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
