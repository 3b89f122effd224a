"""The nodes that Ray drains are tracked while Ray's response changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest

from outlast import clock
from outlast.ray import pool
from outlast.ray.pool import DrainNotices, by_deadline

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


def test_draining_nodes_are_left_by_deadline() -> None:
    """The node that Ray ends first is left first; a node without a deadline is left last."""
    assert by_deadline({"a": 2.0, "b": 1.0, "c": math.inf}) == ["b", "a", "c"]
