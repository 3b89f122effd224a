"""Check that the replicas of a data-parallel run are bit-identical, and find those that differ.

Every rank of a data-parallel group applies the same update to the same weights. A flipped bit in one rank's memory, or
a faulty arithmetic unit, ends that undetected: gradients are averaged, and a checkpoint keeps the error.

Parameters of modules and the state of optimizers are compared, as far as several ranks hold them. A DTensor
(``fully_shard``, tensor parallelism) has replicas along the mesh dimensions on which it is ``Replicate()``; with HSDP
that is the replicate dimension. Any other tensor has a replica on every rank of the data-parallel group, as under
``DistributedDataParallel``. Not compared: buffers, as running statistics are per rank, and tensors that are sharded
without recording how (``FullyShardedDataParallel``, ``ZeroRedundancyOptimizer``).

A tensor's digest has 64 bits. CPU memory is digested by xxh3_64, which is faster than one core reads memory.
Accelerator memory is digested there, as a copy to the host would take longer than the step: :func:`weigh` sums all
words, each times an odd pseudo-random weight of its position. Integer sums do not depend on their order, so the result
is the same on every device and for every implementation; with Triton one kernel handles all tensors
(:func:`weigh_at_once`). Words have 32 bits and weights 64: with 64-bit words the highest bit would count only whether
it was flipped an even number of times (odd x 2**63 is 2**63), and two flipped signs would cancel. Rejected:
``torch.hash_tensor``, an XOR, which detects neither order nor equal flips in two places.

Agreement costs one reduction of two integers: each rank's digests, each times a factor, are summed over all ranks. The
factors of the holders of the same tensors add up to 0, and so does the sum if they agree; otherwise it is 0 for less
than one disagreement in 2**50. So one reduction compares any number of groups of replicas, of any size, and all ranks
know the result: on a difference all of them exchange their digests.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import zip_longest
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from outlast import env
from outlast.decoding import from_json
from outlast.errors import ConfigError, PeerLost
from outlast.runtime.device import device_name
from outlast.runtime.device_copies import as_bytes
from outlast.runtime.nested import find_nested
from outlast.runtime.process_groups import Group, broadcast_bytes, gather_bytes, ranks_of
from outlast.wording import count

log = logging.getLogger(__name__)
Holdings: TypeAlias = dict[tuple[int, ...], list[tuple[str, int]]]
"""Ranks that hold the same tensors, this rank included, to name and digest of each of these tensors here."""
MAX_LOCATED = 8
"""Replicas whose first differing tensor is searched for; each takes two broadcasts."""
BLOCK_WORDS = 1 << 17
"""Words that share a factor, in addition to a weight of their place in the block: 1 MiB of weights for tensors of any
size."""
PIECE_BLOCKS = 32
"""Blocks per operation: 32 MiB of products, which fit the cache of an accelerator."""
_MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica that differs from others."""

    rank: int
    """Global rank."""
    node: str
    device: str
    """Device, as named by :func:`outlast.runtime.device.device_name`."""
    tensor: str
    """The first tensor that differs; empty = not searched for, as too many replicas differ."""

    def __str__(self) -> str:
        where = f" in {self.tensor}" if self.tensor else ""
        return f"rank {self.rank} on node {self.node} (device {self.device}){where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Result of a check.

    Agreement and differing replicas are the same on all ranks; the numbers are this rank's own.
    """

    iteration: int
    """Number of optimizer steps done."""
    agrees: bool
    """Whether all replicas on all ranks are bit-identical."""
    num_replicas: int
    """Largest number of replicas of a tensor of this rank; 1 = nothing to compare."""
    num_bytes: int
    """Bytes of this rank that were compared."""
    num_single_bytes: int
    """Bytes of this rank that no other rank holds, such as shards."""
    deviating: tuple[Replica, ...] = ()
    """Replicas that differ from the majority of at least three, by rank."""
    undecided: tuple[Replica, ...] = ()
    """Replicas that differ without a majority, as two always do, by rank: one of them is bad, or several."""

    @property
    def tensor(self) -> str:
        """The first tensor that differs; empty = none."""
        return next((replica.tensor for replica in (*self.deviating, *self.undecided) if replica.tensor), "")

    def describe(self) -> str:
        if not self.agrees:
            line = f"replicas differ at iteration {self.iteration}: "
            if self.deviating:
                line += f"from the majority {', '.join(map(str, self.deviating))}"
            if self.undecided:
                line += f"{'; ' if self.deviating else ''}without a majority {', '.join(map(str, self.undecided))}"
            return line
        line = f"replicas agree at iteration {self.iteration}"
        if self.num_replicas == 1:
            return (
                f"{line}: nothing to compare, as no other rank holds any of this rank's {self.num_single_bytes} bytes"
            )
        line += f": {self.num_bytes} bytes, up to {self.num_replicas} replicas"
        return line + (f"; {self.num_single_bytes} bytes are on no other rank" if self.num_single_bytes else "")


class ReplicaDigest:
    """Compare the parameters and the optimizer state of all replicas, with tolerance 0.

    Args:
        state: Modules and optimizers, in mappings, lists and tuples, such as ``{"model": model, "optim": optim}``;
            other contents are ignored. Read at each check.
        group: Ranks on which the replicas of plain tensors are: a process group, or a mesh such as ``mesh["dp"]``;
            ``None`` = all ranks. DTensors are compared along the mesh dimensions that replicate them, among these
            ranks. Required with tensor or pipeline parallelism in plain tensors, as ranks hold different ones.
        interval: Steps from one check to the next; 0 = only on demand.
        timeout_s: Seconds after which a check fails because a peer does not take part.
        place: This rank's place; by default read from the environment.

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
        """Return whether a check is due after this number of optimizer steps."""
        return self.interval > 0 and iteration > 0 and iteration % self.interval == 0

    def check(self, iteration: int) -> Agreement:
        """Compare the current replicas.

        Args:
            iteration: Number of optimizer steps done; the same on all ranks.

        Raises:
            PeerLost: A peer exited, or did not reach the check in time.

        Collective: all ranks of the default group, after the same step's update; the first check opens a group.
        Blocks: while this rank's replicas are digested, and until all ranks have reached the check, up to
        ``timeout_s``.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        tensors = find_replicated(self._state, ranks_of(self._among))
        unplaced = [tensor.name for tensor in tensors if not tensor.ranks]
        if unplaced and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s not compared, the first of them %s: it is unknown which ranks hold replicas; fully_shard and "
                "DistributedDataParallel record that",
                count(len(unplaced), "tensor"),
                unplaced[0],
            )
        shared = [tensor for tensor in tensors if len(tensor.ranks) > 1]
        holdings: Holdings = {}
        for tensor, digest in zip(shared, digest_tensors([tensor.tensor for tensor in shared]), strict=True):
            form = f"{tensor.name} {tensor.tensor.dtype} {tuple(tensor.tensor.shape)} {digest}"
            holdings.setdefault(tensor.ranks, []).append((tensor.name, xxhash.xxh3_64_intdigest(form.encode())))
        found = self._compare(holdings, iteration) if world_size > 1 else None
        deviating, undecided = found or ((), ())
        num_bytes = sum(tensor.tensor.nbytes for tensor in shared)
        agreement = Agreement(
            iteration=iteration,
            agrees=found is None,
            num_replicas=max((len(ranks) for ranks in holdings), default=1),
            num_bytes=num_bytes,
            num_single_bytes=sum(tensor.tensor.nbytes for tensor in tensors) - num_bytes,
            deviating=deviating,
            undecided=undecided,
        )
        if not agreement.agrees:  # the result is the same on every rank
            log.log(logging.ERROR if dist.get_rank() == 0 else logging.DEBUG, "%s", agreement.describe())
        return agreement

    def close(self) -> None:
        """Close the group; peers that wait in it fail. Idempotent."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _compare(self, holdings: Holdings, iteration: int) -> tuple[tuple[Replica, ...], tuple[Replica, ...]] | None:
        """Return root causes and undecided replicas, as in :class:`Agreement`; ``None`` = all agree. Collective."""
        try:
            if self._group is None:
                self._group = Group.share(timeout_s=self._timeout_s)
            group = self._group.process_group
            assert group is not None, "closed"
            total = 0
            for holders, tensors in holdings.items():
                total += _digest(tensors) * _factor(holders.index(dist.get_rank()), len(holders))
            total &= _MASK
            halves = torch.tensor([total & _HALF, total >> 32])  # no sum of halves overflows
            dist.all_reduce(halves, group=group)
            low, high = halves.tolist()
            if (low + (high << 32)) & _MASK == 0:
                return None
            device = device_name(self._place.device or self._place.node, self._place.local_rank)
            return _gather_differences(group, holdings, self._place.node, device)
        except RuntimeError as error:
            raise PeerLost(
                f"a peer exited or did not reach the comparison of replicas within {self._timeout_s:g} s ({error}); "
                "see that rank's log or the launcher's report for the cause",
                iteration=iteration,
            ) from error


