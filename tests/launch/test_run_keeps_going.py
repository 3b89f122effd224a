"""`outlast run` on real processes: recovery from faults, the end of a job, and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from outlast.errors import ExitReason
from outlast.goodput import Ledger
from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.process]

SESSION_LIKE = """
import os, sys
from outlast.monitor import RankMonitor
monitor = RankMonitor()
monitor.report_progress()
cycle = int(os.environ["OUTLAST_CYCLE"])
print("start of cycle", cycle, flush=True)
saves = sys.argv[1] == "saves"
if saves:
    monitor.set_durable_iteration(10 * (cycle + 1))
if not saves or cycle < 5:
    raise SystemExit(7)
monitor.finish()
"""

HANGING = """
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
from outlast.monitor import RankMonitor
dist.init_process_group("gloo")
monitor, total = RankMonitor(), torch.ones(1)
def next_batch(iteration):
    if iteration == 12 and dist.get_rank() == 2 and os.environ["OUTLAST_CYCLE"] == "0":
        how = sys.argv[1]
        if how == "sleeps":
            time.sleep(600)
        elif how == "holds the GIL":
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)  # no signal that asks for stacks ends it
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
for iteration in range(16):
    monitor.set_iteration(iteration)
    with monitor.section("step"):
        next_batch(iteration)
        dist.all_reduce(total)
        total /= dist.get_world_size()
assert total.item() == 1.0
monitor.finish()
"""

UNTIL_TOLD = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "runs", flush=True)
deadline = time.monotonic() + 250
while not pathlib.Path(sys.argv[1]).exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


def write(folder: Path, code: str) -> Path:
    script = folder / "train.py"
    script.write_text(code)
    return script


def decisions(cluster: Cluster) -> list[dict[str, Any]]:
    return [event.data for event in cluster.events() if event.kind == EventKind.DECISION]


def started_cycles(cluster: Cluster) -> set[int | None]:
    return {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED}


def test_crash_before_every_save_ends_with_93(tmp_path: Path) -> None:
    """A script that reports its saves and crashes before each save gets 3 cycles, then the run exits with 93."""
    script = write(tmp_path, SESSION_LIKE)
    with Cluster(script, "never", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        assert cluster.wait(timeout_s=300) == [ExitReason.NO_PROGRESS]
        assert started_cycles(cluster) == {0, 1, 2}
        assert (tmp_path / "run" / "ladder.json").exists()


FOLLOWS_ITS_PEERS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1]).touch())
print("rank", os.environ["RANK"], "runs on", os.environ["OUTLAST_NODE"], flush=True)
deadline = time.monotonic() + 250
while not pathlib.Path(sys.argv[1]).exists():  # the ranks leave together
    assert time.monotonic() < deadline
    time.sleep(0.01)
if os.environ["OUTLAST_NODE"] == sys.argv[2]:
    time.sleep(1.0)  # and those of the node with the signal end last
sys.exit(75)
"""


@pytest.mark.extended
@pytest.mark.slow
def test_node_that_received_the_signal_is_identified(tmp_path: Path) -> None:
    """SIGTERM to one agent ends the job on all nodes. The last line of each other node identifies the node that
    received it, not the one whose workers ended first."""
    script = write(tmp_path, FOLLOWS_ITS_PEERS)
    args, run = (str(tmp_path / "leave"), "node-1"), tmp_path / "run"
    with Cluster(script, *args, run_dir=run, num_nodes=2, num_spares=1, nproc_per_node=1, num_started=2) as cluster:
        for name in ("node-0", "node-1"):
            cluster.wait_for(f"runs on {name}", timeout_s=150)
        cluster.add_node()
        cluster.wait_for("is a spare", timeout_s=150)
        os.kill(cluster.agent("node-1").pid, signal.SIGTERM)
        cluster.wait(timeout_s=150)
        assert "node node-1 received SIGTERM" in cluster.agent("node-2").output(), cluster.tails()
        assert "node node-1 received SIGTERM; shutdown requested" in cluster.agent("node-1").output()
        assert "node node-0" not in cluster.agent("node-2").output()


