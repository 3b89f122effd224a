"""After a preemption notice, all ranks stop after the same iteration, save a complete checkpoint, and exit in time."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import Ranks

from outlast import clock
from outlast.checkpoint.catalogue.listing import look_into, verify
from outlast.incidents import Event, EventKind
from outlast.journal import read

SCRIPT = """
import ctypes, os, sys, time
import torch
import outlast

folder, what, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
settings = dict(item.split("=") for item in sys.argv[4:])
torch.set_num_threads(1)
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)

def sit_in_c(seconds):  # unlike a sleep it does not return on a signal
    until = time.monotonic() + seconds
    libc.pthread_mutex_clocklock(mutex, time.CLOCK_MONOTONIC, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))

if what == "stuck":  # the thread that says so is to come before the last resort, however late it is
    from outlast.preemption.listener import LastResort
    LastResort.arm = lambda *_: None
if what == "limit":
    os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 15)
run = outlast.init(outlast.Config(
    checkpoint=outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=4),
    preemption=outlast.PreemptionConfig(shutdown_timeout=timeout_s, poll_interval=0.1, preempt_time=5, **settings),
    run_dir=folder + "/run",
))
state = {"model": torch.nn.Linear(2, 2), "steps": torch.zeros(1)}
begin = 0
for iteration in run.steps(state, total=100_000):
    assert int(state["steps"].item()) == iteration
    if iteration == 0 or what == "look":
        print("restored", iteration, flush=True)
    if what == "look":
        break
    state["steps"] += 1
    begin = begin or iteration + 1
    if iteration + 1 == begin + 5:
        print("running", iteration, flush=True)
        while what == "wait" and not os.path.exists(folder + "/go"):
            time.sleep(0.01)
    if iteration + 1 >= begin + 5:
        if what == "c":
            sit_in_c(2)
        elif what == "torch":
            torch.linalg.svdvals(torch.rand(700, 700))
        elif what == "stuck" and run.global_rank == 1:
            sit_in_c(600)
    time.sleep(0.002)
