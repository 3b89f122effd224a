"""``outlast top`` on the command line: a live run, a stopped coordinator, a finished run, a terminal, and usage
errors."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from outlast import clock
from outlast.incidents import EventKind
from outlast.runtime.injection import DiskFault, Injection, armed_in_children
from outlast.runtime.journal import Journal
from outlast.runtime.processes import describe_self
from outlast.testing import Cluster
from outlast.top.look import Looker, RankLine, TopReport, Unanswered

LONG_S = 100.0
DOCS = Path(__file__).parents[2] / "docs"
TOP = (sys.executable, "-m", "outlast", "top")
SCRIPT = """
import pathlib, sys, time
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


def run_top(target: object, *arguments: str) -> tuple[int, str, str]:
    """Run ``outlast top``; return its exit code, output and error output."""
    command = [*TOP, str(target), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@contextmanager
def waiting_run(tmp_path: Path, *, num_nodes: int = 2, num_spares: int = 0) -> Iterator[tuple[Cluster, Path]]:
    """Start a run whose ranks wait in a step until a file exists."""
    script, go_file = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    with Cluster(
        *(script, str(tmp_path / "saves"), str(go_file)),
        run_dir=tmp_path / "run",
        num_nodes=num_nodes,
        num_spares=num_spares,
        nproc_per_node=1,
        options=["--ft-node-heartbeat-timeout=300"],  # stopped agents are not declared lost
    ) as cluster:
        for rank in range(num_nodes):
            cluster.wait_for(lambda event, rank=rank: event.rank == rank and (event.iteration or 0) >= 4, LONG_S)
        cluster.wait_for("waits", LONG_S)
        yield cluster, go_file


@pytest.mark.slow
@pytest.mark.process
def test_top_shows_a_live_run_a_silent_coordinator_and_the_end(tmp_path: Path) -> None:
    """Ranks and their sections are shown, by directory and by endpoint. A stopped coordinator is reported and the
    ranks are still shown, a stopped rank is shown as stopped, and after the end the exit code is shown."""
    run_dir = tmp_path / "run"
    with waiting_run(tmp_path, num_spares=1) as (cluster, go_file):
        for target in (run_dir, cluster.endpoint):
            code, out, err = run_top(target, "--once", "--json")
            assert (code, err) == (0, "")
            document = json.loads(out)
            assert set(document) == {field.name for field in msgspec.structs.fields(TopReport)}
            assert [(one["rank"], one["state"], one["section"], one["source"]) for one in document["ranks"]] == [
                (0, "running", "step", "board"),
                (1, "running", "step", "board"),
            ]
            assert [one["pid"] for one in document["ranks"]] == [cluster.worker_pid(0), cluster.worker_pid(1)]
            assert (document["iteration"], document["total"], document["unanswered"]) == (5, 8, [])
            assert document["status"]["state"] == "running"
            assert len(document["status"]["spares"]) == 1
        code, out, err = run_top(run_dir, "--once")
        assert (code, err) == (0, "")
        assert re.search(r"^ +0  node-\d +\d+  running +5 +.* ago  step \(", out, re.MULTILINE)
        assert "saved      memory 4" in out
        os.kill(cluster.worker_pid(1), signal.SIGSTOP)
        host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
        os.kill(host.pid, signal.SIGSTOP)
        try:
            code, out, err = run_top(run_dir, "--once")
            assert (code, err) == (0, "")
            assert re.search(
                r"^no reply   the coordinator: no response for \d+ s: .* did not respond", out, re.MULTILINE
            )
            assert re.search(r"^ +1  node-\d +\d+  stopped ", out, re.MULTILINE)
            code, out, err = run_top(cluster.endpoint, "--once")
            assert (code, out, err.count("\n")) == (2, "", 1)
        finally:
            os.kill(host.pid, signal.SIGCONT)
            psutil.Process(cluster.worker_pid(1)).kill()
        go_file.touch()
        cluster.wait(LONG_S)
    code, out, err = run_top(run_dir, "--once")
    assert (code, err) == (0, "")
    assert "state      over with exit code 0" in out
    assert "was ended by SIGKILL" in out


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("by_endpoint", [False, True])
def test_view_follows_restarts_and_a_silent_coordinator(tmp_path: Path, by_endpoint: bool) -> None:
    """One view shows the cycle after a killed rank, reports the coordinator only while it is stopped, and shows the
    end and the next job."""
    with waiting_run(tmp_path) as (cluster, go_file):
        looker = Looker(cluster.endpoint if by_endpoint else str(cluster.run_dir), interval_s=0.1)
        looker.start()
        try:
            looker.wait_for_first()
            wait_until_view(looker, lambda report: len(report.ranks) == 2 and report.ranks[0].section == "step")
            psutil.Process(cluster.worker_pid(1)).kill()
            wait_until_view(
                looker,
                lambda report: (
                    report.status.cycle == 1
                    and [(one.section, one.iteration) for one in report.ranks] == [("step", 5)] * 2
                ),
            )
            host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
            os.kill(host.pid, signal.SIGSTOP)
            try:
                wait_until_view(looker, lambda report: [one.what for one in report.unanswered] == ["the coordinator"])
            finally:
                os.kill(host.pid, signal.SIGCONT)
            wait_until_view(looker, lambda report: not report.unanswered)
            go_file.touch()
            assert cluster.wait(LONG_S) == [0, 0]
            wait_until_view(looker, lambda report: report.status.state in ("over", "no_process"))
            write_next_job(cluster)
            wait_until_view(looker, lambda report: report.status.job == "job-next")
        finally:
            assert looker.close(LONG_S)


def wait_until_view(looker: Looker, is_met: Callable[[TopReport], bool]) -> None:
    """Wait until the view meets a condition."""
    deadline_s = clock.now_s() + LONG_S
    while not (looker.newest is not None and is_met(looker.newest)):
        looker.check()
        assert clock.now_s() < deadline_s, looker.newest
        time.sleep(0.02)


def write_next_job(cluster: Cluster) -> None:
    """Write the first event of another job of the same run, whose agent is this process."""
    journal = Journal(cluster.run_dir, run_id=cluster.run_id, job="job-next", node="a", proc="agent")
    journal.write(EventKind.JOB_STARTED, command=["train.py"], num_nodes=1, nproc_per_node=1, **describe_self())
    journal.close()


@pytest.mark.process
def test_views_are_printed_in_sequence_without_a_terminal(tmp_path: Path) -> None:
    """Each interval prints one block with its time, or one JSON object on a line. A closed pipe ends the command
    without a traceback, and Ctrl-C ends it with 130."""
    with waiting_run(tmp_path, num_nodes=1) as (cluster, _):
        for arguments, begin in ((["--interval=0.1"], "--- 2"), (["--interval=0.1", "--json"], '{"schema":1')):
            command = [*TOP, str(cluster.run_dir), *arguments]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                num = 0
                while num < 2:
                    num += process.stdout.readline().startswith(begin)
                if "--json" in arguments:
                    process.stdout.close()
                    assert process.wait(LONG_S) == 0
                else:
                    process.send_signal(signal.SIGINT)
                    process.stdout.read()
                    assert process.wait(LONG_S) == 130
                assert process.stderr.read() == ""


IN_TERMINAL = """
import os, sys
os.open(os.ttyname(0), os.O_RDWR)  # the first terminal that a session opens is its own: Ctrl-C and Ctrl-Z work
from outlast.cli.main import main
sys.argv = ["outlast", "top", *sys.argv[1:]]
main()
"""


class Terminal:
    """Run ``outlast top`` in a new terminal.

    Args:
        target: The run to show.
    """

    def __init__(self, target: object) -> None:
        self.controller, terminal_fd = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(terminal_fd)
        self.terminal_fd = terminal_fd
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        environment.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, str(target), "--interval=0.2"],
            stdin=terminal_fd,
            stdout=terminal_fd,
            stderr=terminal_fd,
            env=environment,
            start_new_session=True,
        )
        self.output = ""

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal."""
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, pattern: str) -> str:
        """Return the output since the last call, once it contains a pattern."""
        deadline_s = clock.now_s() + LONG_S
        while (found := re.search(pattern, self.output, re.DOTALL)) is None:
            assert clock.now_s() < deadline_s, self.output
            if select.select([self.controller], [], [], 1.0)[0]:
                self.output += os.read(self.controller, 65536).decode(errors="replace")
        shown, self.output = self.output[: found.end()], self.output[found.end() :]
        return shown

    def type(self, keys: bytes) -> None:
        os.write(self.controller, keys)

    def wait(self) -> int:
        """Return the exit code, and read the remaining output meanwhile."""
        deadline_s = clock.now_s() + LONG_S
        while (code := self.process.poll()) is None:
            assert clock.now_s() < deadline_s
            if select.select([self.controller], [], [], 0.05)[0]:
                self.output += os.read(self.controller, 65536).decode(errors="replace")
        while select.select([self.controller], [], [], 0.0)[0]:
            self.output += os.read(self.controller, 65536).decode(errors="replace")
        return code

    def close(self) -> None:
        """Kill the process and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LONG_S)
        os.close(self.controller)
        os.close(self.terminal_fd)


