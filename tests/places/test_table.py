"""The documentation lists every cell of the matrix."""

from __future__ import annotations

from table import PAGE, render


def test_the_documentation_lists_every_cell() -> None:
    """The table in docs/broken-tiers.md is the output of tests/places/table.py."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(text), "run: python tests/places/table.py"
