"""A save that fails because the call around it is left is no trouble of its own."""

from __future__ import annotations

from typing import Any

from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.outcomes import Outcomes
from outlast.checkpoint.save import Save, SaveHandle
from outlast.errors import CheckpointError


class Told:
    """Stands in for those who are told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.said.append(name)


def fail(outcomes: Outcomes) -> SaveHandle:
    """Have a save fail."""
    handle = SaveHandle(3, limit_s=1.0)
    save = Save(
        iteration=3,
        attempt=SaveAttempt(job="j", cycle=0, token="t", ordinal=0),
        handle=handle,
        started_ns=0,
        stall_s=0.0,
        tiers=frozenset(),
    )
    outcomes.failed(save, CheckpointError("a connection ended"))
    return handle


def test_without_a_call_every_failure_is_one() -> None:
    """It is reported, and counts."""
    told = Told()
    outcomes = Outcomes(told, told, told)  # type: ignore[arg-type]
    assert fail(outcomes).error is not None
    assert (told.said, outcomes.num_failures) == (["failed"], 1)


def test_what_fails_as_the_call_is_left_is_abandoned() -> None:
    """It is neither an incident nor counted, also where the peers' leaving is noticed before one's own."""
    told, looks = Told(), iter([False, False, True, True])
    outcomes = Outcomes(told, told, told)  # type: ignore[arg-type]
    outcomes.is_left = lambda: next(looks)
    assert fail(outcomes).error is not None
    assert (told.said, outcomes.num_failures) == (["given_up"], 0)
