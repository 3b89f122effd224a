"""Timing of sections and kernels on this rank; a section costs well under two microseconds.

A section's time is its *own*: nested sections, waiting, and what is left out are not part of it. On the host it is
measured by the performance counter; on a device by a pair of events in the stream of the work, which are read later,
after a query that does not wait. When too many are pending, further sections are not timed.

Open sections are a stack of small lists: section, begin (0 = not timed), time that is not its own, and the device's
span. Rejected: one object per span with methods (twice as slow), and the thread's processor time to distinguish waiting
from work (a system call of 1 us, and a busy neighbour looks like waiting).

Sections are marked by context managers and decorators, and by :meth:`Wrappings.watch`, which wraps the forward of
modules, the step of optimizers, ``torch.autograd.backward`` and torch's data loaders. The rest of a step is the section
:data:`outlast.policy.slowness.OUTSIDE`; on a device, the time in which the stream has no work of other sections.

A rank's own time ends where it begins to wait for other ranks. Collectives that Python starts or waits for are marked
as waiting. The gradients that DDP or FSDP average are started by hooks within the backward, and waited for by a final
callback of the autograd engine. Final callbacks run in the order in which they were queued, so one that is queued as
soon as the backward begins runs when all gradients of this rank are computed, and before that wait.

Kernels are timed by torch's profiler on request only, as it slows down the steps that it traces and waits for the
device at its end. It traces a few steps of a window, the same ones on all ranks, in which no section is timed. Kernels
of collectives are left out: they take as long as their ranks wait. Without a device, torch's operators are timed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.errors import OutlastError
from outlast.policy.slowness import Timing, summarise
from outlast.runtime.device_timing import kernel_seconds, profiled_activities

log = logging.getLogger(__name__)
NUM_KERNEL_STEPS = 2
"""Steps of a window whose kernels are timed."""
MAX_KERNELS = 50
"""Kernels of a rank that are reported, those that took most time."""
MAX_PENDING = 4096
"""Limit of pending spans."""
MAX_SAMPLES = 4096
"""Newest times of a section that its median is taken from."""


class StreamEvent(Protocol):
    """An event in a stream, as created by :func:`outlast.runtime.device_timing.timing_event`."""

    def record(self) -> None:
        """Record the event in the current stream."""

    def query(self) -> bool:
        """Return whether the device has reached the event; does not wait."""

    def elapsed_time(self, end_event: StreamEvent, /) -> float:
        """Return the milliseconds from this event to another one; both have happened."""


class DeviceSpan:
    """A section on the device, between two events; reused."""

    __slots__ = ("begin", "counts", "end", "inner_s", "outer", "section")

    def __init__(self, begin: StreamEvent, end: StreamEvent) -> None:
        self.begin, self.end = begin, end
        self.section = 0
        self.outer: DeviceSpan | None = None
        self.inner_s = 0.0
        """Seconds that are not its own."""
        self.counts = True


class DeviceTimes:
    """Open, pending, and completed spans.

    Args:
        make_event: Creates an event with timing.

    Thread: one at a time.
    """

    def __init__(self, make_event: Callable[[], StreamEvent]) -> None:
        self._make_event = make_event
        self._free: list[DeviceSpan] = []
        self._pending: deque[DeviceSpan] = deque()
        self._done_s: dict[int, deque[float]] = {}

    def begin(self, section: int, outer: DeviceSpan | None) -> DeviceSpan | None:
        """Begin a section; ``None`` = too many are pending."""
        if self._free:
            span = self._free.pop()
        elif len(self._pending) < MAX_PENDING:
            span = DeviceSpan(self._make_event(), self._make_event())
        else:
            return None
        span.section, span.outer, span.inner_s = section, outer, 0.0
        span.begin.record()
        return span

    def end(self, span: DeviceSpan, *, counts: bool) -> None:
        """End a section; without ``counts`` its time is only subtracted from the section around it."""
        span.end.record()
        span.counts = counts
        self._pending.append(span)

    def poll(self) -> None:
        """Read the spans that the device has finished, oldest first."""
        pending, done_s = self._pending, self._done_s
        while pending and pending[0].end.query():
            span = pending.popleft()
            took_s = span.begin.elapsed_time(span.end) / 1e3
            if (outer := span.outer) is not None:
                outer.inner_s += took_s
                span.outer = None
            if span.counts:
                if (times_s := done_s.get(span.section)) is None:
                    times_s = done_s[span.section] = deque(maxlen=MAX_SAMPLES)
                own_s = took_s - span.inner_s
                times_s.append(own_s if own_s > 0.0 else 0.0)
            self._free.append(span)

    def take(self) -> dict[int, list[float]]:
        """Return and clear the seconds of all completed spans, by section."""
        self.poll()
        done_s = {section: list(times) for section, times in self._done_s.items()}
        self._done_s = {}
        return done_s


class KernelTimes:
    """Trace the kernels of a few steps, once a window.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._times_s: dict[str, list[float]] = {}
        self._is_off = False

    @property
    def is_running(self) -> bool:
        return self._profile is not None

    @property
    def times_s(self) -> dict[str, list[float]]:
        """The single times that :meth:`take` will summarise, by kernel."""
        return self._times_s

    def start(self) -> None:
        """Begin to trace. If the profiler cannot start, as another one runs, that is logged once and not retried."""
        if self._is_off or self._profile is not None:
            return
        from torch.profiler import profile

        started = profile(activities=profiled_activities())
        try:
            started.start()
        except RuntimeError as error:
            self._is_off = True
            log.warning("kernels are not timed: torch's profiler cannot start (%s)", error)
            return
        self._profile = started

    def stop(self) -> None:
        """End the trace, and add its times.

        Blocks: until the device has finished its work, and while the events are read.
        """
        if self._profile is None:
            return
        stopped, self._profile = self._profile, None
        stopped.stop()
        for event in stopped.events() or ():
            if seconds := kernel_seconds(event):
                self._times_s.setdefault(event.name, []).append(seconds)

    def take(self, best_s: dict[str, float]) -> tuple[Timing, ...]:
        """Return the summaries of the kernels that took most time, and clear all.

        Args:
            best_s: The own best of earlier windows, by kernel.
        """
        timings = [summarise(name, values, best_s=best_s.get(name, 0.0)) for name, values in self._times_s.items()]
        self._times_s = {}
        return tuple(sorted(timings, key=lambda timing: -timing.total_s)[:MAX_KERNELS])


