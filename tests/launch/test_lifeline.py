"""Lifelines: an agent's death is known at once, a broken connection is not taken for one."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator

import pytest

from outlast.launch.coordinator_client import Lifeline
from outlast.launch.coordinator_server import LifelineServer

Deaths = queue.SimpleQueue[tuple[str, str, str]]


@pytest.fixture
def server() -> Iterator[tuple[LifelineServer, Deaths]]:
    deaths: Deaths = queue.SimpleQueue()
    server = LifelineServer("127.0.0.1", lambda *death: deaths.put(death))
    server.start()
    yield server, deaths
    server.close()


def wait_until_held(server: LifelineServer, num: int) -> None:
    deadline = time.monotonic() + 60
    while sum(hello is not None for hello in list(server._held.values())) != num:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_end_of_a_lifeline_is_a_death(server: tuple[LifelineServer, Deaths]) -> None:
    """When an agent lets go and does not come back, its node and epoch are named."""
    lifelines, deaths = server
    line = Lifeline("127.0.0.1", lifelines.port, node="a", epoch="1")
    wait_until_held(lifelines, 1)
    line.close()
    assert deaths.get(timeout=60)[:2] == ("a", "1")


def test_broken_connection_is_not_a_death(
    server: tuple[LifelineServer, Deaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent whose connection the network broke connects again at once, and nobody is told."""
    monkeypatch.setattr("outlast.launch.coordinator_server.PATIENCE_S", 60.0)
    lifelines, deaths = server
    line = Lifeline("127.0.0.1", lifelines.port, node="a", epoch="1")
    wait_until_held(lifelines, 1)
    broken = line._socket
    assert broken is not None
    before = set(lifelines._held)
    broken.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 60
    while lifelines._suspects or not any(
        hello is not None and one not in before for one, hello in list(lifelines._held.items())
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert deaths.empty()
    line.close()


def test_strangers_words_have_no_effect(server: tuple[LifelineServer, Deaths]) -> None:
    """A connection that says something else is closed, and the others stay."""
    lifelines, deaths = server
    line = Lifeline("127.0.0.1", lifelines.port, node="a", epoch="1")
    wait_until_held(lifelines, 1)
    with socket.create_connection(("127.0.0.1", lifelines.port), timeout=60) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(1) == b""
    wait_until_held(lifelines, 1)
    assert deaths.empty()
    line.close()
