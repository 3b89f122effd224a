"""Many runs of a scenario: the closed form, intervals of means, advice, sweeps, costs from files, traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.errors import ConfigError
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung, Verdict
from outlast.policy.checkpoint_plan import optimal_interval_s
from outlast.policy.ladder import Limits
from outlast.simulate import (
    RecoveryCosts,
    Scenario,
    SimulatedFault,
    best_intervals,
    evaluate,
    parse_sweep,
    read_trace,
    run_study,
    run_sweep,
    simulate,
)
from outlast.simulate.closed_form import ettr, global_share
from outlast.simulate.costs import read_costs
from outlast.simulate.study import interval_of, quantile_of_t

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
    """Return a run that Meta's formula is about: one tier, failures that a restart cures."""
    costs = RecoveryCosts(
        save_stall_s=1.0, save_s=0.0, detection_s=5.0, restart_s=5.0, start_up_s=30.0, load_memory_s=5.0
    )
    return Scenario(**ONE_TIER, costs=costs).change(**values)


# -- the closed form ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "every_s"), [(20, 10_000.0), (60, 10_000.0), (200, 20_000.0), (60, 40_000.0)])
def test_the_simulation_agrees_with_the_closed_form(interval: int, every_s: float) -> None:
    """Where the interval is short against the time between failures, the formula's ETTR lies in the interval."""
    one = one_tier(interval_iterations=interval, failure_every_s=every_s)
    study = run_study(one, repeats=16, seed=1, advise=False)
    overhead_s = 5.0 + 5.0 + 30.0 + 5.0 + one.costs.rendezvous_of(one.num_nodes)
    metas = ettr(interval_s=interval * 1.0, stall_s=1.0, overhead_s=overhead_s, mtbf_s=every_s)
    low, high = study.ettr_ci
    assert low <= metas <= high
    assert high - low < 0.002, "an interval that everything fits into shows nothing"
    assert study.agrees
    assert study.closed_form.holds
    assert study.closed_form.ettr == pytest.approx(metas, abs=1e-4)


def test_the_closed_form_knows_two_tiers() -> None:
    """With near tiers, node losses and racks, too, the formula agrees where failures are rare."""
    one = Scenario(
        num_ranks=4096,
        num_spares=64,
        failure_every_s=30_000.0,
        duration_s=120 * 86400.0,
        rack_share=0.05,
        node_share=0.2,
    )
    study = run_study(one, repeats=20, advise=False)
    assert study.agrees, (study.ettr_ci, study.closed_form)
    assert study.loads["global"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(num_ranks=131072),  # some 3,200 failures a run, and the ladder stops it twice
        one_tier(failure_every_s=600.0),
        one_tier(
            failure_every_s=300.0,
            interval_iterations=20,
            limits=Limits(max_restarts=99, max_no_progress_cycles=99, max_restart_delay_s=0.0),
        ),
        one_tier(failure_every_s=600.0, limits=Limits(max_restarts=2, max_no_progress_cycles=2)),
    ],
    ids=["131072 ranks", "one tier", "without a limit", "with a low limit"],
)
def test_the_closed_form_knows_failures_that_are_not_rare(scenario: Scenario) -> None:
    """Those that come during a recovery, and runs that are stopped for want of progress: it lies in the interval."""
    study = run_study(scenario, advise=False)
    form, (low, high) = study.closed_form, study.ettr_ci
    assert form.holds
    assert study.agrees, (study.ettr_ci, form)
    assert not low <= form.first_order <= high
    assert form.num_stops == pytest.approx(study.num_stops, rel=0.3, abs=0.5)


@pytest.mark.parametrize(
    "values",
    [
        {"failure_every_s": 60.0},
        {"weibull_shape": 0.7},
        {"restart_stopped_s": None},
        {"process_share": 0.0, "node_share": 1.0, "num_spares": 0},
    ],
)
def test_the_closed_form_says_what_it_is_not_about(values: dict[str, Any]) -> None:
    """Failures that leave little time, bursts, runs that stay stopped, waits for nodes."""
    assert evaluate(one_tier(failure_every_s=3000.0)).holds
    assert not evaluate(one_tier(failure_every_s=3000.0).change(**values)).holds


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0.01),  # partners are neighbours, and racks of two hold both
        ({"replication_jump": 16}, 0.0),
        ({"replication": 1}, 0.25),
        ({"interval_s": 0.0}, 1.0),
    ],
)
def test_the_share_that_needs_the_global_tier(values: dict[str, Any], expected: float) -> None:
    """Which failures take the near copies along follows from who holds them."""
    # Of 128 nodes in racks of two every even one has its partner in its rack.
    assert global_share(Scenario(num_ranks=1024).change(**values)) == pytest.approx(expected)


