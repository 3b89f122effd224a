"""What a writer does for a peer that has authenticated: takes parts in, and gives parts out.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Protocol, TypeVar

from outlast.checkpoint.manifest import CopyKey, Holdings, HoldingsError, Incoming
from outlast.checkpoint.replica.channel import SLICE_BYTES, Channel
from outlast.checkpoint.replica.client import describe
from outlast.checkpoint.replica.frames import (
    Chunk,
    Data,
    Failed,
    FrameError,
    Get,
    Keep,
    Kept,
    Message,
    Ping,
    Put,
    Ready,
    Working,
)
from outlast.checkpoint.replica.parity import Parities, write_all
from outlast.checkpoint.shard import CHUNK_BYTES

__all__ = ["Service"]

WORKING_S = 1.0
"""Seconds after which a peer that waits for a disk hears that it is being worked at."""
MAX_WORK_S = 120.0
T = TypeVar("T")


class _Sink(Protocol):
    """Where a part's bytes go."""

    def write(self, piece: memoryview, offset: int) -> None: ...
    def keep(self) -> None: ...
    def drop(self) -> None: ...


class _Whole:
    """A part that is stored as it comes."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        self.keep, self.drop = incoming.keep, incoming.drop

    def write(self, piece: memoryview, offset: int) -> None:
        write_all(self._incoming.fd, piece, offset)


class Service:
    """Serve one connection.

    Args:
        channel: Authenticated; its user closes it.
        holdings: What this node keeps.
        parities: The parities that it is making.

    Thread: one.
    """

    def __init__(self, channel: Channel, holdings: Holdings, parities: Parities) -> None:
        self._channel, self._holdings, self._parities = channel, holdings, parities
        self._scratch = memoryview(bytearray(SLICE_BYTES))
        self._open: tuple[CopyKey, int, int] | None = None

    def run(self) -> None:
        """Answer requests until the peer leaves.

        Raises:
            ConnectionError, TimeoutError: The peer broke off, or nothing moved for too long.
            FrameError: It sent what is none of ours.
        """
        try:
            while (request := self._channel.receive()) is not None:
                self._answer(request)
        finally:
            self._close_part()

    def _answer(self, request: Message) -> None:
        match request:
            case Ping():
                self._channel.send(Ready())
            case Put():
                self._put(request)
            case Get():
                self._get(request)
            case _:
                raise FrameError(f"it sent a {type(request).__name__} as a request")

    # -- taking in ---------------------------------------------------------------------------------------------

    def _put(self, request: Put) -> None:
        made: list[_Sink] = []
        try:
            self._patiently(lambda: made.append(self._sink(request)))
        except (ConnectionError, TimeoutError):
            for late in made:
                late.drop()
            raise
        except (HoldingsError, OSError) as error:
            self._channel.send(Failed(str(error)))
            return
        sink = made[0]
        received = 0

        def write(piece: memoryview, offset: int) -> None:
            nonlocal received
            received = start + offset + len(piece)
            sink.write(piece, start + offset)

        try:
            self._channel.send(Ready())
            for start in range(0, request.num_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, request.num_bytes - start)
                self._channel.send(Chunk(self._channel.receive_pieces(size, self._scratch, write)))
            if not isinstance(self._channel.receive(), Keep):
                raise ConnectionResetError("it left before the end")
            self._patiently(sink.keep)
            self._channel.send(Kept())
        except HoldingsError as error:
            self._give_up(str(error), request.num_bytes - received)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            self._give_up(f"it cannot be written: {error.strerror}", request.num_bytes - received)
        finally:
            sink.drop()

    def _sink(self, request: Put) -> _Sink:
        if request.contributor >= 0:
            return self._parities.begin(request.key, request.contributor, request.num_contributors)
        return _Whole(self._holdings.receive(request.key, request.num_bytes))

    def _give_up(self, error: str, num_bytes: int) -> None:
        """Tell the peer, and take what it sends until it has heard of it."""
        self._channel.send(Failed(error))
        while num_bytes > 0:
            piece = self._scratch[: min(SLICE_BYTES, num_bytes)]
            self._channel.receive_into(piece)
            num_bytes -= len(piece)

    def _patiently(self, work: Callable[[], T]) -> T:
        """Do what may take a disk long, and let the peer know meanwhile that it goes on, up to ``MAX_WORK_S``."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed over to the thread that waits
                future.set_exception(error)

        worker = threading.Thread(target=run, name="outlast-replica-disk", daemon=True)
        worker.start()
        try:
            for _ in range(round(MAX_WORK_S / WORKING_S)):
                try:
                    return future.result(WORKING_S)
                except NotYet:
                    if future.done():
                        raise
                    self._channel.send(Working())
            return future.result()  # the peer's own timeout decides
        finally:
            worker.join()

    # -- giving out --------------------------------------------------------------------------------------------

    def _get(self, request: Get) -> None:
        if self._open is None or self._open[0] != request.key:
            self._close_part()
            try:
                found = self._holdings.open(request.key)
            except (HoldingsError, OSError) as error:
                self._channel.send(Failed(str(error)))
                return
            if found is None:
                self._channel.send(Failed(f"it does not hold {describe(request.key)}"))
                return
            self._open = request.key, *found
        elif not self._holdings.is_unchanged(request.key, self._open[1]):
            self._close_part()
            self._channel.send(Failed(f"its memory of {describe(request.key)} serves a newer save"))
            return
        _, fd, total = self._open
        num_bytes = max(0, min(request.num_bytes, total - request.offset))
        self._channel.send(Data(num_bytes, total))
        self._channel.send_file(fd, request.offset, num_bytes)

    def _close_part(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None
