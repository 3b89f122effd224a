"""The writer process: digests an arena, writes it as a file, and makes it durable.

Started as ``python -m outlast.checkpoint.writer FD PARENT``, it shares nothing with the worker but the socket FD
and the arenas sent over it: the disk, its errors and its interpreter lock are none of training's business. It ends
when the worker does. It imports no torch, so that it starts in a fraction of a second and takes little memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import socket
from pathlib import Path

from outlast.checkpoint.finite import is_finite
from outlast.checkpoint.frames import Reply, Request, receive_request, send_reply
from outlast.checkpoint.shard import CHUNK_BYTES, digest
from outlast.runtime.processes import die_with_parent

__all__ = ["main", "serve", "write_shard"]


def write_shard(request: Request, fd: int, *, die_halfway: bool = False, wait_for: str | None = None) -> Reply:
    """Write one arena into its file and make it durable; errors of the disk are the reply's.

    A file that cannot be finished is deleted: on a full disk its room is what the next save needs.

    Args:
        request: What and where.
        fd: The arena.
        die_halfway: For fault injection: end this process by SIGKILL with half of the file written.
        wait_for: For fault injection: a FIFO; wait until somebody opens it for writing.
    """
    try:
        if wait_for is not None:
            os.close(os.open(wait_for, os.O_RDONLY | os.O_CLOEXEC))
        path = Path(request.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        chunks = []
        with mmap.mmap(fd, request.num_bytes, prot=mmap.PROT_READ) as image, memoryview(image) as view:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                for start in range(0, request.num_bytes, CHUNK_BYTES):
                    with view[start : start + CHUNK_BYTES] as chunk:
                        chunks.append(digest(chunk))
                        _write_all(target, chunk)
                    if die_halfway and start + CHUNK_BYTES >= request.num_bytes // 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                os.fsync(target)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(target)
            finite = all(is_finite(view[offset : offset + size], dtype) for dtype, offset, size in request.numbers)
        return Reply(chunks=tuple(chunks), finite=finite)
    except OSError as error:
        return Reply(error=f"{request.path}: {error.strerror or error}")


def _write_all(fd: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        with data[written:] as rest:
            written += os.write(fd, rest)


def serve(connection: socket.socket, *, die_at: str | None = None, wait_for: str | None = None) -> None:
    """Serve requests until the worker is gone."""
    while (received := receive_request(connection)) is not None:
        request, fd = received
        try:
            reply = write_shard(request, fd, die_halfway=die_at == "data", wait_for=wait_for)
        finally:
            os.close(fd)
        send_reply(connection, reply)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write checkpoints for a worker.")
    parser.add_argument("fd", type=int)
    parser.add_argument("parent", type=int)
    parser.add_argument("--die-at", choices=["data"], help="end by SIGKILL halfway through a file")
    parser.add_argument("--wait-for", help="begin to write when somebody opens this FIFO for writing")
    args = parser.parse_args()
    # Signals to the whole process group are for the worker to act on: it may still need this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file size limit is an error like a full disk
    die_with_parent(args.parent)
    with socket.socket(fileno=args.fd) as connection:
        try:
            serve(connection, die_at=args.die_at, wait_for=args.wait_for)
        except ConnectionError:
            return  # the worker is gone


if __name__ == "__main__":
    main()
