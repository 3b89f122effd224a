"""Reading one key of a control store: right, in bounded time, and clear about what is no store."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from outlast.errors import RendezvousError
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint
from outlast.runtime.store import read_key
from outlast.testing.ranks import free_port

LONG_S = 60.0


@contextlib.contextmanager
def foreign(answer: bytes | None, *, after_request: bool = True) -> Iterator[Endpoint]:
    """Listen as another program does; ``None`` = it says nothing until the other end has gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                if after_request:
                    connection.recv(100)
                if answer is None:
                    while connection.recv(100):
                        pass
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
        thread.join(timeout=LONG_S)


def test_what_was_set_is_read() -> None:
    """A key of any length comes back byte by byte; one that is not there is told apart from a missing store."""
    store = stores.host(Endpoint("localhost", 0), timeout_s=LONG_S)
    endpoint = Endpoint("localhost", store.port)
    assert read_key(endpoint, "status", timeout_s=LONG_S) is None
    for value in (b"", b'{"a": 1}', bytes(range(256)) * 20_000):
        store.set("status", value)
        assert store.get("status") == value, "it has arrived"
        assert read_key(endpoint, "status", timeout_s=LONG_S) == value
    assert store.get("status") == value, "the store serves on"


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"", b"\0" + b"\xff" * 8, b"\0\1"],
    ids=["http", "ssh", "silence", "length", "half"],
)
def test_another_program_is_named_so(answer: bytes) -> None:
    """Whatever another program answers, it is no control store."""
    with (
        foreign(answer, after_request=not answer.startswith(b"SSH")) as endpoint,
        pytest.raises(RendezvousError, match=f"what listens at {endpoint} is not a control store of outlast"),
    ):
        read_key(endpoint, "status", timeout_s=LONG_S)


def test_program_that_says_nothing_is_given_up() -> None:
    """A program that accepts the connection and never answers costs the time limit, and no more."""
    with (
        foreign(None) as endpoint,
        pytest.raises(RendezvousError, match=r"did not answer within 0\.2 s; it is another program"),
    ):
        read_key(endpoint, "status", timeout_s=0.2)


def test_nobody_there_and_no_such_host_are_told_apart() -> None:
    """A port where nobody listens, and a name that nobody knows, have a line each."""
    with pytest.raises(RendezvousError, match=r"nobody answers at 127.0.0.1:\d+ \(connection refused\)"):
        read_key(Endpoint("127.0.0.1", free_port()), "status", timeout_s=LONG_S)
    with pytest.raises(RendezvousError, match=r"the host no\.such.host.invalid is not known here .*check its spelling"):
        read_key(Endpoint("no.such.host.invalid", 29400), "status", timeout_s=LONG_S)
