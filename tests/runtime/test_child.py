"""Child processes: their import path, inherited descriptors, private task, exit codes, and that they are reaped."""

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
    """A folder in PYTHONPATH that contains the module of the child."""
    (tmp_path / "child_of_test.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_child_gets_a_private_task_and_named_descriptors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is not on the command line, the listed descriptor is inherited, and the child imports its parent's
    package."""
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


def test_exit_of_a_child_closes_its_channel() -> None:
    """The channel is closed when the child exits, and the exit code is known afterwards."""
    child = ChildProcess("child_of_test", task=Task("die", 0), receives=Answer)
    assert child.channel.receive(within_s=60) is None
    assert child.close(grace_s=60) == 7


def test_process_group_ends_with_the_child() -> None:
    """The process group of a child is ended by ``close()``, even if the child itself has died before."""
    read, write = os.pipe()
    child = ChildProcess("child_of_test", task=Task("family", 0), receives=Answer, fds=[write], quiet=True)
    os.close(write)
    pidfd = os.pidfd_open(child.pid)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)
    assert child.close() == -signal.SIGKILL
    assert os.read(read, 1) == b""
    os.close(read)


def test_child_that_does_not_exit_is_killed() -> None:
    """``close()`` waits no longer than the grace period."""
    child = ChildProcess("child_of_test", task=Task("stay", 1))
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    assert child.close() == -signal.SIGKILL


FORKING = """
import os, signal, threading, time
from outlast.runtime.processes import ChildProcess

num_started, forked = 0, []

def start_children():
    global num_started
    for _ in range(20):
        assert ChildProcess("", interpreter=("-S", "-c", "pass")).wait(100.0) == 0
        num_started += 1

thread = threading.Thread(target=start_children, daemon=True)
thread.start()
end_s = time.monotonic() + 200.0
while thread.is_alive() and len(forked) < 2000 and time.monotonic() < end_s:
    if (pid := os.fork()) == 0:  # as a worker of a data loader, it executes no other program
        signal.pause()
        os._exit(0)
    forked.append(pid)
    time.sleep(0.003)
thread.join(max(0.0, end_s - time.monotonic()))
print(num_started, len(forked) > 20)
for pid in forked:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@pytest.mark.process
def test_a_start_does_not_wait_for_processes_that_are_forked_meanwhile() -> None:
    """A thread starts children while the main thread forks processes that continue to run, as a data loader does: no
    start waits for the end of one of them."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["20", "True"], done.stderr
