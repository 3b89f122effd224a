"""The training state that a rank keeps over in-process restarts, and whether it is whole.

The modules and optimizers of a state are whole between two steps, and in a step until an optimizer begins to update
them, which the optimizers' hooks show. Buffers that modules change as they compute are copied at the end of each step
where they are small. Other writes to a parameter show in the versions that torch counts and, from the end of a call to
the next one, in a digest: ``DistributedDataParallel`` overwrites the parameters of all ranks with those of rank 0 when
it is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from outlast.errors import OutlastError
from outlast.inprocess.call import Handle, current_handle
from outlast.inprocess.rank_local_state import CAPACITY_BYTES, RankLocalState, SharedBuffer
from outlast.numerics.replica_digest import digest_tensors, find_replicated
from outlast.runtime import device

MAX_SAMPLED = 8
"""Parameters whose versions are checked in each step; other writers than optimizers change all parameters."""
MAX_COPIED, MAX_COPIED_BYTES = 64, 256 << 10
"""Limits of the number and bytes of buffers that are copied at the end of each step."""

_DEVICE_S = 0.5
"""Seconds to wait for a device before its collectives are aborted."""


class Parts:
    """The modules and optimizers in a state, by path; wrapped modules are unwrapped."""

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
        return {**self.modules, **self.optimizers}


def digest_parts(parts: Parts) -> str:
    """Return a digest of parameters and optimizer state. Blocks: while it is computed."""
    tensors = find_replicated(parts.mapping, (0,))
    digest = xxhash.xxh3_128()
    for tensor, one in zip(tensors, digest_tensors([tensor.tensor for tensor in tensors]), strict=True):
        digest.update(f"{tensor.name} {tensor.tensor.dtype} {tuple(tensor.tensor.shape)} {one}\n".encode())
    return digest.hexdigest()


class KeptTrainingState:
    """Follow the training state of one rank over calls.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self.page: SharedBuffer | None = None
        self.rank: int | None = None
        """The rank of this process in the last call that it was active in."""
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
        self._of_module: list[range] = []
        self._sampled_versions: list[int] = []
        self._loose_versions: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._to_restore: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    # -- in a call ---------------------------------------------------------------------------------------------

    def watch(self, state: Mapping[str, Any], own: Mapping[str, Any], *, rank: int, world_size: int) -> None:
        """Follow ``state`` from now on.

        Args:
            state: The state that training changes.
            own: More rank-local state: anything with a ``state_dict``.
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
        self._loose, self._of_module, certain = [], [], []
        for owner in {id(inner): inner for module in parts.modules.values() for inner in module.modules()}.values():
            tensors = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
            loose = [tensor for tensor in tensors if id(tensor) not in updated]
            certain += [tensor for tensor in tensors if id(tensor) in updated]
            self._of_module += [range(len(self._loose), len(self._loose) + len(loose))] * len(loose)
            self._loose += loose
        self._sampled = certain[:: max(1, -(-len(certain) // MAX_SAMPLED))]
        self._loose_versions = [-1] * len(self._loose)
        for optimizer in parts.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(self._begin_update))
            self._hooks.append(optimizer.register_step_post_hook(self._end_update))

    def note(self, iteration: int) -> None:
        """Record that the state is whole: before the first step, and at the end of each step's body.

        Args:
            iteration: Number of optimizer steps done.

        Raises:
            RestartRequested: The call has to be left; the order was deferred until now.
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

        Blocks: while a whole state is digested.
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
            # Only look() restores them: a collective that was cut may still write to a buffer.
            self._to_restore = [(weakref.ref(self._loose[index]), copy) for index, copy in self._copies.items()]
            try:
                self._digest = digest_parts(parts)
            except RuntimeError as error:
                self._reason = f"the state cannot be read any more: {error}"
        self._sampled, self._loose, self._copies = [], [], {}

    def is_used(self, state: Mapping[str, Any]) -> bool:
        known = [reference() for reference in self._objects.values()]
        return any(value is one for value in Parts(state).mapping.values() for one in known)

    def look(self, state: Mapping[str, Any]) -> tuple[int | None, str, str]:
        """Return the iteration at which ``state`` is whole (``None``: it is not), the reason if not, and its digest.

        Restores the buffers of a whole state. Blocks: while it is digested.
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
        self.release()
        if self.page is not None:
            self.page.close()
            self.page = None

    # -- details -----------------------------------------------------------------------------------------------

    def _look_at_device(self) -> None:
        """Determine whether a device has computed the last recorded step. Blocks: half a second.

        Thread: the monitor thread.
        """
        if self._mark is not None:
            self._is_unfinished = True  # also if the device cannot be queried any more
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
        """Return the buffers that may have changed: all of a module of which one has.

        Running statistics change without a new version, but the module's count of batches does not.
        """
        pairs = zip(versions, self._loose_versions, strict=True)
        return sorted(
            {other for index, (now, then) in enumerate(pairs) if now != then for other in self._of_module[index]}
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
    """Return the reason why a state cannot be kept; empty: it can."""
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
