"""One call of the wrapped function: its handle, and the TCPStore of its ranks.

Rank 0 of each call hosts a TCPStore for it. Every rank that may become rank 0 binds a socket beforehand and reports its
address; rank 0 passes its socket to the store. So the address is known before the call begins, and no other process can
take the port. :mod:`outlast.inprocess.leaving` cleans up after a call.
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
    """A part of the function, as a context manager; may be nested."""

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
        interruption: Interrupts the main thread in the call.
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
        """The function's error, and whether another rank's fault caused it; ``None``: none was recorded."""
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
        """Whether this call has ended or has to be left, which explains any failure. Thread: any."""
        return not self._interruption.is_in(self._state.iteration)

    def ping(self) -> None:
        """Record that the function makes progress.

        Before the first ping of a call any bytecode that the main thread runs counts as progress; afterwards only pings
        do, so that a loop without progress is detected.

        Thread: any.
        """
        self._page.stamp_progress()
        if not self._has_pinged:
            self._has_pinged = True
            self._on_first_ping()

    def note_iteration(self, iteration: int) -> None:
        """Record the number of optimizer steps done, which bounds restarts without progress.

        A session and :class:`~outlast.inprocess.Restore` call it. Consecutive restarts of which none exceeds the
        highest iteration before end with ``RestartAbort`` (``max_no_progress_restarts``).
        """
        self.reached = max(self.reached, iteration)

    def atomic(self) -> AbstractContextManager[None]:
        """Return a context manager in which the function is not interrupted; may be nested.

        A restart that was ordered meanwhile begins at its end. The hard timeout still applies.
        """
        return _ScopedPart(self._interruption.enter_atomic, self._interruption.leave_atomic)

    def begin_update(self) -> None:
        """Record that the training state is incomplete until :meth:`end_update`; may be called repeatedly.

        A restart that is ordered meanwhile waits up to a second, since otherwise the state would have to be loaded.
        Connections are cut at once. :class:`Restore` calls it at the first optimizer step and ends the update in
        ``note()``.
        """
        self._interruption.begin_update()

    def end_update(self) -> None:
        """Record that the training state is complete. A restart that was ordered meanwhile begins here."""
        self._interruption.end_update()

    def disable_hang_protection(self) -> AbstractContextManager[None]:
        """Return a context manager in which neither timeout applies; may be nested.

        Other ranks' faults still end the call.
        """
        return _ScopedPart(self._page.pause, self._page.resume)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the object of this name that this process kept from an earlier call, else ``make()``.

        Objects live as long as the wrapper's call. The caller has to know whether an object is usable after a restart:
        the function may have been interrupted while it changed the object.
        """
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end of this call, however it ends; the last one given is called first.

        It is called on the main thread, before the ``finalize`` plug-in and before process groups are destroyed; their
        connections are cut already. It must not wait for other ranks.
        """
        self._callbacks.append(callback)

    def before_abort(self, look: Callable[[], None]) -> None:
        """Register a callback for the moment before collectives that are under way are aborted.

        An aborted collective leaves garbage, and so does a device that computes from it: this is the last moment to
        query what the device has finished. It is called on the monitor thread, or on the main thread of a rank that
        leaves by itself; the restart waits for it.
        """
        self._looks.append(look)

    def look_before_abort(self) -> None:
        """Call the callbacks of :meth:`before_abort`; once in a call."""
        for look in list(self._looks):
            look()

    def note_failure(self, error: Exception) -> None:
        """Record the error with which the function is about to fail.

        While it frees its objects, its peers may detect that, and the order to leave replaces the exception. An
        exception after that order is not recorded.
        """
        if self.failure is None and not self.is_left:
            self.failure = describe(error), is_consequence(error)

    def take_callbacks(self) -> list[Callable[[], None]]:
        callbacks, self._callbacks = self._callbacks[::-1], []
        return callbacks


def current_handle() -> Handle | None:
    """Return the handle of the call that the main thread is in; ``None`` outside of a wrapped function."""
    return _current


def set_current(handle: Handle | None) -> None:
    global _current
    _current = handle


def handle_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the parameter that is annotated :class:`Handle`, also as text; ``None``: no parameter is."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    try:
        hints = typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # noqa: BLE001 - another annotation cannot be resolved now
        hints = {}
    for name, parameter in parameters.items():
        annotation = hints.get(name, parameter.annotation)
        if annotation is Handle or Handle in typing.get_args(annotation):
            return name
        if isinstance(annotation, str) and annotation.split("|")[0].strip().strip("'\"").split(".")[-1] == "Handle":
            return name
    return None


class CallStore:
    """A bound socket that may become a call's TCPStore.

    Args:
        host: Address of this machine for the other ranks.
    """

    def __init__(self, host: str) -> None:
        self._listener: socket.socket | None = listen_at(host, backlog=2048)
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self.address = f"{host} {self._port}"
        """``host port``."""
        self._store: Any = None

    def serve(self, *, timeout_s: float) -> None:
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
