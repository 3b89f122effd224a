"""The preemption example behaves as its README describes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outlast.testing import RankProcesses

pytestmark = pytest.mark.extended

PATIENCE_S = 90.0
BEGINS = "begins at iteration "
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "preemption" / "leave_in_time.py"


@contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[tuple[RankProcesses, int]]:
    """Start the example in a new process group; yield it, and the iteration at which it started."""
    with RankProcesses(SCRIPT, str(folder), *arguments, world_size=1) as ranks:
        yield ranks, int(ranks.next_line(0, PATIENCE_S, containing=BEGINS).partition(BEGINS)[2].split()[0])


@pytest.mark.slow
@pytest.mark.process
def test_shutdown_requests_save_exit_75_and_resume(tmp_path: Path) -> None:
    """A signal to the process group, then a file, each end the run with 75 after a save; each start resumes from
    there."""
    with _running(tmp_path, "--iterations=1000000") as (ranks, started_at):
        assert started_at == 0
        os.killpg(ranks.pid(0), signal.SIGTERM)
        codes, output = ranks.wait(PATIENCE_S), ranks.output(0)
    assert codes == [75], output
    assert "Received signal 15, initiating graceful stop (within 60 s)" in output
    saved = re.search(r"iteration (\d+) is saved, nothing is lost; exiting with code 75", output)
    assert saved, output
    with _running(tmp_path, "--iterations=1000000") as (ranks, started_at):
        assert started_at == int(saved[1])
        (tmp_path / "please-leave").touch()
        codes, output = ranks.wait(PATIENCE_S), ranks.output(0)
    assert codes == [75], output
    assert "Shutdown requested by file" in output
    saved = re.search(r"iteration (\d+) is saved", output)
    assert saved, output
    (tmp_path / "please-leave").unlink()
    last = int(saved[1]) + 5
    with _running(tmp_path, f"--iterations={last}") as (ranks, started_at):
        assert started_at == int(saved[1])
        codes, output = ranks.wait(PATIENCE_S), ranks.output(0)
    assert codes == [0], output
    assert f"is done after {last} iterations" in output
