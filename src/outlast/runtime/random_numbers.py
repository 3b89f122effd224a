"""Random numbers of this rank: python's, numpy's, torch's, the device's."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

from outlast.runtime.device import device_rng_state, set_device_rng_state

__all__ = ["RandomSnapshot", "capture_random", "restore_random"]

_MT19937_BYTES = 624 * 4 + 4
"""Bytes of the state of numpy's default generator: its words, and the place within them."""


def capture_random() -> dict[str, Any]:
    """Return the state of all generators that have one per process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": device_rng_state(),
    }


def restore_random(state: dict[str, Any]) -> None:
    """Go on where :func:`capture_random` was called."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        set_device_rng_state(state["device"])


class RandomSnapshot:
    """The same, for once a step: what numpy's generator did not use since is not copied again.

    To ask numpy for its state takes longer than all the others together (25 us; comparing the bytes takes 1).

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self._numpy: Any = None
        self._generator: Any = None
        self._bytes = b""
        self._state: dict[str, Any] | None = None

    def take(self) -> None:
        """Remember the state of all generators."""
        self._take_numpy()
        self._state = {
            "python": random.getstate(),
            "numpy": self._numpy,
            "torch": torch.get_rng_state(),
            "device": device_rng_state(),
        }

    def restore(self) -> None:
        """Go on where :meth:`take` was called."""
        restore_random(self.state)

    @property
    def state(self) -> dict[str, Any]:
        """What was remembered, as :func:`capture_random` returns it."""
        assert self._state is not None, "take() was not called"
        return self._state

    def _take_numpy(self) -> None:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator).__name__ != "MT19937":
            self._numpy, self._generator = np.random.get_state(), None
            return
        seen = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        # A normally distributed number kept for the next call is not among these bytes; it can go without a trace.
        same = generator is self._generator and seen == self._bytes and not self._numpy[3]
        if not same:
            self._numpy, self._generator, self._bytes = np.random.get_state(), generator, seen
