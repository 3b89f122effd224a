"""A run directory belongs to one live job: a second job is rejected before it begins, and a dead job's directory is
taken over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from outlast.errors import ConfigError, ExitReason
from outlast.incidents import EventKind
from outlast.launch.options import parse_options
from outlast.launch.run import may_write, own_run_directory
from outlast.policy.lease import LeaseOwner
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.lease import FolderRecords, Lease, decode_owner, encode_owner
from outlast.runtime.processes import this_process
from outlast.status.evidence import gather
from outlast.testing import Cluster

pytestmark = [pytest.mark.process]
PATIENCE_S = 150.0
COMMAND = [sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "run"]

SCRIPT = """
import os, sys, time
import torch
import outlast

folder, total, wait_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
checkpoint = outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=2, async_save=False)
run = outlast.init(outlast.Config(checkpoint=checkpoint, seed=7))
state = {"weight": torch.zeros(10)}
for iteration in run.steps(state, total=total):
    state["weight"] += torch.rand(10)
    if iteration == wait_at:
        print("waits", flush=True)
        while not os.path.exists(folder + "/go"):
            time.sleep(0.01)
print("finished with", state["weight"].tolist(), flush=True)
"""


def _script(folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


def _cluster(folder: Path, *args: str, run: str = "run") -> Cluster:
    return Cluster(_script(folder), str(folder), *args, run_dir=folder / run, num_nodes=1, nproc_per_node=1)


def _run(*options: str) -> tuple[int, str]:
    """Run `outlast run` to its end; return exit code and output."""
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, done.stdout + done.stderr


def _content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "owner"
    }


@pytest.mark.extended
@pytest.mark.slow
def test_second_launch_of_a_live_run_is_rejected(tmp_path: Path) -> None:
    """A second launch exits with 2 and one line, and changes no file; one with another run directory but the same
    checkpoint directory exits with 93. The result of the first is bit-identical to that of an undisturbed run."""
    with _cluster(tmp_path, "10", "5") as first:
        first.wait_for("waits", PATIENCE_S)
        before = _content(tmp_path / "run"), _content(tmp_path / "ckpt")
        script = str(_script(tmp_path))
        code, output = _run(f"--run-dir={tmp_path}/run", script, str(tmp_path), "10", "-1")
        assert code == ExitReason.BAD_INPUT, output
        (line,) = output.splitlines()
        assert line.startswith(f"outlast: run directory {tmp_path}/run is in use by run {first.run_id} (pid ")
        assert line.endswith("wait until that job has ended, or name another directory (--run-dir)")
        code, output = _run(f"--run-dir={tmp_path}/other", script, str(tmp_path), "10", "-1")
        assert code == ExitReason.NO_PROGRESS, output
        line = output.splitlines()[-1]
        assert "exit code 93: rank 0 failed: DirectoryRefused: " in line
        assert f"{tmp_path}/ckpt is in use by run run-" in line
        assert f"run directory {tmp_path}/run)" in line
        assert (_content(tmp_path / "run"), _content(tmp_path / "ckpt")) == before
        (tmp_path / "go").touch()
        assert first.wait(PATIENCE_S) == [0], first.tails()
        (line_with_result,) = [line for line in first.agent(0).output().splitlines() if "finished with" in line]
    torch.manual_seed(7)
    weight = torch.zeros(10)
    for _ in range(10):
        weight += torch.rand(10)
    assert json.loads(line_with_result.partition("finished with ")[2]) == weight.tolist()


@pytest.mark.extended
@pytest.mark.slow
def test_directories_of_a_killed_job_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new launch with the same run directory takes over both directories of the dead job, with one line each, and
    resumes from its checkpoint. A run with another name must request that explicitly."""
    with _cluster(tmp_path, "6", "5") as first:
        first.wait_for("waits", PATIENCE_S)
        first.agent(0).kill()
        first.assert_no_orphans(PATIENCE_S)
    (tmp_path / "go").touch()
    code, output = _run(f"--run-dir={tmp_path}/run", str(_script(tmp_path)), str(tmp_path), "6", "-1")
    assert code == 0, output
    for folder in ("run", "ckpt"):
        (line,) = [line for line in output.splitlines() if f"{tmp_path}/{folder} is taken over from run" in line]
        assert line.endswith("which has ended")
    assert "loaded iteration 4" in output
    assert "finished with" in output
    monkeypatch.chdir(tmp_path)
    arguments = (str(_script(tmp_path)), str(tmp_path), "6", "-1")
    code, output = _run("--rdzv-id=other", *arguments)
    assert code == ExitReason.NO_PROGRESS, output
    assert (
        f"{tmp_path}/ckpt holds what the run with directory {tmp_path}/run saved; this is the run with id other; "
        in (output)
    )
    assert "set checkpoint.resume_from_other_run = true (--resume-from-other-run), else" in output
    code, output = _run("--rdzv-id=other", "--resume-from-other-run", *arguments)
    assert code == 0, output
    assert "training resumes from there, since resume_from_other_run is on" in output


