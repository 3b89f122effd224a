"""A partner that responds although its disk hangs: it costs one timeout and is used again after recovery."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from replica_nodes import KEY, Memory

from outlast import clock
from outlast.checkpoint import protocol
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica import client
from outlast.checkpoint.replica.client import CopyOutcome, ReplicaError, Replicator, Target, ping
from outlast.checkpoint.writer_client import WriterClient, WriterProcess

LONG_S = 120.0
pytestmark = [pytest.mark.process]


@pytest.fixture
def replicator() -> Iterator[Replicator]:
    new_replicator = Replicator(KEY, probe_interval_s=0.05)
    yield new_replicator
    new_replicator.close()


def replicate_until_accepted(replicate: Callable[[], CopyOutcome]) -> CopyOutcome:
    end_s = clock.now_s() + LONG_S
    while (outcome := replicate()).chunks is None:
        assert clock.now_s() < end_s, outcome.error
        threading.Event().wait(0.02)
    return outcome


def test_a_partner_with_a_hung_disk_is_skipped(
    node, hold: Callable[[bytes], int], replicator: Replicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy times out with the place that does not respond, and the partner rejects further copies at once.

    After its disk responds, the partner accepts copies again.
    """
    monkeypatch.setattr("outlast.checkpoint.replica.service.WORKING_S", 0.05)
    monkeypatch.setattr("outlast.checkpoint.replica.service.HUNG_S", 0.1)
    responds, receive = threading.Event(), Memory.receive

    def hang(self: Memory, key: CopyKey, num_bytes: int) -> object:
        assert responds.wait(LONG_S)
        return receive(self, key, num_bytes)

    monkeypatch.setattr(Memory, "receive", hang)
    fd = hold(b"shard")

    def replicate(timeout_s: float) -> CopyOutcome:
        return replicator.replicate(CopyKey(1, "a", 0), fd, 5, (node.target,), timeout_s=timeout_s)[0]

    first = replicate(0.5)
    assert (first.chunks, first.is_new) == (None, True)
    assert "the memory has not responded for 0.5 s" in str(first.error)
    with pytest.raises(ReplicaError, match=r"the memory has not responded for .*; it takes no replica"):
        ping(node.target, KEY, timeout_s=LONG_S)
    with pytest.raises(ReplicaError, match=r"the memory has not responded for .*; it takes no replica"):
        client.push(node.target, KEY, CopyKey(2, "a", 0), fd, range(1), 5, timeout_s=LONG_S)
    assert "skipped until it responds again" in str(replicate(LONG_S).error)
    responds.set()
    assert replicate_until_accepted(lambda: replicate(LONG_S)).chunks
    with node.memory.change:
        assert node.memory.change.wait_for(lambda: not node.memory.num_open, timeout=LONG_S)


def test_a_failing_partner_is_retried_at_growing_intervals(
    node, hold: Callable[[bytes], int], replicator: Replicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partner that responds to probes but fails each copy costs one timeout per interval, not one per save."""
    monkeypatch.setattr(client, "RETRY_AFTER_S", (0.0, 3600.0))
    pause = threading.Event()

    def fail(*args: object, **options: object) -> None:
        raise ReplicaError("the copy failed")

    monkeypatch.setattr(client, "push", fail)
    fd, failures = hold(b"shard"), 0
    end_s = clock.now_s() + LONG_S
    while failures < 2:
        assert clock.now_s() < end_s
        (outcome,) = replicator.replicate(CopyKey(1, "a", 0), fd, 5, (node.target,), timeout_s=LONG_S)
        failures += outcome.error == "the copy failed"
        pause.wait(0.02)
    for _ in range(50):  # many probe intervals
        (outcome,) = replicator.replicate(CopyKey(1, "a", 0), fd, 5, (node.target,), timeout_s=LONG_S)
        assert "skipped" in str(outcome.error)
        pause.wait(0.01)


@contextmanager
def mounted_folder(source: Path, mount_point: Path) -> Iterator[subprocess.Popen[bytes]]:
    source.mkdir()
    mount_point.mkdir()
    daemon = subprocess.Popen(["bindfs", "-f", source, mount_point])
    try:
        end_s = clock.now_s() + LONG_S
        while not os.path.ismount(mount_point):
            assert clock.now_s() < end_s
            threading.Event().wait(0.02)
        yield daemon
    finally:
        daemon.kill()
        daemon.wait()
        subprocess.run(["umount", "-l", mount_point], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bindfs") is None or os.getuid() != 0, reason="needs bindfs, and to be root")
def test_a_writer_with_a_hung_directory_rejects_copies(
    tmp_path: Path, hold: Callable[[bytes], int], replicator: Replicator
) -> None:
    """With a real writer and a hung file system, one copy costs the timeout and later copies fail at once.

    The error contains the folder, and the writer accepts copies again after the file system recovers.
    """
    fd = hold(b"shard")
    with (
        mounted_folder(tmp_path / "source", tmp_path / "local") as daemon,
        closing(WriterProcess()) as writer,
        closing(WriterClient(writer.address)) as client_of_writer,
    ):
        serve = protocol.Serve(host="127.0.0.1", secret=KEY, folder=os.fspath(tmp_path / "local"))
        port = client_of_writer.ask(serve, protocol.Serving, timeout_s=LONG_S)[0].port
        target = Target("b", "127.0.0.1", port)

        def replicate(iteration: int, timeout_s: float) -> CopyOutcome:
            return replicator.replicate(CopyKey(iteration, "a", 0), fd, 5, (target,), timeout_s=timeout_s)[0]

        assert replicate(1, LONG_S).chunks
        daemon.send_signal(signal.SIGSTOP)
        assert "has not responded" in str(replicate(2, 11.0).error)  # exceeds the limit of the writer
        with pytest.raises(ReplicaError, match=r"/local has not responded for .*; it takes no replica"):
            ping(target, KEY, timeout_s=LONG_S)
        assert "skipped" in str(replicate(3, LONG_S).error)
        daemon.send_signal(signal.SIGCONT)
        assert replicate_until_accepted(lambda: replicate(4, LONG_S)).chunks