# -- differing replicas ----------------------------------------------------------------------------------------------


class _GroupDigest(msgspec.Struct, frozen=True):
    """One rank's digest of the tensors that a group of ranks holds."""

    holders: int
    """Digest of the group's ranks."""
    num_holders: int
    digest: int


class _RankDigests(msgspec.Struct, frozen=True):
    """Message of a rank when replicas differ."""

    node: str
    device: str
    groups: list[_GroupDigest]


def _gather_differences(
    group: dist.ProcessGroup, holdings: Holdings, node: str, device: str
) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
    """Return the replicas that differ from a majority, and those that differ without one; the same on all ranks.

    Raises:
        RuntimeError: A peer exited, or did not respond in time.

    Collective: all ranks of the group.
    Blocks: up to the group's timeout.
    """
    own = {xxhash.xxh3_64_intdigest(msgspec.json.encode(holders)): holders for holders in holdings}
    digests = [_GroupDigest(key, len(holders), _digest(holdings[holders])) for key, holders in own.items()]
    gathered = gather_bytes(group, msgspec.json.encode(_RankDigests(node, device, digests)))
    ranks = [from_json(data, _RankDigests) for data in gathered]
    by_holders: dict[int, dict[int, _GroupDigest]] = {}
    for rank, one in enumerate(ranks):
        for part in one.groups:
            by_holders.setdefault(part.holders, {})[rank] = part
    deviating: dict[int, Replica] = {}
    undecided: dict[int, Replica] = {}
    num_located = 0

    def add(replicas: dict[int, Replica], suspects: Iterable[int], key: int, reference: int, other: int) -> None:
        """Add the suspects with the first tensor that two ranks hold differently. Collective: all ranks."""
        nonlocal num_located
        num_located += 1
        name = ""
        if num_located <= MAX_LOCATED:
            mine = msgspec.json.encode(holdings[own[key]] if key in own else [])
            first, second = (
                from_json(broadcast_bytes(group, mine, rank), list[tuple[str, int]]) for rank in (reference, other)
            )
            pairs = zip_longest(first, second, fillvalue=("", 0))
            name = next((two[0] or one[0] for one, two in pairs if one != two), "")
        for rank in suspects:
            one = Replica(rank=rank, node=ranks[rank].node, device=ranks[rank].device, tensor=name)
            replicas.setdefault(rank, one)

    for key, by_rank in by_holders.items():  # in the same order on all ranks: that of the gathered digests
        by_digest = {rank: part.digest for rank, part in by_rank.items()}
        num_replicas = max(part.num_holders for part in by_rank.values())
        if len(by_digest) == num_replicas and len(set(by_digest.values())) == 1:
            continue
        if (found := find_minority(by_digest, num_replicas)) is not None:
            reference, minority = found
            for rank in minority:
                add(deviating, [rank], key, reference, rank)
        else:
            reference = min(by_digest)
            differing = (rank for rank in sorted(by_digest) if by_digest[rank] != by_digest[reference])
            add(undecided, by_digest, key, reference, next(differing, reference))
    return tuple(deviating[rank] for rank in sorted(deviating)), tuple(undecided[rank] for rank in sorted(undecided))


