"""Files of a run with command lines or output can be read by their owner only."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

SCRIPT = """
import os, sys
print("said by", os.environ["RANK"], flush=True)
print("complained", file=sys.stderr, flush=True)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit("this rank ends")
"""


@pytest.mark.process
@pytest.mark.slow
def test_files_of_a_run_are_private_to_its_owner(tmp_path: Path) -> None:
    """With umask 0 all files with command lines, output or stacks have mode 0600, in folders of mode 0700."""
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = f"umask 0; exec {sys.executable} -m outlast run --standalone --nproc-per-node 2 --max-restarts 1"
    command += f" --run-dir {run_dir} --tee 3 {script}"
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=300)
    found = {path.relative_to(run_dir).as_posix(): path for path in run_dir.rglob("*")}
    files = {name: path for name, path in found.items() if path.is_file()}
    assert {name.split("/")[0] for name in files} >= {"journal", "ladder.json", "owner", "failures", "logs"}
    modes = {name: oct(stat.S_IMODE(os.stat(path).st_mode)) for name, path in files.items()}
    assert {name: mode for name, mode in modes.items() if mode != "0o600"} == {}
    tops = {name: path for name, path in found.items() if path.is_dir() and "/" not in name}
    assert {name for name, path in tops.items() if stat.S_IMODE(path.stat().st_mode) != 0o700} == set()