OTHER_VERSION = """
import sys
import outlast.version
outlast.version.__version__ = "0.1.7"
from outlast.cli.main import main
sys.exit(main())
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.cold
def test_agent_of_another_version_is_rejected(tmp_path: Path) -> None:
    """An agent with another version of the package does not join: it prints one line with both versions and exits
    with 2."""
    script = write(tmp_path, UNTIL_TOLD)
    done, run = tmp_path / "done", tmp_path / "run"
    with Cluster(script, str(done), run_dir=run, num_spares=1, num_nodes=1, num_started=1, nproc_per_node=1) as cluster:
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, timeout_s=150)
        line = ["run", "--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-endpoint={cluster.endpoint}", "--node-name=other"]
        line += [f"--rdzv-id={cluster.run_id}", f"--run-dir={run}", str(script), str(done)]
        command = [sys.executable, "-c", OTHER_VERSION, *line]
        other = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert other.returncode == ExitReason.BAD_INPUT
        assert "the agent has outlast 0.1.7, the coordinator has outlast" in other.stderr, other.stderr
        done.touch()
        assert cluster.wait(timeout_s=150) == [0]


FAILS_ON_ONE_NODE = """
import os, pathlib, sys, time
from outlast.monitor import RankMonitor
monitor = RankMonitor()
monitor.report_progress()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.02)
bad = pathlib.Path(sys.argv[1])
if os.environ["OUTLAST_CYCLE"] == "0" and os.environ["RANK"] == "1":
    bad.write_text(os.environ["OUTLAST_NODE"])
if bad.exists() and bad.read_text() == os.environ["OUTLAST_NODE"]:
    raise SystemExit(7)  # a file that only this node lacks
monitor.finish()
"""


@pytest.mark.slow
def test_spare_replaces_a_failing_node_with_default_budgets(tmp_path: Path) -> None:
    """A node on which the script cannot run is excluded while the default budgets still allow a restart: the spare
    takes its slot, and the run finishes."""
    script = write(tmp_path, FAILS_ON_ONE_NODE)
    bad = tmp_path / "bad"
    run = tmp_path / "run"
    args = (str(bad), str(tmp_path / "go"))
    with Cluster(script, *args, run_dir=run, num_nodes=2, num_spares=1, nproc_per_node=1) as cluster:
        cluster.wait_for("is a spare", timeout_s=300)
        (tmp_path / "go").touch()
        assert cluster.wait(timeout_s=400) == [0, 0, 0], cluster.tails()
        (replaced,) = [one["verdict"] for one in decisions(cluster) if "quarantine" in one["verdict"]]
        assert replaced["quarantine"] == [bad.read_text()]
        assert f"failures on node {bad.read_text()}" in replaced["reason"]


@pytest.mark.extended
@pytest.mark.slow
def test_crash_after_every_save_does_not_end_the_run(tmp_path: Path) -> None:
    """Five crashes with a new durable checkpoint before each do not end the run, even with --max-restarts=1."""
    script = write(tmp_path, SESSION_LIKE)
    options = ["--max-restarts=1"]
    with Cluster(script, "saves", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        assert started_cycles(cluster) == set(range(6))


@pytest.mark.extended
@pytest.mark.slow
def test_total_budget_ends_a_run_that_makes_progress(tmp_path: Path) -> None:
    """--max-restarts-total ends a run that makes progress with exit code 1, since another try can help."""
    script = write(tmp_path, SESSION_LIKE)
    options = ["--max-restarts-total=2"]
    with Cluster(script, "saves", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options) as cluster:
        assert cluster.wait(timeout_s=300) == [ExitReason.FAILED]
        assert started_cycles(cluster) == {0, 1, 2}


TOTAL = """
import sys
import torch
import outlast

folder, total = sys.argv[1], int(sys.argv[3])
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
run = outlast.init(outlast.Config(checkpoint=outlast.CheckpointConfig(directory=folder, save_interval=7)))
model = torch.nn.parallel.DistributedDataParallel(model)
optim = torch.optim.Adam(model.parameters(), 0.01)
for iteration in run.steps({"model": model, "optim": optim}, total=total):
    torch.manual_seed(iteration * 2 + run.global_rank)
    optim.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optim.step()
