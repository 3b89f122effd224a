"""Retention of checkpoints that an earlier process saved."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from obedient_ranks import Ranks

from outlast.checkpoint.writer_client import WriterProcess


@pytest.mark.slow
@pytest.mark.process
def test_retention_counts_checkpoints_of_earlier_processes(tmp_path: Path) -> None:
    """After a restart the first save removes the oldest of three kept checkpoints, in the local and the global tier.

    The remaining older checkpoint can be loaded when the newer ones are lost.
    """
    config: dict[str, Any] = {
        "local_directory": os.fspath(tmp_path / "local"),
        "directory": os.fspath(tmp_path / "global"),
        "local_most_recent_k": 3,
        "most_recent_k": 3,
        "suspect_window": 0,
    }
    with closing(WriterProcess()) as writer, Ranks({"node": writer}, tmp_path / "log") as ranks:
        (before,) = ranks.tell(do="save", config=config, iterations=[1, 2, 3], job="job")
    with closing(WriterProcess()) as writer, Ranks({"node": writer}, tmp_path / "log") as ranks:
        ranks.tell(do="save", config=config, iterations=[4], job="job")
        places = [tmp_path / "local" / "node", tmp_path / "global"]
        for place in places:
            assert sorted(path.name for path in place.glob("step-*")) == ["step-2", "step-3", "step-4"]
            for iteration in (3, 4):
                (place / f"step-{iteration}").rename(place / f"away-{iteration}")
    with closing(WriterProcess()) as writer, Ranks({"node": writer}, tmp_path / "log") as ranks:
        (loaded,) = ranks.tell(do="load", config=config)
        assert (loaded["iteration"], loaded["tiers"], loaded["digest"]) == (2, ["local"], before["saved"]["2"])
