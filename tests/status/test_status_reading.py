"""What is read of a run directory: enough and no more, whatever its state, and nothing is written."""

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

NOBODY = 65534


def open_journal(run_dir: Path, proc: str, job: str = "job-1", node: str = "a") -> Journal:
    return Journal(run_dir, run_id="r", job=job, node=node, proc=proc)


def write_job(run_dir: Path, job: str = "job-1", *, num_steps: int = 3, started_later: int = 0) -> None:
    """Write a job of one node and one rank; its agent is this process, or one that had its id before."""
    agent = open_journal(run_dir, "agent", job)
    itself = describe_self()
    itself["pid_started"] += started_later
    agent.write(EventKind.JOB_STARTED, command=["train.py"], num_nodes=1, nproc_per_node=1, **itself)
    agent.write(EventKind.CYCLE_STARTED, cycle=0, node_rank=0, ranks=[0], pids=[1], world_size=1)
    agent.close()
    rank = open_journal(run_dir, "rank-0", job)
    for iteration in range(1, num_steps + 1):
        rank.write(EventKind.PROGRESS, cycle=0, rank=0, iteration=iteration)
    rank.close()


def look(run_dir: Path) -> StatusReport:
    found = gather(run_dir)
    assert found.view.newest is not None
    return judge(found, found.view.newest.wall_ns)


def test_job_of_a_living_process_runs(tmp_path: Path) -> None:
    """The agent that the journal names is looked for by its id and its start."""
    write_job(tmp_path)
    report = look(tmp_path)
    assert (report.state, report.iteration, report.sources) == (RunState.RUNNING, 3, ["journal"])


def test_job_of_a_process_that_is_gone_is_dead(tmp_path: Path) -> None:
    """Also where its id was given to another process since."""
    write_job(tmp_path, started_later=-1)
    assert look(tmp_path).state == RunState.NO_PROCESS


def test_newest_job_is_told(tmp_path: Path) -> None:
    """Of several jobs in a run directory it is the last one that began, whatever the files' own times."""
    for number in range(3):
        write_job(tmp_path, f"job-{9 - number}", num_steps=number + 1)
    os.utime(tmp_path / "journal" / "job-9-a-agent.jsonl")
    report = look(tmp_path)
    assert (report.job, report.iteration) == ("job-7", 3)


def test_job_whose_name_begins_like_another_is_not_mixed_up(tmp_path: Path) -> None:
    """Files are found by the job's name, events by their own."""
    write_job(tmp_path, "1234-a", num_steps=50)
    write_job(tmp_path, "1234", num_steps=2)
    assert (look(tmp_path).job, look(tmp_path).iteration) == ("1234", 2)


def test_torn_lines_cost_only_themselves(tmp_path: Path) -> None:
    """A line in the middle that is torn is told; one at the end may just be written, and is passed over."""
    write_job(tmp_path)
    path = tmp_path / "journal" / "job-1-a-rank-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40] + b"\n" + lines[2] + lines[2][:30])
    report = look(tmp_path)
    assert report.iteration == 3
    assert report.problems == ["1 line of the journal is torn or unreadable"]


def test_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    """A file that a disk has filled with zeros or noise is told, and the rest is read."""
    write_job(tmp_path)
    (tmp_path / "journal" / "job-1-a-rank-1.jsonl").write_bytes(b"\0" * 5000 + b"\n" + bytes(range(256)) + b"\n")
    report = look(tmp_path)
    assert report.state == RunState.RUNNING
    assert "torn or unreadable" in report.problems[0]


def test_long_journal_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank's month of progress lines only the end is read, of the agent's file its beginning too."""
    for name, size in (("HEAD_BYTES", 600), ("MAIN_BYTES", 3000), ("RANK_MIN_BYTES", 2000), ("RANKS_BYTES", 2000)):
        monkeypatch.setattr(evidence, name, size)
    write_job(tmp_path, num_steps=2000)
    agent = open_journal(tmp_path, "agent")
    for number in range(100):
        agent.write(EventKind.WORKER_EXITED, cycle=0, rank=0, pid=number, exit_code=1)
    agent.close()
    found = gather(tmp_path)
    job = found.view.job("job-1")
    told = [event.iteration for _, event in job.cycles[0].done]
    assert told == list(range(told[0] or 0, 2001))
    assert 2 < len(told) < 20
    assert list(job.agents) == ["a"]
    assert job.counts.total() < 60
    assert look(tmp_path).iteration == 2000


def test_recovery_policy_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """A damaged ladder.json costs the budgets, and nothing else."""
    write_job(tmp_path)
    (tmp_path / "ladder.json").write_text("{")
    report = look(tmp_path)
    assert (report.state, report.budgets) == (RunState.RUNNING, None)
    assert report.problems[0].startswith("ladder.json cannot be used")
    assert gather(tmp_path).recovery_state is None
    (tmp_path / "ladder.json").write_text('{"restarts_total": 2, "history": [{"cycle": 0, "rung": 2, "reason": "x"}]}')
    assert isinstance(gather(tmp_path).recovery_state, RecoveryState), "a file of an earlier version"


def test_nothing_is_written(tmp_path: Path) -> None:
    """Looking changes no file, no directory, no time of either."""
    write_job(tmp_path)

    def everything() -> dict[str, tuple[int, int, int]]:
        return {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ctime_ns)
            for path in (tmp_path, *tmp_path.rglob("*"))
        }

    before = everything()
    look(tmp_path)
    assert everything() == before


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user may enter and read, and none but its owner may write."""
    folder = Path(tempfile.mkdtemp(prefix="outlast-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_reader_without_rights_reads_what_is_open(open_folder: Path) -> None:
    """Another user who may only read is told the same, and what is closed to it."""
    write_job(open_folder)
    for path in open_folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # its owner opens it to all: a run's files are its own
    closed = open_folder / "journal" / "job-1-a-rank-0.jsonl"
    closed.chmod(0o600)
    os.seteuid(NOBODY)
    try:
        report = look(open_folder)
    finally:
        os.seteuid(0)
    assert report.state == RunState.RUNNING
    assert report.problems == [f"{closed} cannot be read: Permission denied"]
    (open_folder / "journal").chmod(0o700)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\); run this as the user who runs"):
            look(open_folder)
    finally:
        os.seteuid(0)


def test_what_is_no_run_directory_is_told_in_one_line(tmp_path: Path) -> None:
    """A missing path, a file, another folder, one of run directories, and one in which nothing has begun."""
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
