"""A partner in a network namespace whose packets are dropped costs one timeout. Requires root."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_stopped_partner import KEY, LONG_S, NEWER, NEWEST, digests_of, replicate_until_accepted, replicator  # noqa: F401

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import ReplicaError, Replicator, Target, fetch
from outlast.checkpoint.shard import CHUNK_BYTES

LOCAL_ADDRESS, PARTNER_ADDRESS = "10.83.7.1", "10.83.7.2"
EARLIER = CopyKey(10, "a", 0)
pytestmark = [pytest.mark.process]


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=300)


class Partner:
    """A network namespace with a partner process, behind a link that can drop the partner's packets."""

    def __init__(self) -> None:
        self.name = f"olr{os.getpid()}"

    def __enter__(self) -> Partner:
        try:
            run_ip("netns", "add", self.name)
            run_ip("link", "add", self.name, "type", "veth", "peer", "name", "lan", "netns", self.name)
            run_ip("addr", "add", f"{LOCAL_ADDRESS}/30", "dev", self.name)
            run_ip("link", "set", self.name, "up")
            run_ip("-n", self.name, "addr", "add", f"{PARTNER_ADDRESS}/30", "dev", "lan")
            run_ip("-n", self.name, "link", "set", "lan", "up")
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
        command = ["ip", "netns", "exec", self.name, sys.executable, str(script), KEY.hex(), "--host", PARTNER_ADDRESS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                yield int(process.stdout.readline())
                process.stdin.close()
                assert process.wait(LONG_S) == 0
            finally:
                process.kill()

    def drop_packets(self) -> None:
        """Drop all packets from the partner, without an error on either side."""
        run_ip("-n", self.name, "route", "add", "blackhole", f"{LOCAL_ADDRESS}/32")

    def deliver_packets(self) -> None:
        """Undo :meth:`drop_packets`."""
        run_ip("-n", self.name, "route", "del", "blackhole", f"{LOCAL_ADDRESS}/32")


@pytest.fixture
def partner() -> Iterator[Partner]:
    """Return a partner with a working link, or skip the test if network namespaces are not permitted."""
    if os.geteuid() != 0 or subprocess.run(["ip", "netns"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    with Partner() as new_partner:
        yield new_partner


def test_a_partner_with_dropped_packets_is_skipped(
    partner: Partner,
    hold: Callable[[bytes], int],
    replicator: Replicator,  # noqa: F811
) -> None:
    """A copy and a fetch end after their timeout, and the next save skips the partner.

    After packets arrive again, the partner accepts copies and still has the older one.
    """
    data = random.Random(1).randbytes(CHUNK_BYTES + 9)
    fd = hold(data)
    with partner.serve() as port:
        target = Target("partner", PARTNER_ADDRESS, port)
        (first,) = replicator.replicate(EARLIER, fd, len(data), (target,), timeout_s=LONG_S)
        assert first.chunks == digests_of(data)
        partner.drop_packets()
        (timed_out,) = replicator.replicate(NEWER, fd, len(data), (target,), timeout_s=0.5)
        (skipped,) = replicator.replicate(NEWER, fd, len(data), (target,), timeout_s=3600)
        with pytest.raises(ReplicaError, match=f"node partner .{PARTNER_ADDRESS}"):
            fetch(target, KEY, EARLIER, hold(bytes(len(data))), len(data), timeout_s=0.5)
        partner.deliver_packets()
        final = replicate_until_accepted(
            lambda: replicator.replicate(NEWEST, fd, len(data), (target,), timeout_s=LONG_S)[0]
        )
        target_fd = hold(bytes(len(data)))
        assert fetch(target, KEY, EARLIER, target_fd, len(data), timeout_s=LONG_S) == digests_of(data)
    assert (timed_out.chunks, timed_out.is_new) == (None, True)
    assert f"node partner ({PARTNER_ADDRESS}" in str(timed_out.error)
    assert (skipped.chunks, skipped.is_new) == (None, False)
    assert "skipped until it responds again" in str(skipped.error)
    assert final.chunks == digests_of(data)
    assert os.pread(target_fd, len(data), 0) == data
