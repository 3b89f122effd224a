"""What follows a run of a step whose results were judged: the re-run state machine as a table.

A step is run; every rank says what its validations gave (:class:`Outcome`), all ranks agree on the largest, and the
table says what they do. ``.`` = cannot be: the first run is followed by the second all the same, a later one counts as
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

So a rejected result is never trained on: a step goes on only if nothing was rejected in the run whose results it keeps,
except by a validation that is not fatal. In place, a step is run twice at most. The replays here are counted by the
launcher, the last of them is told to be the last, and one elsewhere comes once: nothing goes on for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple

from outlast.errors import ExitReason
from outlast.policy.rerun import Finding

__all__ = ["TABLE", "Action", "Outcome", "RunState", "Transition", "advance", "replay_state"]


class RunState(StrEnum):
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


class Outcome(IntEnum):
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

    state: RunState
    action: Action
    finding: Finding | None = None
    """What is known now of what was rejected; ``None`` = nothing was, or nothing is known yet."""


_S, _A, _O, _F = RunState, Action, Outcome, Finding


def _leave(action: Action, **findings: Finding) -> dict[Outcome, Transition]:
    """Return a row of which every outcome ends the process."""
    row = dict.fromkeys(Outcome, Transition(_S.LEFT, action, findings.get("reproduced")))
    row[_O.VALID] = row[_O.UNREACHED] = Transition(_S.LEFT, action, _F.UNREACHED)
    row[_O.NEW] = Transition(_S.LEFT, action, _F.UNDECIDED)
    row[_O.CHANGED] = Transition(_S.LEFT, action, findings.get("changed"))
    return row


def _go_on(cleared: Finding, tolerated: Finding) -> dict[Outcome, Transition]:
    return {
        _O.CLEARED: Transition(_S.FIRST_RUN, _A.GO_ON, cleared),
        _O.TOLERATED: Transition(_S.FIRST_RUN, _A.GO_ON, tolerated),
    }


_JUDGED_HERE = {"changed": _F.UNDECIDED, "reproduced": _F.REPRODUCED}
_ELSEWHERE = Transition(_S.LEFT, _A.STOP, _F.PERSISTENT)

TABLE: Mapping[RunState, Mapping[Outcome, Transition]] = MappingProxyType(
    {
        _S.FIRST_RUN: dict.fromkeys(Outcome, Transition(_S.SECOND_RUN, _A.RUN_AGAIN))
        | {_O.VALID: Transition(_S.FIRST_RUN, _A.GO_ON)},
        _S.SECOND_RUN: _leave(_A.SAVE_AND_LEAVE, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.REPRODUCED),
        _S.REPLAY_ELSEWHERE: _leave(_A.STOP, changed=_F.CORRECT, reproduced=_F.CORRECT)
        | {_O.CLEARED: _ELSEWHERE, _O.TOLERATED: _ELSEWHERE},
        _S.REPLAY_HERE: _leave(_A.LEAVE, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.TRANSIENT),
        _S.LAST_REPLAY_HERE: _leave(_A.STOP, **_JUDGED_HERE) | _go_on(_F.TRANSIENT, _F.TRANSIENT),
    }
)
"""What follows each outcome in each state; nothing follows :attr:`RunState.LEFT`."""


def advance(state: RunState, outcome: Outcome) -> Transition:
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


def replay_state(*, same_device: bool, tries: int, max_tries: int) -> RunState:
    """Return which run a replay is.

    Args:
        same_device: Whether the rank in question computes on the device that gave the invalid result.
        tries: Replays on that device before this one.
        max_tries: How many there may be.
    """
    if not same_device:
        return RunState.REPLAY_ELSEWHERE
    return RunState.REPLAY_HERE if tries + 1 < max_tries else RunState.LAST_REPLAY_HERE
