"""Faults from outside in real runs: the effect on processes, files and memory, and an identical result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from outlast.chaos import Fault, FaultKind, FaultPlan, verify_fired
from outlast.incidents import Event, EventKind, IncidentKind
from outlast.journal import read

ITERATIONS = 60
SCRIPT = f"""
import sys
import time
from pathlib import Path
import torch
import outlast

folder, step_s = sys.argv[1], float(sys.argv[2])
run = outlast.init(folder + "/outlast.toml")
torch.manual_seed(run.global_rank)
model = torch.nn.Linear(64, 64, bias=False)
for iteration in run.steps({{"model": model}}, total={ITERATIONS}):
    time.sleep(step_s)  # so that the run is not over before it is struck
    with torch.no_grad():
        model.weight.mul_(1.01).add_(iteration)
Path(folder, f"result-{{run.global_rank}}").write_text(str(model.weight.double().sum().item()))
"""
CONFIG = """
[checkpoint]
directory = "{folder}/global"
local_directory = "{folder}/local"
save_interval = 10
non_persistent_save_interval = 5
async_save = {async_save}
"""
QUICK = "--ft-node-heartbeat-timeout=2"
COMMAND = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "chaos", "run")


def expected(rank: int) -> str:
    """Return the result of an undisturbed run."""
    import torch

    torch.manual_seed(rank)
    weight = torch.nn.Linear(64, 64, bias=False).weight.detach()
    for iteration in range(ITERATIONS):
        weight.mul_(1.01).add_(iteration)
    return str(weight.double().sum().item())


def start(
    folder: Path, *faults: Fault, nodes: int | None = 2, spares: int = 0, step_s: float = 0.05
) -> tuple[FaultPlan, list[str]]:
    """Write what a run needs; return the plan and the command."""
    plan = FaultPlan(seed=3, faults=faults)
    (folder / "plan.toml").write_text(plan.to_toml())
    (folder / "script.py").write_text(SCRIPT)
    (folder / "outlast.toml").write_text(CONFIG.format(folder=folder, async_save="true"))
    several = [] if nodes is None else [f"--nodes={nodes}", f"--spares={spares}"]
    words = [
        f"--run-dir={folder / 'run'}",
        QUICK,
        "--nproc-per-node=1",
        str(folder / "script.py"),
        str(folder),
        str(step_s),
    ]
    return plan, [*COMMAND, *several, "--json", str(folder / "plan.toml"), "--", *words]


def run_under(
    folder: Path, *faults: Fault, nodes: int | None = 2, spares: int = 0, step_s: float = 0.05
) -> tuple[dict[str, Any], list[Event]]:
    """Run under a plan to the end; check that all faults were injected and that the result is the undisturbed one."""
    plan, command = start(folder, *faults, nodes=nodes, spares=spares, step_s=step_s)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + tails(folder)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["problems"] == []
    assert verify_fired(plan, folder / "run") == []
    for rank in range(nodes or 1):
        assert (folder / f"result-{rank}").read_text() == expected(rank)
    assert not list((folder / "run" / "faults").glob("disks*")), "nothing is left that would trouble a later run"
    return answer, list(read(folder / "run"))


def tails(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted((folder / "run" / "agents").glob("*.log")))


def incidents(events: list[Event], kind: IncidentKind) -> list[dict[str, Any]]:
    found = [event.data["incident"] for event in events if event.kind == EventKind.INCIDENT]
    return [incident for incident in found if incident["kind"] == kind]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "spares"),
    [("kill_agent", 1), ("kill_coordinator", 0), ("lose_node", 1), ("lose_node_and_replicas", 1)],
)
def test_another_node_replaces_a_lost_agent(tmp_path: Path, kind: str, spares: int) -> None:
    """The agent of the node ends, another node takes its slot, and the run ends with the undisturbed result.

    With a spare, the coordinator's node may be the spare, whose loss costs nothing.
    """
    answer, events = run_under(tmp_path, Fault(kind=kind, iteration=12), spares=spares)
    (row,) = answer["faults"]
    assert row["detected_as"] == "node_lost"
    assert row["iteration"] >= 12
    assert row["recovered_after_s"] > 0
    (strike,) = [event for event in events if event.kind == EventKind.FAULT_SIMULATED]
    assert (strike.proc, strike.data["done"]) == ("chaos", "SIGKILL")
    lost = strike.data["node"]
    later = [event for event in events if event.kind == EventKind.CYCLE_STARTED and event.mono_ns > strike.mono_ns]
    assert later
    assert lost not in {event.node for event in later}
    assert (tmp_path / "local" / lost).exists() == (not kind.startswith("lose_node"))
    if kind == "lose_node_and_replicas":
        restored = [event for event in events if event.kind == EventKind.RESTORED and event.mono_ns > strike.mono_ns]
        assert "global" in {event.data["tier"] for event in restored}
        assert "replica" not in {event.data["tier"] for event in restored}
        assert strike.data["replicas_corrupted"] > 0
        assert incidents(events, IncidentKind.COPY_REJECTED)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("kind", "spares"), [("stop_agent", 1), ("stop_coordinator", 0)])
def test_a_stopped_agent_is_declared_lost_and_ended(tmp_path: Path, kind: str, spares: int) -> None:
    """A stopped agent sends no heartbeat and is declared lost; the others continue, and the agent does not outlive the
    run."""
    answer, _ = run_under(tmp_path, Fault(kind=kind, iteration=12, duration_s=6), spares=spares, step_s=0.25)
    assert answer["faults"][0]["detected_as"] == "node_lost"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_damaged_copies_are_rejected(tmp_path: Path) -> None:
    """Copies of the newest checkpoint are damaged in each tier, in each way; then both nodes are restarted.

    A copy that is read is either rejected or correct.
    """
    damages = [
        Fault(kind="corrupt_copy", tier="memory", at_s=0.5, rank=0),
        Fault(kind="truncate_copy", tier="local", at_s=0.5, rank=0),
        Fault(kind="delete_copy", tier="replica", at_s=0.5, rank=0),
        Fault(kind="corrupt_copy", tier="global", at_s=0.5),
        Fault(kind="kill", rank=0, at_s=0.6),
    ]
    answer, events = run_under(tmp_path, *damages)
    assert [row["fired"] for row in answer["faults"]] == [True] * 5
    done = {event.data["fault"]: event.data["done"] for event in events if event.proc == "chaos"}
    assert set(done) == {"corrupt_copy", "truncate_copy", "delete_copy"}
    assert "cut from" in done["truncate_copy"]
    assert answer["faults"][4]["detected_as"] == "worker_died"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_full_and_slow_disks_affect_saves_only(tmp_path: Path) -> None:
    """While the disk of the global tier is full, saves fail and training continues; a slow disk delays saves."""
    answer, events = run_under(
        tmp_path,
        Fault(kind="disk_full", tier="global", iteration=1, duration_s=8),  # on a busy machine a save may begin late
        Fault(kind="slow_disk", tier="local", iteration=45, duration_s=1, delay_s=0.2),
        step_s=0.2,
    )
    assert answer["faults"][0]["detected_as"] == "save_failed"
    failed = incidents(events, IncidentKind.SAVE_FAILED)
    assert any("No space left" in str(incident["evidence"]) for incident in failed)
    assert len([event for event in events if event.kind == EventKind.CYCLE_STARTED]) == 2, "no restart: a start each"


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_agent_of_one_node_is_restarted(tmp_path: Path) -> None:
    """Without --nodes the killed agent is started again as another job, which resumes."""
    answer, events = run_under(tmp_path, Fault(kind="kill_agent", iteration=12), nodes=None)
    assert answer["faults"][0]["fired"]
    assert len({event.job for event in events if event.kind == EventKind.JOB_STARTED}) == 2
    assert any(event.kind == EventKind.RESTORED and (event.iteration or 0) >= 10 for event in events)


@pytest.mark.slow
@pytest.mark.process
def test_a_sigterm_during_the_run_starts_another_job(tmp_path: Path) -> None:
    """A rank receives SIGTERM when the fault is due; all ranks save and exit, and the next job continues."""
    answer, events = run_under(tmp_path, Fault(kind="sigterm", rank=1, at_s=0.5))
    assert answer["faults"][0]["detected_as"] == "notice"
    jobs = {event.job for event in events if event.kind == EventKind.SESSION_STARTED}
    assert len(jobs) == 2


@pytest.mark.slow
@pytest.mark.process
def test_a_fault_that_was_not_injected_is_an_error(tmp_path: Path) -> None:
    """If a fault was never due, a successful run ends with exit code 1 and a line that names the fault."""
    plan, command = start(tmp_path, Fault(kind="kill_agent", iteration=10_000), nodes=None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    assert [missing.index for missing in verify_fired(plan, tmp_path / "run")] == [0]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(tmp_path: Path, number: int) -> None:
    """Ctrl-C, SIGTERM, and even SIGKILL of the command end every process of the run."""
    _, command = start(tmp_path, Fault(kind="stop_agent", iteration=8), spares=1)
    command = ["env", "--default-signal=INT", *command]  # a background shell ignores SIGINT
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not any(event.kind == EventKind.FAULT_SIMULATED for event in read(tmp_path / "run")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, number)
        assert process.wait(timeout=300) != 0
        _, alive = psutil.wait_procs(family, timeout=300)
        assert alive == []
    finally:
        process.kill()
        process.wait()


def test_a_session_ignores_outside_faults() -> None:
    """A session that receives a plan with faults from outside does not inject them."""
    from outlast.chaos.plan import planned_faults
    from outlast.env import WorkerEnv

    place = WorkerEnv(global_rank=0, world_size=1)
    plan = FaultPlan(faults=[Fault(kind="kill_agent", iteration=0), Fault(kind="kill", rank=0, iteration=0)])
    assert [one.can_apply_to(place, "cpu-0") for one in planned_faults(plan)] == [False, True]
    assert FaultKind.KILL_AGENT.is_outside
