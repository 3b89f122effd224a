"""A checkpoint writer that hangs, dies or gets no memory: the cells of the matrix for the memory tier and replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from cells import MARKS, Cell, check_cell, each_cell, writer_cells

pytestmark = [*MARKS, pytest.mark.extended]

FIRST = {"hung-memory-one-node-in-save"}
"""Cells that every run of the tests plays."""
SAMPLE = {"hung-memory-one-node-in-restore"}
"""Cells that `make test-all` plays; the others belong to the long campaigns."""


@each_cell(writer_cells(), first=FIRST, sample=SAMPLE)
def test_a_broken_checkpoint_writer_stops_no_training(cell: Cell, tmp_path: Path) -> None:
    """Training continues, a line names tier and node, and the memory tier holds new checkpoints afterwards."""
    check_cell(cell, tmp_path)
