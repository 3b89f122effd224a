"""The example of leaving in time does what its README says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "preemption" / "leave_in_time.py"


@contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the example as a process group of its own; yield it, and the iteration at which it began."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"begins at iteration (\d+)", line):
                    yield process, int(found[1])
                    break
            else:
                raise AssertionError("it ended before it began")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_it_leaves_with_75_and_goes_on_where_that_was(tmp_path: Path) -> None:
    """A signal to the group, then a file, each stop it after a save; each start goes on from there, to the end."""
    with _running(tmp_path, "--iterations=1000000") as (process, begun):
        assert begun == 0
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 75, output
    assert "Received signal 15, initiating graceful stop (within 60 s)" in output
    saved = re.search(r"iteration (\d+) is saved, nothing is lost; exiting with code 75", output)
    assert saved, output
    with _running(tmp_path, "--iterations=1000000") as (process, begun):
        assert begun == int(saved[1])
        (tmp_path / "please-leave").touch()
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 75, output
    assert "Told to leave by file" in output
    saved = re.search(r"iteration (\d+) is saved", output)
    assert saved, output
    (tmp_path / "please-leave").unlink()
    last = int(saved[1]) + 5
    with _running(tmp_path, f"--iterations={last}") as (process, begun):
        assert begun == int(saved[1])
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert f"is done after {last} iterations" in output
