"""One call of the wrapped function: its handle, the store on which its ranks meet, and how it is left without a trace.

Each call has a store of its own, hosted by the call's rank 0. Every rank that may become rank 0 binds a socket
beforehand and reports its address; the rank that does hands its socket to the store. So the address is known before
the call begins, and no other process can take the port.

After the call no exception, frame, process group, child process or hook of it survives.
"""

from __future__ import annotations

import datetime
import gc
import inspect
import logging
import multiprocessing
import socket
import sys
import traceback
import typing
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from outlast.config.training import InProcessRestartConfig
from outlast.errors import OutlastError, PeerLost
from outlast.runtime import connections
from outlast.runtime.addresses import listen_at
from outlast.runtime.device_collectives import await_aborts, is_aborting

if TYPE_CHECKING:
    from outlast.inprocess.plugins import State
    from outlast.inprocess.progress import Page
    from outlast.runtime.interruption import SignalInterruption


_current: Handle | None = None


class RestartRequested(BaseException):
    """All ranks leave the wrapped function now; not to be caught."""


class _ScopedPart:
    """A part of the function with something of its own; may be nested."""

    __slots__ = ("_enter", "_leave")

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *raised: object) -> None:
        self._leave()


class Handle:
    """One call of the wrapped function; valid until that call has ended.

    A parameter of the function that is annotated with this class gets it; only the wrapper makes one that works
    (:func:`open_handle`).

    Thread: the main thread; :meth:`ping` and :attr:`is_left` from any.
    """

    def __init__(
        self, state: State, *, kept: dict[str, Any] | None = None, config: InProcessRestartConfig | None = None
    ) -> None:
        self._state = state
        self._page: Page
        self._interruption: SignalInterruption
        self._on_first_ping: Callable[[], None]
        self._has_pinged = False
        self._callbacks: list[Callable[[], None]] = []
        self._looks: list[Callable[[], None]] = []
        self._kept = kept if kept is not None else {}
        self.failure: tuple[str, bool] | None = None
        """What the function failed with, and whether that is a consequence of another rank's fault; ``None`` = it has
        not failed yet, or is only known to have once it raises."""
        self.config = config or InProcessRestartConfig()
        """The settings of the wrapper."""
        self.reached = -1
        """The highest iteration given to :meth:`note_iteration`; -1: none was."""

    @property
    def state(self) -> State:
        """This rank's place among the ranks."""
        return self._state

    @property
    def iteration(self) -> int:
        """Number of this call: 0 for the first, one more after each restart."""
        return self._state.iteration

    @property
    def is_left(self) -> bool:
        """Whether this call has ended or has to be left: what fails now fails for that. Thread: any."""
        return not self._interruption.is_in(self._state.iteration)

    def ping(self) -> None:
        """Record that the function makes progress.

        Without a ping any bytecode that the main thread runs counts as progress. Once there was one in a call, only
        pings do: a loop that spins in vain is noticed then.

        Thread: any.
        """
        self._page.stamp_progress()
        if not self._has_pinged:
            self._has_pinged = True
            self._on_first_ping()

    def note_iteration(self, iteration: int) -> None:
        """Record how many optimizer steps are done, which bounds restarts without progress.

        A session and :class:`~outlast.inprocess.Restore` do this by themselves. Restarts in a row of which none gets
        beyond the highest iteration before end with ``RestartAbort`` (``max_no_progress_restarts``).
        """
        self.reached = max(self.reached, iteration)

    def atomic(self) -> AbstractContextManager[None]:
        """Return a context manager in which the function is not interrupted; may be nested.

        A restart that was ordered meanwhile begins at its end. The hard timeout still holds.
        """
        return _ScopedPart(self._interruption.enter_atomic, self._interruption.leave_atomic)

    def begin_update(self) -> None:
        """Record that what training changes is not whole from here until :meth:`end_update`; may be called repeatedly.

        A restart that is ordered meanwhile waits for that up to a second, as without it the state would have to be
        loaded. Connections are cut all the same. :class:`Restore` does this by itself: from the first optimizer's step
        until ``note()``.
        """
        self._interruption.begin_update()

    def end_update(self) -> None:
        """Record that it is whole again. A restart that was ordered meanwhile begins here."""
        self._interruption.end_update()

    def disable_hang_protection(self) -> AbstractContextManager[None]:
        """Return a context manager in which neither timeout holds; may be nested.

        Other ranks' faults still end the call.
        """
        return _ScopedPart(self._page.pause, self._page.resume)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the object of this name that this process kept from an earlier call, else what ``make()`` returns.

        What is kept lives as long as the wrapper's call. Whether its content is usable after a restart is for the
        caller to know: the function may have been left in the middle of changing it.
        """
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Have something called once this call has been left, however that is; the last one given is called first.

        It is called on the main thread, before the ``finalize`` plug-in and before process groups are destroyed, while
        their connections are cut already. It must not wait for other ranks.
        """
        self._callbacks.append(callback)

    def before_abort(self, look: Callable[[], None]) -> None:
        """Have something called when the call has to be left, before collectives that are under way are aborted.

        What an aborted collective leaves behind is garbage, and so is what a device computes from it: this is the last
        moment to ask what the device is done with. It is called on the monitor thread, or on the main thread of a rank
        that leaves by itself; the restart waits for it.
        """
        self._looks.append(look)

    def look_before_abort(self) -> None:
        """Call what :meth:`before_abort` was given; once in a call."""
        for look in list(self._looks):
            look()

    def note_failure(self, error: Exception) -> None:
        """Record what the function is about to fail with.

        While it frees what it holds, its peers notice, and the order to leave replaces the exception. An exception that
        comes after that order is not recorded.
        """
        if self.failure is None and not self.is_left:
            self.failure = describe(error), is_consequence(error)

    def take_callbacks(self) -> list[Callable[[], None]]:
        """Return what :meth:`on_leave` was given, in the order of the calls to make; only once."""
        callbacks, self._callbacks = self._callbacks[::-1], []
        return callbacks


