"""Told to leave, all ranks stop after the same iteration, leave a whole checkpoint, and are gone in time."""

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
    """Return the newest checkpoint; all that there are have every byte right."""
    iterations = []
    for found in look_into(str(tmp_path / "ckpt")).found:
        entry = verify(found, num_threads=1).entry
        assert entry.valid, entry
        assert not entry.problems
        iterations.append(entry.iteration)
    return max(iterations)


def _restored(tmp_path: Path, world_size: int) -> int:
    """Return at which iteration the next start goes on."""
    with Ranks(_script(tmp_path), str(tmp_path), "look", "30", world_size=world_size) as ranks:
        codes, outputs = ranks.end(120)
    assert codes == [0] * world_size, outputs
    (iteration,) = {int(output.split("restored ", 1)[1].split()[0]) for output in outputs}
    return iteration


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("what", "world_size"), [pytest.param("c", 4, marks=pytest.mark.campaign), ("torch", 2)])
def test_a_signal_to_one_rank_in_c_stops_all_after_the_same_iteration(
    tmp_path: Path, what: str, world_size: int
) -> None:
    """All main threads sit in C; the signal is noticed meanwhile, and one whole checkpoint is what all leave behind."""
    told = world_size - 1
    with Ranks(_script(tmp_path), str(tmp_path), what, "120", world_size=world_size) as ranks:
        for rank in range(world_size):
            ranks.wait_for_line(rank, "running")
        told_ns = clock.now_ns()
        ranks.signal(told, signal.SIGTERM)
        codes, outputs = ranks.end(120)
    assert codes == [75] * world_size, outputs
    (notice,) = _events(tmp_path, EventKind.NOTICE)
    print(f"noticed after {(notice.mono_ns - told_ns) / 1e6:.1f} ms")
    assert (notice.rank, notice.data["source"], notice.data["signal"]) == (told, "signal", 15)
    ends = _events(tmp_path, EventKind.SESSION_ENDED)
    assert [event.data["exit_code"] for event in ends] == [75] * world_size
    assert notice.mono_ns < min(event.mono_ns for event in ends)
    (iteration,) = {event.iteration for event in ends}
    assert _newest_whole(tmp_path) == iteration
    assert "Received signal 15, initiating graceful stop" in outputs[told]
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
def test_a_deadline_shorter_than_the_save_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    """The save never ends; the ranks do, with 75, say what is lost, and the next start has the earlier checkpoint."""
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
def test_a_rank_that_never_comes_back_is_gone_by_the_deadline(tmp_path: Path) -> None:
    """One rank stays in a C call; it, and the rank that waits for it, still end by the deadline, with 75."""
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
def test_sigusr1_leaves_too_and_others_only_if_named(tmp_path: Path, number: int, expected: int) -> None:
    """SIGUSR1, which schedulers are often told to send, is listened to by default; SIGUSR2 does what it did."""
    with Ranks(_script(tmp_path), str(tmp_path), "train", "60") as ranks:
        ranks.wait_for_line(0, "running")
        ranks.signal(0, number)
        codes, outputs = ranks.end(120)
    assert codes == [expected], outputs


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_the_end_of_slurms_time_limit_is_a_notice(tmp_path: Path) -> None:
    """Without any signal the run saves and leaves before the limit, and says that this was why."""
    with Ranks(_script(tmp_path), str(tmp_path), "limit", "600", world_size=2) as ranks:
        codes, outputs = ranks.end(120)
    assert codes == [75, 75], outputs
    notices = _events(tmp_path, EventKind.NOTICE)
    assert {notice.data["source"] for notice in notices} == {"time_limit"}
    assert all(notice.data["deadline_s"] <= 5 for notice in notices)
    assert any("the job's time limit ends in" in output for output in outputs), outputs  # by whoever saw it first


@pytest.mark.process
def test_a_file_seen_by_one_rank_stops_all(tmp_path: Path) -> None:
    """One rank of the node looks for the file; all leave with one checkpoint."""
    leave = tmp_path / "leave"
    with Ranks(_script(tmp_path), str(tmp_path), "train", "60", f"notice_file={leave}", world_size=2) as ranks:
        ranks.wait_for_line(1, "running")
        leave.write_text("spot")
        codes, outputs = ranks.end(120)
    assert codes == [75, 75], outputs
    (notice,) = _events(tmp_path, EventKind.NOTICE)
    assert (notice.rank, notice.data["source"]) == (0, "file")
    assert "leave is there: spot" in outputs[0]
    (iteration,) = {event.iteration for event in _events(tmp_path, EventKind.SESSION_ENDED)}
    assert _newest_whole(tmp_path) == iteration


@pytest.mark.process
def test_a_file_from_before_the_job_stops_nothing(tmp_path: Path) -> None:
    """A notice file that an earlier job left is reported once and ignored until it is written again."""
    leave, new = tmp_path / "leave", tmp_path / "new"
    leave.symlink_to(Path(sys.executable).resolve())  # a file that is older than this job
    with Ranks(_script(tmp_path), str(tmp_path), "train", "60", f"notice_file={leave}", world_size=2) as ranks:
        ranks.wait_for_line(0, "was there")
        ranks.wait_for_line(1, "running")
        new.write_text("new")
        new.replace(leave)
        codes, outputs = ranks.end(120)
    assert codes == [75, 75], outputs
    assert outputs[0].count("before the job started, so it is ignored") == 1
    assert "leave is there: new" in outputs[0]
