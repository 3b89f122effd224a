"""The package's version, where every module can read it without importing the public face."""

from __future__ import annotations

__version__ = "0.2.0"
