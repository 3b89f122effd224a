"""The heartbeat memory: a node reads what its workers write, whatever happens to the worker."""

import os
import signal
import struct
import subprocess
import sys
import threading

import pytest

from outlast.errors import ConfigError, OutlastError
from outlast.policy.durability import Durability
from outlast.policy.recovery_point import Tier
from outlast.runtime import board as layout
from outlast.runtime.board import MAX_DEPTH, MAX_NAMES, OTHER, Board, EndRequest, LoadedCopy, RankPage


@pytest.fixture
def board():
    created = Board.create(num_ranks=2)
    yield created
    created.close()


@pytest.fixture
def page(board) -> RankPage:
    page = board.rank(1)
    page.attach(pid=os.getpid(), global_rank=5, cycle=3)
    return page


def names(state) -> list[str]:
    return [section.name for section in state.sections]


def test_reader_gets_every_written_value(board, page):
    """Every value that a worker writes is read back, and ranks do not change each other's pages."""
    page.heartbeat()
    page.set_iteration(41)
    page.enter("step")
    page.enter("data")
    page.set_durable_iteration(40)
    page.set_collectives(17)
    page.set_restored()
    state = board.read(1)
    assert (state.global_rank, state.pid, state.cycle, state.attached) == (5, os.getpid(), 3, True)
    assert (state.iteration, state.durable_iteration, state.reports_progress) == (41, 40, True)
    assert (state.collectives, state.restored, state.finished) == (17, True, False)
    assert names(state) == ["step", "data"]
    assert state.attached_ns <= state.last_heartbeat_ns <= state.sections[0].start_ns <= state.sections[1].start_ns
    assert (state.num_entries, state.num_heartbeats, state.torn) == (2, 1, False)
    other = board.read(0)
    assert (other.attached, other.pid, other.global_rank, other.collectives) == (False, 0, -1, -1)
    assert other.durable_iteration is None


def test_reader_gets_the_loaded_checkpoint(board, page):
    """The loaded checkpoint is read back unchanged, whatever sections are open; a load without details, or with too
    long an attempt name, is reported without the checkpoint."""
    page.set_restored()
    assert (board.read(1).restored, board.read(1).loaded) == (True, None)
    page.set_restored(LoadedCopy(checkpoint=5, attempt="x" * 300, tier=Tier.LOCAL, suspect_window=20))
    assert board.read(1).loaded is None
    loaded = LoadedCopy(checkpoint=120, attempt="job-1f-3-ab12.7", tier=Tier.MEMORY, suspect_window=20)
    page.set_restored(loaded)
    for number in range(layout.MAX_NAMES + 2):
        page.enter(f"section {number}")
    assert board.read(1).loaded == loaded
    assert board.read(1).leaving_with == 0
    page.set_leaving(17)
    assert board.read(1).leaving_with == 17
    assert board.read(0).loaded is None


def test_board_is_opened_by_its_path(board, page):
    """A heartbeat memory opened by its path has the same pages."""
    page.enter("setup")
    opened = Board.open(board.path)
    assert names(opened.read(1)) == ["setup"]
    assert opened.token == board.token
    opened.close()


def test_sections_nest_and_are_measured(board, page):
    """Closed sections leave a count and a longest duration; so does the time outside all sections."""
    for _ in range(3):
        page.enter("step")
        page.enter("step")
        page.leave()
        page.leave("step")
    state = board.read(1)
    assert state.sections == ()
    assert state.counts == {"step": 6}
    assert state.longest_s["step"] > 0
    assert state.longest_s[""] > 0
    assert state.left_ns > 0


def test_sections_may_be_closed_in_any_order(board, page):
    """Closing an outer section first keeps the inner one with its own start."""
    page.enter("outer")
    page.enter("inner")
    start = board.read(1).sections[1].start_ns
    assert page.leave("outer")
    (left,) = board.read(1).sections
    assert (left.name, left.start_ns) == ("inner", start)
    assert not page.leave("outer")
    assert page.leave("inner")
    assert board.read(1).sections == ()
    assert not page.leave()


def test_warmup_durations_do_not_count(board):
    """A slow first iteration does not become the longest one."""
    page = board.rank(0)
    page.attach(pid=1, global_rank=0, cycle=0, warmup={"step": 1})
    page.enter("step")
    page.leave()
    assert "step" not in board.read(0).longest_s
    page.enter("step")
    assert board.read(0).sections[0].ordinal == 1
    page.leave()
    assert board.read(0).longest_s["step"] > 0
    assert board.read(0).counts["step"] == 2


