"""A directory of checkpoints that is full, read-only, hung, slow or away: the cells of the matrix for directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_places import why_unavailable
from cells import Cell, check_cell, disk_cells

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "available"),
]

SAMPLE = {
    "hung-global-one-node-in-save",
    "hung-global-all-nodes-in-restore",
    "full-global-all-nodes-in-save",
    "read-only-global-all-nodes-in-restore",
    "gone-global-one-node-in-save",
    "hung-global-all-nodes-from-start",
    "full-local-one-node-in-save",
    "hung-local-one-node-in-restore",
}
"""Cells that every run of the tests plays; the others belong to the long campaigns."""


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if str(cell) in SAMPLE else pytest.mark.campaign)
        for cell in disk_cells()
    ],
)
def test_a_broken_directory_stops_no_training(cell: Cell, tmp_path: Path) -> None:
    """Training continues, a line names tier, node and path, and the directory is used again once it works."""
    check_cell(cell, tmp_path)
