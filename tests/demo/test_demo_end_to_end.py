"""The demo itself, on real processes, as its user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from outlast.chaos import FaultPlan, verify_fired
from outlast.demo.plan import least_iterations
from outlast.demo.stage import find_example, uninterrupted
from outlast.incidents import EventKind
from outlast.journal import read

# A test runner that a shell put into the background ignores Ctrl-C, and so would all that it starts.
HEAR_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMMAND = (sys.executable, "-c", HEAR_CTRL_C + "from outlast.cli.main import main; main()", "demo")


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start the demo with a folder of its own for temporary files, which also marks all its processes."""
    return subprocess.Popen(
        [*COMMAND, *options],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_running(folder: Path) -> list[psutil.Process]:
    def carries(pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"TMPDIR={folder}".encode() in environment.split(b"\0")

    return [process for process in psutil.process_iter() if carries(process.pid)]


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(440)
def test_no_fault_changes_a_bit(tmp_path: Path) -> None:
    """Each fault is noticed for what it was; weights, moments and losses are as without any.

    A slow rank is named within three reports, and nobody else in any.

    A NaN costs one more run of its step and no restart. A flipped bit is found in its tensor, and costs its node. The
    ranks of a node that is out come back from the copies on the other node, and nobody reads a byte of the global tier;
    where these copies are damaged, they are rejected, and the global tier has the state. Told to leave, all ranks do so
    after the same iteration, which the next job goes on from.
    """
    temporary, kept = tmp_path / "tmp", tmp_path / "kept"
    temporary.mkdir()
    demo = start(temporary, "--json", "--seed=3", f"--iterations={least_iterations(5)}", f"--keep={kept}")
    output, errors = demo.communicate(timeout=420)
    assert demo.returncode == 0, output + errors
    (line,) = output.splitlines()
    result = json.loads(line)
    assert result["bit_identical"] is True
    assert result["cycles"] == 7
    (nan,) = (one for one in result["incidents"] if not one["restarts"])
    assert (nan["fault"], nan["kind"], nan["finding"]) == ("NaN in an activation", "invalid_result", "transient")
    *first, last = (one for one in result["incidents"] if one["restarts"])
    assert {one["kind"] for one in first} == {"worker_died", "worker_hung", "node_lost", "invalid_result"}
    (flip,) = (one for one in first if one["kind"] == "invalid_result")
    assert (flip["fault"], flip["finding"]) == ("bit flip in a weight", "persistent")
    assert flip["named"] == flip["struck"]
    assert flip["struck"].startswith("model.blocks.")
    assert flip["rank"] in flip["victims"]
    assert flip["quarantined"] == [flip["node"]]
    for one in first:
        assert one["global_bytes_read"] == 0
        assert sum(one["tiers"].values()) == 4
        replicas = len(one["victims"]) if one["kind"] in ("node_lost", "invalid_result") else 0
        assert one["tiers"].get("replica", 0) == replicas
        assert (one["bytes_read"].get("replica", 0) > 0) == (replicas > 0)
    assert last["kind"] == "node_lost"
    assert last["copies_spoiled"] >= 2
    assert last["tiers"]["global"] >= 2
    assert last["copies_rejected"]["replica"] >= 2
    assert last["global_bytes_read"] > 0
    for one in result["incidents"]:
        assert 0 <= one["detected_after_s"] <= one["recovered_after_s"]
        assert one["restored_iteration"] > 0
        assert 0 <= one["redone_iterations"] <= 15
    assert [one["fault"] for one in result["incidents"] if one["fault"] is None] == []
    slowed = result["slowed"]
    assert slowed["fault"] == "slow forward of a rank"
    assert slowed["section"] == "forward"
    assert 1 <= slowed["num_reports"] <= 3
    assert (slowed["others_named"], slowed["restarts"]) == ([], 0)
    left = result["preemption"]
    assert (left["exit_code"], left["next_exit_code"], left["ranks_that_saved"]) == (75, 0, 4)
    assert left["iteration"] == left["resumed_at"] >= left["struck_at"]
    assert left["lost_iterations"] == 0
    assert 0 <= left["noticed_after_s"] <= left["left_after_s"] <= left["going_on_after_s"]
    events = list(read(kept / "with-faults" / "run"))
    assert sum(event.kind == EventKind.FAULT_SIMULATED for event in events) == 8
    path = kept / "with-faults" / "faults.toml"
    assert verify_fired(FaultPlan.load(path), kept / "with-faults" / "run") == []
    lost = {event.data["node"] for event in events if event.data.get("expected") == "node_lost"}
    assert len(lost) == 2
    assert lost.isdisjoint(os.listdir(kept / "with-faults" / "local"))
    assert not any(event.kind == EventKind.INCIDENT for event in read(kept / "undisturbed" / "run"))
    assert list(temporary.glob("outlast-demo-*")) == []
    assert left_running(temporary) == []


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_end_it_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    """No process and no file outlives it."""
    demo = start(tmp_path)
    try:
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("outlast-demo-*/undisturbed/run/journal/*rank-0.jsonl")):
            assert demo.poll() is None, demo.communicate()
            assert time.monotonic() < deadline, "the training did not start"
            time.sleep(0.02)
        demo.send_signal(number)
        demo.communicate(timeout=300)
        assert demo.returncode == code
        assert left_running(tmp_path) == []
        assert list(tmp_path.glob("outlast-demo-*")) == []
    finally:
        for process in left_running(tmp_path):
            process.kill()
        demo.wait(timeout=300)


@pytest.mark.slow
@pytest.mark.process
def test_a_reader_that_has_seen_enough_ends_it(tmp_path: Path) -> None:
    """After ``| head`` nothing is left and nothing is said; what was read has no colour and no cursor that moves."""
    demo = start(tmp_path)
    try:
        assert demo.stdout is not None
        first = demo.stdout.readline()
        demo.stdout.close()
        assert demo.stderr is not None
        assert demo.stderr.read() == ""
        assert demo.wait(timeout=250) == 128 + signal.SIGPIPE
        assert first == "Undisturbed: 2 nodes x 2 ranks\n"
        assert left_running(tmp_path) == []
        assert list(tmp_path.glob("outlast-demo-*")) == []
    finally:
        for process in left_running(tmp_path):
            process.kill()
        demo.wait(timeout=300)
        demo.communicate()


def test_a_second_signal_does_not_cut_the_end_short() -> None:
    """What is being ended is ended to the last process and file; the signal counts afterwards."""
    done = []

    def end() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        end()
    assert done == ["all"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--iterations=20",), "too few for 8 faults"),
        (("--keep={full}",), "is not empty"),
        (("--keep={file}",), "cannot be used"),
        (("--sed=1",), "--sed"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(tmp_path: Path, options: tuple[str, ...], part: str) -> None:
    """Exit code 2, and what to change."""
    (tmp_path / "file").write_text("")
    names = {"full": str(tmp_path), "file": str(tmp_path / "file")}
    demo = start(tmp_path, *(option.format(**names) for option in options))
    output, errors = demo.communicate(timeout=300)
    assert demo.returncode == 2
    assert output == ""
    assert part in errors
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.glob("outlast-demo-*")) == []


def test_it_trains_the_example_that_users_copy() -> None:
    """The script is the one in examples/, not a copy of it."""
    assert find_example() == Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
