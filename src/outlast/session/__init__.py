"""The session: everything that a training script needs of this package, in ten lines."""

from __future__ import annotations

from outlast.session.session import Session
from outlast.session.start import init

__all__ = ["Session", "init"]
