"""Checkpoints that an earlier process saved are kept like one's own."""

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
def test_a_save_after_a_load_keeps_the_newest_of_both(tmp_path: Path) -> None:
    """Three checkpoints are kept: after a restart the first save makes room by one, in the local and the global tier,
    and what was saved before can still be loaded when the newer ones are gone."""
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
        (told,) = ranks.tell(do="load", config=config)
        assert (told["iteration"], told["tiers"], told["digest"]) == (2, ["local"], before["saved"]["2"])
