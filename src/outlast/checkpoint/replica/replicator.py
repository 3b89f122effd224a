"""Copy shards to other nodes, and know which of those nodes does not answer.

A node that failed costs its timeout once: it is left out from then on, until a probe in the background finds that it
answers again. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import ReplicaError, ReplicaRefused, Target, ping, push
from outlast.checkpoint.replica.parity import PARITY_PART, blocks_of
from outlast.checkpoint.shard import num_chunks

__all__ = ["CopyOutcome", "Holder", "Replicator", "Target"]

log = logging.getLogger(__name__)
PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 2.0
MAX_TARGETS_AT_ONCE = 8


class CopyOutcome(msgspec.Struct, frozen=True):
    """What became of one target's copy."""

    node: str
    chunks: tuple[str, ...] | None
    """Digests that the target computed of what it received; ``None`` = it has no copy."""
    error: str | None
    """Why not, in one line."""
    is_new: bool
    """Whether it is this target's first failure since it last took one."""


class Holder(msgspec.Struct, frozen=True):
    """A member of a parity group that takes a block."""

    rank: int
    target: Target


class Replicator:
    """Copy parts to other nodes' writers.

    Args:
        key: The run's key.
        probe_interval_s: Seconds between two attempts to reach a node that failed.

    Thread: any.
    """

    def __init__(self, key: bytes, *, probe_interval_s: float = PROBE_INTERVAL_S) -> None:
        self._key, self._probe_interval_s = key, probe_interval_s
        self._lock = threading.Lock()
        self._failed: dict[Target, str] = {}
        """Left out until a probe is answered, and why."""
        self._in_trouble: set[Target] = set()
        """Took no copy when last asked."""
        self._prober: threading.Thread | None = None
        self._stopping = threading.Event()

    def close(self) -> None:
        """Stop probing. Idempotent. Blocks: at most for a probe's timeout."""
        self._stopping.set()
        with self._lock:
            prober = self._prober
        if prober is not None:
            prober.join(2 * PROBE_TIMEOUT_S)

    def replicate(
        self, copy: CopyKey, fd: int, num_bytes: int, targets: tuple[Target, ...], *, timeout_s: float
    ) -> tuple[CopyOutcome, ...]:
        """Copy a part to several nodes at once.

        Args:
            copy: Its name.
            fd: File or memfd that holds it; must not change before this returns.
            num_bytes: Its size.
            targets: Who takes a copy.
            timeout_s: Seconds without progress after which a target is given up.

        Returns:
            What became of each, in the order of ``targets``.

        Blocks: until each has it or failed.
        """
        chunks = range(num_chunks(num_bytes))

        def give(target: Target) -> tuple[str, ...]:
            return push(target, self._key, copy, fd, chunks, num_bytes, timeout_s=timeout_s)

        return self._at_once([(target, partial(give, target)) for target in targets])

    def replicate_blocks(
        self, copy: CopyKey, fd: int, num_bytes: int, holders: tuple[Holder, ...], *, timeout_s: float
    ) -> tuple[CopyOutcome, ...]:
        """Give each other member of a parity group its block of a shard.

        Args:
            copy: The shard.
            fd: File or memfd that holds it; must not change before this returns.
            num_bytes: Its size.
            holders: The other members, in the order of :func:`parity.holders_of`.
            timeout_s: Seconds without progress after which a member is given up.

        Returns:
            What became of each block; its chunks are those that :func:`parity.blocks_of` names. The shard is protected
            once all blocks of all members of the group are in.

        Blocks: until each is in or failed.
        """

        def give(holder: Holder, block: range) -> tuple[str, ...]:
            return push(
                holder.target,
                self._key,
                CopyKey(copy.iteration, copy.attempt, holder.rank, PARITY_PART),
                fd,
                block,
                num_bytes,
                timeout_s=timeout_s,
                contributor=copy.rank,
                num_contributors=len(holders),
            )

        blocks = blocks_of(num_bytes, len(holders)) if holders else ()
        return self._at_once(
            [(holder.target, partial(give, holder, block)) for holder, block in zip(holders, blocks, strict=True)]
        )

    def _at_once(self, jobs: Sequence[tuple[Target, Callable[[], tuple[str, ...]]]]) -> tuple[CopyOutcome, ...]:
        if not jobs:
            return ()
        with ThreadPoolExecutor(min(len(jobs), MAX_TARGETS_AT_ONCE), thread_name_prefix="outlast-push") as pool:
            return tuple(pool.map(lambda job: self._one(*job), jobs))

    def _one(self, target: Target, give: Callable[[], tuple[str, ...]]) -> CopyOutcome:
        with self._lock:
            known = self._failed.get(target)
        if known is not None:
            return CopyOutcome(target.node, None, f"left out until it answers again, since: {known}", False)
        try:
            chunks = give()
        except ReplicaError as error:
            is_new = self._note(target, str(error), must_skip=not isinstance(error, ReplicaRefused))
            return CopyOutcome(target.node, None, str(error), is_new)
        with self._lock:
            self._in_trouble.discard(target)
        return CopyOutcome(target.node, chunks, None, False)

    def _note(self, target: Target, error: str, *, must_skip: bool) -> bool:
        """Note a failure; return whether it is news. Whoever refuses at once need not be left out."""
        with self._lock:
            is_new = target not in self._in_trouble
            self._in_trouble.add(target)
            if must_skip:
                self._failed[target] = error
                if self._prober is None and not self._stopping.is_set():
                    self._prober = threading.Thread(target=self._probe, name="outlast-probe", daemon=True)
                    self._prober.start()
        return is_new

    def _probe(self) -> None:
        """Ask the failed targets again and again until all answer. Thread: the prober's."""
        while not self._stopping.wait(self._probe_interval_s):
            with self._lock:
                failed = list(self._failed)
                if not failed:
                    self._prober = None
                    return
            for target in failed:
                if self._stopping.is_set():
                    return
                try:
                    ping(target, self._key, timeout_s=PROBE_TIMEOUT_S)
                except ReplicaError as error:
                    log.debug("still no answer: %s", error)
                    continue
                with self._lock:
                    self._failed.pop(target, None)
                log.warning("node %s answers again and takes copies", target.node)
