"""`outlast run` with kernel faults: disks that hang, calls that a container must not make, and processes that cannot
be reaped."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from outlast.errors import ExitReason
from outlast.incidents import EventKind, IncidentKind
from outlast.journal import read
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

TRAIN = """
import sys
import torch, outlast
checkpoint = outlast.CheckpointConfig(directory=sys.argv[1] + "/global", save_interval=10)
with outlast.init(outlast.Config(checkpoint=checkpoint)) as run:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for iteration in run.steps({"model": model, "optimizer": optimizer}, total=20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print("trained", flush=True)
"""


def fill(fifo: Path) -> int:
    """Create a full FIFO; return a descriptor that keeps it full."""
    os.mkfifo(fifo)
    fd = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    for piece in (b"\n" * 4096, b"\n"):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, piece)
    return fd


@pytest.mark.extended
def test_hung_journals_do_not_stop_a_run(tmp_path: Path) -> None:
    """With journals on a hung disk, the agent, the coordinator and both ranks train, save, and exit with 0; each
    reports once that its journal waits, and what was not written."""
    (tmp_path / "train.py").write_text(TRAIN)
    folder = tmp_path / "run" / "journal"
    folder.mkdir(parents=True)
    procs = ("agent", "coordinator", "rank-0", "rank-1")
    held = [fill(folder / f"4711-node-0-{proc}.jsonl") for proc in procs]
    with Cluster(
        tmp_path / "train.py",
        str(tmp_path / "saved"),
        run_dir=tmp_path / "run",
        num_nodes=1,
        environment={"SLURM_JOB_ID": "4711"},
    ) as cluster:
        codes, output = cluster.wait(timeout_s=240), cluster.agent(0).output()
    for fd in held:
        os.close(fd)
    assert codes == [0], output
    assert output.count("trained") == 2, output
    for proc in procs:
        assert f"4711-node-0-{proc}.jsonl: the disk has not responded" in output, output
        assert f"4711-node-0-{proc}.jsonl: the disk does not respond" in output, output
    assert len(list((tmp_path / "saved" / "global").glob("*20*"))) >= 1


BEHIND_FILTER = """
import ctypes, os, platform, struct, sys
answer, numbers = int(sys.argv[1]), [424, 434, 319 if platform.machine() == "x86_64" else 279]
# Load the number of the call; where it is one of these, answer with an error; otherwise allow it.
program = [(0x20, 0, 0, 0)]
program += [(0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | answer)]
code = b"".join(struct.pack("HBBI", *one) for one in program)
buffer = ctypes.create_string_buffer(code)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(program), ctypes.addressof(buffer))), 0, 0) == 0
for call in (lambda: os.memfd_create("x"), lambda: os.pidfd_open(os.getpid())):
    try:
        call()
    except OSError as error:
        assert error.errno == answer
    else:
        raise AssertionError("the filter filters nothing")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.extended
@pytest.mark.parametrize("answer", [errno.EPERM, errno.ENOSYS])
def test_container_without_memfd_and_pidfd_trains(tmp_path: Path, answer: int) -> None:
    """If seccomp forbids memfd_create and pidfd_open, two ranks train, save and exit with 0, and nothing is left in
    /dev/shm."""
    (tmp_path / "train.py").write_text(TRAIN)
    before = set(os.listdir("/dev/shm"))
    options = ["--standalone", "--nproc-per-node=2", f"--run-dir={tmp_path / 'run'}"]
    script = [str(tmp_path / "train.py"), str(tmp_path / "saved")]
    command = [sys.executable, "-c", BEHIND_FILTER, str(answer), "-m", "outlast", "run", *options, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained") == 2
    assert "memory, global" in done.stderr  # the writer's shared memory works as well
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("outlast")}


MEETS = """
import os, pathlib, sys, time
if os.environ["OUTLAST_CYCLE"] == "0":
    while not pathlib.Path(sys.argv[1]).exists() or os.environ["RANK"] != "0":
        time.sleep(0.02)
    sys.exit(7)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
"""

