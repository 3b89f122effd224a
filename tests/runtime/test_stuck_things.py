"""Hanging disks, refused system calls and silent actors: every wait ends, and every descriptor is closed."""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from outlast import clock
from outlast.checkpoint.replica import service as serving
from outlast.config import RecoveryConfig
from outlast.errors import OutlastError
from outlast.inprocess.rank_local_state import SharedBuffer
from outlast.preemption.signals import SignalWatch
from outlast.ray import keepers, replies
from outlast.ray.replies import ActorPing, Reply, ReplyFault
from outlast.ray.watch import AwaitedActor, Gathered, LossKind, Watch
from outlast.runtime import files
from outlast.runtime.processes import open_pidfd, send_signal


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def refuse(*_: object, **__: object) -> Any:
    raise OSError(errno.EPERM, "not permitted")


def test_hung_disk_gets_no_further_work(tmp_path: Path) -> None:
    """A call that takes too long is left to end by itself; until then no further call is started on that file
    system, and other file systems are used as before."""
    release, second = threading.Event(), Mock()
    with pytest.raises(TimeoutError, match="does not respond"):
        files.in_time(tmp_path / "missing" / "file", release.wait, 0.01)
    with pytest.raises(TimeoutError, match="does not respond"):
        files.in_time(tmp_path, second)
    second.assert_not_called()
    assert files.in_time("/proc/self/status", lambda: 5) == 5
    (stuck,) = files.overdue.values()
    release.set()
    stuck.result(100)
    assert files.in_time(tmp_path, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        files.in_time(tmp_path, lambda: 1 // 0)
    assert files.overdue == {}


def test_memory_file_works_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memfd_create is forbidden, others can open the memory by its descriptor all the same, and it has no name."""
    monkeypatch.setattr(os, "memfd_create", refuse)
    fd = files.memory_file("outlast-test", can_be_sealed=True)
    try:
        os.write(fd, b"kept")
        other = os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR)
        assert os.read(other, 9) == b"kept"
        os.close(other)
        assert not [name for name in os.listdir("/dev/shm") if name.startswith("outlast-test")]
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


@pytest.mark.process
def test_process_is_watched_and_signalled_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pidfd_open and pidfd_send_signal the end of a process is detected, reaped or not, and it receives
    signals until then."""
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with subprocess.Popen(["sleep", "600"]) as child:
        pidfd = open_pidfd(child.pid)
        assert not select.select([pidfd], [], [], 0.2)[0]
        send_signal(pidfd, child.pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 100)[0]
        with pytest.raises(ProcessLookupError):
            send_signal(pidfd, child.pid, signal.SIGTERM)
    os.close(pidfd)
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid)


def test_unmappable_buffer_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the memory cannot be mapped, the descriptor is closed."""
    before = num_open()
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="not permitted"):
        SharedBuffer.create()
    assert num_open() == before


def test_failed_signal_watch_leaves_nothing_behind() -> None:
    """A watch that could not be created leaves no handler, no thread and no descriptor."""
    before, handler = num_open(), signal.getsignal(signal.SIGUSR1)
    threads = set(threading.enumerate())
    for wrong in (signal.SIGKILL, 999):
        with pytest.raises(OutlastError, match="cannot be handled"):
            SignalWatch([signal.SIGUSR1, wrong], on_signal=Mock())
    assert signal.getsignal(signal.SIGUSR1) == handler
    assert not set(threading.enumerate()) - threads
    assert num_open() == before


def test_replica_request_ends_if_the_disk_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer gets heartbeats for a bounded time; a later result of the work is dropped."""
    monkeypatch.setattr(serving, "MAX_WORK_S", 0.03)
    monkeypatch.setattr(serving, "WORKING_S", 0.01)
    channel, release, late, dropped = Mock(), threading.Event(), Mock(), threading.Event()
    late.drop.side_effect = dropped.set
    service = serving.Service(channel, Mock(place="/disk"), Mock(), serving.DiskWork())

    def work() -> Any:
        release.wait()
        return late

    with pytest.raises(TimeoutError, match="has not responded"):
        service.run_patiently(work, serving.drop_later)
    assert channel.send.call_count == 3
    release.set()
    assert dropped.wait(100)


def test_stopped_keeper_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A started keeper that does not respond for a minute is killed, reported, and replaced."""
    monkeypatch.setattr(replies, "reply_if_ready", lambda _: None)
    ray, replacement = Mock(**{"nodes.return_value": [{"NodeID": "n", "Alive": True}]}), Mock()
    monkeypatch.setattr(keepers, "ray", ray)
    monkeypatch.setattr(keepers, "start_on", lambda *_: replacement)
    own, stopped = keepers.NodeKeepers(), Mock()
    asked_s = clock.now_s() - keepers.SILENT_S + 30
    own.by_node["n"] = kept = keepers.Keeper(stopped, ActorPing(ref="asked", asked_s=asked_s), has_started=True)
    assert own.look() == []
    kept.ping.asked_s -= 31
    assert own.look() == ["n"]
    ray.kill.assert_called_once_with(stopped)
    assert own.by_node["n"].handle is replacement


def test_status_that_raises_counts_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor whose status raises is queried again without a busy loop, and is lost when that has lasted too long."""
    monkeypatch.setattr(replies, "reply_if_ready", lambda _: Reply(fault=ReplyFault.RAISED, error=ValueError("no")))
    config, gathered, now_s = RecoveryConfig(), Gathered(), clock.now_s()
    one = AwaitedActor(actor=Mock(), call="c", alive_s=now_s, ping=ActorPing(ref="asked", asked_s=now_s))
    watch = Watch(config, Mock())
    watch.check({0: one}, gathered)
    assert gathered.is_whole
    assert one.ping.ref is None  # a ready reference would end every wait at once
    assert one.ping.due_s > now_s
    one.ping.ref, one.ping.asked_s = "asked", now_s - config.ping_timeout - 1
    watch.check({0: one}, gathered)
    assert gathered.lost[0].kind == LossKind.SILENT
