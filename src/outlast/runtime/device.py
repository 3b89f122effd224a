"""The accelerator: the one module that names CUDA.

Everything here also works where there is none, and says so with ``None`` or ``cpu``. Importing the module
does not import torch, and asking creates no CUDA context in a process that has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "device_name",
    "device_rng_state",
    "set_device_rng_state",
    "training_backend",
    "training_device",
    "use_device",
]


def training_device(local_rank: int = 0) -> torch.device:
    """Return the device on which the worker ``local_rank`` of this node trains: its own GPU, else the CPU.

    With more local ranks than devices (``CUDA_VISIBLE_DEVICES`` set for each worker) they wrap around.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def training_backend() -> str:
    """Return the backend for collectives among training devices: ``nccl`` with GPUs, else ``gloo``."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def device_name(node: str, local_rank: int = 0) -> str:
    """Return a name for the hardware that a worker computes on; another name is other hardware.

    Args:
        node: What tells this node from others where there is no GPU: ``WorkerEnv.device`` or, without it, its name.
        local_rank: The worker's rank on its node.

    Returns:
        A GPU's UUID, which is the same on whatever node it is seen; else ``<node>/cpu-<local_rank>``.
    """
    device = training_device(local_rank)
    if device.type == "cuda":
        import torch

        return f"gpu-{torch.cuda.get_device_properties(device).uuid}"
    return f"{node}/cpu-{local_rank}"


def use_device(local_rank: int = 0) -> None:
    """Make the worker's device the default of CUDA calls; does nothing without one."""
    device = training_device(local_rank)
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def device_rng_state() -> bytes | None:
    """Return the state of the current device's random numbers; ``None`` where no device is in use."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    return bytes(torch.cuda.get_rng_state().numpy())


def set_device_rng_state(state: bytes) -> bool:
    """Set the current device's random numbers to a state of :func:`device_rng_state`.

    Returns:
        Whether there was a device to set; a state of a GPU that is loaded on a CPU has nowhere to go.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return True
