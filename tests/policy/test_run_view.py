"""The view of a run that is built from its events, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.incidents import Event, EventKind
from outlast.policy.goodput import IterationRate, ProductiveTime
from outlast.policy.run_view import RunView


def event(kind: EventKind, at_s: float, *, job: str = "j", **fields: Any) -> Event:
    envelope = {name: fields.pop(name) for name in ("cycle", "rank", "iteration") if name in fields}
    time_ns = int(at_s * 1e9)
    return Event(
        kind=kind, wall_ns=time_ns, mono_ns=time_ns, run_id="r", job=job, node="a", proc="agent", data=fields,
        **envelope,
    )  # fmt: skip


def trained(begin_s: float, cycle: int, begin: int, end: int, *, job: str = "j") -> list[Event]:
    """Return the events of two ranks that train at one iteration per second."""
    found = [event(EventKind.CYCLE_STARTED, begin_s, job=job, cycle=cycle, ranks=[0, 1], world_size=2, master=job)]
    for rank in (0, 1):
        kinds = {"job": job, "cycle": cycle, "rank": rank}
        found.append(event(EventKind.STEPS_STARTED, begin_s, iteration=begin, **kinds))
        for iteration in range(begin + 1, end + 1):
            found.append(event(EventKind.PROGRESS, begin_s + iteration - begin, iteration=iteration, **kinds))
    return sorted(found, key=lambda one: one.wall_ns)


def test_repeated_steps_count_once() -> None:
    """Only the four iterations of the first cycle that the second one resumes from count."""
    view = RunView.of([*trained(0.0, 0, 0, 10), *trained(20.0, 1, 4, 14)])
    (job,) = view.jobs
    assert job.productive.total_s == pytest.approx(4 + 10)
    assert job.goodput(30.0) == pytest.approx(14 / 30)
    assert job.goodput(60.0) == pytest.approx(14 / 50), "a gap of more than ten seconds is not training"


def test_following_view_equals_the_complete_view() -> None:
    """A view without samples has the same ranks, rates, counts and goodput, and a bounded size."""
    events = [*trained(0.0, 0, 0, 300), *trained(400.0, 1, 200, 500)]
    complete, following = RunView.of(events), RunView(keeps_samples=False)
    for one in events:
        following.take(one)
    (job,), (other,) = complete.jobs, following.jobs
    assert (job.productive.total_s, job.counts) == (other.productive.total_s, other.counts)
    assert [(one.iteration, one.rate.value) for one in job.ranks.values()] == [(500, 1.0)] * 2
    assert [(one.iteration, one.rate.value) for one in other.ranks.values()] == [(500, 1.0)] * 2
    assert len(job.of(EventKind.PROGRESS)) == 1200
    assert len(other.of(EventKind.PROGRESS)) == 1


def test_requeued_job_with_the_same_name_is_separate() -> None:
    """The second job begins once all agents of the first have ended."""
    events = []
    for begin_s in (0.0, 100.0):
        events += [event(EventKind.JOB_STARTED, begin_s), *trained(begin_s + 1, 0, 0, 5)]
        events.append(event(EventKind.JOB_ENDED, begin_s + 10, exit_code=75))
    view = RunView.of(events)
    assert [(job.start_s, job.num_cycles, job.exit_code) for job in view.jobs] == [(0.0, 1, 75), (100.0, 1, 75)]
    assert view.job("j") is view.jobs[1]


def test_repeated_cycle_number_is_a_second_start() -> None:
    """A coordinator that did not know the cycles of its successor may repeat a number; the master distinguishes
    them."""
    again = event(EventKind.CYCLE_STARTED, 50.0, cycle=0, ranks=[0], world_size=1, master="other")
    view = RunView.of([*trained(0.0, 0, 0, 5), again, event(EventKind.PROGRESS, 52.0, cycle=0, rank=0, iteration=6)])
    assert [(start.world_size, start.iteration) for start in view.starts] == [(2, 5), (1, 6)]
    assert [start.trained_ns for start in view.starts] == [1_000_000_000, 52_000_000_000]


def test_related_reports_are_one_incident() -> None:
    """Reports of a cycle's end become one incident once the decision is made, as do failed saves of many ranks."""
    events = [
        event(EventKind.INCIDENT, rank, cycle=0, rank=rank, incident={"kind": kind, "node": "a", "rank": rank})
        for kind in ("worker_failed", "save_failed")
        for rank in range(4)
    ]
    assert [one.num_reports for one in RunView.of(events).jobs[0].incidents] == [1, 4, 1, 1, 1]
    decided = event(EventKind.DECISION, 9, cycle=0, incident=events[2].data["incident"], verdict={"rung": 2})
    incidents = RunView.of([*events, decided]).jobs[0].incidents
    assert [(one.num_reports, one.time_s) for one in incidents] == [(4, 0.0), (4, 2.0)]


