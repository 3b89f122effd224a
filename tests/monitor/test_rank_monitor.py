"""RankMonitor: the worker's side is easy to use, hard to misuse, and leaves nothing behind."""

import logging
import os
import threading
from contextlib import closing

import pytest

from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import OutlastError
from outlast.monitor.examination import examine
from outlast.monitor.learned_timeouts import LearnedTimeouts
from outlast.monitor.rank_monitor import PlacedRankMonitor
from outlast.policy.deadlines import FLOOR_S
from outlast.runtime.board import Board

CONFIG = FaultToleranceConfig(rank_section_timeouts={"setup": 600.0, "step": 180.0}, num_warmup_iterations=2)


@pytest.fixture
def board(tmp_path):
    board = Board.create(num_ranks=2)
    yield board
    board.close()


@pytest.fixture
def monitor(board, caplog):
    caplog.set_level(logging.DEBUG, logger="outlast")
    place = WorkerEnv(
        global_rank=5, local_rank=1, cycle=2, node="n", board=board.path, fault_tolerance=CONFIG.to_json()
    )
    monitor = PlacedRankMonitor(place, FaultToleranceConfig(rank_section_timeouts={"step": 1.0}, safety_factor=3.0))
    yield monitor
    monitor.close()


def names(board):
    return [section.name for section in board.read(1).sections]


def test_what_the_agent_was_given_comes_before_the_scripts_own(monitor, board, caplog):
    """Field by field: the agent's section timeouts hold, and what only the script sets holds too. The line that users
    search for names them."""
    (line,) = [text for record in caplog.get_records("setup") if " uses " in (text := record.getMessage())]
    assert line.startswith("rank 5 (node n")
    assert "section timeouts: setup 600.0 s, step 180.0 s" in line
    assert monitor.config.rank_section_timeouts == {"setup": 600.0, "step": 180.0}
    assert monitor.config.safety_factor == 3.0
    state = board.read(1)
    assert (state.attached, state.pid, state.global_rank, state.cycle) == (True, os.getpid(), 5, 2)


def test_the_agent_learns_what_the_script_sets(monitor, board):
    """The fields of the script's own config, and no default, stand on the board; a rank that is not there has none."""
    assert FaultToleranceConfig.from_json(board.settings(1)).given == {
        "rank_section_timeouts": {"step": 1.0},
        "safety_factor": 3.0,
    }
    assert board.settings(0) is None


def test_settings_that_are_too_long_are_said_and_not_cut(board, caplog):
    """Settings beyond the board's room are not half taken: the agent gets none, and one line says where to put them."""
    sections = {f"section {number:031}": 1.0 for number in range(200)}
    place = WorkerEnv(local_rank=0, board=board.path)
    with closing(PlacedRankMonitor(place, FaultToleranceConfig(rank_section_timeouts=sections))):
        assert board.settings(0) == ""
    assert "give them to outlast run, by --config" in caplog.text


def test_sections_open_and_close_also_on_errors(monitor, board):
    """A section ends with its block, whatever ends the block; it nests in others and in itself."""
    with monitor.section("step"), monitor.section("step"):
        assert names(board) == ["step", "step"]
        with pytest.raises(ZeroDivisionError), monitor.section("data"):
            raise ZeroDivisionError
        assert names(board) == ["step", "step"]
    assert names(board) == []


def test_decorator_marks_every_call(monitor, board):
    """A decorated function keeps its name, arguments and result, and may call itself."""

    @monitor.section("eval")
    def down(number: int) -> int:
        """Count down."""
        assert len(names(board)) == 3 - number
        return 0 if number == 0 else down(number - 1)

    assert (down.__name__, down(2), names(board)) == ("down", 0, [])
    assert monitor.board_state.counts["eval"] == 3


def test_decorator_refuses_what_returns_too_early(monitor):
    """A coroutine function would be measured while it does nothing; it is refused at once."""

    async def work() -> None: ...

    with pytest.raises(TypeError, match="work returns before its work is done"):
        monitor.section("step")(work)


def test_sections_without_blocks(monitor, board, caplog):
    """start and end work in any order; ending what is not open is said once and does no harm."""
    monitor.start_section("setup")
    monitor.start_section("step")
    monitor.end_section("setup")
    assert names(board) == ["step"]
    monitor.end_section("setup")
    monitor.end_section("setup")
    assert caplog.text.count("is in no such section") == 1
    with monitor.section("data"):
        monitor.end_all_sections()
        assert names(board) == []
    assert names(board) == []


