"""Every Python block of the page for those who come from NVRx runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import python_blocks


@pytest.mark.process
def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    """The lines that a user adds, and what is shown after them, run one after the other in one script."""
    blocks = python_blocks("nvrx.md")
    assert len(blocks) == 2, "a block was added: have it run here"
    check = 'assert state["current_timeouts"]["section"]["section"] == {"step": 10.0}, state\nprint("ok")\n'
    (script := tmp_path / "train.py").write_text("".join([*blocks, check]))
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ}, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
