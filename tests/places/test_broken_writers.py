"""A checkpoint writer that hangs, exits or gets no memory: the cells of the matrix for the memory tier and replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from cells import MARKS, Cell, check_cell, each_cell, writer_cells

pytestmark = [*MARKS, pytest.mark.extended]

FIRST = {"hung-memory-one-node-in-save"}
"""Cells that run in ``make test``."""
SAMPLE = {"hung-memory-one-node-in-restore"}
"""Cells that run in ``make test-all``; the others run in campaigns."""


@each_cell(writer_cells(), first=FIRST, sample=SAMPLE)
def test_training_continues_with_a_broken_checkpoint_writer(cell: Cell, tmp_path: Path) -> None:
    """Training continues, a log line has tier and node, and the memory tier holds new checkpoints afterwards."""
    check_cell(cell, tmp_path)
