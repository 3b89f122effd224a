"""What ``outlast status`` reads of a run directory: enough and no more, in any state of it, without writing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.policy.recovery_policy import RecoveryState
from outlast.runtime.journal import Journal
from outlast.runtime.processes import describe_self
from outlast.status import evidence
from outlast.status.evidence import gather
from outlast.status.facts import judge
from outlast.status.report import RunState, StatusReport

OTHER_USER = 65534


def open_journal(run_dir: Path, proc: str, job: str = "job-1", node: str = "a") -> Journal:
    return Journal(run_dir, run_id="r", job=job, node=node, proc=proc)


def write_job(run_dir: Path, job: str = "job-1", *, num_steps: int = 3, started_later: int = 0) -> None:
    """Write a job of one node and one rank; its agent is this process, or an earlier process with the same pid."""
    agent = open_journal(run_dir, "agent", job)
    own_process = describe_self()
    own_process["pid_started"] += started_later
    agent.write(EventKind.JOB_STARTED, command=["train.py"], num_nodes=1, nproc_per_node=1, **own_process)
    agent.write(EventKind.CYCLE_STARTED, cycle=0, node_rank=0, ranks=[0], pids=[1], world_size=1)
    agent.close()
    rank = open_journal(run_dir, "rank-0", job)
    for iteration in range(1, num_steps + 1):
        rank.write(EventKind.PROGRESS, cycle=0, rank=0, iteration=iteration)
    rank.close()


def report_of(run_dir: Path) -> StatusReport:
    found = gather(run_dir)
    assert found.view.newest is not None
    return judge(found, found.view.newest.wall_ns)


def test_a_job_with_a_live_agent_is_running(tmp_path: Path) -> None:
    """The agent in the journal is identified by its pid and its start time."""
    write_job(tmp_path)
    report = report_of(tmp_path)
    assert (report.state, report.iteration, report.sources) == (RunState.RUNNING, 3, ["journal"])


def test_a_job_without_its_agent_has_no_process(tmp_path: Path) -> None:
    """An agent whose pid now belongs to another process counts as ended."""
    write_job(tmp_path, started_later=-1)
    assert report_of(tmp_path).state == RunState.NO_PROCESS


def test_the_newest_job_is_reported(tmp_path: Path) -> None:
    """Of several jobs in a run directory the report is about the one that began last, whatever the file times."""
    for number in range(3):
        write_job(tmp_path, f"job-{9 - number}", num_steps=number + 1)
    os.utime(tmp_path / "journal" / "job-9-a-agent.jsonl")
    report = report_of(tmp_path)
    assert (report.job, report.iteration) == ("job-7", 3)


def test_jobs_with_a_common_name_prefix_are_kept_apart(tmp_path: Path) -> None:
    """Files are selected by the job's name, and events by the job in each event."""
    write_job(tmp_path, "1234-a", num_steps=50)
    write_job(tmp_path, "1234", num_steps=2)
    assert (report_of(tmp_path).job, report_of(tmp_path).iteration) == ("1234", 2)


def test_torn_lines_are_skipped(tmp_path: Path) -> None:
    """A torn line in the middle is reported; a torn last line may still be being written, and is ignored."""
    write_job(tmp_path)
    path = tmp_path / "journal" / "job-1-a-rank-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40] + b"\n" + lines[2] + lines[2][:30])
    report = report_of(tmp_path)
    assert report.iteration == 3
    assert report.problems == ["1 line of the journal is torn or unreadable"]


def test_binary_data_in_a_journal_is_skipped(tmp_path: Path) -> None:
    """A file that a disk has filled with zeros or noise is reported, and the other files are read."""
    write_job(tmp_path)
    (tmp_path / "journal" / "job-1-a-rank-1.jsonl").write_bytes(b"\0" * 5000 + b"\n" + bytes(range(256)) + b"\n")
    report = report_of(tmp_path)
    assert report.state == RunState.RUNNING
    assert "torn or unreadable" in report.problems[0]


