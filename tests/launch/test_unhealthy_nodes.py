"""A node that fails its health check is excluded from a job, the other nodes log the reason, and the job continues
without it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from outlast.config import HealthConfig
from outlast.errors import ConfigError, ExitReason
from outlast.health.probing import CheckResult, Status
from outlast.incidents import EventKind, Incident, RecoveryLevel
from outlast.launch.checkups import CheckedUp, Occasion
from outlast.launch.node_health import NodeHealth
from outlast.launch.options import parse_options
from outlast.testing import Cluster

HELLO = "print('trained', flush=True)\n"

UNTIL_TOLD = """
import pathlib, sys, time
deadline = time.monotonic() + 150
while not pathlib.Path(sys.argv[1]).exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
print("trained", flush=True)
"""

TRAINING = """
import hashlib, json, os, pathlib, sys, time
import torch
import torch.distributed as dist
import outlast

folder = pathlib.Path(sys.argv[1])
config = outlast.Config(checkpoint=outlast.CheckpointConfig(
    directory=str(folder / "global"), save_interval=5, local_directory=str(folder / "local"), async_save=False))
with outlast.init(config) as run:
    torch.manual_seed(0)
    state = {"weight": torch.randn(100)}
    for iteration in run.steps(state, total=20):
        if iteration == 12 and os.environ["OUTLAST_CYCLE"] == "0" and run.global_rank == 0 and len(sys.argv) > 2:
            (folder / "trains").touch()
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline:  # the cycle is to end here
                time.sleep(0.02)
        drawn = torch.randn(100) * (iteration + 1) * (run.global_rank + 1)
        dist.all_reduce(drawn)
        state["weight"] = state["weight"] * 0.9 + drawn
    print("DIGEST", hashlib.sha256(state["weight"].numpy().tobytes()).hexdigest(), flush=True)
"""

CRASHES = """
import os, pathlib, sys, time
if os.environ["OUTLAST_CYCLE"] == "0":
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        if os.environ["OUTLAST_NODE"] == "node-1" and pathlib.Path(sys.argv[1]).exists():
            pathlib.Path(sys.argv[2]).touch()
            os.kill(os.getpid(), 9)
        time.sleep(0.02)
