"""What hangs, refuses, or is not there: every wait ends, and every descriptor is given back."""

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
from outlast.ray.watch import Gathered, LossKind, Watch, _AwaitedActor
from outlast.runtime import files
from outlast.runtime.processes import open_pidfd, send_signal


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def refuse(*_: object, **__: object) -> Any:
    raise OSError(errno.EPERM, "not permitted")


def test_work_on_a_hung_disk_is_left_and_nothing_more_is_tried_there_meanwhile(tmp_path: Path) -> None:
    """What takes too long is left to end by itself; until it has, the next one there is not even begun, and other file
    systems are used as before."""
    go_on, begun = threading.Event(), Mock()
    with pytest.raises(TimeoutError, match="does not respond"):
        files.in_time(tmp_path / "missing" / "file", go_on.wait, 0.01)
    with pytest.raises(TimeoutError, match="does not respond"):
        files.in_time(tmp_path, begun)
    begun.assert_not_called()
    assert files.in_time("/proc/self/status", lambda: 5) == 5
    (stuck,) = files._overdue.values()
    go_on.set()
    stuck.result(100)
    assert files.in_time(tmp_path, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        files.in_time(tmp_path, lambda: 1 // 0)
    assert files._overdue == {}


def test_memory_without_memfd_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody may call memfd_create, others open the memory by its descriptor all the same."""
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
def test_a_process_is_watched_and_signalled_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pidfd_open and pidfd_send_signal its end is seen, reaped or not, and it gets signals until then."""
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


def test_a_buffer_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no memory to map, the descriptor is closed."""
    before = num_open()
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="not permitted"):
        SharedBuffer.create()
    assert num_open() == before


def test_a_signal_that_cannot_be_handled_leaves_the_others_as_they_were() -> None:
    """Nothing is left of a watch that could not be made: no handler, no thread, no descriptor."""
    before, handler = num_open(), signal.getsignal(signal.SIGUSR1)
    threads = set(threading.enumerate())
    for wrong in (signal.SIGKILL, 999):
        with pytest.raises(OutlastError, match="cannot be handled"):
            SignalWatch([signal.SIGUSR1, wrong], on_signal=Mock())
    assert signal.getsignal(signal.SIGUSR1) == handler
    assert not set(threading.enumerate()) - threads
    assert num_open() == before


def test_a_replica_that_its_disk_keeps_waiting_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer gets signs of life for a bounded time; what comes of the work later is given up."""
    monkeypatch.setattr(serving, "MAX_WORK_S", 0.03)
    monkeypatch.setattr(serving, "WORKING_S", 0.01)
    channel, go_on, late, dropped = Mock(), threading.Event(), Mock(), threading.Event()
    late.drop.side_effect = dropped.set
    service = serving.Service(channel, Mock(place="/disk"), Mock(), serving.DiskWork())

    def work() -> Any:
        go_on.wait()
        return late

    with pytest.raises(TimeoutError, match="has not responded"):
        service._patiently(work, serving._drop_later)
    assert channel.send.call_count == 3
    go_on.set()
    assert dropped.wait(100)


def test_a_stopped_keeper_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that had started and answers nothing for a minute is killed, reported, and another one started."""
    monkeypatch.setattr(replies, "reply_if_ready", lambda _: None)
    ray, fresh = Mock(**{"nodes.return_value": [{"NodeID": "n", "Alive": True}]}), Mock()
    monkeypatch.setattr(keepers, "ray", ray)
    monkeypatch.setattr(keepers, "start_on", lambda *_: fresh)
    own, stopped = keepers.NodeKeepers(), Mock()
    asked_s = clock.now_s() - keepers.SILENT_S + 30
    own._keepers["n"] = kept = keepers._Keeper(stopped, ActorPing(ref="asked", asked_s=asked_s), has_started=True)
    assert own.look() == []
    kept.ping.asked_s -= 31
    assert own.look() == ["n"]
    ray.kill.assert_called_once_with(stopped)
    assert own._keepers["n"].handle is fresh


def test_a_status_that_raises_is_asked_for_again_and_counts_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor whose status raises does not keep its watch busy, and is lost when that has lasted too long."""
    monkeypatch.setattr(replies, "reply_if_ready", lambda _: Reply(fault=ReplyFault.RAISED, error=ValueError("no")))
    config, gathered, now_s = RecoveryConfig(), Gathered(), clock.now_s()
    one = _AwaitedActor(actor=Mock(), call="c", alive_s=now_s, ping=ActorPing(ref="asked", asked_s=now_s))
    watch = Watch(config, Mock())
    watch._check({0: one}, gathered)
    assert gathered.is_whole
    assert one.ping.ref is None  # what is ready would end every wait at once
    assert one.ping.due_s > now_s
    one.ping.ref, one.ping.asked_s = "asked", now_s - config.ping_timeout - 1
    watch._check({0: one}, gathered)
    assert gathered.lost[0].kind == LossKind.SILENT
