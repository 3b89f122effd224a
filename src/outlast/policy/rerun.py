"""The re-run state machine as a table, and the messages of workers and launcher about an invalid result.

A step is run; every rank has the outcome of its validations (:class:`RunOutcome`), all ranks agree on the largest, and
the table determines the action. ``.`` = impossible: the first run is then followed by the second, a later one counts as
unreached.

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

A rejected result is never trained on: a step continues only if nothing was rejected in the run whose results it keeps,
except by a validation that is not fatal. In place, a step is run at most twice. The launcher counts the replays here
and marks the last one; there is one replay elsewhere: nothing repeats forever.

A worker that exits with code 16 or 17, or with 18 for a slow rank, leaves a :class:`Diagnosis`; a :class:`Replay` is
the launcher's request to the next cycle; an :class:`InvalidResultCase` is what the launcher stores. JSON has neither
NaN nor infinity: numbers are kept as :func:`to_json_number` returns them.
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
"""A number in JSON: ``"nan"``, ``"inf"`` and ``"-inf"`` as strings; ``None`` = there is none."""


class Finding(StrEnum):
    """Classification of an invalid result."""

    TRANSIENT = "transient"
    """The second run on the same device gave a different, valid result."""
    REPRODUCED = "reproduced"
    """The second run on the same device gave the same result; another device must decide."""
    PERSISTENT = "persistent"
    """Another device gave a valid result: the first device is at fault."""
    CORRECT = "correct"
    """Another device gave an invalid result, too: the data or the model is at fault."""
    UNREACHED = "unreached"
    """The confirming run did not reach the same validation."""
    UNDECIDED = "undecided"
    """None of these; in particular, the second result was invalid in another way."""
    REPEATED = "repeated"
    """Too many steps in a row were invalid: the run stops for people to decide."""
    SPLIT = "split"
    """Replicas differ, and no majority shows which is bad: no rank, node or device is blamed."""
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
    """Facts about one invalid result, or one slow rank."""

    finding: Finding
    rank: int
    """Global rank that saw it, or the slow rank."""
    node: str = ""
    device: str = ""
    """Device of that rank at the first result, as named by :func:`outlast.runtime.device.device_name`."""
    iteration: int
    """Number of optimizer steps done before the step."""
    call: int = 0
    """Number of the validation within the step, from 0."""
    what: str = ""
    """Name of the value, such as ``loss``."""
    message: str = ""
    """Why it was rejected."""
    first: JsonNumber = None
    """The value when it was rejected first."""
    second: JsonNumber = None
    """The value of the confirming run; ``None`` = there is none."""
    batch: str = ""
    """Fingerprint of the rank's batches of that step; empty = none."""
    tries: int = 0
    """Replays done on the same device."""
    max_tries: int = 2
    """Replays allowed on the same device (``max_same_device_reruns``)."""
    replayed_on: str = ""
    """Device of the replay that this is about; empty = not a replay."""
    rejected_ranks: tuple[int, ...] = ()
    """Ranks with an invalid result, in order."""

    def describe(self) -> str:
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
        """Return what the next cycle is to run again, after ``tries`` replays on the same device."""
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
    """Request to a cycle to first run the step of a diagnostic save again, with its saved batches."""

    iteration: int
    """That of the diagnostic save."""
    attempt: str = ""
    """The attempt that made it; empty = the newest of that iteration."""
    device: str
    """Device of ``rank`` at the first result; if ``rank`` now computes on another one, the replay is elsewhere."""
    node: str = ""
    """Its node then."""
    rank: int
    """Global rank that saw the invalid result."""
    call: int = 0
    """Number of the validation within the step, from 0."""
    what: str = ""
    first: JsonNumber = None
    """The value when it was rejected first."""
    batch: str = ""
    """Fingerprint of the rank's batches of that step, which may recur where the save is unavailable."""
    tries: int = 0
    """Replays on the same device before this one."""


class InvalidResultCase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An invalid result without a final finding."""

    iteration: int | None
    """Number of optimizer steps done before the step; ``None`` = not known."""
    device: str
    """Device of the rank at the first result; its node, where the device is not known."""
    rank: int | None = None
    """Global rank that saw it, if its device is not known: two ranks of a node are then two devices."""
    load: Load | None = None
    """What the newest cycle that saw it in training had loaded."""
    same_device: int = 0
    """Cycles granted to run it again on the same device."""
    elsewhere: int = 0
    """Cycles granted to run it again on another device."""


def relative_difference(a: float, b: float) -> float:
    """Return the relative difference of two results: 0 if equal, infinite if one is not finite.

    The default comparison of Megatron-LM's re-run state machine: 0 if equal or both NaN, infinite if one is NaN or
    infinite, else the symmetric relative difference ``|2 (a - b) / (a + b)|``, written so that the sum of large numbers
    does not overflow; infinite where ``a + b`` is 0.
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    mean = a / 2 + b / 2
    return abs((a - b) / mean) if mean != 0 else math.inf


