"""The ledger assigns every second of a run to one part, for all events and clock offsets."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goodput.written_journal import WrittenRun, two_hundred_minutes
from outlast.errors import ConfigError
from outlast.goodput import Ledger, Part
from outlast.incidents import EventKind


def read(run: WrittenRun) -> Ledger:
    return Ledger.from_files(list(run.files.values()))


def minutes(ledger: Ledger) -> dict[str, float]:
    return {name: round(seconds / 60, 6) for name, seconds in ledger.partition.items() if seconds}


def test_worked_example_is_split_exactly(tmp_path: Path) -> None:
    """200 minutes: 100 effective, 10 load, 10 save, 40 lost progress, 15 restart, 25 slow-down; through files."""
    ledger = Ledger.read(two_hundred_minutes().save(tmp_path))
    expected = {"productive": 100, "load": 10, "save_stall": 10, "redone": 40, "restart": 15, "straggler": 25}
    assert minutes(ledger) == expected
    assert ledger.wall_s == 200 * 60
    assert ledger.ettr == pytest.approx(0.5)
    assert ledger.headline == "finished: 50.0 % goodput in 3 h, 1 incident, 40 iterations redone"
    assert ledger.incidents[0].lost_iterations == 40
    assert ledger.incidents[0].cost_s == pytest.approx((40 + 15 + 10) * 60)


@pytest.mark.parametrize("ahead_s", [{"n0": 30.0}, {"n1": 30.0}, {"n1": -30.0}, {"n0": 30.0, "n1": -30.0}])
def test_clock_offsets_do_not_change_the_split(ahead_s: dict[str, float]) -> None:
    """Nodes whose clocks differ by up to a minute are aligned by common events; the split stays the same."""
    ledger = read(two_hundred_minutes(ahead_s))
    assert minutes(ledger) == minutes(read(two_hundred_minutes()))
    assert any("aligned by" in note for note in ledger.notes)


def test_agent_start_time_counts() -> None:
    """Agents take 40 and 90 seconds before they join: the run begins with the one that joined first. The start time of
    the second job's agents is not queue time."""
    run = WrittenRun()
    for at_s, job, done in ((0.0, "j", 0), (1000.0, "k", 10)):
        run.write(at_s, EventKind.JOB_STARTED, job=job, start_up_s=40.0, command=["train.py"])
        run.write(at_s + 5, EventKind.JOB_STARTED, node="n1", job=job, start_up_s=90.0, command=["train.py"])
        run.start_cycle(at_s + 10, 0, job)
        run.on_ranks(at_s + 20, EventKind.STEPS_STARTED, job=job, cycle=0, iteration=done)
        run.on_ranks(at_s + 120, EventKind.PROGRESS, job=job, cycle=0, iteration=done + 10)
        run.end_job(at_s + 120, job, exit_code=0 if job == "k" else 75)
    ledger = read(run)
    assert ledger.wall_s == 1160
    assert ledger.partition["productive"] == 200
    assert ledger.partition["queued"] == 1000 - 40 - 120
    assert ledger.partition["start_up"] == 2 * (40 + 10)
    assert ledger.partition["rendezvous"] == 2 * 10
    assert sum(ledger.partition.values()) == pytest.approx(ledger.wall_s)


def test_torn_lines_are_skipped_and_reported(tmp_path: Path) -> None:
    """The torn last line of a killed process is skipped, and a note contains the file."""
    folder = two_hundred_minutes().save(tmp_path)
    path = folder / "journal" / "j-n1-rank-1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"progress","wall_ns":18000')
    ledger = Ledger.read(folder)
    assert minutes(ledger)["productive"] == 100
    assert ledger.notes == ("1 line of j-n1-rank-1.jsonl cannot be read: torn, or of another version",)


