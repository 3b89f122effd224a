"""Invalid results on purpose, to see what follows them."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from outlast.config import RerunStateMachineConfig
from outlast.policy.rerun_table import RunState

__all__ = ["ErrorInjector"]


class ErrorInjector:
    """Say which validated values become NaN.

    One of ``error_injection_rate`` is struck in a first run, drawn from the names of cycle, rank, iteration and
    validation: a cycle that begins again at the same iteration draws afresh, and no generator of the script's is used.
    Whether the same validation is struck again when the step is run again says what kind of error it looks like.

    Args:
        config: The rate and the kind.
        name: Name of cycle and rank, such as ``job-3-5``.
    """

    def __init__(self, config: RerunStateMachineConfig, name: str) -> None:
        self._rate, self._kind, self._name = config.error_injection_rate, config.error_injection_type, name
        self.struck: set[int] = set()
        """Validations of this step that were struck in its first run."""

    def begin_step(self, struck: Iterable[int] = ()) -> None:
        """Begin a step; ``struck`` is that of the step that is replayed."""
        self.struck = set(struck)

    def strikes(self, state: RunState, iteration: int, call: int) -> bool:
        """Return whether a value becomes NaN."""
        if not self._rate:
            return False
        if state is RunState.FIRST_RUN:
            if xxhash.xxh3_64_intdigest(f"{self._name}/{iteration}/{call}".encode()) % self._rate == 0:
                self.struck.add(call)
            return call in self.struck
        if self._kind == "transient_error" or (self._kind == "persistent_error" and state is RunState.REPLAY_ELSEWHERE):
            return False
        return call in self.struck
