"""The result of a submitted call can be awaited in a thread or an event loop; to stop waiting does not stop the
call."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError

from outlast.errors import DeadlineExceeded
from outlast.ray.actor_group import Pending
from outlast.ray.recovery import RecoveryReport
from outlast.ray.watch import LossKind, LostActor, describe_error


def pending() -> tuple[Pending, Future[Any]]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return Pending("train_step", future), future


def test_a_wait_timeout_does_not_end_the_call() -> None:
    """The timeout error names the method; the call's result is available later."""
    one, future = pending()
    with pytest.raises(DeadlineExceeded, match="'train_step' has not ended"):
        one.result(0.0)
    assert not one.is_done
    future.set_result([1, 2])
    assert one.result(0.0) == [1, 2]
    assert one.is_done


def test_a_timeout_error_of_the_call_is_distinguished() -> None:
    """A TimeoutError that the call raised does not count as the timeout of the wait."""
    one, future = pending()
    future.set_exception(TimeoutError("of the user's own"))
    with pytest.raises(TimeoutError, match="own") as raised:
        one.result(0.0)
    assert not isinstance(raised.value, DeadlineExceeded)


def test_a_cancelled_await_does_not_cancel_the_call() -> None:
    """An event loop may cancel an await, and await the call again."""
    one, future = pending()

    async def wait_twice() -> Any:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(one, 0.01)
        assert not future.cancelled()
        future.set_result("there")
        return await one

    assert asyncio.run(wait_twice()) == "there"


def test_a_dead_actor_is_described_by_its_reason() -> None:
    """Of Ray's text about a dead actor the reason is kept, not the advice."""
    error = RayActorError(
        error_msg="The actor died unexpectedly before finishing this task.\n\tclass_name: A\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: much."
    )
    assert describe_error(error) == "its worker process has died (SYSTEM_ERROR)"
    assert describe_error(ValueError("one\ntwo")) == "ValueError: one two"
    assert describe_error(None) == "no response"


def test_a_recovery_report_lists_every_actor() -> None:
    """The log line has the lost actors with their evidence, the kept and replaced ones, which ones loaded, and the
    times."""
    lost = LostActor(rank=3, node="abcdefghijkl", pid=12, kind=LossKind.DIED, evidence="its process ended")
    report = RecoveryReport(
        incarnation=1,
        method="train_step",
        lost=(lost,),
        kept={0: 10, 1: 11},
        replaced={3: 13},
        loaded=(3,),
        checkpoint=6,
        begun_at=6,
        iteration=6,
        mesh_before={"dp": 4},
        mesh_after={"dp": 4},
        rounds=1,
        phases_s={"abort": 0.01},
        total_s=0.2,
        repeated=True,
    )
    assert report.describe() == (
        "rank 3 (pid 12, node abcdefgh) died: its process ended -> ranks kept: 0, 1; replaced: 3 (pid 13); "
        "rank 3 loaded; iteration 6; 0.200 s (abort 0.010 s)"
    )
