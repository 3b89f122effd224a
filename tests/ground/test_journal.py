"""The journal: complete lines from any thread, with killed writers and full disks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outlast import clock
from outlast.incidents import EventKind
from outlast.journal import JournalTail, read
from outlast.runtime.journal import Journal


def open_journal(run_dir: Path | None, proc: str = "agent", node: str = "a") -> Journal:
    return Journal(run_dir, run_id="r", job="j", node=node, proc=proc)


def test_events_are_read_as_written(tmp_path: Path) -> None:
    """An event is read with the envelope and facts that were written."""
    journal = open_journal(tmp_path)
    journal.cycle = 3
    written = journal.write(EventKind.PROGRESS, rank=1, iteration=57, note="text with\nnewline and é")
    journal.close()
    assert list(read(tmp_path)) == [written]
    assert (written.cycle, written.rank, written.iteration) == (3, 1, 57)
    assert written.data == {"note": "text with\nnewline and é"}


def test_events_of_all_processes_are_ordered_by_time(tmp_path: Path) -> None:
    """Events of several processes are returned in the order in which they happened."""
    first, second = open_journal(tmp_path), open_journal(tmp_path, proc="rank-0", node="b/../x")
    for number in range(10):
        (first if number % 2 else second).write(EventKind.PROGRESS, iteration=number)
    first.close()
    second.close()
    assert [event.iteration for event in read(tmp_path)] == list(range(10))
    assert len(list((tmp_path / "journal").iterdir())) == 2


def test_two_writers_of_one_name_never_share_a_file(tmp_path: Path) -> None:
    """A process of the same name gets a separate file while the first one holds its file, and all events are read. A
    second journal of one process, and a later process, continue in the first file."""
    code = """
