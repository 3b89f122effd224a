"""`outlast status` queries a run whose key is stored elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast import env
from outlast.policy.run_view import RunView
from outlast.runtime.run_key import RunKey, find_run_key
from outlast.status.evidence import ask_job
from outlast.testing import Cluster

WAITS = """
import pathlib, sys, time
deadline = time.monotonic() + 200
print("it waits", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


def run_status(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != env.RUN_KEY}
    command = [sys.executable, "-m", "outlast", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.process
def test_the_run_key_can_come_from_a_file(tmp_path: Path) -> None:
    """Without the key the coordinator is not trusted, and one line names the missing option; a wrong key does not hide
    the right one."""
    key_file, release, script = tmp_path / "key", tmp_path / "go-on", tmp_path / "train.py"
    key_file.write_text("sixteen bytes or more")
    script.write_text(WAITS)
    options = [f"--run-key-file={key_file}"]
    with Cluster(script, str(release), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options) as job:
        job.wait_for("it waits", timeout_s=200)
        accepted = run_status(job.endpoint, f"--run-key-file={key_file}")
        assert accepted.returncode == 0, accepted.stderr
        assert "running" in accepted.stdout
        rejected = run_status(job.endpoint)
        assert rejected.returncode == 2
        assert "give --run-key-file or OUTLAST_RUN_KEY" in rejected.stderr
        events = job.events()
        key = find_run_key("", None, key_file=str(key_file), is_one_machine=True)
        live, _ = ask_job(RunView.of(events).job(events[0].job), [RunKey.of_run_id("other"), key])
        assert live is not None
        nothing, why = ask_job(RunView.of(events).job(events[0].job), [RunKey.of_run_id("other")])
        assert nothing is None
        assert why is not None
        assert "its run key is another one" in why
        release.touch()
        assert job.wait(timeout_s=200) == [0], job.tails()
