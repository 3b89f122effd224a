"""The re-run state machine as a table, and what workers and launcher exchange about an invalid result.

A step is run; every rank takes the outcome of its validations (:class:`RunOutcome`), all ranks agree on the largest,
and the table determines what they do. ``.`` = cannot be: the first run is followed by the second all the same, a later
one counts as unreached.

==================  =========  ===============  ===============  ============  ============  ============  ============
state               valid      cleared          tolerated        unreached     new           changed       reproduced
==================  =========  ===============  ===============  ============  ============  ============  ============
FIRST_RUN           go on      .                .                .             run again     .             .
SECOND_RUN          .          go on            go on            save, 16      save, 16      save, 16      save, 16
                               (transient)      (reproduced)     (unreached)   (undecided)   (undecided)   (reproduced)
REPLAY_ELSEWHERE    .          17               17               17            17            17            17
                               (persistent)     (persistent)     (unreached)   (undecided)   (correct)     (correct)
REPLAY_HERE         .          go on            go on            16            16            16            16
                               (transient)      (transient)      (unreached)   (undecided)   (undecided)   (reproduced)
LAST_REPLAY_HERE    .          go on            go on            17            17            17            17
                               (transient)      (transient)      (unreached)   (undecided)   (undecided)   (reproduced)
==================  =========  ===============  ===============  ============  ============  ============  ============

So a rejected result is never trained on: a step goes on only if nothing was rejected in the run whose results it keeps,
except by a validation that is not fatal. In place, a step is run twice at most. The replays here are counted by the
launcher, the last of them is marked as such, and one elsewhere comes once: nothing repeats forever.

A :class:`Diagnosis` is what a worker knows when it leaves with exit code 16 or 17, or with 18 for a slow rank; a
:class:`Replay` is what the launcher asks of the cycle that follows; an :class:`InvalidResultCase` is what the launcher
remembers. JSON has no NaN and no infinity, which are what this is about: numbers are kept in the form that
:func:`to_json_number` returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from outlast.errors import ExitReason
from outlast.policy.recovery_point import Load

JsonNumber: TypeAlias = float | str | None
"""A number as JSON can hold it: ``"nan"``, ``"inf"`` and ``"-inf"`` for those; ``None`` = there is none."""


class Finding(StrEnum):
    """What is known of an invalid result."""

    TRANSIENT = "transient"
    """Run again on the same device it was another one, and valid."""
    REPRODUCED = "reproduced"
    """Run again on the same device it was the same; another device must decide."""
    PERSISTENT = "persistent"
    """Another device gave a valid one: the first device is at fault."""
    CORRECT = "correct"
    """Another device gave an invalid one too: the data or the model is at fault."""
    UNREACHED = "unreached"
    """The run that was to confirm it did not come to the same validation."""
    UNDECIDED = "undecided"
    """None of these; in particular, run again it was invalid in another way."""
    REPEATED = "repeated"
    """It came in too many steps in a row: the run stops, for people to decide."""
    SPLIT = "split"
    """Replicas differ, and no majority shows whose is bad: no rank, node or device is blamed."""
    SLOW = "slow"
    """No result is invalid: the rank is slow, and its node is to be replaced (exit code 18)."""


_MEANING = {
    Finding.TRANSIENT: "a transient fault",
    Finding.REPRODUCED: "reproduced on the same device; another device must decide",
    Finding.PERSISTENT: "a persistent fault of that device, since another one gives a valid result",
    Finding.CORRECT: "correct, since another device gives an invalid result too: the data or the model is at fault",
    Finding.UNREACHED: "the run that was to confirm it did not reach this validation",
    Finding.UNDECIDED: "undecided",
    Finding.REPEATED: "the run stops, so that people can look at the data and at the ranks named, and go back",
    Finding.SLOW: "all ranks leave, so that its node can be replaced",
    Finding.SPLIT: "root cause unknown, as no majority shows which replica is bad",
}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one invalid result, or of one slow rank."""

    finding: Finding
    rank: int
    """Global rank that saw it; of a slow rank: that rank."""
    node: str = ""
    """Node of that rank."""
    device: str = ""
    """What that rank computed on when it saw it first, as :func:`outlast.runtime.device.device_name` names it."""
    iteration: int
    """Number of optimizer steps done before the step."""
    call: int = 0
    """Which validation of the step it was, from 0."""
    what: str = ""
    """Name of the value, such as ``loss``."""
    message: str = ""
    """Why it was rejected."""
    first: JsonNumber = None
    """The value when it was rejected first."""
    second: JsonNumber = None
    """The value of the run that was to confirm it; ``None`` = there is none."""
    batch: str = ""
    """Fingerprint of the rank's batches of that step; empty = it had none."""
    tries: int = 0
    """Replays on the same device that were done."""
    max_tries: int = 2
    """Replays on the same device that may be done (``max_same_device_reruns``)."""
    replayed_on: str = ""
    """What the replay that this is about ran on; empty = it was no replay."""
    rejected_ranks: tuple[int, ...] = ()
    """Ranks with an invalid result, in order."""

    def describe(self) -> str:
        """Return one line for people."""
        if self.first is None and self.message:  # no value was rejected: replicas, or ranks, were compared
            is_blamed = self.finding == Finding.PERSISTENT
            meaning = "a fault of that device, as the others agree" if is_blamed else _MEANING[self.finding]
            return f"{self.message}: {meaning}"
        where = f"rank {self.rank}"
        if self.node:
            where += f" on node {self.node}"
        if self.device:
            where += f" (device {self.device})"
        line = f"{self.what or 'a result'} of {where} at iteration {self.iteration}, validation {self.call}"
        line += f", was {_text(self.first)}"
        if self.message:
            line += f" ({self.message})"
        if self.second is not None:
            line += f", then {_text(self.second)}"
        if self.replayed_on:
            line += f" when it was replayed on {self.replayed_on}"
        line += f": {_MEANING[self.finding]}"
        if self.batch:
            line += f"; batch {self.batch}"
        others = [str(rank) for rank in self.rejected_ranks if rank != self.rank]
        if others:
            line += f"; invalid on rank{'s' if len(others) > 1 else ''} {', '.join(others)} too"
        return line

    def replay(self, *, tries: int) -> Replay:
        """Return what a cycle is to run again to find out more, after ``tries`` replays on the same device."""
        return Replay(
            iteration=self.iteration,
            device=self.device,
            node=self.node,
            rank=self.rank,
            call=self.call,
            what=self.what,
            first=self.first,
            batch=self.batch,
            tries=tries,
        )


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a cycle is to run again before anything else: the step of a diagnostic save, with its saved batches."""

    iteration: int
    """That of the diagnostic save."""
    attempt: str = ""
    """The attempt that made it; empty = the newest of that iteration."""
    device: str
    """What ``rank`` had computed on; the replay is on another device if it does not compute on that now."""
    node: str = ""
    """Its node then."""
    rank: int
    """Global rank that saw the invalid result."""
    call: int = 0
    """Which validation of the step it was, from 0."""
    what: str = ""
    """Name of the value."""
    first: JsonNumber = None
    """The value when it was rejected first."""
    batch: str = ""
    """Fingerprint of the rank's batches of that step: where the save is unavailable, the same ones may come again."""
    tries: int = 0
    """Replays on the same device that were done before this one."""