def test_a_long_journal_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank's file with a month of progress events only the end is read; of the agent's file the beginning too."""
    for name, size in (("HEAD_BYTES", 600), ("MAIN_BYTES", 3000), ("RANK_MIN_BYTES", 2000), ("RANKS_BYTES", 2000)):
        monkeypatch.setattr(evidence, name, size)
    write_job(tmp_path, num_steps=2000)
    agent = open_journal(tmp_path, "agent")
    for number in range(100):
        agent.write(EventKind.WORKER_EXITED, cycle=0, rank=0, pid=number, exit_code=1)
    agent.close()
    found = gather(tmp_path)
    job = found.view.job("job-1")
    iterations = [event.iteration for _, event in job.cycles[0].done]
    assert iterations == list(range(iterations[0] or 0, 2001))
    assert 2 < len(iterations) < 20
    assert list(job.agents) == ["a"]
    assert job.counts.total() < 60
    assert report_of(tmp_path).iteration == 2000


def test_a_damaged_recovery_state_is_reported(tmp_path: Path) -> None:
    """Without a valid ladder.json the report lacks the budgets, and nothing else."""
    write_job(tmp_path)
    (tmp_path / "ladder.json").write_text("{")
    report = report_of(tmp_path)
    assert (report.state, report.budgets) == (RunState.RUNNING, None)
    assert report.problems[0].startswith("ladder.json cannot be used")
    assert gather(tmp_path).recovery_state is None
    (tmp_path / "ladder.json").write_text('{"restarts_total": 2, "history": [{"cycle": 0, "rung": 2, "reason": "x"}]}')
    assert isinstance(gather(tmp_path).recovery_state, RecoveryState), "a file of an earlier version"


def test_reading_changes_no_file(tmp_path: Path) -> None:
    """Reading changes no file, no directory, and no modification time."""
    write_job(tmp_path)

    def file_stats() -> dict[str, tuple[int, int, int]]:
        return {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ctime_ns)
            for path in (tmp_path, *tmp_path.rglob("*"))
        }

    before = file_stats()
    report_of(tmp_path)
    assert file_stats() == before


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user may read and only its owner may write."""
    folder = Path(tempfile.mkdtemp(prefix="outlast-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_another_user_reads_accessible_files(open_folder: Path) -> None:
    """A user who may only read gets the same report, and the files without read permission are listed."""
    write_job(open_folder)
    for path in open_folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # the owner makes it readable: the files of a run are private
    closed = open_folder / "journal" / "job-1-a-rank-0.jsonl"
    closed.chmod(0o600)
    os.seteuid(OTHER_USER)
    try:
        report = report_of(open_folder)
    finally:
        os.seteuid(0)
    assert report.state == RunState.RUNNING
    assert report.problems == [f"{closed} cannot be read: Permission denied"]
    (open_folder / "journal").chmod(0o700)
    os.seteuid(OTHER_USER)
    try:
        with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\); run this as the user who runs"):
            report_of(open_folder)
    finally:
        os.seteuid(0)


def test_invalid_run_directories_are_one_error_line(tmp_path: Path) -> None:
    """A missing path, a file, another folder, a folder of run directories, and a run directory without events are each
    one error line."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / "journal").mkdir(parents=True)
    write_job(tmp_path / "runs" / "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "noise" / "journal").mkdir(parents=True)
    (tmp_path / "noise" / "journal" / "x-agent.jsonl").write_text("noise\n")
    for name, words in {
        "missing": "there is no",
        "file": "is a file, not a run directory; give the --run-dir",
        "other": "is not a run directory, since it has no journal; give the --run-dir",
        "runs": f"holds 1 run directory; name one, such as {tmp_path / 'runs' / 'one'}",
        "empty": "is empty: no job has started",
        "noise": "holds no event; the job has not begun yet, or its files are damaged",
    }.items():
        with pytest.raises(ConfigError) as raised:
            gather(tmp_path / name)
        assert words in str(raised.value), name
        assert "\n" not in str(raised.value)
