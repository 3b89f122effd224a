"""Pings of an actor: one at a time, and repeated where one was not delivered."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest

from outlast import clock
from outlast.ray import replies as replies_module
from outlast.ray.replies import ActorPing, Reply, ReplyFault


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[Reply | None]:
    """Return a list from which the next polls take their results, in order."""
    coming: list[Reply | None] = []
    monkeypatch.setattr(replies_module, "reply_if_ready", lambda _: coming.pop(0))
    monkeypatch.setattr(replies_module, "_AGAIN_S", 0.0)
    return coming


def test_pings_are_sent_one_at_a_time_when_due(replies: list[Reply | None]) -> None:
    """No ping is sent while a reply is outstanding, nor before the next ping is due."""
    method: Any = Mock()
    ping, answer = ActorPing(), Reply(value="well")
    replies += [None, answer]
    assert [ping.poll(method) for _ in range(3)] == [None, None, answer]
    assert method.remote.call_count == 1
    ping.note_answer(clock.now_s() + 100)
    assert ping.poll(method) is None
    assert method.remote.call_count == 1
    assert ping.asked_s == math.inf


def test_an_undelivered_ping_is_repeated(
    replies: list[Reply | None],
) -> None:
    """An actor that is briefly unreachable may be alive: the next ping decides, and the silence counts from the first
    one."""
    method: Any = Mock()
    ping, answer = ActorPing(), Reply(value="well")
    replies += [Reply(fault=ReplyFault.UNREACHABLE), answer]
    assert ping.poll(method) is None
    first_s = ping.asked_s
    assert ping.poll(method) is None
    assert ping.ref is None  # a received reply would end every wait at once
    assert ping.poll(method) is None
    assert (method.remote.call_count, ping.asked_s) == (2, first_s)
    assert ping.poll(method) is answer


def test_death_and_errors_are_replies(replies: list[Reply | None]) -> None:
    """An exception of the actor, and its death, are replies."""
    for fault in (ReplyFault.DIED, ReplyFault.RAISED):
        ping = ActorPing(ref="asked", asked_s=0.0)
        replies.append(Reply(fault=fault))
        found = ping.poll(Mock())
        assert found is not None
        assert found.fault == fault
