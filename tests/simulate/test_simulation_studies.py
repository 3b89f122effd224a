"""Studies of many simulated runs, costs from benchmark files, and failure traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.errors import ConfigError
from outlast.incidents import Decision, Event, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.policy.checkpoint_plan import optimal_interval_s
from outlast.policy.recovery_policy import Limits
from outlast.simulate import RecoveryCosts, Scenario, SimulatedFault, read_trace, run_study, simulate
from outlast.simulate.costs import read_costs

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ONE_TIER: dict[str, Any] = {
    "num_ranks": 512,
    "duration_s": 20 * 86400.0,
    "step_s": 1.0,
    "failure_every_s": 10_000.0,
    "process_share": 1.0,
    "hang_share": 0.0,
    "node_share": 0.0,
    "rack_share": 0.0,
    "interval_iterations": 60,
    "global_interval_iterations": 0,
}


def one_tier(**values: Any) -> Scenario:
    """Return a run to which Meta's formula applies: one tier, and failures that a restart recovers."""
    costs = RecoveryCosts(
        save_stall_s=1.0, save_s=0.0, detection_s=5.0, restart_s=5.0, start_up_s=30.0, load_memory_s=5.0
    )
    return Scenario(**ONE_TIER, costs=costs).change(**values)


# -- studies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "every_s"), [(20, 10_000.0), (60, 10_000.0), (200, 20_000.0), (60, 40_000.0)])
def test_the_simulation_matches_the_closed_form(interval: int, every_s: float) -> None:
    """With rare failures the ETTR is that of Young's formula as published by Meta (A. Kokolis et al., 2024)."""
    one = one_tier(interval_iterations=interval, failure_every_s=every_s)
    study = run_study(one, repeats=16, seed=1)
    overhead_s = 5.0 + 5.0 + 30.0 + 5.0 + one.costs.rendezvous_of(one.num_nodes)
    expected = interval / (interval + 1.0) * (1.0 - (overhead_s + (interval + 1.0) / 2.0) / every_s)
    low, high = study.ettr_range
    assert low <= expected <= high
    assert high - low < 0.01, "a range that everything fits into shows nothing"
    assert study.ettr == pytest.approx(expected, abs=1e-3)


@pytest.mark.extended
def test_youngs_interval_is_close_to_the_optimum() -> None:
    """No interval close to Young's optimum is clearly better, and distant ones are clearly worse."""
    one, young_s = one_tier(failure_every_s=3000.0), optimal_interval_s(1.0, 1 / 3000.0)
    found = [run_study(one.change(interval_s=young_s * by), repeats=10).ettr for by in (1 / 8, 1 / 3, 1, 3, 8)]
    assert found[2] > max(found) - 0.002
    assert max(found[0], found[4]) < found[2] - 0.01


def test_a_stopped_run_has_a_reason() -> None:
    """Where the recovery policy stops the run repeatedly, the study has its reason; a higher limit causes fewer
    stops."""
    one = Scenario(num_ranks=131072, num_spares=200, failure_every_s=300.0, duration_s=3 * 86400.0, limits=Limits())
    study = run_study(one, repeats=3)
    assert study.num_stops > 1
    assert "max_no_progress_cycles=3" in study.stop_reason
    assert run_study(one.change(max_no_progress_cycles=6, max_restarts=6), repeats=3).num_stops < study.num_stops


def test_a_study_is_reproducible_and_serialisable() -> None:
    """The same seed gives the same study; the study is plain JSON, and the parts of the time add up."""
    one = Scenario(num_ranks=4096, duration_s=10 * 86400.0)
    fields = [run_study(one, repeats=4, seed=7).to_fields() for _ in range(2)]
    for each in fields:
        del each["wall_s"]
    assert fields[0] == fields[1]
    text = json.dumps(fields[0], allow_nan=False)
    assert sum(json.loads(text)["partition"].values()) == pytest.approx(10 * 86400.0)


def test_a_large_world_has_one_event_per_failure() -> None:
    """A month of 131,072 ranks has as many events as failures, and none per rank or step."""
    run = simulate(Scenario(num_ranks=131072, restart_stopped_s=0.0), 0)
    assert run.num_failures > 2500
    assert sum(run.decisions.values()) <= run.num_failures


