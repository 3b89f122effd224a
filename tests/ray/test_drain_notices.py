"""The nodes that Ray drains are tracked while Ray's response changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from outlast import clock
from outlast.ray import ActorGroup, pool
from outlast.ray.pool import DrainNotices

LIMIT_S = 120.0


def wait_for_nodes(notices: DrainNotices, condition: Callable[[Mapping[str, float]], bool]) -> Mapping[str, float]:
    """Return the draining nodes once they meet the condition."""
    end_s = clock.now_s() + LIMIT_S
    while not condition(nodes := notices.nodes):
        assert clock.now_s() < end_s, nodes
    return nodes


def test_a_changed_deadline_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later deadline, an earlier one and a first one replace the known deadline; an unchanged deadline does not move
    when the wall clock is set."""
    deadlines = {"a": 1000_000, "b": 0}
    wall = {"now_s": 900.0}
    monkeypatch.setattr(pool, "_DRAIN_POLL_S", 0.001)
    monkeypatch.setattr(pool, "ray_state", SimpleNamespace(state=SimpleNamespace(get_draining_nodes=deadlines.copy)))
    monkeypatch.setattr(clock, "seconds_until", lambda epoch_s: epoch_s - wall["now_s"])
    begin_s = clock.now_s()
    notices = DrainNotices()
    try:
        first = wait_for_nodes(notices, lambda nodes: len(nodes) == 2)
        assert math.isinf(first["b"])
        assert first["a"] >= begin_s + 100
        wall["now_s"] = 500.0
        deadlines["c"] = 0
        assert wait_for_nodes(notices, lambda nodes: len(nodes) == 3)["a"] == first["a"]
        deadlines |= {"a": 700_000, "b": 600_000}
        changed = wait_for_nodes(notices, lambda nodes: nodes["a"] != first["a"] and not math.isinf(nodes["b"]))
        assert changed["a"] - first["a"] >= 100
        assert changed["a"] - changed["b"] == pytest.approx(100, abs=LIMIT_S / 2)
        del deadlines["a"]
        wait_for_nodes(notices, lambda nodes: set(nodes) == {"b", "c"})
    finally:
        notices.close()


def test_draining_nodes_come_from_one_response() -> None:
    """The draining nodes are those of a single response, though another thread receives the next one at that moment."""
    responses: list[dict[str, float]] = [{"a": 2.0, "b": 1.0}, {}, {}]

    class Changing:
        @property
        def draining(self) -> Mapping[str, float]:
            return responses.pop(0)

    group: Any = ActorGroup.__new__(ActorGroup)
    group._pool, group._current, group._staying = Changing(), SimpleNamespace(members={}), set()
    group._leave_drained_nodes()
    assert len(responses) == 2
