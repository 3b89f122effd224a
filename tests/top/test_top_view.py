"""The view of ``outlast top``, computed from evidence: lines that fit, unhealthy ranks first, and components that do
not respond."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from outlast import clock
from outlast.errors import ConfigError
from outlast.goodput import Ledger
from outlast.incidents import EventKind
from outlast.launch.protocol import JobPhase, LiveStatus
from outlast.runtime.board import Board
from outlast.runtime.injection import armed
from outlast.runtime.journal import Journal
from outlast.runtime.processes import describe_self
from outlast.status.evidence import Evidence, gather
from outlast.status.facts import judge
from outlast.status.report import IncidentReport, NodeReport, NodeState, RunState, StatusReport
from outlast.top import look
from outlast.top.look import Looker, RankLine, TopReport, Unanswered
from outlast.top.view import describe_others, plain, rank_badness, show


@contextmanager
def agent_process(run_dir: Path, *boards: Board) -> Iterator[subprocess.Popen[bytes]]:
    """Write a job of one cycle whose agent is a process that holds only these heartbeat memories."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[board.fd for board in boards]) as process:
        try:
            agent = Journal(run_dir, run_id="gpt", job="job-1", node="a", proc="agent")
            agent.write(
                EventKind.JOB_STARTED,
                command=["train.py"],
                num_nodes=1,
                nproc_per_node=1,
                **describe_self() | {"pid": process.pid, "pid_started": 0},
            )
            agent.write(EventKind.CYCLE_STARTED, cycle=0, node_rank=0, ranks=[0], pids=[1], world_size=1)
            agent.close()
            yield process
        finally:
            process.kill()


def make_status(tmp_path: Path, **fields: Any) -> StatusReport:
    """Return the status of a job with a living agent, with some fields replaced."""
    with agent_process(tmp_path):
        return msgspec.structs.replace(judge(gather(tmp_path, asks=False), clock.wall_ns()), **fields)


def make_line(rank: int, **fields: Any) -> RankLine:
    """Return the line of a training rank, with some fields replaced."""
    line = RankLine(
        rank=rank,
        node=f"node-{rank // 8}",
        pid=1000 + rank,
        state="running",
        iteration=500,
        section="step/forward",
        section_s=0.25,
        heartbeat_age_s=0.5,
        source="board",
    )
    return msgspec.structs.replace(line, **fields)


def make_report(status: StatusReport, ranks: list[RankLine], **fields: Any) -> TopReport:
    """Return a report of a training run, with some fields replaced."""
    report = TopReport(
        schema=1,
        iteration=500,
        total=1000,
        rate=2.0,
        left_s=250.0,
        goodput=0.9,
        ranks=ranks,
        unanswered=[],
        status=status,
    )
    return msgspec.structs.replace(report, **fields)


def test_header_shows_run_state_progress_and_goodput(tmp_path: Path) -> None:
    """The header shows the run, its state, the iteration and the total, the rate, the remaining time and the
    goodput."""
    lines = plain(show(make_report(make_status(tmp_path), [make_line(0)]))).splitlines()
    assert lines[0] == "run        gpt, job job-1, cycle 0, 1 rank"
    assert lines[1] == "state      running"
    assert lines[2] == "iteration  500 of 1000, 2 iterations/s, 4 min left, goodput 90.0%"
    assert "   0  node-0  1000  running        500  0.5 s ago  step/forward (0.2 s)" in lines
    assert lines[-1] == "incidents  none"


def test_a_thousand_ranks_fit_into_any_terminal(tmp_path: Path) -> None:
    """The view has at most the terminal's rows and columns. Unhealthy ranks come first, in order, and one line
    summarizes the others."""
    ranks = [make_line(rank) for rank in range(1024)]
    ranks[700] = make_line(700, state="ended", section=None)
    ranks[13] = make_line(13, state="stopped")
    ranks[44] = make_line(44, iteration=480)
    ranks[45] = make_line(45, heartbeat_age_s=75.0)
    status = make_status(tmp_path, world_size=1024)
    for height in (6, 12, 16, 24, 60):
        for width in (20, 80, 200):
            lines = show(make_report(status, ranks), width=width, height=height, hint="q: end")
            assert len(lines) <= height
            assert all(line.cell_len <= width for line in lines)
            assert lines[-1].plain == "q: end"
    text = plain(show(make_report(status, ranks), width=120, height=24, hint="q: end"))
    table = text[text.index("RANK") :].splitlines()
    assert [int(line.split()[0]) for line in table[1:5]] == [700, 13, 44, 45]
    (others,) = [line for line in table if line.startswith("and ")]
    shown = table.index(others) - 1
    assert others.startswith(f"and {1024 - shown} more: all running, iteration 500 (ranks ")
    assert shown >= 8