# -- scenarios ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"duration_s": 0.0}, "duration_s=0.0 must be above 0"),
        ({"num_spares": -1}, "num_spares=-1 must be 0 or more"),
        ({"process_share": 0.9}, "must sum to 1"),
        ({"process_share": 1.7, "node_share": -0.76}, "must be between 0 and 1"),
        ({"num_ranks": 12}, "must be a multiple of ranks_per_node=8"),
        ({"replication": 4000}, "needs as many nodes"),
        ({"replication_jump": 3}, "must be a multiple"),
        ({"interval_s": 10.0, "interval_iterations": 3}, "set the same value"),
        ({"step_s": math.nan}, "step_s=nan must be above 0"),
        ({"weibull_shape": 0.01}, "must be at least 0.2"),
        ({"trace": ()}, "holds no fault"),
        ({"rank_mttf_hours": 0.0}, "must be above 0 hours"),
    ],
)
def test_an_invalid_scenario_is_rejected(values: dict[str, Any], message: str) -> None:
    """A value out of range, or one that contradicts another, is rejected in one line."""
    with pytest.raises(ConfigError, match=message):
        Scenario(**values)


def test_the_default_mttf_matches_published_failure_rates() -> None:
    """The default time to failure gives the rate that Meta measured on 16,384 GPUs and expects on 131,072."""
    assert 1 / Scenario(num_ranks=16384).failures_per_s == pytest.approx(1.8 * 3600, rel=0.01)
    assert 1 / Scenario(num_ranks=131072).failures_per_s == pytest.approx(14 * 60, rel=0.05)
    assert 1 / Scenario(num_ranks=1024, rank_mttf_hours=8090).failures_per_s == pytest.approx(7.9 * 3600, rel=0.01)


# -- costs -------------------------------------------------------------------------------------------------------------


def write_result(path: Path, bench: str, *bars: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"bench": bench, "machine": {}, "bars": [{"bar": 1.0} | bar for bar in bars]}))
    return path


def test_costs_are_read_from_benchmark_files(tmp_path: Path) -> None:
    """Results of several files become costs: ratios are multiplied by the peer's value, and times exclude what another
    cost includes."""
    stall = {"name": "stall_vs_memcpy", "value": 0.5, "unit": "x", "peer": "copy (s)", "peer_value": 0.2}
    durable = {"name": "durable_vs_dcp_save", "value": 0.5, "unit": "x", "peer": "dcp.save (s)", "peer_value": 3.0}
    unknown = {"name": "of_tomorrow", "value": 5, "unit": "s"}
    missing = {"name": "load_verified_vs_torch_load", "value": None, "unit": "x", "peer": "t (s)", "peer_value": None}
    detected = {"name": "death_noticed_ms", "value": 20.0, "unit": "ms"}
    restart = {"name": "restart_vs_torchrun_2", "value": 0.1, "unit": "x", "peer": "torchrun (s)", "peer_value": 4.0}
    files = [
        write_result(tmp_path / "save.json", "save", stall, durable, unknown, missing),
        write_result(tmp_path / "restart.json", "restart", detected, restart),
    ]
    found = read_costs(files)
    assert found == RecoveryCosts(
        save_stall_s=0.1, global_save_stall_s=0.1, save_s=1.4, detection_s=0.02, restart_s=0.38
    )
    both = tmp_path / "both.jsonl"
    both.write_text("".join(file.read_text() + "\n" for file in files))
    assert read_costs([both]) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no value that a simulation uses"),
        ("nonsense", "is not a result of a benchmark"),
        (
            '{"bench": "heartbeat", "bars": [{"name": "heartbeat_us", "value": 1, "unit": "us", "bar": 1}]}',
            "has no value that a simulation uses",
        ),
        (
            '{"bench": "save", "bars": [{"name": "stall_vs_memcpy", "value": null, "unit": "x", "bar": 1}]}',
            "has no value that a simulation uses",
        ),
        ("[1, 2]", "is not a result of a benchmark"),
    ],
)
def test_a_file_without_costs_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    """A file without a usable value is rejected in one line, whatever its content."""
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_costs([path])


def test_default_costs_are_close_to_measured_ones() -> None:
    """The committed benchmark results can be read, and the defaults have their order of magnitude."""
    names = [name for name in ("restart", "save", "load", "rendezvous") if (RESULTS / f"{name}.json").exists()]
    found, defaults = read_costs([RESULTS / f"{name}.json" for name in names]), RecoveryCosts()
    for field in ("detection_s", "restart_s", "save_stall_s", "save_s", "load_local_s", "load_memory_s"):
        measured, default = getattr(found, field), getattr(defaults, field)
        assert default / 5 < measured < default * 5, f"{field}: {measured} was measured, the default is {default}"


