"""The worker's answer to an examiner: that its interpreter runs, how many collectives it has entered, and which one.

Ranks that wait in a collective are blocked in C with the GIL released, so a thread of theirs can answer. One
that cannot, though its process lives, holds the GIL or is stopped: evidence in itself. Questions come as
datagrams on an abstract unix socket, which leaves no file behind however the process ends. What the books of the
collectives say takes longer to find out, and may have to wait for the device: it follows in a second datagram.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from outlast.monitor import stacks
from outlast.monitor.collectives import count_collectives, read_books

__all__ = ["ANSWER", "QUESTION", "Responder", "address"]

log = logging.getLogger(__name__)

QUESTION = struct.Struct("<Q")
"""The question's number."""
ANSWER = struct.Struct("<QIq")
"""The question's number, the local rank, the number of collectives (-1 = not known); the second time the process's
:class:`~outlast.monitor.collectives.Books` follow it, as JSON."""


def address(token: int, local_rank: int) -> bytes:
    """Return where a rank of the board with this token answers."""
    return b"\0outlast-%016x-%d" % (token, local_rank)


class Responder:
    """A thread that answers examiners, and watches a child process on the side.

    It is a daemon thread, since a script need not close its monitor; it blocks in one poll and never spins.

    Args:
        token: The board's.
        local_rank: This rank.
        record: Called with every new count of collectives.
        child: A descriptor that becomes readable when a child ends (a pidfd); -1 = there is none.
        on_child_end: Called once, from the thread, when it does.

    Raises:
        OSError: Another process answers for this rank of this board already.
    """

    def __init__(
        self,
        token: int,
        local_rank: int,
        *,
        record: Callable[[int], None],
        child: int = -1,
        on_child_end: Callable[[], None] | None = None,
    ) -> None:
        self._local_rank = local_rank
        self._record = record
        self._child = child
        self._on_child_end = on_child_end
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(address(token, local_rank))
        except OSError:
            self._socket.close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="outlast-responder", daemon=True)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread. Blocks: up to ``timeout_s``."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._socket.close()
            os.close(self._wake)
            self._wake = -1

    def _run(self) -> None:
        try:
            poll = select.poll()
            for descriptor in (self._socket.fileno(), self._wake, self._child):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._wake in ready:
                    return
                if self._child in ready:
                    poll.unregister(self._child)
                    self._child = -1
                    if self._on_child_end is not None:
                        self._on_child_end()
                if self._socket.fileno() in ready:
                    self._answer()
        except Exception:
            log.exception("the thread that reports this rank's stacks failed: the cause of a hang may not be found")

    def _answer(self) -> None:
        try:
            question, sender = self._socket.recvfrom(QUESTION.size + 1)
            if len(question) != QUESTION.size or not sender:
                return
            count = count_collectives()
            self._record(count)
            answer = ANSWER.pack(*QUESTION.unpack(question), self._local_rank, count)
            self._socket.sendto(answer, sender)
            self._socket.sendto(answer + msgspec.json.encode(read_books(stacks.followed())), sender)
        except OSError as error:  # the examiner is gone, or its buffer is full
            log.debug("an examiner got no answer: %s", error)
