"""The Python blocks of the documentation page about Ray, selected by a text in each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

MEGATRON = "parallel_state.initialize_model_parallel("


def _pages() -> object:
    path = Path(__file__).parent.parent / "integrations" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages_of_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks_of(page: str) -> list[str]:
    """Return all Python blocks of a page."""
    found: list[str] = _pages().python_blocks(page)  # type: ignore[attr-defined]
    return found


def block_of(page: str, mark: str) -> str:
    """Return the one block of a page that contains a text."""
    (found,) = [block for block in blocks_of(page) if mark in block]
    return found