class InvalidResultCase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An invalid result that is being looked into."""

    iteration: int | None
    """Number of optimizer steps done before the step; ``None`` = not known."""
    device: str
    """What the rank computed on when the result was seen first; its node, where no device is known."""
    rank: int | None = None
    """Global rank that saw it, where its device is not known: two ranks of a node are then two devices."""
    load: Load | None = None
    """What the newest cycle that saw it while it trained had loaded."""
    same_device: int = 0
    """Cycles that were granted to see it again on the same device."""
    elsewhere: int = 0
    """Cycles that were granted to see it on another one."""


def relative_difference(a: float, b: float) -> float:
    """Return how much two results differ: 0 when they are the same, infinite when one of them is no number.

    The formula is the default comparison of Megatron-LM's re-run state machine: 0 when equal or both NaN, infinite when
    one is NaN or infinite, else the symmetric relative difference ``|2 (a - b) / (a + b)|``. Here it is written so that
    the sum of large numbers does not overflow; it is infinite where ``a + b`` is 0.
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    mean = a / 2 + b / 2
    return abs((a - b) / mean) if mean != 0 else math.inf


def to_json_number(value: float | None) -> JsonNumber:
    """Return a number in a form that JSON can hold."""
    return value if value is None or math.isfinite(value) else str(float(value))


def to_number(value: JsonNumber) -> float | None:
    """Return the number that :func:`to_json_number` was given.

    Raises:
        ValueError: It is a text that is no number.
    """
    return value if value is None else float(value)


def _text(value: JsonNumber) -> str:
    return "unknown" if value is None else value if isinstance(value, str) else f"{value:.9g}"


class StepRun(StrEnum):
    """Which run of a step this is."""

    FIRST_RUN = "first_run"
    """The ordinary one; also what follows a step that went on."""
    SECOND_RUN = "second_run"
    """In place, because something was rejected in the first."""
    REPLAY_ELSEWHERE = "replay_elsewhere"
    """After a restart, of the saved batches; the rank in question computes on another device."""
    REPLAY_HERE = "replay_here"
    """After a restart, on the same device; another may follow."""
    LAST_REPLAY_HERE = "last_replay_here"
    """The same; no other follows."""
    LEFT = "left"
    """The process ends."""