SCREEN, NO_SCREEN = r"\x1b\[\?1049h", "\x1b[?1049l"
CURSOR = "\x1b[?25h"


@pytest.mark.slow
@pytest.mark.process
def test_keys_and_signals_end_the_screen_and_restore_it(tmp_path: Path) -> None:
    """The view fills the terminal and follows its size. q ends it with 0, Ctrl-C with 130 and SIGTERM with 143, also
    while the run directory hangs; each, and Ctrl-Z, restores the terminal."""
    with waiting_run(tmp_path, num_nodes=1) as (cluster, _):
        faults_path, slow_disk = tmp_path / "troubles", DiskFault(folder=str(cluster.run_dir), delay_s=1e6)
        (tmp_path / "hangs").write_bytes(msgspec.json.encode([slow_disk]))
        for keys, code in ((b"q", 0), (b"\x03", 130), (None, 143)):
            with armed_in_children(Injection(point="journal.read", do="disk", path=str(faults_path))):
                terminal = Terminal(cluster.run_dir)
            try:
                terminal.read_until(SCREEN)
                terminal.read_until(r"running.*step.*q: end")
                assert termios.tcgetattr(terminal.terminal_fd) != terminal.before
                if keys == b"q":
                    terminal.resize(8, 60)
                    os.kill(terminal.process.pid, signal.SIGWINCH)
                    terminal.read_until(r"q: end")
                    shown = terminal.read_until(r"q: end")
                    assert shown.count("\n") <= 8
                    terminal.type(b"x")  # not a known key
                    terminal.read_until(r"q: end")
                    stop_and_continue(terminal)
                if keys == b"\x03":
                    os.link(tmp_path / "hangs", faults_path)
                    terminal.read_until(r"no reply   .*the run directory: no response for")
                if keys is None:
                    terminal.process.terminate()
                else:
                    terminal.type(keys)
                assert terminal.wait() == code
                assert NO_SCREEN in terminal.output
                assert CURSOR in terminal.output
                assert "Traceback" not in terminal.output
                assert termios.tcgetattr(terminal.terminal_fd) == terminal.before
            finally:
                terminal.close()
                faults_path.unlink(missing_ok=True)


