"""Aborting collectives on devices, and the settings of torch that allow it.

Importing the module does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from functools import partial
from typing import Any

from outlast import clock, env
from outlast.errors import ConfigError
from outlast.runtime.device import in_background, start_driver_thread

log = logging.getLogger(__name__)
_SETTLE_S, _ABORT_S = 10.0, 60.0
_ABORTS = "outlast-abort"
_NEEDED = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables that NCCL needs to be aborted without ending its process: its watchdog must neither rethrow errors that the
abort causes nor end the process, and NVLS communicators cannot be aborted."""
_FROM_LAUNCHERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Values that torchrun and outlast run set for every worker, so not a choice of the user."""
_aborting: list[Any] = []
"""Backends that are being aborted."""


def abort_collectives() -> int:
    """Abort every collective of this process on devices; return the number of groups that are aborted.

    NCCL's kernels wait on the device, where no connection can be cut, so its communicators are aborted: all at once,
    since one abort may wait for another communicator's kernel. Kernels end soon, but NCCL's own threads check only
    every half second whether they must end, which continues in the background. Until then these groups must not be shut
    down, only dropped (:func:`is_aborting`, :func:`await_aborts`).

    Blocks: until the devices have finished all their work, aborted collectives included; up to 10 s. Thread: any.
    """
    # One thread per group: torch aborts in a thread of its own, which an NCCL group call does not cover.
    found = _nccl_groups()
    _aborting.extend(found)
    for backend in found:
        start_driver_thread(partial(_abort, backend), _ABORTS)
    if found:
        settling = start_driver_thread(_settle_devices, "outlast-settle")
        settling.join(_SETTLE_S)
        if settling.is_alive():
            log.warning("collectives were aborted, but a device is still busy after %g s", _SETTLE_S)
    return len(found)


def is_aborting() -> bool:
    """Return whether a group that torch knows is still being aborted: shutting it down would wait for the abort."""
    under_way = list(_aborting)
    return bool(under_way) and any(backend is one for backend in _nccl_groups() for one in under_way)


def await_aborts() -> None:
    """Wait until no group is being aborted. Blocks: some 0.7 s after an abort; up to 60 s. Thread: any."""
    end_s = clock.now_s() + _ABORT_S
    for thread in [thread for thread in threading.enumerate() if thread.name == _ABORTS]:
        thread.join(max(0.0, end_s - clock.now_s()))


def _nccl_groups() -> list[Any]:
    """Return torch's NCCL (or RCCL) backends."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if not (torch.cuda.is_available() and dist.is_nccl_available() and dist.is_initialized()):
        return []
    found = []
    for group in list(c10d._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue  # a CPU-only group
        backend = getattr(backend, "wrapped_pg", backend)  # wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, dist.ProcessGroupNCCL):
            found.append(backend)
    return found


def _abort(backend: Any) -> None:
    """Abort a group; if it was dropped meanwhile, it is freed with this thread."""
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning("a communicator could not be aborted: %s", error)
    finally:
        _aborting.remove(backend)


def _settle_devices() -> None:
    """Wait until all devices that this process uses are idle."""
    import torch

    has_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    for index in range(torch.cuda.device_count()):
        if has_context(index):
            with contextlib.suppress(RuntimeError), in_background(torch.device("cuda", index)):
                torch.cuda.synchronize()  # a kernel's error is raised at the next use of the device


def settle_collectives() -> dict[str, str | None]:
    """Set the variables that NCCL needs for :func:`abort_collectives`, if there are devices.

    NCCL reads them when a group is made.

    Returns:
        Their previous values, for :func:`outlast.env.update`.

    Raises: ConfigError: The user has set one to another value.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    given = env.environ()
    if "TORCHELASTIC_RUN_ID" in given:
        given = {name: value for name, value in given.items() if _FROM_LAUNCHERS.get(name) != value}
    for name, value in _NEEDED.items():
        if (found := given.get(name, value)) != value:
            raise ConfigError(f"{name}={found} keeps NCCL from being aborted; unset it, or set it to {value}")
    return env.update(dict(_NEEDED))


def check_collectives(backend: str, timeout_s: float, *, hard_timeout_s: float) -> None:
    """Check that NCCL does not end a process before it could be interrupted.

    Args:
        timeout_s: The group's timeout, which NCCL's watchdog uses.
        hard_timeout_s: Seconds after which a process that cannot be interrupted is ended.

    Raises: ConfigError: The group's timeout, or that of NCCL's own heartbeat, is not longer.
    """
    import torch

    if "nccl" not in backend and not (backend == "undefined" and torch.cuda.is_available()):
        return
    if timeout_s <= hard_timeout_s:
        raise ConfigError(
            f"the group's timeout={timeout_s:g} s must be longer than hard_timeout={hard_timeout_s:g}: NCCL's watchdog "
            "would end the process before; give init_process_group() a longer timeout"
        )
    heartbeat = env.environ().get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    if heartbeat is not None and heartbeat.isdecimal() and 0 < int(heartbeat) <= hard_timeout_s:
        raise ConfigError(
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} must be longer than hard_timeout={hard_timeout_s:g}; "
            "unset it"
        )
