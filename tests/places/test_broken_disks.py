"""A directory of checkpoints that is full, read-only, hung, slow or away: the cells of the matrix for directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from cells import MARKS, Cell, check_cell, disk_cells, each_cell

pytestmark = [*MARKS, pytest.mark.extended]

FIRST = {"hung-global-one-node-in-save", "full-local-one-node-in-save"}
"""Cells that every run of the tests plays."""
SAMPLE = {
    "hung-global-all-nodes-in-restore",
    "full-global-all-nodes-in-save",
    "read-only-global-all-nodes-in-restore",
    "gone-global-one-node-in-save",
    "hung-global-all-nodes-from-start",
    "hung-local-one-node-in-restore",
}
"""Cells that `make test-all` plays; the others belong to the long campaigns."""


@each_cell(disk_cells(), first=FIRST, sample=SAMPLE)
def test_a_broken_directory_stops_no_training(cell: Cell, tmp_path: Path) -> None:
    """Training continues, a line names tier, node and path, and the directory is used again once it works."""
    check_cell(cell, tmp_path)
