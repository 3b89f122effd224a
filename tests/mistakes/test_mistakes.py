"""What a person sees of a mistake: one line that names it and the remedy, the right exit code, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outlast.incidents import EventKind
from outlast.testing import Cluster
from outlast.testing.ranks import TOKEN, end_processes, free_port, processes_with

pytestmark = [pytest.mark.process]

MAIN = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())")
OURS = re.compile(r"^\d\d:\d\d:\d\d\.\d\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) \[[^]]+\] ")

TRAIN = """
import sys, outlast, torch
folder, width, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
checkpoint = outlast.CheckpointConfig(directory=folder, save_interval=2)
with outlast.init(outlast.Config(checkpoint=checkpoint)) as run:
    model = torch.nn.Linear(width, width)
    for _ in run.steps({"model": model}, total=total):
        pass
print("trained")
"""
NEAR = """
import sys, outlast, torch
checkpoint = outlast.CheckpointConfig(local_directory=sys.argv[1], save_interval=2)
with outlast.init(outlast.Config(checkpoint=checkpoint)) as run:
    for _ in run.steps({"model": torch.nn.Linear(4, 4)}, total=int(sys.argv[2])):
        pass
"""
RAISES = """
import outlast, torch
def next_batch(iteration):
    if iteration == 3 and run.global_rank == 1:
        raise IndexError("token 50257 out of range")
with outlast.init() as run:
    for iteration in run.steps({"model": torch.nn.Linear(4, 4)}, total=6):
        next_batch(iteration)
"""
STOPS = """
import os, signal, outlast, torch
def next_batch(iteration):
    if iteration == 3 and run.global_rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
with outlast.init() as run:
    for iteration in run.steps({"model": torch.nn.Linear(4, 4)}, total=6):
        next_batch(iteration)
"""
PRINTS = """
import sys, time
for number in range(2000):
    print("line", number, "\\u00e9", flush=True)
