"""Questions whether an actor lives: one at a time, and again where one did not reach it."""

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
    """What the next polls find, in this order."""
    coming: list[Reply | None] = []
    monkeypatch.setattr(replies_module, "reply_if_ready", lambda _: coming.pop(0))
    monkeypatch.setattr(replies_module, "_AGAIN_S", 0.0)
    return coming


def test_one_question_is_open_at_a_time_and_the_next_waits_for_its_time(replies: list[Reply | None]) -> None:
    """Nothing is asked while a reply is waited for, nor before the next question is due."""
    method: Any = Mock()
    ping, answer = ActorPing(), Reply(value="well")
    replies += [None, answer]
    assert [ping.poll(method) for _ in range(3)] == [None, None, answer]
    assert method.remote.call_count == 1
    ping.note_answer(clock.now_s() + 100)
    assert ping.poll(method) is None
    assert method.remote.call_count == 1
    assert ping.asked_s == math.inf


def test_question_that_did_not_arrive_is_asked_again_and_silence_counts_from_the_first(
    replies: list[Reply | None],
) -> None:
    """An actor that could not be reached for a moment may live: the next question finds out."""
    method: Any = Mock()
    ping, answer = ActorPing(), Reply(value="well")
    replies += [Reply(fault=ReplyFault.UNREACHABLE), answer]
    assert ping.poll(method) is None
    first_s = ping.asked_s
    assert ping.poll(method) is None
    assert ping.ref is None  # a reply that has come would end every wait at once
    assert ping.poll(method) is None
    assert (method.remote.call_count, ping.asked_s) == (2, first_s)
    assert ping.poll(method) is answer


def test_death_and_errors_are_replies(replies: list[Reply | None]) -> None:
    """What the actor raised, and that it is dead, are for whoever asks."""
    for fault in (ReplyFault.DIED, ReplyFault.RAISED):
        ping = ActorPing(ref="asked", asked_s=0.0)
        replies.append(Reply(fault=fault))
        found = ping.poll(Mock())
        assert found is not None
        assert found.fault == fault
