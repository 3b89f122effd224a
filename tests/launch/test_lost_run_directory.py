"""A run directory that somebody removes or replaces costs what is kept in it, not the job."""

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


def test_the_end_of_a_job_does_not_depend_on_its_run_directory(tmp_path: Path) -> None:
    """The agent of a run directory that a file has replaced ends with the job's exit code and the line of its end."""
    script, go, run_dir = tmp_path / "train.py", tmp_path / "go", tmp_path / "run"
    script.write_text(SCRIPT)
    with Cluster(script, str(go), run_dir=run_dir, num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for("trains", timeout_s=300)
        run_dir.rename(tmp_path / "gone")
        run_dir.write_text("a file")
        go.touch()
        assert cluster.wait(timeout_s=300) == [0]
        run_dir.unlink()
        (tmp_path / "gone").rename(run_dir)  # the agent's output is in there
        output = cluster.agent(0).output()
        assert "exit code 0" in output.partition("job over after")[2], output
        assert "is a file, not a run directory" in output
        assert "Traceback" not in output
