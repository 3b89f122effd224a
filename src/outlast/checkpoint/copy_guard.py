"""Choose the tensors that a save may copy after it returns, and make optimizers' steps wait for these copies.

Parameters and optimizer states change in the optimizer's ``step()`` and nowhere else, so their copy may overlap the
next forward and backward; :class:`CopyGuard` makes the next step wait for the copy. Everything else (buffers, scalars,
values outside of torch's modules and optimizers) is copied before ``save()`` returns.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from outlast.checkpoint.arena import SETTLE_S, Staged
from outlast.checkpoint.state import PLAIN_TYPES, FlatState
from outlast.errors import CheckpointError
from outlast.runtime.device import has_graphs, is_capturing
from outlast.runtime.device_copies import copies_of
from outlast.runtime.nested import find_kind

log = logging.getLogger(__name__)
DEFERRABLE_BYTES = 1 << 20
"""Smaller tensors are copied at once: a step counter may change anywhere, and deferring saves no time."""


def changed_only_by_step(optimizers: Iterable[torch.optim.Optimizer], flat: FlatState) -> frozenset[str]:
    """Return the names of large tensors that only a ``step()`` of these optimizers changes."""
    late = {
        tensor.data_ptr() if type(tensor) in PLAIN_TYPES else _address(tensor)
        for optimizer in optimizers
        for tensor in _tensors_of(optimizer)
    }
    names, place, can_wait = list[str](), None, False
    for named in flat.tensors:
        if named.tensor.nbytes >= DEFERRABLE_BYTES and named.tensor.data_ptr() in late:
            if named.device != place:
                place = named.device
                can_wait = place.type == "cpu" or copies_of(place) is not None
            if can_wait:
                names.append(named.name)
    return frozenset(names)


class CopyGuard:
    """Make an optimizer's step wait for the copy of the tensors that the step changes.

    It is a hook of ``step()``, so a step that does not run the hook would change tensors during their copy. The
    tensors of an optimizer are therefore copied late only if

    * the hook ran since the last save,
    * no CUDA graph contains a step of the optimizer: a replay runs no hook, and the hook of a captured step runs only
      once. A graph from before the hook existed may contain a step of any optimizer that torch allows to be captured,
    * no tensor changed during an earlier copy.

    ``torch.compile`` does not trace the hook: a compiled step runs it every time.

    Thread: training's; :meth:`wait`: any.
    """

    def __init__(self) -> None:
        self._under_way: list[Staged] = []
        self._newest: Staged | None = None
        self._captured = weakref.WeakSet[torch.optim.Optimizer]()
        self.hooks = weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]()
        self._seen, self._trusted = weakref.WeakSet[torch.optim.Optimizer](), weakref.WeakSet[torch.optim.Optimizer]()
        self._iteration: int | None = None
        self._lock = threading.Lock()

    def stepping(self, state: Mapping[str, Any], iteration: int | None = None) -> list[torch.optim.Optimizer]:
        """Return the optimizers in ``state`` whose tensors may be copied late; install the hook on all optimizers.

        Args:
            iteration: Iteration of the save; all saves of one iteration get the same result. ``None`` = no save yet.
        """
        optimizers = [optimizer for _, optimizer in find_kind(state, torch.optim.Optimizer)]
        if new := [optimizer for optimizer in optimizers if optimizer not in self.hooks]:
            had_graphs = has_graphs()
            for optimizer in new:
                if had_graphs and all(group.get("capturable", True) for group in optimizer.param_groups):
                    self._captured.add(optimizer)
                hook = torch.compiler.disable(self._before_step)
                self.hooks[optimizer] = optimizer.register_step_pre_hook(hook)
        if iteration != self._iteration:
            self._iteration, self._trusted, self._seen = iteration, self._seen, weakref.WeakSet()
        if self._newest is not None and self._newest.changed is not None:
            return []
        return [one for one in optimizers if one in self._trusted and one not in self._captured]

    def watch(self, staged: Staged) -> None:
        with self._lock:
            self._under_way.append(staged)
            self._newest = staged

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for all copies under way. Raises: CheckpointError, when a device hangs. Blocks: up to the rest of one
        copy.
        """
        with self._lock:
            under_way, self._under_way = self._under_way, []
        for staged in under_way:
            staged.wait(limit_s)

    def close(self) -> None:
        """Remove the hooks and wait for the copies. Idempotent. Blocks: up to the rest of one copy, or 10 s."""
        for hook in self.hooks.values():
            hook.remove()
        self.hooks.clear()
        try:
            self.wait(SETTLE_S)
        except CheckpointError as error:
            log.warning("%s", error)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        (self._captured if is_capturing() else self._seen).add(optimizer)
        with self._lock:
            under_way = self._under_way
        if under_way:
            done = {id(staged) for staged in under_way if staged.hold_back()}
            with self._lock:
                self._under_way = [staged for staged in self._under_way if id(staged) not in done]


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        if type(values) is dict or isinstance(values, Mapping):
            for value in values.values():
                if type(value) in PLAIN_TYPES or isinstance(value, torch.Tensor):  # isinstance() is slower
                    yield value


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.data_ptr())
