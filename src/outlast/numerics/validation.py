"""Validation of a step: which results are invalid, and how a run's results compare with those of the run before."""

from __future__ import annotations

import logging
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from outlast.config import RerunStateMachineConfig
from outlast.env import WorkerEnv
from outlast.policy.rerun import JsonNumber, RunOutcome, StepRun, relative_difference, to_json_number

log = logging.getLogger(__name__)
Compare = Callable[[Any, Any], float]
"""Returns how much two results differ."""
MAX_KEPT = 1 << 17
"""Differences kept for the percentiles of one value; above it, every second one is dropped."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    call: int
    """Number of the validation within the step, from 0."""
    what: str
    message: str
    value: JsonNumber
    fatal: bool = True
    """It must not be trained on even if it is reproduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The result that decides a run's outcome on this rank."""

    outcome: RunOutcome
    rejected: Rejected
    second: JsonNumber = None
    """The value in the confirming run."""


def _difference(before: Any, now: Any) -> float:
    a, b = _as_number(before), _as_number(now)
    if a is None or b is None:
        raise TypeError(
            f"results of type {type(now).__name__} cannot be compared; validate one number, or give comparison_func"
        )
    return relative_difference(a, b)


class _Asked(NamedTuple):
    """One validation of a step."""

    call: int
    """Number within the step, from 0."""
    what: str
    message: str
    """Why a result is rejected."""
    tolerance: float
    """Difference up to which two results are the same."""
    compare: Compare = _difference


