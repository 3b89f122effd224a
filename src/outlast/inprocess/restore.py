"""Training from memory after a restart in process: survivors in place, spares with what a survivor sends them.

What is decided is in :mod:`outlast.policy.recovery_point`. What a rank keeps is :class:`KeptTrainingState`. A part of
the state, its modules and optimizers, is whole between two steps, and in a step until an optimizer begins to
update it, which hooks of the optimizers show. What modules change as they compute (buffers) is copied at the end of
each step where it is small. Whether anything else wrote to a parameter follows from the versions that torch counts,
and, from the end of a call to the next one, from a digest: ``DistributedDataParallel``, for one, overwrites the
parameters of all ranks with those of rank 0 when it is made.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from outlast import clock
from outlast.checkpoint.fit import restore_into
from outlast.checkpoint.state import capture
from outlast.decoding import from_msgpack
from outlast.errors import CheckpointError, OutlastError
from outlast.inprocess.call import Handle, current_handle
from outlast.inprocess.rank_local_state import CAPACITY_BYTES, RankLocalState, SharedBuffer, put_together, take_apart
from outlast.numerics.replica_digest import digest_tensors, find_replicated
from outlast.policy.recovery_point import InPlaceHolding, InPlacePlan, Origin, plan_in_place
from outlast.runtime import device
from outlast.runtime.process_groups import Group, find_first, gather_bytes

MAX_SAMPLED = 8
"""Parameters whose versions are looked at in each step; whatever changes some outside of an optimizer changes all."""
MAX_COPIED, MAX_COPIED_BYTES = 64, 256 << 10
"""Buffers, and bytes of them, that are copied at the end of each step; more would cost too much of it."""

_DEVICE_S = 0.5
"""How long a device that runs behind is waited for before its collectives are aborted."""


class Parts:
    """The modules and optimizers in a state, by path; of a wrapped module the one within."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for path, value in _walk(state, ""):
            if isinstance(value, torch.nn.Module):
                self.modules[path] = value.module if isinstance(value, DistributedDataParallel) else value
            elif isinstance(value, torch.optim.Optimizer):
                self.optimizers[path] = value

    @property
    def mapping(self) -> dict[str, Any]:
        """Both, as a state."""
        return {**self.modules, **self.optimizers}


def digest_parts(parts: Parts) -> str:
    """Return a digest of parameters and optimizer state. Blocks: while it is computed."""
    tensors = find_replicated(parts.mapping, (0,))
    digest = xxhash.xxh3_128()
    for tensor, one in zip(tensors, digest_tensors([tensor.tensor for tensor in tensors]), strict=True):
        digest.update(f"{tensor.name} {tensor.tensor.dtype} {tuple(tensor.tensor.shape)} {one}\n".encode())
    return digest.hexdigest()


