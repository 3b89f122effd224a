"""The judge of a step: what the script validates, run by run, and what decides the outcome on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from outlast.config import RerunStateMachineConfig
from outlast.numerics.injector import ErrorInjector
from outlast.numerics.number_rules import NumberRules
from outlast.numerics.validations import Compare, Judged, Rejected, Validations, as_number
from outlast.policy.rerun_table import RunState

__all__ = ["StepJudge"]


class StepJudge:
    """Judge the results of a step's runs.

    Args:
        config: What is checked.
        name: Name of cycle and rank.
        say_rejected: Is told of each result that is rejected for the first time, and whether that was in a first run.

    Thread: that of the training loop.
    """

    def __init__(
        self, config: RerunStateMachineConfig, name: str, *, say_rejected: Callable[[Rejected, bool], None]
    ) -> None:
        self.rules = NumberRules(config)
        self.validations = Validations()
        self.injector = ErrorInjector(config, name)
        self._rejects = config.rerun_mode == "validate_results"
        self._say_rejected = say_rejected
        self._state = RunState.FIRST_RUN
        self._iteration = 0
        self._pending: list[tuple[torch.Tensor, Callable[[float], None]]] = []

    def begin_step(
        self,
        state: RunState,
        iteration: int,
        *,
        expected: Mapping[int, tuple[Rejected, Any]] | None = None,
        struck: Iterable[int] = (),
    ) -> None:
        """Begin the first run of a step.

        Args:
            state: Which run it is.
            iteration: Number of optimizer steps done.
            expected: For a replay: what had been rejected, with its result.
            struck: For a replay: the validations that had been struck on purpose.
        """
        self._state, self._iteration = state, iteration
        self._pending.clear()
        self.rules.begin_run()
        self.injector.begin_step(struck)
        self.validations.begin_step(state, expected, keep_all=not self._rejects)

    def begin_second_run(self) -> None:
        """Hold what comes against what was."""
        self._state = RunState.SECOND_RUN
        self.rules.begin_run()
        self.validations.begin_second_run()

    def take_number(
        self, value: Any, what: str, *, rejects: Callable[[float], bool] | None, message: str, tolerance: float
    ) -> None:
        """Judge one number; one on a device when the run ends."""
        call = self.validations.next_call()

        def judge(number: float) -> None:
            if self.injector.strikes(self._state, self._iteration, call):
                number = float("nan")
            why, fatal = self.rules.reject(what, number) if self._rejects else (None, True)
            if self._rejects and rejects is not None and (why is None or not fatal) and rejects(number):
                why, fatal = message, True
            self._take(call, what, number, why, fatal=fatal, tolerance=tolerance)

        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"{what} has {value.numel()} elements; validate one number, such as its mean")
            value = value.detach()
            if value.device.type != "cpu":
                self._pending.append((value, judge))
                return
        judge(float(value))

    def take_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        *,
        comparison_func: Compare | None,
        tolerance: float,
        fatal: bool,
    ) -> None:
        """Judge one result, at once."""
        call = self.validations.next_call()
        if self.injector.strikes(self._state, self._iteration, call):
            result = torch.full_like(result, float("nan")) if isinstance(result, torch.Tensor) else float("nan")
        if comparison_func is None and as_number(result) is None:
            raise ValueError(f"a {type(result).__name__} is not one number; give comparison_func")
        why = message if self._rejects and bool(rejection_func(result)) else None
        self._take(call, message, result, why, fatal=fatal, tolerance=tolerance, compare=comparison_func)

    def end_run(self) -> None:
        """Judge what is on a device, with one wait for all of it."""
        pending, self._pending = self._pending, []
        if pending:
            numbers = torch.stack([value.reshape(()).to(torch.float64) for value, _ in pending]).tolist()
            for (_, judge), number in zip(pending, numbers, strict=True):
                judge(number)

    def judged(self, *, same_batch: bool) -> Judged | None:
        """Return what decides the run's outcome on this rank; ``None`` = it was valid."""
        return self.validations.judge(same_batch=same_batch)

    def _take(self, call: int, what: str, result: Any, why: str | None, *, fatal: bool, **how: Any) -> None:
        rejected = self.validations.take(call, what, result, why, fatal=fatal, **how)
        if rejected is not None:
            self._say_rejected(rejected, self._state is RunState.FIRST_RUN)
