"""``outlast status`` on the command line: a real run from its first second to its end, and invalid targets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from outlast import clock
from outlast.cli.main import main
from outlast.incidents import EventKind
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint
from outlast.runtime.journal import Journal
from outlast.runtime.processes import describe_self
from outlast.status.report import StatusReport
from outlast.testing import Cluster
from outlast.testing.ranks import free_port

Command = Callable[..., tuple[int, str, str]]
LONG_S = 100.0
DOCS = Path(__file__).parents[2] / "docs"

SCRIPT = """
import os, pathlib, sys, time
import torch, outlast
run = outlast.init(outlast.Config(checkpoint=outlast.CheckpointConfig(local_directory=sys.argv[1], save_interval=2)))
state = {"steps": torch.zeros(1)}
for iteration in run.steps(state, total=8):
    state["steps"] += 1
    if iteration == 5:
        print("waits", flush=True)
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.02)
"""


@pytest.fixture
def outlast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command in this process and returns exit code, output and error output."""

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return command


def write_job(run_dir: Path) -> None:
    """Write a job whose agent is this process."""
    agent = Journal(run_dir, run_id="r", job="job-1", node="a", proc="agent")
    agent.write(EventKind.JOB_STARTED, command=["train.py"], num_nodes=1, nproc_per_node=1, **describe_self())
    agent.write(EventKind.CYCLE_STARTED, cycle=0, node_rank=0, ranks=[0], pids=[1], world_size=1)
    agent.close()


def wait_for_report(outlast: Command, target: object, is_met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Repeat ``outlast status`` until its report meets a condition."""
    deadline_s = clock.now_s() + LONG_S
    while True:
        code, out, err = outlast("status", target, "--json")
        shown: dict[str, Any] = json.loads(out) if code == 0 else {"code": code, "error": err}
        if code == 0 and is_met(shown):
            return shown
        assert clock.now_s() < deadline_s, shown
        time.sleep(0.05)


def checkpoints_of(shown: dict[str, Any]) -> list[tuple[str, int]]:
    return [(one["tier"], one["iteration"]) for one in shown["checkpoints"]]


@pytest.mark.slow
@pytest.mark.process
def test_status_follows_a_run_to_its_end(tmp_path: Path, outlast: Command) -> None:
    """The states are waiting, running, running after the loss of a rank, and ended after a SIGKILL of all processes;
    the run directory and the coordinator give the same report."""
    script, run_dir, saves, release = tmp_path / "train.py", tmp_path / "run", tmp_path / "saves", tmp_path / "go"
    script.write_text(SCRIPT)
    cluster = Cluster(script, str(saves), str(release), run_dir=run_dir, num_started=1, nproc_per_node=1)
    with cluster:
        for target in (cluster.endpoint, run_dir):
            shown = wait_for_report(outlast, target, lambda shown: bool(shown["waiting"] and shown["waiting"]["have"]))
            assert (shown["state"], shown["waiting"]["have"]) == ("waiting", ["node-0"])
            assert re.fullmatch(r"waiting for 1 of 2 nodes \(have: node-0\); gives up in \d+ s", shown["summary"])
        cluster.add_node()
        for target in (run_dir, cluster.endpoint):
            shown = wait_for_report(outlast, target, lambda shown: ("local", 4) in checkpoints_of(shown))
            assert (shown["state"], shown["cycle"], shown["run_dir"]) == ("running", 0, str(run_dir))
            assert [(node["state"], node["ranks"]) for node in shown["nodes"]] == [
                ("training", [0]),
                ("training", [1]),
            ]
            assert shown["nodes"][1]["pids"] == [cluster.worker_pid(1)]
            assert shown["nodes"][0]["agent_pid"] == cluster.agent(0).pid
            assert shown["iteration"] == 4
            assert shown["budgets"]["restarts_in_a_row"] == {"used": 0, "limit": 3, "left": 3}
            assert shown["local_directory"] == str(saves)
        psutil.Process(cluster.worker_pid(1)).kill()
        shown = wait_for_report(outlast, run_dir, lambda shown: shown["cycle"] == 1 and shown["iteration"] == 5)
        (episode,) = shown["incidents"]
        assert (episode["kind"], episode["rank"], episode["remedy"]) == ("worker_died", 1, "restart_workers")
        assert "was ended by SIGKILL" in episode["text"]
        assert shown["budgets"]["restarts_in_a_row"]["left"] == 2
        cluster.close()
    shown = wait_for_report(outlast, run_dir, lambda _: True)
    assert shown["state"] == "no_process"
    assert shown["summary"].startswith("no live process: last seen")
    assert ("local", 4) in checkpoints_of(shown)
    assert ("memory", 4) not in checkpoints_of(shown)
    code, out, err = outlast("status", cluster.endpoint)
    assert (code, out) == (2, "")
    assert err.startswith(f"outlast: no coordinator responds at {cluster.endpoint} (connection refused)")


@pytest.mark.process
def test_a_finished_run_is_reported_with_times(tmp_path: Path, outlast: Command) -> None:
    """The report has the exit code and the reason; the journal and ladder.json have readable times."""
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text("import os\nraise SystemExit(7 if os.environ['OUTLAST_CYCLE'] == '0' else 0)\n")
    with Cluster(script, run_dir=run_dir, num_nodes=1, nproc_per_node=1) as cluster:
        assert cluster.wait(timeout_s=LONG_S) == [0]
    code, out, _ = outlast("status", run_dir)
    assert code == 0
    assert "over with exit code 0" in out
    assert "failed with exit code 7" in out
    iso = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
    steps = json.loads((run_dir / "ladder.json").read_text())["history"]
    assert steps
    assert all(iso.fullmatch(step["time"]) for step in steps)
    for path in (run_dir / "journal").iterdir():
        for line in path.read_text().splitlines():
            event = json.loads(line)
            assert event["time"] == clock.as_iso(event["wall_ns"])


def test_invalid_targets_are_one_line_and_exit_code_2(tmp_path: Path, outlast: Command) -> None:
    """A missing directory, another directory, an endpoint without a listener, an unknown host, a TCPStore without a
    coordinator, and an invalid port are each one error line."""
    store = stores.host(Endpoint("localhost", 0), timeout_s=10)
    for target, words in {
        tmp_path / "missing": "there is no ",
        tmp_path: "is not a run directory",
        f"127.0.0.1:{free_port()}": "no coordinator responds at",
        "no-such-host.invalid:29400": "the host no-such-host.invalid is not known here",
        f"localhost:{store.port}": "did not respond within 2 s; it is another program, or the first agent hangs",
        "localhost:99999": "address='localhost:99999': '99999' is not a port",
        "localhost:0": "'localhost:0' is not an address; write host:port",
    }.items():
        code, out, err = outlast("status", target)
        assert (code, out, err.count("\n")) == (2, "", 1), target
        assert words in err


def test_another_program_at_the_endpoint_is_detected(outlast: Command) -> None:
    """A program with another greeting is reported at once, without waiting for a timeout."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        _serve_greeting(
            listener, b"220 mail.example ESMTP; this is no coordinator of outlast, and it greets at length\r\n" * 9
        ),
    ):
        code, _, err = outlast("status", f"127.0.0.1:{listener.getsockname()[1]}")
    assert code == 2
    assert "is not a coordinator of outlast" in err