def find_minority(digests: Mapping[int, int], num_replicas: int) -> tuple[int, list[int]] | None:
    """Return a rank of the majority, and the ranks that differ from it; ``None`` = there is no majority.

    Args:
        num_replicas: Expected number; more than half of it is a majority, so that two replicas have none.
    """
    ((digest, count),) = Counter(digests.values()).most_common(1)
    if 2 * count <= num_replicas:
        return None
    reference = min(rank for rank, other in digests.items() if other == digest)
    return reference, sorted(rank for rank, other in digests.items() if other != digest)


def _digest(tensors: list[tuple[str, int]]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(digest.to_bytes(8, "little") for _, digest in tensors))


def _factor(index: int, num_holders: int) -> int:
    """Return the factor of a holder; those of all ``num_holders`` add up to 0 modulo 2**64."""
    if index < num_holders - 1:
        return xxhash.xxh3_64_intdigest(index.to_bytes(8, "little")) | 1
    return _last_factor(num_holders)


@lru_cache
def _last_factor(num_holders: int) -> int:
    return -sum(_factor(index, num_holders) for index in range(num_holders - 1)) & _MASK


# -- which tensors have replicas -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicatedTensor:
    """A tensor of this rank, and the ranks that hold the same one."""

    name: str
    """The same on all of ``ranks``: path of the module or optimizer, parameter, state key."""
    tensor: torch.Tensor
    """This rank's part; not a copy."""
    ranks: tuple[int, ...]
    """Global ranks with a replica, in order, this one included; empty = unknown."""