result = [*model.module.state_dict().values(), *optim.state_dict()["state"].values()]
torch.save(result, f"{folder}-{run.global_rank}.pt")
"""


@pytest.mark.extended
@pytest.mark.slow
def test_finished_run_resumes_with_more_iterations(tmp_path: Path) -> None:
    """Two ranks train to 20. A relaunch with the same --run-dir exits at once with 0 and one line on how to train
    further; with a total of 40, weights and optimizer states are bit-identical to those of an undisturbed run.
    Goodput and status cover one run."""
    script = write(tmp_path, TOTAL)

    def train(name: str, total: int) -> list[str]:
        arguments = (str(tmp_path / name), "--total", str(total))
        with Cluster(script, *arguments, run_dir=tmp_path / f"run-{name}", num_nodes=1, nproc_per_node=2) as cluster:
            assert cluster.wait(timeout_s=300) == [0], cluster.tails()
            output = cluster.agent(0).output().rpartition(": starting; run directory")[2]  # it is appended to
            assert "exit code 0: the run is finished" in output.splitlines()[-1]
            return [line for line in output.splitlines() if "nothing was left to train" in line]

    def weights(name: str, rank: int) -> list[Any]:
        return torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)

    assert train("whole", 40) == []
    assert train("parts", 20) == []
    first = weights("parts", 0)
    (line,) = train("parts", 20)
    assert "iteration 20 is done" in line
    assert "raise the number of iterations" in line
    torch.testing.assert_close(weights("parts", 0), first, rtol=0, atol=0)
    assert train("parts", 40) == []
    for rank in range(2):
        torch.testing.assert_close(weights("parts", rank), weights("whole", rank), rtol=0, atol=0)
    ledger = Ledger.read(tmp_path / "run-parts")
    assert len(ledger.jobs) == 3
    assert (ledger.num_iterations, ledger.lost_iterations) == (40, 0)
    report = subprocess.run(
        [sys.executable, "-m", "outlast", "status", "--json", str(tmp_path / "run-parts")],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert json.loads(report.stdout)["reason"] == "the run is finished", report.stdout


def test_goodput_report_begins_with_the_agent(tmp_path: Path) -> None:
    """Imports and checks come before the journal's first event; the wall time of the report and of the last line
    includes them."""
    with Cluster(write(tmp_path, ""), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        (began,) = [event for event in cluster.events() if event.kind == EventKind.JOB_STARTED]
        assert began.data["start_up_s"] > 0
        ledger = Ledger.read(tmp_path / "run")
        assert ledger.began_wall_ns / 1e9 <= began.wall_ns / 1e9 - began.data["start_up_s"] + 0.01
        assert ledger.partition["start_up"] > 0  # until the event: the rendezvous, which begins earlier
        (printed,) = re.findall(r"job over after ([\d.]+) s", cluster.agent(0).output())
        assert began.data["start_up_s"] < ledger.wall_s <= float(printed) + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "holds the GIL",
        pytest.param("sleeps", marks=pytest.mark.extended),
        pytest.param("is stopped", marks=pytest.mark.campaign),
    ],
)
def test_root_cause_of_a_hang_is_identified(mode: str, tmp_path: Path) -> None:
    """Of 4 ranks that all exceed the timeout, the one that the others wait for is identified, with its section, its
    iteration and the line where it hangs; its stacks are kept, and the next cycle finishes."""
    script = write(tmp_path, HANGING)
    options = ["--ft-rank-section-timeouts=step:5"]
    with Cluster(script, mode, run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=2, options=options) as cluster:
        assert cluster.wait(timeout_s=300) == [0, 0]
        first = decisions(cluster)[0]
        incident = first["incident"]
        assert isinstance(incident, dict)
        assert (incident["kind"], incident["rank"], incident["iteration"]) == ("worker_hung", 2, 12)
        assert incident["section"] == "step"
        assert "next_batch" in incident["evidence"]["stack_line"]
        assert "next_batch" in (tmp_path / "run" / "stacks" / "cycle-0" / "rank-2.txt").read_text()
        assert started_cycles(cluster) == {0, 1}
        pattern = r"rank \d \(node node-\d, pid \d+\): section 'step' exceeded 5\.0 s \(.* iteration 12\)"
        assert re.search(pattern, cluster.agent(0).output() + cluster.agent(1).output())


@pytest.mark.slow
def test_lost_coordinator_host_is_replaced(tmp_path: Path) -> None:
    """After the agent that hosts the coordinator is killed, another one takes over, the spare takes its ranks, the
    other node keeps its own, and the restart still counts against the budget."""
    leave = tmp_path / "leave"
    script = write(tmp_path, UNTIL_TOLD)
    with Cluster(
        script, str(leave), run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=1,
        options=["--ft-node-heartbeat-timeout=8"],
    ) as cluster:  # fmt: skip
        cluster.wait_for("rank 0 runs", timeout_s=300)
        cluster.wait_for("rank 1 runs", timeout_s=300)
        spare = cluster.add_node("spare")
        cluster.wait_for("the node is a spare", timeout_s=300)
        host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
        host.kill()
        cluster.assert_no_orphans(within_s=60)
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED and event.node == "spare", timeout_s=300)
        leave.touch()
        codes = dict(zip((agent.name for agent in cluster.agents), cluster.wait(timeout_s=300), strict=True))
        assert codes.pop(host.name) == -signal.SIGKILL
        assert set(codes.values()) == {0}
        ranks = {
            e.node: e.data["ranks"] for e in cluster.events() if e.kind == EventKind.CYCLE_STARTED and e.cycle == 0
        }
        after = {
            e.node: e.data["ranks"] for e in cluster.events() if e.kind == EventKind.CYCLE_STARTED and e.cycle == 1
        }
        other = next(name for name in ranks if name != host.name)
        assert after == {spare.name: ranks[host.name], other: ranks[other]}
        assert '"restarts_total": 1' in (tmp_path / "run" / "ladder.json").read_text()


@pytest.mark.slow
def test_dead_fork_server_is_replaced(tmp_path: Path) -> None:
    """If the fork server is killed, its workers die with it and a new one starts the next cycle."""
    leave = tmp_path / "leave"
    script = write(tmp_path, UNTIL_TOLD)
    with Cluster(script, str(leave), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2) as cluster:
        cluster.wait_for("rank 0 runs", timeout_s=300)
        cluster.wait_for("rank 1 runs", timeout_s=300)
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, timeout_s=300)
        fork_server = psutil.Process(cluster.worker_pid(0)).parent()
        assert fork_server is not None
        fork_server.kill()
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED and event.cycle == 1, timeout_s=300)
        leave.touch()
        assert cluster.wait(timeout_s=300) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.extended)])
def test_signal_ends_a_plain_script_with_its_exit_code(number: signal.Signals, tmp_path: Path) -> None:
    """A script that saves nothing ends at the first signal; the exit code is that of the signal, and no process is
    left."""
    script = write(tmp_path, UNTIL_TOLD)
    with Cluster(script, "never", run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=1) as cluster:
        cluster.wait_for("rank 0 runs", timeout_s=300)
        cluster.wait_for("rank 1 runs", timeout_s=300)
        cluster.agent(0).signal(number)
        assert cluster.wait(timeout_s=300) == [128 + number, 128 + number]
        cluster.assert_no_orphans(within_s=60)
        assert all("nothing was saved" not in agent.output() for agent in cluster.agents), "it may save by itself"


@pytest.mark.slow
def test_unhandled_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    """After Ctrl-C with `--signals-to-handle=SIGTERM`, the line on the end differs from the one for a signal before
    the training."""
    script, options = write(tmp_path, UNTIL_TOLD), ["--signals-to-handle=SIGTERM"]
    with Cluster(script, "never", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options) as cluster:
        cluster.wait_for("rank 0 runs", timeout_s=300)
        cluster.agent(0).signal(signal.SIGINT)
        assert cluster.wait(timeout_s=300) == [128 + signal.SIGINT]
        cluster.assert_no_orphans(within_s=60)
        output = cluster.agent(0).output()
    assert "received SIGINT: --signals-to-handle does not name it, so the job ends at once and saves nothing" in output
    assert "before the training began" not in output


def test_second_signal_kills_slow_workers(tmp_path: Path) -> None:
    """A worker that ignores the preemption notice is killed at the second signal, long before the grace period is
    over."""
    code = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('noticed', flush=True))\n" + UNTIL_TOLD
    script = write(tmp_path, code)
    with Cluster(script, "never", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for("rank 0 runs", timeout_s=300)
        cluster.agent(0).signal(signal.SIGTERM)
        cluster.wait_for("noticed", timeout_s=300)
        cluster.agent(0).signal(signal.SIGTERM)
        assert cluster.wait(timeout_s=300) == [128 + signal.SIGTERM]


def test_second_signal_keeps_an_earlier_checkpoint(tmp_path: Path) -> None:
    """If workers that are killed at the second signal have saved before, the exit code is 75: the run can be
    resumed."""
    code = """