def test_queue_time_and_idle_time_are_separate() -> None:
    """A shutdown and an hour in the queue are queue time; the second job's wait for a replacement node is idle time."""
    run = WrittenRun()
    run.start_job(0.0)
    run.start_cycle(10.0, 0)
    run.on_ranks(20.0, EventKind.STEPS_STARTED, cycle=0, iteration=0)
    run.on_ranks(21.0, EventKind.PROGRESS, cycle=0, iteration=1)
    run.write(118.0, EventKind.NOTICE, node="n1", proc="rank-1", cycle=0, rank=1, signal=15)
    run.on_ranks(120.0, EventKind.SESSION_ENDED, cycle=0, iteration=100, exit_code=75)
    run.end_job(120.0, exit_code=75, reason="shutdown requested; a saved checkpoint exists")
    run.start_job(3720.0, job="k")
    run.start_cycle(3730.0, 0, job="k")
    run.on_ranks(3740.0, EventKind.STEPS_STARTED, job="k", cycle=0, iteration=100)
    run.on_ranks(3741.0, EventKind.PROGRESS, job="k", cycle=0, iteration=101)
    run.kill(3840.0, 0, 200, decided_s=3840.0, recovery_level=3, job="k")
    run.write(3840.0, EventKind.FORMING, proc="coordinator", job="k", cycle=1, missing=1)
    run.write(4140.0, EventKind.FORMING, proc="coordinator", job="k", cycle=1, missing=0)
    run.start_cycle(4145.0, 1, job="k")
    run.on_ranks(4150.0, EventKind.STEPS_STARTED, job="k", cycle=1, iteration=200)
    run.on_ranks(4250.0, EventKind.SESSION_ENDED, job="k", cycle=1, iteration=300, exit_code=0)
    run.end_job(4250.0, job="k")
    ledger = read(run)
    parts = {name: seconds for name, seconds in ledger.partition.items() if seconds}
    assert parts == pytest.approx(
        {"rendezvous": 25.0, "start_up": 25.0, "productive": 300.0, "queued": 3600.0, "idle": 300.0}
    )
    assert [one.kind for one in ledger.incidents] == ["preempted", "worker_died"]
    assert ledger.incidents[0].parts["queued"] == 3600.0
    assert ledger.incidents[0].resumed_iteration == 100
    assert ledger.incidents[1].parts["idle"] == 300.0
    assert ledger.statistics.mtbf_s["all"] == pytest.approx(4250.0 - 3600.0)


@pytest.mark.parametrize(("starts_s", "restart_s", "rendezvous_s"), [(75.0, 16.0, 9.0), (61.0, 11.0, 0.0)])
def test_restart_delay_is_restart_time(starts_s: float, restart_s: float, rendezvous_s: float) -> None:
    """A restart delayed by 15 s costs restart time until its deadline, or until another coordinator starts the next
    cycle."""
    run = WrittenRun()
    run.start_job(0.0)
    run.start_cycle(0.0, 0)
    run.on_ranks(0.0, EventKind.STEPS_STARTED, cycle=0, iteration=0)
    run.on_ranks(1.0, EventKind.PROGRESS, cycle=0, iteration=1)
    run.kill(50.0, 0, 50, decided_s=51.0, delay_s=15.0)
    run.start_cycle(starts_s, 1)
    run.on_ranks(starts_s, EventKind.STEPS_STARTED, cycle=1, iteration=50)
    run.on_ranks(100.0, EventKind.SESSION_ENDED, cycle=1, iteration=80, exit_code=0)
    run.end_job(100.0)
    partition = read(run).partition
    assert (partition["restart"], partition["rendezvous"]) == pytest.approx((restart_s, rendezvous_s))


