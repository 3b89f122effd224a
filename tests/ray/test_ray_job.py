"""``examples/ray_job`` is submitted to a cluster as a job, twice; the second job continues the first."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.testing.ranks import free_port

pytestmark = [pytest.mark.overlay, pytest.mark.process, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_job"
LIMIT_S = 240.0
HEAD = """
import sys
from ray.cluster_utils import Cluster
# Its agent, which starts jobs, has a port of its own: a cluster of another test may hold the usual one.
head = {"num_cpus": 8, "num_gpus": 0, "object_store_memory": 150 << 20, "include_dashboard": True}
head |= {"dashboard_port": int(sys.argv[1]), "dashboard_agent_listen_port": 0}
cluster = Cluster(initialize_head=True, head_node_args=head)
print("ready", flush=True)
sys.stdin.read()
cluster.shutdown()
"""
SUBMIT = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]


def submit(name: str, port: int, folder: Path, checkpoints: Path, iterations: int, environment: dict[str, str]) -> str:
    """Submit the example with its runtime environment, and return the job's output once it has succeeded.

    The output is read from the job's log: the output of the command may lack the last lines.
    """
    job = ["python", "train.py", "--checkpoints", str(checkpoints), "--iterations", str(iterations)]
    place = ["--address", f"http://127.0.0.1:{port}", "--runtime-env", "runtime_env.yaml", "--working-dir", "."]
    place += ["--submission-id", name]
    ends_s = time.monotonic() + LIMIT_S
    while True:
        done = subprocess.run(
            [*SUBMIT, *place, "--", *job],
            cwd=EXAMPLE,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        # The head is ready some time before the agent that starts jobs; the job has not begun at this point.
        if "No available agent" not in done.stderr or time.monotonic() > ends_s:
            break
    logs = folder.glob("session_latest/logs/dashboard_agent.*")
    assert done.returncode == 0, "\n".join([done.stdout + done.stderr, *(log.read_text()[-3000:] for log in logs)])
    return (folder / "session_latest" / "logs" / f"job-driver-{name}.log").read_text()


def submit_by_script(port: int, folder: Path, checkpoints: Path, iterations: int, environment: dict[str, str]) -> str:
    """Submit the example with its ``run.sh``, from another folder."""
    command = [EXAMPLE / "run.sh", f"http://127.0.0.1:{port}", checkpoints, f"--iterations={iterations}"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (name,) = set(re.findall(r"raysubmit_\w+", done.stdout))
    return (folder / "session_latest" / "logs" / f"job-driver-{name}.log").read_text()


def test_a_resubmitted_job_continues(tmp_path: Path) -> None:
    """Both jobs succeed; the second begins at the iteration that the first one saved last."""
    port, folder = free_port(), Path(f"/tmp/olj-{os.getpid()}/ray")  # short, because it contains sockets
    folder.mkdir(parents=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder.parent)}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment.pop("RAY_ADDRESS", None)
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(port)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert head.stdin is not None
        assert head.stdout is not None
        assert head.stdout.readline() == "ready\n"
        first = submit("first", port, folder, tmp_path / "run", 3, environment)
        assert "trained from iteration 0 to 3, 0 recoveries" in first
        second = submit_by_script(port, folder, tmp_path / "run", 5, environment)
        assert "trained from iteration 3 to 5, 0 recoveries" in second, second
    finally:
        head.communicate("", timeout=300)
        subprocess.run(["rm", "-rf", str(folder.parent)], check=False)