import sys, time
import torch
import outlast
model = torch.nn.Linear(2, 2)
checkpoint = outlast.CheckpointConfig(directory=sys.argv[1], save_interval=2)
with outlast.init(outlast.Config(checkpoint=checkpoint)) as run:
    for iteration in run.steps({"model": model}, total=100):
        if iteration == 3:
            print("never comes back", flush=True)
            time.sleep(250)
"""
    script = write(tmp_path, code)
    with Cluster(script, str(tmp_path / "ckpt"), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for("never comes back", timeout_s=300)
        cluster.wait_for(
            lambda event: (
                event.kind == EventKind.SAVE_COMMITTED and event.iteration == 2 and "global" in event.data["tiers"]
            ),
            timeout_s=300,
        )
        cluster.agent(0).signal(signal.SIGTERM)
        cluster.wait_for("a second signal ends them", timeout_s=300)
        cluster.agent(0).signal(signal.SIGTERM)
        assert cluster.wait(timeout_s=300) == [ExitReason.PREEMPTED]
        assert "shutdown requested; a saved checkpoint exists" in cluster.agent(0).output()


def test_signal_before_the_workers_run_ends_the_job(tmp_path: Path) -> None:
    """A signal during the preparation of the first workers ends the job long before the grace period is over, since
    the workers would not receive a preemption notice later."""
    script = write(tmp_path, UNTIL_TOLD)
    options = ["--log-level=debug"]
    with Cluster(script, "never", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2, options=options) as cluster:
        cluster.wait_for("the ranks are watched as soon as", timeout_s=300)
        cluster.agent(0).signal(signal.SIGTERM)
        assert cluster.wait(timeout_s=300) == [128 + signal.SIGTERM]
        cluster.assert_no_orphans(within_s=60)


@pytest.mark.slow
def test_remaining_ranks_end_after_an_exit_without_a_save(tmp_path: Path) -> None:
    """After a rank exited without having saved, the others cannot complete a save: they do not get the whole grace
    period."""
    code = """