def test_sections_beyond_the_depth_are_logged_once(board, page, caplog):
    """Sections beyond the depth are measured but not recorded, with one log line."""
    for depth in range(MAX_DEPTH + 3):
        page.enter(f"d{depth}")
    state = board.read(1)
    assert names(state) == [f"d{depth}" for depth in range(MAX_DEPTH)]
    assert state.depth == MAX_DEPTH + 3
    assert len(caplog.records) == 1
    while page.leave():
        pass
    state = board.read(1)
    assert (state.depth, state.sections) == (0, ())
    assert state.counts[f"d{MAX_DEPTH + 2}"] == 1


def test_names_beyond_the_table_share_one_slot(board, page, caplog):
    """Names beyond the table share one slot, with one log line; earlier names keep their slots."""
    for number in range(MAX_NAMES + 4):
        page.enter(f"n{number}")
        page.leave()
    state = board.read(1)
    assert state.counts["n0"] == state.counts[f"n{MAX_NAMES - 1}"] == 1
    assert state.counts[OTHER] == 4
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["x" * 39, "ü" * 19, "größer/als-sonst 1"])
def test_section_names_round_trip(board, page, name):
    """Any text of up to 39 bytes is a valid section name."""
    page.enter(name)
    assert names(board.read(1)) == [name]


@pytest.mark.parametrize("name", ["", "x" * 40, "a\0b"])
def test_invalid_section_names_are_rejected(page, name):
    """A name that does not fit is rejected at once, not cut."""
    with pytest.raises(ConfigError, match="1 to 39 bytes"):
        page.enter(name)


def test_sections_of_other_threads_are_ignored(board, page, caplog):
    """Sections belong to the thread that attached; those of other threads are ignored with one log line, and
    heartbeats of all threads count."""
    page.enter("step")

    def use_sections():
        page.enter("loader")
        page.heartbeat()
        page.leave("loader")
        page.leave("step")
        page.leave()

    thread = threading.Thread(target=use_sections)
    thread.start()
    thread.join(10)
    state = board.read(1)
    assert names(state) == ["step"]
    assert state.num_heartbeats == 1
    assert "loader" not in state.counts
    assert len(caplog.records) == 1


def test_attachment_keeps_earlier_reports(board):
    """A checkpoint manager may report before a monitor attaches: iteration, committed and loaded checkpoint are
    kept, also by a second attachment after an in-process restart. A lower commit never replaces a higher one."""
    loaded = LoadedCopy(checkpoint=5, attempt="job-0-aa.1", tier=Tier.LOCAL, suspect_window=20)
    manager = board.rank(0)
    manager.set_iteration(7)
    manager.set_durable_iteration(5)
    manager.set_restored(loaded)
    assert not board.read(0).attached
    assert board.read(0).reports_iteration
    page = board.rank(0)
    page.attach(pid=1, global_rank=0, cycle=0)
    state = board.read(0)
    assert (state.iteration, state.durable_iteration, state.reports_progress) == (7, 5, True)
    assert state.loaded == loaded
    page.attach(pid=1, global_rank=0, cycle=0)
    page.set_durable_iteration(3)
    state = board.read(0)
    assert (state.iteration, state.durable_iteration, state.reports_progress, state.loaded) == (7, 5, True, loaded)


def test_assigned_pid_is_kept_until_the_worker_attaches(board):
    """The pid that the agent assigns is readable before the attachment and never overwrites the worker's own."""
    board.assign(0, pid=77, global_rank=4, cycle=1)
    state = board.read(0)
    assert (state.pid, state.global_rank, state.attached) == (77, 4, False)
    page = board.rank(0)
    page.attach(pid=78, global_rank=4, cycle=1)
    board.assign(0, pid=77, global_rank=4, cycle=1)
    assert board.read(0).pid == 78


def test_entries_are_counted_per_iteration(board, page):
    """The count restarts with each iteration; writing the same iteration again changes nothing."""
    page.enter("a")
    page.set_iteration(1)
    page.enter("b")
    page.set_iteration(1)
    page.enter("c")
    state = board.read(1)
    assert (state.num_entries, state.num_entries_in_iteration) == (3, 2)


def test_page_of_a_writer_stopped_in_an_update_is_read(board, page):
    """A writer that never finishes its update costs the reader a bounded time, and the rest of the page is still
    read."""
    page.set_iteration(9)
    page.enter("step")
    board.page(1)[layout.BEGUN] += 1
    state = board.read(1)
    assert state.torn
    assert (state.iteration, names(state)) == (9, ["step"])
    page.enter("data")  # the next update of a slow writer repairs the page
    state = board.read(1)
    assert (state.torn, names(state)) == (False, ["step", "data"])


