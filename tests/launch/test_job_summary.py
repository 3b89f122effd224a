"""The job's last line: counts from the journal."""

from __future__ import annotations

from pathlib import Path

from outlast.incidents import EventKind
from outlast.launch.job_summary import describe_job
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
            journal.write(EventKind.DECISION, cycle=cycle, incident={"kind": "worker_died"})
        journal.write(EventKind.DECISION, cycle=2, verdict={})
        journal.close()
    assert describe_job(tmp_path, "ours") == "3 cycles, 2 incidents, 7 iterations lost"


def test_iterations_of_a_script_without_a_session_are_unknown(tmp_path: Path) -> None:
    """A script without a session reports no iterations: how many were lost is reported as unknown, never as 0."""
    journal = Journal(tmp_path, run_id="r", job="j", node="a", proc="agent")
    for cycle in (0, 1):
        journal.write(EventKind.CYCLE_STARTED, cycle=cycle, ranks=[0], pids=[1])
        journal.write(EventKind.CYCLE_ENDED, cycle=cycle, iterations={})
    journal.close()
    assert describe_job(tmp_path, "j") == "2 cycles, 0 incidents, lost iterations unknown (no session)"


class Told:
    """What the agent and rank 0 of a job write, in one file."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.journal = Journal(run_dir, run_id="r", job="j", node="a", proc="agent")

    def cycle(self, number: int, *, begins: bool = True, restored: int | None = None, tier: str = "local") -> None:
        """Begin a cycle; ``begins``: its session does, too."""
        self.journal.write(EventKind.CYCLE_STARTED, cycle=number, ranks=[0], pids=[1])
        if begins:
            self.session(number, restored=restored, tier=tier)

    def session(self, number: int, *, restored: int | None = None, tier: str = "local") -> None:
        """Begin a session."""
        self.journal.write(EventKind.SESSION_STARTED, cycle=number, rank=0)
        if restored is not None:
            self.journal.write(EventKind.RESTORED, cycle=number, rank=0, iteration=restored, tier=tier)

    def save(self, number: int, iteration: int, *tiers: str) -> None:
        """Commit a checkpoint."""
        self.journal.write(EventKind.SAVE_COMMITTED, cycle=number, rank=0, iteration=iteration, tiers=list(tiers))

    def reach(self, number: int, iteration: int) -> None:
        """End a cycle."""
        self.journal.write(EventKind.CYCLE_ENDED, cycle=number, iterations={"0": iteration}, reason="it died")

    def end(self, code: int) -> str:
        """End the job; return what is said of it."""
        self.journal.write(EventKind.JOB_ENDED, exit_code=code, reason="so it is")
        self.journal.close()
        return describe_job(self.run_dir, "j")


def test_iterations_that_nothing_holds_at_the_end_are_lost(tmp_path: Path) -> None:
    """A job that is told to leave and saves nothing, or fails for good, loses what was done since the last save."""
    told = Told(tmp_path)
    told.cycle(0)
    told.save(0, 25, "memory", "local")
    told.reach(0, 44)
    assert told.end(75) == "1 cycle, 0 incidents, 19 iterations lost"


def test_what_only_memory_holds_is_lost_with_the_job(tmp_path: Path) -> None:
    """The writer's memory ends with its agent; a copy in another node's memory does, too."""
    told = Told(tmp_path)
    told.cycle(0)
    told.save(0, 20, "memory", "global")
    told.save(0, 40, "memory", "replica")
    told.reach(0, 44)
    assert told.end(1) == "1 cycle, 0 incidents, 24 iterations lost"


def test_job_that_saved_before_it_left_lost_nothing(tmp_path: Path) -> None:
    """What was saved at the end is all that was done."""
    told = Told(tmp_path)
    told.cycle(0)
    told.save(0, 44, "local")
    told.reach(0, 44)
    assert told.end(75) == "1 cycle, 0 incidents, 0 iterations lost"


def test_job_that_loaded_and_saved_nothing_lost_what_it_did(tmp_path: Path) -> None:
    """A checkpoint of an earlier job holds what was done before it, and no more."""
    told = Told(tmp_path)
    told.cycle(0, restored=100, tier="global")
    told.reach(0, 107)
    assert told.end(143) == "1 cycle, 0 incidents, 7 iterations lost"


def test_finished_run_lost_nothing_at_its_end(tmp_path: Path) -> None:
    """A script that saves nothing of its last iterations and ends with 0 is done with them."""
    told = Told(tmp_path)
    told.cycle(0)
    told.reach(0, 44)
    assert told.end(0) == "1 cycle, 0 incidents, 0 iterations lost"


def test_cycle_that_never_trained_does_not_hide_the_loss(tmp_path: Path) -> None:
    """44 done, a cycle that dies as it starts, and one that goes on from 25: 19 are lost."""
    told = Told(tmp_path)
    told.cycle(0)
    told.save(0, 25, "local")
    told.reach(0, 44)
    told.cycle(1, begins=False)
    told.reach(1, 0)
    told.cycle(2, restored=25)
    told.reach(2, 60)
    assert told.end(0) == "3 cycles, 0 incidents, 19 iterations lost"


def test_restart_in_process_does_not_hide_the_loss(tmp_path: Path) -> None:
    """What a later call in the same cycle goes on from says nothing of the cycle before, and may lose more."""
    told = Told(tmp_path)
    told.cycle(0)
    told.reach(0, 44)
    told.cycle(1, restored=25)
    told.journal.write(EventKind.PROGRESS, cycle=1, rank=0, iteration=60)
    told.session(1, restored=55)
    told.reach(1, 80)
    assert told.end(0) == "2 cycles, 0 incidents, 24 iterations lost"


def test_run_that_begins_anew_lost_all(tmp_path: Path) -> None:
    """Without a checkpoint the next cycle begins at 0."""
    told = Told(tmp_path)
    told.cycle(0)
    told.reach(0, 44)
    told.cycle(1)
    told.reach(1, 60)
    assert told.end(0) == "2 cycles, 0 incidents, 44 iterations lost"


def test_trouble_that_nobody_judged_is_an_incident_too(tmp_path: Path) -> None:
    """A job that is told to leave while its cycle ends on a fault counts that fault."""
    told = Told(tmp_path)
    told.cycle(0)
    told.journal.write(EventKind.INCIDENT, cycle=0, rank=0, incident={"kind": "worker_died", "node": "a", "rank": 0})
    told.reach(0, 0)
    assert told.end(143) == "1 cycle, 1 incident, 0 iterations lost"