def find_replicated(state: Any, ranks: tuple[int, ...]) -> list[ReplicatedTensor]:
    """Return the parameters and the optimizer state of a rank, in an order that is the same on all replicas.

    A parameter is named by its first occurrence, modules before optimizers; its optimizer state is named after it.

    Args:
        state: Modules and optimizers, in mappings, lists and tuples; other contents are ignored.
    """
    found: list[ReplicatedTensor] = []
    names: dict[int, str] = {}
    placed: dict[int, bool] = {}  # whether a parameter's holders are known

    def add(name: str, tensor: torch.Tensor, is_placed: bool) -> None:
        holders = ranks
        if isinstance(tensor, DTensor):
            holders = _holders_of(tensor, ranks)
            tensor = tensor.to_local()
        is_comparable = is_placed and tensor.layout == torch.strided and not tensor.is_meta
        found.append(ReplicatedTensor(name, tensor.detach(), holders if is_comparable else ()))

    def add_parameter(name: str, parameter: torch.Tensor, is_placed: bool) -> None:
        if id(parameter) not in names:
            names[id(parameter)], placed[id(parameter)] = name, is_placed
            add(name, parameter, is_placed)

    parts = [(_join(*map(str, path)), value) for path, value in find_nested(state, _is_compared)]
    for path, module in parts:
        if isinstance(module, torch.nn.Module):
            is_placed = not any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules())
            for name, parameter in module.named_parameters():
                add_parameter(_join(path, name), parameter, is_placed)
    for path, optimizer in parts:
        if isinstance(optimizer, torch.nn.Module):
            continue
        is_placed = not hasattr(optimizer, "consolidate_state_dict")  # as ZeroRedundancyOptimizer has
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for index, parameter in enumerate(parameters):
            add_parameter(_join(path, str(index)), parameter, is_placed)
            name = _join(path, names[id(parameter)].removeprefix(f"{path}."))
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, int | float):
                    value = torch.tensor(float(value), dtype=torch.float64)
                if isinstance(value, torch.Tensor):
                    add(_join(name, str(key)), value, is_placed and placed[id(parameter)])
    return found