def open_handle(
    state: State,
    *,
    interruption: SignalInterruption,
    page: Page,
    on_first_ping: Callable[[], None],
    kept: dict[str, Any],
    config: InProcessRestartConfig | None = None,
) -> Handle:
    """Return the handle of a call that is about to begin.

    Args:
        state: This rank's place in it.
        interruption: Gets the main thread out of the call.
        page: Where the call's progress is shown.
        on_first_ping: Called once, with the first :meth:`Handle.ping`.
        kept: What :meth:`Handle.keep` has kept so far, and where it keeps more.
        config: The settings of the wrapper.
    """
    handle = Handle(state, kept=kept, config=config)
    handle._interruption, handle._page, handle._on_first_ping = interruption, page, on_first_ping
    return handle


def current_handle() -> Handle | None:
    """Return the handle of the call that the main thread is in; ``None`` outside of a wrapped function."""
    return _current


def set_current(handle: Handle | None) -> None:
    """Say which call the main thread is in."""
    global _current
    _current = handle


def handle_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the parameter that is annotated :class:`Handle`, also as text; ``None``: there is none."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    try:
        hints = typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # noqa: BLE001 - an annotation of something else that cannot be resolved now
        hints = {}
    for name, parameter in parameters.items():
        annotation = hints.get(name, parameter.annotation)
        if annotation is Handle or Handle in typing.get_args(annotation):
            return name
        if isinstance(annotation, str) and annotation.split("|")[0].strip().strip("'\"").split(".")[-1] == "Handle":
            return name
    return None


class CallStore:
    """A bound socket that may become a call's store.

    Args:
        host: Address of this machine at which the other ranks reach it.
    """

    def __init__(self, host: str) -> None:
        self._listener: socket.socket | None = listen_at(host, backlog=2048)
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self.address = f"{host} {self._port}"
        """``host port``."""
        self._store: Any = None

    def serve(self, *, timeout_s: float) -> None:
        """Host the store. Blocks: never."""
        assert self._listener is not None, "closed, or served already"
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(
            self._host,
            self._port,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        self._listener = None

    def close(self) -> None:
        """Stop hosting; a call that still uses the store fails. Idempotent."""
        self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


log = logging.getLogger(__name__)

_AT_REST_S = 5.0
_CHILD_S = 1.0
_LOST_WORDS = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed", "remote")


def describe(error: BaseException) -> str:
    """Return an exception in one line, with where it was raised."""
    text = str(error).strip().split("\n")[0][:300]
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):  # extract_tb() would read each frame's source file
        where = f" (at {frame.f_code.co_filename}:{line})"
    return f"{type(error).__name__}: {text}{where}"


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception only means that another rank is gone."""
    import torch.distributed as dist

    if isinstance(error, PeerLost | ConnectionError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    is_from_group = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    return is_from_group and any(words in text for words in _LOST_WORDS)


def clear_frames(error: BaseException | None) -> list[BaseException]:
    """Free what is held by the frames that an exception and its causes went through; return all of these.

    Their tracebacks still show where they were raised.
    """
    found: list[BaseException] = []
    pending = [error]
    while pending:
        one = pending.pop()
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        pending += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
    return found


def drop(error: BaseException | None) -> None:
    """Free an exception's frames and tracebacks, and those of its causes."""
    for one in clear_frames(error):
        one.__traceback__ = None


