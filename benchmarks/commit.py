"""Benchmark ``commit``: what a save of very many ranks costs rank 0, and the size of its manifest.

Rank 0 is real: its lane, store, node folder and writer memory. The store already contains the other ranks' messages, so
that only rank 0's work is measured, from the answers to the outcome that it posts. Each answer is that of a rank of an
80-layer model of 70 billion parameters under FSDP with Adam. The global tier's format lists each rank's part of each
tensor, so that fewer ranks are simulated there.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from benchmarks.measuring import Progress, median, run_rounds
from outlast import clock
from outlast.checkpoint import protocol as f
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.dcp.assemble import Assemble, Assembled, Range
from outlast.checkpoint.dcp.directory import FileDirectory
from outlast.checkpoint.dcp.global_lane import GlobalLane, Inventoried, Wrote
from outlast.checkpoint.dcp.items import ROOT, Items
from outlast.checkpoint.dcp.layout import (
    Duty,
    InventoryRoot,
    Packing,
    PartDigests,
    WriteReport,
    WrittenFile,
    pack,
)
from outlast.checkpoint.directory import Claim, Directory, DirectoryContent, Refusal, SaveAttempt
from outlast.checkpoint.lane import FAN_OUT, Lane, SaveOutcome, Subtree, shared_name
from outlast.checkpoint.late_tiers import LateTiers
from outlast.checkpoint.manifest import MANIFEST, ShardEntry, topology_digest
from outlast.checkpoint.node_lanes import LocalLane, ShardReady
from outlast.checkpoint.places import Places, Replication
from outlast.checkpoint.save import Save, SaveHandle
from outlast.checkpoint.shard import DIGEST_BYTES, TREE, Identity, ShardLayout, TensorSpan, num_chunks, shard_name
from outlast.checkpoint.vault import Vault
from outlast.errors import CheckpointError, OutlastError
from outlast.policy.checkpoint_plan import RetentionRules
from outlast.policy.lease import LeaseOwner
from outlast.policy.recovery_point import Tier
from outlast.runtime.addresses import Endpoint
from outlast.runtime.processes import this_process
from outlast.runtime.store import connect, host
from outlast.simulate.benchmark_results import Bar, BenchResult

NUM_RANKS = 16384
NUM_GLOBAL_RANKS = 1024
"""In the global tier, whose ``.metadata`` lists each part of each tensor."""
RANKS_PER_NODE = 8
NUM_LAYERS = 80
_WIDTH, _INNER, _HEADS = 8192, 28672, 1024
_TIMEOUT_S = 120.0
_TOKEN = "be9c0de5"


def measure(*, repeats: int, progress: Progress, num_ranks: int = NUM_RANKS) -> BenchResult:
    """Commit saves of many simulated ranks.

    Raises:
        OutlastError: A save failed.

    Blocks: some seconds a round.
    """
    sizes, global_sizes = list[int](), list[int]()
    num_global = min(num_ranks, NUM_GLOBAL_RANKS)
    place = Path(tempfile.mkdtemp(prefix="outlast-bench-commit-"))
    try:
        taking = {
            f"commit of {num_ranks} ranks (s)": partial(_commit, place / "near", num_ranks, sizes),
            f"global commit of {num_global} ranks (s)": partial(
                _commit_global, place / "global", num_global, global_sizes
            ),
        }
        spent, global_spent = run_rounds(taking, repeats=repeats, progress=progress).values()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    mib, global_mib = max(sizes) / (1 << 20), max(global_sizes) / (1 << 20)
    return BenchResult(
        "commit",
        (
            Bar("commit_leader_s", median(spent), "s", 2.0),
            Bar("manifest_mib", mib, "MiB", 8.0),
            Bar("global_leader_s", median(global_spent), "s", 30.0),
            Bar("global_manifest_mib", global_mib, "MiB", 256.0),
        ),
        (
            f"{num_ranks} ranks on {-(-num_ranks // RANKS_PER_NODE)} nodes; a rank's response takes "
            f"{len(msgspec.json.encode(_answers(num_ranks, 1)[0]))} bytes, its share of the manifest "
            f"{max(sizes) / num_ranks:.0f}; the global tier lists {num_global} x {len(tensors_of_rank(num_global))} "
            "parts of tensors",
        ),
    )


def tensors_of_rank(num_ranks: int) -> list[tuple[str, str, Sequence[int], int, int]]:
    """Return the tensors of one rank's shard for :class:`ShardLayout`: bfloat16 weights, three float32 of Adam."""
    layer = {
        "attention.q": _WIDTH * _WIDTH,
        "attention.k": _HEADS * _WIDTH,
        "attention.v": _HEADS * _WIDTH,
        "attention.o": _WIDTH * _WIDTH,
        "mlp.gate": _INNER * _WIDTH,
        "mlp.up": _INNER * _WIDTH,
        "mlp.down": _WIDTH * _INNER,
        "norm.attention": _WIDTH,
        "norm.mlp": _WIDTH,
    }
    kinds = (("model", "BF16", 2), ("master", "F32", 4), ("exp_avg", "F32", 4), ("exp_avg_sq", "F32", 4))
    found: list[tuple[str, str, Sequence[int], int, int]] = []
    for number in range(NUM_LAYERS):
        for name, whole in layer.items():
            part = -(-whole // num_ranks)
            found += [(f"{kind}.layers.{number}.{name}", dtype, (part,), part * w, w) for kind, dtype, w in kinds]
    return found


def _answers(num_ranks: int, ordinal: int) -> list[ShardReady]:
    """Return each rank's answer in a save."""
    drawn = random.Random(ordinal)
    size = _head(num_ranks, 0, "")[1]
    entries = (
        ShardEntry(
            rank=rank,
            num_bytes=size,
            digests=drawn.randbytes(DIGEST_BYTES * num_chunks(size)),
            table=drawn.randbytes(DIGEST_BYTES).hex(),
            finite=True,
        )
        for rank in range(num_ranks)
    )
    return [ShardReady(iteration=ordinal, shard=entry, num_copies=1) for entry in entries]


def _identity(num_ranks: int, iteration: int, attempt: str) -> Identity:
    return Identity(
        run="bench",
        topology=topology_digest(num_ranks),
        rank=0,
        world_size=num_ranks,
        iteration=iteration,
        attempt=attempt,
    )


def _head(num_ranks: int, iteration: int, attempt: str) -> tuple[bytes, int]:
    """Return the header of rank 0's shard, which is its tensor table, and the shard's size."""
    identity = _identity(num_ranks, iteration, attempt)
    head, _, size = ShardLayout(tensors_of_rank(num_ranks)).place(identity, 4096)
    return head, size


def _commit(place: Path, num_ranks: int, sizes: list[int]) -> float:
    """Commit a save; return the seconds of rank 0, and append the manifest's size to ``sizes``.

    Raises:
        OutlastError: The save failed.
    """
    ordinal = len(sizes) + 1
    attempt = SaveAttempt(job="bench", cycle=0, token=_TOKEN, ordinal=ordinal)
    places = _places(place, num_ranks)
    answers = _answers(num_ranks, ordinal)
    head, size = _head(num_ranks, ordinal, str(attempt))
    posted = [
        *_subtrees("ready", range(num_ranks), answers),
        *_subtrees("renamed", places.leaders, [SaveOutcome()] * len(places.leaders)),
    ]
    with closing(_arena(head, size)) as arena:
        save = replace(_save(attempt, arena, size), tiers=frozenset({Tier.MEMORY, Tier.LOCAL, Tier.REPLICA}))
        spent_s = _spend(LocalLane, Directory(place), places, _SimulatedWriter(answers[0]), save, posted)
    sizes.append((Directory(place).checkpoint(ordinal) / MANIFEST).stat().st_size)
    return spent_s


def _commit_global(place: Path, num_ranks: int, sizes: list[int]) -> float:
    """Commit a save to the global tier; return the seconds of rank 0, and append the manifest's size to ``sizes``.

    Raises:
        OutlastError: The save failed.
    """
    ordinal = len(sizes) + 1
    attempt = SaveAttempt(job="bench", cycle=0, token=_TOKEN, ordinal=ordinal)
    directory = FileDirectory(place)
    with closing(_fsdp_image(num_ranks, ordinal, str(attempt))) as image:
        save = replace(_save(attempt, image.arena, image.num_bytes), tensors=image.tensors)
        save = replace(save, tiers=frozenset({Tier.GLOBAL}))
        posted = _global_answers(save, directory, num_ranks)
        places = replace(_places(place, num_ranks), local=None, directory=directory)
        spent_s = _spend(GlobalLane, directory, places, _SimulatedWriter(None), save, posted)
    sizes.append((directory.checkpoint(ordinal) / MANIFEST).stat().st_size)
    return spent_s


def _save(attempt: SaveAttempt, arena: Arena, num_bytes: int) -> Save:
    return Save(
        iteration=attempt.ordinal,
        attempt=attempt,
        handle=SaveHandle(attempt.ordinal, limit_s=_TIMEOUT_S, attempt=str(attempt)),
        started_ns=clock.now_ns(),
        stall_s=0.0,
        tiers=frozenset(),
        arena=arena,
        num_bytes=num_bytes,
    )


def _spend(
    kind: type[Lane],
    directory: Directory | FileDirectory,
    places: Places,
    writer: _SimulatedWriter,
    save: Save,
    posted: Iterable[tuple[str, Subtree]],
) -> float:
    """Make rank 0 commit a save; return the seconds.

    Args:
        kind: The lane that commits.
        directory: Target directory.
        places: The ranks' nodes.
        writer: Writer of rank 0.
        save: The save.
        posted: Messages of the other ranks.

    Raises:
        OutlastError: The save failed.
    """
    store = host(Endpoint("127.0.0.1", 0), timeout_s=_TIMEOUT_S)
    if store is None:
        raise OutlastError("no port of 127.0.0.1 is free for the ranks' store")
    client = connect(Endpoint("127.0.0.1", store.port), timeout_s=_TIMEOUT_S, call_timeout_s=_TIMEOUT_S)
    claim = Claim(
        directory,
        "bench",
        DirectoryContent(),
        LeaseOwner(token="", process=this_process(), run="bench"),
        may_resume_other=False,
        refusal=Refusal(),
        token=_TOKEN,
    )
    claim.hold()
    lane = kind(
        places,
        rank=0,
        store=client,
        writer=cast(Any, writer),
        timeout_s=_TIMEOUT_S,
        claim=claim,
        retention=RetentionRules(most_recent_k=1),
        outcomes=cast(Any, _CommitEnds()),
    )
    try:
        for name, subtree in posted:
            key = f"outlast/checkpoint/{_TOKEN}/{lane.name}/0/{name}"
            client.set(key, msgspec.json.encode(subtree).decode())
        begun_ns = clock.now_ns()
        lane.submit(save)
        save.handle.wait(_TIMEOUT_S)
        return (clock.now_ns() - begun_ns) / 1e9
    finally:
        lane.stop(_TIMEOUT_S)
        claim.release(is_idle=True)


@dataclass(frozen=True, slots=True)
class _ShardOfRank0:
    arena: Arena
    num_bytes: int
    tensors: tuple[TensorSpan, ...]

    def close(self) -> None:
        self.arena.close()


def _fsdp_image(num_ranks: int, iteration: int, attempt: str) -> _ShardOfRank0:
    """Return rank 0's shard of a model whose tensors are sharded over all ranks."""
    tensors = tensors_of_rank(num_ranks)
    entries, nodes = {}, []
    for name, dtype, (part,), num_bytes, _ in tensors:
        whole = [part * num_ranks]
        entries[name] = TensorSpan(
            name=name,
            dtype=dtype,
            shape=(part,),
            global_shape=(part * num_ranks,),
            global_offset=(0,),
            offset=0,
            num_bytes=num_bytes,
        )
        nodes.append([name, ["T", name, [[0], [num_ranks], ["fsdp"], whole, [1]]]])
    tree = msgspec.msgpack.encode(["d", [[ROOT, ["d", nodes]]]])
    layout = ShardLayout(tensors)
    head, span, size = layout.place(_identity(num_ranks, iteration, attempt), len(tree))
    placed = [
        msgspec.structs.replace(entries[tensors[index][0]], offset=len(head) + offset)
        for index, offset in zip(layout.order, layout.offsets, strict=True)
    ]
    shape = (len(tree),)
    placed.append(
        TensorSpan(
            name=TREE,
            dtype="U8",
            shape=shape,
            global_shape=shape,
            global_offset=(0,),
            offset=span.offset,
            num_bytes=len(tree),
        )
    )
    arena = _arena(head, size)
    os.pwrite(arena.fd, tree, span.offset)
    return _ShardOfRank0(arena, size, tuple(placed))


def _global_answers(save: Save, directory: FileDirectory, num_ranks: int) -> list[tuple[str, Subtree]]:
    """Return the other ranks' messages in a save, and create their files."""
    assert save.arena is not None
    items = Items(save.arena.view(save.num_bytes), save.tensors, world_size=num_ranks)
    mine = items.inventory
    table, digests = (shared_name(msgspec.json.encode(one)) for one in (mine.table, PartDigests(mine.digests)))
    duty = Duty(tuple(range(len(mine.table.rows))), (), ())
    packing = Packing()
    pack(packing, mine, duty, Range(items.tree.offset, items.tree.num_bytes), (), items.offsets)
    files = tuple(WrittenFile(size, bytes(DIGEST_BYTES * num_chunks(size))) for size in packing.sizes)
    report = WriteReport(files, True, items.tree.num_bytes, ())
    folder = directory.path / directory.attempt_folder(save.iteration, save.attempt)
    folder.mkdir(parents=True)
    has, wrote = list[Inventoried](), list[Wrote]()
    for rank in range(num_ranks):
        offsets = tuple((rank * shape[0],) for shape, _ in mine.table.boxes)
        has.append(Inventoried(iteration=save.iteration, inventory=InventoryRoot(table, digests, offsets)))
        wrote.append(Wrote(iteration=save.iteration, report=report))
        for number, size in enumerate(packing.sizes if rank else ()):
            path = folder / directory.file_name(rank, number, save.attempt)
            path.touch()
            os.truncate(path, size)
    everyone = range(num_ranks)
    return [*_subtrees("has", everyone, has), *_subtrees("wrote", everyone, wrote)]


def _subtrees(name: str, members: Sequence[int], answers: Sequence[msgspec.Struct]) -> list[tuple[str, Subtree]]:
    """Return the messages from rank 0's children in the tree, each with the answers of its subtree."""
    below: dict[int, list[int]] = {}
    for place in range(1, len(members)):
        top = place
        while (parent := (top - 1) // FAN_OUT) > 0:
            top = parent
        below.setdefault(top, []).append(place)
    return [
        (
            f"{name}/{members[top]}",
            Subtree([(members[one], msgspec.Raw(msgspec.json.encode(answers[one]))) for one in places]),
        )
        for top, places in below.items()
    ]


def _places(place: Path, num_ranks: int) -> Places:
    nodes = tuple(f"node-{rank // RANKS_PER_NODE:05d}.cluster" for rank in range(num_ranks))
    return Places(
        directory=None,
        local=Directory(place),
        memory=True,
        token=_TOKEN,
        run="bench",
        home="",
        node=nodes[0],
        nodes=nodes,
        leaders=tuple(range(0, num_ranks, RANKS_PER_NODE)),
        targets={},
        checkpoints=frozenset(),
        global_error=None,
        replication=Replication(),
        seen_local=None,
        seen_global=None,
    )


def _arena(head: bytes, size: int) -> Arena:
    fd = os.memfd_create("outlast-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, head, 0)
    return Arena(fd)


class _SimulatedWriter:
    """Replaces the writer process: has digested and written already, and keeps manifests as the writer does."""

    def __init__(self, answer: ShardReady | None) -> None:
        self._answer, self._vault = answer, Vault()

    def ask(self, request: Any, reply: type[Any], *, timeout_s: float, fd: int | None = None) -> tuple[Any, None]:
        if isinstance(request, f.Write):
            assert request.path is not None
            assert self._answer is not None
            assert self._answer.shard is not None
            folder = Path(request.path).parent
            folder.mkdir(parents=True)
            for rank in range(RANKS_PER_NODE):
                (folder / shard_name(rank)).touch()
            return f.Written(chunks=self._answer.shard.chunks, finite=True, num_copies=1), None
        if isinstance(request, Assemble):
            size = sum(len(piece) if isinstance(piece, bytes) else piece.num_bytes for piece in request.pieces)
            path = Path(request.url, request.folder, request.name)
            path.touch()
            os.truncate(path, size)
            return Assembled(num_bytes=size, chunks=("0" * 2 * DIGEST_BYTES,) * num_chunks(size)), None
        if isinstance(request, f.PreparePart):
            self._vault.prepare(request.key, request.manifest)
        return reply(), None


class _CommitEnds:
    """Replaces a manager's outcomes."""

    is_call_left = False

    def __init__(self) -> None:
        self.late = LateTiers()

    def report_committed(self, iteration: int, tiers: frozenset[Tier]) -> None:
        """Notify no launcher."""

    def committed(self, save: Save, lane: str, tiers: frozenset[Tier], failures: object = ()) -> None:
        save.handle.succeed(save.result())

    def failed(self, save: Save, lane: str, error: CheckpointError, *, is_retried: bool = False) -> None:
        save.handle.fail(error, is_retried=is_retried)