def test_the_best_intervals_are_youngs() -> None:
    """The best interval weighs a save's stall against the failures that its tier is for."""
    best = best_intervals(Scenario(num_ranks=16384, replication=1, node_share=0.25, rack_share=0.0))
    rate = Scenario(num_ranks=16384).failures_per_s
    assert best.near_s == pytest.approx(optimal_interval_s(0.07, 0.75 * rate))
    assert best.global_s == pytest.approx(optimal_interval_s(0.07, 0.25 * rate))


def test_without_failures_the_formula_is_the_savings_alone() -> None:
    """No failures, no losses: tau / (tau + C)."""
    one = one_tier(rank_mttf_hours=math.inf, failure_every_s=None)
    assert evaluate(one).ettr == pytest.approx(60 / 61)
    assert ettr(interval_s=60, stall_s=1, overhead_s=99, mtbf_s=math.inf) == pytest.approx(60 / 61)


def test_youngs_interval_is_about_the_best_that_is_simulated() -> None:
    """Of intervals around Young's none gives clearly more than his."""
    one = one_tier(failure_every_s=3000.0)
    young_s = optimal_interval_s(1.0, 1 / 3000.0)
    sweep = parse_sweep(f"interval={young_s / 8},{young_s / 3},{young_s},{young_s * 3},{young_s * 8}")
    rows = run_sweep(one, sweep, repeats=10).rows
    assert rows[2].ettr > max(row.ettr for row in rows) - 0.001
    assert rows[0].ettr < rows[2].ettr - 0.01
    assert rows[4].ettr < rows[2].ettr - 0.01


# -- studies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "freedom", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 9, 2.262),
        (0.995, 5, 4.032),
        (0.975, 999, 1.962),
    ],
)
def test_quantiles_are_students(share: float, freedom: int, expected: float) -> None:
    """The quantiles are those of the tables."""
    assert quantile_of_t(share, freedom) == pytest.approx(expected, rel=5e-3)


def test_the_interval_of_a_mean() -> None:
    """The interval is the one of Student's t: of 1, 2, 3, 4 it is 2.5 and 2.054 to both sides."""
    assert interval_of([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5 - 2.054, 2.5 + 2.054), abs=5e-3)


def test_advice_is_best_first_and_true() -> None:
    """What is advised pays when it is done, by about as much as it says, and the best comes first."""
    one = Scenario(num_ranks=1024, rank_mttf_hours=8000.0, num_spares=0, interval_s=3600.0)
    study = run_study(one, repeats=12)
    gains = [advice.gain_points for advice in study.advice]
    assert gains == sorted(gains, reverse=True)
    assert "more spare" in study.advice[0].text
    assert any("near tiers every" in advice.text and "instead of 3600 s" in advice.text for advice in study.advice)
    better = run_study(one.change(**study.advice[0].change), repeats=12, advise=False)
    assert 100 * (better.ettr - study.ettr) == pytest.approx(gains[0], abs=0.2)
    assert all(advice.gain_ci[0] > 0 for advice in study.advice)


def test_nothing_is_advised_where_nothing_pays() -> None:
    """Without failures, and with saves that cost nothing, no change lies outside the noise."""
    one = Scenario(num_ranks=64, rank_mttf_hours=math.inf)
    assert [advice.text for advice in run_study(one.change(start_up_s=0.0), repeats=4).advice] == []


def test_a_ladder_that_stops_the_run_is_advised_to_allow_more() -> None:
    """Where the run stops without progress again and again, more such cycles are advised, with the setting's name."""
    one = Scenario(num_ranks=131072, num_spares=200, failure_every_s=300.0, duration_s=3 * 86400.0, limits=Limits())
    study = run_study(one, repeats=6)
    assert study.num_stops > 1
    assert "max_no_progress_cycles=3" in study.stop_reason
    assert any("max_no_progress_cycles=6" in advice.text for advice in study.advice)