def _is_compared(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or (
        isinstance(getattr(value, "param_groups", None), list) and isinstance(getattr(value, "state", None), Mapping)
    )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _holders_of(tensor: DTensor, among: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a DTensor as this one."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        return ()
    where = tuple(
        slice(None) if placement.is_replicate() else index
        for placement, index in zip(tensor.placements, coordinate, strict=True)
    )
    ranks = tensor.device_mesh.mesh[where].reshape(-1).tolist()
    return tuple(sorted(set(ranks) & set(among)))


# -- digests ----------------------------------------------------------------------------------------------------------


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the digest of each tensor's elements, in the order of its indices; 0 to 2**64 - 1.

    Element type and shape are not included. Digests are comparable among tensors on devices of the same type.

    Args:
        tensors: Strided tensors on any device, of any element type, shape and stride, empty ones too.

    Blocks: for one synchronization with each accelerator that holds some of them.
    """
    found = [0] * len(tensors)
    elsewhere: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            found[index] = xxhash.xxh3_64_intdigest(as_bytes(tensor).numpy().data)
        else:
            elsewhere.setdefault(tensor.device, []).append(index)
    for device, indices in elsewhere.items():
        some = [tensors[index] for index in indices]
        sums = weigh_at_once(some, device)
        if sums is None:
            sums = torch.stack([weigh(tensor) for tensor in some])
        for index, value in zip(indices, sums.tolist(), strict=True):
            found[index] = value & _MASK
    return found


@torch.no_grad()
def weigh(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 32-bit words, each times the weight of its position; wraps at 64 bits.

    A single changed word always changes it, since a weight is odd; a swap of two words, or equal changes of two, do not
    for about one pair of positions in 2**32.

    Returns:
        An int64 tensor without dimensions on the tensor's device; does not wait for the device.
    """
    data = as_bytes(tensor)
    if data.storage_offset() % 4:
        data = data.clone()  # unaligned words cannot be read
    num_words, rest = divmod(data.numel(), 4)
    total = _weigh_rest(data, num_words) if rest else torch.zeros((), dtype=torch.int64, device=data.device)
    words = data[: num_words * 4].view(torch.int32)
    step = BLOCK_WORDS * PIECE_BLOCKS
    for start in range(0, num_words, step):
        total += _weigh_words(words[start : start + step], start)
    return total


def _weigh_words(words: torch.Tensor, start: int) -> torch.Tensor:
    """Weigh words of which the first is number ``start`` of its tensor."""
    weights = _weights(words.device)
    block, offset = divmod(start, BLOCK_WORDS)
    num_blocks = words.numel() // BLOCK_WORDS if offset == 0 else 0
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if num_blocks:
        whole = words[: num_blocks * BLOCK_WORDS].view(num_blocks, BLOCK_WORDS)
        factors = _scatter(torch.arange(block, block + num_blocks, device=words.device))
        total += ((whole * weights).sum(dim=1) * factors).sum()
    rest = words[num_blocks * BLOCK_WORDS :]
    if rest.numel():
        factor = _scatter(torch.full((), block + num_blocks, device=words.device))  # tensor() waits for the device
        total += (rest * weights[offset : offset + rest.numel()]).sum() * factor
    return total


# -- the same sums, in one pass over all tensors -----------------------------------------------------------------------

GROUP_BLOCKS = 8
"""Blocks that a program of the kernel weighs."""
_TILE_WORDS = 1024
"""Places in each block that a program weighs: it reads their weights once."""
tl: Any = None
"""triton.language, once :func:`find_kernel` has imported it; the kernel looks it up here."""
constexpr: TypeAlias = Any
"""Triton's name for compile-time arguments of the kernel."""


@torch.no_grad()
def weigh_at_once(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return :func:`weigh` of each tensor, by one kernel that reads every byte once.

    torch's own operations write each product to memory and read it again, and start several kernels for each tensor.

    Returns:
        An int64 tensor of one dimension on the device; ``None`` = Triton is missing, or does not work here.

    Blocks: while the tables are copied to the device; the first time some seconds, while the kernel is compiled.
    """
    if (kernel := find_kernel()) is None:
        return None
    with torch.accelerator.device_index(device.index) if device.index is not None else nullcontext():
        return _weigh_at_once(kernel, tensors, device)


def _weigh_at_once(kernel: Any, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    held = [_words(tensor) for tensor in tensors]  # also keeps copies alive
    counts = np.array([words.nbytes // 4 for words in held], dtype=np.int64)
    num_groups = -(-counts // (BLOCK_WORDS * GROUP_BLOCKS))
    owners = np.repeat(np.arange(len(held)), num_groups)
    groups = np.arange(len(owners)) - np.repeat(np.cumsum(num_groups) - num_groups, num_groups)
    addresses = np.array([words.data_ptr() for words in held], dtype=np.int64)
    table = torch.from_numpy(np.stack([addresses[owners], counts[owners], groups, owners])).to(device)
    totals = torch.zeros(len(held), dtype=torch.int64, device=device)
    if len(owners):
        num_tiles = BLOCK_WORDS // _TILE_WORDS
        sums = torch.empty(len(owners), num_tiles, dtype=torch.int64, device=device)
        factors = _scatter(torch.arange(int(num_groups.max()) * GROUP_BLOCKS, device=device))
        try:
            kernel[(len(owners), num_tiles)](
                *(table[row] for row in range(3)),
                _weights(device),
                factors,
                sums,
                num_blocks=GROUP_BLOCKS,
                tile_words=_TILE_WORDS,
                block_words=BLOCK_WORDS,
                num_tiles=num_tiles,
            )
        except Exception as error:  # noqa: BLE001 - a compiler, a driver or a GPU that Triton cannot work with
            log.info("digests are computed by torch's own operations, several times slower: %s", str(error)[:300])
            kernel_errors.append(str(error))
            find_kernel.cache_clear()
            return None
        totals.index_add_(0, table[3], sums.sum(dim=1))
    for index, (words, num_words) in enumerate(zip(held, counts.tolist(), strict=True)):
        if words.nbytes % 4:
            totals[index] += _weigh_rest(words, num_words)
    return totals


kernel_errors: list[str] = []
"""Why the kernel does not work here."""


@cache
def find_kernel() -> Any:
    """Return the kernel; ``None`` = Triton is missing, or does not work here."""
    global tl
    if kernel_errors:
        return None
    try:
        triton: Any = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
    except ImportError as error:
        log.info("digests on devices are computed by torch's own operations, several times slower: %s", error)
        return None
    globals()["constexpr"] = tl.constexpr  # for TRITON_INTERPRET, which reads the kernel's source again
    return triton.jit(_weigh_groups)


def _weigh_groups(  # type: ignore[no-untyped-def]  # Triton reads annotations
    addresses,
    counts,
    groups,
    weights,
    factors,
    sums,
    num_blocks: constexpr,
    tile_words: constexpr,
    block_words: constexpr,
    num_tiles: constexpr,
) -> None:
    """Weigh one tile of the places of some blocks: Triton's language, compiled for the device."""
    task, tile = tl.program_id(0), tl.program_id(1)
    words = tl.load(addresses + task).to(tl.pointer_type(tl.int32))
    num_words = tl.load(counts + task)
    first = tl.load(groups + task) * num_blocks
    places = tile * tile_words + tl.arange(0, tile_words)
    total = tl.zeros([tile_words], dtype=tl.int64)
    for number in tl.static_range(num_blocks):
        at = (first + number) * block_words + places
        word = tl.load(words + at, mask=at < num_words, other=0)
        total += word.to(tl.int64) * tl.load(factors + first + number)
    tl.store(sums + task * num_tiles + tile, tl.sum(total * tl.load(weights + places), axis=0))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order, aligned to words."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = as_bytes(tensor)
    return tensor.clone() if tensor.data_ptr() % 4 else tensor


def _weigh_rest(tensor: torch.Tensor, num_words: int) -> torch.Tensor:
    """Weigh the bytes after a tensor's last whole word, padded with zeros."""
    data = as_bytes(tensor)[num_words * 4 :]
    last = torch.zeros(4, dtype=torch.uint8, device=data.device)
    last[: data.numel()] = data
    return _weigh_words(last.view(torch.int32), num_words)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return the weights of the places in a block."""
    return _scatter(torch.arange(BLOCK_WORDS, device=device) + (1 << 40))


def _scatter(numbers: torch.Tensor) -> torch.Tensor:
    """Return an odd pseudo-random number for each number: the finaliser of SplitMix64 (Steele and others, 2014)."""
    mixed = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: torch.Tensor, places: int) -> torch.Tensor:
    """Shift to the right with zeros from the left; int64's own shift repeats the sign."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)
