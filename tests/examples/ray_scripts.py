"""Runs of example scripts that start a Ray of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["run_script"]


def run_script(script: Path, *arguments: str, timeout_s: float) -> tuple[int, str]:
    """Run a script to its end; return its exit code and what it printed.

    Blocks: up to ``timeout_s``; then the script is killed with all that it started, and ``TimeoutExpired`` raised.
    """
    # Ray's sockets lie in there, and their paths may have 107 bytes only; Ray may still write as it ends.
    with tempfile.TemporaryDirectory(prefix="olx-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        own = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        with subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output
