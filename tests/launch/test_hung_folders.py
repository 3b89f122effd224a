"""Folders of a run on a file system that does not respond."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hanging_mount import HangingMount

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]


def test_a_hung_run_or_log_directory_is_an_error(tmp_path: Path) -> None:
    """A run or log directory that does not respond ends the start with one line and exit code 2, and leaves nothing
    behind."""
    script = tmp_path / "train.py"
    script.touch()
    with HangingMount(tmp_path / "source", tmp_path / "mounted") as mount:
        mount.hang()
        for options in (["--log-dir", f"{mount.path}/logs"], ["--run-dir", f"{mount.path}/run"]):
            line = [sys.executable, "-m", "outlast", "run", "--no-health-check", "--redirects=3", *options, str(script)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
            assert done.returncode == 2, done.stderr
            (output,) = done.stderr.strip().splitlines()
            assert f"{options[0]}={options[1]} does not respond" in output, output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mounted", "source", "train.py"]
