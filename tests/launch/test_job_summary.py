"""The job's last line: counts from the journal."""

from __future__ import annotations

from pathlib import Path

from outlast.incidents import EventKind
from outlast.launch.job_summary import describe_job
from outlast.runtime.journal import Journal


def test_lost_iterations_are_those_done_twice(tmp_path: Path) -> None:
    """A cycle that reached 57, followed by one restored at 50, lost 7; another job's events do not count."""
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
    """The number of lost iterations of a script without a session is reported as unknown, never as 0."""
    journal = Journal(tmp_path, run_id="r", job="j", node="a", proc="agent")
    for cycle in (0, 1):
        journal.write(EventKind.CYCLE_STARTED, cycle=cycle, ranks=[0], pids=[1])
        journal.write(EventKind.CYCLE_ENDED, cycle=cycle, iterations={})
    journal.close()
    assert describe_job(tmp_path, "j") == "2 cycles, 0 incidents, lost iterations unknown (no session)"


class JobJournal:
    """The events of a job's agent and rank 0, in one file."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.journal = Journal(run_dir, run_id="r", job="j", node="a", proc="agent")

    def cycle(
        self, number: int, *, with_session: bool = True, restored: int | None = None, tier: str = "local"
    ) -> None:
        """Begin a cycle, and its session where ``with_session``."""
        self.journal.write(EventKind.CYCLE_STARTED, cycle=number, ranks=[0], pids=[1])
        if with_session:
            self.session(number, restored=restored, tier=tier)

    def session(self, number: int, *, restored: int | None = None, tier: str = "local") -> None:
        self.journal.write(EventKind.SESSION_STARTED, cycle=number, rank=0)
        if restored is not None:
            self.journal.write(EventKind.RESTORED, cycle=number, rank=0, iteration=restored, tier=tier)

    def save(self, number: int, iteration: int, *tiers: str) -> None:
        self.journal.write(EventKind.SAVE_COMMITTED, cycle=number, rank=0, iteration=iteration, tiers=list(tiers))

    def reach(self, number: int, iteration: int) -> None:
        """End a cycle at an iteration."""
        self.journal.write(EventKind.CYCLE_ENDED, cycle=number, iterations={"0": iteration}, reason="it died")

    def end(self, code: int) -> str:
        """End the job, and return its summary."""
        self.journal.write(EventKind.JOB_ENDED, exit_code=code, reason="so it is")
        self.journal.close()
        return describe_job(self.run_dir, "j")


def test_unsaved_iterations_of_a_preempted_job_are_lost(tmp_path: Path) -> None:
    """A job that is preempted and saves nothing, or fails finally, loses the iterations since the last checkpoint."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.save(0, 25, "memory", "local")
    job_journal.reach(0, 44)
    assert job_journal.end(75) == "1 cycle, 0 incidents, 19 iterations lost"


def test_checkpoints_in_memory_are_lost_with_the_job(tmp_path: Path) -> None:
    """Checkpoints in the writer's memory, also of another node, end with the job."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.save(0, 20, "memory", "global")
    job_journal.save(0, 40, "memory", "replica")
    job_journal.reach(0, 44)
    assert job_journal.end(1) == "1 cycle, 0 incidents, 24 iterations lost"


def test_a_job_that_saved_before_its_exit_lost_nothing(tmp_path: Path) -> None:
    """A job whose last iteration is in a checkpoint lost none."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.save(0, 44, "local")
    job_journal.reach(0, 44)
    assert job_journal.end(75) == "1 cycle, 0 incidents, 0 iterations lost"


def test_a_job_without_a_save_lost_its_own_iterations(tmp_path: Path) -> None:
    """A job that loaded a checkpoint and saved none lost the iterations since the load."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0, restored=100, tier="global")
    job_journal.reach(0, 107)
    assert job_journal.end(143) == "1 cycle, 0 incidents, 7 iterations lost"


def test_a_finished_run_lost_nothing_at_its_end(tmp_path: Path) -> None:
    """The last iterations of a script that exits with 0 do not count as lost, although no checkpoint has them."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.reach(0, 44)
    assert job_journal.end(0) == "1 cycle, 0 incidents, 0 iterations lost"


def test_a_loss_is_counted_across_an_empty_cycle(tmp_path: Path) -> None:
    """With 44 iterations done, a cycle that dies at its start and one that continues from 25, 19 iterations are
    lost."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.save(0, 25, "local")
    job_journal.reach(0, 44)
    job_journal.cycle(1, with_session=False)
    job_journal.reach(1, 0)
    job_journal.cycle(2, restored=25)
    job_journal.reach(2, 60)
    assert job_journal.end(0) == "3 cycles, 0 incidents, 19 iterations lost"


def test_a_loss_is_counted_across_an_in_process_restart(tmp_path: Path) -> None:
    """The iteration from which a later call in the same cycle continues does not hide the loss of the cycle before, and
    adds its own."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.reach(0, 44)
    job_journal.cycle(1, restored=25)
    job_journal.journal.write(EventKind.PROGRESS, cycle=1, rank=0, iteration=60)
    job_journal.session(1, restored=55)
    job_journal.reach(1, 80)
    assert job_journal.end(0) == "2 cycles, 0 incidents, 24 iterations lost"


def test_a_restart_from_0_lost_all_iterations(tmp_path: Path) -> None:
    """Without a checkpoint the next cycle begins at 0."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.reach(0, 44)
    job_journal.cycle(1)
    job_journal.reach(1, 60)
    assert job_journal.end(0) == "2 cycles, 0 incidents, 44 iterations lost"


def test_an_incident_without_a_decision_is_counted(tmp_path: Path) -> None:
    """A job that is preempted while its cycle ends with a fault counts that fault."""
    job_journal = JobJournal(tmp_path)
    job_journal.cycle(0)
    job_journal.journal.write(
        EventKind.INCIDENT, cycle=0, rank=0, incident={"kind": "worker_died", "node": "a", "rank": 0}
    )
    job_journal.reach(0, 0)
    assert job_journal.end(143) == "1 cycle, 1 incident, 0 iterations lost"