class StepValidation:
    """Validate the results of a step's runs by the settings and the script, and compare each with the run before.

    Args:
        config: What is checked. In the mode ``report_determinism_stats`` nothing is rejected, and all results are kept
            for comparison.
        place: This worker's place, for the log; its cycle and rank also seed injected errors.

    Thread: that of the training loop.
    """

    def __init__(self, config: RerunStateMachineConfig, place: WorkerEnv, device: str) -> None:
        self.injector = ErrorInjector(config, f"{place.job}-{place.cycle}-{place.global_rank}")
        self.statistics: dict[str, DifferenceCounts] = {}
        """Differences between two runs of a step, by name of the validation, where all results are kept."""
        self.numbers: dict[str, float] = {}
        """The numbers that the newest run has validated so far, by name."""
        self._config, self._place, self._device = config, place, device
        self._rejects = config.rerun_mode != "report_determinism_stats"
        self._has_warned = False
        self._spikes: dict[str, SpikeRule] = {}
        self._seen: list[tuple[str, float]] = []  # of this run; the spike rules learn them once it is trained on
        self._differences: list[tuple[str, float]] = []  # of each result that both runs have
        self._pending: list[tuple[torch.Tensor, Callable[[float], None]]] = []
        self._results: dict[int, tuple[str, Any]] = {}  # by call; of all calls, or of the rejected ones
        self._rejected: dict[int, Rejected] = {}
        self._judged: dict[int, Judged] = {}
        self._results_before: dict[int, tuple[str, Any]] = {}
        self._expected: dict[int, Rejected] = {}  # rejected by the run before
        self._state, self._iteration, self._calls = StepRun.FIRST_RUN, 0, count()

    def begin_step(
        self,
        iteration: int,
        state: StepRun = StepRun.FIRST_RUN,
        *,
        expected: Mapping[int, tuple[Rejected, Any]] | None = None,
        injected: Iterable[int] = (),
    ) -> None:
        self._iteration = iteration
        self._expected = {call: one for call, (one, _) in (expected or {}).items()}
        self._results_before = {call: (one.what, result) for call, (one, result) in (expected or {}).items()}
        self.injector.injected = set(injected)
        self._begin_run(state)

    def begin_second_run(self) -> None:
        """Begin the second run of the step, which is compared with the first."""
        self._expected, self._results_before = self._rejected, self._results
        self._begin_run(StepRun.SECOND_RUN)

    def _begin_run(self, state: StepRun) -> None:
        self._state, self._calls = state, count()
        self.numbers.clear()
        self._results, self._rejected, self._judged = {}, {}, {}
        self._pending.clear()
        self._seen.clear()
        self._differences.clear()

    def take_number(
        self, value: Any, what: str, *, rejects: Callable[[float], bool] | None, message: str, tolerance: float
    ) -> None:
        """Validate one number; one on a device is validated when the run ends."""
        asked = _Asked(next(self._calls), what, message, tolerance)
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"{what} has {value.numel()} elements; validate one number, such as its mean")
            value = value.detach()
            if not value.is_cpu:
                self._pending.append((value, lambda number: self._judge(number, asked, rejects)))
                return
        self._judge(float(value), asked, rejects)

    def _judge(self, number: float, asked: _Asked, rejects: Callable[[float], bool] | None) -> None:
        what = asked.what
        if self.injector.strikes(self._state, self._iteration, asked.call):
            number = math.nan
        self.numbers[what] = number
        why, fatal = self._reject_by_settings(what, number) if self._rejects else (None, True)
        if self._rejects and rejects is not None and (why is None or not fatal) and rejects(number):
            why, fatal = asked.message, True
        if why is None and not self._has_warned and not math.isfinite(number):
            self._has_warned = True
            log.warning(
                "%s is %s on rank %d at iteration %d, and training continues with it; this is reported once",
                *(what, number, self._place.global_rank, self._iteration),
            )
        if why is None and self._rejects and not self._expected:
            return  # the usual case
        self._take(asked, number, why, fatal=fatal)

    def take_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Compare | None = None,
        tolerance: float = 0.0,
        *,
        fatal: bool = True,
    ) -> None:
        """Validate one result immediately; see :meth:`outlast.numerics.RerunStateMachine.validate_result`."""
        asked = _Asked(next(self._calls), message, message, tolerance, comparison_func or _difference)
        if self.injector.strikes(self._state, self._iteration, asked.call):
            result = torch.full_like(result, math.nan) if isinstance(result, torch.Tensor) else math.nan
        if comparison_func is None and _as_number(result) is None:
            raise ValueError(f"a {type(result).__name__} is not one number; give comparison_func")
        why = message if self._rejects and bool(rejection_func(result)) else None
        self._take(asked, result, why, fatal=fatal)

    def end_run(self) -> None:
        """Validate the numbers that are on a device, with one synchronization for all of them."""
        pending, self._pending = self._pending, []
        if pending:
            numbers = torch.stack([value.reshape(()).to(torch.float64) for value, _ in pending]).tolist()
            for (_, judge), number in zip(pending, numbers, strict=True):
                judge(number)

    def judge(self, *, same_batch: bool = True) -> Judged | None:
        """Return the result that decides this run's outcome on this rank; ``None`` = the run was valid.

        Args:
            same_batch: Whether the run had the batches of the run before; without them nothing is cleared.
        """
        if not self._judged and not self._expected:
            return None
        for call, first in self._expected.items():
            known = self._judged.get(call)
            unreached = known is None or known.rejected is not first
            if unreached or (not same_batch and known is not None and known.outcome is RunOutcome.CLEARED):
                outcome = RunOutcome.UNREACHED if first.fatal else RunOutcome.TOLERATED
                if known is None or known.outcome < outcome:
                    self._judged[call] = Judged(outcome=outcome, rejected=first)
        return max(self._judged.values(), key=lambda one: (one.outcome, -one.rejected.call), default=None)

    def all_rejected(self) -> dict[int, tuple[Rejected, Any]]:
        """Return what either run rejected, with its result; the first run's where both did."""
        now = {call: (one, self._results[call][1]) for call, one in self._rejected.items()}
        return now | {call: (one, self._results_before[call][1]) for call, one in self._expected.items()}

    def count_differences(self) -> None:
        """Add the differences of the two runs to the statistics, and the validations that only one of them reached."""
        for what, difference in self._differences:
            self.statistics.setdefault(what, DifferenceCounts()).add(difference)
        before, now = self._results_before, self._results
        for call in sorted({*before, *now}):
            names = [results[call][0] for results in (before, now) if call in results]
            if len(set(names)) == len(names):  # reached by one run only, or two validations
                for name in names:
                    self.statistics.setdefault(name, DifferenceCounts()).num_unreached += 1

    def end_step(self) -> None:
        """Update the spike rules with this run's values, as it is trained on."""
        for what, value in self._seen:
            self._spike_rule(what).note(value)
        self._seen.clear()

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state of the spike rules, as plain numbers by name of the value."""
        return {what: rule.state_dict() for what, rule in self._spikes.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        self._spikes.clear()
        for what, numbers in state.items():
            self._spike_rule(what).load_state_dict(numbers)

    def _reject_by_settings(self, what: str, value: float) -> tuple[str | None, bool]:
        """Return why a number is invalid (``None`` = it is valid), and whether that is fatal."""
        if self._config.check_for_nan_in_loss and not math.isfinite(value):
            return "not finite", True
        if not self._config.check_for_spiky_loss:
            return None, True
        self._seen.append((what, value))
        rule = self._spike_rule(what)
        if rule.is_spike(value):
            factor = self._config.spiky_loss_factor
            return f"a spike: at least {factor:g} times the recent maximum, {rule.maximum:.6g}", False
        return None, True

    def _spike_rule(self, what: str) -> SpikeRule:
        if what not in self._spikes:
            config = self._config
            self._spikes[what] = SpikeRule(
                factor=config.spiky_loss_factor, warmup=config.spike_warmup, window=config.spike_window
            )
        return self._spikes[what]

    def _take(self, asked: _Asked, result: Any, why: str | None, *, fatal: bool) -> None:
        """Record a result, and compare it with that of the run before.

        Args:
            result: A number or, with its own comparison, any value.
            why: Why it is rejected; ``None`` = it is accepted.
            fatal: Whether it must not be trained on even if it is reproduced.
        """
        call, what, _, tolerance, compare = asked
        rejected = None
        if why is not None:
            value = to_json_number(_as_number(result))
            rejected = self._rejected[call] = Rejected(call=call, what=what, message=why, value=value, fatal=fatal)
        before = self._results_before.get(call)
        if not self._rejects and before is not None and before[0] == what:
            self._differences.append((what, compare(before[1], result)))
        if rejected is not None or not self._rejects:
            self._results[call] = (what, _kept(result))
        first = self._expected.get(call)
        if first is not None and first.what == what:
            second = to_json_number(_as_number(result))
            is_fatal = first.fatal or (rejected is not None and fatal)
            if compare(self._results_before[call][1], result) <= tolerance:
                outcome = RunOutcome.REPRODUCED if is_fatal else RunOutcome.TOLERATED
            elif rejected is not None:
                outcome = RunOutcome.CHANGED if is_fatal else RunOutcome.TOLERATED
            else:
                outcome = RunOutcome.CLEARED
            self._judged[call] = Judged(outcome=outcome, rejected=first, second=second)
        elif rejected is not None:
            is_first = self._state is StepRun.FIRST_RUN
            outcome = RunOutcome.NEW if fatal or is_first else RunOutcome.TOLERATED
            self._judged[call] = Judged(outcome=outcome, rejected=rejected)
            log.warning(
                "rank %d on node %s (device %s), iteration %d, validation %d: %s is %s (%s)%s",
                self._place.global_rank,
                self._place.node,
                self._device,
                self._iteration,
                call,
                what,
                rejected.value,
                why,
                "; all ranks run the step again" if is_first and self._config.rerun_mode == "validate_results" else "",
            )


class SpikeRule:
    """Distinguish spikes from ordinary values.

    The first ``warmup`` finite values are never spikes. After them a spike is a value whose magnitude is at least
    ``factor`` times the largest among the newest ``window`` finite values. NaN and infinite values are not spikes, and
    are not counted among those; a value is counted only once it is known to be trained on.
    """

    def __init__(self, *, factor: float, warmup: int, window: int) -> None:
        self._factor, self._warmup, self._window = factor, warmup, window
        self._num_seen = 0
        # Ordinal and magnitude of the values in the window that are larger than all after them; the first is the
        # largest.
        self._largest: deque[tuple[int, float]] = deque()

    @property
    def maximum(self) -> float | None:
        """The largest magnitude in the window; ``None`` during the warm-up."""
        return self._largest[0][1] if self._num_seen >= self._warmup else None

    def is_spike(self, value: float) -> bool:
        maximum = self.maximum
        return maximum is not None and math.isfinite(value) and maximum > 0 and abs(value) >= self._factor * maximum

    def note(self, value: float) -> None:
        if not math.isfinite(value):
            return
        magnitude = abs(value)
        while self._largest and self._largest[-1][1] <= magnitude:
            self._largest.pop()
        self._largest.append((self._num_seen, magnitude))
        self._num_seen += 1
        while self._largest[0][0] < self._num_seen - self._window:
            self._largest.popleft()

    def state_dict(self) -> list[float]:
        """Return the number of values seen, then each maximum's ordinal and magnitude."""
        return [float(self._num_seen), *(number for entry in self._largest for number in entry)]

    def load_state_dict(self, state: Sequence[float]) -> None:
        seen, *entries = state
        self._num_seen = int(seen)
        self._largest = deque((int(at), size) for at, size in zip(entries[::2], entries[1::2], strict=True))


