"""A checkpoint writer that stops responding is replaced; one whose directory hangs is not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from outlast.checkpoint import protocol
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import ReplicaError, Target, ping
from outlast.checkpoint.writer_client import WriterClient, WriterProcess
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError
from outlast.runtime.files import memory_file
from outlast.testing.ranks import having_argument

KEY = b"k" * 32
LONG_S = 300.0
SILENT_S = 2.0
pytestmark = [pytest.mark.process]


def _wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@contextmanager
def _hung_mount(source: Path, mount_point: Path) -> Iterator[None]:
    """Mount a directory whose file system does not respond."""
    mount_point.mkdir()
    daemon = subprocess.Popen(["bindfs", "-f", source, mount_point])
    try:
        _wait_until(lambda: os.path.ismount(mount_point))
        daemon.send_signal(signal.SIGSTOP)
        yield
    finally:
        daemon.kill()
        daemon.wait()
        subprocess.run(["umount", "-l", mount_point], check=True)


def test_only_the_first_save_waits_for_a_stopped_writer() -> None:
    """The first save waits for its full limit, later saves for one second, until the writer responds again."""
    writer = WriterProcess(node="a", silent_s=LONG_S)
    with closing(writer), closing(WriterClient(writer.address)) as client:
        pool = ArenaPool(client, 0, limit_s=LONG_S, answer_s=2.0, may_steal=False)
        with closing(pool):
            pool.give_back(pool.take(4096))
            writer_process = psutil.Process(writer.pid)
            writer_process.suspend()
            _wait_until(lambda: _is_stopped(writer.pid))
            for limit in ("2 s", "1 s"):
                with pytest.raises(CheckpointError, match=f"did not respond within {limit}"):
                    pool.take(4096)
            writer_process.resume()
            _wait_until(lambda: _can_take_memory(pool))


def test_neither_a_load_nor_the_end_waits_for_a_stopped_agent_process() -> None:
    """Memory for the first save is prepared in the background, also while the agent process that starts the writer does
    not respond; closing does not wait for it, and a save after its return succeeds."""
    place = WorkerEnv(node=f"stopped-{os.getpid()}")
    with closing(WriterClient(None, place=place)) as first:
        first.start()
        (agent,) = having_argument(psutil.Process().children(), place.node)
        agent.suspend()
        try:
            _wait_until(lambda: _is_stopped(agent.pid))
            client = WriterClient(None, place=place)
            pool = ArenaPool(client, 0, limit_s=LONG_S, answer_s=LONG_S, may_steal=False)
            pool.prepare(4096)
            client.close()
            assert any(thread.name == "outlast-touch" for thread in threading.enumerate())  # it still waits
        finally:
            agent.resume()
        pool.close()
        _wait_until(lambda: all(thread.name != "outlast-touch" for thread in threading.enumerate()))
        with pytest.raises(CheckpointError, match="no checkpoint writer"):
            pool.take(4096)
        with closing(WriterClient(None, place=place)) as last:
            pool = ArenaPool(last, 0, limit_s=LONG_S, answer_s=LONG_S, may_steal=False)
            pool.prepare(4096)
            pool.give_back(pool.take(4096))
            pool.close()


def _is_stopped(pid: int) -> bool:
    """Return whether every thread of a process is stopped."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def _can_take_memory(pool: ArenaPool) -> bool:
    try:
        pool.give_back(pool.take(4096))
    except CheckpointError:
        return False
    return True


def test_a_stopped_writer_is_killed_and_replaced() -> None:
    """A pending request fails when the writer is killed, and the next one is served by a new writer.

    The owner is notified with the process, its state and the time.
    """
    lines: list[str] = []
    new_writer = WriterProcess(node="a", on_death=lines.append, silent_s=SILENT_S)
    with closing(new_writer) as writer, closing(WriterClient(writer.address)) as client, ThreadPoolExecutor() as pool:
        client.ask(protocol.List(), protocol.Listed, timeout_s=LONG_S)
        first = writer.pid
        psutil.Process(first).suspend()
        _wait_until(lambda: _is_stopped(first))
        pending = pool.submit(client.ask, protocol.List(), protocol.Listed, timeout_s=LONG_S)
        with pytest.raises(CheckpointError, match="the checkpoint writer is gone"):
            pending.result(LONG_S)
        client.ask(protocol.List(), protocol.Listed, timeout_s=LONG_S)
        _wait_until(lambda: bool(lines))
        assert writer.pid != first
        assert f"the checkpoint writer of node a, pid {first} (state T" in lines[0]
        assert "did not respond for " in lines[0]


def test_a_replacement_writer_serves_at_the_same_port() -> None:
    """After any request a new writer serves other nodes at the port of the old one."""
    with closing(WriterProcess()) as writer, closing(WriterClient(writer.address)) as client:
        serve = protocol.Serve(host="127.0.0.1", secret=KEY, folder=None)
        serving, _ = client.ask(serve, protocol.Serving, timeout_s=LONG_S)
        target = Target("here", "127.0.0.1", serving.port)
        ping(target, KEY, timeout_s=LONG_S)
        first = writer.pid
        os.kill(first, signal.SIGKILL)
        _wait_until(lambda: writer.pid != first)
        with pytest.raises(ReplicaError):
            ping(target, KEY, timeout_s=LONG_S)
        client.ask(protocol.List(), protocol.Listed, timeout_s=LONG_S)
        ping(target, KEY, timeout_s=LONG_S)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bindfs") is None or os.getuid() != 0, reason="needs bindfs, and to be root")
def test_a_writer_with_a_hung_directory_is_not_replaced(tmp_path: Path) -> None:
    """A writer whose writes hang for several times the limit serves other requests and is not replaced."""
    (source := tmp_path / "source").mkdir()
    new_writer = WriterProcess(silent_s=SILENT_S)
    with closing(new_writer) as writer, closing(WriterClient(writer.address)) as client, ThreadPoolExecutor(4) as pool:
        client.ask(protocol.PingWriter(), protocol.Done, timeout_s=LONG_S)
        first = writer.pid
        with _hung_mount(source, tmp_path / "mounted"):
            fd = memory_file("shard")
            os.ftruncate(fd, 1 << 16)
            path = os.fspath(tmp_path / "mounted" / "folder" / "shard")
            writes = [
                protocol.Write(key=CopyKey(1, f"a{number}", 0), num_bytes=1 << 16, path=path) for number in range(4)
            ]
            pending = [pool.submit(client.ask, one, protocol.Written, timeout_s=LONG_S, fd=fd) for one in writes]
            end_s = time.monotonic() + 8 * SILENT_S
            while time.monotonic() < end_s:
                client.ask(protocol.PingWriter(), protocol.Done, timeout_s=LONG_S)
                time.sleep(0.1)
            assert writer.pid == first
            assert not any(one.done() for one in pending)
        for one in pending:  # the mount is gone
            with pytest.raises(CheckpointError):
                one.result(LONG_S)
        assert writer.pid == first
        os.close(fd)
