"""Whether the replicas of a data-parallel run are still bit-identical, and if not, whose differs.

Every rank of a data-parallel group applies the same update to the same weights, so that what it holds afterwards is the
same, bit for bit. A flipped bit in one rank's memory, or an arithmetic unit that errs, ends that, and nothing else
notices: gradients are averaged, the loss is a little off, and a checkpoint keeps it.

Compared are the parameters of modules and the state of optimizers, as far as several ranks hold them:

* A DTensor (``fully_shard``, tensor parallelism) states it: its replicas lie along the mesh dimensions on which it
  is ``Replicate()``. With HSDP that is the replicate dimension; with a mesh of shards only there are none.
* Any other tensor has a replica on every rank of the data-parallel group, as under ``DistributedDataParallel``.

Buffers are left out: running statistics of batches are each rank's own. So is what is sharded without recording how:
parameters of ``FullyShardedDataParallel`` and the state of a ``ZeroRedundancyOptimizer``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from outlast import env
from outlast.errors import ConfigError, PeerLost
from outlast.numerics.comparison import Agreement, Holdings, agree_equal, gather_differences
from outlast.numerics.tensor_digest import digest_tensors
from outlast.runtime.device import device_name
from outlast.runtime.process_groups import Group
from outlast.wording import count

__all__ = ["ReplicaDigest", "ReplicatedTensor", "find_replicated"]


@dataclass(frozen=True, slots=True)
class ReplicatedTensor:
    """A tensor of this rank, and who holds the same one."""

    name: str
    """The same on all of ``ranks``: path of the module or optimizer, parameter, and what of it."""
    tensor: torch.Tensor
    """This rank's part; not a copy."""
    ranks: tuple[int, ...]
    """Global ranks with a replica, in order, this one included; empty = unknown."""


def find_replicated(state: Any, ranks: tuple[int, ...]) -> list[ReplicatedTensor]:
    """Return the parameters and the optimizer state of a rank, in an order that is the same on all replicas.

    Args:
        state: Modules and optimizers, in mappings, lists and tuples; everything else in it is ignored.
        ranks: Ranks of the data-parallel group, in order.
    """
    modules, optimizers = dict[str, torch.nn.Module](), dict[str, Any]()
    _sort(state, "", modules, optimizers)
    finder = _TensorCollector(ranks)
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


class _TensorCollector:
    """Collects tensors; names a parameter where it is met first, so that its optimizer state is named after it."""

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


log = logging.getLogger(__name__)


class ReplicaDigest:
    """Compare the parameters and the optimizer state of all replicas, with tolerance 0.

    Args:
        state: Modules and optimizers, in mappings, lists and tuples, such as ``{"model": model, "optim": optim}``;
            everything else in it is ignored. It is looked through at each check.
        group: Ranks on which the replicas of plain tensors are: a process group, or a mesh such as ``mesh["dp"]``;
            ``None`` = all ranks. DTensors are compared along the mesh dimensions that replicate them, among these
            ranks. With tensor or pipeline parallelism in plain tensors it must be given, as ranks hold different ones.
        interval: Steps from one check to the next; 0 = only on demand.
        timeout_s: Seconds after which a check fails because a peer does not take part.
        place: This rank's place; read from the environment when not given.

    Raises:
        ConfigError: The interval is negative.
    """

    def __init__(
        self,
        state: Any,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        interval: int = 0,
        timeout_s: float = 600.0,
        place: env.WorkerEnv | None = None,
    ) -> None:
        if interval < 0:
            raise ConfigError(f"interval {interval} is negative; 0 means only on demand")
        self.interval = interval
        self._state, self._among, self._timeout_s = state, group, timeout_s
        self._place = place or env.read_worker()
        self._group: Group | None = None
        self._has_warned = False

    def should_check(self, iteration: int) -> bool:
        """Return whether the interval asks for a check after this number of optimizer steps."""
        return self.interval > 0 and iteration > 0 and iteration % self.interval == 0

    def check(self, iteration: int) -> Agreement:
        """Compare the replicas as they are now.

        Args:
            iteration: Number of optimizer steps done; the same on all ranks.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks of the default group, after the same step's update; the first check opens a group.
        Blocks: while this rank's replicas are digested, and until all ranks have come, up to ``timeout_s``.
        """
        tensors = find_replicated(self._state, self._ranks())
        self._warn_of_unplaced(tensors)
        shared = [tensor for tensor in tensors if len(tensor.ranks) > 1]
        holdings: Holdings = {}
        for tensor, digest in zip(shared, digest_tensors([tensor.tensor for tensor in shared]), strict=True):
            form = f"{tensor.name} {tensor.tensor.dtype} {tuple(tensor.tensor.shape)} {digest}"
            holdings.setdefault(tensor.ranks, []).append((tensor.name, xxhash.xxh3_64_intdigest(form.encode())))
        num_bytes = sum(tensor.tensor.nbytes for tensor in shared)
        agreement = Agreement(
            iteration=iteration,
            agrees=True,
            num_replicas=max((len(ranks) for ranks in holdings), default=1),
            num_bytes=num_bytes,
            num_single_bytes=sum(tensor.tensor.nbytes for tensor in tensors) - num_bytes,
        )
        if self._world_size() > 1:
            agreement = self._compare(holdings, agreement)
        if not agreement.agrees:
            logs_for_all = not dist.is_initialized() or dist.get_rank() == 0  # every rank knows the same
            log.log(logging.ERROR if logs_for_all else logging.DEBUG, "%s", agreement.describe())
        return agreement

    def close(self) -> None:
        """Close the group; peers that wait in it fail. Idempotent."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _compare(self, holdings: Holdings, agreement: Agreement) -> Agreement:
        rank = dist.get_rank()
        device = device_name(self._place.device or self._place.node, self._place.local_rank)
        try:
            if self._group is None:
                self._group = Group.open(timeout_s=self._timeout_s)
            group = self._group.process_group
            assert group is not None, "closed"
            if agree_equal(group, rank, holdings):
                return agreement
            culprits, undecided = gather_differences(group, holdings, node=self._place.node, device=device)
        except RuntimeError as error:
            raise PeerLost(
                f"a peer left or did not come to the comparison of replicas within {self._timeout_s:g} s ({error}); "
                "its own log or the launcher's report says why",
                iteration=agreement.iteration,
            ) from error
        return replace(agreement, agrees=False, culprits=culprits, undecided=undecided)

    def _world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold replicas of plain tensors."""
        if isinstance(self._among, DeviceMesh):
            return tuple(sorted(self._among.mesh.reshape(-1).tolist()))
        if self._among is None:
            return tuple(range(self._world_size()))
        return tuple(sorted(dist.get_process_group_ranks(self._among)))

    def _warn_of_unplaced(self, tensors: list[ReplicatedTensor]) -> None:
        names = [tensor.name for tensor in tensors if not tensor.ranks]
        if names and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s not compared, the first of them %s: it is unknown which ranks hold replicas; fully_shard and "
                "DistributedDataParallel record that",
                count(len(names), "tensor"),
                names[0],
            )