def test_progress_beyond_a_checkpoint_is_lost_once() -> None:
    """A later restart from an older checkpoint subtracts the progress of earlier cycles, and nothing twice."""
    run = WrittenRun()
    run.start_job(0.0)
    begins = [(0.0, 0, 50), (100.0, 40, 60), (200.0, 10, 30)]  # time, resumed from, reached
    for cycle, (begin_s, resumed, reached) in enumerate(begins):
        run.start_cycle(begin_s, cycle)
        run.on_ranks(begin_s, EventKind.STEPS_STARTED, cycle=cycle, iteration=resumed)
        run.on_ranks(begin_s + 1, EventKind.PROGRESS, cycle=cycle, iteration=resumed + 1)
        if cycle < 2:
            run.kill(begin_s + reached - resumed, cycle, reached, decided_s=begin_s + reached - resumed)
    run.on_ranks(220.0, EventKind.SESSION_ENDED, cycle=2, iteration=30, exit_code=0)
    run.end_job(220.0)
    ledger = read(run)
    assert ledger.lost_iterations == 10 + (40 - 10) + 20
    assert [one.lost_iterations for one in ledger.incidents] == [10, 50]
    assert ledger.partition["productive"] == pytest.approx(10 + 20)
    assert ledger.partition["redone"] == pytest.approx(40 + 20)


def test_overlapping_incidents_end_together() -> None:
    """A cycle in which only one rank began a step trained nothing; both incidents end once all ranks train."""
    run = WrittenRun()
    run.start_job(0.0)
    run.start_cycle(0.0, 0)
    run.on_ranks(10.0, EventKind.STEPS_STARTED, cycle=0, iteration=0)
    run.kill(40.0, 0, 30, decided_s=41.0)
    run.start_cycle(42.0, 1)
    run.write(44.0, EventKind.STEPS_STARTED, proc="rank-0", cycle=1, rank=0, iteration=20)
    run.kill(46.0, 1, 20, decided_s=47.0)
    run.start_cycle(48.0, 2)
    run.on_ranks(50.0, EventKind.STEPS_STARTED, cycle=2, iteration=20)
    run.on_ranks(60.0, EventKind.SESSION_ENDED, cycle=2, iteration=30, exit_code=0)
    run.end_job(60.0)
    ledger = read(run)
    assert [one.recovered_s for one in ledger.incidents] == [50.0, 50.0]
    assert [one.resumed_iteration for one in ledger.incidents] == [20, 20]
    assert ledger.partition["productive"] == pytest.approx(20 + 10)
    assert sum(one.cost_s for one in ledger.incidents) == pytest.approx(60 - 30 - 10)


def test_ranks_without_steps_do_not_count() -> None:
    """If one of two ranks has a session with steps in all cycles, its steps are the training."""
    run = WrittenRun()
    run.start_job(0.0)
    for cycle, begin_s in enumerate((0.0, 50.0)):
        run.start_cycle(begin_s, cycle)
        run.write(begin_s + 10, EventKind.STEPS_STARTED, proc="rank-0", cycle=cycle, rank=0, iteration=0)
        run.write(begin_s + 30, EventKind.PROGRESS, proc="rank-0", cycle=cycle, rank=0, iteration=20)
        if cycle == 0:
            run.kill(40.0, 0, 20, decided_s=41.0)
    run.end_job(90.0)
    assert read(run).incidents[0].recovered_s == 60.0