@pytest.mark.extended
@pytest.mark.slow
def test_killed_job_resumes_under_the_same_run_id(tmp_path: Path) -> None:
    """A run whose agent and ranks were killed resumes from its checkpoint when the same command, run id included, is
    given again."""
    with _cluster(tmp_path, "6", "5") as first:
        first.wait_for("waits", PATIENCE_S)
        first.agent(0).kill()
        first.assert_no_orphans(PATIENCE_S)
    (tmp_path / "go").touch()
    run_options = (f"--rdzv-id={first.run_id}", f"--run-dir={tmp_path}/run")
    code, output = _run(*run_options, str(_script(tmp_path)), str(tmp_path), "6", "-1")
    assert code == 0, output
    assert f"{tmp_path}/ckpt is taken over from run" in output
    assert "loaded iteration 4" in output
    assert "finished with" in output


@pytest.mark.slow
def test_job_ends_when_its_run_directory_is_taken_over(tmp_path: Path) -> None:
    """A job that finds its directory taken over, as after a stop, ends its workers, writes no file that the next job
    would read, and its last line identifies the other job. The exit code prevents a requeue."""
    script = tmp_path / "train.py"
    script.write_text("import time\nprint('trains now', flush=True)\ntime.sleep(1000)\n")
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as job:
        job.wait_for("trains now", PATIENCE_S)
        recovery_state = tmp_path / "run" / "ladder.json"
        before = recovery_state.read_bytes() if recovery_state.exists() else None
        other = LeaseOwner(token="other", process=this_process(), run="another")
        assert FolderRecords(tmp_path / "run").create(2, encode_owner(other))
        assert job.wait(PATIENCE_S) == [ExitReason.NO_PROGRESS], job.tails()
        job.assert_no_orphans(PATIENCE_S)
        last = job.agent(0).output().splitlines()[-1]
    assert "exit code 93: run directory " in last
    assert f"was taken over by run another (pid {os.getpid()} on " in last
    assert (recovery_state.read_bytes() if recovery_state.exists() else None) == before
    assert FolderRecords(tmp_path / "run").numbers() == [2]


@contextmanager
def _owner(*options: str) -> Iterator[Lease]:
    owner = own_run_directory(parse_options(options), Mailbox[object]())
    try:
        yield owner
    finally:
        owner.release()


def test_rejected_second_agent_does_not_write_the_journal(tmp_path: Path) -> None:
    """A second agent with the name of a live one exits with 2 and writes no event to the run's journal."""
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.02)\n"
    )
    with Cluster(script, str(tmp_path / "enough"), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, timeout_s=PATIENCE_S)
        before = [event.kind for event in cluster.events()]
        second = cluster.add_node("node-0")
        assert second.wait(timeout_s=PATIENCE_S) == ExitReason.BAD_INPUT, second.tail()
        assert "another agent of the name 'node-0' is alive" in second.output()
        assert [event.kind for event in cluster.events()] == before
        (tmp_path / "enough").touch()
        assert cluster.agents[0].wait(timeout_s=PATIENCE_S) == 0


@pytest.mark.slow
def test_late_agent_of_a_finished_job_runs_no_script(tmp_path: Path) -> None:
    """An agent that was still starting when the job of its run ended exits with that job's code: the script, which
    has no session, does not run again."""
    script, runs = tmp_path / "train.py", tmp_path / "runs"
    script.write_text("import sys\nopen(sys.argv[1], 'a').write('run\\n')\n")
    options = {"num_nodes": 1, "num_spares": 1, "num_started": 0, "nproc_per_node": 1}
    with Cluster(script, str(runs), run_dir=tmp_path / "run", **options) as cluster:  # type: ignore[arg-type]
        host, _, port = cluster.endpoint.partition(":")
        with socket.create_server((host, int(port))) as listener:
            listener.settimeout(PATIENCE_S)
            late = cluster.add_node("late")
            connection, _ = listener.accept()  # the agent probes the endpoint and waits for the response
            os.kill(late.pid, signal.SIGSTOP)
            connection.close()
        assert cluster.add_node("first").wait(timeout_s=PATIENCE_S) == 0
        os.kill(late.pid, signal.SIGCONT)
        assert late.wait(timeout_s=PATIENCE_S) == 0, late.tail()
        assert "ended while this agent was starting" in late.output()
        assert runs.read_text() == "run\n"