class Background:
    """What was there before the function ran, to get back to."""

    def __init__(self) -> None:
        self._excepthook = sys.excepthook
        self._children = set(multiprocessing.active_children())

    def restore(self) -> None:
        """Take back the hooks that process groups put in, and end the data loaders' workers that are left."""
        sys.excepthook = self._excepthook  # torch puts another layer around it for every default group
        end_children(set(multiprocessing.active_children()) - self._children)


def leave(callbacks: Iterable[Callable[[], None]], error: BaseException | None, background: Background) -> None:
    """Get rid of a call: its callbacks, exception, child processes and groups.

    What fails in a callback is logged: the call is over all the same.

    Raises:
        OutlastError: A collective of the call does not end: this process must not go on.

    Blocks: about 10 ms; up to 5 s when a collective does not end.
    """
    connections.cut_all()
    for callback in callbacks:
        if not str(getattr(callback, "__module__", "")).startswith("outlast."):
            await_aborts()  # the script's own may shut its groups down
        try:
            callback()
        except (Exception, SystemExit):
            log.exception("a function given to on_leave() failed")
    background.restore()
    drop(error)
    end_groups()


def end_groups() -> None:
    """Destroy all process groups, when nothing in them runs any more.

    Destroying a group while one of its threads still frees a collective's tensors deadlocks: the destructor waits for
    the thread, and the thread for the interpreter's lock (torch 2.13).

    Raises:
        OutlastError: A collective does not end: this process must not go on.

    Blocks: about 10 ms; up to 5 s when a collective does not end.
    """
    connections.cut_all()
    if not connections.wait_until_at_rest(_AT_REST_S):
        raise OutlastError("a collective of the call that was left does not end; this rank cannot continue")
    _destroy_groups()
    gc.collect()
    # Destroying a group closes what gloo did not close by itself, unless somebody still holds the group.
    if connections.num_open() and not connections.wait_until_at_rest(_AT_REST_S, patience_s=_AT_REST_S):
        raise OutlastError(
            "a process group of the call that was left is still in use and its connections do not close; this "
            "rank cannot continue: let the function hold its groups and DistributedDataParallel itself"
        )
    connections.forget()


def _destroy_groups() -> None:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if dist.is_initialized() and not is_aborting():
        dist.destroy_process_group()
        return
    # The function was left while it made the default group, or its communicators are being aborted: to shut one down
    # would wait for that.
    world: Any = c10d._world
    c10d._update_default_pg(None)
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(world, name).clear()
    world.pg_coalesce_state.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    # Counted before anything is connected. Ranks that count differently would give their next group different names,
    # and wait for each other forever.
    world.group_count = 0


def end_children(children: Iterable[BaseProcess]) -> None:
    """End the daemonic processes among these, such as a data loader's workers, without waiting for what they do.

    A data loader whose iterator is dropped waits up to five seconds for each worker; it must not be left to do so, nor
    get a signal from the kernel when a worker that it still counts on was killed.
    """
    children = [child for child in children if child.daemon]
    if not children:
        return
    _detach_loaders()
    for child in children:
        child.kill()
    for child in children:
        child.join(_CHILD_S)
        if child.is_alive():
            log.warning("child process %s does not end", child.pid)


def _detach_loaders() -> None:
    """Detach the iterators of data loaders from their workers."""
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    import torch

    kind = loading._MultiProcessingDataLoaderIter
    for iterator in [found for found in gc.get_objects() if type(found) is kind]:
        if getattr(iterator, "_shutdown", True):
            continue
        iterator._shutdown = True
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        for pending in [*getattr(iterator, "_index_queues", ()), getattr(iterator, "_worker_result_queue", None)]:
            if pending is not None and hasattr(pending, "cancel_join_thread"):
                pending.cancel_join_thread()
                pending.close()
