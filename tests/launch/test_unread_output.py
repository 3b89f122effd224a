"""A terminal or a pipe that is not read does not delay recovery."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.env import environ
from outlast.queued_writer import StreamWriter

pytestmark = pytest.mark.extended

LIMIT_S = 250.0

PRINTS = """
import os, pathlib, sys, time
folder, cycle = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
for _ in range(20_000):
    print("x" * 100)
sys.stdout.flush()
(folder / f"pid-{cycle}").write_text(str(os.getpid()))
deadline = time.monotonic() + 250
while not (folder / "end").exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


def fill(fd: int) -> None:
    """Write to a pipe until it is full."""
    os.set_blocking(fd, False)
    for piece in (b"\n" * 4096, b"\n"):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, piece)
    os.set_blocking(fd, True)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe: the descriptor to read from, and the one to write to."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


def wait_for(path: Path) -> str:
    """Return the content of a file, once it has some."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} is not there"
        time.sleep(0.02)
    return path.read_text()


def test_dropped_lines_are_counted_and_reported(pipe: tuple[int, int]) -> None:
    """A writer to a full pipe waits briefly once; the number of dropped lines is one line once the pipe is read."""
    read_fd, write_fd = pipe
    fill(write_fd)
    writer = StreamWriter(write_fd)
    line = "y" * 999 + "\n"
    num_lines = (6 << 20) // len(line)
    began_s = time.monotonic()
    for _ in range(num_lines):
        writer.log(line)
    assert time.monotonic() - began_s < LIMIT_S
    assert 0 < (num_dropped := writer.num_dropped) < num_lines
    read = b""
    deadline = time.monotonic() + LIMIT_S
    while b"lines of output dropped" not in read:
        assert time.monotonic() < deadline
        read += os.read(read_fd, 1 << 16)
    assert read.count(b"y" * 999) == num_lines - num_dropped
    assert f"outlast: {num_dropped} lines of output dropped".encode() in read
    assert writer.close()


@pytest.mark.process
@pytest.mark.slow
def test_unread_pipe_does_not_delay_recovery(pipe: tuple[int, int], tmp_path: Path) -> None:
    """With an agent whose output is not read, a worker that dies is replaced, also with forwarded output, the agent
    exits in time, and its log files are complete."""
    write_fd = pipe[1]  # the script prints more than it holds
    script = tmp_path / "train.py"
    script.write_text(PRINTS)
    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "outlast", "run", "--standalone", "--nproc-per-node=1", "--tee=3"),
            *(f"--run-dir={tmp_path / 'run'}", "--no-health-check", os.fspath(script), os.fspath(tmp_path)),
        ],
        env=environ(),
        stdin=subprocess.DEVNULL,
        stdout=write_fd,
        stderr=write_fd,
    )
    try:
        for cycle in range(2):
            pid = int(wait_for(tmp_path / f"pid-{cycle}"))
            os.kill(pid, signal.SIGKILL)
        wait_for(tmp_path / "pid-2")
        (tmp_path / "end").touch()
        assert agent.wait(LIMIT_S) == 0
    finally:
        agent.kill()
        agent.wait(LIMIT_S)
    logs = sorted((tmp_path / "run" / "logs").glob("*/attempt_*/0/stdout.log"))
    assert [log.read_text().count("\n") for log in logs] == [20_000] * 3
