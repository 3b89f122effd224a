"""A rank that computes slowly: the forwards of its modules take a multiple of their time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from outlast import clock

__all__ = ["Slowing"]

_NUM_LAST = 9
"""Forwards of a module whose middle one counts."""


class Slowing:
    """Stretch the forward of every module of a state, on the host.

    The rank sleeps for as long as it is to be slower, so that other ranks of the same machine keep their speed. How
    long that is follows from the middle one of a module's last forwards: what disturbs a single one is not multiplied.

    Args:
        state: A mapping with the modules; everything else in it is ignored. Of a module in
            ``DistributedDataParallel`` it is the module within, so that waiting for others is not stretched.
        factor: How many times as long a forward takes; above 1.
        duration_s: Seconds until it ends by itself; ``None`` = never.

    Thread: that of the training loop.
    """

    def __init__(self, state: Mapping[str, Any], *, factor: float, duration_s: float | None) -> None:
        self._factor = factor
        self._ends_s = float("inf") if duration_s is None else clock.now_s() + duration_s
        self._began_s = 0.0
        self._lasted_s: dict[torch.nn.Module, deque[float]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for module in _modules(state):
            self._handles.append(module.register_forward_pre_hook(self._begin))
            # Before other people's hooks, so that whoever times the forward times this too.
            self._handles.append(module.register_forward_hook(self._end, prepend=True))

    @property
    def slows(self) -> bool:
        """Whether there is a module that is slow now."""
        return bool(self._handles)

    def remove(self) -> None:
        """Let the modules be as fast as before. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, *_: object) -> None:
        self._began_s = clock.now_s()

    def _end(self, module: torch.nn.Module, *_: object) -> None:
        now_s = clock.now_s()
        if now_s < self._ends_s:
            lasted_s = self._lasted_s.setdefault(module, deque(maxlen=_NUM_LAST))
            lasted_s.append(now_s - self._began_s)
            time.sleep((self._factor - 1) * sorted(lasted_s)[(len(lasted_s) - 1) // 2])


def _modules(state: Mapping[str, Any]) -> Iterator[torch.nn.Module]:
    for value in state.values():
        module = value.module if isinstance(value, DistributedDataParallel) else value
        if isinstance(module, torch.nn.Module):
            yield module
