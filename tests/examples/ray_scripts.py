"""Helpers for example scripts that start their own Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["run_script"]


def run_script(script: Path, *arguments: str, timeout_s: float) -> tuple[int, str]:
    """Run a script to its end; return its exit code and output.

    Blocks: up to ``timeout_s``; then the script and its process group are killed, and ``TimeoutExpired`` is raised.
    """
    # Contains Ray's sockets, whose paths are limited to 107 bytes; Ray may still write files as it exits.
    with tempfile.TemporaryDirectory(prefix="olx-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        ray_variables = {"RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        with subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **ray_variables},
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
