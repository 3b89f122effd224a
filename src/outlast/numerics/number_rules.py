"""What makes a validated number invalid without the script's saying so: NaN, infinity, a spike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from outlast.config import RerunStateMachineConfig
from outlast.numerics.spikes import SpikeRule

__all__ = ["NumberRules"]


class NumberRules:
    """Judge numbers by the settings.

    Args:
        config: What is checked.
    """

    def __init__(self, config: RerunStateMachineConfig) -> None:
        self._config = config
        self._spikes: dict[str, SpikeRule] = {}
        self._accepted: list[tuple[str, float]] = []

    def begin_run(self) -> None:
        """Forget what was seen since the last :meth:`commit`."""
        self._accepted.clear()

    def reject(self, what: str, value: float) -> tuple[str | None, bool]:
        """Return why a number is invalid (``None`` = it is not), and whether it must not be trained on in any case."""
        if self._config.check_for_nan_in_loss and not math.isfinite(value):
            return "not finite", True
        if not self._config.check_for_spiky_loss:
            return None, True
        self._accepted.append((what, value))
        rule = self._rule(what)
        if rule.is_spike(value):
            factor = self._config.spiky_loss_factor
            return f"a spike: at least {factor:g} times the largest of late, {rule.maximum:.6g}", False
        return None, True

    def commit(self) -> None:
        """Take in what this run saw: it is trained on."""
        for what, value in self._accepted:
            self._rule(what).note(value)
        self._accepted.clear()

    def state_dict(self) -> dict[str, list[float]]:
        """Return what the spike rule knows, as plain numbers by name."""
        return {what: rule.state_dict() for what, rule in self._spikes.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._spikes.clear()
        for what, numbers in state.items():
            self._rule(what).load_state_dict(numbers)

    def _rule(self, what: str) -> SpikeRule:
        if what not in self._spikes:
            config = self._config
            self._spikes[what] = SpikeRule(
                factor=config.spiky_loss_factor, warmup=config.spike_warmup, window=config.spike_window
            )
        return self._spikes[what]