def test_late_reports_of_an_ended_cycle_belong_to_its_incident() -> None:
    """A node that was cut off reports the failure of its ranks after the next cycle has started: the run has one
    incident. A failure in the next cycle, and in a second cycle with the same number, is another one."""

    def reported(at_s: float, kind: str, cycle: int, **decision: Any) -> Event:
        incident = {"kind": kind, "node": "b", "rank": 2}
        return event(
            EventKind.DECISION if decision else EventKind.INCIDENT, at_s, cycle=cycle, incident=incident, **decision
        )

    lost = [reported(10.0, "node_lost", 0), reported(10.1, "node_lost", 0, verdict={"rung": 3})]
    events = [*trained(0.0, 0, 0, 8), *lost, *trained(11.0, 1, 5, 9), reported(30.0, "worker_failed", 0)]
    (incident,) = RunView.of(events).jobs[0].incidents
    assert (incident.incident["kind"], incident.num_reports) == ("node_lost", 2)
    in_process = [reported(31.0, "worker_died", 1), reported(31.1, "worker_died", 1, verdict={"rung": 1})]
    events += [*in_process, reported(32.0, "worker_failed", 1)]
    assert [one.incident["kind"] for one in RunView.of(events).jobs[0].incidents] == [
        *("node_lost", "worker_died", "worker_failed")
    ]
    again = event(EventKind.CYCLE_STARTED, 50.0, cycle=0, ranks=[0], world_size=1, master="other")
    assert len(RunView.of([*events, again, reported(51.0, "worker_failed", 0)]).jobs[0].incidents) == 4


def test_slow_rank_time_covers_windows_before_the_report() -> None:
    """A report of a slow rank covers its window, and earlier windows in which the rank was already slow but not
    reported."""
    time = ProductiveTime()
    time.begin(0.0, 0)
    for at_s, score, named in ((10.0, 1.0, []), (20.0, 0.8, []), (30.0, 0.5, [1])):
        time.advance(at_s, int(at_s))
        time.take_slow_ranks({0: 1.0, 1: score}, named)
    assert time.total_s == pytest.approx(10 + 10 * 0.8 + 10 * 0.5)
    time.begin(40.0, 10)
    assert time.total_s == pytest.approx(10), "what slow ranks added to lost steps is lost with them"


@given(st.lists(st.tuples(st.floats(0.001, 30), st.integers(0, 3)), min_size=3, max_size=300))
def test_rate_is_that_of_the_newest_minute(steps: list[tuple[float, int]]) -> None:
    """The rate is between the lowest and the highest rate of the events, whatever the gaps."""
    rate, now_ns, iteration = IterationRate(), 0, 0
    rate.note(now_ns, iteration)
    for gap_s, num in steps:
        now_ns, iteration = now_ns + int(gap_s * 1e9), iteration + num
        rate.note(now_ns, iteration)
    assert rate.value is not None
    assert -1e-9 <= rate.value <= max(num / int(gap_s * 1e9) * 1e9 for gap_s, num in steps) + 1e-6