class ErrorInjector:
    """Choose which validated values become NaN.

    One of ``error_injection_rate`` values is changed in a first run, chosen by a hash of cycle, rank, iteration and
    validation: another cycle chooses others, and the script's random generators are not used. Whether the same
    validation is changed again in later runs depends on the kind of error to imitate.

    Args:
        name: Name of cycle and rank, such as ``job-3-5``.
    """

    def __init__(self, config: RerunStateMachineConfig, name: str) -> None:
        self._rate, self._kind, self._name = config.error_injection_rate, config.error_injection_type, name
        self.injected: set[int] = set()
        """Validations of this step that were changed in its first run."""

    def strikes(self, state: StepRun, iteration: int, call: int) -> bool:
        if not self._rate:
            return False
        if state is StepRun.FIRST_RUN:
            if xxhash.xxh3_64_intdigest(f"{self._name}/{iteration}/{call}".encode()) % self._rate == 0:
                self.injected.add(call)
            return call in self.injected
        if self._kind == "transient_error" or (self._kind == "persistent_error" and state is StepRun.REPLAY_ELSEWHERE):
            return False
        return call in self.injected


def _as_number(result: Any) -> float | None:
    """Return a result as a number; ``None`` = it is not one.

    Blocks: until a device has computed it.
    """
    if isinstance(result, torch.Tensor) and result.numel() != 1:
        return None
    try:
        return float(result.detach() if isinstance(result, torch.Tensor) else result)
    except (TypeError, ValueError):
        return None


