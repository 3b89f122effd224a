"""A run directory that is removed or replaced costs its content, not the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

SCRIPT = """
import pathlib, sys, time
print("trains", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


def test_a_job_ends_without_its_run_directory(tmp_path: Path) -> None:
    """When a file has replaced the run directory, the agent exits with the job's exit code and logs the last line."""
    script, continue_file, run_dir = tmp_path / "train.py", tmp_path / "go", tmp_path / "run"
    script.write_text(SCRIPT)
    with Cluster(script, str(continue_file), run_dir=run_dir, num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for("trains", timeout_s=300)
        run_dir.rename(tmp_path / "gone")
        run_dir.write_text("a file")
        continue_file.touch()
        assert cluster.wait(timeout_s=300) == [0]
        run_dir.unlink()
        (tmp_path / "gone").rename(run_dir)  # the agent's output is stored there
        output = cluster.agent(0).output()
        assert "exit code 0" in output.partition("job over after")[2], output
        assert "is a file, not a run directory" in output
        assert "Traceback" not in output
