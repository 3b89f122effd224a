"""The job's last line: counts from the journal."""

from __future__ import annotations

from pathlib import Path

from outlast.incidents import EventKind
from outlast.launch.summary import summarise
from outlast.runtime.journal import Journal


def test_lost_iterations_are_those_done_twice(tmp_path: Path) -> None:
    """A cycle that reached 57 and was followed by one restored at 50 lost 7; another job's events do not count."""
    for job in ("ours", "other"):
        journal = Journal(tmp_path, run_id="r", job=job, node="a", proc="agent")
        for cycle, restored, reached in ((0, None, 57), (1, 50, 80), (2, 80, 100)):
            journal.write(EventKind.CYCLE_STARTED, cycle=cycle, ranks=[0], pids=[1])
            journal.write(EventKind.SESSION_STARTED, cycle=cycle, rank=0)
            if restored is not None:
                journal.write(EventKind.RESTORED, cycle=cycle, rank=0, iteration=restored)
            journal.write(EventKind.CYCLE_ENDED, cycle=cycle, iterations={"0": reached, "1": reached - 1})
        for cycle in (0, 1):
            journal.write(EventKind.VERDICT, cycle=cycle, incident={"kind": "worker_died"})
        journal.write(EventKind.VERDICT, cycle=2, verdict={})
        journal.close()
    assert summarise(tmp_path, "ours").describe() == "3 cycles, 2 incidents, 7 iterations lost"


def test_plain_script_lost_nothing_that_is_known(tmp_path: Path) -> None:
    """Without a session nobody knows what was lost, and none is claimed."""
    journal = Journal(tmp_path, run_id="r", job="j", node="a", proc="agent")
    for cycle in (0, 1):
        journal.write(EventKind.CYCLE_STARTED, cycle=cycle, ranks=[0], pids=[1])
        journal.write(EventKind.CYCLE_ENDED, cycle=cycle, iterations={})
    journal.close()
    assert summarise(tmp_path, "j").lost_iterations == 0
