"""The process that ``outlast bench save`` trains in while saves are written; prints seconds by name, a line a round.

Training that keeps every core busy is the one that the bar is about; beside one that leaves cores free, whoever writes
in a thread or a process of its own costs it little.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver as dcp

from outlast.bench.checkpoint_state import CheckpointState
from outlast.bench.measuring import timed
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig

__all__ = ["main"]

_SIDE = 256
_LAYERS = 6
_QUIET_STEPS = 60


class _Training:
    """Steps of a small model: forward, backward, optimizer."""

    def __init__(self) -> None:
        layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(_SIDE, _SIDE), torch.nn.ReLU())]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._input = torch.randn(_SIDE, _SIDE)

    def step(self) -> float:
        """Return the seconds of a step."""
        return timed(self._step)[0]

    def quiet(self) -> list[float]:
        """Return the seconds of steps while nothing is saved."""
        return [self.step() for _ in range(_QUIET_STEPS)]

    def beside(self, is_done: Callable[[], bool]) -> list[float]:
        """Train until a save is done; return the seconds of the steps meanwhile, the one that sees its end included."""
        busy = [self.step()]
        while not is_done():
            busy.append(self.step())
        return busy

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._input).square().mean().backward()
        self._optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training steps beside saves.")
    parser.add_argument("rounds", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tensors", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the peer's own
    saved, training = CheckpointState(args.tensors), _Training()
    folder = args.folder / "ours"
    manager = CheckpointManager(CheckpointConfig(local_directory=str(folder), local_most_recent_k=-1))
    iterations = iter(range(1, 2 * args.rounds + 3))

    def save_ours() -> Any:
        return manager.save(saved.state, next(iterations))

    for _ in range(2):  # each of the two buffers once
        save_ours().wait()

    def beside_ours() -> list[float]:
        handle = save_ours()
        found = training.beside(lambda: handle.done)
        handle.wait()
        for old in folder.glob("*/step-*"):
            shutil.rmtree(old)
        return found

    def beside_dcp() -> list[float]:
        written: Any = dcp.async_save(saved.state_dict(), checkpoint_id=args.folder / "dcp", no_dist=True)
        found = training.beside(written.done)
        written.result()
        shutil.rmtree(args.folder / "dcp")
        return found

    for _ in range(args.rounds):
        found: dict[str, float] = {}
        for suffix, num_threads in (("", len(os.sched_getaffinity(0))), ("_one_core", 1)):
            torch.set_num_threads(num_threads)
            found |= _compare(training, beside_ours, f"ours{suffix}")
            found |= _compare(training, beside_dcp, f"dcp{suffix}")
        print(json.dumps(found), flush=True)
    manager.close()


def _compare(training: _Training, beside: Callable[[], list[float]], name: str) -> dict[str, float]:
    """Train quietly, beside a save, and quietly again.

    Returns:
        ``lost``: seconds that the steps beside the save took longer than quiet ones, in all; ``slowdown``: the same of
        one step, as a ratio to a quiet one; ``meanwhile``: seconds of the steps beside the save.
    """
    quiet = training.quiet()
    busy = beside()
    step_s = statistics.median(quiet + training.quiet())
    lost_s = sum(busy) - len(busy) * step_s
    return {
        f"{name}_lost": lost_s,
        f"{name}_slowdown": lost_s / (len(busy) * step_s),
        f"{name}_meanwhile": sum(busy),
    }


if __name__ == "__main__":
    main()
