"""Which tensors of a training state must be the same on which ranks.

The parameters of its modules and the state of its optimizers, as far as several ranks hold them:

* A DTensor (``fully_shard``, tensor parallelism) says it itself: its replicas lie along the mesh dimensions on which it
  is ``Replicate()``. With HSDP that is the replicate dimension; with a mesh of shards only there are none.
* Any other tensor has a replica on every rank of the data-parallel group, as under ``DistributedDataParallel``.

Buffers are left out: running statistics of batches are each rank's own. So is what is sharded without saying how:
parameters of ``FullyShardedDataParallel`` and the state of a ``ZeroRedundancyOptimizer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = ["ReplicatedTensor", "find_replicated"]


@dataclass(frozen=True, slots=True)
class ReplicatedTensor:
    """A tensor of this rank, and who holds the same one."""

    name: str
    """The same on all of ``ranks``: path of the module or optimizer, parameter, and what of it."""
    tensor: torch.Tensor
    """This rank's part; not a copy."""
    ranks: tuple[int, ...]
    """Global ranks with a replica, in order, this one included; empty = it does not say."""


def find_replicated(state: Any, ranks: tuple[int, ...]) -> list[ReplicatedTensor]:
    """Return the parameters and the optimizer state of a rank, in an order that is the same on all replicas.

    Args:
        state: Modules and optimizers, in mappings, lists and tuples; everything else in it is ignored.
        ranks: Ranks of the data-parallel group, in order.
    """
    modules, optimizers = dict[str, torch.nn.Module](), dict[str, Any]()
    _sort(state, "", modules, optimizers)
    finder = _Finder(ranks)
    for path, module in modules.items():
        finder.add_module(path, module)
    for path, optimizer in optimizers.items():
        finder.add_optimizer(path, optimizer)
    return finder.found


def _sort(value: Any, path: str, modules: dict[str, torch.nn.Module], optimizers: dict[str, Any]) -> None:
    if isinstance(value, torch.nn.Module):
        modules[path] = value
    elif isinstance(getattr(value, "param_groups", None), list) and isinstance(getattr(value, "state", None), Mapping):
        optimizers[path] = value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            _sort(inner, _join(path, str(name)), modules, optimizers)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _sort(inner, _join(path, str(index)), modules, optimizers)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class _Finder:
    """Names parameters where they are met first, so that their optimizer state can be called after them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.found: list[ReplicatedTensor] = []
        self._ranks = ranks
        self._names: dict[int, str] = {}
        self._unplaced: set[int] = set()

    def add_module(self, path: str, module: torch.nn.Module) -> None:
        is_placed = not _is_fsdp1(module)
        for name, parameter in module.named_parameters():
            self._add_parameter(_join(path, name), parameter, is_placed)

    def add_optimizer(self, path: str, optimizer: Any) -> None:
        is_placed = not hasattr(optimizer, "consolidate_state_dict")  # as ZeroRedundancyOptimizer has
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for index, parameter in enumerate(parameters):
            self._add_parameter(_join(path, str(index)), parameter, is_placed)
            name = _join(path, self._names[id(parameter)].removeprefix(f"{path}."))
            is_state_placed = is_placed and id(parameter) not in self._unplaced
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self._add(_join(name, str(key)), value, is_state_placed)
                elif isinstance(value, int | float):
                    number = torch.tensor(float(value), dtype=torch.float64)
                    self._add(_join(name, str(key)), number, is_state_placed)

    def _add_parameter(self, name: str, parameter: torch.Tensor, is_placed: bool) -> None:
        if id(parameter) in self._names:
            return
        self._names[id(parameter)] = name
        if not is_placed:
            self._unplaced.add(id(parameter))
        self._add(name, parameter, is_placed)

    def _add(self, name: str, tensor: torch.Tensor, is_placed: bool) -> None:
        if isinstance(tensor, DTensor):
            ranks = _holders(tensor, self._ranks)
            tensor = tensor.to_local()
        else:
            ranks = self._ranks
        if tensor.layout != torch.strided or tensor.is_meta:
            is_placed = False
        self.found.append(ReplicatedTensor(name, tensor.detach(), ranks if is_placed else ()))


def _holders(tensor: DTensor, among: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a DTensor as this one does."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        return ()
    where = tuple(
        slice(None) if placement.is_replicate() else index
        for placement, index in zip(tensor.placements, coordinate, strict=True)
    )
    ranks = tensor.device_mesh.mesh[where].reshape(-1).tolist()
    return tuple(sorted(set(ranks) & set(among)))


def _is_fsdp1(module: torch.nn.Module) -> bool:
    return any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules())
