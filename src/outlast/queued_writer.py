"""A thread that writes lines, so that a blocked disk, terminal or pipe does not block callers.

A caller waits until its line is written, which keeps the order with the caller's next action. Once a write has blocked
a caller for too long, no caller waits until that write returns: lines queue in memory, and lines beyond the queue's
limit are counted. :class:`StreamWriter` serves the output of a process; the journal has its own subclass.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import TextIO

from outlast.wording import count

_IDLE_S = 1.0
FLUSH_S = 2.0
"""Seconds that an ending process waits for its output to be written."""
_PATIENCE_S = 0.2
"""Seconds that the first log line that a terminal or pipe does not accept blocks its caller."""
_ROOM_S = 5.0
"""Seconds that forwarded output waits for room; after that lines are dropped until a write succeeds."""
_MAX_LINES, _MAX_BYTES = 8192, 4 << 20


class QueuedWriter:
    """The queue, and the thread that writes while the queue is not empty.

    A subclass has :meth:`_put`, :meth:`_lose` and :meth:`_free`.

    Args:
        name: Name of the thread.
        patience_s: Seconds that the first blocked line blocks its caller.
        max_lines: Limit of queued lines; further ones are lost.
        max_bytes: Limit of queued bytes.

    Thread: any; lines of several threads do not mix. A forked child may write, too.
    """

    def __init__(self, name: str, *, patience_s: float, max_lines: int, max_bytes: int = 1 << 62) -> None:
        self._name, self._patience_s, self._max_lines, self._max_bytes = name, patience_s, max_lines, max_bytes
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        """Start with an empty queue and no thread: a forked child inherits no thread."""
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._num_bytes = self._num_queued = self._num_done = 0
        self._is_stuck = False
        """A caller's wait for the line that is being written has timed out."""
        self._thread: threading.Thread | None = None

    def append(self, line: bytes, patience_s: float | None = None, *, room_s: float = 0.0) -> bool:
        """Write a line, or queue the line if writing blocks.

        Args:
            line: The line.
            patience_s: Seconds to wait until the line is written; ``None`` = the writer's default.
            room_s: Seconds to wait for room in the queue.

        Returns:
            ``False`` if this call's wait was the first to time out.
        """
        if self._owner != os.getpid():
            self._begin()
        with self._changed:
            if self._is_closed:
                return True
            if room_s and not self._has_room() and not self._is_stuck:
                self._is_stuck = not self._changed.wait_for(self._has_room, room_s)
            if not self._has_room():
                self._lose(line, "it takes nothing, and the queue is full")
                return True
            self._lines.append(line)
            self._num_bytes += len(line)
            self._num_queued += 1
            number = self._num_queued
            if self._thread is None:
                self._start()
            else:
                self._changed.notify_all()
            wait_s = 0.0 if self._is_stuck else self._patience_s if patience_s is None else patience_s
            if not wait_s or self._changed.wait_for(lambda: self._num_done >= number, wait_s) or self._is_stuck:
                return True
            self._is_stuck = True
        return False

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until everything is written. Blocks: up to ``timeout_s``."""
        if self._owner == os.getpid():
            with self._changed:
                self._changed.wait_for(lambda: not self._lines, timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Write the queued lines; later lines are dropped. Idempotent.

        Returns:
            Whether everything is written.

        Blocks: up to ``timeout_s``.
        """
        if self._owner != os.getpid():
            self._begin()
        with self._changed:
            if self._is_closed:
                return True
            self._is_closed = True
            thread = self._thread
            if thread is None:
                self._free()
                return True
            self._changed.notify_all()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _has_room(self) -> bool:
        return len(self._lines) < self._max_lines and self._num_bytes < self._max_bytes

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, args=(_IDLE_S,), name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or no thread can be started
            self._serve(0.0)

    def _serve(self, idle_s: float) -> None:
        """Write queued lines; end when no line came for ``idle_s``, or the writer is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closed, idle_s)
                if not self._lines:
                    self._thread = None
                    if self._is_closed:
                        self._free()
                    return
                line = self._lines[0]
            try:
                self._put(line)
            except Exception as error:  # noqa: BLE001  the next line may succeed
                self._lose(line, f"{type(error).__name__}: {error}")
            with self._changed:
                self._lines.popleft()
                self._num_bytes -= len(line)
                self._num_done += 1
                self._is_stuck = False
                self._changed.notify_all()

    def _put(self, line: bytes) -> None:
        """Write one line. Blocks: on the output."""
        raise NotImplementedError

    def _lose(self, line: bytes, problem: str) -> None:
        """Count a line that is not written."""
        raise NotImplementedError

    def _free(self) -> None:
        """Release the output; called once, when the writer is closed."""


class StreamWriter(QueuedWriter):
    """Write to a terminal, a pipe or a file of this process that may block for a while.

    Lines that find no room, or cannot be written, are counted; once writing succeeds and the queue is empty, one line
    reports their number.

    Args:
        fd: The descriptor; the caller keeps ownership.
        encoding: Encoding of text.
    """

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        super().__init__("outlast-output", patience_s=_PATIENCE_S, max_lines=_MAX_LINES, max_bytes=_MAX_BYTES)
        self._fd, self._encoding = fd, encoding
        self.num_dropped = 0
        """Dropped lines that the output does not report yet."""

    def log(self, text: str) -> None:
        """Write log lines. Blocks: 0.2 s at most, and only the first time that writing blocks."""
        self.append(text.encode(self._encoding, errors="backslashreplace"))

    def write(self, text: str) -> None:
        """Write forwarded output, which can wait in its source. Blocks: 5 s at most, once, while there is no room."""
        self.append(text.encode(self._encoding, errors="backslashreplace"), 0.0, room_s=_ROOM_S)

    def _put(self, line: bytes) -> None:
        self._write(line)
        if self.num_dropped and len(self._lines) == 1:
            num, self.num_dropped = self.num_dropped, 0
            text = f"outlast: {count(num, 'line')} of output dropped, as nothing took this output\n"
            try:
                self._write(text.encode())
            except OSError:
                self.num_dropped += num

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process that shares the terminal made it non-blocking
                waiting = select.poll()
                waiting.register(self._fd, select.POLLOUT)
                waiting.poll()

    def _lose(self, line: bytes, problem: str) -> None:
        self.num_dropped += max(1, line.count(b"\n"))


_streams: dict[int, StreamWriter] = {}


def writer_of(stream: TextIO) -> StreamWriter | None:
    """Return the single writer of a stream's descriptor; ``None`` = the stream has no descriptor."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or in memory
        return None
    return _streams.setdefault(fd, StreamWriter(fd, stream.encoding or "utf-8"))
