"""What is known of the nodes that Ray drains, whenever Ray's answer changes."""

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


def answer(notices: DrainNotices, is_so: Callable[[Mapping[str, float]], bool]) -> Mapping[str, float]:
    """Return what is known once it is so."""
    end_s = clock.now_s() + LIMIT_S
    while not is_so(nodes := notices.nodes):
        assert clock.now_s() < end_s, nodes
    return nodes


def test_a_deadline_that_ray_changes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later deadline, an earlier one and one that was not known before take the place of what was known; one that
    stays the same is not moved by a clock that is set."""
    told = {"a": 1000_000, "b": 0}
    wall = {"now_s": 900.0}
    monkeypatch.setattr(pool, "_DRAIN_POLL_S", 0.001)
    monkeypatch.setattr(pool, "ray_state", SimpleNamespace(state=SimpleNamespace(get_draining_nodes=told.copy)))
    monkeypatch.setattr(clock, "seconds_until", lambda epoch_s: epoch_s - wall["now_s"])
    begin_s = clock.now_s()
    notices = DrainNotices()
    try:
        first = answer(notices, lambda nodes: len(nodes) == 2)
        assert math.isinf(first["b"])
        assert first["a"] >= begin_s + 100
        wall["now_s"] = 500.0
        told["c"] = 0
        assert answer(notices, lambda nodes: len(nodes) == 3)["a"] == first["a"]
        told |= {"a": 700_000, "b": 600_000}
        changed = answer(notices, lambda nodes: nodes["a"] != first["a"] and not math.isinf(nodes["b"]))
        assert changed["a"] - first["a"] >= 100
        assert changed["a"] - changed["b"] == pytest.approx(100, abs=LIMIT_S / 2)
        del told["a"]
        answer(notices, lambda nodes: set(nodes) == {"b", "c"})
    finally:
        notices.close()


def test_an_answer_that_changes_meanwhile_confuses_nobody() -> None:
    """The nodes to leave are those of one answer, though another thread takes the next one at that moment."""
    answers: list[dict[str, float]] = [{"a": 2.0, "b": 1.0}, {}, {}]

    class Changing:
        @property
        def draining(self) -> Mapping[str, float]:
            return answers.pop(0)

    group: Any = ActorGroup.__new__(ActorGroup)
    group._pool, group._current, group._staying = Changing(), SimpleNamespace(members={}), set()
    group._leave_drained_nodes()
    assert len(answers) == 2
