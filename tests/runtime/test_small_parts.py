"""Mailbox, endpoints, the TCPStore, atomic files and process helpers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outlast.errors import ConfigError, RendezvousError
from outlast.runtime import processes, store
from outlast.runtime.addresses import Endpoint, parse_endpoints
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.files import write_atomically


def test_mailbox_wakes_its_owner_and_keeps_order() -> None:
    """Items of other threads arrive in order, and wake the owner's select."""
    box: Mailbox[int] = Mailbox()
    thread = threading.Thread(target=lambda: [box.put(number) for number in range(100)])
    thread.start()
    received: list[int] = []
    while len(received) < 100:
        assert select.select([box], [], [], 10)[0]
        received += box.take_all()
    thread.join(10)
    assert received == list(range(100))
    assert not select.select([box], [], [], 0)[0]
    box.close()


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("head:29500", [Endpoint("head", 29500)]),
        ("head", [Endpoint("head", 29400)]),
        ("a:1,b:2", [Endpoint("a", 1), Endpoint("b", 2)]),
        ("[::1]:5", [Endpoint("::1", 5)]),
        ("[::1]", [Endpoint("::1", 29400)]),
    ],
)
def test_endpoints_are_parsed(text: str, endpoints: list[Endpoint]) -> None:
    """Hosts with and without port, several of them, and IPv6 in brackets."""
    assert list(parse_endpoints(text)) == endpoints


@pytest.mark.parametrize("text", ["", ":5", "a:b", "a:70000", "a:1,,b:2"])
def test_invalid_endpoints_are_rejected(text: str) -> None:
    """An invalid endpoint is rejected with the expected form."""
    with pytest.raises(ConfigError, match=r"host:port|names no host"):
        parse_endpoints(text)


def test_tcp_store_has_one_host_per_endpoint() -> None:
    """The second process to bind an endpoint gets None, and clients read what the host and others write."""
    hosted = store.host(Endpoint("127.0.0.1", 0), timeout_s=10)
    endpoint = Endpoint("127.0.0.1", hosted.port)
    assert store.host(endpoint, timeout_s=10) is None
    client = store.connect(endpoint, timeout_s=5, call_timeout_s=5)
    client.set("key", "value")
    assert hosted.get("key") == b"value"


def test_refused_connection_fails_at_once() -> None:
    """A refused connection does not take the whole timeout, and the error has the endpoint."""
    with pytest.raises(RendezvousError, match=r"127\.0\.0\.1:1\b"):
        store.connect(Endpoint("127.0.0.1", 1), timeout_s=30, call_timeout_s=5)


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    """A failed write keeps the old file and leaves no other."""
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    folder = tmp_path / "full"
    folder.mkdir()
    with pytest.raises(OSError, match="No such file"):
        write_atomically(folder / "missing" / "state.json", b"data")
    assert os.listdir(tmp_path) == ["state.json", "full"] or sorted(os.listdir(tmp_path)) == ["full", "state.json"]


@pytest.mark.process
def test_process_dies_with_its_parent() -> None:
    """A process is killed by the kernel when its parent ends."""
    code = (
        "import os, time\n"
        "from outlast.runtime.processes import die_with_parent\n"
        "parent = os.getpid()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    die_with_parent(parent)\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    fd = os.pidfd_open(child)
    parent.kill()
    parent.wait(timeout=10)
    parent.stdout.close()
    assert select.select([fd], [], [], 5)[0]
    os.close(fd)


def test_exits_are_described() -> None:
    """Exit codes and signals are described in words."""
    assert processes.describe_exit(3) == "exit code 3"
    assert processes.describe_exit(-signal.SIGKILL) == "signal 9 (SIGKILL)"
