"""The state that checkpoint benchmarks save and load: a module of tensors of 16 MiB, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch

from outlast.bench.state_size import TENSOR_BYTES

__all__ = ["CheckpointState", "holds"]

_SIDE = 2048


class CheckpointState:
    """A model whose values say whether they are the saved ones.

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