import os, signal
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
    script = write(tmp_path, code + UNTIL_TOLD)
    with Cluster(script, "never", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2) as cluster:
        cluster.wait_for("rank 0 runs", timeout_s=300)
        cluster.wait_for("rank 1 runs", timeout_s=300)
        cluster.agent(0).signal(signal.SIGTERM)
        assert cluster.wait(timeout_s=300) == [128 + signal.SIGTERM]
        assert "did not end in time" in cluster.agent(0).output()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.cold
def test_programs_modules_and_new_interpreters_run(tmp_path: Path) -> None:
    """Programs that are not Python scripts, --module and --no-warm-start get the same environment and restarts."""
    program = tmp_path / "train.sh"
    program.write_text("#!/bin/sh\necho program rank $RANK cycle $OUTLAST_CYCLE\n[ $OUTLAST_CYCLE = 1 ]\n")
    program.chmod(0o755)
    with Cluster(program, run_dir=tmp_path / "a", num_nodes=1, nproc_per_node=2, options=["--no-python"]) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        assert "program rank 1 cycle 1" in cluster.agent(0).output()
    with Cluster("this", run_dir=tmp_path / "b", num_nodes=1, nproc_per_node=1, options=["--module"]) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        assert "Beautiful is better than ugly" in cluster.agent(0).output()
    script = write(tmp_path, "import sys; print('outlast.runtime' in sys.modules, flush=True)")
    with Cluster(script, run_dir=tmp_path / "c", num_nodes=1, nproc_per_node=1, options=["--no-warm-start"]) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        assert "False" in cluster.agent(0).output()


def test_output_files_match_torchrun(tmp_path: Path) -> None:
    """--redirects writes files per attempt and rank, --tee also prints with torch's prefix."""
    script = write(tmp_path, "import sys; print('to stdout'); print('to stderr', file=sys.stderr)")
    options = ["--redirects=2", "--tee=1", f"--log-dir={tmp_path / 'logs'}"]
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        assert "[default0]:to stdout" in cluster.agent(0).output()
        assert "to stderr" not in cluster.agent(0).output()
    (stderr,) = tmp_path.glob("logs/*/attempt_0/0/stderr.log")
    assert "to stderr" in stderr.read_text()


@pytest.mark.campaign
@pytest.mark.slow
def test_wait_for_a_stopped_coordinator_is_bounded(tmp_path: Path) -> None:
    """A stopped host does not respond: a node whose cycle ended waits its bounded time and then exits with the
    reason."""
    script = write(tmp_path, UNTIL_TOLD)
    options = ["--rdzv-conf=join_timeout=5"]  # also for lining up, on a busy machine
    with Cluster(script, "never", run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=1, options=options) as cluster:
        cluster.wait_for("rank 0 runs", timeout_s=300)
        cluster.wait_for("rank 1 runs", timeout_s=300)
        host = next(agent for agent in cluster.agents if "hosts the coordinator" in agent.output())
        other = next(agent for agent in cluster.agents if agent is not host)
        host.signal(signal.SIGSTOP)
        (rank,) = next(e.data["ranks"] for e in cluster.events() if e.node == other.name and "ranks" in e.data)
        psutil.Process(cluster.worker_pid(rank)).kill()
        assert other.wait(timeout_s=300) == ExitReason.FAILED
        assert "did not respond" in other.output()
