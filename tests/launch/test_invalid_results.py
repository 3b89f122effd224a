"""Exit code 17 soon after a load leads to a load from another copy, and later to the end of the run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from outlast.errors import ExitReason
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.recovery_policy import RecoveryState
from outlast.testing import Cluster

pytestmark = [pytest.mark.process]

SCRIPT = """
import os, pathlib, sys, threading, time
from outlast.monitor import RankMonitor
from outlast.policy.recovery_point import Tier
from outlast.runtime.board import LoadedCopy
monitor, iteration = RankMonitor(), int(sys.argv[1])
monitor.report_progress()
untrusted = os.environ.get("OUTLAST_UNTRUSTED", "")
print("told", untrusted or "nothing", flush=True)
if "job-0-aa.1" not in untrusted:
    loaded = LoadedCopy(checkpoint=120, attempt="job-0-aa.1", tier=Tier.REPLICA, suspect_window=20)
    monitor.page.set_restored(loaded)
    monitor.set_iteration(iteration)
    monitor.set_durable_iteration(120)
    judged, deadline = pathlib.Path(__file__).with_name("judged"), time.monotonic() + 30
    if os.environ["RANK"] == "1":
        monitor.set_leaving(17)
        judged.touch()
        threading.Event().wait(30)  # its peer, which misses it, is gone first
        raise SystemExit(17)
    if os.environ["WORLD_SIZE"] == "1":
        raise SystemExit(17)
    while not judged.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    raise SystemExit(1)
monitor.finish()
"""


def _run(tmp_path: Path, *, iteration: int, nproc: int = 1) -> tuple[list[int], Cluster]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Cluster(script, str(iteration), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=nproc) as cluster:
        return cluster.wait(timeout_s=300), cluster


def _exclusion_incidents(cluster: Cluster) -> list[Incident]:
    incidents = [
        msgspec.convert(event.data["incident"], Incident)
        for event in cluster.events()
        if event.kind == EventKind.INCIDENT
    ]
    return [incident for incident in incidents if incident.kind == IncidentKind.COPY_UNTRUSTED]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_an_invalid_result_after_a_load_excludes_the_copy(nproc: int, tmp_path: Path) -> None:
    """The run continues in a second cycle with the copy excluded; the journal and ladder.json have the copy, its tier
    and the reason. The rank that detected the result is the root cause, also if its peer exits before it."""
    codes, cluster = _run(tmp_path, iteration=127, nproc=nproc)
    assert codes == [0], cluster.tails()
    assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0, 1}
    (incident,) = _exclusion_incidents(cluster)
    assert (incident.rank, incident.iteration) == (nproc - 1, 127)
    assert (incident.evidence["generation"], incident.evidence["tier"]) == (120, "replica")
    decision = next(event for event in cluster.events() if event.kind == EventKind.DECISION)
    assert decision.data["incident"]["exit_code"] == 17
    assert "is excluded" in decision.data["verdict"]["reason"]
    text = (tmp_path / "run" / "ladder.json").read_text()
    for fact in ('"generation": 120', '"attempt": "job-0-aa.1"', '"tier": "replica"', '"why": "an invalid result at'):
        assert fact in text


def test_an_invalid_result_long_after_a_load_stops_the_run(tmp_path: Path) -> None:
    """An invalid result long after the load ends the run with 17 at once, and no copy is excluded."""
    codes, cluster = _run(tmp_path, iteration=141)
    assert codes == [ExitReason.FAILED_VALIDATION], cluster.tails()
    assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0}
    assert _exclusion_incidents(cluster) == []
    state = msgspec.json.decode((tmp_path / "run" / "ladder.json").read_bytes(), type=RecoveryState)
    assert state.excluded == ()
    assert [load.checkpoint for load in state.loads] == [120]


@pytest.mark.slow
def test_consecutive_invalid_steps_stop_the_run(tmp_path: Path) -> None:
    """A loss that stays NaN costs no restart: the run exits with 17 and reports rank, iteration and number of steps."""
    script = tmp_path / "train.py"
    script.write_text("""
import math, os
import torch.distributed as dist
from outlast.numerics import NonFiniteDetector
dist.init_process_group("gloo")
detector = NonFiniteDetector("skip", max_consecutive=3)
for iteration in range(100, 200):
    detector.check(math.nan if iteration > 104 and os.environ["RANK"] == "1" else 1.0, iteration=iteration)
""")
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2) as cluster:
        assert cluster.wait(timeout_s=300) == [17], cluster.tails()
    assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0}
    (decision,) = (event.data["verdict"] for event in cluster.events() if event.kind == EventKind.DECISION)
    assert "NaN or infinity at iteration 107: loss of rank 1; 3 in a row" in decision["reason"]
    assert "people can look at the data" in decision["reason"]
    assert msgspec.json.decode((tmp_path / "run" / "ladder.json").read_bytes(), type=RecoveryState).node_faults == {}


@pytest.mark.slow
def test_exclusions_apply_to_the_next_job(tmp_path: Path) -> None:
    """Copies that one job excluded are excluded in the first cycle of the run's next job."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for options, code in ((["--max-restarts=0"], 17), ([], 0)):
        with Cluster(
            script, "125", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options
        ) as cluster:
            assert cluster.wait(timeout_s=300) == [code], cluster.tails()
