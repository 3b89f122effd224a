"""The demo: its faults, its claims evaluated on journal events, and complete runs with real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import psutil
import pytest

from outlast.chaos import FaultKind, FaultPlan
from outlast.goodput import IncidentCost
from outlast.incidents import Decision, Event, EventKind, IncidentKind, RecoveryLevel
from outlast.journal import read

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
RANKS = range(4)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # its dataclasses look up their module
    spec.loader.exec_module(module)
    return module


demo = load()


def event(kind: EventKind, at_s: float = 0, *, job: str = "first", cycle: int = 3, **fields: Any) -> Event:
    """Return an event that was written at ``at_s`` seconds."""
    ns, names = round(at_s * 1e9), ("node", "proc", "rank", "iteration")
    given: dict[str, Any] = {"node": "node-0", "proc": "agent"}
    given |= {name: fields.pop(name) for name in names if name in fields}
    return Event(kind=kind, wall_ns=ns, mono_ns=ns, run_id="r", job=job, cycle=cycle, data=fields, **given)


def failed(claims: Any) -> list[str]:
    """Return the text and the evidence of the claims that do not hold."""
    return [f"{claim.text}: {claim.evidence}" for claim in claims if not claim.holds]


# -- the faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_seed_draws_each_fault_kind_in_a_survivable_order(seed: int) -> None:
    """The same seed draws the same faults; the slow rank is first, and between two lost nodes a spare has time to
    join."""
    faults = demo.draw_faults(seed)
    assert faults == demo.draw_faults(seed)
    kinds = [fault.kind for fault in faults]
    assert sorted(kinds) == sorted([*demo.EXPECTED, FaultKind.SLOW, FaultKind.SIGTERM])
    assert kinds[0] == FaultKind.SLOW
    assert kinds[-2:] == [FaultKind.LOSE_NODE_AND_REPLICAS, FaultKind.SIGTERM]
    assert kinds[-3] != FaultKind.LOSE_NODE
    assert FaultPlan.from_mapping(FaultPlan(faults=tuple(faults)).to_mapping()).faults == tuple(faults)


def test_seeds_draw_different_orders() -> None:
    """Most of twenty seeds draw different orders."""
    assert len({tuple(fault.kind for fault in demo.draw_faults(seed)) for seed in range(20)}) > 10


def test_fault_waits_for_the_previous_recovery_and_all_nodes() -> None:
    """No fault is injected before the slow rank is identified, or its detection is abandoned, nor between a NaN and
    its decision."""
    slow = event(EventKind.FAULT_SIMULATED, 1, fault="slow", rank=1)
    identified = event(EventKind.STRAGGLER_REPORT, 2, named=[1])
    joined = [event(EventKind.NODE_JOINED, 0, name=name) for name in ("a", "b")]
    assert not demo.is_ready([*joined, identified], ["a"])
    assert not demo.is_ready([*joined, slow], ["a"])
    assert demo.is_ready([*joined, slow, *[event(EventKind.STRAGGLER_REPORT, 2, named=[])] * 8], ["a"])
    assert demo.is_ready([*joined, slow, identified], ["a", "b"])
    assert not demo.is_ready([*joined, slow, identified], ["a", "b", "c"])
    nan = [*joined, slow, identified, event(EventKind.FAULT_SIMULATED, 3, fault="nan", rank=0)]
    assert not demo.is_ready(nan, ["a"])
    decision = event(EventKind.INCIDENT, 4, incident={}, verdict={"rung": int(RecoveryLevel.RERUN_STEP)})
    assert demo.is_ready([*nan, decision], ["a"])


# -- the claims --------------------------------------------------------------------------------------------------------


def report(at_s: float, iteration: int, *named: int, cycle: int = 0) -> Event:
    return event(EventKind.STRAGGLER_REPORT, at_s, cycle=cycle, rank=0, iteration=iteration, named=list(named))


def slow_rank_events(since: int, *reports: Event) -> list[Event]:
    injected = event(EventKind.FAULT_SIMULATED, 1, cycle=0, rank=3, iteration=since, fault="slow")
    incident = {"kind": IncidentKind.STRAGGLER, "rank": 3, "evidence": {"summary": "6 times as long"}}
    return [injected, *reports, event(EventKind.INCIDENT, 4, cycle=0, incident=incident)]


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (slow_rank_events(2, report(2, 8), report(3, 13), report(4, 18, 3)), None),
        (slow_rank_events(10, report(2, 8), report(3, 13), report(4, 18), report(5, 22), report(6, 26, 3)), None),
        (slow_rank_events(2, report(2, 8), report(3, 13), report(4, 18), report(5, 22, 3)), None),
        (slow_rank_events(0, report(2, 8), report(3, 13), report(4, 18), report(5, 22, 3)), "all the time: report 4"),
        (slow_rank_events(2, report(2, 8), report(3, 13)), "it was not identified"),
        (slow_rank_events(2, report(2, 8, 3, 1)), "no other rank is identified: ranks [1]"),
        (slow_rank_events(2, report(2, 8, 3), report(9, 30, 3, cycle=1)), "no other rank is identified: ranks [3]"),
        (
            [*slow_rank_events(2, report(2, 8, 3)), event(EventKind.DECISION, 5, incident={"exit_code": 18})],
            "1 restarts",
        ),
        ([], "no rank was slowed down"),
    ],
)
def test_only_the_slow_rank_is_identified_and_in_time(events: list[Event], problem: str | None) -> None:
    """The window in which the rank became slow does not count; after a restart the rank must not be identified."""
    found = failed(demo.check_slow_rank(events))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def cost(kind: FaultKind, **fields: Any) -> IncidentCost:
    """Return the incident cost of a fault of rank 2, or of its node."""
    facts: dict[str, Any] = {"tensor": "model.w"} if kind == FaultKind.BIT_FLIP else {"replicas_corrupted": 4}
    injected = event(EventKind.FAULT_SIMULATED, 10, cycle=0, fault=str(kind), **facts)
    given: dict[str, Any] = {"index": 0, "kind": "", "text": "", "recovery_level": "", "at_s": 10.5, "fault": injected}
    given |= {"job": "first", "cycle": 0, "node": "node-1", "rank": None if kind in demo.LOST else 2}
    return IncidentCost(**given | fields)


def next_cycle(tiers: str, *, iteration: int = 30, global_bytes: int = 0, rejected: int = 0) -> list[Event]:
    """Return the events of two cycles; in the second one rank i is restored from the tier with the i-th initial."""
    names = {"m": "memory", "l": "local", "r": "replica", "g": "global"}
    starts = [event(EventKind.CYCLE_STARTED, 0, cycle=0, node=f"node-{i}", ranks=[2 * i, 2 * i + 1]) for i in range(2)]
    saves = [event(EventKind.SAVE_COMMITTED, at_s, iteration=at_s * 10, tiers=["global"]) for at_s in (1, 3, 11)]
    copies = [{"kind": IncidentKind.COPY_REJECTED, "evidence": {"tier": "replica"}}] * rejected
    restored = [
        event(
            EventKind.RESTORED,
            12,
            cycle=1,
            rank=rank,
            iteration=iteration,
            tier=names[initial],
            bytes_read={"global": global_bytes} if rank == 0 else {},
        )
        for rank, initial in enumerate(tiers)
    ]
    return [*starts, *saves, *(event(EventKind.INCIDENT, 11.5, cycle=1, incident=one) for one in copies), *restored]


@pytest.mark.parametrize(
    ("kind", "events", "holds"),
    [
        (FaultKind.KILL, next_cycle("mmlm"), True),
        (FaultKind.STOP, next_cycle("mmrm"), False),
        (FaultKind.KILL, next_cycle("mmmm", global_bytes=5), False),
        (FaultKind.KILL, next_cycle("mmm"), False),
        (FaultKind.LOSE_NODE, next_cycle("mmrr"), True),
        (FaultKind.LOSE_NODE, next_cycle("mmrg"), False),
        (FaultKind.BIT_FLIP, next_cycle("mmrr"), True),
        (FaultKind.BIT_FLIP, next_cycle("mmmm"), False),
        (FaultKind.LOSE_NODE_AND_REPLICAS, next_cycle("llgg", global_bytes=9, rejected=2), True),
        (FaultKind.LOSE_NODE_AND_REPLICAS, next_cycle("llrg", rejected=2), False),
        (FaultKind.LOSE_NODE_AND_REPLICAS, next_cycle("llgg", rejected=1), False),
        (FaultKind.LOSE_NODE_AND_REPLICAS, next_cycle("llgg", rejected=2, iteration=20), False),
    ],
)
def test_ranks_resume_from_the_expected_tiers(kind: FaultKind, events: list[Event], holds: bool) -> None:
    """Ranks resume from memory or disk after a rank's death, from replicas after a node's loss, and from the newest
    global checkpoint without replicas."""
    assert bool(failed(demo.check_sources(kind, cost(kind), events))) != holds


def test_claim_fails_without_corrupted_replicas() -> None:
    """The claim does not hold if the fault corrupted no replica."""
    kind = FaultKind.LOSE_NODE_AND_REPLICAS
    injected = event(EventKind.FAULT_SIMULATED, 10, fault=str(kind), replicas_corrupted=0)
    assert failed(demo.check_sources(kind, cost(kind, fault=injected), next_cycle("llgg", rejected=2)))


def test_invalid_results_are_diagnosed() -> None:
    """A NaN is diagnosed as transient; for a flipped bit the tensor is identified and the node quarantined."""
    decision = Decision(recovery_level=RecoveryLevel.REPLACE_NODE, reason="", quarantine=("node-1",))
    for finding, num_failed in (("transient", 0), ("persistent", 1)):
        nan = cost(FaultKind.NAN, evidence={"diagnosis": {"finding": finding, "what": "loss"}})
        assert len(failed(demo.check_invalid_result(FaultKind.NAN, nan))) == num_failed
    for tensor, quarantined, num_failed in (
        ("model.w", ("node-1",), 0),
        ("model.v", ("node-1",), 1),
        ("model.w", (), 1),
    ):
        decision = msgspec.structs.replace(decision, quarantine=quarantined)
        flip = cost(FaultKind.BIT_FLIP, evidence={"diagnosis": {"what": tensor}}, decision=decision)
        assert len(failed(demo.check_invalid_result(FaultKind.BIT_FLIP, flip))) == num_failed


def preempted_run() -> dict[str, list[Event]]:
    """Return the events of a job in which rank 2 is preempted, and of the next job, by part."""
    return {
        "fault": [event(EventKind.FAULT_SIMULATED, 10, rank=2, iteration=86, fault="sigterm")],
        "notice": [event(EventKind.NOTICE, 10.1, rank=2)],
        "saves": [event(EventKind.SAVE_COMMITTED, 10.2, rank=r, iteration=87, tiers=["global"]) for r in RANKS],
        "ends": [event(EventKind.SESSION_ENDED, 10.4, rank=rank, iteration=87, exit_code=75) for rank in RANKS],
        "job": [event(EventKind.JOB_ENDED, 11, exit_code=75)],
        "restored": [event(EventKind.RESTORED, 14, job="second", cycle=0, rank=r, iteration=87) for r in RANKS],
        "second": [event(EventKind.JOB_ENDED, 16, job="second", exit_code=0)],
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"fault": []}, "no rank was preempted"),
        ({"notice": []}, "rank 2 receives it: 0 notices"),
        ({"ends": preempted_run()["ends"][:3]}, "all ranks exit after one iteration"),
        ({"job": [event(EventKind.JOB_ENDED, 11, exit_code=143)]}, "the job's exit codes: {143}"),
        ({"saves": preempted_run()["saves"][:3]}, "3 ranks have committed 87"),
        ({"saves": []}, "0 ranks have committed 87"),
        ({"restored": []}, "the next job resumes from that iteration"),
        ({"second": [event(EventKind.JOB_ENDED, 16, job="second", exit_code=1)]}, "the job's exit codes: {1}"),
    ],
)
def test_preemption_loses_no_iteration(changes: dict[str, list[Event]], problem: str | None) -> None:
    """The notice is received, all ranks save and exit together with 75, and the next job resumes from that iteration
    and completes."""
    events = [one for part in (preempted_run() | changes).values() for one in part]
    found = failed(demo.check_preemption(events))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_different_or_missing_results_are_not_identical() -> None:
    """Every value is compared, and a missing result does not prove the claim."""
    result = {"weights": "abc", "optimizer": "b", "losses": "c", "iterations": 150}
    assert demo.check_result(result, dict(result)).holds
    assert not demo.check_result(result, result | {"losses": "x"}).holds
    assert not demo.check_result(result, {}).holds
    assert not demo.check_result({}, {}).holds


# -- complete runs -----------------------------------------------------------------------------------------------------


def start(temporary: Path, *options: str) -> subprocess.Popen[str]:
    """Start the demo with a separate folder for temporary files, which also identifies its processes."""
    program = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-c", program, str(SCRIPT), *options],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def running_processes(temporary: Path) -> list[psutil.Process]:
    def has_folder(pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"TMPDIR={temporary}".encode() in environment.split(b"\0")

    return [process for process in psutil.process_iter() if has_folder(process.pid)]


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(700)
def test_faults_do_not_change_the_result(tmp_path: Path) -> None:
    """All claims hold, the journal contains each fault once, and no process or temporary file remains."""
    temporary, kept = tmp_path / "tmp", tmp_path / "kept"
    temporary.mkdir()
    process = start(temporary, "--json", "--seed=3", f"--keep={kept}")
    output, errors = process.communicate(timeout=650)
    assert process.returncode == 0, output + errors
    result = json.loads(output)
    assert result["bit_identical"] is True
    assert [claim for claim in result["claims"] if not claim["holds"]] == []
    assert len(result["claims"]) == 30
    assert sorted(row["fault"] for row in result["faults"]) == sorted(fault.kind for fault in demo.draw_faults(3))
    for row in result["faults"]:
        assert row["detected_after_s"] >= 0
        assert row["fault"] == "slow" or row["recovered_after_s"] >= row["detected_after_s"]
    assert (result["cycles"], result["jobs"], result["folder"]) == (7, 2, str(kept))
    events = list(read(kept / "with-faults" / "run"))
    assert sum(event.kind == EventKind.FAULT_SIMULATED for event in events) == 8
    assert (kept / "with-faults" / "run").is_dir()
    assert list(temporary.glob("outlast-demo-*")) == []
    assert running_processes(temporary) == []


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_demo_and_removes_its_files(tmp_path: Path, number: int, code: int) -> None:
    """No process and no file of the demo remains after SIGINT or SIGTERM."""
    process = start(tmp_path)
    try:
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("outlast-demo-*/undisturbed/run/journal/*rank-0.jsonl")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the training did not start"
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=300)
        assert process.returncode == code
        assert running_processes(tmp_path) == []
        assert list(tmp_path.glob("outlast-demo-*")) == []
    finally:
        for remaining in running_processes(tmp_path):
            remaining.kill()
        process.wait(timeout=300)


@pytest.mark.slow
def test_folder_with_files_is_rejected_before_the_start(tmp_path: Path) -> None:
    """Exit code 2, an error that contains the remedy, and an unchanged folder."""
    (tmp_path / "file").write_text("")
    process = start(tmp_path, f"--keep={tmp_path}")
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, output) == (2, "")
    assert "is not an empty folder; name a new one" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
