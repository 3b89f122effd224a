"""The state that the checkpoint benchmarks save and load, and helpers to compare outlast with the peers."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.measuring import MeasuredRounds, timed
from benchmarks.results import installed_version
from outlast import clock

T = TypeVar("T")
Found = dict[str, float]
"""Seconds by name."""
NUM_TENSORS = 64
"""Default: 1 GiB."""
TENSOR_BYTES = 16 << 20
_SIDE = 2048
_NEEDS_CUDA = "nvidia-resiliency-ext"
"""A peer whose saves and loads synchronise with CUDA even if all tensors are in main memory."""


class CheckpointState:
    """A module of tensors of 16 MiB and its optimizer, with reproducible values.

    Args:
        num_tensors: Number of tensors of 16 MiB.
        device: Their device.
    """

    def __init__(self, num_tensors: int, device: torch.device | None = None) -> None:
        parameters = [torch.nn.Parameter(torch.empty(_SIDE, _SIDE, device=device)) for _ in range(num_tensors)]
        self.model = torch.nn.ParameterList(parameters)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.num_bytes = num_tensors * TENSOR_BYTES
        self.fill()

    @property
    def state(self) -> dict[str, Any]:
        """The state for ``CheckpointManager``."""
        return {"model": self.model, "optim": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for other libraries: references to the same values."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Apply a state that another library has loaded."""
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optim"])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    def fill(self) -> None:
        """Set every tensor's values."""
        for number, tensor in enumerate(self.tensors().values()):
            tensor.copy_(_values(number, tensor.device))

    def forget(self) -> None:
        """Overwrite every tensor with other values; its memory stays warm."""
        for tensor in self.tensors().values():
            tensor.fill_(-1.0)

    def is_right(self) -> bool:
        return holds(self.tensors())


def holds(tensors: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors have the values of :meth:`CheckpointState.fill`."""
    return all(torch.equal(tensor, _values(number, tensor.device)) for number, tensor in enumerate(tensors.values()))


def _values(number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(number, number + _SIDE * _SIDE, dtype=torch.float32, device=device).reshape(_SIDE, _SIDE)


def rounds_of(measures: Iterable[Callable[[], Found]], num_rounds: int) -> Iterator[Found]:
    """Yield the results of all measures together, round by round."""
    several = list(measures)
    for _ in range(num_rounds):
        found: Found = {}
        for measure in several:
            found |= measure()
        yield found


def time_save(
    save: Callable[[], T], finish: Callable[[T], object], guard: Callable[[T], object] | None = None
) -> tuple[float, float, float]:
    """Return the seconds of a save's stall, of a wait right after it, and until it was finished.

    Args:
        save: Begins the save.
        finish: Waits until it is written.
        guard: Waits until the optimizer may change the state; ``None``: at once.
    """
    begin_ns = clock.now_ns()
    stall_s, handle = timed(save)
    guard_s = 0.0 if guard is None else timed(lambda: guard(handle))[0]
    finish(handle)
    return stall_s, guard_s, (clock.now_ns() - begin_ns) / 1e9


def times(rounds: MeasuredRounds, called: Mapping[str, str]) -> list[str]:
    """Return a line for each measured median; ``called`` maps names in the rounds to names for people."""
    return [f"{what}: {median * 1e3:.1f} ms" for name, what in called.items() if (median := rounds.median(name))]


def missing_peers(*, measured: bool) -> list[str]:
    """Return a line for each peer that is not measured; ``measured``: torch-checkpointing was."""
    lines = [] if measured else ["torch-checkpointing is not installed (make bench-peers)"]
    if (version := installed_version(_NEEDS_CUDA)) is None:
        return [*lines, f"{_NEEDS_CUDA} is not installed (make bench-peers)"]
    return [*lines, f"{_NEEDS_CUDA} {version} is not measured: it waits for CUDA even where all tensors are in memory"]


class MetaCheckpointing:
    """``torch_checkpointing``, if installed: stages during training, writes in a separate process.

    Args:
        module: The library.
        saved: The state.
        folder: Target; removed after every save.
    """

    def __init__(self, module: Any, saved: CheckpointState, folder: Path) -> None:
        # Its direct writes are not aligned, which some disks reject (EINVAL) in the middle of a save.
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = module.CheckpointManager(module.CheckpointManager.Config(storage_config=buffered))
        self._saved, self._folder = saved, folder

    @classmethod
    def find(cls, saved: CheckpointState, folder: Path) -> MetaCheckpointing | None:
        """Return an instance; ``None``: not installed."""
        try:
            return cls(importlib.import_module("torch_checkpointing"), saved, folder)
        except ImportError:
            return None

    def save(self) -> Found:
        """Save; the guard is the lock that the library requires around the optimizer's step."""
        stall_s, guard_s, total_s = time_save(
            lambda: self._manager.save(str(self._folder), self._saved.state_dict()),
            finish=lambda written: written.result(),
            guard=self._pass_lock,
        )
        shutil.rmtree(self._folder)
        return {"meta": stall_s, "meta_guard": guard_s, "meta_total": total_s}

    def save_only(self) -> None:
        """Save without removing the files. Blocks: until they are written."""
        self._manager.save(str(self._folder), self._saved.state_dict()).result()

    def load(self, into: dict[str, Any]) -> Any:
        """Load the saved files into tensors."""
        return self._manager.load(str(self._folder), into)

    def close(self) -> None:
        self._manager.close()

    def _pass_lock(self, _written: object) -> None:
        with self._manager.lock():
            pass
