"""Pings of an actor: one at a time, and repeated after a failed one."""

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


@pytest.mark.parametrize("fault", [ReplyFault.UNREACHABLE, ReplyFault.RAISED])
def test_failed_ping_is_repeated_and_silence_counts_from_the_first(
    replies: list[Reply | None], fault: ReplyFault
) -> None:
    """A ping that raised or did not reach the actor is repeated: the actor may be alive."""
    method: Any = Mock()
    ping, answer = ActorPing(), Reply(value="well")
    replies += [Reply(fault=fault), answer]
    assert ping.poll(method) is None
    first_s = ping.asked_s
    assert ping.poll(method) is None
    assert ping.ref is None  # a received reply would end every wait at once
    assert ping.poll(method) is None
    assert (method.remote.call_count, ping.asked_s) == (2, first_s)
    assert ping.poll(method) is answer


def test_death_and_silence_are_faults(replies: list[Reply | None]) -> None:
    """A dead actor is reported at once, a silent one after the timeout, with the error of its last ping, if any."""
    replies += [Reply(fault=ReplyFault.DIED), None, None, Reply(fault=ReplyFault.RAISED, error=ValueError("torn"))]
    now_s = clock.now_s()
    found = [ActorPing(ref="asked", asked_s=now_s - 5).poll(Mock(), timeout_s) for timeout_s in (9, 9, 4, 4)]
    assert [one and one.fault for one in found] == [ReplyFault.DIED, None, ReplyFault.LATE, ReplyFault.LATE]
    assert [str(one.error) for one in found[2:] if one is not None] == ["no response for 5 s", "torn"]
