"""User errors: one line that contains the error and the remedy, the correct exit code, and no remaining process."""

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
OUTLAST_LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) \[[^]]+\] ")

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
TRAIN_LOCAL = """
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
class Result:
    """The output and exit code of a command."""

    code: int
    lines: list[str]
    """All lines of both outputs."""
    outlast_lines: list[str] = field(init=False)
    """The lines that outlast wrote."""

    def __post_init__(self) -> None:
        self.outlast_lines = [
            line for line in self.lines if OUTLAST_LOG_LINE.match(line) or line.startswith("outlast: ")
        ]

    def __str__(self) -> str:
        return "\n".join([f"exit code {self.code}", *self.lines])


class Shell:
    """Run outlast in a folder, as a user would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
        self.environment |= {TOKEN: uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start outlast with both outputs in one pipe."""
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

    def run(self, *arguments: str, **environment: str) -> Result:
        """Run outlast to its end."""
        with self.start(*arguments, **environment) as process:
            output = process.communicate(timeout=240)[0]
        return Result(process.returncode, output.splitlines())

    def train(self, code: str, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> Result:
        """Run a script on two ranks, without restarts unless requested by options."""
        (self.folder / "train.py").write_text(code)
        return self.run("run", "--nproc-per-node=2", *options, "train.py", *arguments, **environment)

    def assert_no_processes(self) -> None:
        """Assert that no process remains after the command."""
        until_s = time.monotonic() + 60
        while remaining := processes_with(self.environment[TOKEN]):
            assert time.monotonic() < until_s, remaining
            time.sleep(0.05)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A folder with a script in it; no process may remain at the end of the test."""
    shell = Shell(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    yield shell
    try:
        shell.assert_no_processes()
    finally:
        end_processes(shell.environment[TOKEN])


REJECTED = {
    "no script": (["run"], ["train.py"]),
    "a missing script": (["run", "trian.py"], ["'trian.py' does not exist", "check its path"]),
    "an unknown option": (["run", "--nprocs-per-node=2", "train.py"], ["--nprocs-per-node", "--nproc-per-node"]),
    "an unknown ft option": (["run", "--ft-rank-section-timeout=step:1", "train.py"], ["rank-section-timeouts"]),
    "an invalid timeout": (["run", "--ft-rank-section-timeouts=step:soon", "train.py"], ["soon"]),
    "zero nodes": (["run", "--nnodes=0", "train.py"], ["--nnodes='0'", "4:5"]),
    "a minimum above the maximum of nodes": (["run", "--nnodes=5:4", "train.py"], ["--nnodes='5:4'"]),
    "zero workers": (["run", "--nproc-per-node=0", "train.py"], ["--nproc-per-node=0", "at least 1"]),
    "an invalid number of workers": (["run", "--nproc-per-node=two", "train.py"], ["'two'", "gpu"]),
    "missing GPUs": (["run", "--nproc-per-node=gpu", "train.py"], ["--nproc-per-node=gpu"]),
    "negative restarts": (["run", "--max-restarts=-1", "train.py"], ["--max-restarts=-1"]),
    "a negative total of restarts": (["run", "--max-restarts-total=-1", "train.py"], ["--max-restarts-total=-1"]),
    "an unsupported rendezvous backend": (
        ["run", "--rdzv-backend=etcd", "train.py"],
        ["--rdzv-backend=etcd", "leave the option out"],
    ),
    "a rendezvous setting without a value": (
        ["run", "--rdzv-conf=join_timeout", "train.py"],
        ["'join_timeout'", "name=value"],
    ),
    "a rendezvous setting that is not a number": (
        ["run", "--rdzv-conf=join_timeout=x", "train.py"],
        ["'x'", "seconds"],
    ),
    "an invalid port": (
        ["run", "--nnodes=2", "--rdzv-endpoint=localhost:http", "train.py"],
        ["'http'", "host:port"],
    ),
    "an endpoint without a host": (["run", "--nnodes=2", "--rdzv-endpoint=:29400", "train.py"], ["names no host"]),
    "an unknown host": (
        ["run", "--nnodes=2", "--rdzv-endpoint=no-such-host.invalid:29400", "train.py"],
        ["no-such-host.invalid", "check the name"],
    ),
    "fewer nodes than the minimum": (["run", "--nnodes=2", "--ft-min-nodes=3", "train.py"], ["3", "2 nodes"]),
    "a missing program": (["run", "--no-python", "no-such-program"], ["'no-such-program'", "path and mode"]),
    "a module without python": (["run", "--no-python", "--module", "x"], ["contradict", "leave one out"]),
    "a missing config": (["run", "--config=none.toml", "train.py"], ["none.toml"]),
    "an invalid config file": (["run", "--config=broken.toml", "train.py"], ["broken.toml"]),
    "a config with an unknown key": (["run", "--config=typo.toml", "train.py"], ["save_intervall", "save_interval"]),
    "a config with an invalid value": (["run", "--config=wrong.toml", "train.py"], ["save_interval"]),
    "a run directory that is a file": (["run", "--run-dir=train.py", "train.py"], ["--run-dir", "name another"]),
    "a run directory that cannot be created": (["run", "--run-dir=/proc/x/run", "train.py"], ["--run-dir", "writable"]),
    "an unreadable recovery state": (["run", "--run-dir=torn", "train.py"], ["ladder.json cannot be used", "move it"]),
    "an invalid log level": (["run", "--log-level=loud", "train.py"], ["--log-level=loud", "debug, info"]),
    "an unknown command": (["rnu", "train.py"], ["'rnu'", "run"]),
    "a missing checkpoint folder": (["ckpt", "ls", "nowhere"], ["nowhere"]),
    "a batch script without a program": (["slurm", "script", "--nodes=2", "nowhere.py"], ["nowhere.py"]),
    "the status of a missing folder": (["status", "nowhere"], ["nowhere"]),
    "the status of a folder without a run": (["status", "."], ["run"]),
    "an unknown option of status": (["status", "--jsn", "."], ["--json"]),
}


@pytest.mark.parametrize("name", REJECTED)
def test_user_error_is_rejected_in_one_line(shell: Shell, name: str) -> None:
    """Exit code 2, one line that contains the error and the remedy, no process, no run directory."""
    (shell.folder / "broken.toml").write_text("[checkpoint\n")
    (shell.folder / "typo.toml").write_text("[checkpoint]\ndirectory = 'c'\nsave_intervall = 3\n")
    (shell.folder / "wrong.toml").write_text("[checkpoint]\ndirectory = 'c'\nsave_interval = -3\n")
    (shell.folder / "torn").mkdir()
    (shell.folder / "torn" / "ladder.json").write_text('{"restarts_total": ')
    before = sorted(path.relative_to(shell.folder) for path in shell.folder.rglob("*"))
    arguments, expected = REJECTED[name]
    result = shell.run(*arguments)
    assert result.code == 2, result
    assert len(result.lines) == 1, result
    for text in expected:
        assert text in result.lines[0], result
    assert "training_script" not in result.lines[0]
    assert sorted(path.relative_to(shell.folder) for path in shell.folder.rglob("*")) == before


@contextlib.contextmanager
def listening_program(response: bytes) -> Iterator[int]:
    """Start a program other than outlast that listens at a port; yield the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.ExitStack() as connections, contextlib.suppress(OSError):  # until the server is shut down
            while True:
                connection = connections.enter_context(server.accept()[0])
                if response:
                    connection.sendall(response)

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
@pytest.mark.parametrize("response", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["responds", "is silent"])
def test_another_program_at_the_endpoint_is_reported(shell: Shell, response: bytes) -> None:
    """If another program listens at the endpoint, with or without a response, the run is rejected within seconds."""
    with listening_program(response) as port:
        result = shell.run("run", "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "train.py")
    assert result.code == 2, result
    (line,) = result.lines
    assert f"127.0.0.1:{port}" in line
    assert "give a free port" in line


@pytest.mark.extended
@pytest.mark.slow
def test_wait_for_a_missing_node_is_logged_and_bounded(shell: Shell) -> None:
    """A waiting node logs the missing number, the present nodes and the time limit; then it exits and reports the
    reason."""
    options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=join_timeout=6", "--node-name=a"]
    result = shell.run("run", *options, "train.py")
    assert result.code == 1, result
    assert re.search(r"waiting for 1 of 2 nodes \(have: a\); gives up in \d+ s$", "\n".join(result.lines), re.MULTILINE)
    assert "1 of 2 slots stayed empty for 6 s" in result.lines[-1]
    assert len(result.outlast_lines) <= 10, result


FAILED = {
    "a syntax error": ("x = (\n", (), "SyntaxError: '(' was never closed (train.py:1)"),
    "a missing module": ("import nosuchthing\n", (), "No module named 'nosuchthing' (train.py:1)"),
    "a missing argument": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', required=True)\np.parse_args()\n",
        (),
        "error: the following arguments are required: --lr",
    ),
    "a missing file": ("open('tokens.bin')\n", (), "No such file or directory: 'tokens.bin' (train.py:1)"),
    "an invalid setting": (
        "import outlast\noutlast.CheckpointConfig(directory='c', save_interval=-3)\n",
        (),
        "save_interval=-3 must be",
    ),
    "a config with an unknown key": ("import outlast\noutlast.init('typo.toml')\n", (), "save_intervall"),
    "a checkpoint directory that is a file": (TRAIN, ("train.py", "4", "4"), "directory=train.py cannot be used"),
    "a checkpoint directory that cannot be created": (TRAIN, ("/proc/x", "4", "4"), "directory=/proc/x cannot be used"),
    "an undefined name": ("import outlast\nwith outlast.init():\n    trian()\n", (), "'trian' is not defined"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (index % 3 > 0)) for index, name in enumerate(FAILED)]
)
def test_errors_that_a_restart_cannot_fix_are_not_restarted(shell: Shell, name: str) -> None:
    """If both ranks fail in the same way before the first step: one cycle, exit code 2, and the cause on the last
    line."""
    (shell.folder / "typo.toml").write_text("[checkpoint]\ndirectory = 'c'\nsave_intervall = 3\n")
    code, arguments, text = FAILED[name]
    result = shell.train(code, *arguments)
    assert result.code == 2, result
    assert text in result.lines[-1], result
    assert "(1 cycle, " in result.lines[-1], result
    assert "a restart cannot help" in result.lines[-1]
    assert len(result.outlast_lines) <= 8, result


@pytest.mark.extended
@pytest.mark.slow
def test_unreachable_object_store_is_reported(shell: Shell) -> None:
    """If the object store's address has no listener, the error is reported, with exit code 93 and no restart."""
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    endpoint = f"http://127.0.0.1:{free_port()}"
    code = TRAIN.replace("save_interval=2", "save_interval=2, restore_timeout=0")
    result = shell.train(code, "s3://bucket/run", "4", "4", AWS_ENDPOINT_URL=endpoint, **keys)
    assert result.code == 93, result
    assert "s3://bucket/run/run.json: EndpointConnectionError" in result.lines[-1], result
    assert "start again once it responds: nothing was changed" in result.lines[-1], result
    assert len(result.lines) <= 10, result


@pytest.mark.extended
def test_full_disk_is_reported(shell: Shell) -> None:
    """A checkpoint directory on a full disk is rejected before the first step."""
    disk = shell.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (disk / "full").write_bytes(bytes(60 * 1024))
        result = shell.train(TRAIN, "disk/saved", "4", "4")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert result.code == 2, result
    assert "No space left on device" in result.lines[-1], result
    assert "directory=disk/saved" in result.lines[-1], result


def test_errors_that_a_restart_cannot_fix_end_all_nodes(tmp_path: Path) -> None:
    """If all ranks of two nodes lack a module: one cycle, and both agents exit with 2 and report the cause."""
    (tmp_path / "train.py").write_text("import nosuchthing\n")
    with Cluster(tmp_path / "train.py", run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=2) as cluster:
        assert cluster.wait(timeout_s=240) == [2, 2], cluster.tails()
        assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0}
        for agent in cluster.agents:
            assert "No module named 'nosuchthing' (train.py:1)" in agent.output().splitlines()[-1]


@pytest.mark.extended
def test_same_error_at_different_times_is_not_restarted(tmp_path: Path) -> None:
    """If the other node reports the same error first, a rank that has not failed yet still gets its time to do so."""
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


def test_failure_as_the_other_rank_finishes_fails_the_run(shell: Shell) -> None:
    """If rank 1 lacks a module and rank 0 exits with 0 meanwhile, the run fails with the cause on the last line."""
    code = "import os, time\nif os.environ['RANK'] == '1':\n    import nosuchthing\ntime.sleep(1)\n"
    result = shell.train(code, options=("--max-restarts=0",))
    assert result.code == 1, result
    assert "rank 1 failed: ModuleNotFoundError" in result.lines[-1], result


def test_checkpoint_of_another_model_is_reported_once(shell: Shell) -> None:
    """The first mismatched tensor is reported in a few lines, with exit code 2; the checkpoint is not modified."""
    assert shell.train(TRAIN, "saved", "4", "2", options=("--run-dir=first",)).code == 0
    before = {path: path.read_bytes() for path in (shell.folder / "saved").rglob("*") if path.is_file()}
    result = shell.train(TRAIN, "saved", "8", "4", options=("--run-dir=first2", *RESUME))
    assert result.code == 2, result
    assert "size mismatch for weight" in result.lines[-1], result
    assert len(result.lines) <= 10, result
    assert {path: data for path, data in before.items() if path.read_bytes() != data} == {}


@pytest.mark.extended
def test_local_tier_of_another_world_size_is_rejected(shell: Shell) -> None:
    """One rank cannot load the node-local checkpoints of two ranks: exit code 2, and the error contains the remedy."""
    assert shell.train(TRAIN_LOCAL, "near", "2", options=("--run-dir=first",)).code == 0
    (shell.folder / "train.py").write_text(TRAIN_LOCAL)
    result = shell.run("run", "--nproc-per-node=1", "--run-dir=second", *RESUME, "train.py", "near", "4")
    assert result.code == 2, result
    assert "start with 2 ranks" in result.lines[-1], result
    assert len(result.lines) <= 10, result


def test_failed_training_reports_its_root_cause(shell: Shell) -> None:
    """The type, text and line of one rank's exception are on the last line, in the journal and in the recovery
    policy's state, and a file contains its traceback; outlast logs at most ten lines."""
    result = shell.train(RAISES, options=("--max-restarts=0", "--run-dir=run"))
    assert result.code == 1, result
    cause = "rank 1 failed: IndexError: token 50257 out of range (train.py:5 in next_batch)"
    assert cause in result.lines[-1], result
    assert len(result.outlast_lines) <= 10, result
    assert "Traceback" in "\n".join(result.lines)
    recovery_state = json.loads((shell.folder / "run" / "ladder.json").read_text())
    assert cause in recovery_state["history"][-1]["incident"]
    (path,) = (shell.folder / "run" / "failures").rglob("rank-1.txt")
    assert 'raise IndexError("token 50257 out of range")' in path.read_text()
    journal = "".join(one.read_text() for one in (shell.folder / "run" / "journal").iterdir())
    incidents = [json.loads(line) for line in journal.splitlines() if '"kind":"incident"' in line]
    assert {one["rank"] for one in incidents if one["data"]["incident"]["kind"] == "worker_failed"} == {1}


@pytest.mark.slow
def test_stopped_rank_is_identified_in_every_report(shell: Shell) -> None:
    """If rank 1 is stopped and rank 0 waits for it, the incident, the cycle's end, the decision and the last line
    contain rank 1, and its stack file starts with the script's line."""
    options = ("--max-restarts=0", "--run-dir=run", "--ft-rank-section-timeouts=step:3")
    result = shell.train(STOPS, options=options)
    assert result.code == 1, result
    assert "rank 1 on node" in result.lines[-1], result
    assert "hangs in section 'step' at iteration 3" in result.lines[-1], result
    journal = "".join(one.read_text() for one in (shell.folder / "run" / "journal").iterdir())
    events = [json.loads(line) for line in journal.splitlines()]
    by_kind = {one["kind"]: one for one in events if one["kind"] in ("incident", "verdict", "cycle_ended")}
    assert by_kind["incident"]["data"]["incident"]["rank"] == 1
    assert by_kind["verdict"]["data"]["incident"]["rank"] == 1
    assert by_kind["cycle_ended"]["data"]["reason"].startswith("rank 1 on node")
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
def test_abrupt_exit_is_reported_with_its_cause(shell: Shell, code: str, text: str) -> None:
    """After a fatal signal or an immediate exit, the last line contains the signal, the exit code or the last
    output."""
    result = shell.train(code, options=("--max-restarts=0",))
    assert result.code == 1, result
    assert text in result.lines[-1], result
    assert len(result.outlast_lines) <= 10, result


def test_closed_output_pipe_does_not_end_training(shell: Shell) -> None:
    """With ``outlast run ... | head`` the script keeps printing to the closed pipe, and the run exits with 0."""
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
    ids=["ASCII", "dumb terminal", "no home", "no temporary folder"],
)
def test_training_works_in_minimal_environments(shell: Shell, environment: dict[str, str]) -> None:
    """A run completes with plain output in any locale and terminal, and without a home or temporary folder."""
    result = shell.train(TRAIN, "saved", "4", "4", **environment)
    assert result.code == 0, result
    assert result.lines.count("trained") == 2, result
    assert not any("\x1b" in line or "\r" in line for line in result.lines), result


