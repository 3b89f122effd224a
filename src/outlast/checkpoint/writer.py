"""The writer process: holds staged shards, digests and writes them, copies them to other nodes, keeps the memory tier.

Started as ``python -m outlast.checkpoint.writer LISTENING_FD PARENT NODE`` for all workers of a node, by the agent of
``outlast run`` or by the node's agent process. It isolates training from the disk, the network and their errors, and
has its own GIL; what it holds outlives the workers, and ends with its parent. Each connection has a thread. It does not
import torch, so it starts in a fraction of a second and takes little memory.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from outlast import clock, logs
from outlast.checkpoint import protocol as f
from outlast.checkpoint.dcp.assemble import Assemble, assemble
from outlast.checkpoint.manifest import HoldingsError
from outlast.checkpoint.replica.client import CopyOutcome, ReplicaError, Replicator, fetch, read_small, rebuild
from outlast.checkpoint.replica.parity import blocks_of
from outlast.checkpoint.replica.server import ReplicaServer
from outlast.checkpoint.shard import Digested, Numbers, digest_image, write_image
from outlast.checkpoint.vault import Image, Vault
from outlast.errors import CheckpointError, Corrupt
from outlast.runtime.injection import reach
from outlast.runtime.listener import ThreadedListener
from outlast.runtime.processes import die_with_parent, ignore_group_signals
from outlast.runtime.wire import MessageChannel

log = logging.getLogger(__name__)
MAX_SMALL_BYTES = 1 << 27


class Calls:
    """Calls under way by directory, so that a hanging directory blocks one save and not all. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, list[tuple[int, int]]] = {}
        """Begin of each call, and when its caller stops waiting, by directory."""

    @contextlib.contextmanager
    def into(self, directory: str, limit_s: float) -> Iterator[None]:
        """Access a directory in the body. Raises: CheckpointError, while an earlier call exceeds its ``limit_s``."""
        now_ns = clock.now_ns()
        call = now_ns, now_ns + int(limit_s * 1e9)
        with self._lock:
            running = self._running.setdefault(directory, [])
            if stuck := [began_ns for began_ns, end_ns in running if end_ns < now_ns]:
                raise CheckpointError(
                    f"{directory} has not responded for {(now_ns - min(stuck)) / 1e9:.0f} s; nothing more is written "
                    "there until it does"
                )
            running.append(call)
        try:
            yield
        finally:
            with self._lock:
                running.remove(call)


