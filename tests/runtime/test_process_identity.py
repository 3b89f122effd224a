"""Whether a recorded process still runs: the pid alone is not enough, since pids are reused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from outlast.runtime.processes import is_alive, process_state, this_process, this_program


def test_own_process_is_identified() -> None:
    """This process is identified by its record; another process with the same pid is not."""
    own_process = this_process()
    assert is_alive(own_process) is True
    assert is_alive(msgspec.structs.replace(own_process, started=own_process.started - 1)) is False


def test_processes_of_other_machines_are_unknown() -> None:
    """A pid is valid in one boot of one machine, and in one namespace; the state of others is unknown."""
    for machine in ("", "another-boot/pid:[1]"):
        assert is_alive(msgspec.structs.replace(this_process(), machine=machine)) is None


@pytest.mark.process
def test_exited_process_is_not_alive() -> None:
    """Also before it is reaped."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child_process = msgspec.structs.replace(this_process(), pid=child.pid, started=0)
        assert is_alive(child_process) is False
        assert process_state(child.pid) == "Z"
        assert child.wait(timeout=300) == 0
    assert is_alive(child_process) is False
    assert process_state(child.pid) == "X"
    assert process_state(os.getpid()) in "RS"


def test_non_utf8_script_path_has_a_printable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the script is written to UTF-8 files; invalid bytes of its path are escaped."""
    script = Path(os.fsdecode(bytes(tmp_path) + b"/a\xff.py"))
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert this_program() == f"{tmp_path}/a\\xff.py"
