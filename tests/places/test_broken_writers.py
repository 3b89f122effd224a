"""A checkpoint writer that hangs, dies or gets no memory: the cells of the matrix for the memory tier and replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_places import why_unavailable
from cells import Cell, check_cell, writer_cells

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "available"),
]

SAMPLE = {"hung-memory-one-node-in-save", "hung-memory-one-node-in-restore"}
"""Cells that every run of the tests plays; the others belong to the long campaigns."""


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if str(cell) in SAMPLE else pytest.mark.campaign)
        for cell in writer_cells()
    ],
)
def test_a_broken_checkpoint_writer_stops_no_training(cell: Cell, tmp_path: Path) -> None:
    """Training continues, a line names tier and node, and the memory tier holds new checkpoints afterwards."""
    check_cell(cell, tmp_path)
