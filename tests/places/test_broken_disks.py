"""A checkpoint directory that is full, read-only, hung, slow or unmounted: the cells of the matrix for directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from cells import MARKS, Cell, check_cell, disk_cells, each_cell

pytestmark = [*MARKS, pytest.mark.extended]

FIRST = {"hung-global-one-node-in-save", "full-local-one-node-in-save"}
"""Cells that run in ``make test``."""
SAMPLE = {
    "hung-global-all-nodes-in-restore",
    "full-global-all-nodes-in-save",
    "read-only-global-all-nodes-in-restore",
    "gone-global-one-node-in-save",
    "hung-global-all-nodes-from-start",
    "hung-local-one-node-in-restore",
}
"""Cells that run in ``make test-all``; the others run in campaigns."""


@each_cell(disk_cells(), first=FIRST, sample=SAMPLE)
def test_training_continues_with_a_broken_directory(cell: Cell, tmp_path: Path) -> None:
    """Training continues, a log line has tier, node and path, and the directory is used again after it recovers."""
    check_cell(cell, tmp_path)
