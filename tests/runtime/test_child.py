"""Starting children: where they import from, what they inherit, what they are told, and that they are reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from outlast.runtime.processes import ChildProcess

pytestmark = [pytest.mark.cold, pytest.mark.process]

CHILD = """
import os, sys, msgspec
import outlast
from outlast.runtime.processes import channel_to_parent

class Task(msgspec.Struct, tag=True):
    secret: str
    fd: int

class Answer(msgspec.Struct, tag=True):
    secret: str
    content: str
    command: str
    home: str
    safe_path: bool

channel = channel_to_parent(sys.argv[1], Task)
task = channel.receive()
if task.secret == "die":
    os._exit(7)
if task.secret == "family":
    if os.fork() == 0:
        os.close(1)
        channel.receive()
    os.kill(os.getpid(), 9)
channel.send(Answer(
    task.secret,
    os.pread(task.fd, 100, 0).decode(),
    open("/proc/self/cmdline").read(),
    outlast.__file__,
    bool(sys.flags.safe_path),
))
channel.receive()
sys.exit(3)
"""


class Task(msgspec.Struct, tag=True):
    secret: str
    fd: int


class Answer(msgspec.Struct, tag=True):
    secret: str
    content: str
    command: str
    home: str
    safe_path: bool


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of which the environment says that a module of ours lies in it."""
    (tmp_path / "child_of_test.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_child_is_told_in_private_and_inherits_what_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task does not stand on the command line, the named descriptor is there, and this package is its parent's."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "msgspec.py").write_text("raise SystemExit('from the working directory')")
    monkeypatch.chdir(folder / "elsewhere")
    fd = os.memfd_create("test")
    os.write(fd, b"content")
    child = ChildProcess("child_of_test", "argument", task=Task("hush", fd), receives=Answer, fds=[fd])
    os.close(fd)
    answer = child.channel.receive(within_s=60)
    assert answer.secret == "hush"
    assert answer.content == "content"
    assert "hush" not in answer.command
    assert answer.command.split("\0")[-2] == "argument"
    assert Path(answer.home).samefile(sys.modules["outlast"].__file__ or "")
    assert answer.safe_path
    assert child.poll() is None
    assert child.close(grace_s=60) == 3
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def test_the_end_of_a_child_is_seen_on_its_channel() -> None:
    """A child that ends closes its channel, and its exit code is known after."""
    child = ChildProcess("child_of_test", task=Task("die", 0), receives=Answer)
    assert child.channel.receive(within_s=60) is None
    assert child.close(grace_s=60) == 7


def test_what_a_child_started_ends_with_it() -> None:
    """A child's process group is ended with it, also when the child itself died before."""
    read, write = os.pipe()
    child = ChildProcess("child_of_test", task=Task("family", 0), receives=Answer, fds=[write], quiet=True)
    os.close(write)
    ended = os.pidfd_open(child.pid)
    os.waitid(os.P_PIDFD, ended, os.WEXITED | os.WNOWAIT)
    os.close(ended)
    assert child.close() == -signal.SIGKILL
    assert os.read(read, 1) == b""
    os.close(read)


def test_a_child_that_does_not_end_is_killed() -> None:
    """Who closes a child waits no longer than it says."""
    child = ChildProcess("child_of_test", task=Task("stay", 1))
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    assert child.close() == -signal.SIGKILL
