"""RankMonitor: sections, settings and lifetime on the worker's side."""

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


def test_the_agents_settings_override_the_scripts(monitor, board, caplog):
    """The agent's section timeouts override the script's, fields set only by the script apply as well, and one line
    logs the timeouts in force."""
    (line,) = [text for record in caplog.get_records("setup") if " uses " in (text := record.getMessage())]
    assert line.startswith("rank 5 (node n")
    assert "section timeouts: setup 600.0 s, step 180.0 s" in line
    assert monitor.config.rank_section_timeouts == {"setup": 600.0, "step": 180.0}
    assert monitor.config.safety_factor == 3.0
    state = board.read(1)
    assert (state.attached, state.pid, state.global_rank, state.cycle) == (True, os.getpid(), 5, 2)


def test_the_scripts_settings_reach_the_agent(monitor, board):
    """The heartbeat memory holds the fields that the script set, without defaults; a rank that is not attached has
    none."""
    assert FaultToleranceConfig.from_json(board.settings(1)).given == {
        "rank_section_timeouts": {"step": 1.0},
        "safety_factor": 3.0,
    }
    assert board.settings(0) is None


def test_oversized_settings_are_reported_and_not_truncated(board, caplog):
    """Settings that do not fit the heartbeat memory are not passed to the agent, and one line reports where to set
    them."""
    sections = {f"section {number:031}": 1.0 for number in range(200)}
    place = WorkerEnv(local_rank=0, board=board.path)
    with closing(PlacedRankMonitor(place, FaultToleranceConfig(rank_section_timeouts=sections))):
        assert board.settings(0) == ""
    assert "give them to outlast run, by --config" in caplog.text


def test_a_section_ends_with_its_block(monitor, board):
    """A section ends with its block, also on an exception; sections nest in others and in themselves."""
    with monitor.section("step"), monitor.section("step"):
        assert names(board) == ["step", "step"]
        with pytest.raises(ZeroDivisionError), monitor.section("data"):
            raise ZeroDivisionError
        assert names(board) == ["step", "step"]
    assert names(board) == []


def test_a_decorator_marks_every_call(monitor, board):
    """A decorated function keeps its name, arguments and result, and may call itself."""

    @monitor.section("eval")
    def down(number: int) -> int:
        """Count down."""
        assert len(names(board)) == 3 - number
        return 0 if number == 0 else down(number - 1)

    assert (down.__name__, down(2), names(board)) == ("down", 0, [])
    assert monitor.board_state.counts["eval"] == 3


def test_a_coroutine_function_cannot_be_decorated(monitor):
    """A coroutine function returns before its work is done, so it is rejected."""

    async def work() -> None: ...

    with pytest.raises(TypeError, match="work returns before its work is done"):
        monitor.section("step")(work)


def test_start_and_end_work_in_any_order(monitor, board, caplog):
    """Sections can be started and ended in any order; ending a section that is not open is logged once and has no
    effect."""
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


def test_a_section_without_timeout_is_logged_once(monitor, board, caplog):
    """A section without a timeout is measured and not enforced, which rank 0 logs once at INFO in the first cycle, and
    other ranks at DEBUG."""
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


def test_reported_facts_reach_the_heartbeat_memory(monitor, board):
    """The agent reads the facts that the session reports from the heartbeat memory."""
    monitor.heartbeat()
    monitor.set_iteration(12)
    monitor.report_progress()
    assert board.read(1).durable_iteration is None
    monitor.set_durable_iteration(10)
    monitor.set_restored()
    state = monitor.board_state
    assert (state.iteration, state.durable_iteration, state.reports_progress, state.restored) == (12, 10, True, True)
    assert state.last_heartbeat_ns


def test_the_config_sets_the_number_of_warmup_steps(monitor, board):
    """The warm-up steps of a cycle do not count for the longest duration."""
    for _ in range(2):
        with monitor.section("step"):
            pass
    assert "step" not in board.read(1).longest_s
    with monitor.section("step"):
        pass
    assert board.read(1).longest_s["step"] > 0


def test_a_second_monitor_is_rejected_until_the_first_is_closed(monitor, board):
    """A process has one monitor per page of the heartbeat memory; closing it allows another one."""
    place = WorkerEnv(local_rank=0, board=board.path)
    with pytest.raises(OutlastError, match="has a RankMonitor already"):
        PlacedRankMonitor(place)
    monitor.close()
    replacement = PlacedRankMonitor(place)
    replacement.close()


def test_a_closed_monitor_accepts_calls(monitor, board):
    """After close() a script can continue unchanged; the rank counts as finished, and no thread is left."""
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
def test_a_forked_child_does_not_end_its_parents_monitor(monitor, board):
    """After a forked data loader process exits, the parent is still monitored."""
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


def test_an_examination_returns_response_and_stack(monitor, board, tmp_path):
    """A living rank responds, without collectives if it uses none, and its stack is written."""
    with monitor.section("step"):
        (position,) = examine(board, node="n", stacks_dir=tmp_path / "stacks")
    assert (position.global_rank, position.pid, position.sections) == (5, os.getpid(), ("step",))
    assert (position.responsive, position.collectives, position.attached) == (True, -1, True)
    assert "in test_an_examination_returns_response_and_stack" in position.stack_line
    text = (tmp_path / "stacks" / "rank-5.txt").read_text()
    assert text.startswith(f"rank 5 (node n, pid {os.getpid()}), iteration 0, in step")
    assert "in examine" in text


def test_an_invalid_heartbeat_memory_is_an_error(tmp_path):
    """A path that is not a heartbeat memory file raises an error at once."""
    (tmp_path / "x").write_text("x" * 8192)
    with pytest.raises(OutlastError, match="is not a heartbeat memory file"):
        PlacedRankMonitor(WorkerEnv(board=str(tmp_path / "x")))


def test_no_process_starts_without_timeouts(caplog):
    """Without an agent and timeouts no monitor process starts, which is logged in one line."""
    caplog.set_level(logging.INFO)
    monitor = PlacedRankMonitor(WorkerEnv())
    try:
        assert "is not watched: no timeout is set" in caplog.text
        assert "agent process" not in caplog.text
    finally:
        monitor.close()


def test_timeouts_are_learned_without_an_agent(tmp_path, caplog):
    """A run without a launcher saves its durations when it finishes, and the next run uses them."""
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
