"""``outlast top`` on the command line: a live run, a stopped coordinator, a finished run; in a terminal; mistakes."""

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


def look_at(target: object, *words: str) -> tuple[int, str, str]:
    """Run ``outlast top``; return its exit code, output and error output."""
    command = [*TOP, str(target), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@contextmanager
def waiting_run(tmp_path: Path, *, num_nodes: int = 2, num_spares: int = 0) -> Iterator[tuple[Cluster, Path]]:
    """A run whose ranks wait in a step until a file is there."""
    script, go_on = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    with Cluster(
        *(script, str(tmp_path / "saves"), str(go_on)),
        run_dir=tmp_path / "run",
        num_nodes=num_nodes,
        num_spares=num_spares,
        nproc_per_node=1,
        options=["--ft-node-heartbeat-timeout=300"],  # stopped agents are not taken for lost
    ) as cluster:
        for rank in range(num_nodes):
            cluster.wait_for(lambda event, rank=rank: event.rank == rank and (event.iteration or 0) >= 4, LONG_S)
        cluster.wait_for("waits", LONG_S)
        yield cluster, go_on


@pytest.mark.slow
@pytest.mark.process
def test_a_live_run_a_stopped_coordinator_and_the_end(tmp_path: Path) -> None:
    """Ranks with their sections, by directory and by endpoint; with the coordinator stopped it is named, and the ranks
    are still there; a stopped rank is shown as such; and after the end how it ended."""
    run_dir = tmp_path / "run"
    with waiting_run(tmp_path, num_spares=1) as (cluster, go_on):
        for target in (run_dir, cluster.endpoint):
            code, out, err = look_at(target, "--once", "--json")
            assert (code, err) == (0, "")
            told = json.loads(out)
            assert set(told) == {field.name for field in msgspec.structs.fields(TopReport)}
            assert [(one["rank"], one["state"], one["section"], one["source"]) for one in told["ranks"]] == [
                (0, "running", "step", "board"),
                (1, "running", "step", "board"),
            ]
            assert [one["pid"] for one in told["ranks"]] == [cluster.worker_pid(0), cluster.worker_pid(1)]
            assert (told["iteration"], told["total"], told["unanswered"]) == (5, 8, [])
            assert told["status"]["state"] == "running"
            assert len(told["status"]["spares"]) == 1
        code, out, err = look_at(run_dir, "--once")
        assert (code, err) == (0, "")
        assert re.search(r"^ +0  node-\d +\d+  running +5 +.* ago  step \(", out, re.MULTILINE)
        assert "saved      memory 4" in out
        os.kill(cluster.worker_pid(1), signal.SIGSTOP)
        host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
        os.kill(host.pid, signal.SIGSTOP)
        try:
            code, out, err = look_at(run_dir, "--once")
            assert (code, err) == (0, "")
            assert re.search(
                r"^no reply   the coordinator: no response for \d+ s: .* did not respond", out, re.MULTILINE
            )
            assert re.search(r"^ +1  node-\d +\d+  stopped ", out, re.MULTILINE)
            code, out, err = look_at(cluster.endpoint, "--once")
            assert (code, out, err.count("\n")) == (2, "", 1)
        finally:
            os.kill(host.pid, signal.SIGCONT)
            psutil.Process(cluster.worker_pid(1)).kill()
        go_on.touch()
        cluster.wait(LONG_S)
    code, out, err = look_at(run_dir, "--once")
    assert (code, err) == (0, "")
    assert "state      over with exit code 0" in out
    assert "was ended by SIGKILL" in out


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("by_endpoint", [False, True])
def test_a_view_survives_restarts_and_silence(tmp_path: Path, by_endpoint: bool) -> None:
    """One and the same view shows the cycle after a killed rank, names the coordinator while it is stopped, drops that
    line once it answers again, and shows the end and the next job."""
    with waiting_run(tmp_path) as (cluster, go_on):
        looker = Looker(cluster.endpoint if by_endpoint else str(cluster.run_dir), interval_s=0.1)
        looker.start()
        try:
            looker.wait_for_first()
            look_until(looker, lambda report: len(report.ranks) == 2 and report.ranks[0].section == "step")
            psutil.Process(cluster.worker_pid(1)).kill()
            look_until(
                looker,
                lambda report: (
                    report.status.cycle == 1
                    and [(one.section, one.iteration) for one in report.ranks] == [("step", 5)] * 2
                ),
            )
            host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
            os.kill(host.pid, signal.SIGSTOP)
            try:
                look_until(looker, lambda report: [one.what for one in report.unanswered] == ["the coordinator"])
            finally:
                os.kill(host.pid, signal.SIGCONT)
            look_until(looker, lambda report: not report.unanswered)
            go_on.touch()
            assert cluster.wait(LONG_S) == [0, 0]
            look_until(looker, lambda report: report.status.state in ("over", "no_process"))
            write_next_job(cluster)
            look_until(looker, lambda report: report.status.job == "job-next")
        finally:
            assert looker.close(LONG_S)


def look_until(looker: Looker, is_met: Callable[[TopReport], bool]) -> None:
    """Wait until a view is as it is to be."""
    deadline_s = clock.now_s() + LONG_S
    while not (looker.newest is not None and is_met(looker.newest)):
        looker.check()
        assert clock.now_s() < deadline_s, looker.newest
        time.sleep(0.02)


def write_next_job(cluster: Cluster) -> None:
    """Write the begin of another job of the same run; its agent is this process."""
    journal = Journal(cluster.run_dir, run_id=cluster.run_id, job="job-next", node="a", proc="agent")
    journal.write(EventKind.JOB_STARTED, command=["train.py"], num_nodes=1, nproc_per_node=1, **describe_self())
    journal.close()


@pytest.mark.process
def test_without_a_terminal_views_follow_each_other(tmp_path: Path) -> None:
    """One block a tick with its time, JSON one object a line; whoever reads no more ends it without a traceback, and
    Ctrl-C ends it with 130."""
    with waiting_run(tmp_path, num_nodes=1) as (cluster, _):
        for words, begin in ((["--interval=0.1"], "--- 2"), (["--interval=0.1", "--json"], '{"schema":1')):
            command = [*TOP, str(cluster.run_dir), *words]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                num = 0
                while num < 2:
                    num += process.stdout.readline().startswith(begin)
                if "--json" in words:
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
    """``outlast top`` in a terminal of its own.

    Args:
        target: What it looks at.
    """

    def __init__(self, target: object) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        environment.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, str(target), "--interval=0.2"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        self.output = ""

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, pattern: str) -> str:
        """Return what was shown since the last call, once it has a text."""
        deadline_s = clock.now_s() + LONG_S
        while (found := re.search(pattern, self.output, re.DOTALL)) is None:
            assert clock.now_s() < deadline_s, self.output
            if select.select([self.ours], [], [], 1.0)[0]:
                self.output += os.read(self.ours, 65536).decode(errors="replace")
        shown, self.output = self.output[: found.end()], self.output[found.end() :]
        return shown

    def type(self, keys: bytes) -> None:
        """Type keys."""
        os.write(self.ours, keys)

    def wait(self) -> int:
        """Return the exit code; what is still shown is read meanwhile."""
        deadline_s = clock.now_s() + LONG_S
        while (code := self.process.poll()) is None:
            assert clock.now_s() < deadline_s
            if select.select([self.ours], [], [], 0.05)[0]:
                self.output += os.read(self.ours, 65536).decode(errors="replace")
        while select.select([self.ours], [], [], 0.0)[0]:
            self.output += os.read(self.ours, 65536).decode(errors="replace")
        return code

    def close(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LONG_S)
        os.close(self.ours)
        os.close(self.theirs)


