"""What the wrapped function is given: its place in the restarts, and what it can ask for."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outlast.config.in_process_restart import InProcessRestartConfig

if TYPE_CHECKING:
    from types import TracebackType

    from outlast.inprocess.interruption import Interruption
    from outlast.inprocess.page import Page
    from outlast.inprocess.state import State

__all__ = ["Handle", "current_handle", "handle_parameter", "set_current"]

_current: Handle | None = None


class _Atomic:
    __slots__ = ("_interruption", "_page")

    def __init__(self, interruption: Interruption, page: Page) -> None:
        self._interruption, self._page = interruption, page

    def __enter__(self) -> None:
        self._interruption.enter_atomic()
        self._page.enter_atomic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._page.leave_atomic()
        self._interruption.leave_atomic()


class _Unprotected:
    __slots__ = ("_page",)

    def __init__(self, page: Page) -> None:
        self._page = page

    def __enter__(self) -> None:
        self._page.pause()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._page.resume()


class Handle:
    """One call of the wrapped function; valid until that call has ended.

    A parameter of the function that is annotated with this class gets it.

    Thread: the main thread; :meth:`ping` and :attr:`is_left` from any.
    """

    def __init__(
        self,
        state: State,
        *,
        interruption: Interruption,
        page: Page,
        on_first_ping: Callable[[], None],
        kept: dict[str, Any],
        config: InProcessRestartConfig | None = None,
    ) -> None:
        self._state = state
        self._page = page
        self._on_first_ping = on_first_ping
        self._has_pinged = False
        self._interruption = interruption
        self._atomic = _Atomic(interruption, page)
        self._unprotected = _Unprotected(page)
        self._callbacks: list[Callable[[], None]] = []
        self._looks: list[Callable[[], None]] = []
        self._kept = kept
        self.config = config or InProcessRestartConfig()
        """The settings of the wrapper."""

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
        return self._interruption.is_left(self._state.iteration)

    def ping(self) -> None:
        """Say that the function makes progress.

        Without a ping any bytecode that the main thread runs counts as progress. Once there was one in a call, only
        pings do: a loop that spins in vain is noticed then.

        Thread: any.
        """
        self._page.stamp_progress()
        if not self._has_pinged:
            self._has_pinged = True
            self._on_first_ping()

    def atomic(self) -> _Atomic:
        """Return a context manager in which the function is not interrupted; may be nested.

        A restart that was ordered meanwhile begins at its end. The hard timeout still holds.
        """
        return self._atomic

    def begin_update(self) -> None:
        """Say that what training changes is not whole from here until :meth:`end_update`; may be called repeatedly.

        A restart that is ordered meanwhile waits for that up to a second, as without it the state would have to be
        loaded. Connections are cut all the same. :class:`Restore` does this by itself: from the first optimizer's step
        until ``note()``.
        """
        self._interruption.begin_update()

    def end_update(self) -> None:
        """Say that it is whole again. A restart that was ordered meanwhile begins here."""
        self._interruption.end_update()

    def disable_hang_protection(self) -> _Unprotected:
        """Return a context manager in which neither timeout holds; may be nested.

        Other ranks' faults still end the call.
        """
        return self._unprotected

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the object of this name that this process kept from an earlier call, else what ``make()`` returns.

        What is kept lives as long as the wrapper's call. Whether its content is of use after a restart is for the
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
        moment to ask what the device is done with. It is called on the monitor thread; the restart waits for it.
        """
        self._looks.append(look)

    def look_before_abort(self) -> None:
        """Call what :meth:`before_abort` was given. Thread: the monitor thread."""
        for look in list(self._looks):
            look()

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