def _kept(result: Any) -> Any:
    """Return a result that later in-place changes do not affect."""
    if not isinstance(result, torch.Tensor):
        return result
    return result.detach().clone() if result.numel() != 1 else _as_number(result)


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """Relative differences of one validated value between two runs of a step.

    Percentiles are over all comparisons, including those without a difference.
    """

    num_compared: int
    num_different: int
    mean: JsonNumber
    """Over all comparisons."""
    p50: JsonNumber
    p90: JsonNumber
    p99: JsonNumber
    p99_9: JsonNumber
    maximum: JsonNumber
    num_unreached: int = 0
    """Validations that only one of the two runs reached."""


class DifferenceCounts:
    """Count the differences of one validated value in this process."""

    def __init__(self) -> None:
        self.num_compared = self.num_different = self.num_unreached = 0
        self.total = self.maximum = 0.0
        self._kept = array("d")
        self._every = 1

    def add(self, difference: float) -> None:
        self.num_compared += 1
        if difference == 0:
            return
        if self.num_different % self._every == 0:
            self._kept.append(difference)
            if len(self._kept) >= MAX_KEPT:
                self._kept, self._every = self._kept[::2], self._every * 2
        self.num_different += 1
        self.total += difference
        self.maximum = max(self.maximum, difference)

    def summary(self) -> Differences:
        kept = sorted(self._kept)
        num_same = self.num_compared - self.num_different

        def percentile(share: float) -> JsonNumber:
            place = math.ceil(share * self.num_compared) - num_same  # rank among the different ones, from 1
            if place <= 0:
                return 0.0
            return to_json_number(kept[math.ceil(place / self.num_different * len(kept)) - 1])

        return Differences(
            num_compared=self.num_compared,
            num_different=self.num_different,
            mean=to_json_number(self.total / self.num_compared) if self.num_compared else 0.0,
            p50=percentile(0.5),
            p90=percentile(0.9),
            p99=percentile(0.99),
            p99_9=percentile(0.999),
            maximum=to_json_number(self.maximum),
            num_unreached=self.num_unreached,
        )


def describe_differences(report: Mapping[str, Differences]) -> str:
    heads = " ".join(f"{head:>9}" for head in ("mean", "p50", "p90", "p99", "p99.9", "max"))
    lines = [f"{'value':<16} {'compared':>9} {'differ':>7} {heads}"]
    for what, one in report.items():
        numbers = (one.mean, one.p50, one.p90, one.p99, one.p99_9, one.maximum)
        texts = " ".join(f"{value if isinstance(value, str) else format(value, '.3g'):>9}" for value in numbers)
        line = f"{what:<16} {one.num_compared:>9} {one.num_different:>7} {texts}"
        if one.num_unreached:
            line += f"  ({one.num_unreached} were reached by one run only)"
        lines.append(line)
    return "\n".join(lines)