print("trained", flush=True)
"""


def settings(folder: Path, health: str, *, tier: Path | None = None) -> str:
    path = folder / "outlast.toml"
    checkpoint = f'[checkpoint]\nlocal_directory = "{tier}"\n' if tier is not None else ""
    path.write_text(f"{checkpoint}[health]\nmin_open_files = 16\n{health}\n")
    return f"--health-config={path}"


def script(folder: Path, code: str) -> Path:
    path = folder / "train.py"
    path.write_text(code)
    return path


def cluster_of(folder: Path, code: str, *args: str, num_nodes: int = 2, num_spares: int = 0) -> Cluster:
    """Return a cluster whose nodes the test starts one by one, so that their order is known."""
    return Cluster(
        script(folder, code),
        *args,
        run_dir=folder / "run",
        num_nodes=num_nodes,
        num_spares=num_spares,
        num_started=0,
        nproc_per_node=1,
    )


def wait_until_joined(cluster: Cluster, name: str) -> None:
    cluster.wait_for(lambda event: event.kind == EventKind.NODE_JOINED and event.data["name"] == name, timeout_s=300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB, or an ordinary folder if none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=False).returncode
    yield folder
    if not mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def doctor(config: str) -> tuple[int, str]:
    """Run `outlast doctor` on the same settings, as the node that will fail."""
    from click.testing import CliRunner

    from outlast.cli.doctor import doctor as command

    arguments = ["--config", config.partition("=")[2], "--no-gpu"]
    result = CliRunner(env={"OUTLAST_NODE": "sick"}).invoke(
        command, arguments, standalone_mode=False, catch_exceptions=False
    )
    return int(result.return_value), result.output


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "what",
    ["unwritable"]
    + [pytest.param(what, marks=pytest.mark.campaign) for what in ("nearly full", "wrong product", "own check")],
)
def test_unhealthy_node_is_not_admitted(what: str, small_disk: Path, tmp_path: Path) -> None:
    """A node with a nearly full disk, an unwritable tier, wrong arithmetic or a failed custom check does not join:
    its agent exits with 19 and the reason, which the others' logs and the journal have as well. A healthy spare
    replaces it, and the run finishes. `outlast doctor` reports the same, with exit code 1."""
    (tmp_path / "file").write_text("in the way")
    tier, health, named = {
        "nearly full": (small_disk, "min_free_disk_gib = 1e6", "min_free_disk_gib"),
        "unwritable": (tmp_path / "file" / "tier", "", "cannot be written"),
        "wrong product": (None, 'simulate_wrong_gemm = "sick"', "wrong matrix product"),
        "own check": (None, 'commands = ["echo no tokens here; exit 3"]', "exit code 3: no tokens here"),
    }[what]
    config = settings(tmp_path, health, tier=tier)
    code, report = doctor(config)
    assert code == 1
    assert named in report
    with cluster_of(tmp_path, UNTIL_TOLD, str(tmp_path / "go"), num_spares=1) as cluster:
        first = cluster.add_node()
        wait_until_joined(cluster, first.name)  # this node hosts the coordinator
        sick = cluster.add_node("sick", options=[config])
        assert sick.wait(timeout_s=300) == ExitReason.UNHEALTHY_NODE, cluster.tails()
        spare = cluster.add_node("spare")
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, timeout_s=300)
        (tmp_path / "go").touch()
        assert [agent.wait(120) for agent in (first, spare)] == [0, 0], cluster.tails()
        for agent in (sick, first, spare):
            assert named in agent.output()
            assert ("trained" in agent.output()) == (agent is not sick)


@pytest.mark.slow
@pytest.mark.process
def test_reason_is_logged_on_all_nodes_and_a_spare_takes_over(tmp_path: Path) -> None:
    """Earlier and later nodes log the reason; the journal has an incident with each failed check; the unhealthy node
    is quarantined; the run waits for a healthy one, and finishes."""
    config = settings(tmp_path, 'commands = ["echo no tokens here; exit 3"]')
    with cluster_of(tmp_path, HELLO, num_spares=1) as cluster:
        cluster.add_node("first")
        wait_until_joined(cluster, "first")
        sick = cluster.add_node("sick", options=[config])
        assert sick.wait(timeout_s=300) == ExitReason.UNHEALTHY_NODE, cluster.tails()
        cluster.wait_for("node sick is unhealthy", timeout_s=300)
        later = cluster.add_node("later")
        assert [agent.wait(100) for agent in (cluster.agent(0), later)] == [0, 0], cluster.tails()
        for agent in (cluster.agent(0), later):
            assert "node sick is unhealthy: command" in agent.output()
            assert "exit code 3: no tokens here; it did not join" in agent.output()
        (incident,) = [event.data["incident"] for event in cluster.events() if event.kind == EventKind.INCIDENT]
        assert (incident["kind"], incident["node"]) == ("node_unhealthy", "sick")
        assert [one["name"] for one in incident["evidence"]["checks"]] == ["command"]
        state = json.loads((tmp_path / "run" / "ladder.json").read_text())
        assert (state["finished"], state["quarantined"]) == (True, ["sick"])


@pytest.mark.slow
@pytest.mark.process
def test_unhealthy_coordinator_host_keeps_running(tmp_path: Path) -> None:
    """A node that fails its check and hosts the coordinator gets no slot, but its agent keeps running until the
    others have finished."""
    config = settings(tmp_path, 'commands = ["exit 3"]')
    with cluster_of(tmp_path, HELLO, num_nodes=1, num_spares=1) as cluster:
        sick = cluster.add_node("sick", options=[config])
        cluster.wait_for("its agent keeps running, as it hosts the coordinator", timeout_s=300)
        healthy = cluster.add_node("healthy")
        assert healthy.wait(timeout_s=300) == 0, cluster.tails()
        assert sick.wait(timeout_s=300) == ExitReason.UNHEALTHY_NODE, cluster.tails()
        assert "trained" in healthy.output()
        assert "trained" not in sick.output()


@pytest.mark.process
def test_single_unhealthy_node_ends_the_job_at_once(tmp_path: Path) -> None:
    """On one node the job exits with 19 before anything is started."""
    config = settings(tmp_path, 'commands = ["exit 3"]')
    with Cluster(
        script(tmp_path, HELLO), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=[config]
    ) as cluster:
        assert cluster.wait(timeout_s=300) == [ExitReason.UNHEALTHY_NODE], cluster.tails()
        assert "trained" not in cluster.agent(0).output()


@pytest.mark.slow
@pytest.mark.process
def test_recovered_node_joins(tmp_path: Path) -> None:
    """With retry_interval a rejected node is checked again, and joins once it is healthy."""
    config = settings(tmp_path, f'retry_interval = 0.2\ncommands = ["test -e {tmp_path / "repaired"}"]')
    with Cluster(
        script(tmp_path, HELLO), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=[config]
    ) as cluster:
        cluster.wait_for("it is checked again in 0.2 s", timeout_s=300)
        (tmp_path / "repaired").touch()
        assert cluster.wait(timeout_s=300) == [0], cluster.tails()
        assert json.loads((tmp_path / "run" / "ladder.json").read_text())["quarantined"] == []


@pytest.mark.campaign
@pytest.mark.process
def test_node_that_becomes_unhealthy_is_replaced(tmp_path: Path) -> None:
    """A check that fails during training replaces its node with a spare; the run exits with 0, with the weights of
    an undisturbed run. The others' logs have the reason."""
    digests = set()
    for name in ("undisturbed", "disturbed"):
        folder = tmp_path / name
        folder.mkdir()
        is_disturbed = name == "disturbed"
        arguments = (str(folder), "waits") if is_disturbed else (str(folder),)
        with cluster_of(folder, TRAINING, *arguments, num_spares=1) as cluster:
            unhealthy_options = [settings(folder, f'node_interval = 0.3\ncommands = ["test ! -e {folder / "trains"}"]')]
            cluster.add_node("node-0", options=unhealthy_options if is_disturbed else ())
            cluster.add_node("node-1")
            cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, timeout_s=300)
            cluster.add_node("spare")
            assert cluster.wait(timeout_s=200) == [0, 0, 0], cluster.tails()
            lines = [line for agent in cluster.agents for line in agent.output().splitlines() if "DIGEST" in line]
            digests |= {line.rpartition(" ")[2] for line in lines}
            assert len(lines) == 2
            if is_disturbed:
                (decision,) = [
                    e.data for e in cluster.events() if e.kind == EventKind.DECISION and "incident" in e.data
                ]
                assert (decision["verdict"]["rung"], decision["verdict"]["quarantine"]) == (
                    RecoveryLevel.REPLACE_NODE,
                    ["node-0"],
                )
                assert decision["incident"]["kind"] == "node_unhealthy"
                assert "node node-0 is unhealthy: command" in cluster.agent("node-1").output()
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.process
def test_failed_check_without_a_spare_does_not_end_the_run(tmp_path: Path) -> None:
    """Without a spare a check that fails during training is only reported; the cycle continues."""
    config = settings(tmp_path, f'node_interval = 0.2\ncommands = ["test ! -e {tmp_path / "trains"}"]')
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'trains')!r}).touch()\n{UNTIL_TOLD}"
    with Cluster(
        script(tmp_path, code),
        str(tmp_path / "end"),
        run_dir=tmp_path / "run",
        num_nodes=1,
        nproc_per_node=1,
        options=[config],
    ) as cluster:
        found = cluster.wait_for(lambda event: event.kind == EventKind.INCIDENT, timeout_s=300)
        assert found is not None
        assert found.data["incident"]["kind"] == "node_unhealthy"
        (tmp_path / "end").touch()
        assert cluster.wait(timeout_s=300) == [0], cluster.tails()
        assert "is unhealthy (while it trains): command" in cluster.agent(0).output()
        assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("has_spare", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_node_is_checked_before_it_gets_its_slot_back(has_spare: bool, tmp_path: Path) -> None:
    """After a fault a node that fails its check gives up its slot: a spare takes it; without a spare the job
    continues with the node, which is logged."""
    config = settings(tmp_path, f'commands = ["test ! -e {tmp_path / "faulted"}"]')
    arguments = (str(tmp_path / "go"), str(tmp_path / "faulted"))
    with cluster_of(tmp_path, CRASHES, *arguments, num_spares=1) as cluster:
        cluster.add_node("node-0")
        cluster.add_node("node-1", options=[config])
        cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED, timeout_s=300)
        if has_spare:
            cluster.add_node("spare")
            wait_until_joined(cluster, "spare")
        (tmp_path / "go").touch()
        assert cluster.wait(timeout_s=300) == [0] * len(cluster.agents), cluster.tails()
        assert "node node-1 is unhealthy (after a fault): command" in cluster.agent("node-1").output()
        decisions = [
            e.data["verdict"] for e in cluster.events() if e.kind == EventKind.DECISION and "incident" in e.data
        ]
        assert decisions[-1]["rung"] == (RecoveryLevel.REPLACE_NODE if has_spare else RecoveryLevel.RESTART_WORKERS)
        assert ("trained" in cluster.agent("node-1").output()) != has_spare


