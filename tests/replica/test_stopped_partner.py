"""A partner that accepts connections but does not respond costs one timeout and is used again after recovery."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outlast import clock
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import CopyOutcome, ReplicaError, Replicator, Target, fetch
from outlast.checkpoint.shard import CHUNK_BYTES, digest
from outlast.testing import RankProcesses

KEY = b"k" * 32
LONG_S = 60.0
EARLIER, NEWER, NEWEST = (CopyKey(iteration, "a", 0) for iteration in (10, 20, 30))
pytestmark = [pytest.mark.process, pytest.mark.extended]


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[RankProcesses, Target]]]:
    script = Path(__file__).with_name("replica_partner.py")
    with ExitStack() as stack:

        def make(*arguments: str) -> tuple[RankProcesses, Target]:
            partner = stack.enter_context(RankProcesses(script, KEY.hex(), *arguments, world_size=1, stdin=True))
            return partner, Target("partner", "127.0.0.1", int(partner.next_line(0, LONG_S)))

        yield make


@pytest.fixture
def replicator() -> Iterator[Replicator]:
    new_replicator = Replicator(KEY, probe_interval_s=0.05)
    yield new_replicator
    new_replicator.close()


def digests_of(data: bytes) -> tuple[str, ...]:
    return tuple(digest(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))


def replicate_until_accepted(replicate: Callable[[], CopyOutcome]) -> CopyOutcome:
    """Retry until the probe has reached the partner."""
    end_s = clock.now_s() + LONG_S
    while (outcome := replicate()).chunks is None:
        assert not outcome.is_new
        assert clock.now_s() < end_s, outcome.error
        threading.Event().wait(0.02)
    return outcome


def test_a_stopped_partner_is_skipped_until_it_responds(start, hold: Callable[[bytes], int], replicator) -> None:
    """The first failure is reported and the next save skips the partner.

    After it responds, it accepts copies and still has the older one.
    """
    partner, target = start()
    data = random.Random(1).randbytes(CHUNK_BYTES + 9)
    fd = hold(data)
    (first,) = replicator.replicate(EARLIER, fd, len(data), (target,), timeout_s=LONG_S)
    assert first.chunks == digests_of(data)

    partner.stop(0)
    (stopped,) = replicator.replicate(NEWER, fd, len(data), (target,), timeout_s=0.3)
    (skipped,) = replicator.replicate(NEWER, fd, len(data), (target,), timeout_s=3600)
    assert (stopped.chunks, stopped.is_new) == (None, True)
    assert stopped.error == f"node partner (127.0.0.1:{target.port}): the peer did not respond in time"
    assert (skipped.chunks, skipped.is_new) == (None, False)
    assert "skipped until it responds again" in str(skipped.error)

    partner.resume(0)
    final = replicate_until_accepted(
        lambda: replicator.replicate(NEWEST, fd, len(data), (target,), timeout_s=LONG_S)[0]
    )
    assert final.chunks == digests_of(data)
    target_fd = hold(bytes(len(data)))
    assert fetch(target, KEY, EARLIER, target_fd, len(data), timeout_s=LONG_S) == digests_of(data)
    assert os.pread(target_fd, len(data), 0) == data
    with pytest.raises(ReplicaError, match="does not hold"):
        fetch(target, KEY, NEWER, target_fd, len(data), timeout_s=LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [2, 12], ids=["fits-into-buffers", "does-not"])
def test_a_partner_that_stops_during_a_copy_times_out(
    start, hold: Callable[[bytes], int], replicator, num_chunks: int
) -> None:
    """The sender times out whether or not buffers take the rest of the copy; no partial copy remains."""
    partner, target = start(str(CHUNK_BYTES))
    data = random.Random(2).randbytes(num_chunks * CHUNK_BYTES)
    fd = hold(data)
    (outcome,) = replicator.replicate(NEWER, fd, len(data), (target,), timeout_s=1.5)
    assert (outcome.chunks, outcome.is_new) == (None, True)
    assert "for 1.5 s" in str(outcome.error)
    partner.resume(0)
    first_chunk = data[:CHUNK_BYTES]  # ends before the offset where the partner stops
    final = replicate_until_accepted(
        lambda: replicator.replicate(NEWEST, fd, len(first_chunk), (target,), timeout_s=LONG_S)[0]
    )
    assert final.chunks == digests_of(first_chunk)
    with pytest.raises(ReplicaError, match="does not hold"):
        fetch(target, KEY, NEWER, hold(bytes(len(data))), len(data), timeout_s=LONG_S)


def test_a_stopped_partner_does_not_delay_the_others(
    start, make_node, hold: Callable[[bytes], int], replicator
) -> None:
    """Each other target receives its copy."""
    partner, target = start()
    partner.stop(0)
    node = make_node("well")
    data = b"shard"
    outcomes = replicator.replicate(NEWER, hold(data), len(data), (target, node.target), timeout_s=3)
    partner.resume(0)
    assert [outcome.chunks for outcome in outcomes] == [None, digests_of(data)]
    assert node.memory.parts == {NEWER: data}


def test_a_fetch_from_a_stopped_partner_times_out(start, hold: Callable[[bytes], int]) -> None:
    """A fetch from a stopped partner fails after its timeout without progress."""
    partner, target = start()
    partner.stop(0)
    with pytest.raises(ReplicaError, match=r"node partner .* the peer did not respond in time"):
        fetch(target, KEY, EARLIER, hold(bytes(10)), 10, timeout_s=0.3)
    partner.resume(0)
