"""An actor's membership in an incarnation: its process groups, made over a store and left at any time."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from outlast import clock
from outlast.errors import ConfigError, OutlastError, RendezvousError
from outlast.inprocess.call import end_groups
from outlast.ray.mesh import AXES
from outlast.ray.protocol import ActorAssignment
from outlast.runtime import connections, device
from outlast.runtime.addresses import Endpoint
from outlast.runtime.store import TCPStore, connect, host

if TYPE_CHECKING:
    import torch
    import torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Membership", "StoreHost"]

log = logging.getLogger(__name__)
_TRY_S = 1.0
"""Of connecting to the store: between two tries the wait can be interrupted."""
_NUM_STORES = 2


class StoreHost:
    """Host the stores over which incarnations meet: the newest and the one before.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._stores: deque[TCPStore] = deque(maxlen=_NUM_STORES)

    def open(self, addr: str, *, timeout_s: float) -> int:
        """Host one more store; return its port.

        Raises:
            RendezvousError: This machine gives no port.
        """
        store = host(Endpoint(addr, 0), timeout_s=timeout_s)
        if store is None:
            raise RendezvousError(f"no port of {addr} can be listened on; are all in use?")
        self._stores.append(store)
        return int(store.port)


class Membership:
    """Make the process groups of one incarnation after the other.

    Args:
        backend: Of the groups, as ``torch.distributed`` takes it.
        use_gpu: Whether the ranks compute on GPUs.
        name: Prefix of keys in the stores.

    Thread: :meth:`form` on the working thread; :meth:`cut` on any; :meth:`leave` on any, once that thread is out.
    """

    def __init__(self, backend: str, *, use_gpu: bool, name: str) -> None:
        self._backend, self._use_gpu, self._name = backend, use_gpu, name
        self._noting = connections.Noting()
        self._excepthook = sys.excepthook
        self._mesh: DeviceMesh | None = None
        self._store: TCPStore | None = None
        self._is_formed = False

    def form(self, assignment: ActorAssignment, check: Callable[[], None]) -> None:
        """Meet the other ranks and connect to them.

        Args:
            assignment: This rank's place, and where the ranks meet.
            check: Called while the store is waited for; may raise.

        Raises:
            RendezvousError: The ranks did not find each other.

        Collective: all ranks of the incarnation.
        Blocks: up to ``assignment.timeout_s``, until all ranks have come.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.device_mesh import init_device_mesh

        self._is_formed = True
        self._noting.start()
        timeout = timedelta(seconds=assignment.timeout_s)
        if self._use_gpu:
            device.settle_collectives()
            device.use_device(assignment.local_rank)
        try:
            self._store = self._connect(assignment, check)
            self._store.set_timeout(timeout)
            check()
            dist.init_process_group(
                self._backend,
                store=PrefixStore(f"{self._name}/{assignment.incarnation}", self._store),
                rank=assignment.rank,
                world_size=assignment.mesh.size,
                timeout=timeout,
            )
            check()
            kind = device.training_device().type if self._use_gpu else "cpu"
            self._mesh = init_device_mesh(kind, assignment.mesh.sizes, mesh_dim_names=AXES)
        except ValueError as error:
            raise ConfigError(f"the groups cannot be made: {error}") from error
        except RuntimeError as error:
            raise RendezvousError(
                f"the ranks could not connect ({error}); see the log of the rank that left"
            ) from error

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks by axis: ``pp``, ``dp``, ``cp``, ``tp``.

        Raises:
            OutlastError: There are no groups now.
        """
        if self._mesh is None:
            raise OutlastError("there are no process groups now; use them in setup(), regroup() and calls")
        return self._mesh

    def group(self, axis: str) -> torch.distributed.ProcessGroup:
        """Return the group of this rank's peers along an axis.

        Raises:
            ConfigError: There is no such axis.
            OutlastError: There are no groups now.
        """
        mesh = self.mesh
        if axis not in AXES:
            raise ConfigError(f"there is no axis {axis!r}; the axes are {', '.join(AXES)}")
        return mesh.get_group(axis)

    def cut(self, *, both_ways: bool) -> None:
        """End whatever waits for peers, here or there; repeat it while somebody still does. Blocks: never."""
        connections.cut_all(both_ways=both_ways)

    def leave(self) -> None:
        """Destroy the groups. Idempotent.

        Raises:
            OutlastError: A collective does not end: this process must not go on.

        Blocks: some 10 ms; up to 10 s when a collective does not end.
        """
        if not self._is_formed:
            return
        self._mesh = None
        self._store = None
        end_groups()
        self._noting.stop()
        sys.excepthook = self._excepthook  # torch puts another layer around it for every default group
        self._is_formed = False

    def _connect(self, assignment: ActorAssignment, check: Callable[[], None]) -> TCPStore:
        end_s = clock.now_s() + assignment.timeout_s
        endpoint = Endpoint(assignment.store_addr, assignment.store_port)
        while True:
            check()
            left_s = max(0.001, end_s - clock.now_s())
            try:
                with connections.noting(is_store=True):
                    return connect(endpoint, timeout_s=min(_TRY_S, left_s), call_timeout_s=assignment.timeout_s)
            except RendezvousError:
                if clock.now_s() >= end_s:
                    raise