class KeptTrainingState:
    """Follow the state of one rank over calls.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self.page: SharedBuffer | None = None
        """What is the rank's own, for neighbours to read."""
        self.rank: int | None = None
        """The rank that this process was in the last call that it took part in."""
        self.world_size = 0
        self.has_changing_buffers = False
        """A module has changed buffers: no other rank has the same ones."""
        self._iteration: int | None = None
        self._reason = ""
        self._digest = ""
        self._things: RankLocalState | None = None
        self._parts: Parts | None = None
        self._objects: dict[str, weakref.ref[Any]] = {}
        self._hooks: list[Any] = []
        self._call: Handle | None = None
        self._mark: Any = None
        self._is_unfinished = False
        self._num_updating = self._num_updates = 0
        self._sampled: list[torch.Tensor] = []
        self._loose: list[torch.Tensor] = []
        self._beside: list[range] = []
        self._sampled_versions: list[int] = []
        self._loose_versions: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._to_restore: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    # -- in a call ---------------------------------------------------------------------------------------------

    def watch(self, state: Mapping[str, Any], own: Mapping[str, Any], *, rank: int, world_size: int) -> None:
        """Follow ``state`` from now on.

        Args:
            state: What training changes.
            own: More that is the rank's own: anything with a ``state_dict``.
            rank: This rank in the call.
            world_size: Number of ranks.
        """
        self.release()
        self.rank, self.world_size = rank, world_size
        self._copies, self._to_restore, self.has_changing_buffers = {}, [], False
        self._parts = parts = Parts(state)
        self._objects = {path: weakref.ref(value) for path, value in parts.mapping.items()}
        self._iteration, self._reason, self._digest = None, _why_not(state, parts), ""
        if self.page is None:
            self.page = SharedBuffer.create()
        self.page.clear()
        self._things = RankLocalState({"own": own, "state": state}, parts.optimizers)
        self._call, self._mark, self._is_unfinished = current_handle(), None, False
        if self._call is not None:
            self._call.before_abort(self._look_at_device)
        updated = {
            id(parameter)
            for optimizer in parts.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._loose, self._beside, certain = [], [], []
        for owner in {id(inner): inner for module in parts.modules.values() for inner in module.modules()}.values():
            tensors = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
            loose = [tensor for tensor in tensors if id(tensor) not in updated]
            certain += [tensor for tensor in tensors if id(tensor) in updated]
            self._beside += [range(len(self._loose), len(self._loose) + len(loose))] * len(loose)
            self._loose += loose
        self._sampled = certain[:: max(1, -(-len(certain) // MAX_SAMPLED))]
        self._loose_versions = [-1] * len(self._loose)
        for optimizer in parts.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(self._begin_update))
            self._hooks.append(optimizer.register_step_post_hook(self._end_update))

    def note(self, iteration: int) -> None:
        """Record that the state is whole now: before the first step, and when a step's body is over.

        Args:
            iteration: Number of optimizer steps done.

        Raises:
            RestartRequested: The call has to be left, which was put off until now.
        """
        if self._reason or self._things is None:
            return
        self._take(iteration)
        if self._call is not None:
            self._call.end_update()

    def _take(self, iteration: int) -> None:
        assert self.page is not None
        assert self._things is not None
        try:
            data = self._things.take()
        except (OutlastError, RuntimeError, TypeError, ValueError) as error:
            self._reason = f"the state cannot be kept: {error}"
            return
        if len(data) > CAPACITY_BYTES:
            self._reason = (
                f"the state without modules and optimizers has {len(data)} bytes; at most {CAPACITY_BYTES} are kept"
            )
            return
        self._num_updates = self._num_updating = 0
        self._note_loose()
        self._sampled_versions = [tensor._version for tensor in self._sampled]
        self.page.write(iteration, data)
        self._mark = device.mark_work()
        self._iteration = iteration

    # -- between calls -----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Release the state after the call was left, and determine whether it is whole. Idempotent.

        Blocks: while it is digested, if it is whole.
        """
        if self._parts is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        parts, self._parts, self._things, self._call = self._parts, None, None, None
        if not self._reason:
            self._reason = self._why_torn()
        if not self._reason:
            # Put back by look() only: a collective that was cut may still write to a buffer.
            self._to_restore = [(weakref.ref(self._loose[index]), copy) for index, copy in self._copies.items()]
            try:
                self._digest = digest_parts(parts)
            except RuntimeError as error:
                self._reason = f"the state cannot be read any more: {error}"
        self._sampled, self._loose, self._copies = [], [], {}

    def is_used(self, state: Mapping[str, Any]) -> bool:
        """Return whether an object of ``state`` was trained in an earlier call."""
        known = [reference() for reference in self._objects.values()]
        return any(value is one for value in Parts(state).mapping.values() for one in known)

    def look(self, state: Mapping[str, Any]) -> tuple[int | None, str, str]:
        """Return at which iteration ``state`` is whole (``None``: it is not), why not, and its digest.

        Of one that is whole, buffers become what they were.

        Blocks: while it is digested.
        """
        self.release()
        if self.rank is None:
            return None, "", ""  # this process was a spare
        if self._reason or self._iteration is None:
            return None, self._reason or "no step had begun", ""
        parts = Parts(state)
        there = parts.mapping
        for path, reference in self._objects.items():
            if there.get(path) is not reference():
                return None, f"state {path!r} is another object than before: keep it with handle.keep()", ""
        if len(there) != len(self._objects):
            return None, "the state has other parts than before", ""
        digest = digest_parts(parts)
        if digest != self._digest:
            why = "something wrote to it since the call was left (DistributedDataParallel without init_sync=False?)"
            return None, why, ""
        with torch.no_grad():
            for reference, copy in self._to_restore:
                if (buffer := reference()) is not None:
                    buffer.copy_(copy)
        return self._iteration, "", digest

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.release()
        if self.page is not None:
            self.page.close()
            self.page = None

    # -- details -----------------------------------------------------------------------------------------------

    def _look_at_device(self) -> None:
        """Find out whether a device has computed what was noted last; on the monitor thread. Blocks: half a second."""
        if self._mark is not None:
            self._is_unfinished = True  # also if the device cannot be asked any more
            self._is_unfinished = not device.is_done(self._mark, timeout_s=_DEVICE_S)

    def _begin_update(self, *_: Any) -> None:
        if self._call is not None and not self._reason:
            self._call.begin_update()
        self._num_updating += 1

    def _end_update(self, *_: Any) -> None:
        self._num_updating -= 1
        self._num_updates += 1

    def _note_loose(self) -> None:
        versions = [tensor._version for tensor in self._loose]
        if versions == self._loose_versions:
            return
        if self._loose_versions[0] >= 0:
            self.has_changing_buffers = True
            changed = self._changed(versions)
            copied = {*changed, *self._copies}
            if len(copied) > MAX_COPIED or sum(self._loose[i].nbytes for i in copied) > MAX_COPIED_BYTES:
                self._copies = {}
            else:
                with torch.no_grad():
                    for index in changed:
                        if index in self._copies:
                            self._copies[index].copy_(self._loose[index])
                        else:
                            self._copies[index] = self._loose[index].detach().clone()
        self._loose_versions = versions

    def _changed(self, versions: list[int]) -> list[int]:
        """Return which buffers may have changed: all of a module of which one has.

        Running statistics change without a new version, but not without the count of batches beside them.
        """
        pairs = zip(versions, self._loose_versions, strict=True)
        return sorted(
            {beside for index, (now, then) in enumerate(pairs) if now != then for beside in self._beside[index]}
        )

    def _why_torn(self) -> str:
        if self._iteration is None:
            return "no step had begun"
        if self._num_updating:
            return f"left within an optimizer's step, in iteration {self._iteration}"
        if self._num_updates:
            return f"left after an optimizer's step, before the end of iteration {self._iteration}"
        if self._is_unfinished:
            return f"the device had not computed all of the steps before iteration {self._iteration} yet"
        if [tensor._version for tensor in self._sampled] != self._sampled_versions:
            return f"parameters were changed outside of an optimizer in iteration {self._iteration}"
        if any(index not in self._copies for index in self._changed([tensor._version for tensor in self._loose])):
            return f"buffers were changed in iteration {self._iteration}, and are not copied"
        return ""


def _why_not(state: Mapping[str, Any], parts: Parts) -> str:
    """Return why a state cannot be kept at all; empty: it can."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if not parts.modules or not parts.optimizers:
        return "the state has no module and optimizer of torch"
    for path, module in parts.modules.items():
        is_sharded = any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules())
        if is_sharded or any(isinstance(one, DTensor) for one in (*module.parameters(), *module.buffers())):
            return f"module {path!r} is sharded: it holds on to process groups, which do not outlive a restart"
    for path, optimizer in parts.optimizers.items():
        if hasattr(optimizer, "consolidate_state_dict"):
            return f"optimizer {path!r} is sharded"
    for path, value in _walk(state, ""):
        if not isinstance(value, torch.nn.Module | torch.optim.Optimizer) and hasattr(value, "param_groups"):
            return f"optimizer {path!r} is not torch's: it has no hooks that show when it updates"
    return ""


def _walk(state: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from _walk(value, here)
        else:
            yield here, value


log = logging.getLogger(__name__)
_TIMEOUT_S = 600.0


class _Neighbour(msgspec.Struct, frozen=True):
    """Where a rank's own things can be read by those on its node."""

    node: str
    pid: int
    fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How training resumes from memory."""

    iteration: int
    """Number of optimizer steps done."""
    sources: tuple[str, ...]
    """For every rank ``in_place`` or ``peer``."""
    source: str
    """This rank's."""
    took_s: float
    """Seconds."""


class Restore:
    """Keep a training state over restarts in process, and go on from it where that is safe.

    A session does this by itself. Without one::

        @outlast.inprocess.Wrapper()
        def train(call: outlast.inprocess.Handle):
            torch.distributed.init_process_group("gloo")
            model = call.keep("model", make_model)
            optimizer = call.keep("optimizer", lambda: torch.optim.AdamW(model.parameters()))
            restore = call.keep("restore", outlast.inprocess.Restore)
            state = {"model": model, "optimizer": optimizer}
            begin = restore.resume(state)
            if begin is None:
                begin = load_checkpoint(state)
            restore.note(begin)
            call.on_leave(restore.release)
            for iteration in range(begin, total):
                ...
                restore.note(iteration + 1)

    Thread: the main thread.
    """

    def __init__(self) -> None:
        self.last: Resumed | None = None
        """What the last :meth:`resume` found; ``None`` = nothing to go on from."""
        self.has_loaded: Origin | None = None
        """The generation that the state goes back to, for those who save it."""
        self._kept = KeptTrainingState()
        self._state: Mapping[str, Any] = {}
        self._own: Mapping[str, Any] = {}
        self._neighbours: dict[int, SharedBuffer] = {}
        self._was_used = False

    def resume(
        self,
        state: Mapping[str, Any],
        *,
        own: Mapping[str, Any] | None = None,
        replicas: Sequence[int] | None = None,
        node: str | None = None,
    ) -> int | None:
        """Make ``state`` what it was before the restart, from memory, if all ranks can; and follow it from now on.

        Args:
            state: Name to what training changes, the same on all ranks: modules and optimizers of torch, anything else
                with ``state_dict()`` and ``load_state_dict()``, tensors, plain values, mappings of these.
            own: More of this rank with a state of its own.
            replicas: Ranks that hold the same modules and optimizer state, this one included; ``None`` = all.
            node: Name of this rank's node; ``None`` = this machine's.

        Returns:
            Number of optimizer steps done; ``None``: ``state`` is unusable, or new, and has to be loaded; the log says
            why.

        Raises:
            RuntimeError: A peer left.

        Collective: all ranks of the default group, in each call of the wrapped function.
        Blocks: while this rank's part is digested and, where a rank lacks its own, until that was sent.
        """
        started_ns = clock.now_ns()
        self._state, self._own = state, own or {}
        self._was_used = self._kept.is_used(state)
        if self._was_used:
            for module in Parts(state).modules.values():
                module.zero_grad(set_to_none=True)
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        ranks = tuple(range(world_size)) if replicas is None else tuple(sorted(replicas))
        group = Group.open(timeout_s=_TIMEOUT_S) if world_size > 1 else None
        exchange = _StateExchange(group.process_group if group is not None else None, rank)
        plan = plan_in_place(exchange.gather(self._holding(state, ranks), InPlaceHolding))
        problem = "" if plan.iteration is None else self._carry_out(plan, exchange)
        self._watch(state, exchange, rank, world_size, node)
        if plan.iteration is not None and not problem:
            self._kept.note(plan.iteration)
        if group is not None:
            # Not cut: nothing is under way in it, and a connection that another thread opened beside it would go, too.
            dist.destroy_process_group(group.process_group)
        self.last = None
        if plan.iteration is None or problem:
            if why := problem or plan.reason:
                log.info("no state is kept in memory over this restart: %s", why)
            return None
        sources = tuple("peer" if one in plan.part_from else "in_place" for one in range(world_size))
        self.has_loaded = plan.has_loaded
        took_s = (clock.now_ns() - started_ns) / 1e9
        self.last = Resumed(iteration=plan.iteration, sources=sources, source=sources[rank], took_s=took_s)
        return plan.iteration

    @property
    def is_dirty(self) -> bool:
        """Whether the state given to the last :meth:`resume` was trained before and is unusable as it is."""
        return self._was_used and self.last is None

    def note(self, iteration: int) -> None:
        """Record that the state is that of ``iteration`` steps: before the first step, and at the end of each body."""
        self._kept.note(iteration)
        if (call := current_handle()) is not None:
            call.note_iteration(iteration)

    def release(self) -> None:
        """Release the state after the call was left. Idempotent. Blocks: while it is digested."""
        self._kept.release()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._kept.close()
        self._forget_neighbours()

    # -- details -----------------------------------------------------------------------------------------------

    def _holding(self, state: Mapping[str, Any], ranks: tuple[int, ...]) -> InPlaceHolding:
        kept = self._kept
        iteration, reason, digest = kept.look(state)
        own = {of: page.iterations() for of, page in self._neighbours.items()}
        if kept.page is not None and kept.rank is not None:
            own[kept.rank] = kept.page.iterations()
        return InPlaceHolding(
            iteration=iteration,
            reason=reason,
            rank=kept.rank,
            world_size=kept.world_size,
            digest=digest,
            is_shared=len(ranks) > 1 and not kept.has_changing_buffers,
            replicas=ranks,
            own=own,
            has_loaded=self.has_loaded,
        )

    def _carry_out(self, plan: InPlacePlan, exchange: _StateExchange) -> str:
        """Do what was planned; return what went wrong on any rank, the same on all."""
        assert plan.iteration is not None
        problem, own = "", self._read_own(exchange.rank, plan.iteration)
        for taker, giver in plan.own_from.items():
            if taker != giver and exchange.rank in (taker, giver):
                own = exchange.pass_on(self._read_own(taker, plan.iteration), giver, taker) or own
        parts = Parts(self._state)
        for taker, giver in plan.part_from.items():
            if exchange.rank == giver:
                exchange.send_part(parts.mapping, taker)
            elif exchange.rank == taker:
                try:
                    exchange.receive_part(parts.mapping, giver)
                    if digest_parts(parts) != plan.digests[taker]:
                        problem = f"rank {taker} was given another state than rank {giver} has"
                except (CheckpointError, OutlastError) as error:
                    problem = str(error)
        if not problem:
            try:
                RankLocalState({"own": self._own, "state": self._state}, parts.optimizers).put_back(own)
            except (CheckpointError, OutlastError, RuntimeError, KeyError, ValueError, TypeError) as error:
                problem = f"rank {exchange.rank}: {error}"
        return exchange.find_first(problem)

    def _read_own(self, of: int, iteration: int) -> bytes:
        page = self._kept.page if of == self._kept.rank else self._neighbours.get(of)
        return (page.read(iteration) if page is not None else None) or b""

    def _watch(
        self, state: Mapping[str, Any], exchange: _StateExchange, rank: int, world_size: int, node: str | None
    ) -> None:
        """Follow the state from now on, and get at what is the own of the ranks on this node."""
        self._kept.watch(state, self._own, rank=rank, world_size=world_size)
        page = self._kept.page
        assert page is not None
        name = node if node is not None else os.uname().nodename
        there = exchange.gather(_Neighbour(node=name, pid=os.getpid(), fd=page.fd), _Neighbour)
        self._forget_neighbours()
        for other, neighbour in enumerate(there):
            if other != rank and neighbour.node == name:
                try:
                    self._neighbours[other] = SharedBuffer.open(neighbour.pid, neighbour.fd)
                except OSError as error:  # another container, or no right to: then nothing is known of that rank
                    log.debug("what is the own of rank %d cannot be read: %s", other, error)

    def _forget_neighbours(self) -> None:
        for page in self._neighbours.values():
            page.close()
        self._neighbours = {}


class _StateExchange:
    """What ranks send each other in a restart.

    Args:
        group: A gloo group of all ranks; ``None``: this rank is alone.
        rank: This rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int) -> None:
        self._group, self.rank = group, rank

    def gather(self, mine: Any, kind: Any) -> list[Any]:
        """Return what every rank gave. Collective: all ranks."""
        if self._group is None:
            return [mine]
        gathered = gather_bytes(self._group, msgspec.msgpack.encode(mine))
        return [from_msgpack(data, kind) for data in gathered]

    def find_first(self, text: str) -> str:
        """Return what the lowest rank gave that gave anything, on all ranks. Collective: all ranks."""
        return text if self._group is None else find_first(self._group, text.encode()).decode()

    def pass_on(self, data: bytes, giver: int, taker: int) -> bytes:
        """Send ``data`` if this rank is the giver; return it if this is the taker, else nothing."""
        if self.rank == giver:
            dist.send(torch.tensor([len(data)]), dst=taker, group=self._group)
            if data:
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=taker, group=self._group)
            return b""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=giver, group=self._group)
        received = torch.zeros(int(length), dtype=torch.uint8)
        if received.numel():
            dist.recv(received, src=giver, group=self._group)
        return received.numpy().tobytes()

    def send_part(self, parts: Mapping[str, Any], taker: int) -> None:
        """Send modules and optimizers."""
        description, contents = take_apart(capture(parts))
        self.pass_on(description, self.rank, taker)
        for one in contents:
            dist.send(one, dst=taker, group=self._group)

    def receive_part(self, parts: Mapping[str, Any], giver: int) -> None:
        """Receive modules and optimizers into those given.

        Raises:
            CheckpointError: They do not fit.
        """
        description = self.pass_on(b"", giver, self.rank)
        received = put_together(description, lambda into: dist.recv(into, src=giver, group=self._group))
        restore_into(dict(parts), received)
