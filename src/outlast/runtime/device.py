"""The accelerator: the one module that names CUDA.

Everything here also works where there is none, and returns ``None`` or ``cpu`` then. Importing the module
does not import torch, and asking creates no CUDA context in a process that has none.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast import clock, env
from outlast.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.profiler

log = logging.getLogger(__name__)
_QUERY_S = 0.002
_COLLECTIVE = (
    *("nccl", "rccl", "gloo", "c10d", "alltoall", "all_to_all", "allreduce", "all_reduce", "allgather", "all_gather"),
    *("reduce_scatter", "broadcast", "sendrecv", "barrier", "wait"),
)
"""What the names of collectives, and of waiting for them, have in them."""


_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*=\s*(.+?)\s*$", re.MULTILINE)
_SUBSYSTEM = "/dev/dxg"
"""GPUs of all makes under the Windows Subsystem for Linux."""


def why_absent(kind: str) -> str | None:
    """Return why torch has certainly no ``gpu`` (or ``xpu``) here; ``None`` = there may be one: torch knows.

    Takes milliseconds, where asking torch takes the seconds of its import: looks at what the installed torch was built
    for, and for the files of drivers.
    """
    built_for = _torch_built_for()
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


def _torch_built_for() -> set[str] | None:
    """Return what the installed torch computes on beside CPUs; ``None`` = its version file does not tell."""
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
    """Return the backend for collectives among training devices: ``nccl`` with GPUs, else ``gloo``."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def device_name(node: str, local_rank: int = 0) -> str:
    """Return a name for the hardware that a worker computes on; another name is other hardware.

    Args:
        node: Names this node where there is no GPU: ``WorkerEnv.device`` or, without it, the node's name.
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

    if not (torch.cuda.is_initialized() and torch.cuda.is_available()):
        return None
    return bytes(torch.cuda.get_rng_state().numpy())


def set_device_rng_state(state: bytes) -> None:
    """Set the current device's random numbers to a state of :func:`device_rng_state`; does nothing without a device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def empty_cache() -> None:
    """Give back the memory that the allocator caches; does nothing where no device is in use."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def abort_collectives() -> int:
    """End every collective that devices take part in, here; return the number of groups that are aborted.

    NCCL's kernels wait on the device, where no connection can be cut: its communicators have to be aborted, all at
    once, since an abort may wait for another communicator's kernel that cannot end before its own. Kernels end soon,
    but NCCL's own threads look only every half second whether they are to end: that goes on beside what comes next.
    Until then these groups must not be shut down, only forgotten (:func:`is_aborting`, :func:`await_aborts`).

    Blocks: until the devices have done all that they were given, collectives in vain; up to 10 s.
    Thread: any.
    """
    # A thread for each: torch has the abort made by a thread of its own, which a group of NCCL's calls does not cover.
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


_SETTLE_S, _ABORT_S = 10.0, 60.0
_ABORTS = "outlast-abort"
_aborting: list[Any] = []
"""What is being aborted."""


def is_aborting() -> bool:
    """Return whether a group that torch knows is still being aborted: to shut it down would wait for that."""
    under_way = list(_aborting)
    return bool(under_way) and any(backend is one for backend in _nccl_groups() for one in under_way)


def await_aborts() -> None:
    """Wait until no group is being aborted any more. Blocks: some 0.7 s after an abort; up to 60 s. Thread: any."""
    end_s = clock.now_s() + _ABORT_S
    for thread in [thread for thread in threading.enumerate() if thread.name == _ABORTS]:
        thread.join(max(0.0, end_s - clock.now_s()))


def _nccl_groups() -> list[Any]:
    """Return what torch's groups have for collectives on NVIDIA's or AMD's devices."""
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
            continue  # a group of CPUs only
        backend = getattr(backend, "wrapped_pg", backend)  # what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it
        if isinstance(backend, dist.ProcessGroupNCCL):
            found.append(backend)
    return found


def _abort(backend: Any) -> None:
    """Abort a group; where it is forgotten by then, it goes with this thread."""
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning("a communicator could not be aborted: %s", error)
    finally:
        _aborting.remove(backend)


def _settle_devices() -> None:
    """Wait until all devices that this process uses have done what they were given."""
    import torch

    has_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    for index in range(torch.cuda.device_count()):
        if has_context(index):
            with contextlib.suppress(RuntimeError), beside_training(torch.device("cuda", index)):
                torch.cuda.synchronize()  # what a kernel did wrong, whoever uses the device next is told


