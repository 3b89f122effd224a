"""The root cause of a hang among four real gloo ranks is identified, whatever kind of hang it is."""

import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outlast.monitor.examination import ANSWER, examine
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.deadlines import Expired, Subject, Timeouts
from outlast.policy.root_cause import Position, find_root_cause
from outlast.runtime.board import Board
from outlast.runtime.processes import DatagramSocket
from outlast.testing import RankProcesses

WORKER = Path(__file__).with_name("hang_worker.py")
WORLD_SIZE, BAD_RANK, AT = 4, 2, 7
LINES = {
    "sleep": "time.sleep(3600)  # the data loader sleeps",
    "gil": "library.pthread_mutex_lock(mutex)  # a deadlock in C that holds the GIL",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)  # stopped from outside",
}
STATES = {"sleep": "S", "gil": "S", "stop": "T"}


@pytest.fixture(autouse=True)
def _long_response_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on a busy machine do not count as unresponsive."""
    for name in ("ANSWER_S", "DUMP_S", "BOOKS_S"):
        monkeypatch.setattr(f"outlast.monitor.examination.{name}", 3.0)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("kind", ["stop", "sleep", "gil"])
def test_the_hung_rank_is_the_root_cause(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report identifies the hung rank with its section, iteration and source line; a stopped rank is continued for
    that only once the others have responded."""
    responded: set[int] = set()
    responded_at_wake: list[int] = []
    receive, kill = DatagramSocket.receive, os.kill

    def receive_and_record(sock: DatagramSocket) -> Iterator[tuple[bytes, bytes | None]]:
        for response, sender in receive(sock):
            responded.add(ANSWER.unpack_from(response)[1])
            yield response, sender

    def kill_and_record(pid: int, number: int) -> None:
        if number == signal.SIGCONT:
            responded_at_wake.append(len(responded))
        kill(pid, number)

    monkeypatch.setattr(DatagramSocket, "receive", receive_and_record)
    monkeypatch.setattr(os, "kill", kill_and_record)
    board = Board.create(num_ranks=WORLD_SIZE)
    reports: queue.Queue[HangReport] = queue.Queue()
    timeouts = Timeouts(sections={"setup": 200.0, "step": 5.0}, num_warmup_iterations=1)
    watchdog = Watchdog(board, timeouts, node="worker-1", on_hang=reports.put)
    arguments = (board.path, str(tmp_path / "rendezvous"), str(BAD_RANK), kind, str(AT))
    with ExitStack() as stack:
        ranks = stack.enter_context(RankProcesses(WORKER, *arguments, world_size=WORLD_SIZE))
        watchdog.start()
        try:
            report = reports.get(timeout=200)
            positions = examine(board, node="worker-1", stacks_dir=tmp_path / "stacks", expired=report.expired)
            root_cause = find_root_cause(positions)
        finally:
            watchdog.stop()

    assert {one.subject for one in report.expired} == {Subject.SECTION}
    assert reports.empty()  # one hang is reported once, though four ranks exceed their timeout
    assert len(positions) == WORLD_SIZE
    where = root_cause.position
    assert where.global_rank == BAD_RANK, root_cause.reason
    assert where.pid == ranks.pid(BAD_RANK)
    assert (where.sections, where.iteration) == (("step",), AT)
    assert where.process_state == STATES[kind]
    assert where.responsive == (kind == "sleep")
    number = next(n for n, line in enumerate(WORKER.read_text().splitlines(), 1) if LINES[kind] in line)
    assert where.stack_line == f'File "{WORKER}", line {number} in load_batch'
    assert where.stack_line in root_cause.reason
    assert f"line {number} in load_batch" in (tmp_path / "stacks" / f"rank-{BAD_RANK}.txt").read_text()
    assert responded_at_wake == ([WORLD_SIZE - 1] if kind == "stop" else [])
    victims = [one for one in positions if one.global_rank != BAD_RANK]
    assert all(one.responsive and one.waits_in_collective for one in victims)
    assert len({one.collectives for one in victims}) == 1
    if kind == "sleep":  # it responded: one collective behind
        assert where.collectives < victims[0].collectives


@pytest.mark.process
def test_no_rank_is_the_root_cause_of_a_script_error(tmp_path: Path) -> None:
    """Equally slow ranks have no root cause, whichever exceeds its timeout first; mismatched collectives are reported
    with the ranks in each."""
    board = Board.create(num_ranks=WORLD_SIZE)
    arguments = (board.path, str(tmp_path / "rendezvous"), str(BAD_RANK), "mismatch", str(AT))
    with ExitStack() as stack:
        ranks = stack.enter_context(RankProcesses(WORKER, *arguments, world_size=WORLD_SIZE))
        examine_until(board, lambda one: one.iteration == AT - 1 and "in main" in str(one.stack_line))
        facts = {"subject": Subject.SECTION, "section": "step", "timeout_s": 1.0, "elapsed_s": 1.1}
        first = Expired(**facts, local_rank=0, global_rank=0, pid=ranks.pid(0), since_ns=0, iteration=AT - 1)
        slow = examine(board, node="worker-1", stacks_dir=None, expired=[first])
        (tmp_path / "rendezvous-go").touch()
        positions_when_mismatched = examine_until(board, lambda one: one.iteration == AT and one.waiting_in is not None)

    assert sum(one.expired for one in slow) == 1
    root_cause = find_root_cause(slow)
    assert (root_cause.position, root_cause.node) == (None, "")
    assert root_cause.reason.startswith("ranks 0, 1, 2, 3 are indistinguishable"), root_cause.reason
    root_cause = find_root_cause(positions_when_mismatched)
    assert (root_cause.position, root_cause.node) == (None, "")
    where = r"ranks wait in different collectives: 0, 1, 3 in ALLREDUCE seq (\d+), 2 in BROADCAST seq \1$"
    assert re.match(where, root_cause.reason), root_cause.reason


def examine_until(board: Board, condition: Callable[[Position], bool]) -> list[Position]:
    """Return the positions of the ranks once all of them fulfil the condition."""
    deadline_s = time.monotonic() + 200
    while True:
        positions = examine(board, node="worker-1", stacks_dir=None)
        if len(positions) == WORLD_SIZE and all(map(condition, positions)):
            return positions
        assert time.monotonic() < deadline_s, positions
        time.sleep(0.05)
