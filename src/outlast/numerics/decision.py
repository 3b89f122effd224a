"""What follows a step."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.policy.rerun import Diagnosis
from outlast.policy.rerun_table import Action

__all__ = ["Decision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks do after the runs of a step."""

    action: Action = Action.GO_ON
    """The same on all ranks."""
    diagnosis: Diagnosis | None = None
    """When the process is to end, that of the rank that decided, the same on all ranks; else this rank's, if it had an
    invalid result."""

    @property
    def must_save(self) -> bool:
        """Whether the state, the machine's included, is to be saved for a diagnosis before the process ends."""
        return self.action is Action.SAVE_AND_LEAVE

    @property
    def exit_code(self) -> int | None:
        """The process's exit code; ``None`` = training goes on."""
        code = self.action.exit_code
        return None if code is None else int(code)
