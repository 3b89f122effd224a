"""The session: everything that a training script needs of this package, in ten lines."""

from __future__ import annotations

from outlast.session.session import Session, init
from outlast.session.step import Attempt, StepDecision

__all__ = ["Attempt", "Session", "StepDecision", "init"]