class RunOutcome(IntEnum):
    """What a rank's validations gave in a run; of several, and of several ranks', the largest counts."""

    VALID = 0
    """Nothing was rejected, and nothing had been."""
    CLEARED = 1
    """What had been rejected came out differently, and was accepted."""
    TOLERATED = 2
    """Something was rejected again by a validation that is not fatal."""
    UNREACHED = 3
    """A validation that had rejected something was not reached."""
    NEW = 4
    """Something was rejected that had not been, or there was no run before."""
    CHANGED = 5
    """What had been rejected came out differently, and was rejected again."""
    REPRODUCED = 6
    """What had been rejected came out the same."""


class Action(StrEnum):
    """What all ranks do now."""

    GO_ON = "go_on"
    """Let the optimizer step."""
    RUN_AGAIN = "run_again"
    """Put back random numbers, batches, gradients and buffers, and run the step again."""
    SAVE_AND_LEAVE = "save_and_leave"
    """Put them back, save for a diagnosis, and leave with exit code 16."""
    LEAVE = "leave"
    """Leave with exit code 16; what is needed is saved already."""
    STOP = "stop"
    """Leave with exit code 17; the finding is final as far as workers can tell."""

    @property
    def exit_code(self) -> ExitReason | None:
        """The process's exit code; ``None`` = it does not end."""
        if self is Action.STOP:
            return ExitReason.FAILED_VALIDATION
        return ExitReason.RESUME_TO_DISAMBIGUATE if self in (Action.SAVE_AND_LEAVE, Action.LEAVE) else None


class Transition(NamedTuple):
    """What follows an outcome."""

    state: StepRun
    action: Action
    finding: Finding | None = None
    """What is known now of what was rejected; ``None`` = nothing was, or nothing is known yet."""


_S, _A, _O, _F = StepRun, Action, RunOutcome, Finding


def _leave(action: Action, **findings: Finding) -> dict[RunOutcome, Transition]:
    """Return a row of which every outcome ends the process."""
    row = dict.fromkeys(RunOutcome, Transition(_S.LEFT, action, findings.get("reproduced")))
    row[_O.VALID] = row[_O.UNREACHED] = Transition(_S.LEFT, action, _F.UNREACHED)
    row[_O.NEW] = Transition(_S.LEFT, action, _F.UNDECIDED)
    row[_O.CHANGED] = Transition(_S.LEFT, action, findings.get("changed"))
    return row


def _go_on(cleared: Finding, tolerated: Finding) -> dict[RunOutcome, Transition]:
    return {
        _O.CLEARED: Transition(_S.FIRST_RUN, _A.GO_ON, cleared),
        _O.TOLERATED: Transition(_S.FIRST_RUN, _A.GO_ON, tolerated),
    }


_JUDGED_HERE = {"changed": _F.UNDECIDED, "reproduced": _F.REPRODUCED}
_ELSEWHERE = Transition(_S.LEFT, _A.STOP, _F.PERSISTENT)

TABLE: Mapping[StepRun, Mapping[RunOutcome, Transition]] = MappingProxyType(
    {
        _S.FIRST_RUN: dict.fromkeys(RunOutcome, Transition(_S.SECOND_RUN, _A.RUN_AGAIN))
        | {_O.VALID: Transition(_S.FIRST_RUN, _A.GO_ON)},
        _S.SECOND_RUN: _leave(_A.SAVE_AND_LEAVE, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.REPRODUCED),
        _S.REPLAY_ELSEWHERE: _leave(_A.STOP, changed=_F.CORRECT, reproduced=_F.CORRECT)
        | {_O.CLEARED: _ELSEWHERE, _O.TOLERATED: _ELSEWHERE},
        _S.REPLAY_HERE: _leave(_A.LEAVE, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.TRANSIENT),
        _S.LAST_REPLAY_HERE: _leave(_A.STOP, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.TRANSIENT),
    }
)
"""What follows each outcome in each state; nothing follows :attr:`StepRun.LEFT`."""


def advance(state: StepRun, outcome: RunOutcome) -> Transition:
    """Return what follows a run.

    Args:
        state: Which run it was.
        outcome: The largest of all ranks' outcomes.

    Raises:
        ValueError: The process was to end; there is no other run.
    """
    if state not in TABLE:
        raise ValueError("the ranks were to leave; no step follows")
    return TABLE[state][outcome]


def replay_state(*, same_device: bool, tries: int, max_tries: int) -> StepRun:
    """Return which run a replay is.

    Args:
        same_device: Whether the rank in question computes on the device that gave the invalid result.
        tries: Replays on that device before this one.
        max_tries: How many there may be.
    """
    if not same_device:
        return StepRun.REPLAY_ELSEWHERE
    return StepRun.REPLAY_HERE if tries + 1 < max_tries else StepRun.LAST_REPLAY_HERE