@pytest.mark.slow
def test_removed_run_directory_is_reported(tmp_path: Path) -> None:
    """If the run directory is emptied during a run, the agent reports it, `outlast status` identifies the run,
    training continues, and later events are recorded in a new journal."""
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.02)\n"
    )
    with Cluster(script, str(tmp_path / "enough"), run_dir=run_dir, num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, timeout_s=PATIENCE_S)
        for name in ("journal", "owner"):
            shutil.rmtree(run_dir / name)
        cluster.wait_for("was removed or emptied while this run uses it", timeout_s=PATIENCE_S)
        with pytest.raises(ConfigError, match=f"run {cluster.run_id} .* uses it.* removed or emptied"):
            gather(run_dir)
        (tmp_path / "enough").touch()
        assert cluster.wait(timeout_s=PATIENCE_S) == [0], cluster.tails()
        assert EventKind.JOB_ENDED in {event.kind for event in cluster.events()}


def test_job_rejected_before_its_start_leaves_no_files(tmp_path: Path) -> None:
    """After the withdrawal the run directory is empty, and the next job can take it."""
    options = parse_options([f"--run-dir={tmp_path}/run", str(_script(tmp_path))])
    owner = own_run_directory(options, Mailbox[object]())
    assert FolderRecords(tmp_path / "run").numbers() == [1]
    owner.withdraw()
    owner.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_file_or_link_in_place_of_a_folder_is_rejected(tmp_path: Path) -> None:
    """A pipe, a file or a link in place of the journal folder is rejected before the job starts, in one line with
    its path."""
    options = parse_options([f"--run-dir={tmp_path}/run", str(_script(tmp_path))])
    for make, kind in (
        (os.mkfifo, "a file"),
        (Path.touch, "a file"),
        (lambda at: at.symlink_to("/"), "a symbolic link"),
    ):
        for name in ("journal", "failures"):
            place = tmp_path / "run" / name
            make(place)
            with pytest.raises(ConfigError, match=f"{place}: it is {kind}, not a folder; remove it, or name another"):
                own_run_directory(options, Mailbox[object]())
            place.unlink()
    assert list((tmp_path / "run").iterdir()) == []


def test_agents_of_one_job_share_its_run_directory(tmp_path: Path) -> None:
    """Agents with the same endpoint and run id belong to one job; another id is another job. The agent that becomes
    host of the coordinator takes the lease over from the previous one, which continues."""
    script, run_dir = str(_script(tmp_path)), f"--run-dir={tmp_path}/run"
    common = ("--nnodes=2", "--rdzv-endpoint=10.0.0.1:29400", run_dir)
    with (
        _owner(*common, "--rdzv-id=a", "--node-name=x", script) as first,
        _owner(*common, "--rdzv-id=a", "--node-name=y", script) as second,
    ):
        with pytest.raises(ValueError, match=r"run directory .* is in use by run a"), _owner(*common, script):
            pass
        second.acquire(leads=True)
        assert FolderRecords(tmp_path / "run").numbers() == [2]
        assert may_write(second)
        assert not may_write(first)
        first.acquire(leads=True)
        assert may_write(first)
    with _owner(*common, "--rdzv-id=b", script):
        assert max(FolderRecords(tmp_path / "run").numbers()) == 4


@pytest.mark.slow
def test_job_keeps_its_lease_when_the_coordinator_is_lost(tmp_path: Path) -> None:
    """After the host of the coordinator is killed, the new host holds the lease of the run directory, and another
    job is still rejected."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\nprint('trains now', flush=True)\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)\n"
    )
    with Cluster(script, str(tmp_path / "go"), run_dir=tmp_path / "run", num_nodes=1, num_spares=1) as job:
        for text in ("trains now", "hosts the coordinator"):
            job.wait_for(text, PATIENCE_S)
        host = next(agent for agent in job.agents if "hosts the coordinator" in agent.output())
        other = next(agent for agent in job.agents if agent is not host)
        records = FolderRecords(tmp_path / "run")
        os.kill(host.pid, signal.SIGKILL)
        job.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED and event.node == other.name, PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S  # it may have trained since before it leads
        while (owner := decode_owner(records.read(max(records.numbers())))) is None or owner.process.pid != other.pid:
            assert time.monotonic() < until_s, owner
            time.sleep(0.05)
        code, output = _run(f"--run-dir={tmp_path}/run", str(script), str(tmp_path / "go"))
        assert code == ExitReason.BAD_INPUT, output
        (tmp_path / "go").touch()
        assert other.wait(PATIENCE_S) == 0, job.tails()
