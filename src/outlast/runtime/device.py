"""The accelerator of this process. Only this module and its ``device_*`` neighbours name CUDA.

Everything also works without an accelerator and returns ``None`` or ``cpu`` then. Importing the module does not import
torch, and queries create no CUDA context in a process that has none.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast import clock, env

if TYPE_CHECKING:
    import torch
    import torch.profiler

_QUERY_S = 0.002
_CAPTURE_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""
_driver_threads = weakref.WeakKeyDictionary[threading.Thread, threading.Event | None]()
_END_S = 10.0
"""Seconds that all driver threads get in total when the interpreter ends."""
_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*(.+?)\s*$", re.MULTILINE)
_SUBSYSTEM = "/dev/dxg"
"""GPUs of all makes under the Windows Subsystem for Linux."""


def why_absent(kind: str) -> str | None:
    """Return why torch certainly has no ``gpu`` (or ``xpu``) here; ``None`` = torch may have one.

    Takes milliseconds instead of the seconds of torch's import: it checks for which devices the installed torch was
    built, and the files of drivers.
    """
    built_for = torch_built_for()
    if built_for is None:
        return None
    if kind == "xpu":
        if "xpu" not in built_for:
            return "the installed torch is not built for Intel GPUs"
        return None if _exists("/dev/dri", _SUBSYSTEM) else "there is no Intel GPU here (no /dev/dri)"
    if not built_for & {"cuda", "hip"}:
        return "the installed torch is built without CUDA and ROCm"
    if "hip" in built_for:
        return None if _exists("/dev/kfd", _SUBSYSTEM) else "there is no AMD GPU here (no /dev/kfd)"
    visible = env.environ().get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs"
    if _exists("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/dev/nvmap", _SUBSYSTEM) or _has_driver():
        return None
    return "there is no NVIDIA driver here (no /dev/nvidiactl, no libcuda.so.1)"


def torch_built_for() -> set[str] | None:
    """Return the kinds of accelerators that the installed torch supports; ``None`` = not shown by its version file."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    try:
        text = Path(next(iter(folders or ())), "version.py").read_text(encoding="utf-8")
    except (OSError, StopIteration):
        return None
    found = dict(_BUILT_FOR.findall(text))
    return {name for name, value in found.items() if value != "None"} if "cuda" in found else None


def _exists(*paths: str) -> bool:
    return any(Path(path).exists() for path in paths)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def training_device(local_rank: int = 0) -> torch.device:
    """Return the device on which the worker ``local_rank`` of this node trains: its own GPU, else the CPU.

    With more local ranks than devices (``CUDA_VISIBLE_DEVICES`` set for each worker) they wrap around.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def training_backend() -> str:
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def device_name(node: str, local_rank: int = 0) -> str:
    """Return a name that identifies the hardware on which a worker computes.

    Args:
        node: Name of this node where there is no GPU: ``WorkerEnv.device`` or, without it, the node's name.

    Returns:
        A GPU's UUID, which is the same on every node; else ``<node>/cpu-<local_rank>``.
    """
    device = training_device(local_rank)
    if device.type == "cuda":
        import torch

        return f"gpu-{torch.cuda.get_device_properties(device).uuid}"
    return f"{node}/cpu-{local_rank}"


def use_device(local_rank: int = 0) -> None:
    """Make the worker's GPU, if it has one, the default of CUDA calls."""
    device = training_device(local_rank)
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def device_rng_state() -> bytes | None:
    """Return the state of the current device's random numbers; ``None`` if no device is in use."""
    import torch

    if not (torch.cuda.is_initialized() and torch.cuda.is_available()):
        return None
    return bytes(torch.cuda.get_rng_state().numpy())


def set_device_rng_state(state: bytes) -> None:
    """Restore a state of :func:`device_rng_state`; does nothing without a device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def empty_cache() -> None:
    """Free the memory that the allocator caches; does nothing if no device is in use."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def architecture_of(device: torch.device) -> str | None:
    """Return the compilation target of a device as NVIDIA's compilers name it; ``None``: not an NVIDIA device."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def describe_device() -> str:
    """Describe the device of this process, with the versions that matter, for people."""
    import torch

    if not torch.cuda.is_available():
        return "CPU"
    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    words = [torch.cuda.get_device_name(), toolkit]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        words.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        words.append(f"driver {re.findall(r'[0-9]+[.][0-9.]+', text)[0]}")
    return ", ".join(words)


def device_word() -> str:
    return "GPU" if training_device().type == "cuda" else "CPU"


def mark_work() -> Any:
    """Return an event behind the current device's work so far, for :func:`is_done`; ``None`` = there is no device."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    mark = torch.cuda.Event()
    mark.record()
    return mark


def is_done(mark: Any, *, timeout_s: float) -> bool:
    """Return whether the work before a mark is done. Blocks: until it is, up to ``timeout_s``. Thread: any."""
    end_s, pause_s = clock.now_s() + timeout_s, _QUERY_S / 64
    while True:
        with in_background(mark.device):  # only for the query: training captures nothing while it waits
            if mark.query():
                return True
        if clock.now_s() >= end_s:
            return False
        threading.Event().wait(pause_s)  # torch offers no wait with a timeout
        pause_s = min(_QUERY_S, 2 * pause_s)


@contextlib.contextmanager
def in_background(device: torch.device) -> Iterator[None]:
    """Make the device calls of a thread other than training's harmless.

    A thread starts on the first GPU, where its first call would allocate memory for a context. And while training
    captures a graph, a call of any thread that could wait for the device ends the capture, unless that thread's capture
    mode is relaxed.
    """
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        exchange = _capture_mode()
        mode = ctypes.c_int(_CAPTURE_RELAXED)  # then the previous mode
        if exchange is None or exchange(ctypes.byref(mode)):
            yield
            return
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


@cache
def _capture_mode() -> Callable[[Any], int] | None:
    """Return CUDA's function that exchanges this thread's capture mode; ``None``: torch's runtime is not found."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            path = next(line.split(maxsplit=5)[-1].strip() for line in maps if "/libcudart" in line)
        exchange: Callable[[Any], int] = ctypes.PyDLL(path).cudaThreadExchangeStreamCaptureMode
    except (OSError, StopIteration, AttributeError):
        return None
    return exchange


def start_driver_thread(work: Callable[[], object], name: str, stop: threading.Event | None = None) -> threading.Thread:
    """Start a thread that spends long in calls of the device's driver.

    When the interpreter ends, the thread is stopped and waited for, up to 10 s: torch aborts a process whose
    interpreter cuts off a thread in such a call.

    Args:
        stop: Requests the thread to end soon; set at the latest when the interpreter ends. ``None`` = it ends by
            itself.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _driver_threads[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end_driver_threads() -> None:
    under_way = list(_driver_threads.items())
    for _, stop in under_way:
        if stop is not None:
            stop.set()
    end_s = clock.now_s() + _END_S
    for thread, _ in under_way:
        thread.join(max(0.0, end_s - clock.now_s()))


# -- captured graphs ---------------------------------------------------------------------------------------------------


def is_capturing() -> bool:
    """Return whether this thread's device work is captured as a graph instead of being executed."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_graphs() -> bool:
    """Return whether this process has a CUDA graph. Blocks: some 50 ms per million Python objects."""
    import torch

    # By type(), as some objects run code of their own when asked for their class.
    return torch.cuda.is_initialized() and any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())