_NEEDED = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables that NCCL needs to be aborted without taking its process along: its watchdog must not rethrow what the
abort causes nor end the process, and NVLS communicators cannot be aborted."""
_FROM_LAUNCHERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun and outlast run set for every worker by themselves; nobody asked for it."""


def settle_collectives() -> dict[str, str | None]:
    """Set the variables that NCCL needs for :func:`abort_collectives`, where there are devices.

    NCCL reads them when a group is made.

    Returns:
        What they were before, for :func:`outlast.env.update`.

    Raises:
        ConfigError: Somebody has set one to something else.
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
        backend: The backend that a group is made of, as ``torch.distributed`` is told.
        timeout_s: The group's timeout; NCCL's watchdog goes by it.
        hard_timeout_s: Seconds after which a process that cannot be interrupted is ended.

    Raises:
        ConfigError: The group's timeout, or that of NCCL's own heartbeat, is not longer.
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


def architecture_of(device: torch.device) -> str | None:
    """Return what kernels are compiled for, as NVIDIA's compilers name it; ``None``: not a device of theirs."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def describe_device() -> str:
    """Return what this process computes on, with the versions that matter, for people."""
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
    """Return what this machine trains on, for people: ``GPU`` or ``CPU``."""
    return "GPU" if training_device().type == "cuda" else "CPU"


def mark_work() -> Any:
    """Return a mark behind the work that the current device was given so far; ``None`` = there is no device.

    Give it to :func:`is_done`. Blocks: never.
    """
    import torch

    if not torch.cuda.is_initialized():
        return None
    mark = torch.cuda.Event()
    mark.record()
    return mark


def is_done(mark: Any, *, timeout_s: float) -> bool:
    """Return whether the work before a mark is done. Blocks: until it is, up to ``timeout_s`` seconds. Thread: any."""
    end_s, pause_s = clock.now_s() + timeout_s, _QUERY_S / 64
    while True:
        with beside_training(mark.device):  # for the question alone: training captures nothing while it waits for us
            if mark.query():
                return True
        if clock.now_s() >= end_s:
            return False
        threading.Event().wait(pause_s)  # torch offers no wait with a timeout
        pause_s = min(_QUERY_S, 2 * pause_s)


@contextlib.contextmanager
def beside_training(device: torch.device) -> Iterator[None]:
    """Have the calls of a thread other than training's harm nothing.

    A thread begins on the first GPU, where its first call would take memory for a context. And while training captures
    a graph, calls of any thread that could wait for the device end the capture, unless the thread says that what it
    asks has nothing to do with it.
    """
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        exchange = _capture_mode()
        mode = ctypes.c_int(_CAPTURE_RELAXED)  # and then what it was
        if exchange is None or exchange(ctypes.byref(mode)):
            yield
            return
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


_CAPTURE_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


@cache
def _capture_mode() -> Callable[[Any], int] | None:
    """Return what exchanges this thread's mode of captures with another; ``None``: torch's runtime is not found."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            path = next(line.split(maxsplit=5)[-1].strip() for line in maps if "/libcudart" in line)
        exchange: Callable[[Any], int] = ctypes.PyDLL(path).cudaThreadExchangeStreamCaptureMode
    except (OSError, StopIteration, AttributeError):
        return None
    return exchange


def start_driver_thread(work: Callable[[], object], name: str, stop: threading.Event | None = None) -> threading.Thread:
    """Start a thread that calls the device's driver for long, beside training.

    When the interpreter ends, the thread is stopped and waited for, up to 10 s: torch aborts a process whose
    interpreter cuts a thread off in such a call.

    Args:
        work: What it does.
        name: Of the thread.
        stop: Has it end soon; set when the interpreter ends, if not before. ``None`` = it ends by itself.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _driver_threads[thread] = stop
    thread.start()
    return thread


_driver_threads = weakref.WeakKeyDictionary[threading.Thread, threading.Event | None]()
_END_S = 10.0
"""Seconds that they get in all when the interpreter ends."""


@atexit.register
def _end_driver_threads() -> None:
    under_way = list(_driver_threads.items())
    for _, stop in under_way:
        if stop is not None:
            stop.set()
    end_s = clock.now_s() + _END_S
    for thread, _ in under_way:
        thread.join(max(0.0, end_s - clock.now_s()))


