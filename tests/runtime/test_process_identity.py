"""Whether a process that a file names still runs: its id alone does not say, since ids are given again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from outlast.runtime.processes import is_alive, process_state, this_process, this_program


def test_process_that_named_itself_is_found() -> None:
    """This process is found by what it says of itself; another one of the same id is not it."""
    itself = this_process()
    assert is_alive(itself) is True
    assert is_alive(msgspec.structs.replace(itself, started=itself.started - 1)) is False


def test_processes_of_other_machines_are_not_judged() -> None:
    """An id is valid in one boot of one machine, and in one namespace; nothing is said of others."""
    for machine in ("", "another-boot/pid:[1]"):
        assert is_alive(msgspec.structs.replace(this_process(), machine=machine)) is None


@pytest.mark.process
def test_process_that_has_ended_is_not_alive() -> None:
    """Also where nobody has reaped it yet."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child_process = msgspec.structs.replace(this_process(), pid=child.pid, started=0)
        assert is_alive(child_process) is False
        assert process_state(child.pid) == "Z"
        assert child.wait(timeout=300) == 0
    assert is_alive(child_process) is False
    assert process_state(child.pid) == "X"
    assert process_state(os.getpid()) in "RS"


def test_a_script_whose_path_is_not_utf8_has_a_name_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What names the script is kept in files, which are UTF-8; the strange bytes of its path are escapes there."""
    script = Path(os.fsdecode(bytes(tmp_path) + b"/a\xff.py"))
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert this_program() == f"{tmp_path}/a\\xff.py"