def stop_and_continue(terminal: Terminal) -> None:
    """Press Ctrl-Z, check that the terminal is restored, and continue the process."""
    terminal.type(b"\x1a")
    deadline_s = clock.now_s() + LONG_S
    while psutil.Process(terminal.process.pid).status() != psutil.STATUS_STOPPED:
        assert clock.now_s() < deadline_s
        if select.select([terminal.controller], [], [], 0.05)[0]:
            terminal.output += os.read(terminal.controller, 65536).decode(errors="replace")
        time.sleep(0.01)
    assert termios.tcgetattr(terminal.terminal_fd) == terminal.before
    os.kill(terminal.process.pid, signal.SIGCONT)
    assert NO_SCREEN in terminal.read_until(SCREEN)
    terminal.read_until(r"q: end")


@pytest.mark.process
def test_usage_errors_are_one_line_with_exit_code_2(tmp_path: Path) -> None:
    """A missing directory, a directory without a run, an endpoint without a coordinator, an invalid interval and a
    missing target are rejected."""
    for arguments, message in {
        (str(tmp_path / "missing"),): "there is no ",
        (str(tmp_path),): "is not a run directory",
        ("127.0.0.1:1", "--once"): "no coordinator responds at 127.0.0.1:1",
        (str(tmp_path), "--interval=0"): "is not in the range",
        (str(tmp_path), "--interval=x"): "is not a number",
        ("--once",): "missing argument",
    }.items():
        code, out, err = run_top(*arguments) if len(arguments) > 1 else run_top(arguments[0])
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err


def test_fields_are_documented() -> None:
    """docs/top.md contains every field of the JSON object and of the objects in it."""
    documented = set(re.findall(r"`(\w+)`", (DOCS / "top.md").read_text()))
    for kind in (TopReport, RankLine, Unanswered):
        assert {field.name for field in msgspec.structs.fields(kind)} <= documented