"""


def _script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def _events(tmp_path: Path, kind: EventKind) -> list[Event]:
    return [event for event in read(tmp_path / "run") if event.kind == kind]


def _newest_whole(tmp_path: Path) -> int:
    """Return the newest checkpoint, after a check that all checkpoints are valid."""
    iterations = []
    for found in look_into(str(tmp_path / "ckpt")).found:
        entry = verify(found, num_threads=1).entry
        assert entry.valid, entry
        assert not entry.problems
        iterations.append(entry.iteration)
    return max(iterations)


def _restored(tmp_path: Path, world_size: int) -> int:
    """Return the iteration at which the next start resumes."""
    with Ranks(_script(tmp_path), str(tmp_path), "look", "30", world_size=world_size) as ranks:
        codes, outputs = ranks.end(120)
    assert codes == [0] * world_size, outputs
    (iteration,) = {int(output.split("restored ", 1)[1].split()[0]) for output in outputs}
    return iteration


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("activity", "world_size"), [pytest.param("c", 4, marks=pytest.mark.campaign), ("torch", 2)])
def test_a_signal_to_one_rank_in_c_stops_all_ranks(tmp_path: Path, activity: str, world_size: int) -> None:
    """With all main threads in C code, the signal is detected, and all ranks stop after the same iteration with a
    complete checkpoint."""
    notified = world_size - 1
    with Ranks(_script(tmp_path), str(tmp_path), activity, "120", world_size=world_size) as ranks:
        for rank in range(world_size):
            ranks.wait_for_line(rank, "running")
        notified_ns = clock.now_ns()
        ranks.signal(notified, signal.SIGTERM)
        codes, outputs = ranks.end(120)
    assert codes == [75] * world_size, outputs
    (notice,) = _events(tmp_path, EventKind.NOTICE)
    print(f"noticed after {(notice.mono_ns - notified_ns) / 1e6:.1f} ms")
    assert (notice.rank, notice.data["source"], notice.data["signal"]) == (notified, "signal", 15)
    ends = _events(tmp_path, EventKind.SESSION_ENDED)
    assert [event.data["exit_code"] for event in ends] == [75] * world_size
    assert notice.mono_ns < min(event.mono_ns for event in ends)
    (iteration,) = {event.iteration for event in ends}
    assert _newest_whole(tmp_path) == iteration
    assert "Received signal 15, initiating graceful stop" in outputs[notified]
    assert f"stopping after iteration {iteration}, on all ranks, and saving a checkpoint" in outputs[0]
    assert f"iteration {iteration} is saved, nothing is lost; exiting with code 75" in outputs[0]


def _wait_for(tmp_path: Path, kind: EventKind, count: int) -> None:
    until_s = clock.now_s() + 120
    while len(_events(tmp_path, kind)) < count:
        assert clock.now_s() < until_s, f"no {kind} came"
        time.sleep(0.02)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_a_deadline_before_the_save_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    """If the save does not end, the ranks exit with 75 and report the lost iterations, and the next start has the
    earlier checkpoint."""
    with Ranks(_script(tmp_path), str(tmp_path), "wait", "8", world_size=2) as ranks:
        for rank in range(2):
            ranks.wait_for_line(rank, "running")
        _wait_for(tmp_path, EventKind.SAVE_COMMITTED, 2)
        writers = [child for rank in range(2) for child in psutil.Process(ranks.pid(rank)).children(recursive=True)]
        assert writers
        for writer in writers:
            writer.suspend()
        ranks.signal(1, signal.SIGTERM)
        _wait_for(tmp_path, EventKind.NOTICE, 1)
        (tmp_path / "go").touch()
        ranks.wait(120)
        for writer in writers:
            if writer.is_running():
                writer.resume()
        codes, outputs = ranks.end(120)
        assert not psutil.wait_procs(writers, timeout=300)[1]
    assert codes == [75, 75], outputs
    kept = _newest_whole(tmp_path)
    (ended,) = {event.iteration for event in _events(tmp_path, EventKind.SESSION_ENDED)}
    assert ended is not None
    assert 0 < kept < ended
    for output in outputs:
        newest = f"the newest checkpoint that survives the end of the job is iteration {kept}"
        assert re.search(rf"{newest}: iterations? ({kept + 1} to )?{ended} (is|are) lost", output), output
    assert _restored(tmp_path, 2) == kept


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_a_rank_stuck_in_c_exits_by_the_deadline(tmp_path: Path) -> None:
    """A rank that stays in a C call, and the rank that waits for it, exit by the deadline with 75."""
    with Ranks(_script(tmp_path), str(tmp_path), "stuck", "6", world_size=2) as ranks:
        for rank in range(2):
            ranks.wait_for_line(rank, "running")
        _wait_for(tmp_path, EventKind.SAVE_COMMITTED, 2)
        for rank in range(2):
            ranks.signal(rank, signal.SIGTERM)
        codes, outputs = ranks.end(120)
    assert codes == [75, 75], outputs
    assert "the main thread has not returned; exiting with code 75" in outputs[1]
    for output in outputs:
        assert re.search(r"survives the end of the job is iteration \d+: iterations? .* lost", output)
    assert _newest_whole(tmp_path) > 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGUSR1, 75), (signal.SIGUSR2, -signal.SIGUSR2)], ids=["usr1", "usr2"]
)
def test_sigusr1_is_a_preemption_notice_by_default(tmp_path: Path, number: int, expected: int) -> None:
    """SIGUSR1, which schedulers often send, is a preemption notice by default; SIGUSR2 keeps its effect."""
    with Ranks(_script(tmp_path), str(tmp_path), "train", "60") as ranks:
        ranks.wait_for_line(0, "running")
        ranks.signal(0, number)
        codes, outputs = ranks.end(120)
    assert codes == [expected], outputs


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_the_slurm_time_limit_is_a_preemption_notice(tmp_path: Path) -> None:
    """Without a signal the run saves and exits before the time limit, and logs the reason."""
    with Ranks(_script(tmp_path), str(tmp_path), "limit", "600", world_size=2) as ranks:
        codes, outputs = ranks.end(120)
    assert codes == [75, 75], outputs
    notices = _events(tmp_path, EventKind.NOTICE)
    assert {notice.data["source"] for notice in notices} == {"time_limit"}
    assert all(notice.data["deadline_s"] <= 5 for notice in notices)
    assert any("the job's time limit ends in" in output for output in outputs), (
        outputs
    )  # by the first rank that detects it


@pytest.mark.process
def test_a_notice_file_stops_all_ranks(tmp_path: Path) -> None:
    """One rank of the node checks for the file; all ranks exit with one checkpoint."""
    notice_file = tmp_path / "leave"
    with Ranks(_script(tmp_path), str(tmp_path), "train", "60", f"notice_file={notice_file}", world_size=2) as ranks:
        ranks.wait_for_line(1, "running")
        notice_file.write_text("spot")
        codes, outputs = ranks.end(120)
    assert codes == [75, 75], outputs
    (notice,) = _events(tmp_path, EventKind.NOTICE)
    assert (notice.rank, notice.data["source"]) == (0, "file")
    assert "leave is there: spot" in outputs[0]
    (iteration,) = {event.iteration for event in _events(tmp_path, EventKind.SESSION_ENDED)}
    assert _newest_whole(tmp_path) == iteration


@pytest.mark.process
def test_a_notice_file_older_than_the_job_is_ignored(tmp_path: Path) -> None:
    """A notice file of an earlier job is reported once and ignored until it is written again."""
    notice_file, new = tmp_path / "leave", tmp_path / "new"
    notice_file.symlink_to(Path(sys.executable).resolve())  # a file that is older than this job
    with Ranks(_script(tmp_path), str(tmp_path), "train", "60", f"notice_file={notice_file}", world_size=2) as ranks:
        ranks.wait_for_line(0, "was there")
        ranks.wait_for_line(1, "running")
        new.write_text("new")
        new.replace(notice_file)
        codes, outputs = ranks.end(120)
    assert codes == [75, 75], outputs
    assert outputs[0].count("before the job started, so it is ignored") == 1
    assert "leave is there: new" in outputs[0]
