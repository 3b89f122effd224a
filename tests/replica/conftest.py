"""Fixtures for nodes that hold replicas and for shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from replica_nodes import KEY, Node, memfd


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    """Start nodes, which are closed after the test."""
    nodes: list[Node] = []

    def make(name: str = "other", key: bytes | None = KEY) -> Node:
        nodes.append(Node(name, key))
        return nodes[-1]

    yield make
    for node in nodes:
        node.server.close()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


@pytest.fixture
def hold() -> Iterator[Callable[[bytes], int]]:
    """Put bytes into memfds, which are closed after the test."""
    fds: list[int] = []

    def make(data: bytes) -> int:
        fds.append(memfd(data))
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)
