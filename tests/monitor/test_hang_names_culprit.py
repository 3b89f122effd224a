"""A hang among four real gloo ranks is reported with its one culprit, whatever kind of hang it is."""

import queue
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.monitor.examine import examine
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.culprit import find_culprit
from outlast.policy.deadlines import Subject, Timeouts
from outlast.runtime.board import Board

WORKER = Path(__file__).with_name("hang_worker.py")
WORLD_SIZE, BAD_RANK, AT = 4, 2, 7
LINES = {
    "sleep": "time.sleep(3600)  # the data loader sleeps",
    "gil": "library.pthread_mutex_lock(mutex)  # a deadlock in C that holds the GIL",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)  # stopped from outside",
}
STATES = {"sleep": "S", "gil": "S", "stop": "T"}


@pytest.mark.process
@pytest.mark.parametrize("kind", ["stop", "sleep", "gil"])
def test_hang_names_culprit(kind: str, tmp_path: Path) -> None:
    """The report names the one rank that all wait for, its section, iteration and the line it hangs on."""
    board = Board.create(str(tmp_path / "board"), num_ranks=WORLD_SIZE)
    reports: queue.Queue[HangReport] = queue.Queue()
    timeouts = Timeouts(sections={"setup": 50.0, "step": 1.5}, num_warmup_iterations=1)
    watchdog = Watchdog(board, timeouts, node="worker-1", on_hang=reports.put)
    watchdog.start()
    rest = (str(WORLD_SIZE), board.path, str(tmp_path / "rendezvous"), str(BAD_RANK), kind, str(AT))
    ranks = [subprocess.Popen([sys.executable, WORKER, str(rank), *rest]) for rank in range(WORLD_SIZE)]
    try:
        report = reports.get(timeout=50)
        late = max(one.elapsed_s - one.timeout_s for one in report.expired)
        positions = examine(board, node="worker-1", stacks_dir=tmp_path / "stacks", expired=report.expired)
        culprit = find_culprit(positions)
    finally:
        watchdog.stop()
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait(timeout=10)
        board.unlink()

    assert {one.subject for one in report.expired} == {Subject.SECTION}
    assert late < 5.0  # generous: the bar is measured elsewhere
    assert reports.empty()  # one hang is reported once, though four ranks exceed their timeout
    assert len(positions) == WORLD_SIZE
    where = culprit.position
    assert where.global_rank == BAD_RANK, culprit.reason
    assert where.pid == ranks[BAD_RANK].pid
    assert (where.sections, where.iteration) == (("step",), AT)
    assert where.process_state == STATES[kind]
    assert where.responsive == (kind == "sleep")
    number = next(n for n, line in enumerate(WORKER.read_text().splitlines(), 1) if LINES[kind] in line)
    assert where.stack_line == f'File "{WORKER}", line {number} in load_batch'
    assert where.stack_line in culprit.reason
    assert f"line {number} in load_batch" in (tmp_path / "stacks" / f"rank-{BAD_RANK}.txt").read_text()
    victims = [one for one in positions if one.global_rank != BAD_RANK]
    assert all(one.responsive and one.waits_in_collective for one in victims)
    assert len({one.collectives for one in victims}) == 1
    if kind == "sleep":  # it could be asked: it is one collective behind
        assert where.collectives < victims[0].collectives
