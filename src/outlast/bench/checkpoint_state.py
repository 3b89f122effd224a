"""The state that the benches of checkpoints save and load, its size, and how ours is compared with the peers'."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from outlast.bench.measuring import MeasuredRounds
from outlast.bench.result import Bar

__all__ = [
    "NUM_TENSORS",
    "TENSOR_BYTES",
    "CheckpointState",
    "Found",
    "compared",
    "holds",
    "missing_peers",
    "rounds_of",
    "times",
]

Found = dict[str, float]
"""Seconds by name."""
NUM_TENSORS = 64
"""Unless another number is asked for: 1 GiB."""
TENSOR_BYTES = 16 << 20
_SIDE = 2048
_NEEDS_CUDA = "nvidia-resiliency-ext"
"""A peer whose saves and loads synchronise with CUDA even where all tensors lie in main memory."""


class CheckpointState:
    """A module of tensors of 16 MiB and its optimizer; whether the values are the saved ones can be checked.

    Args:
        num_tensors: Tensors of 16 MiB.
    """

    def __init__(self, num_tensors: int) -> None:
        parameters = [torch.nn.Parameter(torch.empty(_SIDE, _SIDE)) for _ in range(num_tensors)]
        self.model = torch.nn.ParameterList(parameters)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.num_bytes = num_tensors * TENSOR_BYTES
        self.fill()

    @property
    def state(self) -> dict[str, Any]:
        """What ``CheckpointManager`` takes."""
        return {"model": self.model, "optim": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Return what other libraries take: the same values, referred to, not copied."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over what another library has loaded."""
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optim"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters alone, by name."""
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    def fill(self) -> None:
        """Give every tensor its values."""
        for number, tensor in enumerate(self.tensors().values()):
            tensor.copy_(_values(number))

    def forget(self) -> None:
        """Overwrite every tensor with what was never saved; its memory stays warm."""
        for tensor in self.tensors().values():
            tensor.fill_(-1.0)

    def is_right(self) -> bool:
        """Return whether every tensor has its values."""
        return holds(self.tensors())


def holds(tensors: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors have the values that :meth:`CheckpointState.fill` gives."""
    return all(torch.equal(tensor, _values(number)) for number, tensor in enumerate(tensors.values()))


def _values(number: int) -> torch.Tensor:
    return torch.arange(number, number + _SIDE * _SIDE, dtype=torch.float32).reshape(_SIDE, _SIDE)


def rounds_of(measures: Iterable[Callable[[], Found]], num_rounds: int) -> Iterator[Found]:
    """Yield what all measures found together, round by round."""
    several = list(measures)
    for _ in range(num_rounds):
        found: Found = {}
        for measure in several:
            found |= measure()
        yield found


def compared(rounds: MeasuredRounds, name: str, ours: str, peer: str, bar: float, called: str) -> Bar:
    """Return the bar of a ratio.

    Args:
        rounds: What was measured.
        name: The bar's.
        ours: Name of what is ours in the rounds.
        peer: Name of what it is compared with.
        bar: What the ratio may reach.
        called: The peer's name for people.
    """
    value, peer_value = rounds.ratio(ours, peer), rounds.median(peer)
    return Bar(name=name, value=value, unit="x", bar=bar, peer=f"{called} (s)", peer_value=peer_value)


def times(rounds: MeasuredRounds, called: Mapping[str, str]) -> list[str]:
    """Return a line on each median that was measured.

    Args:
        rounds: What was measured.
        called: Name in the rounds to its name for people.
    """
    return [f"{what}: {median * 1e3:.1f} ms" for name, what in called.items() if (median := rounds.median(name))]


def missing_peers(*, measured: bool) -> list[str]:
    """Return a line on each peer that is not measured.

    Args:
        measured: Whether torch-checkpointing was.
    """
    lines = [] if measured else ["torch-checkpointing is not installed (make bench-peers)"]
    try:
        version = importlib.metadata.version(_NEEDS_CUDA)
    except importlib.metadata.PackageNotFoundError:
        return [*lines, f"{_NEEDS_CUDA} is not installed (make bench-peers)"]
    return [*lines, f"{_NEEDS_CUDA} {version} is not measured: it waits for CUDA even where all tensors are in memory"]