def test_few_ranks_are_all_listed_by_node(tmp_path: Path) -> None:
    """Ranks are listed in order, with each node's name at its first rank; incidents fill the remaining lines."""
    incident = IncidentReport(
        time="t", age_s=5.0, cycle=0, kind="worker_died", node="node-0", rank=0, iteration=3, text="rank 0 died",
        remedy=None, decision="restarting the workers", num_reports=1,
    )  # fmt: skip
    status = make_status(tmp_path, incidents=[incident] * 9, num_incidents=9)
    lines = plain(show(make_report(status, [make_line(rank) for rank in range(16)]), width=120, height=40)).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("RANK"))
    rows = [line.split() for line in lines[at + 1 : at + 17]]
    assert [int(row[0]) for row in rows] == list(range(16))
    assert [row[0] for row in rows if row[1].startswith("node-")] == ["0", "8"]
    assert lines[at + 17] == "incidents  9, the newest 5"
    assert lines[at + 18] == "           5 s ago, cycle 0: rank 0 died; restarting the workers"


def test_small_differences_do_not_change_the_order() -> None:
    """A lag of one iteration, or of some seconds without a heartbeat, does not rank a rank as worse."""
    healthy = [make_line(0), make_line(1, iteration=499), make_line(2, heartbeat_age_s=9.0)]
    assert [rank_badness(line, 500)[:3] for line in healthy] == [rank_badness(healthy[0], 500)[:3]] * 3
    assert rank_badness(make_line(3, heartbeat_age_s=31.0), 500) < rank_badness(healthy[0], 500)


def test_other_ranks_are_summarized_by_state() -> None:
    """If the other ranks differ, their line contains the number in each state and the range of iterations."""
    others = [make_line(rank) for rank in range(10)]
    others += [make_line(11, state="spare", iteration=None), make_line(12, iteration=498)]
    expected = "and 12 more: 11 running, 1 spare, iterations 498 to 500 (ranks 0-9, 11-12)"
    assert describe_others(others) == expected


def test_unresponsive_components_are_shown_with_duration(tmp_path: Path) -> None:
    """The line contains the component, the duration and the reason."""
    silent = [Unanswered(what="the coordinator", for_s=12.0, reason="no coordinator responds at a:1")]
    text = plain(show(make_report(make_status(tmp_path), [make_line(0)], unanswered=silent)))
    assert "no reply   the coordinator: no response for 12 s: no coordinator responds at a:1" in text.splitlines()


def test_waiting_run_shows_missing_and_lost_nodes(tmp_path: Path) -> None:
    """The state line contains the summary once; spares and lost nodes are listed."""
    nodes = [NodeReport(name="b", state=NodeState.LOST), NodeReport(name="c", state=NodeState.SPARE)]
    status = make_status(tmp_path, state=RunState.FORMING, summary="forming: ...", nodes=nodes, spares=["c"])
    lines = plain(show(make_report(status, [], rate=None, left_s=None))).splitlines()
    assert "state      forming: ..." in lines
    assert "spares     c" in lines
    assert "           lost or excluded: b" in lines


def test_local_ranks_are_read_from_heartbeat_memory(tmp_path: Path) -> None:
    """Sections, iteration and heartbeat come from the heartbeat memory of a living agent, which is only read."""
    board = Board.create(num_ranks=1)
    try:
        page = board.rank(0)
        page.attach(pid=os.getpid(), global_rank=0, cycle=0)
        page.heartbeat()
        page.enter("step")
        page.enter("forward")
        page.set_iteration(7)
        before = bytes(board.page(0))
        with agent_process(tmp_path, board):
            report = look_once(tmp_path)
            (line,) = report.ranks
            assert (line.rank, line.node, line.pid, line.state) == (0, "a", os.getpid(), "running")
            assert (line.iteration, line.section, line.source) == (7, "step/forward", "board")
            assert line.heartbeat_age_s is not None
            assert bytes(board.page(0)) == before
            page.finish()
            assert look_once(tmp_path).ranks[0].state == "finished"
    finally:
        board.close()