TRACES = """
import ctypes, os, signal, sys
assert ctypes.CDLL(None, use_errno=True).ptrace(0x4206, int(sys.argv[1]), None, None) == 0, "PTRACE_SEIZE"
print("traces", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.extended
def test_spare_replaces_a_node_with_an_unkillable_worker(tmp_path: Path) -> None:
    """A worker that cannot be reaped, as in a stuck driver, does not keep the others waiting: after 30 s its node is
    reported with the worker's pid and state and exits, and a spare takes its slot."""
    (tmp_path / "train.py").write_text(MEETS)
    with Cluster(
        tmp_path / "train.py",
        str(tmp_path / "fail"),
        run_dir=tmp_path / "run",
        num_nodes=2,
        num_spares=1,
        nproc_per_node=1,
    ) as cluster:
        cluster.wait_for(
            lambda event: event.kind == EventKind.CYCLE_STARTED and 1 in event.data["ranks"], timeout_s=150
        )
        pid = cluster.worker_pid(1)
        with subprocess.Popen([sys.executable, "-c", TRACES, str(pid)], stdout=subprocess.PIPE) as tracer:
            try:
                assert tracer.stdout is not None
                assert tracer.stdout.readline() == b"traces\n"
                os.waitid(os.P_PID, tracer.pid, os.WSTOPPED | os.WNOWAIT)
                (tmp_path / "fail").touch()
                codes = cluster.wait(timeout_s=300)
            finally:
                tracer.kill()
        incidents = [event for event in cluster.events() if event.kind == EventKind.INCIDENT]
        output = cluster.tails()
    assert sorted(codes) == [0, 0, ExitReason.UNHEALTHY_NODE], output
    (summary,) = {
        event.data["incident"]["evidence"]["summary"]
        for event in incidents
        if event.data["incident"]["kind"] == IncidentKind.NODE_UNHEALTHY and event.proc == "agent"
    }
    assert f"rank 1, pid {pid} (state " in summary


LEAVES_ORPHANS = """
import os, subprocess, sys, time
from pathlib import Path
for _ in range(5):  # each leaves a child behind, which ends after its parent
    subprocess.run(["sh", "-c", "setsid sh -c 'read x < /dev/null; exit 3' & exit 0"], check=True)
deadline = time.monotonic() + 100
def zombies():
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and fields[1] == "1":
            found.append(path)
    return found
while zombies():
    assert time.monotonic() < deadline, zombies()
    time.sleep(0.02)
sys.exit(7 if os.environ["OUTLAST_CYCLE"] == "0" else 0)
"""


@pytest.mark.extended
def test_pid_1_of_a_container_reaps_orphans(tmp_path: Path) -> None:
    """With `outlast run` as pid 1, orphans do not stay as zombies; exit codes of the workers and of the job are
    unchanged."""
    (tmp_path / "train.py").write_text(LEAVES_ORPHANS)
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "outlast", "run", "--standalone"]
    command += ["--max-restarts=1", "--nproc-per-node=1", f"--run-dir={tmp_path / 'run'}", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    exits = [event.data["exit_code"] for event in read(tmp_path / "run") if event.kind == EventKind.WORKER_EXITED]
    assert exits == [7, 0]


@pytest.mark.extended
def test_pid_1_of_a_container_forwards_sigterm(tmp_path: Path) -> None:
    """SIGTERM to pid 1 shuts the run down as SIGTERM to the agent does, and the exit code is the agent's."""
    (tmp_path / "train.py").write_text("import time\nprint('runs', flush=True)\ntime.sleep(600)")
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "outlast", "run", "--standalone"]
    command += ["--nproc-per-node=1", f"--run-dir={tmp_path / 'run'}", str(tmp_path / "train.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as outside:
        try:
            assert outside.stdout is not None
            assert outside.stdout.readline() == "runs\n"
            (first,) = psutil.Process(outside.pid).children()
            first.send_signal(signal.SIGTERM)
            assert outside.wait(timeout=200) == 128 + signal.SIGTERM
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(outside.pid, signal.SIGKILL)


LISTS = """
import os, sys
held = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        held[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        pass  # the listing's own
print("held", sorted((fd, what) for fd, what in held.items() if fd > 2), flush=True)
"""


@pytest.mark.extended
@pytest.mark.cold
@pytest.mark.parametrize("options", [[], ["--no-warm-start"], ["--no-python"], ["--redirects=3"]])
def test_worker_inherits_no_foreign_descriptors(tmp_path: Path, options: list[str]) -> None:
    """In every start mode a worker inherits nothing of the fork server: a forked one has its input, output and the
    memory that outlast creates for it, another program only input and output."""
    (tmp_path / "train.py").write_text(LISTS)
    script = [sys.executable] if options == ["--no-python"] else []
    command = [sys.executable, "-m", "outlast", "run", "--standalone", "--nproc-per-node=1", *options]
    command += [f"--run-dir={tmp_path / 'run'}", *script, str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout + "".join(path.read_text() for path in (tmp_path / "run").rglob("stdout.log"))
    (line,) = [line for line in printed.splitlines() if "held" in line]
    held = [target for _, target in ast.literal_eval(line.partition("held ")[2])]
    own = {"/memfd:outlast-postmortem (deleted)", "/memfd:outlast-stacks (deleted)"}
    assert set(held) == (set() if options in (["--no-warm-start"], ["--no-python"]) else own), line
