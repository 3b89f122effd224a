"""One call of the wrapped function: its handle, the store on which its ranks meet, and how it is left without a trace.

Each call has a store of its own, hosted by the call's rank 0. Every rank that may become rank 0 binds a socket
beforehand and reports its address; the rank that does hands its socket to the store. So the address is known before
the call begins, and no other process can take the port.

After the call no exception, frame, process group, child process or hook of it survives.
"""

from __future__ import annotations

import datetime
import inspect
import socket
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from outlast.config.training import InProcessRestartConfig
from outlast.inprocess.leaving import describe, is_consequence
from outlast.runtime.addresses import listen_at

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

    The wrapper makes it, and passes it as the parameter of the function that is annotated with this class.

    Args:
        state: This rank's place in the call.
        interruption: Gets the main thread out of the call.
        page: Shows the call's progress.
        on_first_ping: Called once, by the first :meth:`ping`.
        kept: Objects that :meth:`keep` has kept so far; :meth:`keep` adds to it.
        config: The settings of the wrapper; ``None``: the defaults.

    Thread: the main thread; :meth:`ping` and :attr:`is_left` from any.
    """

    def __init__(
        self,
        state: State,
        *,
        interruption: SignalInterruption,
        page: Page,
        on_first_ping: Callable[[], None],
        kept: dict[str, Any],
        config: InProcessRestartConfig | None = None,
    ) -> None:
        self._state, self._interruption, self._page = state, interruption, page
        self._on_first_ping, self._kept = on_first_ping, kept
        self._has_pinged = False
        self._callbacks: list[Callable[[], None]] = []
        self._looks: list[Callable[[], None]] = []
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
