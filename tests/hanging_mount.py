"""A directory that hangs on request: a bindfs mount whose daemon is stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from outlast import clock

MOUNTED_S = 60.0


class HangingMount:
    """Mount one folder at another path; use as a context manager.

    Args:
        source: The folder; is made.
        path: Where it is mounted; is made.
    """

    def __init__(self, source: Path, path: Path) -> None:
        self.source, self.path = source, path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> HangingMount:
        bindfs = shutil.which("bindfs")
        if bindfs is None or not os.path.exists("/dev/fuse") or os.geteuid() != 0:
            pytest.skip("a directory that hangs needs bindfs, /dev/fuse and root")
        self.source.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        options = "attr_timeout=0,entry_timeout=0,negative_timeout=0"
        self._process = subprocess.Popen(
            [bindfs, "-f", "-o", options, self.source, self.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_ns = clock.now_ns() + int(MOUNTED_S * 1e9)
        while not os.path.ismount(self.path):
            assert self._process.poll() is None, "bindfs has ended"
            assert clock.now_ns() < end_ns, "bindfs mounts nothing"
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        subprocess.run(["umount", "-l", self.path], check=False, stderr=subprocess.DEVNULL)
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The process id of the daemon."""
        assert self._process is not None
        return self._process.pid

    def hang(self) -> None:
        """Make every call on the mount wait."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo :meth:`hang`."""
        os.kill(self.pid, signal.SIGCONT)