# -- copies between a device and the host ------------------------------------------------------------------------------


class Copied:
    """Copies that were queued behind each other.

    Args:
        mark: Behind the last of them.
        sources: What is copied; it must live until then, as its memory would be used again.
    """

    def __init__(self, mark: torch.cuda.Event, sources: list[torch.Tensor]) -> None:
        self._mark, self._sources = mark, sources
        self._is_done = False

    def wait(self, timeout_s: float) -> bool:
        """Return whether they are done. Blocks: until they are, up to ``timeout_s`` seconds. Thread: any."""
        if not self._is_done and is_done(self._mark, timeout_s=timeout_s):
            self._is_done, self._sources = True, []
        return self._is_done

    def hold_back(self, timeout_s: float) -> bool:
        """Have the device do what it is given from now on in its current stream only after them.

        Returns:
            Whether it will; ``False``: a graph is being captured, and they are not done in time.

        Blocks: never; while a graph is captured until they are done, up to ``timeout_s`` seconds.
        Thread: training's.
        """
        import torch

        if self._is_done:
            return True
        if is_capturing():
            return self.wait(timeout_s)  # what is captured is done later, and again, with nothing before it
        torch.cuda.current_stream(self._mark.device).wait_event(self._mark)
        return True


class DeviceCopies:
    """Copies between one device and the host, in a stream of their own, beside what the device computes.

    Thread: any, for each call; what is queued by several threads is done one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        with beside_training(device):
            self._stream = torch.cuda.Stream(device)

    def pin(self, address: int, num_bytes: int) -> bool:
        """Register memory of this process: copies then go straight into its pages. Undo it before it is unmapped.

        Returns:
            Whether it was; otherwise copies take a detour through memory of the driver's, and wait for it.

        Blocks: some 0.1 s a GiB, more where the kernel has not provided the pages yet.
        """
        import torch

        with beside_training(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
            if code:
                self._forget_error()
                log.warning("%.1f GiB cannot be pinned (CUDA error %d): copies are slower", num_bytes / 2**30, code)
        return code == 0

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin`. Blocks: until the device copies nothing there any more."""
        import torch

        with beside_training(self.device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                self._forget_error()

    def note_work(self) -> torch.cuda.Event:
        """Return a mark behind all that the device was given so far in this thread's current stream."""
        import torch

        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def queue(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        behind: torch.cuda.Event | Copied | None = None,
        launch: Callable[[int], object] | None = None,
    ) -> Copied:
        """Queue copies to the host, to the device, or within it.

        Args:
            pairs: What is copied, and where to. Drawn here: what the device has to do to make a source is done in the
                copies' stream.
            behind: What comes before: of the device's work, from :meth:`note_work`, or of other copies; ``None`` = only
                the copies that were queued here.
            launch: Gives the copies' stream, by its handle, something else to do first.

        Blocks: hardly, where the host's memory is pinned; else while the copies are made.
        """
        import torch

        with beside_training(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            if isinstance(behind, Copied):
                behind.hold_back(0.0)
            elif behind is not None:
                self._stream.wait_event(behind)
            if launch is not None:
                launch(self._stream.cuda_stream)
            remaining, sources = iter(pairs), list[torch.Tensor]()
            while some := list(itertools.islice(remaining, _COPIES_TOGETHER)):
                torch._foreach_copy_([target for _, target in some], [source for source, _ in some], non_blocking=True)
                sources += [source for source, _ in some]
            mark = torch.cuda.Event()
            mark.record(self._stream)
        return Copied(mark, sources)

    def make_room(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], *, together: bool = False
    ) -> list[torch.Tensor]:
        """Return new tensors of the device that copies may fill: the first ones, as far as there is memory for them.

        Args:
            shapes: Their shapes and element types.
            together: In one piece of memory, which is taken at once, and free once none of them is in use.

        Some memory is left for others. Thread: training's.
        """
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        cached_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        spare_bytes, places, end = free_bytes + cached_bytes - total_bytes // _LEFT_FREE, list[slice](), 0
        for shape, dtype in shapes:
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            if end > spare_bytes:
                break
            places.append(slice(begin, end))
        fitting = list(zip(shapes, places, strict=False))
        tensors: list[torch.Tensor] = []
        try:
            if together and fitting:
                piece = torch.empty(places[-1].stop, dtype=torch.uint8, device=self.device)
                tensors = [piece[place].view(dtype).view(shape) for (shape, dtype), place in fitting]
            elif fitting:
                for (shape, dtype), _ in fitting:
                    tensors.append(torch.empty(shape, dtype=dtype, device=self.device))
        except torch.OutOfMemoryError:
            pass  # what is cached lies in pieces
        # Their memory may have been other tensors', which kernels that are still queued use.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return tensors

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return new pinned memory of the host, as bytes."""
        import torch

        with beside_training(self.device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _forget_error(self) -> None:
        """Take a refused call's error back: the runtime keeps it, and would report it at the next kernel's start."""
        import torch

        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)


_COPIES_TOGETHER = 32
"""Given to torch in one call, as each gives Python's lock away; with the first ones the device begins meanwhile."""
_PORTABLE = 1
"""cudaHostRegisterPortable: for all GPUs of this process."""
_LEFT_FREE = 20
"""One part of so many of a device's memory is left free by :meth:`DeviceCopies.make_room`."""
_ALIGNED = 512
"""Bytes at a multiple of which a tensor begins in a piece of memory, as in the allocator's own."""


@cache
def copies_of(device: torch.device) -> DeviceCopies | None:
    """Return what copies between this device and the host; ``None``: its memory is the host's, or torch has no streams
    for it that we use."""
    return DeviceCopies(device) if device.type == "cuda" else None


def is_capturing() -> bool:
    """Return whether what this thread gives the device is captured as a graph, instead of being done."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_graphs() -> bool:
    """Return whether this process holds a CUDA graph. Blocks: some 50 ms for each million of Python objects."""
    import torch

    # By type(): some objects run code of their own when they are asked for their class.
    return torch.cuda.is_initialized() and any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())


def timing_event() -> Any:
    """Return a new event that keeps time in the current device's streams; needs a device."""
    return _timing_event_class()(enable_timing=True)


@cache
def _timing_event_class() -> Any:
    """Return torch's event with a tenth of what it costs the host: torch looks for the current stream in Python."""
    import torch

    own: Any = torch._C
    made_of, record = own._CudaEventBase, own._CudaEventBase.record
    current_device, current_stream = own._cuda_getDevice, own._cuda_getCurrentRawStream
    streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    class TimingEvent(torch.cuda.Event):
        query, elapsed_time = made_of.query, made_of.elapsed_time

        def record(self, stream: Any = None) -> None:
            if stream is None:
                device = current_device()
                key = device, current_stream(device)
                if (stream := streams.get(key)) is None:
                    stream = streams[key] = torch.cuda.current_stream()
            record(self, stream)

    return TimingEvent


def profiled_activities() -> list[torch.profiler.ProfilerActivity]:
    """Return what torch's profiler is to look at for kernel times: the device, else the CPU."""
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CUDA if training_device().type == "cuda" else ProfilerActivity.CPU]


