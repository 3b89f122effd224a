"""Whether the replicas of a data-parallel run are still bit-identical, and if not, whose differs.

Every rank of a data-parallel group applies the same update to the same weights, so that what it holds afterwards is the
same, bit for bit. A flipped bit in one rank's memory, or an arithmetic unit that errs, ends that, and nothing else
notices: gradients are averaged, the loss is a little off, and a checkpoint keeps it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from outlast import env
from outlast.errors import ConfigError, PeerLost
from outlast.numerics.comparison import Holdings, agree_equal, gather_differences
from outlast.numerics.replica_agreement import Agreement
from outlast.numerics.replicas import ReplicatedTensor, find_replicated
from outlast.numerics.tensor_digest import digest_tensors
from outlast.runtime.device import device_name
from outlast.runtime.group import Group
from outlast.wording import count

__all__ = ["ReplicaDigest"]

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
            speaks = not dist.is_initialized() or dist.get_rank() == 0  # every rank knows the same
            log.log(logging.ERROR if speaks else logging.DEBUG, "%s", agreement.describe())
        return agreement

    def close(self) -> None:
        """Give the group back, however the peers fare. Idempotent."""
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
            culprits, undecided = gather_differences(group, rank, holdings, node=self._place.node, device=device)
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