@contextlib.contextmanager
def _serve_greeting(listener: socket.socket, words: bytes) -> Iterator[None]:
    import threading

    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(words)

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    yield
    thread.join(timeout=60)


def test_json_has_the_documented_fields(tmp_path: Path, outlast: Command) -> None:
    """docs/status.md describes every field of the object."""
    write_job(tmp_path)
    code, out, _ = outlast("status", "--json", tmp_path)
    assert code == 0
    shown = json.loads(out)
    fields = {field.name for field in msgspec.structs.fields(StatusReport)}
    assert set(shown) == fields
    documented = set(re.findall(r"`(\w+)`", (DOCS / "status.md").read_text()))
    assert fields <= documented


def test_watch_accepts_an_optional_interval(tmp_path: Path, outlast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """--watch may precede the directory, with or without seconds; each report is printed below the previous one."""
    write_job(tmp_path)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) % 2 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    for words in (["--watch", tmp_path], ["--watch", "0.5", tmp_path], [tmp_path, "--watch"], [tmp_path, "--watch=3"]):
        code, out, err = outlast("status", *words)
        assert code == 130
        assert "Traceback" not in err
        assert out.count("state      running") == 2
        assert "\x1b" not in out
    assert waits == [2.0, 2.0, 0.5, 0.5, 2.0, 2.0, 3.0, 3.0]
    code, out, _ = outlast("status", tmp_path, "--json", "--watch")
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["running", "running"]


@pytest.mark.process
def test_ctrl_c_ends_watch_without_a_traceback(tmp_path: Path) -> None:
    """Ctrl-C ends the command with exit code 130, at any moment."""
    write_job(tmp_path)
    code = "from outlast.cli.main import main; main()"
    command = [sys.executable, "-c", code, "status", str(tmp_path), "--watch=0.1"]
    environment = {**os.environ, "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as status_process:
        assert status_process.stdout is not None
        assert status_process.stderr is not None
        for line in status_process.stdout:
            if line.startswith("incidents"):
                break
        status_process.send_signal(signal.SIGINT)
        out, err = status_process.communicate(timeout=300)
    assert status_process.returncode == 130
    assert "Traceback" not in out + err
