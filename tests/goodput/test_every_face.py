"""Goodput and iterations per second are the same numbers wherever they are shown."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outlast import clock
from outlast.goodput import Ledger
from outlast.incidents import Decision, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.launch.node_metrics import NodeHistory
from outlast.runtime.journal import Journal
from outlast.session.metrics import Goodput, read_earlier
from outlast.status.evidence import gather
from outlast.status.facts import judge
from outlast.testing import Cluster
from outlast.top.look import Looker

LONG_S = 200.0
SCRIPT = """
import os, pathlib, signal, sys, time
import torch, outlast
folder = pathlib.Path(sys.argv[1])

def log(metrics, iteration):
    if os.environ["RANK"] == "0" and "outlast/goodput" in metrics:
        (folder / "new").write_text(str(metrics["outlast/goodput"]))
        (folder / "new").rename(folder / "goodput")

saves = outlast.CheckpointConfig(local_directory=str(folder / "saves"), save_interval=10)
run = outlast.init(outlast.Config(checkpoint=saves), log_metrics=log)
for iteration in run.steps({"steps": torch.zeros(1)}, total=100_000):
    time.sleep(0.1)
    if iteration == 25 and os.environ["OUTLAST_CYCLE"] == "0" and run.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


class _RunWriter:
    """Write a run of 120 s whose newest event happens now: ranks, a save, a kill and repeated steps."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self._patch = run_dir, monkeypatch
        self._wall_ns, self._mono_ns = clock.wall_ns(), clock.now_ns()

    @contextmanager
    def at(self, at_s: float) -> Iterator[None]:
        """Set the current time to so many seconds after the run began."""
        past_ns = int((120.0 - at_s) * 1e9)
        with self._patch.context() as patch:
            patch.setattr(clock, "wall_ns", lambda: self._wall_ns - past_ns)
            patch.setattr(clock, "now_ns", lambda: self._mono_ns - past_ns)
            yield

    def journal(self, proc: str) -> Journal:
        return Journal(self.run_dir, run_id="r", job="j", node="a", proc=proc)

    def write(self, at_s: float, kind: EventKind, *procs: str, **data: Any) -> None:
        for proc in procs or ("agent",):
            with self.at(at_s):
                journal = self.journal(proc)
                rank = int(proc.removeprefix("rank-")) if proc.startswith("rank-") else None
                journal.write(kind, cycle=data.pop("cycle", 0), rank=rank, **data)
                journal.close()

    def start(self, at_s: float, cycle: int, iteration: int) -> None:
        """Start the workers, which begin to train two seconds later."""
        self.write(at_s, EventKind.CYCLE_STARTED, cycle=cycle, node_rank=0, ranks=[0, 1], pids=[1, 2], world_size=2)
        for name in ("rank-0", "rank-1"):
            self.write(at_s + 1, EventKind.SESSION_STARTED, name, cycle=cycle, world_size=2, launcher="outlast run")
            self.write(at_s + 2, EventKind.STEPS_STARTED, name, cycle=cycle, iteration=iteration)

    def train(self, at_s: float, cycle: int, iteration: int) -> None:
        for name in ("rank-0", "rank-1"):
            self.write(at_s, EventKind.PROGRESS, name, cycle=cycle, iteration=iteration)


def test_all_outputs_show_the_same_goodput_and_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run view, the report, top, the metrics endpoint and the session agree on the goodput; top, status and the
    metrics endpoint agree on the iterations per second. The run has a save that training waits for, a slow rank, and a
    restart after which steps are repeated."""
    writer = _RunWriter(tmp_path, monkeypatch)
    writer.write(4.0, EventKind.JOB_STARTED, start_up_s=4.0, command=["train.py"], num_nodes=1)
    writer.start(6.0, 0, 0)  # trains from 8 on, one step a second
    writer.train(18.0, 0, 10)
    writer.write(18.0, EventKind.STRAGGLER_REPORT, "rank-0", iteration=10, named=[1], scores=[1.0, 0.75])
    for name in ("rank-0", "rank-1"):
        writer.write(21.0, EventKind.SAVE_SCHEDULED, name, iteration=10, stall_s=3.0)
    writer.train(31.0, 0, 20)
    writer.train(41.0, 0, 30)
    incident = Incident(kind=IncidentKind.WORKER_DIED, job="j", node="a", rank=1, exit_code=-9)
    writer.write(41.0, EventKind.INCIDENT, incident=incident)
    writer.write(41.5, EventKind.CYCLE_ENDED, reason="rank 1 died", iterations={"0": 30, "1": 30})
    decision = Decision(recovery_level=RecoveryLevel.RESTART_WORKERS, reason="restarting")
    writer.write(42.0, EventKind.DECISION, "coordinator", incident=incident, verdict=decision)
    writer.start(43.0, 1, 10)
    history = NodeHistory(tmp_path, "a")
    for time_s in range(50, 121, 5):
        writer.train(time_s, 1, 10 + 2 * (time_s - 45))
        with writer.at(time_s):
            history.note_iteration(1, 10 + 2 * (time_s - 45))
    expected = (10 * 0.75 + (120.0 - 45.0)) / 120.0  # ten steps of the first cycle count, delayed by a slow rank

    report = Ledger.read(tmp_path)
    assert report.ettr == pytest.approx(expected, rel=0.01)
    job = gather(tmp_path, asks=False).view.job("j")
    assert job.goodput(job.began_s + 120.0) == pytest.approx(expected, rel=0.01)

    history.read_on("j", [0, 1])
    shown = {name: value for name, labels, value in history.show() if not labels}
    assert shown["job_goodput"] == pytest.approx(expected, rel=0.05)
    status = judge(gather(tmp_path, asks=False), clock.wall_ns())
    assert status.rate == pytest.approx(2.0)
    assert shown["iterations_per_second"] == pytest.approx(status.rate)
    observer = Looker(str(tmp_path), interval_s=0.05)
    observer.start()
    try:
        observer.wait_for_first(for_all=True)
        assert observer.newest is not None
        assert (observer.newest.goodput, observer.newest.rate) == (report.ettr, status.rate)
    finally:
        assert observer.close(60.0)

    saved: dict[str, Any] = {}
    for cycle in (0, 1):
        begin_s = (8.0, 45.0)[cycle]
        with writer.at(begin_s - 1):
            began_ns = read_earlier(tmp_path, 0)[1]
            session = Goodput(writer.journal("rank-0"), began_ns)
        if cycle:
            session.load_state_dict(saved)
        with writer.at(begin_s):
            session.begin(10 * cycle)
        if not cycle:
            with writer.at(18.0):
                session.note_step(clock.now_ns(), 10)
                session.note_slow_ranks({0: 1.0, 1: 0.75}, [1])
                saved = session.state_dict()
            session.note_wait(3.0)
            with writer.at(41.0):
                session.note_step(clock.now_ns(), 30)
    with writer.at(120.0):
        session.note_step(clock.now_ns(), 160)
        assert session.share == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.process
