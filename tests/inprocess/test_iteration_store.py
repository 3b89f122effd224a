"""Each iteration has a new store."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outlast.inprocess.call import CallStore


def test_the_address_is_known_before_the_store_serves() -> None:
    """Ranks can connect as soon as they have the address, and find the values of other ranks."""
    store = CallStore("127.0.0.1")
    host, port = store.address.split(" ")
    store.serve(timeout_s=10)
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    client.set("a", "1")
    assert TCPStore(host, int(port), is_master=False, wait_for_workers=False).get("a") == b"1"
    store.close()


def test_an_unused_store_frees_its_port() -> None:
    """A rank that does not become rank 0 frees its port."""
    store = CallStore("127.0.0.1")
    host, port = store.address.split(" ")
    store.close()
    store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
