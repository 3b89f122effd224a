"""What the validations of a step gave, run by run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from outlast.policy.rerun import JsonNumber, relative_difference, to_json_number
from outlast.policy.rerun_table import Outcome, RunState

__all__ = ["Compare", "Judged", "Rejected", "Validations", "as_number"]

Compare = Callable[[Any, Any], float]
"""Says how much two results differ."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A result that a validation rejected."""

    call: int
    """Which validation of the step it was, from 0."""
    what: str
    message: str
    """Why, for people."""
    value: JsonNumber
    fatal: bool = True
    """Whether it must not be trained on even when it comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What decides a run's outcome on this rank."""

    outcome: Outcome
    rejected: Rejected
    second: JsonNumber = None
    """The value in the run that was to confirm it."""


class Validations:
    """Hold a run's results against those of the run before.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        """Validations of this run so far."""
        self.results: dict[int, tuple[str, Any]] = {}
        """Name and result of every rejected validation of this run, or of all of them."""
        self.rejected: dict[int, Rejected] = {}
        """What this run's validations rejected."""
        self.expected: dict[int, Rejected] = {}
        """What the run before rejected."""
        self.differences: list[tuple[str, float]] = []
        """Name, and difference between the two runs, of what both reached; only if all results are kept."""
        self._before: dict[int, tuple[str, Any]] = {}
        self._judged: dict[int, Judged] = {}
        self._state = RunState.FIRST_RUN
        self._keeps_all = False

    def begin_step(
        self, state: RunState, expected: Mapping[int, tuple[Rejected, Any]] | None = None, *, keep_all: bool = False
    ) -> None:
        """Begin the first run of a step.

        Args:
            state: Which run it is.
            expected: What was rejected before the restart, with its result; for a replay.
            keep_all: Keep accepted results too.
        """
        self.expected = {call: one for call, (one, _) in (expected or {}).items()}
        self._before = {call: (one.what, result) for call, (one, result) in (expected or {}).items()}
        self._keeps_all = keep_all
        self._begin(state)

    def begin_second_run(self) -> None:
        """Hold what comes against what was."""
        self.expected, self._before = self.rejected, self.results
        self._begin(RunState.SECOND_RUN)

    def _begin(self, state: RunState) -> None:
        self._state = state
        self.num_calls = 0
        self.results, self.rejected, self._judged, self.differences = {}, {}, {}, []

    def next_call(self) -> int:
        """Number a validation."""
        self.num_calls += 1
        return self.num_calls - 1

    def take(
        self,
        call: int,
        what: str,
        result: Any,
        why: str | None,
        *,
        fatal: bool = True,
        tolerance: float = 0.0,
        compare: Compare | None = None,
    ) -> Rejected | None:
        """Take in a result.

        Args:
            call: The validation's number.
            what: Its name.
            result: A number or, with ``compare``, anything.
            why: Why it is rejected; ``None`` = it is accepted.
            fatal: Whether it must not be trained on even when it comes again.
            tolerance: Difference up to which two results are the same.
            compare: How much two results differ; ``None`` = :func:`relative_difference`.

        Returns:
            What was rejected, if it is the first time.
        """
        rejected = None
        if why is not None:
            value = to_json_number(as_number(result))
            rejected = self.rejected[call] = Rejected(call=call, what=what, message=why, value=value, fatal=fatal)
        before = self._before.get(call)
        if self._keeps_all and before is not None and before[0] == what:
            self.differences.append((what, (compare or _difference)(before[1], result)))
        if rejected is not None or self._keeps_all:
            self.results[call] = (what, _kept(result))
        first = self.expected.get(call)
        if first is None or first.what != what:
            if rejected is None:
                return None
            outcome = Outcome.NEW if fatal or self._state is RunState.FIRST_RUN else Outcome.TOLERATED
            self._judged[call] = Judged(outcome=outcome, rejected=rejected)
            return rejected
        is_fatal = first.fatal or (rejected is not None and fatal)
        if (compare or _difference)(self._before[call][1], result) <= tolerance:
            outcome = Outcome.REPRODUCED if is_fatal else Outcome.TOLERATED
        elif rejected is not None:
            outcome = Outcome.CHANGED if is_fatal else Outcome.TOLERATED
        else:
            outcome = Outcome.CLEARED
        self._judged[call] = Judged(outcome=outcome, rejected=first, second=to_json_number(as_number(result)))
        return None

    def judge(self, *, same_batch: bool = True) -> Judged | None:
        """Return what decides this run's outcome on this rank; ``None`` = it was valid.

        Args:
            same_batch: Whether the run had the batches of the run before; without them nothing is cleared.
        """
        for call, first in self.expected.items():
            known = self._judged.get(call)
            unreached = known is None or known.rejected is not first
            if unreached or (not same_batch and known is not None and known.outcome is Outcome.CLEARED):
                outcome = Outcome.UNREACHED if first.fatal else Outcome.TOLERATED
                worse = Judged(outcome=outcome, rejected=first)
                if known is None or known.outcome < outcome:
                    self._judged[call] = worse
        if not self._judged:
            return None
        return max(self._judged.values(), key=lambda one: (one.outcome, -one.rejected.call))

    def all_rejected(self) -> dict[int, tuple[Rejected, Any]]:
        """Return what either run rejected, with its result; the first run's where both did."""
        now = {call: (one, self.results[call][1]) for call, one in self.rejected.items()}
        return now | {call: (one, self._before[call][1]) for call, one in self.expected.items()}

    def unmatched(self) -> list[str]:
        """Return the names of the validations that only one of the two runs reached; only if all results are kept."""
        calls = sorted({*self._before, *self.results})
        pairs = [(self._before.get(call), self.results.get(call)) for call in calls]
        return [
            one[0]
            for pair in pairs
            if pair[0] is None or pair[1] is None or pair[0][0] != pair[1][0]
            for one in pair
            if one is not None
        ]


def as_number(result: Any) -> float | None:
    """Return a result as a number; ``None`` = it is none.

    Blocks: until a device has computed it.
    """
    if isinstance(result, torch.Tensor) and result.numel() != 1:
        return None
    try:
        return float(result.detach() if isinstance(result, torch.Tensor) else result)
    except (TypeError, ValueError):
        return None


def _kept(result: Any) -> Any:
    """Return a result that later changes in place do not reach."""
    if not isinstance(result, torch.Tensor):
        return result
    return result.detach().clone() if result.numel() != 1 else as_number(result)


def _difference(before: Any, now: Any) -> float:
    a, b = as_number(before), as_number(now)
    if a is None or b is None:
        raise TypeError(
            f"results of type {type(now).__name__} cannot be compared; validate one number, or give comparison_func"
        )
    return relative_difference(a, b)
