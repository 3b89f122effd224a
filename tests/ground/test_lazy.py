"""Packages whose names are imported on first use."""

from __future__ import annotations

import sys
import types

import pytest

from outlast.lazy import lazy_names


def test_a_name_is_imported_when_it_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is found in its home and kept; all names are listed; another one is an AttributeError."""
    package = types.ModuleType("package")
    monkeypatch.setitem(sys.modules, "package", package)
    get, list_names = lazy_names("package", {"outlast.errors": ["ConfigError"], "no.such.module": ["gone"]})
    assert {"ConfigError", "gone", "__name__"} <= set(list_names())
    assert not hasattr(package, "ConfigError")
    from outlast.errors import ConfigError

    assert get("ConfigError") is ConfigError
    assert vars(package)["ConfigError"] is ConfigError
    with pytest.raises(AttributeError, match="'package' has no attribute 'other'"):
        get("other")
    with pytest.raises(ModuleNotFoundError):
        get("gone")