def test_health_settings_come_from_the_doctors_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--health-config reads limits and tiers from a run's settings; without it the defaults apply to the run
    directory; --no-health-check disables all checks, and contradicts --health-config."""
    monkeypatch.chdir(tmp_path)
    train = str(script(tmp_path, HELLO))
    config = settings(tmp_path, "min_free_disk_gib = 7", tier=tmp_path / "tier")
    options = parse_options([config, "--run-dir=run", train])
    assert options.health == HealthConfig(min_open_files=16, min_free_disk_gib=7)
    assert options.health_places == (str(tmp_path / "run"), str(tmp_path / "tier"))
    assert parse_options(["--run-dir=run", train]).health == HealthConfig()
    assert parse_options(["--run-dir=run", "--no-health-check", train]).health is None
    with pytest.raises(ConfigError, match="--no-health-check"):
        parse_options([config, "--no-health-check", train])
    (tmp_path / "bad.toml").write_text("[health]\nmin_free_disk = 1\n")
    with pytest.raises(ConfigError, match="min_free_disk_gib"):
        parse_options([f"--health-config={tmp_path / 'bad.toml'}", train])


@pytest.mark.parametrize(
    ("failed", "prevents"),
    [
        (("disk /local", Status.FAILED), False),
        (("disk /local", Status.TIMED_OUT), False),
        (("store s3://bucket", Status.FAILED), False),
        (("disk /local", Status.FAILED, "store s3://bucket", Status.TIMED_OUT), False),
        (("disk /run", Status.FAILED), False),
        (("disk /local", Status.FAILED, "compute cpu", Status.FAILED), True),
    ],
)
def test_full_or_hung_disk_does_not_prevent_training(failed: tuple[Any, ...], prevents: bool) -> None:
    """After a fault a node keeps its slot in spite of faulty checkpoint directories, since memory holds checkpoints."""
    checkups: Any = Mock(config=HealthConfig(before_joining=False))
    others = {"client": Mock(), "journal": Mock(), "timers": Mock()}
    others["journal"].incident.side_effect = lambda kind, summary, **_: Incident(
        kind=kind, evidence={"summary": summary}
    )
    health = NodeHealth(checkups, **others, is_alone=False, run_dir="/run")
    statuses = dict(zip(failed[::2], failed[1::2], strict=True))
    results = tuple(
        CheckResult(
            name=what.partition(" ")[0],
            target=what.partition(" ")[2],
            status=statuses.get(what, Status.OK),
            reason="",
            took_s=0.0,
        )
        for what in ("disk /run", "disk /local", "store s3://bucket", "compute cpu")
    )
    health.suspect()
    health.note_cleared()
    health.take(CheckedUp(Occasion.FAULT, results))
    if checkups.begin.call_count > 1:  # a failure counts only after the workers are gone
        health.take(CheckedUp(Occasion.FAULT, results))
    assert (health.refuse(1) is not None) is prevents
