"""Each iteration has a store of its own."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outlast.inprocess.call import CallStore


def test_its_address_is_known_before_it_serves() -> None:
    """Ranks may connect as soon as they know the address, and find what others put there."""
    store = CallStore("127.0.0.1")
    host, port = store.address.split(" ")
    store.serve(timeout_s=10)
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    client.set("a", "1")
    assert TCPStore(host, int(port), is_master=False, wait_for_workers=False).get("a") == b"1"
    store.close()


def test_one_that_is_not_needed_leaves_nothing() -> None:
    """A rank that does not become rank 0 gives its port back."""
    store = CallStore("127.0.0.1")
    host, port = store.address.split(" ")
    store.close()
    store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
