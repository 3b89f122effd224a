"""The session: the interface of a training script to the package."""

from __future__ import annotations

from outlast.session.session import Session, init
from outlast.session.step import Attempt, StepDecision

__all__ = ["Attempt", "Session", "StepDecision", "init"]