import os, sys
from outlast.incidents import EventKind
from outlast.runtime.journal import Journal
journal = Journal(sys.argv[1], run_id="r", job="j", node="a", proc="agent")
journal.write(EventKind.PROGRESS, iteration=int(sys.argv[2]))
"""

    def write_elsewhere(iteration: int) -> None:
        subprocess.run([sys.executable, "-c", code, tmp_path, str(iteration)], check=True, timeout=300)

    first, second = open_journal(tmp_path), open_journal(tmp_path)
    first.write(EventKind.PROGRESS, iteration=1)
    second.write(EventKind.PROGRESS, iteration=2)
    first.close()
    second.write(EventKind.PROGRESS, iteration=3)
    assert len(list((tmp_path / "journal").iterdir())) == 1
    write_elsewhere(4)
    assert len(list((tmp_path / "journal").iterdir())) == 2
    second.close()
    write_elsewhere(5)
    assert [event.iteration for event in read(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "journal").iterdir())) == 2


def test_forked_child_does_not_hold_its_parents_journal(tmp_path: Path) -> None:
    """A child that outlives its parent, such as a loader's worker, releases the file to the next process of that
    name."""
    first = open_journal(tmp_path)
    first.write(EventKind.PROGRESS, iteration=1)
    reading, writing = os.pipe()
    started, begins = os.pipe()
    if (child := os.fork()) == 0:
        os.write(begins, b"x")
        os.read(reading, 1)
        os._exit(0)
    os.read(started, 1)
    first.close()
    third = open_journal(tmp_path)
    third.write(EventKind.PROGRESS, iteration=2)
    third.close()
    os.write(writing, b"x")
    os.waitpid(child, 0)
    for fd in (reading, writing, started, begins):
        os.close(fd)
    assert len(list((tmp_path / "journal").iterdir())) == 1


def test_lines_have_a_readable_time(tmp_path: Path) -> None:
    """Each line has a readable time in addition to nanoseconds; lines of earlier versions without one are read."""
    assert clock.as_iso(1_700_000_000_012_345_678) == "2023-11-14T22:13:20.012Z"
    journal = open_journal(tmp_path)
    written = journal.write(EventKind.PROGRESS, iteration=1)
    journal.close()
    assert written.time == clock.as_iso(written.wall_ns)
    assert journal.path is not None
    line = journal.path.read_text()
    assert f'"time":"{written.time}"' in line
    journal.path.write_text(line + line.replace(f'"time":"{written.time}",', ""))
    assert [event.time for event in read(tmp_path)] == [written.time, ""]


def test_invalid_utf8_is_replaced_by_a_mark(tmp_path: Path) -> None:
    """An argument or file name that is not valid UTF-8 is written with a mark for each invalid byte."""
    journal = Journal(tmp_path, run_id="r", job="j", node="n", proc="agent")
    journal.write(EventKind.JOB_STARTED, command=["train.py", "a\udcffb"], pid=7)
    journal.close()
    (event,) = read(tmp_path)
    assert event.kind is EventKind.JOB_STARTED
    assert event.data == {"command": ["train.py", "a?b"], "pid": 7}


def test_torn_line_is_skipped(tmp_path: Path) -> None:
    """A line torn by a kill is skipped, also if the next process appends to the same file."""
    journal = open_journal(tmp_path)
    journal.write(EventKind.PROGRESS, iteration=1)
    journal.close()
    assert journal.path is not None
    complete = journal.path.read_bytes()
    journal.path.write_bytes(complete + complete[:-10])
    assert [event.iteration for event in read(tmp_path)] == [1]
    journal = open_journal(tmp_path)
    journal.write(EventKind.PROGRESS, iteration=2)
    journal.close()
    assert [event.iteration for event in read(tmp_path)] == [1, 2]


def test_lines_of_threads_do_not_interleave(tmp_path: Path) -> None:
    """Many threads may write to one journal; every event stays complete."""
    journal = open_journal(tmp_path)

    def write(rank: int) -> None:
        for number in range(100):
            journal.write(EventKind.PROGRESS, rank=rank, iteration=number, filler="x" * 500)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    journal.close()
    events = list(read(tmp_path))
    assert sorted((event.rank, event.iteration) for event in events) == [
        (rank, number) for rank in range(8) for number in range(100)
    ]
    assert journal.num_lost == 0


def test_events_lost_to_a_full_disk_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk ends no process: each lost event is counted, and one warning is logged."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "j-a-agent.jsonl").symlink_to("/dev/full")
    journal = open_journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            journal.write(EventKind.PROGRESS)
    journal.close()
    assert journal.num_lost == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


def test_disk_that_fills_within_a_line_loses_only_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line truncated by a full disk is counted, and the next one is complete."""
    journal = open_journal(tmp_path)
    journal.write(EventKind.PROGRESS, iteration=1)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    journal.write(EventKind.PROGRESS, iteration=2)
    monkeypatch.undo()
    journal.write(EventKind.PROGRESS, iteration=3)
    journal.close()
    events = list(read(tmp_path))
    assert [event.iteration for event in events if event.kind == EventKind.PROGRESS] == [1, 3]
    assert [event.data["num"] for event in events if event.kind == EventKind.EVENTS_LOST] == [1]
    assert journal.num_lost == 1


def test_no_run_dir_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run directory events are created but not written."""
    monkeypatch.chdir(tmp_path)
    journal = open_journal(None)
    assert journal.write(EventKind.PROGRESS).kind == EventKind.PROGRESS
    journal.close()
    assert list(tmp_path.iterdir()) == []
    assert list(read(tmp_path)) == []


def test_closed_journal_accepts_no_events(tmp_path: Path) -> None:
    """Closing twice or writing afterwards raises no error and writes nothing."""
    journal = open_journal(tmp_path)
    journal.close()
    journal.close()
    journal.write(EventKind.PROGRESS)
    assert list(read(tmp_path)) == []


WRITER = """
import itertools, sys
from outlast.incidents import EventKind
from outlast.runtime.journal import Journal
journal = Journal(sys.argv[1], run_id="r", job="j", node="a", proc="rank-0")
for number in itertools.count():
    journal.write(EventKind.PROGRESS, iteration=number)
    if number == 50:
        print("ready", flush=True)
