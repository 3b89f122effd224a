"""Saves of many ranks: responses go up a tree, rank 0 merges them into one manifest, all ranks get the same outcome."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from benchmarks.commit import tensors_of_rank
from outlast import clock
from outlast.checkpoint import protocol as f
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.lane import FAN_OUT, POLL_S, SaveOutcome
from outlast.checkpoint.late_tiers import LateTiers
from outlast.checkpoint.manifest import ShardEntry, decode_manifest, topology_digest
from outlast.checkpoint.node_lanes import MemoryLane, ShardReady
from outlast.checkpoint.places import Places, Replication
from outlast.checkpoint.save import PeerSilent, Save, SaveHandle
from outlast.checkpoint.shard import Identity, ShardLayout, digest_image
from outlast.errors import CheckpointError
from outlast.policy.checkpoint_plan import RetentionRules
from outlast.policy.recovery_point import Tier

WORLD, PER_NODE, LONG_S = 300, 10, 120.0
ATTEMPT = SaveAttempt(job="job", cycle=0, token="many", ordinal=3)


class _CountedStore:
    """A rank's view of the ranks' HashStore that records the bytes of each read."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.read: list[int] = []

    def get(self, key: str) -> bytes:
        data = bytes(self._store.get(key))
        self.read.append(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _FakeWriter:
    """Test double of a rank's writer: computes digests in this process and records the manifests."""

    def __init__(self) -> None:
        self.manifests: list[bytes] = []
        self.kept: list[int] = []
        self.discarded: list[int] = []

    def ask(self, request: Any, reply: type[Any], *, timeout_s: float, fd: int | None = None) -> tuple[Any, None]:
        if isinstance(request, f.Write):
            assert fd is not None
            image = memoryview(os.pread(fd, request.num_bytes, 0))
            return f.Written(chunks=digest_image(image), finite=True), None
        if isinstance(request, f.PreparePart):
            self.manifests.append(request.manifest)
        if isinstance(request, f.KeepPart):
            self.kept.append(request.key.rank)
        if isinstance(request, f.Discard):
            self.discarded.append(request.iteration)
        return reply(), None


class _FakeOutcomes:
    """Test double of a manager's outcomes."""

    is_call_left = False

    def __init__(self) -> None:
        self.late = LateTiers()

    def report_committed(self, iteration: int, tiers: frozenset[Tier]) -> None:
        """Do nothing: the handle is sufficient."""

    def committed(self, save: Save, lane: str, tiers: object, failures: object = ()) -> None:
        save.handle.succeed(save.result())

    def failed(self, save: Save, lane: str, error: CheckpointError, *, is_retried: bool = False) -> None:
        save.handle.fail(error, is_retried=is_retried)


class _Ranks:
    """One lane per rank, in threads of this process."""

    def __init__(self, timeout_s: float = LONG_S) -> None:
        store = HashStore()
        self.stores = [_CountedStore(store) for _ in range(WORLD)]
        self.writers = [_FakeWriter() for _ in range(WORLD)]
        nodes = tuple(f"node-{rank // PER_NODE}" for rank in range(WORLD))
        places = Places(
            directory=None,
            local=None,
            memory=True,
            token="many",
            run="run",
            home="",
            node=nodes[0],
            nodes=nodes,
            leaders=tuple(range(0, WORLD, PER_NODE)),
            targets={},
            checkpoints=frozenset(),
            global_error=None,
            replication=Replication(),
            seen_local=None,
            seen_global=None,
        )
        unclaimed: Any = None
        self.lanes = [
            MemoryLane(
                replace(places, node=nodes[rank]),
                rank=rank,
                store=self.stores[rank],  # type: ignore[arg-type]
                writer=self.writers[rank],  # type: ignore[arg-type]
                timeout_s=timeout_s,
                claim=unclaimed,
                retention=RetentionRules(most_recent_k=1),
                outcomes=_FakeOutcomes(),  # type: ignore[arg-type]
            )
            for rank in range(WORLD)
        ]
        self.arenas: list[Arena] = []

    def save(self, rank: int, iteration: int = 7, error: str | None = None) -> Save:
        """Return a rank's save, with a shard of a few tensors."""
        identity = Identity(
            run="run",
            topology=topology_digest(WORLD),
            rank=rank,
            world_size=WORLD,
            iteration=iteration,
            attempt=str(ATTEMPT),
        )
        head, _, size = ShardLayout([("w", "F32", (8,), 32, 4)]).place(identity, 16)
        fd = os.memfd_create("shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        os.pwrite(fd, head, 0)
        self.arenas.append(Arena(fd))
        return Save(
            iteration=iteration,
            attempt=ATTEMPT,
            handle=SaveHandle(iteration, limit_s=LONG_S),
            started_ns=clock.now_ns(),
            stall_s=0.0,
            tiers=frozenset({Tier.MEMORY}),
            arena=self.arenas[-1] if error is None else None,
            num_bytes=size,
            error=error,
        )

    def commit(self, saves: dict[int, Save]) -> list[CheckpointError | None]:
        """Commit the saves of some ranks; return each rank's error."""
        for rank, save in saves.items():
            self.lanes[rank].submit(save)
        errors: list[CheckpointError | None] = []
        for save in saves.values():
            try:
                save.handle.wait(2 * LONG_S)
                errors.append(None)
            except CheckpointError as error:
                errors.append(error)
        return errors


@contextmanager
def _ranks(timeout_s: float = LONG_S) -> Iterator[_Ranks]:
    ranks = _Ranks(timeout_s)
    try:
        yield ranks
    finally:
        stopped = [lane.stop(LONG_S) for lane in ranks.lanes]
        for arena in ranks.arenas:
            arena.close()
        assert all(stopped)


def test_all_ranks_commit_one_manifest() -> None:
    """Each node's leader gets the same manifest with every rank's shard; each rank's writer keeps its part."""
    with _ranks() as ranks:
        saves = {rank: ranks.save(rank) for rank in range(WORLD)}
        assert ranks.commit(saves) == [None] * WORLD
        prepared = [writer.manifests for writer in ranks.writers]
        assert [rank for rank, prepared_manifests in enumerate(prepared) if prepared_manifests] == list(
            range(0, WORLD, PER_NODE)
        )
        assert len({data for prepared_manifests in prepared for data in prepared_manifests}) == 1
        manifest, _ = decode_manifest(prepared[0][0])
        assert [shard.rank for shard in manifest.shards] == list(range(WORLD))
        images = [memoryview(os.pread(save.arena.fd, save.num_bytes, 0)) for save in saves.values() if save.arena]
        assert [shard.chunks for shard in manifest.shards] == [digest_image(image) for image in images]
        assert [writer.kept for writer in ranks.writers] == [[rank] for rank in range(WORLD)]


def test_a_rank_reads_a_bounded_number_of_responses() -> None:
    """A rank reads the responses of its children in the tree, the manifest if it leads a node, and the outcome."""
    with _ranks() as ranks:
        assert ranks.commit({rank: ranks.save(rank) for rank in range(WORLD)}) == [None] * WORLD
        for rank in range(WORLD):
            reads = ranks.stores[rank].read
            assert len(reads) <= 2 * FAN_OUT + 2
            if rank > WORLD // FAN_OUT and rank % PER_NODE:
                assert sum(reads) < 100


@pytest.mark.parametrize("rank", [0, 1, 17, WORLD - 1])
def test_one_failed_rank_fails_the_save_on_all(rank: int) -> None:
    """The error of a rank anywhere in the tree is reported on all ranks, and all discard the attempt."""
    with _ranks() as ranks:
        saves = {other: ranks.save(other, error="out of memory" if other == rank else None) for other in range(WORLD)}
        errors = ranks.commit(saves)
        assert {f"rank {rank} on node node-{rank // PER_NODE}: out of memory" in str(error) for error in errors} == {
            True
        }
        assert not any(writer.manifests or writer.kept for writer in ranks.writers)
        assert all(writer.discarded for writer in ranks.writers)


def test_a_rank_with_another_iteration_fails_the_save() -> None:
    """A rank deep in the tree that saves another iteration is reported on all ranks."""
    with _ranks() as ranks:
        saves = {rank: ranks.save(rank, iteration=8 if rank == WORLD - 1 else 7) for rank in range(WORLD)}
        errors = ranks.commit(saves)
        assert {f"rank {WORLD - 1} saves iteration 8 meanwhile" in str(error) for error in errors} == {True}
        assert not any(writer.manifests for writer in ranks.writers)


def test_an_unresponsive_rank_fails_the_save() -> None:
    """A rank that never responds is detected at the deadline, and nothing is committed."""
    with _ranks(timeout_s=3.0) as ranks:
        errors = ranks.commit({rank: ranks.save(rank) for rank in range(WORLD - 1)})
        assert {type(error) for error in errors} == {PeerSilent}
        assert not any(writer.manifests or writer.kept for writer in ranks.writers)


def test_a_response_does_not_grow_with_the_model() -> None:
    """A rank of an 80-layer model under FSDP with Adam publishes less than 200 bytes.

    Its tensor table is stored in its shard.
    """
    identity = Identity(run="r", topology="t", rank=16383, world_size=16384, iteration=10**6, attempt="a")
    head, _, size = ShardLayout(tensors_of_rank(16384)).place(identity, 4096)
    chunks = ["0123456789abcdef"] * -(-size // (8 << 20))
    shard = msgspec.structs.replace(
        ShardEntry.of(16383, memoryview(head + bytes(16)), chunks, finite=True), num_bytes=size
    )
    response = ShardReady(iteration=10**6, shard=shard, num_copies=1)
    assert len(head) > 200_000
    assert len(msgspec.json.encode(response)) < 200
    assert len(msgspec.json.encode(SaveOutcome())) < 200


@pytest.mark.parametrize("num_ranks", [1, 2, 1024, 1025, 16384, 10**6])
def test_polling_for_the_outcome_is_bounded(num_ranks: int) -> None:
    """Any number of ranks together polls the store no more often than 1,024 ranks do; few ranks poll often."""
    pause_s = MemoryLane.poll_pause_s(num_ranks)
    assert num_ranks / pause_s <= 1024 / POLL_S * (1 + 1e-9)
    assert pause_s == POLL_S or num_ranks > 1024
