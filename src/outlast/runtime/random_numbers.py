"""Random numbers of this rank: python's, numpy's, torch's, the device's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from outlast.runtime.device import device_rng_state, set_device_rng_state

__all__ = ["capture_random", "restore_random"]


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