def test_a_study_is_repeatable_and_becomes_json() -> None:
    """The same seed gives the same study; all of it is plain JSON, and the parts of the time add up."""
    one = Scenario(num_ranks=4096, duration_s=10 * 86400.0)
    fields = [run_study(one, repeats=4, seed=7).to_fields() for _ in range(2)]
    for each in fields:
        del each["wall_s"]
    assert fields[0] == fields[1]
    text = json.dumps(fields[0], allow_nan=False)
    assert sum(json.loads(text)["partition"].values()) == pytest.approx(10 * 86400.0)


def test_a_large_world_takes_seconds() -> None:
    """A month of 131,072 ranks is as many events as it has failures: none is made for a rank or a step."""
    run = simulate(Scenario(num_ranks=131072, restart_stopped_s=0.0), 0)
    assert run.num_failures > 2500
    assert sum(run.verdicts.values()) <= run.num_failures


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_sweeps_are_lists_and_ranges() -> None:
    """A sweep names its values, or from, to and step, the end included."""
    assert parse_sweep("interval=10,30,60").values == (10.0, 30.0, 60.0)
    assert parse_sweep("spares=0:8:2").values == (0.0, 2.0, 4.0, 6.0, 8.0)
    assert parse_sweep("replication=1:3").values == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("interval", "must be NAME=VALUE"),
        ("intervall=10", "did you mean 'interval'"),
        ("spares=a,b", "must be numbers"),
        ("spares=1.5", "must be whole numbers"),
        ("spares=0:8:0", "must be numbers"),
        ("spares=8:0:2", "has 0 values"),
        ("spares=0:1e9:1", "has 201 values"),
        ("interval=inf", "must be finite"),
    ],
)
def test_a_wrong_sweep_is_refused(text: str, says: str) -> None:
    """What is no sweep is refused, in one line that says what one looks like."""
    with pytest.raises(ConfigError, match=says):
        parse_sweep(text)


@pytest.mark.parametrize(
    "text",
    [
        "interval=10,60",
        "interval-iterations=1,9",
        "global-interval=60,600",
        "global-interval-iterations=9",
        "spares=0,3",
        "replication=1,2",
        "replication-jump=8,16",
        "ranks=1024,2048",
        "mttf=8000,30000",
        "failure-every=300",
        "repair=1,24",
        "hang-timeout=60",
        "restart=9",
        "start-up=30,90",
        "save-stall=0.1,3",
        "max-no-progress-cycles=3,9",
    ],
)
def test_everything_that_can_be_swept_is(text: str) -> None:
    """Each name of a sweep changes a setting of the scenario, from the other unit of an interval, too."""
    sweep = parse_sweep(text)
    for one in (
        Scenario(num_ranks=1024, duration_s=86400.0),
        Scenario(num_ranks=1024, duration_s=86400.0, interval_iterations=5),
    ):
        assert [row.value for row in run_sweep(one, sweep, repeats=2).rows] == list(sweep.values)


# -- scenarios ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"duration_s": 0.0}, "duration_s=0.0 must be above 0"),
        ({"num_spares": -1}, "num_spares=-1 must be 0 or more"),
        ({"process_share": 0.9}, "must sum to 1"),
        ({"process_share": 1.7, "node_share": -0.76}, "must be between 0 and 1"),
        ({"num_ranks": 12}, "must be a multiple of ranks_per_node=8"),
        ({"replication": 4000}, "needs as many nodes"),
        ({"replication_jump": 3}, "must be a multiple"),
        ({"interval_s": 10.0, "interval_iterations": 3}, "say the same"),
        ({"step_s": math.nan}, "step_s=nan must be above 0"),
        ({"weibull_shape": 0.01}, "must be at least 0.2"),
        ({"trace": ()}, "holds no fault"),
        ({"rank_mttf_hours": 0.0}, "must be above 0 hours"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(values: dict[str, Any], says: str) -> None:
    """A value out of range, or one that contradicts another, is refused in one line."""
    with pytest.raises(ConfigError, match=says):
        Scenario(**values)


def test_metas_figures_follow_from_the_default() -> None:
    """The default time to a failure gives what Meta saw on 16,384 GPUs and expects on 131,072."""
    assert 1 / Scenario(num_ranks=16384).failures_per_s == pytest.approx(1.8 * 3600, rel=0.01)
    assert 1 / Scenario(num_ranks=131072).failures_per_s == pytest.approx(14 * 60, rel=0.05)
    assert 1 / Scenario(num_ranks=1024, rank_mttf_hours=8090).failures_per_s == pytest.approx(7.9 * 3600, rel=0.01)


# -- costs -------------------------------------------------------------------------------------------------------------


def write_result(path: Path, bench: str, *bars: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"bench": bench, "machine": {}, "bars": [{"bar": 1.0} | bar for bar in bars]}))
    return path