def test_real_run_shows_the_same_goodput_everywhere(tmp_path: Path) -> None:
    """While a run with a killed rank continues, the session, the metrics endpoint, top and the report agree within a
    few percent."""
    from urllib.request import urlopen

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Cluster(
        script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2, options=["--metrics-port=0"]
    ) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.SAVE_COMMITTED and event.iteration == 100, LONG_S)
        (url,) = [word for word in cluster.agents[0].output().split() if word.endswith("/metrics")]
        end_s = time.monotonic() + LONG_S
        while True:  # on a busy machine a delayed step appears in one of them before the others
            before = Ledger.read(tmp_path / "run").ettr
            lines = urlopen(url, timeout=60).read().decode().splitlines()
            (endpoint,) = [float(line.split()[-1]) for line in lines if line.startswith("outlast_job_goodput{")]
            session = float((tmp_path / "goodput").read_text())
            between = Ledger.read(tmp_path / "run").ettr
            assert before is not None
            assert between is not None
            if all(before - 0.05 <= share <= between + 0.05 for share in (endpoint, session)):
                break
            assert time.monotonic() < end_s, (before, endpoint, session, between)
            time.sleep(0.5)
        words = ("top", str(tmp_path / "run"), "--once", "--json")
        done = subprocess.run([sys.executable, "-m", "outlast", *words], capture_output=True, timeout=200, check=True)
        top = json.loads(done.stdout)
        after = Ledger.read(tmp_path / "run").ettr
    assert after is not None
    assert between <= top["goodput"] <= after
