"""The watchdog reports each hang once and at its deadline, and reports no healthy rank."""

import logging
import queue
import random
import threading

import pytest

from outlast.monitor import watchdog as module
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.deadlines import Subject, Timeouts
from outlast.policy.inprocess_protocol import InProcessState
from outlast.runtime import board as board_page
from outlast.runtime.board import Board, InProcessMark

S = 1_000_000_000


class FakeClock:
    def __init__(self) -> None:
        self.ns = 100 * S

    def now_ns(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    """One clock for the watchdog and the workers' heartbeats."""
    clock = FakeClock()
    monkeypatch.setattr(board_page, "now_ns", clock.now_ns)
    return clock


@pytest.fixture
def board():
    board = Board.create(num_ranks=2)
    yield board
    board.close()


def attach(board, local_rank=0, global_rank=3):
    page = board.rank(local_rank)
    page.attach(pid=4711, global_rank=global_rank, cycle=0)
    return page


class WatchdogOnFakeClock:
    """A watchdog that sleeps on a fake clock."""

    def __init__(self, board, clock, timeouts, node="worker-1"):
        self.reports: list[HangReport] = []
        self.clock = clock
        self.dog = Watchdog(board, timeouts, node=node, on_hang=self.reports.append, clock=clock)
        self.wake = self.dog.check()

    def pass_until(self, at_ns: int) -> None:
        """Let time pass; the watchdog wakes when it requested to."""
        while self.wake is not None and self.wake <= at_ns:
            self.clock.ns = max(self.wake, self.clock.ns)
            self.wake = self.dog.check()
        self.clock.ns = at_ns


@pytest.mark.parametrize("seed", range(5))
def test_healthy_steps_are_not_reported(board, clock, seed):
    """200 steps of up to 0.9 of their timeout, with heartbeats and pauses, are not reported."""
    timeouts = Timeouts(
        initial_heartbeat_s=0.2, heartbeat_s=0.2, sections={"step": 0.1, "data": 0.1}, out_of_section_s=0.1
    )
    pages = [attach(board, local_rank, local_rank) for local_rank in range(2)]
    fake = WatchdogOnFakeClock(board, clock, timeouts)
    jitter = random.Random(seed)
    for _ in range(200):
        for page in pages:
            page.heartbeat()
            page.enter("step")
        fake.pass_until(clock.ns + int(jitter.random() * 0.09 * S))
        for page in pages:
            page.leave("step")
        fake.pass_until(clock.ns + int(jitter.random() * 0.09 * S))
    assert fake.reports == []
    assert board.read(0).counts["step"] == 200


def test_a_hang_is_reported_at_its_deadline(board, clock, caplog):
    """A hang is reported exactly at its deadline, with the known log line."""
    page = attach(board)
    fake = WatchdogOnFakeClock(board, clock, Timeouts(sections={"step": 180.0}))
    page.set_iteration(57)
    page.enter("step")
    begin_ns = clock.ns
    fake.pass_until(begin_ns + 180 * S - 1)
    assert fake.reports == []
    fake.pass_until(begin_ns + 180 * S)
    (report,) = fake.reports
    (one,) = report.expired
    assert (one.subject, one.section, one.global_rank, one.pid, one.iteration) == (
        Subject.SECTION,
        "step",
        3,
        4711,
        57,
    )
    assert one.elapsed_s == 180.0
    assert [state.global_rank for state in report.states] == [3, -1]
    assert caplog.messages == [
        "rank 3 (node worker-1, pid 4711): section 'step' exceeded 180.0 s (180.0 s so far, iteration 57)"
    ]


def test_an_expired_outer_section_is_reported(board, clock):
    """Inner sections within their timeout do not hide an outer section that exceeds its own."""
    page = attach(board)
    fake = WatchdogOnFakeClock(board, clock, Timeouts(sections={"epoch": 1.0, "step": 0.2}))
    begin_ns = clock.ns
    page.enter("epoch")
    for _ in range(12):
        page.enter("step")
        fake.pass_until(clock.ns + S // 10)
        page.leave("step")
    (report,) = fake.reports
    assert [(one.section, one.since_ns) for one in report.expired] == [("epoch", begin_ns)]


def test_one_hang_is_reported_once(board, clock):
    """Ranks that exceed their timeout during a hang belong to it; a later hang is reported separately."""
    pages = [attach(board, local_rank, local_rank) for local_rank in range(2)]
    fake = WatchdogOnFakeClock(board, clock, Timeouts(sections={"step": 1.0}))
    pages[0].enter("step")
    fake.pass_until(clock.ns + S // 2)
    pages[1].enter("step")
    fake.pass_until(clock.ns + 30 * S)
    assert [[one.local_rank for one in report.expired] for report in fake.reports] == [[0]]
    for page in pages:
        page.leave("step")
    fake.pass_until(clock.ns + 5 * S)
    pages[1].enter("step")
    fake.pass_until(clock.ns + 5 * S)
    assert [[one.local_rank for one in report.expired] for report in fake.reports] == [[0], [1]]


def test_finished_and_unattached_ranks_are_not_reported(board, clock):
    """A rank that has finished or never attached cannot hang."""
    page = attach(board)
    fake = WatchdogOnFakeClock(board, clock, Timeouts(initial_heartbeat_s=1.0, heartbeat_s=1.0, sections={"step": 1.0}))
    page.enter("step")
    page.finish()
    fake.pass_until(clock.ns + 60 * S)
    assert fake.reports == []


def test_a_suspended_machine_is_not_a_hang(board, clock, caplog):
    """After the watchdog itself was suspended, ranks get a moment to continue before they can be reported."""
    page = attach(board)
    fake = WatchdogOnFakeClock(board, clock, Timeouts(heartbeat_s=5.0))
    page.heartbeat()
    clock.ns += 600 * S
    wake = fake.dog.check()
    assert wake == clock.ns + S
    page.heartbeat()
    clock.ns = wake
    fake.dog.check()
    assert fake.reports == []
    assert "was suspended for 595.0 s" in caplog.text
    clock.ns += 5 * S  # and a rank that does not continue is reported
    fake.dog.check()
    assert len(fake.reports) == 1


def test_the_thread_reports_a_hang_and_stops(board, caplog):
    """The watchdog's thread logs what it enforces, reports a hang that begins while it sleeps, and stops on request."""
    caplog.set_level(logging.INFO)
    reports: queue.Queue[HangReport] = queue.Queue()
    page = attach(board)
    dog = Watchdog(board, Timeouts(sections={"step": 0.1}), node="n", on_hang=reports.put)
    dog.start()
    page.enter("step")
    report = reports.get(timeout=300)
    assert report.expired[0].section == "step"
    assert report.expired[0].elapsed_s >= 0.1
    assert dog.stop()
    assert dog.stop()
    assert "node n watches 2 ranks: section timeouts: step 0.1 s" in caplog.text


def test_a_report_can_stop_the_watchdog(board):
    """The handler of a hang may stop the watchdog."""
    done = threading.Event()
    page = attach(board)

    def stop_watchdog(_: HangReport) -> None:
        dog.stop()
        done.set()

    dog = Watchdog(board, Timeouts(sections={"step": 0.05}), node="n", on_hang=stop_watchdog)
    dog.start()
    page.enter("step")
    assert done.wait(60)
    assert dog.stop()


def test_a_failed_watchdog_reports_its_error(board, caplog):
    """An exception in the watchdog's thread is logged and passed to its owner."""
    errors: queue.Queue[BaseException] = queue.Queue()

    def fail(_: HangReport) -> None:
        raise ZeroDivisionError("broken")

    page = attach(board)
    dog = Watchdog(board, Timeouts(sections={"step": 0.05}), node="n", on_hang=fail, on_error=errors.put)
    dog.start()
    page.enter("step")
    assert isinstance(errors.get(timeout=300), ZeroDivisionError)
    assert dog.stop()
    assert "the watchdog failed" in caplog.text
    assert module.__name__ in {record.name for record in caplog.records}


def test_a_restart_wakes_a_watchdog_without_timeouts(board):
    """A restart in process has its own time limit: it wakes a watchdog that enforces no other timeout."""
    reports: queue.Queue[HangReport] = queue.Queue()
    dog = Watchdog(board, Timeouts(), node="worker-1", on_hang=reports.put)
    dog.start()
    mark = InProcessMark(board.path, 1)
    try:
        mark.arm(0, patience_s=0.05)
        mark.set(InProcessState.RESTARTING, 1)
        dog.look()
        assert reports.get(timeout=300).expired[0].subject == Subject.RESTART_IN_PROCESS
    finally:
        mark.close()
        assert dog.stop()
