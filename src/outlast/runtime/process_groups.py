"""Process groups that can be abandoned at any time, gathering over them, and this worker's place in them.

Destroying a gloo group, as the interpreter does at its end, waits for the peers of an unfinished collective, so a
crashed rank would stay alive as long as a hung peer does (torch 2.13, measured; ``abort()`` and ``shutdown()`` do not
help). Shutting down the group's connections ends every wait on them within milliseconds. A :class:`Group` records its
connections and threads when it is made, so that :meth:`~Group.cut` can do that (:mod:`outlast.runtime.connections`).

Rejected: ``torch.distributed``'s own gather of objects. It passes pickles, which must not be read from a network.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import msgspec

from outlast import clock, env
from outlast.decoding import from_msgpack
from outlast.errors import ConfigError, OutlastError, PeerLost, RendezvousError
from outlast.runtime import connections, device

if TYPE_CHECKING:
    import torch
    import torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

_FAN_OUT = 16
"""Of the tree over which bytes are gathered."""
_TAG = 0x6F75
"""Separates messages of the tree from others between the same ranks."""


class Group:
    """A process group with its connections.

    Args:
        process_group: The group; ``None`` for the default one.
        opened: Descriptor and inode of each of its connections.
        threads: Its threads that run collectives.
    """

    def __init__(
        self,
        process_group: torch.distributed.ProcessGroup | None,
        opened: Collection[tuple[int, int]],
        threads: frozenset[int] = frozenset(),
    ) -> None:
        self.process_group = process_group
        self._opened, self._threads = opened, threads
        self._is_cut = False
        self._num_users = 1
        self._lock = threading.Lock()

    @property
    def open_group(self) -> torch.distributed.ProcessGroup:
        """The group, for a collective. Raises: PeerLost: It was closed by this rank."""
        if self.process_group is None:
            raise PeerLost("this rank has left the process group; see its log")
        return self.process_group

    @property
    def is_cut(self) -> bool:
        """Whether the group was cut; the result of a collective is invalid then, even if it seems to succeed."""
        return self._is_cut

    @classmethod
    def open(cls, *, timeout_s: float) -> Group:
        """Create a gloo group of all ranks, in addition to the default group.

        Raises: RendezvousError: The ranks did not find each other.

        Collective: all ranks of the default group. Blocks: up to ``timeout_s``.
        """
        import torch.distributed as dist

        making = _Making()
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RendezvousError(
                f"the ranks could not connect ({error}); see the log of the rank that left"
            ) from error
        return making.end(group, timeout_s)

    @classmethod
    def share(cls, *, timeout_s: float) -> Group:
        """Return the gloo group of all ranks that the training threads share; the first call creates it.

        For users whose collectives come in the same order on all ranks because the training thread makes them all.
        Users in another thread, or that cut the group while others continue, open one of their own: the health check of
        all ranks (:mod:`outlast.health.process_group`) must not affect other connections, and the exchange of an
        in-process restart is over before these users begin.

        Args:
            timeout_s: Of its collectives; users with another one share another group.

        Raises: RendezvousError: The ranks did not find each other.

        Collective: all ranks of the default group, in the same order of calls and of :meth:`close`.
        Thread: that of the training loop. Blocks: up to ``timeout_s`` if it creates the group.
        """
        import torch.distributed as dist

        group = _shared.get(timeout_s)
        # Destroying the world destroys its groups; all ranks of the next world create another one.
        known = dist.distributed_c10d._world.pg_map
        if group is None or group.is_cut or group.process_group not in known:
            group = _shared[timeout_s] = cls.open(timeout_s=timeout_s)
        else:
            group._num_users += 1
        return group

    def cut(self) -> None:
        """End every wait on the group's connections, here and at peers; the group is unusable afterwards. Idempotent.

        Blocks: a few milliseconds, at most 30 ms. Thread: any.
        """
        self._is_cut = True
        with self._lock:
            opened, self._opened = self._opened, ()
        connections.cut_group(opened, self._threads)

    def close(self) -> None:
        """Cut and destroy the group; a shared group, when its last user closes it. Peers that still wait in it fail.

        Blocks: as :meth:`cut`.
        """
        import torch.distributed as dist

        with self._lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
        self.cut()
        group, self.process_group = self.process_group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


_shared: WeakValueDictionary[float, Group] = WeakValueDictionary()
"""Groups of this world or a destroyed one, by the timeout of their collectives; owned by their users."""


def settle(timeout_s: float = 0.5) -> bool:
    """Wait until gloo's threads have freed the collectives that a cut ended; return whether they have.

    During the interpreter's teardown, a thread that frees a collective's tensors ends the process with SIGABRT (torch
    2.13). Gloo offers nothing to wait for, so this checks its threads: those that serve connections must have run since
    the call, then those that run collectives must have come to rest.

    Blocks: about 20 ms if there are gloo groups, at most ``timeout_s``.
    """
    end_ns = clock.now_ns() + int(timeout_s * 1e9)
    before = _count_switches("gloo_tcp_loop")
    at_rest: dict[int, int] = {}
    num_same = 0
    while num_same < 3:
        running = _count_switches(connections.COLLECTIVES_THREAD)
        if not running:
            return True
        if clock.now_ns() >= end_ns:
            return False
        looked = all(count >= before.get(thread, 0) + 2 for thread, count in _count_switches("gloo_tcp_loop").items())
        num_same = num_same + 1 if looked and running == at_rest else 0
        at_rest = running
        time.sleep(0.003)  # releases the GIL, which gloo's threads need
    return True


def _count_switches(thread_name: str) -> dict[int, int]:
    """Return how often each of this process's threads of that name has gone to sleep."""
    return {
        thread: int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        for thread, status in connections.named_threads(thread_name).items()
    }