def test_incident_begins_at_its_first_report() -> None:
    """A hang counts from the first report of any rank since the last decision; a second failure of a rank counts from
    its own report."""
    run = WrittenRun()
    run.start_job(0.0)
    run.start_cycle(0.0, 0)
    run.on_ranks(1.0, EventKind.STEPS_STARTED, cycle=0, iteration=0)
    for failed_s in (10.0, 20.0):
        failed = {"kind": "worker_failed", "node": "n1", "rank": 1}
        run.write(failed_s, EventKind.INCIDENT, node="n1", proc="rank-1", cycle=0, rank=1, incident=failed)
        data = {"verdict": {"rung": 1, "reason": "restarting in process"}, "incident": failed}
        run.write(failed_s + 1, EventKind.DECISION, proc="coordinator", cycle=0, **data)
        run.write(failed_s + 2, EventKind.RESTARTED_IN_PROCESS, proc="rank-0", cycle=0, rank=0)
        run.on_ranks(failed_s + 3, EventKind.STEPS_STARTED, cycle=0, iteration=5)
    injected = {"fault": "SIGSTOP of a rank", "expected": "worker_hung"}
    run.write(30.0, EventKind.FAULT_SIMULATED, node="n1", proc="demo", cycle=0, rank=1, iteration=9, **injected)
    seen = {"kind": "worker_hung", "node": "n0", "rank": 0}
    run.write(33.0, EventKind.INCIDENT, proc="agent", cycle=0, rank=0, incident=seen)
    hung = {"kind": "worker_hung", "node": "n1", "rank": 1}
    data = {"verdict": {"rung": 2, "reason": "restarting the workers"}, "incident": hung}
    run.write(34.0, EventKind.DECISION, proc="coordinator", cycle=0, **data)
    run.end_job(40.0, exit_code=1)
    ledger = read(run)
    assert [one.at_s for one in ledger.incidents] == [10.0, 20.0, 33.0]
    last = ledger.incidents[-1]
    assert (last.rank, last.since_s, last.iteration, last.simulated) == (1, 30.0, 9, "SIGSTOP of a rank")
    assert last.fault is not None
    assert last.fault.data == injected


def test_script_without_a_session_is_unobserved() -> None:
    """A script that reports no steps has no goodput, and its time is reported as unknown, not productive."""
    run = WrittenRun()
    run.start_job(0.0)
    for node in run.nodes:
        run.write(2.0, EventKind.CYCLE_STARTED, node=node, cycle=0, ranks=[0], world_size=2)
        run.write(50.0, EventKind.CYCLE_ENDED, node=node, cycle=0, reason="finished", iterations={})
    run.end_job(50.0)
    ledger = read(run)
    assert ledger.ettr is None
    assert ledger.partition["unobserved"] == pytest.approx(48.0)
    assert "goodput unknown" in ledger.headline


def run_with_a_job_without_a_session(*, failed_after_s: float, exit_code: int) -> WrittenRun:
    """Return a run whose first job reports nothing; the second one loses 7 iterations and ends at 20."""
    run = WrittenRun()
    run.start_job(0.0, "a")
    for node in run.nodes:
        run.write(2.0, EventKind.CYCLE_STARTED, node=node, job="a", cycle=0, ranks=[0], world_size=2)
        at_s = 2.0 + failed_after_s
        run.write(at_s, EventKind.CYCLE_ENDED, node=node, job="a", cycle=0, reason="x", iterations={})
    run.end_job(2.0 + failed_after_s, "a", exit_code=exit_code)
    run.start_job(10_000.0, "b")
    run.start_cycle(10_010.0, 0, "b")
    run.on_ranks(10_020.0, EventKind.STEPS_STARTED, job="b", cycle=0, iteration=0)
    run.kill(10_037.0, 0, 17, decided_s=10_040.0, job="b")
    run.start_cycle(10_050.0, 1, "b")
    run.on_ranks(10_060.0, EventKind.STEPS_STARTED, job="b", cycle=1, iteration=10)
    run.on_ranks(10_070.0, EventKind.SESSION_ENDED, job="b", cycle=1, iteration=20, exit_code=0)
    run.end_job(10_070.0, "b")
    return run


def test_job_that_failed_before_its_session_lost_nothing() -> None:
    """Since other jobs of the run show that the script has a session, a job that failed within seconds trained
    nothing."""
    ledger = read(run_with_a_job_without_a_session(failed_after_s=30.0, exit_code=1))
    assert (ledger.lost_iterations, ledger.lost_is_minimum, ledger.num_iterations) == (7, False, 20)
    assert [one.lost_iterations for one in ledger.incidents] == [7]
    assert ledger.partition["unobserved"] == 0
    assert ledger.headline.endswith("1 incident, 7 iterations redone")


