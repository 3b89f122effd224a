"""Training from memory after an in-process restart: survivors in place, spares with what a survivor sends them.

:mod:`outlast.policy.recovery_point` decides; :class:`~outlast.inprocess.kept_state.KeptTrainingState` has a rank's
state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from outlast import clock
from outlast.checkpoint.fit import restore_into
from outlast.checkpoint.state import capture
from outlast.decoding import from_msgpack
from outlast.errors import CheckpointError, OutlastError
from outlast.inprocess.call import current_handle
from outlast.inprocess.kept_state import KeptTrainingState, Parts, digest_parts
from outlast.inprocess.rank_local_state import RankLocalState, SharedBuffer, put_together, take_apart
from outlast.policy.recovery_point import InPlaceHolding, InPlacePlan, Origin, plan_in_place
from outlast.runtime.process_groups import Group, find_first, gather_bytes

log = logging.getLogger(__name__)
_TIMEOUT_S = 600.0


class _Neighbour(msgspec.Struct, frozen=True):
    node: str
    pid: int
    fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Result of a resume from memory."""

    iteration: int
    """Number of optimizer steps done."""
    sources: tuple[str, ...]
    """``in_place`` or ``peer`` for every rank."""
    source: str
    """``in_place`` or ``peer`` for this rank."""
    took_s: float
    """Duration in seconds."""


class Restore:
    """Keep a training state over in-process restarts, and resume from it where that is safe.

    A session uses it by default. Without a session::

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
        """Result of the last :meth:`resume`; ``None``: nothing to resume from."""
        self.has_loaded: Origin | None = None
        """The checkpoint that the state was loaded from, for the session that saves it."""
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
        """Restore ``state`` from memory, if all ranks can, and follow it from now on.

        Args:
            state: Name to what training changes, the same on all ranks: modules and optimizers of torch, objects with
                ``state_dict()`` and ``load_state_dict()``, tensors, plain values, mappings of these.
            own: More objects of this rank with a state of their own.
            replicas: Ranks that hold the same modules and optimizer state, this one included; ``None``: all.
            node: Name of this rank's node; ``None``: the machine's.

        Returns:
            Number of optimizer steps done; ``None``: ``state`` is unusable or new, and has to be loaded; the log has
                the reason.

        Raises:
            RuntimeError: A peer left.

        Collective: all ranks of the default group, in each call of the wrapped function. Blocks: while this rank's part
        is digested and, where a rank lacks its own, until that was sent.
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
            # Connections are not cut: nothing is under way in the group, and cutting would end those of other threads.
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
        """Whether the state given to the last :meth:`resume` was trained before, and is unusable without a load."""
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
        """Carry out a plan; return the error of any rank, the same on all."""
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
                except OSError as error:  # another container, or no permission
                    log.debug("what is the own of rank %d cannot be read: %s", other, error)

    def _forget_neighbours(self) -> None:
        for page in self._neighbours.values():
            page.close()
        self._neighbours = {}


class _StateExchange:
    """Send state between ranks in a restart.

    Args:
        group: A gloo group of all ranks; ``None``: this rank is alone.
        rank: This rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int) -> None:
        self._group, self.rank = group, rank

    def gather(self, mine: Any, kind: Any) -> list[Any]:
        """Return every rank's value. Collective: all ranks."""
        if self._group is None:
            return [mine]
        gathered = gather_bytes(self._group, msgspec.msgpack.encode(mine))
        return [from_msgpack(data, kind) for data in gathered]

    def find_first(self, text: str) -> str:
        """Return the text of the lowest rank with one, on all ranks. Collective: all ranks."""
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
