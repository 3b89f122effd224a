"""One of the two processes of ``outlast bench replica``: rank 0 holds a shard, rank 1 gets it."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import secrets
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from outlast.bench.measuring import timed
from outlast.bench.state_size import TENSOR_BYTES
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import Target, fetch, fetch_into, push
from outlast.checkpoint.replica.server import ReplicaServer
from outlast.checkpoint.shard import CHUNK_BYTES, digest, num_chunks

__all__ = ["main"]

COPY = CopyKey(1, "bench", 0)
TIMEOUT_S = 60.0


class _OnePart:
    """Holdings of one part, in the memory that gloo sends from; what is received is thrown away."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd, self._num_bytes = fd, num_bytes

    def receive(self, key: CopyKey, num_bytes: int) -> _Thrown:
        return _Thrown(num_bytes)

    def open(self, key: CopyKey) -> tuple[int, int]:
        return os.dup(self._fd), self._num_bytes

    def is_unchanged(self, key: CopyKey, fd: int) -> bool:
        return True


class _Thrown:
    """Memory for a part, until it has been received."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = _memory(num_bytes)

    def keep(self) -> None:
        self.drop()

    def drop(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold a shard (rank 0), or get it (rank 1).")
    parser.add_argument("store")
    parser.add_argument("rounds", type=int)
    parser.add_argument("tensors", type=int)
    parser.add_argument("rank", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.store}",
        rank=args.rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    num_bytes = args.tensors * TENSOR_BYTES
    fd = _memory(num_bytes)
    mapped = mmap.mmap(fd, num_bytes)
    view = memoryview(mapped)
    tensors = [
        torch.frombuffer(mapped, dtype=torch.float32, count=TENSOR_BYTES // 4, offset=number * TENSOR_BYTES)
        for number in range(args.tensors)
    ]
    for number, tensor in enumerate(tensors):
        tensor.normal_(generator=torch.Generator().manual_seed(number + 1000 * args.rank))
    if args.rank == 0:
        _hold(fd, tensors, args.rounds)
    else:
        _get(fd, view, tensors, args.rounds)
    dist.barrier()
    dist.destroy_process_group()


def _hold(fd: int, tensors: list[torch.Tensor], rounds: int) -> None:
    key = secrets.token_bytes(32)
    server = ReplicaServer(
        _OnePart(fd, len(tensors) * TENSOR_BYTES), host="127.0.0.1", key=lambda: key, on_refused=_refused
    )
    dist.broadcast_object_list([server.port, key], src=0)
    for _ in range(rounds):
        dist.barrier()
        for tensor in tensors:
            dist.send(tensor, dst=1)
        dist.barrier()  # rank 1 has fetched
    server.close()


def _get(fd: int, view: memoryview, tensors: list[torch.Tensor], rounds: int) -> None:
    told: list[object] = [None, None]
    dist.broadcast_object_list(told, src=0)
    port, key = told
    assert isinstance(port, int), "rank 0 sends the port first"
    assert isinstance(key, bytes), "rank 0 sends the key second"
    target = Target("bench", "127.0.0.1", port)

    def receive() -> None:
        for tensor in tensors:
            dist.recv(tensor, src=0)

    num_bytes = len(view)
    all_chunks = range(num_chunks(num_bytes))
    print(json.dumps({"num_bytes": num_bytes}), flush=True)
    for _ in range(rounds):
        dist.barrier()
        found = {"gloo": timed(receive)[0]}
        right = tuple(digest(view[start : start + CHUNK_BYTES]) for start in range(0, num_bytes, CHUNK_BYTES))
        for tensor in tensors:
            tensor.zero_()  # what is found right below was fetched
        ways: dict[str, Callable[[], tuple[str, ...]]] = {
            "warm": lambda: fetch_into(target, key, COPY, view, timeout_s=TIMEOUT_S),
            "fresh": lambda: fetch(target, key, COPY, fd, num_bytes, timeout_s=TIMEOUT_S),
            "push": lambda: push(target, key, COPY, fd, all_chunks, num_bytes, timeout_s=TIMEOUT_S),
        }
        for name, way in ways.items():
            found[name], digests = timed(way)
            if digests != right:
                raise SystemExit(f"{name}: what was received is not what gloo received")
        print(json.dumps(found), flush=True)
        dist.barrier()


def _memory(num_bytes: int) -> int:
    fd = os.memfd_create("outlast-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def _refused(source: str, reason: str) -> None:
    raise SystemExit(f"{source} was refused: {reason}")


if __name__ == "__main__":
    main()