"""


@pytest.mark.process
def test_killed_writer_loses_no_earlier_event(tmp_path: Path) -> None:
    """A SIGKILLed process has lost none of the events that it had written before."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(timeout=300) == -signal.SIGKILL
    iterations = [event.iteration for event in read(tmp_path)]
    assert iterations == list(range(len(iterations)))
    assert len(iterations) > 50


def fill(fifo: Path) -> int:
    """Make a full FIFO; return a descriptor from which it can be read."""
    os.mkfifo(fifo)
    fd = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    for piece in (b"\n" * 4096, b"\n"):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, piece)
    return fd


def test_hung_disk_blocks_no_writer_and_counts_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One event waits for a disk that hangs, others are queued, and those without room are counted once it
    continues."""
    monkeypatch.setattr("outlast.runtime.journal.PATIENCE_S", 0.01)
    monkeypatch.setattr("outlast.runtime.journal.MAX_QUEUED", 3)
    (tmp_path / "journal").mkdir()
    fd = fill(tmp_path / "journal" / "j-a-agent.jsonl")
    journal = open_journal(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            journal.write(EventKind.PROGRESS, iteration=number)
        assert journal.num_lost == 7
        read = b""
        os.set_blocking(fd, True)
        while b"events_lost" not in read or read.count(b'"progress"') < 3:  # the freed room lets it continue
            read += os.read(fd, 4096)
        journal.close()
    events = [json.loads(line) for line in read.splitlines() if line]
    assert [event["iteration"] for event in events if event["kind"] == "progress"] == [0, 1, 2]
    assert next(event["data"]["num"] for event in events if event["kind"] == "events_lost") == 7
    assert "the disk has not responded" in caplog.text
    os.close(fd)


def test_closing_on_a_hung_disk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing gives a hung disk a moment, reports the unwritten events, and returns."""
    monkeypatch.setattr("outlast.runtime.journal.PATIENCE_S", 0.01)
    monkeypatch.setattr("outlast.runtime.journal._CLOSE_S", 0.01)
    (tmp_path / "journal").mkdir()
    fd = fill(tmp_path / "journal" / "j-a-agent.jsonl")
    journal = open_journal(tmp_path)
    journal.write(EventKind.PROGRESS)
    journal.write(EventKind.PROGRESS)
    journal.close()
    assert "2 events were not written" in caplog.text
    os.set_blocking(fd, True)
    while b"progress" not in os.read(fd, 1 << 16):  # lets its thread end
        pass
    os.close(fd)


def test_forked_child_writes_its_own_events(tmp_path: Path) -> None:
    """A child without its parent's threads writes to the same file."""
    journal = open_journal(tmp_path)
    journal.write(EventKind.PROGRESS, iteration=1)
    child = os.fork()
    if child == 0:
        try:
            journal.write(EventKind.PROGRESS, iteration=2)
            journal.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    journal.write(EventKind.PROGRESS, iteration=3)
    journal.close()
    assert [event.iteration for event in read(tmp_path)] == [1, 2, 3]


def test_growing_journal_is_followed(tmp_path: Path) -> None:
    """Each event is returned once, an incomplete line later, and added files are read."""
    tail = JournalTail(tmp_path)
    assert tail.read_new() == []
    journal = open_journal(tmp_path)
    journal.write(EventKind.CYCLE_STARTED, cycle=0, ranks=[0], world_size=1)
    assert [one.kind for one in tail.read_new()] == ["cycle_started"]
    assert tail.read_new() == []
    journal.write(EventKind.CYCLE_ENDED, cycle=0)
    journal.close()
    assert journal.path is not None
    complete = journal.path.read_bytes()
    journal.path.write_bytes(complete[:-5])
    assert tail.read_new() == []
    journal.path.write_bytes(complete)
    other = open_journal(tmp_path, node="b")
    other.write(EventKind.JOB_ENDED, exit_code=0)
    other.close()
    assert {one.kind for one in tail.read_new()} == {"cycle_ended", "job_ended"}
