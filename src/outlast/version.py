"""The package's version, importable without the public package."""

from __future__ import annotations

__version__ = "0.2.0"
