"""The full screen of ``outlast top``: repainted at each interval, key and resize.

The terminal is restored at every end (q, Ctrl-C, a signal that ends the process, an exception) and while Ctrl-Z stops
the process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outlast import clock

HINT = "q: end"
_QUIT = b"qQ\x03\x04\x1b"
"""Keys that end the view: q, and what Ctrl-C, Ctrl-D and Escape send where the terminal does not make them signals."""


class TopScreen:
    """Show lines in the whole terminal until a key ends it.

    Args:
        console: The terminal.
        paint: Returns the lines for a number of columns and rows; must not block.
        interval_s: Seconds between repaints.

    Thread: the main thread, for signals.
    """

    def __init__(self, console: Console, paint: Callable[[int, int], Sequence[Text]], *, interval_s: float) -> None:
        self._console, self._paint, self._interval_s = console, paint, interval_s
        self._has_to_stop = False
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Show the view until q is pressed.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        console = self._console
        with self._handling_signals():
            while True:
                with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
                    ended = self._show(console, live)
                if ended:
                    return
                self._has_to_stop = False
                os.kill(os.getpid(), signal.SIGSTOP)  # the terminal is restored; SIGCONT continues here

    def _show(self, console: Console, live: Live) -> bool:
        """Paint until a key ends the view (``True``) or the process must be stopped (``False``)."""
        keys = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        while True:
            width, height = console.size
            live.update(Group(*self._paint(width, height)), refresh=True)
            until_s = clock.now_s() + self._interval_s
            readable, _, _ = select.select([*keys, self._wake], [], [], max(0.0, until_s - clock.now_s()))
            if self._wake in readable:
                os.read(self._wake, 4096)
            if self._has_to_stop:
                return False
            if keys and keys[0] in readable:
                typed = os.read(keys[0], 64)
                if not typed:
                    keys = []  # the terminal is gone, or its input ended
                elif typed[:1] in (bytes([key]) for key in _QUIT) and len(typed) == 1:
                    return True

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Repaint on a resize, and leave the screen before the process is stopped."""

        def wake(number: int, _frame: FrameType | None) -> None:
            self._has_to_stop = self._has_to_stop or number == signal.SIGTSTP
            try:
                os.write(self._woken, b"!")
            except BlockingIOError:
                pass  # the pipe is full and wakes the loop all the same

        before = {number: signal.signal(number, wake) for number in (signal.SIGWINCH, signal.SIGTSTP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(self._woken)


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read each key as it is typed, without echo; Ctrl-C stays a signal."""
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
