"""Whether a process that a file names still runs: its id alone does not say, since ids are given again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outlast.runtime.processes import describe_self, is_running


def test_process_that_described_itself_runs() -> None:
    """This process is found by what it says of itself, another of the same id is not it."""
    itself = describe_self()
    assert is_running(itself["pid"], itself["pid_started"], itself["machine"]) is True
    assert is_running(itself["pid"], itself["pid_started"] - 1, itself["machine"]) is False


def test_other_machines_processes_are_not_judged() -> None:
    """An id is valid in one boot of one machine, and in one namespace; nothing is said of others."""
    itself = describe_self()
    for machine in ("", "another-boot/pid:[1]"):
        assert is_running(itself["pid"], itself["pid_started"], machine) is None


@pytest.mark.process
def test_process_that_has_ended_does_not_run() -> None:
    """Also where nobody has reaped it yet."""
    machine = describe_self()["machine"]
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_running(child.pid, 0, machine) is False
        assert child.wait(timeout=60) == 0
    assert is_running(child.pid, 0, machine) is False