SCREEN, NO_SCREEN = r"\x1b\[\?1049h", "\x1b[?1049l"
CURSOR = "\x1b[?25h"


@pytest.mark.slow
@pytest.mark.process
def test_keys_end_the_screen_and_restore_the_terminal(tmp_path: Path) -> None:
    """In a terminal the view fills it and follows its size; q ends it with 0, Ctrl-C with 130, SIGTERM with 143, also
    while the run directory hangs, and each leaves the terminal as it was; Ctrl-Z gives it back for the time being."""
    with waiting_run(tmp_path, num_nodes=1) as (cluster, _):
        episodes, hangs = tmp_path / "troubles", DiskFault(folder=str(cluster.run_dir), delay_s=1e6)
        (tmp_path / "hangs").write_bytes(msgspec.json.encode([hangs]))
        for keys, code in ((b"q", 0), (b"\x03", 130), (None, 143)):
            with armed_in_children(Injection(point="journal.read", do="disk", path=str(episodes))):
                terminal = Terminal(cluster.run_dir)
            try:
                terminal.read_until(SCREEN)
                terminal.read_until(r"running.*step.*q: end")
                assert termios.tcgetattr(terminal.theirs) != terminal.before
                if keys == b"q":
                    terminal.resize(8, 60)
                    os.kill(terminal.process.pid, signal.SIGWINCH)
                    terminal.read_until(r"q: end")
                    shown = terminal.read_until(r"q: end")
                    assert shown.count("\n") <= 8
                    terminal.type(b"x")  # no key of ours
                    terminal.read_until(r"q: end")
                    stop_and_continue(terminal)
                if keys == b"\x03":
                    os.link(tmp_path / "hangs", episodes)
                    terminal.read_until(r"no reply   .*the run directory: no response for")
                if keys is None:
                    terminal.process.terminate()
                else:
                    terminal.type(keys)
                assert terminal.wait() == code
                assert NO_SCREEN in terminal.output
                assert CURSOR in terminal.output
                assert "Traceback" not in terminal.output
                assert termios.tcgetattr(terminal.theirs) == terminal.before
            finally:
                terminal.close()
                episodes.unlink(missing_ok=True)


