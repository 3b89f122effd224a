"""Checks that are given up end at once, with all that they started."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from outlast.health import Status
from outlast.health.node import CommandCheck
from outlast.health.probing import Prober

pytestmark = pytest.mark.process


def test_abandoned_check_ends_with_what_it_started(tmp_path: Path) -> None:
    """Whoever waits for a check is answered once it is abandoned; its command is gone, and no other check is made."""
    pid_file = tmp_path / "pid"
    found = []
    with Prober() as prober:

        def ask() -> None:
            for command in (f"sleep 1000 & echo $! > {pid_file}; wait", "true"):
                found.append(prober.ask(CommandCheck(command=command), "command", "it", timeout_s=1000))

        asking = threading.Thread(target=ask)
        asking.start()
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert asking.is_alive(), found
            time.sleep(0.01)
        prober.abandon()
        asking.join(100)
        assert not asking.is_alive()
    assert [one.status for one in found] == [Status.FAILED, Status.ERROR]
    deadline = time.monotonic() + 100
    while _is_alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "what the command had started still runs"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter when it goes between the two calls of the reading
        return False