@pytest.mark.parametrize(("after_s", "exit_code"), [(5000.0, 1), (30.0, 0)])
def test_long_job_without_a_session_gives_minimum_counts(after_s: float, exit_code: int) -> None:
    """A job without a session that ran for long or finished may have trained; the losses of other jobs are still
    known."""
    ledger = read(run_with_a_job_without_a_session(failed_after_s=after_s, exit_code=exit_code))
    assert (ledger.lost_iterations, ledger.lost_is_minimum, ledger.num_iterations) == (7, True, 20)
    assert ledger.partition["unobserved"] == pytest.approx(after_s)
    assert ledger.headline.endswith("1 incident, at least 7 iterations redone")


@st.composite
def runs(draw: st.DrawFn) -> WrittenRun:
    """Runs of some jobs and cycles with faults at any time; some lines are missing."""
    run, now_s = WrittenRun({"n1": draw(st.sampled_from([0.0, 30.0, -30.0]))}), 0.0

    def later() -> float:
        nonlocal now_s
        now_s += draw(st.floats(0.0, 500.0))
        return now_s

    iteration = 0
    for number in range(draw(st.integers(1, 3))):
        job = f"j{number}"
        run.start_job(later(), job)
        for cycle in range(draw(st.integers(0, 3))):
            run.start_cycle(later(), cycle, job)
            iteration = draw(st.integers(0, iteration))
            if draw(st.booleans()):
                run.on_ranks(
                    later(), EventKind.RESTORED, job=job, cycle=cycle, iteration=iteration, load_s=1e3, tier="local"
                )
            if draw(st.booleans()):
                run.on_ranks(later(), EventKind.STEPS_STARTED, job=job, cycle=cycle, iteration=iteration)
                for _ in range(draw(st.integers(0, 4))):
                    iteration += draw(st.integers(0, 50))
                    run.on_ranks(later(), EventKind.PROGRESS, job=job, cycle=cycle, iteration=iteration)
                    run.on_ranks(
                        later(), EventKind.SAVE_SCHEDULED, job=job, cycle=cycle, iteration=iteration,
                        stall_s=draw(st.floats(0, 900)),
                    )  # fmt: skip
            failed_s = later()
            recovery_level = draw(st.sampled_from([0, 1, 2, 3, 5]))
            run.kill(failed_s, cycle, iteration, decided_s=later(), recovery_level=recovery_level, job=job)
        if draw(st.booleans()):
            run.end_job(later(), job, exit_code=draw(st.sampled_from([0, 1, 75])))
    dropped = draw(st.sets(st.integers(0, 200), max_size=20))
    place = 0
    for key, events in run.files.items():
        kept = []
        for event in events:
            if place not in dropped or place == 0:
                kept.append(event)
            place += 1
        run.files[key] = kept or events[:1]
    return run


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(runs())
def test_every_second_belongs_to_one_part(run: WrittenRun) -> None:
    """For every journal, segments are consecutive, no part is negative, and the parts add up to the wall time."""
    ledger = read(run)
    assert sum(ledger.partition.values()) == pytest.approx(ledger.wall_s, rel=1e-3, abs=1e-6)
    assert set(ledger.partition) == {str(part) for part in Part}
    assert all(seconds >= -1e-9 for seconds in ledger.partition.values())
    now_s = 0.0
    for segment in ledger.segments:
        assert segment.start_s == pytest.approx(now_s)
        assert segment.end_s >= segment.start_s
        now_s = segment.end_s
    assert all(
        one.cost_s >= 0 and (one.lost_iterations is None or one.lost_iterations >= 0) for one in ledger.incidents
    )
    json.loads(msgspec.json.encode(ledger))


def test_folder_without_a_journal_is_rejected(tmp_path: Path) -> None:
    """A folder that is not a run directory, or contains no event, is an error in one line."""
    with pytest.raises(ConfigError, match="has no journal; name a run directory"):
        Ledger.read(tmp_path)
    (tmp_path / "journal").mkdir()
    with pytest.raises(ConfigError, match="holds no event"):
        Ledger.read(tmp_path)
