"""What an agent process concludes from a page, at which moment."""

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
class Words:
    beat_ns: int = 0
    progress_ns: int = 0
    phase: RankPhase = RankPhase.IN_FN
    restart_count: int = 3
    is_paused: bool = False


def test_progress_moves_the_deadline() -> None:
    """It looks again exactly when the soft timeout would pass, and finds nothing while there is progress."""
    words = Words(progress_ns=s(10.0), beat_ns=s(11.0))
    watch = RankWatch(words, TASK)
    assert watch.look(s(11.0)) == (None, s(12.0))
    words.progress_ns = words.beat_ns = s(11.5)
    assert watch.look(s(12.0)) == (None, s(13.5))


def test_soft_timeout_is_said_once() -> None:
    """No progress while the monitor thread beats is reported at the soft timeout, and once in a call."""
    words = Words(progress_ns=s(10.0), beat_ns=s(11.9))
    watch = RankWatch(words, TASK)
    found, again_ns = watch.look(s(12.0))
    assert found is not None
    assert found.kind == RankFaultKind.SOFT_TIMEOUT
    assert (found.restart_count, again_ns) == (3, s(14.0))
    words.beat_ns = s(12.4)
    assert watch.look(s(12.5)) == (None, s(14.0))


def test_stopped_rank_is_stuck_at_the_hard_timeout() -> None:
    """Where the monitor thread stands still, too, nothing is said until the rank has to be ended."""
    words = Words(progress_ns=s(10.0), beat_ns=s(10.1))
    watch = RankWatch(words, TASK)
    assert watch.look(s(12.0))[0] is None
    assert watch.look(s(13.9))[0] is None
    found, _ = watch.look(s(14.0))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT
    assert "stopped" in found.summary


def test_long_hold_of_the_interpreters_lock_that_ends_is_a_soft_timeout() -> None:
    """Once the monitor thread runs again and the main thread still makes no progress, that is said at the next look."""
    words = Words(progress_ns=s(10.0), beat_ns=s(10.1))
    watch = RankWatch(words, TASK)
    _, again_ns = watch.look(s(12.0))
    assert again_ns is not None
    assert again_ns < s(12.2)
    words.beat_ns = again_ns
    assert watch.look(again_ns)[0].kind == RankFaultKind.SOFT_TIMEOUT


def test_order_to_leave_bounds_a_busy_rank() -> None:
    """A rank that makes progress but does not leave has the hard timeout from the first order on."""
    words = Words(progress_ns=s(10.0), beat_ns=s(10.0))
    watch = RankWatch(words, TASK)
    watch.note_leave(s(10.0))
    words.progress_ns = words.beat_ns = s(13.9)
    watch.note_leave(s(13.0))
    assert watch.look(s(13.9)) == (None, s(14.0))
    found, _ = watch.look(s(14.0))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT
    assert "interrupted" in found.summary


def test_order_to_leave_gives_no_extra_time() -> None:
    """A rank that hangs already is ended when its own hard timeout passes."""
    words = Words(progress_ns=s(10.0), beat_ns=s(13.0))
    watch = RankWatch(words, TASK)
    watch.note_leave(s(13.0))
    assert watch.look(s(13.0)) == (None, s(14.0))


IDLE = (RankPhase.WAITING, RankPhase.COMPLETED)


def test_cleaning_up_has_no_timeout_of_this_watch() -> None:
    """It may hold the interpreter's lock for long; the barrier's timeout bounds it."""
    assert RankWatch(Words(phase=RankPhase.OUT), TASK).look(s(1000.0)) == (None, None)


@pytest.mark.parametrize("phase", IDLE)
def test_main_thread_may_wait_outside_the_function(phase: RankPhase) -> None:
    """A spare waits as long as it takes, while the monitor thread beats."""
    words = Words(phase=phase, progress_ns=s(10.0), beat_ns=s(999.0))
    assert RankWatch(words, TASK).look(s(1000.0)) == (None, s(1003.0))


@pytest.mark.parametrize("phase", IDLE)
def test_rank_stopped_outside_the_function_is_stuck_at_the_hard_timeout(phase: RankPhase) -> None:
    """A spare that is stopped could take nobody's place."""
    words = Words(phase=phase, progress_ns=s(999.0), beat_ns=s(996.0))
    watch = RankWatch(words, TASK)
    assert watch.look(s(999.9)) == (None, s(1000.0))
    found, _ = watch.look(s(1000.0))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT
    watch.note_end()
    assert watch.look(s(1000.0)) == (None, None)


def test_pause_suspends_both_timeouts() -> None:
    """Without hang protection nothing is found, and it looks again before a timeout could pass after it."""
    words = Words(progress_ns=s(10.0), beat_ns=s(10.0), is_paused=True)
    watch = RankWatch(words, TASK)
    assert watch.look(s(500.0)) == (None, s(502.0))
    words.is_paused, words.progress_ns = False, s(501.0)
    assert watch.look(s(502.0)) == (None, s(503.0))


def test_start_is_bounded() -> None:
    """A rank that was told to go and never enters the function is ended after the barrier's timeout."""
    words = Words(phase=RankPhase.WAITING, restart_count=2, beat_ns=s(20.0))
    watch = RankWatch(words, TASK)
    watch.note_go(3, s(10.0))
    assert watch.look(s(20.0)) == (None, s(24.0))
    words.phase, words.restart_count, words.beat_ns = RankPhase.STARTING, 3, s(129.0)
    assert watch.look(s(129.0)) == (None, s(130.0))
    assert watch.look(s(130.0))[0].kind == RankFaultKind.HARD_TIMEOUT


def test_silence_before_the_function_is_bounded() -> None:
    """A rank that is stopped between the order to go and the function is ended after the hard timeout."""
    words = Words(phase=RankPhase.STARTING, beat_ns=s(10.5))
    watch = RankWatch(words, TASK)
    watch.note_go(3, s(10.0))
    assert watch.look(s(14.4)) == (None, s(14.5))
    found, _ = watch.look(s(14.5))
    assert found is not None
    assert found.kind == RankFaultKind.HARD_TIMEOUT


def test_order_to_go_ends_the_order_to_leave() -> None:
    """In the next call only progress counts again."""
    words = Words(progress_ns=s(10.0), beat_ns=s(10.0))
    watch = RankWatch(words, TASK)
    watch.note_leave(s(10.0))
    watch.note_go(4, s(11.0))
    words.restart_count, words.progress_ns = 4, s(13.9)
    assert watch.look(s(14.5)) == (None, s(15.9))


def test_page_is_shared() -> None:
    """What the rank writes is read through a second mapping of the same memory."""
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