@pytest.mark.extended
@pytest.mark.slow
def test_unprivileged_user_trains_and_sees_denied_paths(shell: Shell) -> None:
    """An unprivileged user's run trains; a directory without write permission is reported with exit code 2."""
    unprivileged = ("unshare", "--user")
    if subprocess.run([*unprivileged, "true"], check=False).returncode:
        pytest.skip("no user namespace can be made here")
    (shell.folder / "train.py").write_text(TRAIN)
    closed = shell.folder / "closed"
    closed.mkdir(mode=0o555)
    for folder, code in (("saved", 0), ("closed/saved", 2)):
        arguments = ["run", "--nproc-per-node=2", f"--run-dir=run-{code}", "train.py", folder, "4", "4"]
        completed = subprocess.run(
            [*unprivileged, *MAIN, *arguments],
            cwd=shell.folder,
            env={**shell.environment, "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        result = Result(completed.returncode, (completed.stdout + completed.stderr).splitlines())
        assert result.code == code, result
    assert "directory=closed/saved cannot be used" in result.lines[-1], result
    assert "Permission denied" in result.lines[-1], result
    assert len(result.outlast_lines) <= 10, result


def test_second_run_in_the_same_run_dir_is_rejected(shell: Shell) -> None:
    """A second run in the run directory of a living one is rejected with one line and exit code 2; the first run
    completes."""
    (shell.folder / "train.py").write_text(
        "import pathlib, time, sys\nprint('in the script', flush=True)\n"
        "until = time.monotonic() + 200\n"
        "while not pathlib.Path('go').exists() and time.monotonic() < until:\n    time.sleep(0.02)\n"
    )
    with shell.start("run", "--run-dir=run", "train.py") as first:
        assert first.stdout is not None
        assert any("in the script" in line for line in first.stdout)
        result = shell.run("run", "--run-dir=run", "train.py")
        (shell.folder / "go").touch()
        output = first.communicate(timeout=240)[0]
    assert first.returncode == 0, output
    assert result.code == 2, result
    assert len(result.lines) == 1, result
    assert "is in use by" in result.lines[0]
    assert f"pid {first.pid}" in result.lines[0]


def signal_when(process: subprocess.Popen[str], is_trigger: Callable[[str], bool]) -> list[str]:
    """Send SIGINT at the first line that meets a condition; return all lines."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if is_trigger(line):
            process.send_signal(2)
            break
    return [*lines, *process.communicate(timeout=240)[0].splitlines()]


@pytest.mark.parametrize("moment", range(10))
def test_ctrl_c_during_startup_ends_without_a_traceback(shell: Shell, moment: int) -> None:
    """At each of ten moments of the start, SIGINT ends the command with 130 and no process remains."""
    (shell.folder / "train.py").write_text("import time\nprint('in the script', flush=True)\ntime.sleep(600)\n")
    options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}"] if moment % 2 else []
    debug = ("--log-level=debug",)
    with shell.start("run", *options, *debug, "train.py") as process:
        if moment < 6:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            time.sleep(0.05 * moment**2)  # the assertions hold at any moment
            process.send_signal(2)
            lines += process.communicate(timeout=240)[0].splitlines()
        else:
            mark = "hosts the coordinator" if moment % 2 else "in the script"
            lines = signal_when(process, lambda line: mark in line)
    result = Result(process.returncode, lines)
    assert result.code in (130, -2), result
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in lines if "train.py" not in line), (
        result
    )


RESUME: tuple[str, ...] = ("--resume-from-other-run",)
"""The option that permits checkpoints of another run."""