@pytest.mark.parametrize("holds_newest", [True, False])
def test_heartbeat_memory_of_earlier_cycles_is_ignored(tmp_path: Path, holds_newest: bool) -> None:
    """If the agent still holds the heartbeat memory of the previous cycle, the new cycle's ranks are shown; if it
    has closed the newest, an older one is not used."""
    boards = [Board.create(num_ranks=1) for _ in range(2)]
    try:
        for cycle, board in zip((1, 0), boards, strict=True):
            board.rank(0).attach(pid=os.getpid(), global_rank=0, cycle=cycle)
            board.rank(0).set_iteration(10 * (cycle + 1))
        with agent_process(tmp_path, *boards[0 if holds_newest else 1 :]):
            agent = Journal(tmp_path, run_id="gpt", job="job-1", node="a", proc="agent")
            agent.write(EventKind.CYCLE_STARTED, cycle=1, node_rank=0, ranks=[0], pids=[1], world_size=1)
            agent.close()
            (line,) = look_once(tmp_path).ranks
            assert (line.iteration, line.source) == ((20, "board") if holds_newest else (None, "journal"))
    finally:
        for board in boards:
            board.close()


def look_once(target: Path | str) -> TopReport:
    """Return the report of one look, as ``--once`` does."""
    looker = Looker(str(target), interval_s=0.05)
    looker.start()
    try:
        looker.wait_for_first(for_all=True)
        assert looker.newest is not None
        return looker.newest
    finally:
        assert looker.close(60.0)


def test_single_look_waits_for_the_coordinators_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single look by endpoint includes the content of the run directory, even if the coordinator responds before
    that directory has been read."""
    live = LiveStatus(
        time="", run_id="gpt", job="job-1", host="a", run_dir=str(tmp_path), phase=JobPhase.RUNNING, cycle=0
    )
    goodput_read = threading.Event()

    def gather_late(run_dir: Path, **options: Any) -> Evidence:
        goodput_read.wait(60.0)
        time.sleep(0.5)  # a slow disk: the first view and the goodput are ready long before
        return gather(run_dir, **options)

    def count(run_dir: Path) -> Ledger:
        goodput_read.set()
        return Ledger.read(run_dir)

    monkeypatch.setattr(look, "ask_coordinator", lambda endpoint, key=None: live)
    monkeypatch.setattr(look, "gather", gather_late)
    monkeypatch.setattr(look, "Ledger", SimpleNamespace(read=count))
    monkeypatch.setattr(look, "READ_S", 60.0)
    with agent_process(tmp_path):
        assert [line.rank for line in look_once("127.0.0.1:1").ranks] == [0]


def test_total_is_known_once_a_rank_writes_it(tmp_path: Path) -> None:
    """The total number of iterations is unknown until a rank has written it to the journal."""
    rank = Journal(tmp_path, run_id="gpt", job="job-1", node="a", proc="rank-0")
    with agent_process(tmp_path):
        rank.write(EventKind.SESSION_STARTED, cycle=0, rank=0, world_size=1)
        rank.write(EventKind.STEPS_STARTED, cycle=0, rank=0, iteration=0)
        rank.write(EventKind.PROGRESS, cycle=0, rank=0, iteration=1, step_s=1.0)
        assert look_once(tmp_path).total is None
        rank.write(EventKind.STEPS_STARTED, cycle=1, rank=0, iteration=1, total=50)
        rank.close()
        report = look_once(tmp_path)
    assert (report.iteration, report.total, report.left_s) == (1, 50, None)  # no rate yet


@pytest.mark.process
def test_hung_run_directory_is_reported_and_view_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    """If the disk hangs, the view keeps the last content and reports the directory as unanswered; a first look fails
    with an error that contains the remedy."""
    make_status(tmp_path)
    looker = Looker(str(tmp_path), interval_s=0.05)
    looker.start()
    looker.wait_for_first()
    disk_responds = threading.Event()
    with armed("journal.read", lambda path: disk_responds.wait()), ExitStack() as stack:
        stack.callback(looker.close, 60.0)
        stack.callback(disk_responds.set)
        assert looker.newest is not None
        wait_until(lambda: bool(looker.newest and looker.newest.unanswered))
        assert looker.newest.unanswered[0].what == "the run directory"
        assert looker.newest.status.run == "gpt"
        monkeypatch.setattr(look, "FIRST_S", 0.2)
        second = Looker(str(tmp_path), interval_s=0.05)
        second.start()
        stack.callback(second.close, 60.0)
        stack.callback(disk_responds.set)  # called first
        with pytest.raises(ConfigError, match=r"did not respond within 0\.2 s; its disk may hang: use another machine"):
            second.wait_for_first(for_all=True)
        assert not second.close(0.1)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Return a function that waits until a condition holds."""
    import time

    def wait(is_met: Callable[[], bool]) -> None:
        deadline_s = clock.now_s() + 60.0
        while not is_met():
            assert clock.now_s() < deadline_s
            time.sleep(0.01)

    return wait
