"""A partner whose packets are dropped, in a network namespace of its own, costs its timeout once. Needs root."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_stopped_partner import KEY, LONG_S, NEWER, NEWEST, digests_of, replicate_until_taken, replicator  # noqa: F401

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import ReplicaError, Replicator, Target, fetch
from outlast.checkpoint.shard import CHUNK_BYTES

OURS, THEIRS = "10.83.7.1", "10.83.7.2"
EARLIER = CopyKey(10, "a", 0)
pytestmark = [pytest.mark.process]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=300)


class Partner:
    """A namespace with a partner, at the other end of a link that can drop what the partner sends."""

    def __init__(self) -> None:
        self.name = f"olr{os.getpid()}"

    def __enter__(self) -> Partner:
        try:
            ip("netns", "add", self.name)
            ip("link", "add", self.name, "type", "veth", "peer", "name", "lan", "netns", self.name)
            ip("addr", "add", f"{OURS}/30", "dev", self.name)
            ip("link", "set", self.name, "up")
            ip("-n", self.name, "addr", "add", f"{THEIRS}/30", "dev", "lan")
            ip("-n", self.name, "link", "set", "lan", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True, timeout=300)

    @contextmanager
    def serve(self) -> Iterator[int]:
        """Run the partner's process; yield its port."""
        script = Path(__file__).with_name("replica_partner.py")
        command = ["ip", "netns", "exec", self.name, sys.executable, str(script), KEY.hex(), "--host", THEIRS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                yield int(process.stdout.readline())
                process.stdin.close()
                assert process.wait(LONG_S) == 0
            finally:
                process.kill()

    def cut(self) -> None:
        """Drop all packets from the partner, without an error on either side."""
        ip("-n", self.name, "route", "add", "blackhole", f"{OURS}/32")

    def heal(self) -> None:
        """Undo :meth:`cut`."""
        ip("-n", self.name, "route", "del", "blackhole", f"{OURS}/32")


@pytest.fixture
def partner() -> Iterator[Partner]:
    """Return a partner whose link works, or skip where no namespace can be made."""
    if os.geteuid() != 0 or subprocess.run(["ip", "netns"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    with Partner() as made:
        yield made


def test_a_partner_whose_packets_are_dropped_is_left_out(
    partner: Partner,
    hold: Callable[[bytes], int],
    replicator: Replicator,  # noqa: F811
) -> None:
    """A copy and a fetch end after their time without progress; the next save does not wait; once packets arrive again
    the partner takes copies, and it has what it held."""
    data = random.Random(1).randbytes(CHUNK_BYTES + 9)
    fd = hold(data)
    with partner.serve() as port:
        target = Target("partner", THEIRS, port)
        (first,) = replicator.replicate(EARLIER, fd, len(data), (target,), timeout_s=LONG_S)
        assert first.chunks == digests_of(data)
        partner.cut()
        (lost,) = replicator.replicate(NEWER, fd, len(data), (target,), timeout_s=0.5)
        (skipped,) = replicator.replicate(NEWER, fd, len(data), (target,), timeout_s=3600)
        with pytest.raises(ReplicaError, match=f"node partner .{THEIRS}"):
            fetch(target, KEY, EARLIER, hold(bytes(len(data))), len(data), timeout_s=0.5)
        partner.heal()
        last = replicate_until_taken(
            lambda: replicator.replicate(NEWEST, fd, len(data), (target,), timeout_s=LONG_S)[0]
        )
        into = hold(bytes(len(data)))
        assert fetch(target, KEY, EARLIER, into, len(data), timeout_s=LONG_S) == digests_of(data)
    assert (lost.chunks, lost.is_new) == (None, True)
    assert f"node partner ({THEIRS}" in str(lost.error)
    assert (skipped.chunks, skipped.is_new) == (None, False)
    assert "skipped until it responds again" in str(skipped.error)
    assert last.chunks == digests_of(data)
    assert os.pread(into, len(data), 0) == data
