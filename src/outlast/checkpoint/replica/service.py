"""The requests of an authenticated peer of a node's writer: take a part or a parity block, and return parts.

Work at a disk runs in threads, so that a peer gets heartbeats while a disk does not respond. Nothing here imports
torch.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

from outlast import clock
from outlast.checkpoint.manifest import CopyKey, Holdings, HoldingsError, Incoming
from outlast.checkpoint.replica.parity import Block, Parities, write_all
from outlast.checkpoint.replica.protocol import (
    MAX_PLACE_CHARS,
    SLICE_BYTES,
    Chunk,
    Data,
    Get,
    Keep,
    Kept,
    Ping,
    Proceed,
    Put,
    ReplicaChannel,
    Working,
)
from outlast.checkpoint.shard import CHUNK_BYTES
from outlast.runtime.files import begin
from outlast.runtime.wire import ProtocolError

WORKING_S = 1.0
"""Seconds after which a peer that waits for a disk gets a :class:`Working`."""
MAX_WORK_S = 120.0
HUNG_S = 10.0
"""Seconds of one piece of disk work after which no other part is taken until it ends."""
T = TypeVar("T")


class DiskWork:
    """Disk work of a node that has not ended. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s: dict[int, float] = {}
        self._numbers = itertools.count()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Run work in a thread; return its outcome."""
        number = next(self._numbers)
        with self._lock:
            self._since_s[number] = clock.now_s()

        def run() -> T:
            try:
                return work()
            finally:
                with self._lock:
                    del self._since_s[number]

        return begin(run)

    def hung_s(self) -> float | None:
        """Return the duration of the oldest work; ``None``: none has taken :data:`HUNG_S`."""
        with self._lock:
            oldest_s = min(self._since_s.values(), default=None)
        if oldest_s is None or (passed_s := clock.now_s() - oldest_s) < HUNG_S:
            return None
        return passed_s


def drop_later(begun: Future[Incoming | Block]) -> None:
    def drop(done: Future[Incoming | Block]) -> None:
        if done.exception() is None:
            done.result().drop()

    begun.add_done_callback(drop)


class Service:
    def __init__(self, channel: ReplicaChannel, holdings: Holdings, parities: Parities, disk_work: DiskWork) -> None:
        self._channel, self._holdings, self._parities = channel, holdings, parities
        self._disk_work = disk_work
        self._scratch = memoryview(bytearray(SLICE_BYTES))
        self._open: tuple[CopyKey, int, int] | None = None

    def run(self) -> None:
        """Serve requests until the peer closes the connection.

        Raises:
            ConnectionError, TimeoutError: The connection broke, or nothing moved for too long.
            ProtocolError: The peer sent an invalid request.
        """
        try:
            while (request := self._channel.receive()) is not None:
                match request:
                    case Ping() | Put() if (hung_s := self._disk_work.hung_s()) is not None:
                        self._channel.refuse(f"{self._place} has not responded for {hung_s:.0f} s; it takes no replica")
                    case Ping():
                        self._channel.send(Proceed())
                    case Put():
                        self._put(request)
                    case Get():
                        self._get(request)
                    case _:
                        raise ProtocolError(f"it sent a {type(request).__name__} as a request")
        finally:
            self._close_part()

    # -- taking in ---------------------------------------------------------------------------------------------

    def _put(self, request: Put) -> None:
        try:
            part = self.run_patiently(lambda: self._begin(request), drop_later)
        except (ConnectionError, TimeoutError):
            raise
        except (HoldingsError, OSError) as error:
            self._channel.refuse(error)
            return
        received, is_ours = 0, True

        def leave(kept: Future[None]) -> None:
            nonlocal is_ours
            is_ours = False
            kept.add_done_callback(lambda _: part.drop())

        def write(piece: memoryview, offset: int) -> None:
            nonlocal received
            received = start + offset + len(piece)
            if isinstance(part, Block):
                part.write(piece, start + offset)
            else:
                write_all(part.fd, piece, start + offset)

        try:
            self._channel.send(Proceed())
            for start in range(0, request.num_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, request.num_bytes - start)
                self._channel.send(Chunk(self._channel.receive_chunk(size, self._scratch, write)))
            if not isinstance(self._channel.receive(), Keep):
                raise ConnectionResetError("it left before the end")
            self.run_patiently(part.keep, leave)
            self._channel.send(Kept())
        except HoldingsError as error:
            self._give_up(str(error), request.num_bytes - received)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            self._give_up(f"it cannot be written: {error.strerror}", request.num_bytes - received)
        finally:
            if is_ours:
                part.drop()

    def _begin(self, request: Put) -> Incoming | Block:
        if request.contributor >= 0:
            return self._parities.begin(request.key, request.contributor, request.num_contributors)
        return self._holdings.receive(request.key, request.num_bytes)

    def _give_up(self, error: str, num_bytes: int) -> None:
        """Report an error to the peer, and discard its data until it has read the report."""
        self._channel.refuse(error)
        while num_bytes > 0:
            piece = self._scratch[: min(SLICE_BYTES, num_bytes)]
            self._channel.receive_into(piece)
            num_bytes -= len(piece)

    def run_patiently(self, work: Callable[[], T], leave: Callable[[Future[T]], None]) -> T:
        """Do work that may take a disk long, and send the peer :class:`Working` meanwhile, up to ``MAX_WORK_S``.

        Args:
            leave: Called with unfinished work that is no longer waited for.

        Raises:
            ConnectionError: The peer closed the connection.
            TimeoutError: The disk does not respond.
        """
        future = self._disk_work.begin(work)
        try:
            for _ in range(round(MAX_WORK_S / WORKING_S)):
                try:
                    return future.result(WORKING_S)
                except NotYet:
                    if future.done():
                        raise
                    self._channel.send(Working(self._place))
        except (ConnectionError, TimeoutError):
            if not future.done():
                leave(future)
            raise
        leave(future)
        raise TimeoutError(f"the disk has not responded for {MAX_WORK_S:g} s")

    @property
    def _place(self) -> str:
        return self._holdings.place[:MAX_PLACE_CHARS]

    # -- giving out --------------------------------------------------------------------------------------------

    def _get(self, request: Get) -> None:
        if self._open is None or self._open[0] != request.key:
            self._close_part()
            try:
                found = self._holdings.open(request.key)
            except (HoldingsError, OSError) as error:
                self._channel.refuse(error)
                return
            if found is None:
                self._channel.refuse(f"it does not hold {request.key}")
                return
            self._open = request.key, *found
        elif not self._holdings.is_unchanged(request.key, self._open[1]):
            self._close_part()
            self._channel.refuse(f"its memory of {request.key} serves a newer save")
            return
        _, fd, total = self._open
        num_bytes = max(0, min(request.num_bytes, total - request.offset))
        self._channel.send(Data(num_bytes, total))
        self._channel.send_file(fd, request.offset, num_bytes)

    def _close_part(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None