def test_costs_come_from_bench_files(tmp_path: Path) -> None:
    """Figures of several files become costs: ratios through their peer's figure, times without what is in another."""
    stall = {"name": "stall_vs_memcpy", "value": 0.5, "unit": "x", "peer": "copy (s)", "peer_value": 0.2}
    durable = {"name": "durable_vs_dcp_save", "value": 0.5, "unit": "x", "peer": "dcp.save (s)", "peer_value": 3.0}
    unknown = {"name": "of_tomorrow", "value": 5, "unit": "s"}
    missing = {"name": "load_verified_vs_torch_load", "value": None, "unit": "x", "peer": "t (s)", "peer_value": None}
    noticed = {"name": "death_noticed_ms", "value": 20.0, "unit": "ms"}
    restart = {"name": "restart_vs_torchrun_2", "value": 0.1, "unit": "x", "peer": "torchrun (s)", "peer_value": 4.0}
    files = [
        write_result(tmp_path / "save.json", "save", stall, durable, unknown, missing),
        write_result(tmp_path / "restart.json", "restart", noticed, restart),
    ]
    found = read_costs(files)
    assert found == RecoveryCosts(
        save_stall_s=0.1, global_save_stall_s=0.1, save_s=1.4, detection_s=0.02, restart_s=0.38
    )
    both = tmp_path / "both.jsonl"
    both.write_text("".join(file.read_text() + "\n" for file in files))
    assert read_costs([both]) == found


@pytest.mark.parametrize(
    ("text", "says"),
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
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """A file that holds nothing to use is refused in one line, whatever it is."""
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_costs([path])


def test_the_defaults_are_what_was_measured() -> None:
    """The committed results can be read; what they have is of the defaults' order of magnitude."""
    names = [name for name in ("restart", "save", "load", "rendezvous") if (RESULTS / f"{name}.json").exists()]
    found, defaults = read_costs([RESULTS / f"{name}.json" for name in names]), RecoveryCosts()
    for field in ("detection_s", "restart_s", "save_stall_s", "save_s", "load_local_s", "load_memory_s"):
        measured, default = getattr(found, field), getattr(defaults, field)
        assert default / 5 < measured < default * 5, f"{field}: {measured} was measured, the default is {default}"


# -- traces ------------------------------------------------------------------------------------------------------------


def test_traces_are_csv_or_json(tmp_path: Path) -> None:
    """Both forms give the same faults; dates count from the first, names of nodes are numbered."""
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
    ("text", "says"),
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
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """What is no trace is refused in one line that names the fault."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(path)


def test_a_run_directory_is_a_trace(tmp_path: Path) -> None:
    """The incidents that ended the cycles of a run are its faults, each when it happened; what followed from them, and
    what ended no cycle, is none."""
    with pytest.raises(ConfigError, match="is no run directory"):
        read_trace(tmp_path)

    def event(kind: EventKind, at_s: float, **data: Any) -> bytes:
        common: dict[str, Any] = {"run_id": "r", "job": "j", "node": "a", "proc": "coordinator", "mono_ns": 0}
        return msgspec.json.encode(Event(kind=kind, wall_ns=int(at_s * 1e9), data=data, **common)) + b"\n"

    died = Incident(kind=IncidentKind.WORKER_DIED, job="j", node="b", rank=3, detected_after_s=0.5)
    peer = Incident(kind=IncidentKind.WORKER_FAILED, job="j", node="a", rank=0)
    lost = Incident(kind=IncidentKind.NODE_LOST, job="j", cycle=1, node="a")
    slow = Incident(kind=IncidentKind.STRAGGLER, job="j", cycle=1, node="a", rank=0)
    verdict = Verdict(rung=Rung.RESTART_WORKERS, reason="so")
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
        event(EventKind.VERDICT, at, incident=one, verdict=verdict) for at, one in ((1100.2, died), (1200.0, lost))
    ]
    path.write_bytes(b"".join(lines + judged))
    assert [one.kind for one in read_trace(tmp_path)] == [kind for _, kind, _ in expected]