sys.stderr.write("the end\\n")
"""


@dataclass(slots=True)
class Seen:
    """What a command printed, and how it ended."""

    code: int
    lines: list[str]
    """All lines, of both outputs."""
    ours: list[str] = field(init=False)
    """Those that outlast wrote."""

    def __post_init__(self) -> None:
        self.ours = [line for line in self.lines if OURS.match(line) or line.startswith("outlast: ")]

    def __str__(self) -> str:
        return "\n".join([f"exit code {self.code}", *self.lines])


class Shell:
    """Run outlast in a folder, as a person would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
        self.environment |= {TOKEN: uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start outlast with its outputs in one pipe."""
        return subprocess.Popen(
            [*MAIN, *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> Seen:
        """Run outlast to its end."""
        with self.start(*arguments, **environment) as process:
            output = process.communicate(timeout=240)[0]
        return Seen(process.returncode, output.splitlines())

    def train(self, code: str, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> Seen:
        """Run a script on two ranks, without restarts unless they are asked for."""
        (self.folder / "train.py").write_text(code)
        return self.run("run", "--nproc-per-node=2", *options, "train.py", *arguments, **environment)

    def assert_nothing_left(self) -> None:
        """Assert that no process outlives the command."""
        until_s = time.monotonic() + 60
        while left := processes_with(self.environment[TOKEN]):
            assert time.monotonic() < until_s, left
            time.sleep(0.05)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A folder with a script in it, and nothing left running afterwards."""
    shell = Shell(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    yield shell
    try:
        shell.assert_nothing_left()
    finally:
        end_processes(shell.environment[TOKEN])


REFUSED = {
    "no script": (["run"], ["train.py"]),
    "a script that is not there": (["run", "trian.py"], ["'trian.py' does not exist", "check its path"]),
    "an unknown option": (["run", "--nprocs-per-node=2", "train.py"], ["--nprocs-per-node", "--nproc-per-node"]),
    "an unknown ft option": (["run", "--ft-rank-section-timeout=step:1", "train.py"], ["rank-section-timeouts"]),
    "a value that is no timeout": (["run", "--ft-rank-section-timeouts=step:soon", "train.py"], ["soon"]),
    "no node": (["run", "--nnodes=0", "train.py"], ["--nnodes='0'", "4:5"]),
    "more nodes at least than at most": (["run", "--nnodes=5:4", "train.py"], ["--nnodes='5:4'"]),
    "no worker": (["run", "--nproc-per-node=0", "train.py"], ["--nproc-per-node=0", "at least 1"]),
    "workers that are no number": (["run", "--nproc-per-node=two", "train.py"], ["'two'", "gpu"]),
    "GPUs that are not there": (["run", "--nproc-per-node=gpu", "train.py"], ["--nproc-per-node=gpu"]),
    "negative restarts": (["run", "--max-restarts=-1", "train.py"], ["--max-restarts=-1"]),
    "negative restarts in all": (["run", "--max-restarts-total=-1", "train.py"], ["--max-restarts-total=-1"]),
    "another rendezvous": (["run", "--rdzv-backend=etcd", "train.py"], ["--rdzv-backend=etcd", "leave the option out"]),
    "a setting without value": (
        ["run", "--rdzv-conf=join_timeout", "train.py"],
        ["'join_timeout'", "name=value"],
    ),
    "a setting that is no number": (["run", "--rdzv-conf=join_timeout=x", "train.py"], ["'x'", "seconds"]),
    "a port that is none": (
        ["run", "--nnodes=2", "--rdzv-endpoint=localhost:http", "train.py"],
        ["'http'", "host:port"],
    ),
    "an endpoint without host": (["run", "--nnodes=2", "--rdzv-endpoint=:29400", "train.py"], ["names no host"]),
    "a host that is not known": (
        ["run", "--nnodes=2", "--rdzv-endpoint=no-such-host.invalid:29400", "train.py"],
        ["no-such-host.invalid", "check the name"],
    ),
    "fewer nodes than it may shrink to": (["run", "--nnodes=2", "--ft-min-nodes=3", "train.py"], ["3", "2 nodes"]),
    "a program that is not there": (["run", "--no-python", "no-such-program"], ["'no-such-program'", "path and mode"]),
    "a module and no python": (["run", "--no-python", "--module", "x"], ["contradict", "leave one out"]),
    "a config that is not there": (["run", "--config=none.toml", "train.py"], ["none.toml"]),
    "a config that is none": (["run", "--config=broken.toml", "train.py"], ["broken.toml"]),
    "a config with an unknown key": (["run", "--config=typo.toml", "train.py"], ["save_intervall", "save_interval"]),
    "a config with a wrong value": (["run", "--config=wrong.toml", "train.py"], ["save_interval"]),
    "a run directory that is a file": (["run", "--run-dir=train.py", "train.py"], ["--run-dir", "name another"]),
    "a run directory that cannot be made": (["run", "--run-dir=/proc/x/run", "train.py"], ["--run-dir", "writable"]),
    "a ladder that cannot be read": (["run", "--run-dir=torn", "train.py"], ["ladder.json cannot be used", "move it"]),
    "a level that is none": (["run", "--log-level=loud", "train.py"], ["--log-level=loud", "debug, info"]),
    "an unknown command": (["rnu", "train.py"], ["'rnu'", "run"]),
    "a checkpoint folder that is not there": (["ckpt", "ls", "nowhere"], ["nowhere"]),
    "a batch script of nothing": (["slurm", "script", "--nodes=2", "nowhere.py"], ["nowhere.py"]),
    "a status of nothing": (["status", "nowhere"], ["nowhere"]),
    "a status of a folder that is no run": (["status", "."], ["run"]),
    "an option of status that is none": (["status", "--jsn", "."], ["--json"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_in_one_line(shell: Shell, name: str) -> None:
    """Exit code 2, one line that names the mistake and what to do, no process, no run directory."""
    (shell.folder / "broken.toml").write_text("[checkpoint\n")
    (shell.folder / "typo.toml").write_text("[checkpoint]\ndirectory = 'c'\nsave_intervall = 3\n")
    (shell.folder / "wrong.toml").write_text("[checkpoint]\ndirectory = 'c'\nsave_interval = -3\n")
    (shell.folder / "torn").mkdir()
    (shell.folder / "torn" / "ladder.json").write_text('{"restarts_total": ')
    before = sorted(path.relative_to(shell.folder) for path in shell.folder.rglob("*"))
    arguments, named = REFUSED[name]
    seen = shell.run(*arguments)
    assert seen.code == 2, seen
    assert len(seen.lines) == 1, seen
    for text in named:
        assert text in seen.lines[0], seen
    assert "training_script" not in seen.lines[0]
    assert sorted(path.relative_to(shell.folder) for path in shell.folder.rglob("*")) == before


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """Have a program that is not ours answer at a port, and yield that."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.ExitStack() as connections, contextlib.suppress(OSError):  # until it is shut down
            while True:
                connection = connections.enter_context(server.accept()[0])
                if answer:
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with server:
            yield server.getsockname()[1]
            server.shutdown(socket.SHUT_RDWR)
    finally:
        thread.join()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["speaks", "is silent"])
def test_another_program_at_the_endpoint_is_named(shell: Shell, answer: bytes) -> None:
    """Where another program listens, speaking or silent, the run is refused within seconds instead of waiting."""
    with listening(answer) as port:
        seen = shell.run("run", "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "train.py")
    assert seen.code == 2, seen
    (line,) = seen.lines
    assert f"127.0.0.1:{port}" in line
    assert "give a free port" in line


@pytest.mark.slow
def test_a_missing_node_is_waited_for_aloud_and_not_for_ever(shell: Shell) -> None:
    """A node that waits says for how many, whom it has, and when it gives up; then it does, and says so."""
    options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=join_timeout=6", "--node-name=a"]
    seen = shell.run("run", *options, "train.py")
    assert seen.code == 1, seen
    assert re.search(r"waiting for 1 of 2 nodes \(have: a\); gives up in \d+ s$", "\n".join(seen.lines), re.MULTILINE)
    assert "1 of 2 slots stayed empty for 6 s" in seen.lines[-1]
    assert len(seen.ours) <= 10, seen


FAILED = {
    "a syntax error": ("x = (\n", (), "SyntaxError: '(' was never closed (train.py:1)"),
    "a module that is not there": ("import nosuchthing\n", (), "No module named 'nosuchthing' (train.py:1)"),
    "an argument that is missing": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', required=True)\np.parse_args()\n",
        (),
        "error: the following arguments are required: --lr",
    ),
    "a file that is not there": ("open('tokens.bin')\n", (), "No such file or directory: 'tokens.bin' (train.py:1)"),
    "a setting that is wrong": (
        "import outlast\noutlast.CheckpointConfig(directory='c', save_interval=-3)\n",
        (),
        "save_interval=-3 must be",
    ),
    "a config with an unknown key": ("import outlast\noutlast.init('typo.toml')\n", (), "save_intervall"),
    "a checkpoint directory that is a file": (TRAIN, ("train.py", "4", "4"), "directory=train.py cannot be used"),
    "a checkpoint directory that cannot be made": (TRAIN, ("/proc/x", "4", "4"), "directory=/proc/x cannot be used"),
    "a name that is not defined": ("import outlast\nwith outlast.init():\n    trian()\n", (), "'trian' is not defined"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (index % 3 > 0)) for index, name in enumerate(FAILED)]
)
def test_what_no_restart_can_mend_is_not_restarted(shell: Shell, name: str) -> None:
    """Where both ranks fail alike before the first step: one cycle, exit code 2, and the last line is the cause."""
    (shell.folder / "typo.toml").write_text("[checkpoint]\ndirectory = 'c'\nsave_intervall = 3\n")
    code, arguments, text = FAILED[name]
    seen = shell.train(code, *arguments)
    assert seen.code == 2, seen
    assert text in seen.lines[-1], seen
    assert "(1 cycle, " in seen.lines[-1], seen
    assert "a restart cannot help" in seen.lines[-1]
    assert len(seen.ours) <= 8, seen


@pytest.mark.extended
@pytest.mark.slow
def test_an_object_store_that_does_not_answer_is_named(shell: Shell) -> None:
    """A bucket at an address where nobody listens: both ranks report it, exit code 93, no restart."""
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    where = f"http://127.0.0.1:{free_port()}"
    code = TRAIN.replace("save_interval=2", "save_interval=2, restore_timeout=0")
    seen = shell.train(code, "s3://bucket/run", "4", "4", AWS_ENDPOINT_URL=where, **keys)
    assert seen.code == 93, seen
    assert "s3://bucket/run/run.json: EndpointConnectionError" in seen.lines[-1], seen
    assert "start again once it responds: nothing was changed" in seen.lines[-1], seen
    assert len(seen.lines) <= 10, seen


def test_a_disk_that_is_full_is_named(shell: Shell) -> None:
    """A checkpoint directory on a disk without room is refused before the first step."""
    disk = shell.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (disk / "full").write_bytes(bytes(60 * 1024))
        seen = shell.train(TRAIN, "disk/saved", "4", "4")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert seen.code == 2, seen
    assert "No space left on device" in seen.lines[-1], seen
    assert "directory=disk/saved" in seen.lines[-1], seen


def test_what_no_restart_can_mend_ends_all_nodes(tmp_path: Path) -> None:
    """Two nodes whose ranks all lack a module: one cycle, and both agents end with 2 and the cause."""
    (tmp_path / "train.py").write_text("import nosuchthing\n")
    with Cluster(tmp_path / "train.py", run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=2) as cluster:
        assert cluster.wait(timeout_s=240) == [2, 2], cluster.tails()
        assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0}
        for agent in cluster.agents:
            assert "No module named 'nosuchthing' (train.py:1)" in agent.output().splitlines()[-1]


def test_ranks_that_fail_alike_need_not_fail_at_once(tmp_path: Path) -> None:
    """One rank of a node has failed, another not yet, when the other node reports the same: it has its time still."""
    folder = tmp_path / "run"
    code = """
import os, pathlib, sys, time
kind = {"0": None, "1": '"cycle_ended"'}.get(os.environ["RANK"], '"worker_exited"')
while kind and not any(kind in one.read_text() for one in pathlib.Path(sys.argv[1]).iterdir()):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    time.sleep(0.5)  # in which the coordinator tells this node
import nosuchthing
"""
    (tmp_path / "train.py").write_text(code)
    journal = str(folder / "journal")
    with Cluster(tmp_path / "train.py", journal, run_dir=folder, num_nodes=2, nproc_per_node=2) as cluster:
        assert cluster.wait(timeout_s=240) == [2, 2], cluster.tails()
        assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0}


def test_a_rank_that_fails_as_the_other_finishes_is_no_success(shell: Shell) -> None:
    """Rank 1 lacks a module, which might be every rank's mistake; rank 0 ends with 0 meanwhile: the run has failed."""
    code = "import os, time\nif os.environ['RANK'] == '1':\n    import nosuchthing\ntime.sleep(1)\n"
    seen = shell.train(code, options=("--max-restarts=0",))
    assert seen.code == 1, seen
    assert "rank 1 failed: ModuleNotFoundError" in seen.lines[-1], seen


def test_a_checkpoint_of_another_model_is_said_once(shell: Shell) -> None:
    """The first tensor that does not fit, and how many more: a line a rank, exit code 2, the checkpoint untouched."""
    assert shell.train(TRAIN, "saved", "4", "2", options=("--run-dir=first",)).code == 0
    before = {path: path.read_bytes() for path in (shell.folder / "saved").rglob("*") if path.is_file()}
    seen = shell.train(TRAIN, "saved", "8", "4", options=("--run-dir=first2", *RESUME))
    assert seen.code == 2, seen
    assert "size mismatch for weight" in seen.lines[-1], seen
    assert len(seen.lines) <= 10, seen
    assert {path: data for path, data in before.items() if path.read_bytes() != data} == {}


def test_a_local_tier_of_another_world_size_is_named(shell: Shell) -> None:
    """What two ranks saved near them cannot be loaded by one: said with what to do, exit code 2."""
    assert shell.train(NEAR, "near", "2", options=("--run-dir=first",)).code == 0
    (shell.folder / "train.py").write_text(NEAR)
    seen = shell.run("run", "--nproc-per-node=1", "--run-dir=second", *RESUME, "train.py", "near", "4")
    assert seen.code == 2, seen
    assert "start with 2 ranks" in seen.lines[-1], seen
    assert len(seen.lines) <= 10, seen


def test_a_failed_training_ends_with_its_cause(shell: Shell) -> None:
    """One rank's exception among two: its type, text and line stand last, in journal and recovery policy, and in a
    file with its traceback and last output; ten lines of ours."""
    seen = shell.train(RAISES, options=("--max-restarts=0", "--run-dir=run"))
    assert seen.code == 1, seen
    cause = "rank 1 failed: IndexError: token 50257 out of range (train.py:5 in next_batch)"
    assert cause in seen.lines[-1], seen
    assert len(seen.ours) <= 10, seen
    assert "Traceback" in "\n".join(seen.lines)
    recovery_state = json.loads((shell.folder / "run" / "ladder.json").read_text())
    assert cause in recovery_state["history"][-1]["incident"]
    (path,) = (shell.folder / "run" / "failures").rglob("rank-1.txt")
    assert 'raise IndexError("token 50257 out of range")' in path.read_text()
    journal = "".join(one.read_text() for one in (shell.folder / "run" / "journal").iterdir())
    incidents = [json.loads(line) for line in journal.splitlines() if '"kind":"incident"' in line]
    assert {one["rank"] for one in incidents if one["data"]["incident"]["kind"] == "worker_failed"} == {1}


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_everywhere(shell: Shell) -> None:
    """Where rank 1 is stopped and rank 0 waits for it, incident, cycle's end, decision and last line say rank 1, and
    its stack in the run directory begins with the script's own line."""
    options = ("--max-restarts=0", "--run-dir=run", "--ft-rank-section-timeouts=step:3")
    seen = shell.train(STOPS, options=options)
    assert seen.code == 1, seen
    assert "rank 1 on node" in seen.lines[-1], seen
    assert "hangs in section 'step' at iteration 3" in seen.lines[-1], seen
    journal = "".join(one.read_text() for one in (shell.folder / "run" / "journal").iterdir())
    events = [json.loads(line) for line in journal.splitlines()]
    told = {one["kind"]: one for one in events if one["kind"] in ("incident", "verdict", "cycle_ended")}
    assert told["incident"]["data"]["incident"]["rank"] == 1
    assert told["verdict"]["data"]["incident"]["rank"] == 1
    assert told["cycle_ended"]["data"]["reason"].startswith("rank 1 on node")
    stack = (shell.folder / "run" / "stacks" / "cycle-0" / "rank-1.txt").read_text()
    first = stack.partition("innermost line first:\n")[2].splitlines()[0]
    assert "train.py" in first
    assert "next_batch" in first
    assert "outlast-" not in stack


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import ctypes\nctypes.string_at(0)\n", "was ended by SIGSEGV: Segmentation fault (train.py:2)"),
        ("import os\nos.kill(os.getpid(), 9)\n", "was ended by SIGKILL"),
        ("import os\nprint('out of licences', flush=True)\nos._exit(3)\n", "the last output was 'out of licences'"),
        ("raise SystemExit('the cluster is closed')\n", "failed with exit code 1: the cluster is closed (train.py:1)"),
    ],
    ids=["segfault", "SIGKILL", "_exit", "a message"],
)
def test_a_sudden_end_is_named_by_what_is_left_of_it(shell: Shell, code: str, text: str) -> None:
    """A fatal signal, an exit without a word: the last line says what is known."""
    seen = shell.train(code, options=("--max-restarts=0",))
    assert seen.code == 1, seen
    assert text in seen.lines[-1], seen
    assert len(seen.ours) <= 10, seen


def test_a_reader_that_leaves_does_not_end_a_training(shell: Shell) -> None:
    """With ``outlast run ... | head`` the script goes on printing to nobody, and the run ends with 0."""
    (shell.folder / "train.py").write_text(PRINTS)
    with shell.start("run", "--nproc-per-node=2", "--run-dir=run", "train.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=240) == 0
    recovery_state = json.loads((shell.folder / "run" / "ladder.json").read_text())
    assert recovery_state["restarts_total"] == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(
            {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""},
            marks=pytest.mark.slow,  # processes with these variables cannot be forked
        ),
        {"TERM": "dumb", "NO_COLOR": "1"},
        {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"},
        {"TMPDIR": "/nonexistent"},
    ],
    ids=["ASCII", "dumb terminal", "no home", "no folder for temporary files"],
)
def test_poor_surroundings_do_no_harm(shell: Shell, environment: dict[str, str]) -> None:
    """Whatever locale, terminal, home or temporary folder there is, a healthy run trains, in plain lines."""
    seen = shell.train(TRAIN, "saved", "4", "4", **environment)
    assert seen.code == 0, seen
    assert seen.lines.count("trained") == 2, seen
    assert not any("\x1b" in line or "\r" in line for line in seen.lines), seen


@pytest.mark.extended
@pytest.mark.slow
def test_a_user_without_rights_trains_and_is_told_what_cannot_be_written(shell: Shell) -> None:
    """As nobody, without any privilege: a run trains, and a directory that may not be written to is named, with 2."""
    nobody = ("unshare", "--user")
    if subprocess.run([*nobody, "true"], check=False).returncode:
        pytest.skip("no user namespace can be made here")
    (shell.folder / "train.py").write_text(TRAIN)
    closed = shell.folder / "closed"
    closed.mkdir(mode=0o555)
    for folder, code in (("saved", 0), ("closed/saved", 2)):
        arguments = ["run", "--nproc-per-node=2", f"--run-dir=run-{code}", "train.py", folder, "4", "4"]
        done = subprocess.run(
            [*nobody, *MAIN, *arguments],
            cwd=shell.folder,
            env={**shell.environment, "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        seen = Seen(done.returncode, (done.stdout + done.stderr).splitlines())
        assert seen.code == code, seen
    assert "directory=closed/saved cannot be used" in seen.lines[-1], seen
    assert "Permission denied" in seen.lines[-1], seen
    assert len(seen.ours) <= 10, seen


def test_the_same_run_twice_at_once_is_refused(shell: Shell) -> None:
    """A second run in the run directory of a living one: one line, exit code 2; the first one trains to its end."""
    (shell.folder / "train.py").write_text(
        "import pathlib, time, sys\nprint('in the script', flush=True)\n"
        "until = time.monotonic() + 200\n"
        "while not pathlib.Path('go').exists() and time.monotonic() < until:\n    time.sleep(0.02)\n"
    )
    with shell.start("run", "--run-dir=run", "train.py") as first:
        assert first.stdout is not None
        assert any("in the script" in line for line in first.stdout)
        seen = shell.run("run", "--run-dir=run", "train.py")
        (shell.folder / "go").touch()
        output = first.communicate(timeout=240)[0]
    assert first.returncode == 0, output
    assert seen.code == 2, seen
    assert len(seen.lines) == 1, seen
    assert "is in use by" in seen.lines[0]
    assert f"pid {first.pid}" in seen.lines[0]


def signal_when(process: subprocess.Popen[str], is_time: Callable[[str], bool]) -> list[str]:
    """Send SIGINT once a line is there for which it is time; return all lines."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if is_time(line):
            process.send_signal(2)
            break
    return [*lines, *process.communicate(timeout=240)[0].splitlines()]


@pytest.mark.parametrize("moment", range(10))
def test_ctrl_c_ends_a_start_without_a_traceback(shell: Shell, moment: int) -> None:
    """At each of ten moments of the start, SIGINT ends the command with 130 and leaves nothing."""
    (shell.folder / "train.py").write_text("import time\nprint('in the script', flush=True)\ntime.sleep(600)\n")
    options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}"] if moment % 2 else []
    debug = ("--log-level=debug",)
    with shell.start("run", *options, *debug, "train.py") as process:
        if moment < 6:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            time.sleep(0.05 * moment**2)  # whichever moment it is, what follows holds
            process.send_signal(2)
            lines += process.communicate(timeout=240)[0].splitlines()
        else:
            mark = "hosts the coordinator" if moment % 2 else "in the script"
            lines = signal_when(process, lambda line: mark in line)
    seen = Seen(process.returncode, lines)
    assert seen.code in (130, -2), seen
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in lines if "train.py" not in line), seen


RESUME: tuple[str, ...] = ("--resume-from-other-run",)
"""What asks for going on with another run's checkpoints."""
