"""The PPO example on Ray ends with the same weights whether actors died on the way or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ray_ppo.py"


@pytest.mark.process
@pytest.mark.timeout(300)
def test_it_ends_alike_after_a_data_shard_was_killed(tmp_path: Path) -> None:
    """A data shard dies while its peers are in an all-reduce: they are kept, it is replaced, and results are equal."""
    told = tmp_path / "told.json"
    # Ray's sockets lie in there, and their paths may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="ppo-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        arguments = ["--iterations=6", "--fail=kill@4", "--compare", f"--json={told}"]
        with subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RAY_TMPDIR": ray_folder,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "disabled",
            },
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                output, _ = process.communicate(timeout=240)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert "both ended alike, bit for bit" in output
    result = json.loads(told.read_text(encoding="utf-8"))
    assert result["equal"]
    assert len(set(result["disturbed"]["digests"])) == 2  # tensor slices differ, data shards do not
    (recovery,) = [one for one in result["disturbed"]["recoveries"] if {2, 3} == {lost["rank"] for lost in one["lost"]}]
    assert {lost["kind"] for lost in recovery["lost"]} == {"died"}
    assert (recovery["kept"], recovery["replaced"]) == ([0, 1], [2, 3])
    assert {2, 3} <= set(recovery["loaded"])