def test_finished_rank_is_reported(board, page):
    """The time from the last section to the end counts as time outside sections."""
    page.enter("step")
    page.leave()
    page.finish()
    page.finish()
    state = board.read(1)
    assert state.finished
    assert state.longest_s[""] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"x" * 8192, "is not a heartbeat memory file"),
        (layout.MAGIC.to_bytes(8, "little") + (99).to_bytes(8, "little") + bytes(8), "has format 99"),
        (struct.pack("=3q", layout.MAGIC, layout.VERSION, 7), "7 ranks"),
    ],
)
def test_invalid_board_file_is_rejected(tmp_path, content, message):
    """A foreign file, another format or a truncated file is rejected with the reason."""
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(OutlastError, match=message):
        Board.open(str(path))


def test_missing_board_and_rank_are_reported(board, tmp_path):
    """A missing heartbeat memory and an unknown rank are errors with the reason."""
    with pytest.raises(OutlastError, match="cannot be opened"):
        Board.open(str(tmp_path / "gone"))
    with pytest.raises(OutlastError, match="not local rank 2"):
        board.read(2)


def test_board_has_no_file():
    """A heartbeat memory has no file: it is shared by its path while its creator lives, and leaves nothing behind."""
    created = Board.create()
    page = created.rank(0)
    page.attach(pid=1, global_rank=0, cycle=0)
    opened = Board.open(created.path)
    page.enter("step")
    assert names(opened.read(0)) == ["step"]
    opened.close()
    path = created.path
    created.close()
    with pytest.raises(OutlastError):
        Board.open(path)


WRITER = """
import sys
from outlast.runtime.board import Board
page = Board.open(sys.argv[1]).rank(0)
page.attach(pid=1, global_rank=0, cycle=0)
a, b = page.intern("a"), page.intern("b")
print("ready", flush=True)
while True:
    page.open(a); page.open(b); page.shut(b); page.shut(a)
"""


@pytest.mark.process
def test_snapshots_of_a_busy_writer_are_consistent(board):
    """However fast another process opens and closes sections, a snapshot never mixes two moments."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, board.path], stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"ready\n"
        torn = 0
        for _ in range(3000):
            state = board.read(0)
            torn += state.torn
            assert state.torn or names(state) in ([], ["a"], ["a", "b"])
            starts = [section.start_ns for section in state.sections]
            assert state.torn or starts == sorted(starts)
            assert state.torn or state.depth == len(starts)
        assert torn < 300
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        assert board.read(0).counts["a"] > 0  # the page survives its writer
    finally:
        writer.kill()
        writer.wait(10)
        writer.stdout.close()


def test_attachment_clears_timeouts_and_requests(board, page):
    """A worker's calculated timeouts and requests to its launcher are read until the next attachment clears them; a
    text that does not fit is rejected."""
    assert board.timeouts(1) == ""
    page.set_timeouts('{"a":1}')
    page.set_timeouts('{"b":22}')
    page.request(EndRequest.STOP)
    assert board.timeouts(1) == '{"b":22}'
    assert board.read(1).requested == EndRequest.STOP
    with pytest.raises(ConfigError, match="calculate those of fewer sections"):
        page.set_timeouts("x" * (layout.MAX_TIMEOUTS_BYTES + 1))
    page.attach(pid=os.getpid(), global_rank=5, cycle=1)
    assert board.timeouts(1) == ""
    assert board.read(1).requested == EndRequest.NONE


def test_commits_are_kept_by_level_and_across_cycles() -> None:
    """A commit in memory does not count as durable; the due iteration and its time are passed to the next cycle's
    heartbeat memory."""
    first = Board.create(num_ranks=2)
    page = first.rank(1)
    page.set_durability(Durability(40, 40, 40))
    committed_ns = first.read(1).kept.durable_at_ns
    page.set_durability(Durability(166, 120, 40))
    page.set_durability(Durability(80, None, None))
    page.set_owed((50, 12345))
    state = first.read(1)
    assert (state.committed_iteration, state.node_durable_iteration, state.durable_iteration) == (166, 120, 40)
    second = Board.create(num_ranks=3, kept=[one.kept for one in first.read_all()])
    state = second.read(1)
    assert (state.committed_iteration, state.durable_iteration, state.reports_progress) == (None, None, False)
    page = second.rank(1)
    assert page.owed == (50, 12345)
    assert (second.rank(0).owed, second.rank(2).owed) == (None, None)
    page.set_durability(Durability(166, None, 40))
    assert second.read(1).kept.durable_at_ns == committed_ns
    page.set_durability(Durability(170, None, 170))
    page.set_owed(None)
    assert second.read(1).kept.durable_at_ns > committed_ns
    assert page.owed is None