def to_json_number(value: float | None) -> JsonNumber:
    return value if value is None or math.isfinite(value) else str(float(value))


def to_number(value: JsonNumber) -> float | None:
    """Return the number that :func:`to_json_number` was given.

    Raises:
        ValueError: The text is not a number.
    """
    return value if value is None else float(value)


def _text(value: JsonNumber) -> str:
    return "unknown" if value is None else value if isinstance(value, str) else f"{value:.9g}"


class StepRun(StrEnum):
    """Kind of a run of a step."""

    FIRST_RUN = "first_run"
    """The ordinary one; also after a step that continued."""
    SECOND_RUN = "second_run"
    """In place, after a rejection in the first."""
    REPLAY_ELSEWHERE = "replay_elsewhere"
    """After a restart, with the saved batches; the rank in question computes on another device."""
    REPLAY_HERE = "replay_here"
    """After a restart, on the same device; another may follow."""
    LAST_REPLAY_HERE = "last_replay_here"
    """After a restart, on the same device; none follows."""
    LEFT = "left"
    """The process exits."""


class RunOutcome(IntEnum):
    """Outcome of a rank's validations in a run; of several, and of several ranks', the largest counts."""

    VALID = 0
    """Nothing was rejected, now or before."""
    CLEARED = 1
    """The rejected value changed, and was accepted."""
    TOLERATED = 2
    """Something was rejected again by a validation that is not fatal."""
    UNREACHED = 3
    """A validation that had rejected something was not reached."""
    NEW = 4
    """Something else was rejected, or there was no run before."""
    CHANGED = 5
    """The rejected value changed, and was rejected again."""
    REPRODUCED = 6
    """The rejected value is the same."""


class Action(StrEnum):
    """Action of all ranks."""

    GO_ON = "go_on"
    """Let the optimizer step."""
    RUN_AGAIN = "run_again"
    """Restore random numbers, batches, gradients and buffers, and run the step again."""
    SAVE_AND_EXIT = "save_and_leave"
    """Restore them, save for a diagnosis, and exit with code 16."""
    LEAVE = "leave"
    """Exit with code 16; what is needed is saved already."""
    STOP = "stop"
    """Exit with code 17; the finding is final as far as workers can decide."""

    @property
    def exit_code(self) -> ExitReason | None:
        """The process's exit code; ``None`` = it does not exit."""
        if self is Action.STOP:
            return ExitReason.FAILED_VALIDATION
        return ExitReason.RESUME_TO_DISAMBIGUATE if self in (Action.SAVE_AND_EXIT, Action.LEAVE) else None


class Transition(NamedTuple):
    state: StepRun
    action: Action
    finding: Finding | None = None
    """Finding on the rejected value; ``None`` = none was rejected, or nothing is known yet."""


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
        _S.SECOND_RUN: _leave(_A.SAVE_AND_EXIT, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.REPRODUCED),
        _S.REPLAY_ELSEWHERE: _leave(_A.STOP, changed=_F.CORRECT, reproduced=_F.CORRECT)
        | {_O.CLEARED: _ELSEWHERE, _O.TOLERATED: _ELSEWHERE},
        _S.REPLAY_HERE: _leave(_A.LEAVE, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.TRANSIENT),
        _S.LAST_REPLAY_HERE: _leave(_A.STOP, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.TRANSIENT),
    }
)
"""Transition for each outcome in each state; none for :attr:`StepRun.LEFT`."""


def advance(state: StepRun, outcome: RunOutcome) -> Transition:
    """Return the transition after a run; ``outcome`` is the largest of all ranks' outcomes.

    Raises:
        ValueError: The process was to exit; there is no other run.
    """
    if state not in TABLE:
        raise ValueError("the ranks were to leave; no step follows")
    return TABLE[state][outcome]


def replay_state(*, same_device: bool, tries: int, max_tries: int) -> StepRun:
    """Return which run a replay is.

    Args:
        same_device: The rank in question computes on the device that gave the invalid result.
        tries: Replays on that device before this one.
        max_tries: Replays allowed there.
    """
    if not same_device:
        return StepRun.REPLAY_ELSEWHERE
    return StepRun.REPLAY_HERE if tries + 1 < max_tries else StepRun.LAST_REPLAY_HERE
