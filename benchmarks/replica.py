"""Benchmark ``replica``: the cost of fetching a shard from another node's writer, every byte digested."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.checkpoint_state import NUM_TENSORS, TENSOR_BYTES
from benchmarks.measuring import GROUP_TIMEOUT_S, Progress, measure_rounds, process_group, timed
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import Target, fetch, fetch_into, push
from outlast.checkpoint.replica.server import ReplicaServer
from outlast.checkpoint.shard import CHUNK_BYTES, digest, num_chunks
from outlast.simulate.benchmark_results import BenchResult

_TIMEOUT_S = 300.0
_COPY = CopyKey(1, "bench", 0)


def measure(*, repeats: int, progress: Progress, num_tensors: int = NUM_TENSORS) -> BenchResult:
    """Measure between two processes of this machine, compared with gloo's send and recv of the same bytes.

    The shard has ``num_tensors`` tensors of 16 MiB.

    Raises:
        OutlastError: A process failed.

    Blocks: about two seconds a round, five minutes at most.
    """
    progress(f"gloo and replica in turns, {repeats} rounds and one that is dropped")
    rounds = measure_rounds(
        measure_transfers, num_tensors, repeats=repeats, progress=progress, timeout_s=_TIMEOUT_S, num_ranks=2
    )
    num_bytes = num_tensors * TENSOR_BYTES
    speeds = {name: f"{num_bytes / rounds[name] / 1e9:.2f} GB/s" for name in ("gloo", "warm", "fresh", "push")}
    bar = 1.11  # of the time: at least 0.9 of the throughput
    return BenchResult(
        "replica",
        [rounds.ratio_bar("replica_vs_gloo", "warm", "gloo", bar, "gloo send/recv, not verified")],
        (
            f"{num_bytes / 2**20:.0f} MiB over loopback: gloo {speeds['gloo']}; fetched and digested into mapped "
            f"memory {speeds['warm']}, into a memfd that has yet to be mapped {speeds['fresh']}",
            f"given to the other writer, which digests it into new memory: {speeds['push']}",
        ),
    )


def measure_transfers(num_rounds: str, num_tensors: str) -> Iterator[dict[str, float]]:
    """Fetch rank 1's shard in rank 0; yield seconds by name. Collective: both ranks."""
    with process_group():
        num_bytes = int(num_tensors) * TENSOR_BYTES
        fd = _memory(num_bytes)
        mapped = mmap.mmap(fd, num_bytes)
        tensors = [
            torch.frombuffer(mapped, dtype=torch.float32, count=TENSOR_BYTES // 4, offset=start)
            for start in range(0, num_bytes, TENSOR_BYTES)
        ]
        for number, tensor in enumerate(tensors):
            tensor.normal_(generator=torch.Generator().manual_seed(number + 1000 * dist.get_rank()))
        if dist.get_rank() == 1:
            _hold(fd, tensors, int(num_rounds))
        else:
            yield from _get(fd, memoryview(mapped), tensors, int(num_rounds))


def _hold(fd: int, tensors: list[torch.Tensor], rounds: int) -> None:
    key = secrets.token_bytes(32)
    server = ReplicaServer(_OnePart(fd, len(tensors) * TENSOR_BYTES), host="127.0.0.1", key=key, on_refused=_refused)
    dist.broadcast_object_list([server.port, key], src=1)
    for _ in range(rounds):
        dist.barrier()
        for tensor in tensors:
            dist.send(tensor, dst=0)
        dist.barrier()  # rank 0 has fetched
    server.close()


def _get(fd: int, view: memoryview, tensors: list[torch.Tensor], rounds: int) -> Iterator[dict[str, float]]:
    received: list[object] = [None, None]
    dist.broadcast_object_list(received, src=1)
    port, key = received
    assert isinstance(port, int), "rank 1 sends the port first"
    assert isinstance(key, bytes), "rank 1 sends the key second"
    target = Target("bench", "127.0.0.1", port)

    def receive() -> None:
        for tensor in tensors:
            dist.recv(tensor, src=1)

    num_bytes = len(view)
    all_chunks = range(num_chunks(num_bytes))
    for _ in range(rounds):
        dist.barrier()
        found = {"gloo": timed(receive)[0]}
        right = tuple(digest(view[start : start + CHUNK_BYTES]) for start in range(0, num_bytes, CHUNK_BYTES))
        for tensor in tensors:
            tensor.zero_()  # so that the tensors show a fetch
        ways: dict[str, Callable[[], tuple[str, ...]]] = {
            "warm": lambda: fetch_into(target, key, _COPY, view, timeout_s=GROUP_TIMEOUT_S),
            "fresh": lambda: fetch(target, key, _COPY, fd, num_bytes, timeout_s=GROUP_TIMEOUT_S),
            "push": lambda: push(target, key, _COPY, fd, all_chunks, num_bytes, timeout_s=GROUP_TIMEOUT_S),
        }
        for name, way in ways.items():
            found[name], digests = timed(way)
            if digests != right:
                raise SystemExit(f"{name}: what was received is not what gloo received")
        yield found
        dist.barrier()


class _OnePart:
    """Holdings of one part, in the memory that gloo sends from; received parts are discarded."""

    place = "the memory"

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd, self._num_bytes = fd, num_bytes

    def receive(self, key: CopyKey, num_bytes: int) -> _Thrown:
        return _Thrown(num_bytes)

    def open(self, key: CopyKey) -> tuple[int, int]:
        return os.dup(self._fd), self._num_bytes

    def is_unchanged(self, key: CopyKey, fd: int) -> bool:
        return True


class _Thrown:
    """Memory for a part until it is received."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = _memory(num_bytes)

    def keep(self) -> None:
        self.drop()

    def drop(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _memory(num_bytes: int) -> int:
    fd = os.memfd_create("outlast-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def _refused(source: str, reason: str) -> None:
    raise SystemExit(f"{source} was refused: {reason}")