P = ParamSpec("P")
R = TypeVar("R")
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
"""Names of the sections that :meth:`Wrappings.watch` times."""
_WAITING, _LEFT_OUT = -1, -2
"""Pseudo sections whose time counts for no section."""
_COLLECTIVES = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier"),
    *("recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)
"""Methods of a process group (those that this torch has) that wait for other ranks; on a device its stream does."""


class SectionRecorder:
    """Collect times by section.

    Args:
        device_times: Events on the device; ``None`` = the host's clock only.

    Thread: sections are those of the creating thread; those of others are not timed.
    """

    def __init__(self, device_times: DeviceTimes | None = None) -> None:
        self.active = False
        """Whether sections that are entered now are timed."""
        self.uses_device = True
        """Whether sections, and the backward, are also timed on the device; to be changed only between steps."""
        self._device = device_times
        self._thread = threading.get_ident()
        self._indices: dict[str, int] = {}
        self._on_device: list[bool] = []
        self._times_ns: list[deque[int]] = []
        self._counts: list[int] = []
        self._left_to_host: list[int] = []
        """Times of each section that should have been taken on the device, but were not."""
        self._ended: list[int] = []
        self._has_ended: list[bool] = []
        self._stack: list[list[Any]] = []
        self._left_out = 0

    def index(self, name: str, *, on_device: bool = True) -> int:
        """Return the number of a section, a new one for a new name.

        Args:
            on_device: Time it on the device, where there is one.
        """
        if name not in self._indices:
            self._indices[name] = len(self._indices)
            self._on_device.append(on_device and self._device is not None)
            self._times_ns.append(deque(maxlen=MAX_SAMPLES))
            self._counts.append(0)
            self._left_to_host.append(0)
            self._has_ended.append(False)
        return self._indices[name]

    def section(self, name: str, *, on_device: bool = True) -> StepSection:
        """Return the section of a name; arguments as for :meth:`index`."""
        return _section(self, self.index(name, on_device=on_device))

    def enter(self, index: int) -> None:
        """Begin a section; one within itself is part of the one around it."""
        if threading.get_ident() == self._thread:
            self._enter(index)

    def begin_waiting(self, within: int) -> bool:
        """Begin to wait for other ranks if ``within`` is the innermost open section; else return ``False``.

        Thread: also another one than that of the sections, while that one waits in the section.
        """
        if not self._stack or self._stack[-1][0] != within:
            return False
        self._enter(_WAITING)
        return True

    def count(self, index: int) -> None:
        """Count an entry of a section that was not timed: it counts with the average time of the others."""
        if self.active and threading.get_ident() == self._thread and not self._left_out:
            self._counts[index] += 1
            if self._on_device[index]:
                self._left_to_host[index] += 1

    def _enter(self, index: int) -> None:
        times, outer = self.active and not self._left_out, None
        for entry in self._stack:
            if entry[0] == index:
                times = False
            elif entry[3] is not None:
                outer = entry[3]
        if times:
            span = None
            has_span = outer is not None or index < 0 or self._on_device[index]
            if self._device is not None and self.uses_device and has_span:
                span = self._device.begin(index, outer)
            self._stack.append([index, perf_counter_ns(), 0, span])
        else:
            self._stack.append([index, 0, 0, None])
        if index == _LEFT_OUT:
            self._left_out += 1

    def leave(self, index: int, failed: bool = False) -> None:
        """End the innermost open section of that number, and those still open in it; a failed one is not counted."""
        now_ns = perf_counter_ns()
        stack = self._stack
        if threading.get_ident() != self._thread:
            return
        if index == _LEFT_OUT and self._left_out:
            self._left_out -= 1
        while stack and stack[-1][0] != index:
            if not any(entry[0] == index for entry in stack):
                return
            stack.pop()  # an exception skipped its end
        if not stack:
            return
        _, began_ns, inner_ns, span = stack.pop()
        if not began_ns:
            if stack:
                stack[-1][2] += inner_ns  # a section within itself is part of the one around it
            return
        took_ns = now_ns - began_ns
        if stack:
            stack[-1][2] += took_ns
        if span is not None:
            assert self._device is not None
            self._device.end(span, counts=not failed and index >= 0 and self._on_device[index])
        if index >= 0 and not failed:
            self._times_ns[index].append(took_ns - inner_ns)
            self._counts[index] += 1
            if span is None and self._on_device[index]:
                self._left_to_host[index] += 1
            if not self._has_ended[index]:
                self._has_ended[index] = True
                self._ended.append(index)

    def waiting(self) -> StepSection:
        """Return a section for waiting for other ranks: the time within counts for no section."""
        return _section(self, _WAITING)

    def left_out(self) -> StepSection:
        """Return a section for work outside steps, such as a save or an evaluation: nothing in it is timed."""
        return _section(self, _LEFT_OUT)

    def drop_open(self) -> None:
        """Discard open sections, as after an exception."""
        self._stack.clear()
        self._left_out = 0

    def poll(self) -> None:
        """Read what the device has finished; does not wait."""
        if self._device is not None:
            self._device.poll()

    def take(self, best_s: dict[str, float]) -> tuple[Timing, ...]:
        """Return the sections' summaries in the order in which they end within a step, and start over.

        Args:
            best_s: The own best of earlier windows, by section.
        """
        device_s = {} if self._device is None else self._device.take()
        names = list(self._indices)
        timings = []
        for index in self._ended:
            if self._on_device[index] and index in device_s:
                values_s, more = device_s[index], self._left_to_host[index]
            else:
                values_s = [value / 1e9 for value in self._times_ns[index]]
                more = self._counts[index] - len(values_s)
            timings.append(summarise(names[index], values_s, best_s=best_s.get(names[index], 0.0), num_more=more))
        for times_ns in self._times_ns:
            times_ns.clear()
        self._counts, self._left_to_host = [0] * len(names), [0] * len(names)
        self._ended.clear()
        self._has_ended = [False] * len(names)
        return tuple(timings)


class StepSection:
    """A part of a step: a context manager, and a decorator; within itself it is part of the one around it.

    Its body is timed, or counted as waiting, or left out. One object, created by a detector, serves all uses.
    """

    __slots__ = ("_recorder", "index")

    _recorder: SectionRecorder
    index: int
    """Its number in the recorder."""

    def __enter__(self) -> None:
        self._recorder.enter(self.index)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._recorder.leave(self.index, kind is not None)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with every call of it in this section.

        Raises:
            TypeError: The function returns before its work is done (a coroutine or generator function).
        """
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{function.__qualname__} returns before its work is done: use 'with' in it")

        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return marked


def _section(recorder: SectionRecorder, index: int) -> StepSection:
    section = StepSection()
    section._recorder, section.index = recorder, index
    return section


class Wrappings:
    """Wrappers around the script's callables, modules and optimizers, and their removal.

    Args:
        recorder: Times the sections.
    """

    def __init__(self, recorder: SectionRecorder) -> None:
        self._recorder = recorder
        self._undo: list[Callable[[], None]] = []
        self._watches_torch = False

    def wrap(self, owner: Any, attribute: str, section: StepSection) -> None:
        """Replace a callable attribute of an object, a class or a module by a timed one.

        Raises:
            OutlastError: There is no such callable.
        """
        function = getattr(owner, attribute, None)
        if not callable(function):
            raise OutlastError(f"{owner!r} has no callable {attribute!r} to time")
        if isinstance(getattr(owner, "__dict__", {}).get(attribute), staticmethod | classmethod):
            raise OutlastError(f"{attribute!r} of {owner!r} is a static or class method; time its body instead")
        self._replace(owner, attribute, section(function))

    def _replace(self, owner: Any, attribute: str, replacement: Callable[..., Any]) -> None:
        """Replace an attribute until :meth:`undo`, which keeps wrappers that others have added since."""
        own = getattr(owner, "__dict__", {})
        is_own, previous = attribute in own, own.get(attribute)
        setattr(owner, attribute, replacement)

        def undo() -> None:
            if vars(owner).get(attribute) is not replacement:
                return
            if is_own:
                setattr(owner, attribute, previous)
            else:
                delattr(owner, attribute)

        self._undo.append(undo)

    def watch(self, state: Any, section: Callable[..., StepSection]) -> None:
        """Time the forward of modules, the backward, the step of optimizers and torch's data loaders; mark collectives.

        Args:
            state: A module, an optimizer, or a mapping of them, also a nested one; other contents are ignored. For
                ``DistributedDataParallel`` the inner module is timed, which does not wait for other ranks.
            section: Returns a section by name.
        """
        for value in _values_in(state):
            if isinstance(value, torch.nn.Module):
                index = section(FORWARD).index
                self._hook(value.register_forward_pre_hook, value.register_forward_hook, index)
            elif isinstance(value, torch.optim.Optimizer):
                index = section(OPTIMIZER).index
                self._hook(value.register_step_pre_hook, value.register_step_post_hook, index)
        if not self._watches_torch:
            self._watches_torch = True
            self._replace(torch.autograd, "backward", self._time_backward(section(BACKWARD).index))
            self.wrap(_BaseDataLoaderIter, "__next__", section(DATA, on_device=False))
            self._mark_collectives()

    def _time_backward(self, index: int) -> Callable[..., None]:
        """Return ``torch.autograd.backward``, timed until all gradients of this rank are computed."""
        original, recorder = torch.autograd.backward, self._recorder
        is_open = False

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            nonlocal is_open
            if is_open or not recorder.active:  # a nested backward is part of the outer one
                original(*args, **kwargs)
                return
            if not recorder.uses_device:
                with recorder.waiting():  # part of it is waiting
                    original(*args, **kwargs)
                recorder.count(index)
                return
            tensors = args[0] if args else kwargs.get("tensors", ())
            began = waits = False

            def computed() -> None:
                nonlocal waits
                waits = recorder.begin_waiting(index)

            def begin(_: torch.Tensor) -> None:
                nonlocal began
                if not began:
                    began = True
                    torch.autograd.Variable._execution_engine.queue_callback(computed)

            roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            hooked = () if _traces_backward() else roots
            handles = [root.register_hook(begin) for root in hooked if root.requires_grad]
            recorder.enter(index)
            is_open = failed = True
            try:
                original(*args, **kwargs)
                failed = False
            finally:
                is_open = False
                if waits:
                    recorder.leave(_WAITING)
                recorder.leave(index, failed)
                for handle in handles:
                    handle.remove()

        return backward

    def _mark_collectives(self) -> None:
        """Mark the collectives that Python starts, and its waiting for them, as waiting for other ranks."""
        if not dist.is_available():
            return
        waiting = self._recorder.waiting()
        self.wrap(dist.Work, "wait", waiting)
        self.wrap(dist, "_broadcast_coalesced", waiting)  # the buffers of a module in DDP
        for name in _COLLECTIVES:
            if hasattr(dist.ProcessGroup, name):
                self.wrap(dist.ProcessGroup, name, waiting)

    def undo(self) -> None:
        """Remove everything, newest first. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._watches_torch = False

    def _hook(self, register_before: Callable[..., Any], register_after: Callable[..., Any], index: int) -> None:
        enter, leave = self._recorder.enter, self._recorder.leave
        self._undo += [register_before(lambda *_: enter(index)).remove, register_after(lambda *_: leave(index)).remove]


def _traces_backward() -> bool:
    """Return whether compiled autograd traces the backward, which then has no final callbacks of Python."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def _values_in(state: Any) -> Iterator[Any]:
    """Yield the parts of a state; for a wrapper (DDP, accelerate's optimizer, an adapter's own) the wrapped object."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _values_in(value)
    elif isinstance(state, DistributedDataParallel):
        yield state.module
    elif isinstance(state, torch.optim.Optimizer):
        yield getattr(state, "optimizer", state)
    else:
        yield getattr(state, "wrapped", state)