def kernel_seconds(event: Any) -> float | None:
    """Return the seconds of a profiler's event, itself alone, if it is a kernel; without a device, an operator.

    Those of collectives do not count: they take as long as their ranks wait for each other.

    Args:
        event: Of ``torch.profiler.profile(...).events()``.

    Returns:
        Seconds; ``None`` = it is none of these.
    """
    name = event.name.lower()
    if any(part in name for part in _COLLECTIVE):
        return None
    if training_device().type == "cuda":
        return event.time_range.elapsed_us() / 1e6 if event.device_type.name == "CUDA" else None
    return event.self_cpu_time_total / 1e6 if event.device_type.name == "CPU" else None


def time_on_device(work: Callable[[], object], device: torch.device, *, in_stream: bool = False) -> float:
    """Return the seconds that work takes on a device, until it is done.

    Args:
        work: Gives the device what it does, in the current stream.
        device: Which.
        in_stream: Wait only for what the current stream was given, as a training step that reads its loss does; what
            other streams do goes on.

    Blocks: until the device has done all that it was given. Not for use in a training step.
    """
    import torch

    def settle() -> None:
        if device.type != "cuda":
            return
        if in_stream:
            torch.cuda.current_stream(device).synchronize()
        else:
            torch.cuda.synchronize(device)

    settle()
    begin_ns = clock.now_ns()
    work()
    settle()
    return (clock.now_ns() - begin_ns) / 1e9


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes in one dimension: a view where they lie in order, else a copy."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