def test_section_without_timeout_is_said_once(monitor, board, caplog):
    """An unknown name is measured and not enforced, which is said once: at INFO by rank 0 in the first cycle, and by
    others at DEBUG."""
    for _ in range(3):
        with monitor.section("eval"):
            pass
        with monitor.section("step"):
            pass
    (record,) = [record for record in caplog.records if "has no timeout" in record.message]
    assert (record.levelno, "'eval'" in record.message) == (logging.DEBUG, True)
    monitor.close()
    caplog.clear()
    first = PlacedRankMonitor(WorkerEnv(board=board.path, fault_tolerance=CONFIG.to_json()))
    first.section("eval"), first.section("eval"), first.section("step")
    first.close()
    (record,) = [record for record in caplog.records if "has no timeout" in record.message]
    assert (record.levelno, "'eval'" in record.message) == (logging.INFO, True)


def test_facts_reach_the_board(monitor, board):
    """What the session reports is what the agent sees."""
    monitor.heartbeat()
    monitor.set_iteration(12)
    monitor.report_progress()
    assert board.read(1).durable_iteration is None
    monitor.set_durable_iteration(10)
    monitor.set_restored()
    state = monitor.board_state
    assert (state.iteration, state.durable_iteration, state.reports_progress, state.restored) == (12, 10, True, True)
    assert state.last_heartbeat_ns


def test_warmup_comes_from_the_config(monitor, board):
    """The first steps of a cycle do not count as its longest."""
    for _ in range(2):
        with monitor.section("step"):
            pass
    assert "step" not in board.read(1).longest_s
    with monitor.section("step"):
        pass
    assert board.read(1).longest_s["step"] > 0


def test_second_monitor_is_refused_until_the_first_is_closed(monitor, board):
    """Two monitors would fight for one page; a closed one gives it free."""
    place = WorkerEnv(local_rank=0, board=board.path)
    with pytest.raises(OutlastError, match="has a RankMonitor already"):
        PlacedRankMonitor(place)
    monitor.close()
    again = PlacedRankMonitor(place)
    again.close()


def test_closed_monitor_does_no_harm(monitor, board):
    """After close() a script may go on as it was; the rank counts as finished, and nothing stays behind."""
    monitor.finish()
    monitor.close()
    monitor.close()
    monitor.heartbeat()
    with monitor.section("step"):
        pass
    monitor.finish()
    assert monitor.board_state.finished
    assert board.read(1).finished
    assert not [thread for thread in threading.enumerate() if thread.name == "outlast-responder"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_end_its_parents_monitor(monitor, board):
    """A data loader's process that is forked and exits leaves the parent watched."""
    child = os.fork()
    if child == 0:
        try:
            monitor.finish()
            monitor.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not board.read(1).finished
    (position,) = examine(board, node="n", stacks_dir=None)
    assert position.responsive


def test_examiner_gets_an_answer_and_the_stack(monitor, board, tmp_path):
    """A living rank answers, without collectives when it uses none, and shows its stack."""
    with monitor.section("step"):
        (position,) = examine(board, node="n", stacks_dir=tmp_path / "stacks")
    assert (position.global_rank, position.pid, position.sections) == (5, os.getpid(), ("step",))
    assert (position.responsive, position.collectives, position.attached) == (True, -1, True)
    assert "in test_examiner_gets_an_answer_and_the_stack" in position.stack_line
    text = (tmp_path / "stacks" / "rank-5.txt").read_text()
    assert text.startswith(f"rank 5 (node n, pid {os.getpid()}), iteration 0, in step")
    assert "in examine" in text


def test_wrong_board_is_an_error_at_once(tmp_path):
    """A path that is no board, or a rank that it does not have, ends the script with a clear line."""
    (tmp_path / "x").write_text("x" * 8192)
    with pytest.raises(OutlastError, match="is not a heartbeat memory file"):
        PlacedRankMonitor(WorkerEnv(board=str(tmp_path / "x")))


def test_nothing_to_enforce_starts_nothing(caplog):
    """Without agent and timeouts there is no guard process, and one line says so."""
    caplog.set_level(logging.INFO)
    monitor = PlacedRankMonitor(WorkerEnv())
    try:
        assert "is not watched: no timeout is set" in caplog.text
        assert "guard process" not in caplog.text
    finally:
        monitor.close()


def test_timeouts_are_learned_without_an_agent(tmp_path, caplog):
    """A plain run that ends in order leaves its durations, and the next one uses them."""
    caplog.set_level(logging.DEBUG, logger="outlast")
    config = FaultToleranceConfig(calc_ft_timeouts=True, num_warmup_iterations=0)
    first = PlacedRankMonitor(WorkerEnv(), config, tmp_path)
    for _ in range(16):
        with first.section("step"):
            pass
    first.finish()
    first.close()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": FLOOR_S}
    second = PlacedRankMonitor(WorkerEnv(cycle=1), config, tmp_path)
    try:
        assert second.config.rank_section_timeouts == {"step": FLOOR_S}
        assert "section timeouts: step 10.0 s" in caplog.text
        assert "suggested timeouts, from the durations of this run: --ft-rank-section-timeouts=step:10" in caplog.text
    finally:
        second.close()