class Writer:
    def __init__(self, vault: Vault) -> None:
        self._vault, self._calls = vault, Calls()
        self._lock = threading.Lock()
        self._secret: bytes | None = None
        self._server: ReplicaServer | None = None
        self._replicator: Replicator | None = None

    def serve(self, connection: socket.socket) -> None:
        with MessageChannel[f.Request](connection, f.Request, max_bytes=f.MAX_MESSAGE_BYTES) as channel:
            try:
                while (received := channel.receive_with_fds()) is not None:
                    request, fds = received
                    try:
                        reply, out = self._answer(request, fds[0] if fds else None)
                    finally:
                        for fd in fds:
                            os.close(fd)
                    try:
                        channel.send(reply, () if out is None else (out,))
                    finally:
                        if out is not None:
                            os.close(out)
            except ConnectionError:
                return  # the worker is gone

    def _answer(self, request: f.Request, fd: int | None) -> tuple[f.Reply, int | None]:
        try:
            match request:
                case f.PingWriter():
                    return f.Done(), None
                case f.Take():
                    image = self._vault.take(
                        request.rank,
                        request.num_bytes,
                        request.busy,
                        may_steal=request.may_steal,
                        num_behind=request.num_behind,
                    )
                    return f.Done(), None if image is None else os.dup(image.fd)
                case f.Write():
                    return self._write(request, _needed(fd)), None
                case f.PreparePart():
                    self._vault.prepare(request.key, request.manifest)
                case f.KeepPart():
                    self._vault.keep(request.key, in_memory=request.in_memory)
                case f.DropPart():
                    self._vault.drop(request.key)
                case f.Discard():
                    self._vault.discard(request.iteration, request.attempt)
                case f.List():
                    return f.Listed(checkpoints=self._vault.list()), None
                case f.Open():
                    found = self._vault.open(request.key)
                    return f.Done(), None if found is None else found[0]
                case f.Serve():
                    return f.Serving(port=self._serve_peers(request)), None
                case f.Fetch():
                    return self._fetch(request, _needed(fd)), None
                case f.GetPart():
                    data = read_small(
                        request.target,
                        self._key(),
                        request.key,
                        max_bytes=MAX_SMALL_BYTES,
                        timeout_s=request.timeout_s,
                    )
                    return f.GotPart(data=data), None
                case Assemble():
                    image = self._vault.image_of(_needed(fd))
                    into = self._calls.into(request.url, request.timeout_s)
                    with self._vault.reading(image) as whole, into:
                        return assemble(request, whole, digested=lambda: image.digested), None
            return f.Done(), None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            return f.WriterRefusal(error=f"{where}{error.strerror or error}"), None
        except (CheckpointError, HoldingsError, ReplicaError, MemoryError, ValueError) as error:
            return f.WriterRefusal(error=str(error) or type(error).__name__), None

    # -- shards ------------------------------------------------------------------------------------------------

    def _write(self, request: f.Write, fd: int) -> f.Written:
        reach("checkpoint.writer.write", iteration=request.key.iteration)
        image = self._vault.stage(fd, request.key, request.num_bytes)
        with (
            self._vault.reading(image) as whole,
            whole[: request.num_bytes] as data,
            ThreadPoolExecutor(1, thread_name_prefix="outlast-write") as pool,
        ):
            copying = pool.submit(self._replicate, request, image)
            try:
                digested = self._digest_and_write(request, data, image.digested)
                chunks, finite = digested.chunks, digested.finite
                image.digested = digested
            finally:
                outcomes = copying.result()
        failures = []
        for outcome, sent in zip(outcomes, _sent(request, chunks), strict=True):
            error = outcome.error
            if error is None and outcome.chunks != sent:
                error = f"node {outcome.node} received other bytes than rank {request.key.rank} sent"
            if error is not None:
                failures.append(msgspec.structs.replace(outcome, error=error, chunks=None))
        num_copies = len(outcomes) - len(failures)
        if request.holders:
            num_copies = 0 if failures else 1
        return f.Written(chunks=chunks, finite=finite, num_copies=num_copies, failures=tuple(failures))

    def _digest_and_write(self, request: f.Write, data: memoryview, known: Digested | None) -> Digested:
        """Return the digests, and whether all numbers are finite; ``known`` is another lane's result for the same
        shard.

        Raises: Corrupt, when the shard has changed since.
        """
        numbers, infinite = Numbers(request.numbers), threading.Event()

        def look(piece: memoryview, start: int) -> None:
            if not (infinite.is_set() or numbers.are_finite(piece, start)):
                infinite.set()

        if known is not None and known.num_bytes != len(data):
            known = None
        examine = look if known is None else None
        if request.path is None:
            chunks = digest_image(data, look=examine)
        else:
            path = Path(request.path)
            with self._calls.into(os.fspath(path.parent.parent), request.limit_s):
                path.parent.mkdir(parents=True, exist_ok=True)
                chunks = write_image(data, path, look=examine)
        if known is None:
            return Digested(len(data), chunks, not infinite.is_set())
        if changed := [index for index, chunk in enumerate(chunks) if known.chunks[index : index + 1] != (chunk,)]:
            raise Corrupt(
                f"chunk {changed[0]} of the staged copy has changed in memory since it was digested; it is not written"
            )
        return known

    def _replicate(self, request: f.Write, image: Image) -> tuple[CopyOutcome, ...]:
        with self._lock:
            replicator = self._replicator
        if replicator is None:
            targets = request.targets or tuple(holder.target for holder in request.holders)
            return tuple(CopyOutcome(target.node, None, "this writer has no key", True) for target in targets)
        takers = request.holders or request.targets
        return replicator.replicate(request.key, image.fd, request.num_bytes, takers, timeout_s=request.timeout_s)

    # -- other nodes -------------------------------------------------------------------------------------------

    def _serve_peers(self, request: f.Serve) -> int:
        """Listen for peers, with this key from now on; all workers of the node send the same request."""
        with self._lock:
            self._vault.use_folder(request.folder)
            if request.secret != self._secret:
                self._secret = request.secret
                if self._replicator is not None:
                    self._replicator.close()
                self._replicator = Replicator(request.secret)
            if self._server is not None and self._server.host != request.host:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = ReplicaServer(self._vault, host=request.host, key=request.secret, port=request.port)
            self._server.key = request.secret
            return self._server.port

    def _fetch(self, request: f.Fetch, fd: int) -> f.Fetched:
        key, num_bytes, timeout_s = request.key, request.num_bytes, request.timeout_s
        if request.members:
            chunks = rebuild(key, request.members, self._key(), fd, timeout_s=timeout_s)
        elif request.target is not None:
            chunks = fetch(request.target, self._key(), key, fd, num_bytes, timeout_s=timeout_s)
        else:
            raise HoldingsError("the fetch request has no source node")
        if chunks == request.chunks:  # otherwise it would be kept as the part
            self._vault.stage(fd, key, num_bytes)
        return f.Fetched(chunks=chunks)

    def _key(self) -> bytes:
        with self._lock:
            if self._secret is None:
                raise HoldingsError("this writer was given no key for its peers")
            return self._secret


def _needed(fd: int | None) -> int:
    if fd is None:
        raise HoldingsError("the request came without its memory")
    return fd


def _sent(request: f.Write, chunks: tuple[str, ...]) -> list[tuple[str, ...]]:
    if not request.holders:
        return [chunks for _ in request.targets]
    return [chunks[block.start : block.stop] for block in blocks_of(request.num_bytes, len(request.holders))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write and hold checkpoints for the workers of a node.")
    parser.add_argument("fd", type=int)
    parser.add_argument("parent", type=int)
    parser.add_argument("node", help="name of the node, for the log")
    args = parser.parse_args()
    ignore_group_signals()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file size limit is an error like a full disk
    die_with_parent(args.parent)
    logs.configure(f"checkpoint writer {args.node}", node=args.node)
    writer = Writer(Vault())
    # Without a free descriptor it waits for one: the memory tier ends with the process.
    ThreadedListener([socket.socket(fileno=args.fd)], writer.serve, name="the checkpoint writer").run()


if __name__ == "__main__":
    main()