def connect_world(place: env.WorkerEnv, *, timeout_s: float = 1800.0) -> Group:
    """Initialise ``torch.distributed``: NCCL where there are GPUs, gloo for everything on the CPU.

    A later ``init_process_group()`` of the script keeps the group, or fails with the difference.

    Args:
        timeout_s: Seconds until a collective, or this call, fails because a peer does not take part.

    Raises:
        ConfigError: The meeting point is unknown.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the world. Blocks: up to ``timeout_s``, until all ranks have connected.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    device.use_device(place.local_rank)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(rendezvous(meeting_point(place), place.global_rank, place.world_size, timeout=timeout))
        store.set_timeout(timeout)
        making = _Making()
        dist.init_process_group(
            device.training_backend(),
            store=PrefixStore("default_pg", store),
            rank=place.global_rank,
            world_size=place.world_size,
            timeout=timeout,
        )
    except ValueError as error:
        raise ConfigError(f"it is not known where the ranks meet ({error}); set MASTER_ADDR and MASTER_PORT") from error
    except (RuntimeError, OutlastError) as error:
        raise RendezvousError(f"the ranks could not connect ({error}); see the log of the rank that left") from error
    assert dist.group.WORLD is not None
    _worlds.add(dist.group.WORLD)
    _replace_init()
    return making.end(None, timeout_s)


_worlds: WeakSet[torch.distributed.ProcessGroup] = WeakSet()
"""The default groups that :func:`connect_world` created."""


@functools.cache
def _replace_init() -> None:
    """Make a script's ``init_process_group()`` keep the default group of :func:`connect_world`.

    Scripts import the function by name before they call it, so it is replaced in every loaded module.
    """
    import torch.distributed as dist

    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if is_initialised() and dist.group.WORLD in _worlds:
            asked = inspect.signature(original).bind(*args, **kwargs)
            asked.apply_defaults()
            _keep_world(asked.arguments)
        else:
            original(*args, **kwargs)

    for module in list(sys.modules.values()):
        for name in [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is original]:
            setattr(module, name, init_process_group)


def _keep_world(asked: Mapping[str, Any]) -> None:
    """Keep the default group, with the timeout of the script's ``init_process_group()``.

    Raises: ConfigError: The script requests a different group.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    has = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
    differs = [f"{name}={asked[name]}" for name, value in has.items() if asked[name] not in (-1, value)]
    backend = asked["backend"]
    if backend is not None and not _offers(dist.BackendConfig(dist.Backend(backend)).device_backend_map):
        differs.insert(0, f"backend={str(backend)!r}")
    if asked["pg_options"] is not None:
        differs.append("pg_options")
    if differs:
        raise ConfigError(
            f"init_process_group({', '.join(differs)}) differs from the default process group that outlast.init() made "
            f"(backend={dist.get_backend_config()!r}, rank={has['rank']}, world_size={has['world_size']}); call "
            "init_process_group() before outlast.init(), which keeps the script's group"
        )
    if asked["timeout"] is not None:
        _set_pg_timeout(asked["timeout"])


def _offers(asked: Mapping[str, str]) -> bool:
    """Return whether the default group has the requested backend on each kind of device that there is."""
    import torch.distributed as dist

    has = dist.BackendConfig(dist.Backend(dist.get_backend_config())).device_backend_map
    return all(has.get(kind, backend) == backend for kind, backend in asked.items() if kind in has)


def is_initialised() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def current_place(place: env.WorkerEnv | None = None) -> env.WorkerEnv:
    """Return this worker's place, with the rank and world size of ``torch.distributed`` once it is initialised.

    Args:
        place: Place according to the environment; ``None``: read it now.

    Raises: ConfigError: An environment variable that must be a number is not one.
    """
    place = env.read_worker() if place is None else place
    if not is_initialised():
        return place
    import torch.distributed as dist

    return dataclasses.replace(place, global_rank=dist.get_rank(), world_size=dist.get_world_size())


