"""Copies beside training: which tensors may be copied late, and who waits for them.

Parameters and optimizer states change in the optimizer's ``step()`` and nowhere else, so their copy may go on during
the next forward and backward. Everything else (buffers, scalars, what is not a module or an optimizer of torch) is
copied before ``save()`` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from outlast import clock
from outlast.checkpoint.state import FlatState

__all__ = ["CopyGuard", "changed_only_by_step"]

SMALL_BYTES = 1 << 20
"""Tensors below this are copied at once: a step counter may change anywhere, and nothing is won."""


def changed_only_by_step(state: Mapping[str, Any], flat: FlatState) -> frozenset[str]:
    """Return the names of the tensors that only a ``step()`` of an optimizer in ``state`` changes.

    Args:
        state: As given to ``save()``.
        flat: The same, taken apart.
    """
    late = {_address(tensor) for optimizer in _optimizers(state) for tensor in _tensors_of(optimizer)}
    return frozenset(
        named.name
        for named in flat.tensors
        if named.tensor.device.type == "cpu"
        and named.tensor.numel() * named.tensor.element_size() >= SMALL_BYTES
        and named.tensor.data_ptr() in late
    )


class CopyGuard:
    """Wait for copies before an optimizer changes what is being copied."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        """Seconds that :meth:`wait` took so far."""
        self._waits: list[Callable[[], None]] = []
        self._hooks: dict[int, Any] = {}
        self._lock = threading.Lock()

    def watch(self, state: Mapping[str, Any], wait: Callable[[], None]) -> None:
        """Have ``wait`` called before the next step of any optimizer in ``state``."""
        with self._lock:
            self._waits.append(wait)
        for optimizer in _optimizers(state):
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(lambda *_: self.wait())

    def wait(self) -> None:
        """Wait for all copies that are under way. Thread: any. Blocks: up to the rest of one memory copy."""
        with self._lock:
            waits, self._waits = self._waits, []
        if waits:
            started_ns = clock.now_ns()
            for wait in waits:
                wait()
            self.stall_s += (clock.now_ns() - started_ns) / 1e9

    def close(self) -> None:
        """Wait a last time, and let the optimizers alone. Idempotent."""
        self.wait()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _optimizers(state: Mapping[str, Any]) -> Iterator[torch.optim.Optimizer]:
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, Mapping):
            yield from _optimizers(value)


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        if isinstance(values, Mapping):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.detach().data_ptr())
