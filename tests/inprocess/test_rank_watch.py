"""The faults that an agent process detects from a rank's progress page, and the times at which it checks."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from fake_ranks import monitor_task

from outlast.inprocess.progress import Page, RankPhase, RankWatch
from outlast.policy.inprocess_protocol import RankFaultKind

TASK = monitor_task(pid=1, barrier_timeout_s=120.0, soft_timeout_s=2.0, hard_timeout_s=4.0, thread_interval_s=0.25)


def s(seconds: float) -> int:
    return int(seconds * 1e9)


@dataclass
class FakePage:
    heartbeat_ns: int = 0
    progress_ns: int = 0
    phase: RankPhase = RankPhase.IN_FN
    restart_count: int = 3
    is_paused: bool = False


def test_progress_moves_the_deadline() -> None:
    """The next check is when the soft timeout would expire, and progress moves it."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(11.0))
    watch = RankWatch(fake_page, TASK)
    assert watch.look(s(11.0)) == (None, s(12.0))
    fake_page.progress_ns = fake_page.heartbeat_ns = s(11.5)
    assert watch.look(s(12.0)) == (None, s(13.5))


def test_the_soft_timeout_is_reported_once() -> None:
    """A lack of progress with a running monitor thread is reported at the soft timeout, once per call."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(11.9))
    watch = RankWatch(fake_page, TASK)
    found, next_check_ns = watch.look(s(12.0))
    assert found is not None
    assert found.kind == RankFaultKind.SOFT_TIMEOUT
    assert (found.restart_count, next_check_ns) == (3, s(14.0))
    fake_page.heartbeat_ns = s(12.4)
    assert watch.look(s(12.5)) == (None, s(14.0))


def test_a_stopped_rank_is_reported_at_the_hard_timeout() -> None:
    """If the monitor thread stands still too, the first report is the hard timeout."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(10.1))
    watch = RankWatch(fake_page, TASK)
    assert watch.look(s(12.0))[0] is None
    assert watch.look(s(13.9))[0] is None
    found, _ = watch.look(s(14.0))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT
    assert "stopped" in found.summary


def test_a_long_hold_of_the_gil_is_a_soft_timeout() -> None:
    """Once the monitor thread runs again without progress of the main thread, the next check reports a soft timeout."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(10.1))
    watch = RankWatch(fake_page, TASK)
    _, next_check_ns = watch.look(s(12.0))
    assert next_check_ns is not None
    assert next_check_ns < s(12.2)
    fake_page.heartbeat_ns = next_check_ns
    assert watch.look(next_check_ns)[0].kind == RankFaultKind.SOFT_TIMEOUT


def test_a_busy_rank_is_limited_after_an_order_to_restart() -> None:
    """A rank that makes progress but does not leave the function has one hard timeout from the first order on."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(10.0))
    watch = RankWatch(fake_page, TASK)
    watch.note_leave(s(10.0))
    fake_page.progress_ns = fake_page.heartbeat_ns = s(13.9)
    watch.note_leave(s(13.0))
    assert watch.look(s(13.9)) == (None, s(14.0))
    found, _ = watch.look(s(14.0))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT
    assert "interrupted" in found.summary


def test_an_order_to_restart_does_not_extend_a_timeout() -> None:
    """A rank that already hangs is reported at its own hard timeout."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(13.0))
    watch = RankWatch(fake_page, TASK)
    watch.note_leave(s(13.0))
    assert watch.look(s(13.0)) == (None, s(14.0))


IDLE = (RankPhase.WAITING, RankPhase.COMPLETED)


def test_cleanup_has_no_timeout() -> None:
    """Cleanup may hold the interpreter's lock for long; the barrier timeout limits it."""
    assert RankWatch(FakePage(phase=RankPhase.OUT), TASK).look(s(1000.0)) == (None, None)


@pytest.mark.parametrize("phase", IDLE)
def test_main_thread_may_wait_outside_the_function(phase: RankPhase) -> None:
    """A spare may wait without a limit while its monitor thread runs."""
    fake_page = FakePage(phase=phase, progress_ns=s(10.0), heartbeat_ns=s(999.0))
    assert RankWatch(fake_page, TASK).look(s(1000.0)) == (None, s(1003.0))


@pytest.mark.parametrize("phase", IDLE)
def test_a_stopped_spare_is_reported_at_the_hard_timeout(phase: RankPhase) -> None:
    """A stopped spare could not replace a rank."""
    fake_page = FakePage(phase=phase, progress_ns=s(999.0), heartbeat_ns=s(996.0))
    watch = RankWatch(fake_page, TASK)
    assert watch.look(s(999.9)) == (None, s(1000.0))
    found, _ = watch.look(s(1000.0))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT
    watch.note_end()
    assert watch.look(s(1000.0)) == (None, None)


def test_pause_suspends_both_timeouts() -> None:
    """Without hang protection nothing is reported; the next check is before a timeout could expire after the pause."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(10.0), is_paused=True)
    watch = RankWatch(fake_page, TASK)
    assert watch.look(s(500.0)) == (None, s(502.0))
    fake_page.is_paused, fake_page.progress_ns = False, s(501.0)
    assert watch.look(s(502.0)) == (None, s(503.0))


def test_a_start_is_limited_by_the_barrier_timeout() -> None:
    """A rank that has the order to go and does not enter the function is reported after the barrier timeout."""
    fake_page = FakePage(phase=RankPhase.WAITING, restart_count=2, heartbeat_ns=s(20.0))
    watch = RankWatch(fake_page, TASK)
    watch.note_go(3, s(10.0))
    assert watch.look(s(20.0)) == (None, s(24.0))
    fake_page.phase, fake_page.restart_count, fake_page.heartbeat_ns = RankPhase.STARTING, 3, s(129.0)
    assert watch.look(s(129.0)) == (None, s(130.0))
    assert watch.look(s(130.0))[0].kind == RankFaultKind.HARD_TIMEOUT


def test_a_rank_stopped_before_the_function_is_reported() -> None:
    """A rank that is stopped between the order to go and the function is reported at the hard timeout."""
    fake_page = FakePage(phase=RankPhase.STARTING, heartbeat_ns=s(10.5))
    watch = RankWatch(fake_page, TASK)
    watch.note_go(3, s(10.0))
    assert watch.look(s(14.4)) == (None, s(14.5))
    found, _ = watch.look(s(14.5))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT


def test_an_order_to_go_ends_the_order_to_restart() -> None:
    """In the next call only progress counts."""
    fake_page = FakePage(progress_ns=s(10.0), heartbeat_ns=s(10.0))
    watch = RankWatch(fake_page, TASK)
    watch.note_leave(s(10.0))
    watch.note_go(4, s(11.0))
    fake_page.restart_count, fake_page.progress_ns = 4, s(13.9)
    assert watch.look(s(14.5)) == (None, s(15.9))


def test_page_is_shared() -> None:
    """The rank's values are read through a second mapping of the same memory."""
    page = Page.create()
    other = Page(os.dup(page.fd))
    page.set_phase(RankPhase.IN_FN, 7)
    page.pause()
    assert (other.phase, other.restart_count, other.is_paused) == (RankPhase.IN_FN, 7, True)
    page.resume()
    assert not other.is_paused
    assert other.progress_ns == page.progress_ns
    other.close()
    page.close()
