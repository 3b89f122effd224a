"""Abandoned checks end at once, with all their processes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from outlast.health import Status
from outlast.health.node import CommandCheck
from outlast.health.probing import Prober

pytestmark = pytest.mark.process


def test_abandoned_check_is_killed_with_its_processes(tmp_path: Path) -> None:
    """The caller of an abandoned check returns; the processes of the check are killed, and no further check runs."""
    pid_file = tmp_path / "pid"
    found = []
    with Prober() as prober:

        def run_checks() -> None:
            for command in (f"sleep 1000 & echo $! > {pid_file}; wait", "true"):
                found.append(prober.ask(CommandCheck(command=command), "command", "it", timeout_s=1000))

        thread = threading.Thread(target=run_checks)
        thread.start()
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert thread.is_alive(), found
            time.sleep(0.01)
        prober.abandon()
        thread.join(100)
        assert not thread.is_alive()
    assert [one.status for one in found] == [Status.FAILED, Status.ERROR]
    deadline = time.monotonic() + 100
    while _is_alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "what the command had started still runs"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if the process ends between open and read
        return False