def stop_and_continue(terminal: Terminal) -> None:
    """Press Ctrl-Z, look that the terminal is as it was, and go on."""
    terminal.type(b"\x1a")
    deadline_s = clock.now_s() + LONG_S
    while psutil.Process(terminal.process.pid).status() != psutil.STATUS_STOPPED:
        assert clock.now_s() < deadline_s
        if select.select([terminal.ours], [], [], 0.05)[0]:
            terminal.output += os.read(terminal.ours, 65536).decode(errors="replace")
        time.sleep(0.01)
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    os.kill(terminal.process.pid, signal.SIGCONT)
    assert NO_SCREEN in terminal.read_until(SCREEN)
    terminal.read_until(r"q: end")


@pytest.mark.process
def test_mistakes_are_one_line_and_two(tmp_path: Path) -> None:
    """No such directory, none of a run, nobody at the endpoint, an interval that is none, no target."""
    for words, message in {
        (str(tmp_path / "missing"),): "there is no ",
        (str(tmp_path),): "is not a run directory",
        ("127.0.0.1:1", "--once"): "no coordinator responds at 127.0.0.1:1",
        (str(tmp_path), "--interval=0"): "is not in the range",
        (str(tmp_path), "--interval=x"): "is not a number",
        ("--once",): "missing argument",
    }.items():
        code, out, err = look_at(*words) if len(words) > 1 else look_at(words[0])
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err


def test_fields_are_documented() -> None:
    """Every field of the object, and of those within, stands in docs/top.md."""
    documented = set(re.findall(r"`(\w+)`", (DOCS / "top.md").read_text()))
    for kind in (TopReport, RankLine, Unanswered):
        assert {field.name for field in msgspec.structs.fields(kind)} <= documented
