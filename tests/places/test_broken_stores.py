"""An object store that hangs, is slow, is unreachable or rejects requests: the cells of the matrix for S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broken_places import start_store
from cells import MARKS, Cell, check_cell, each_cell, store_cells

pytestmark = [*MARKS, pytest.mark.extended]

FIRST = {"hung-s3-all-nodes-in-restore"}
"""Cells that run in ``make test``."""
SAMPLE = {"error-403-s3-all-nodes-in-save", "gone-s3-one-node-in-restore"}
"""Cells that run in ``make test-all``; the others run in campaigns."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An S3 server."""
    running = start_store(tmp_path_factory.mktemp("s3") / "record")
    try:
        yield running
    finally:
        running.kill()


@each_cell(store_cells(), first=FIRST, sample=SAMPLE)
def test_training_continues_with_a_broken_object_store(cell: Cell, server: Any, tmp_path: Path) -> None:
    """Training continues, a log line has tier, node and URL, and the object store is used again after it recovers."""
    check_cell(cell, tmp_path, server)
