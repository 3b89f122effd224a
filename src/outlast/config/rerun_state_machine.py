"""Settings of the re-run state machine."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import require, require_finite

__all__ = ["RerunStateMachineConfig"]

_MODES = ("disabled", "validate_results", "report_determinism_stats")
_ERROR_TYPES = ("transient_error", "persistent_error", "correct_result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunStateMachineConfig:
    """What counts as an invalid result, and what follows one.

    The names are Megatron's, and so are the defaults, but for ``rerun_mode``: Megatron's loop is built into every
    training and has to be switched on there; here a script says itself what is validated, by ``run.attempts()`` and
    ``attempt.validate()``, and whoever writes that wants it done. A script that does not pays nothing.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    rerun_mode: str = "validate_results"
    """``validate_results``: judge what the script validates before the optimizer moves a weight, and run a step with
    an invalid result again; ``report_determinism_stats``: run every step twice, judge nothing, and count what differs;
    ``disabled``: run every step once and judge nothing."""

    check_for_nan_in_loss: bool = True
    """A validated value that is NaN or infinite is invalid."""

    check_for_spiky_loss: bool = False
    """A validated value of at least ``spiky_loss_factor`` times the largest of late is run again; when it comes again
    it is trained on, with a warning."""

    spiky_loss_factor: float = 10.0
    """See ``check_for_spiky_loss``; raise it for large models."""

    spike_warmup: int = 100
    """Finite values before the first that can be a spike; they set the largest value."""

    spike_window: int = 1000
    """Newest finite values of which the largest counts."""

    max_same_device_reruns: int = 2
    """Restarts on the device that gave the invalid result, where no other can be had, before it is judged without;
    0 = none."""

    error_injection_rate: int = 0
    """Turn one of this many validated values into NaN on purpose; 0 = none."""

    error_injection_type: str = "transient_error"
    """What it looks like: ``transient_error`` is gone when the step is run again, ``persistent_error`` comes again on
    the same device, ``correct_result`` on every device."""

    def __post_init__(self) -> None:
        require_finite(self)
        for name, known in (("rerun_mode", _MODES), ("error_injection_type", _ERROR_TYPES)):
            value = getattr(self, name)
            require(value in known, f"{name}={value!r} must be {', '.join(known[:-1])} or {known[-1]}")
        require(
            self.spiky_loss_factor > 1,
            f"spiky_loss_factor={self.spiky_loss_factor} must be above 1, or every largest value is a spike",
        )
        require(self.spike_warmup >= 1, f"spike_warmup={self.spike_warmup} must be at least 1 value")
        require(
            self.spike_window >= self.spike_warmup,
            f"spike_window={self.spike_window} must be at least spike_warmup={self.spike_warmup}",
        )
        for name in ("max_same_device_reruns", "error_injection_rate"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        validates = self.rerun_mode == "validate_results"
        require(
            validates or not self.check_for_spiky_loss,
            f"check_for_spiky_loss is on, but rerun_mode={self.rerun_mode!r} judges nothing; use 'validate_results'",
        )
        require(
            validates or self.error_injection_rate == 0,
            f"error_injection_rate={self.error_injection_rate}, but rerun_mode={self.rerun_mode!r} would not notice; "
            "use 'validate_results'",
        )
        require(
            self.error_injection_rate == 0 or self.check_for_nan_in_loss,
            f"error_injection_rate={self.error_injection_rate} makes values NaN, but check_for_nan_in_loss is off",
        )
