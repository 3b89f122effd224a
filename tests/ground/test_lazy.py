"""Packages whose names are imported on first use."""

from __future__ import annotations

import sys
import types

import pytest

from outlast.lazy import lazy_names


def test_name_is_imported_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is imported from its home and cached; all names are listed; an unknown one is an AttributeError."""
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