# -- traces ------------------------------------------------------------------------------------------------------------


def test_csv_and_json_traces_are_equivalent(tmp_path: Path) -> None:
    """Both forms give the same faults; dates count from the first one, and node names become numbers."""
    table, objects, dated = tmp_path / "t.csv", tmp_path / "t.json", tmp_path / "dated.csv"
    table.write_text("time,kind,node\n60,node_lost,b\n10.5,process,a\n90,hang,\n95,worker_died,b\n")
    rows = [{"time": 60, "kind": "node", "node": 0}, {"time": 10.5, "kind": "process", "node": 1}]
    objects.write_text(json.dumps([*rows, {"time": 90, "kind": "hang"}, {"time": 95, "kind": "process", "node": 0}]))
    dated.write_text("time,kind\n2026-03-01T00:01:00+00:00,rack\n2026-03-01T00:00:00,process\n")
    assert read_trace(table) == read_trace(objects)
    assert [(fault.time_s, fault.kind, fault.slot) for fault in read_trace(table)] == [
        (10.5, SimulatedFault.PROCESS, 1),
        (60.0, SimulatedFault.NODE, 0),
        (90.0, SimulatedFault.HANG, None),
        (95.0, SimulatedFault.PROCESS, 0),
    ]
    assert [fault.time_s for fault in read_trace(dated)] == [0.0, 60.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,kind\n5,nodes\n", "did you mean 'node'"),
        ("time,node\n5,a\n", "has no kind"),
        ("time,kind\nlater,node\n", "neither seconds nor a date"),
        ("time,kind\n-5,node\n", "must be 0 or more"),
        ("time,kind\n5,node\n2026-03-01,node\n", "both seconds and dates"),
        ("time,kind\n", "holds no fault"),
        ("[1]", "must be a list of objects"),
        ("[{]", "is not JSON"),
    ],
)
def test_an_invalid_trace_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    """An invalid trace is rejected in one line that names the error."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


@pytest.mark.extended
def test_a_run_directory_can_be_a_trace(tmp_path: Path) -> None:
    """The faults are the incidents that ended a cycle, at the time of each; consequences of an incident, and incidents
    that ended no cycle, are not faults."""
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_trace(tmp_path)

    def event(kind: EventKind, at_s: float, **data: Any) -> bytes:
        common: dict[str, Any] = {"run_id": "r", "job": "j", "node": "a", "proc": "coordinator", "mono_ns": 0}
        return msgspec.json.encode(Event(kind=kind, wall_ns=int(at_s * 1e9), data=data, **common)) + b"\n"

    died = Incident(kind=IncidentKind.WORKER_DIED, job="j", node="b", rank=3, detected_after_s=0.5)
    peer = Incident(kind=IncidentKind.WORKER_FAILED, job="j", node="a", rank=0)
    lost = Incident(kind=IncidentKind.NODE_LOST, job="j", cycle=1, node="a")
    slow = Incident(kind=IncidentKind.STRAGGLER, job="j", cycle=1, node="a", rank=0)
    decision = Decision(recovery_level=RecoveryLevel.RESTART_WORKERS, reason="so")
    (tmp_path / "journal").mkdir()
    lines = [
        event(EventKind.JOB_STARTED, 1000.0),
        event(EventKind.INCIDENT, 1100.0, incident=died),
        event(EventKind.INCIDENT, 1100.1, incident=peer),
        event(EventKind.INCIDENT, 1150.0, incident=slow),
        event(EventKind.INCIDENT, 1200.0, incident=lost),
    ]
    expected = [(99.5, SimulatedFault.PROCESS, 0), (200.0, SimulatedFault.NODE, 1)]
    path = tmp_path / "journal" / "a.jsonl"
    path.write_bytes(b"".join(lines))
    assert [(one.time_s, one.kind, one.slot) for one in read_trace(tmp_path)] == expected
    judged = [
        event(EventKind.DECISION, at, incident=one, verdict=decision) for at, one in ((1100.2, died), (1200.0, lost))
    ]
    path.write_bytes(b"".join(lines + judged))
    assert [one.kind for one in read_trace(tmp_path)] == [kind for _, kind, _ in expected]