def ranks_of(group: torch.distributed.ProcessGroup | DeviceMesh | None) -> tuple[int, ...]:
    """Return the global ranks of a group or mesh, in order; ``None`` = all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if group is None:
        return tuple(range(dist.get_world_size() if is_initialised() else 1))
    if isinstance(group, DeviceMesh):
        return tuple(sorted(group.mesh.reshape(-1).tolist()))
    return tuple(sorted(dist.get_process_group_ranks(group)))


def meeting_point(place: env.WorkerEnv) -> str:
    """Return the meeting point of a worker's world, as ``init_method`` of ``torch.distributed``."""
    if place.launcher != "srun":
        return "env://"
    variables = env.environ()
    # Concurrent jobs and steps of a node need different ports.
    number = int(variables.get("SLURM_JOB_ID", "0")) * 7 + int(variables.get("SLURM_STEP_ID", "0"))
    port = variables.get("MASTER_PORT") or str(20000 + number % 12000)
    return f"tcp://{env.srun_host(variables)}:{port}"


class _Making:
    def __init__(self) -> None:
        self._connections, self._threads = connections.connected_sockets(), connections.group_threads()

    def end(self, process_group: torch.distributed.ProcessGroup | None, timeout_s: float) -> Group:
        opened = connections.of_group(connections.connected_sockets() - self._connections, timeout_s)
        return Group(process_group, opened, connections.group_threads() - self._threads)


def gather_bytes(group: torch.distributed.ProcessGroup, data: bytes) -> list[bytes]:
    """Return the data of every rank of a gloo group, in the order of the ranks.

    The data goes up a tree to rank 0 and is broadcast from there: nothing is padded, and more ranks add levels, not
    steps of a ring.

    Raises: RuntimeError: A peer is gone, or was not in time.

    Collective: all ranks of the group. Blocks: up to the group's timeout.
    """
    gathered = gather_on_first(group, data)
    packed = msgspec.msgpack.encode(gathered) if gathered is not None else b""
    return from_msgpack(broadcast_bytes(group, packed, 0), list[bytes])


def gather_on_first(group: torch.distributed.ProcessGroup, data: bytes) -> list[bytes] | None:
    """Return on rank 0 of a gloo group the data of every rank, in the order of the ranks; ``None`` elsewhere.

    Raises: RuntimeError: A peer is gone, or was not in time.

    Collective: all ranks of the group.
    Blocks: up to the group's timeout; a leaf of the tree only until its data is sent.
    """
    import torch.distributed as dist

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    known = [(rank, data)]
    for child in range(_FAN_OUT * rank + 1, min(world_size, _FAN_OUT * (rank + 1) + 1)):
        known += from_msgpack(_receive(group, child), list[tuple[int, bytes]])
    if rank == 0:
        return [given for _, given in sorted(known)]
    _send(group, msgspec.msgpack.encode(known), (rank - 1) // _FAN_OUT)
    return None


def find_first(group: torch.distributed.ProcessGroup, data: bytes) -> bytes:
    """Return, on all ranks of a gloo group, the non-empty data of the lowest rank that has any; else nothing.

    Raises: RuntimeError: A peer is gone, or was not in time.

    Collective: all ranks of the group. Blocks: up to the group's timeout.
    """
    gathered = gather_on_first(group, data)
    return broadcast_bytes(group, next(filter(None, gathered or ()), b""), 0)


def _send(group: torch.distributed.ProcessGroup, data: bytes, to: int) -> None:
    import torch
    import torch.distributed as dist

    dist.send(torch.tensor([len(data)]), group=group, group_dst=to, tag=_TAG)
    dist.send(_tensor(data), group=group, group_dst=to, tag=_TAG)


def _receive(group: torch.distributed.ProcessGroup, of: int) -> bytes:
    import torch
    import torch.distributed as dist

    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=of, tag=_TAG)
    received = torch.zeros(int(length), dtype=torch.uint8)
    dist.recv(received, group=group, group_src=of, tag=_TAG)
    return received.numpy().tobytes()


def broadcast_bytes(group: torch.distributed.ProcessGroup, data: bytes, source: int) -> bytes:
    """Return the data of the rank ``source`` (its number in the gloo group); that of other ranks is ignored.

    Raises: RuntimeError: A peer is gone, or was not in time.

    Collective: all ranks of the group, with the same ``source``. Blocks: up to the group's timeout.
    """
    import torch
    import torch.distributed as dist

    length = torch.tensor([len(data)])
    dist.broadcast(length, group=group, group_src=source)
    is_source = dist.get_rank(group) == source
    sent = _tensor(data) if is_source else torch.zeros(int(length), dtype=torch.uint8)
    if sent.numel():
        dist.broadcast(sent, group=group, group_src=source)
    return sent.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    import torch

    tensor = torch.zeros(len(data), dtype=torch.uint8)
    tensor.numpy()[:] = memoryview(data)
    return tensor
