"""The status report from the events of a job: while it runs, after its end, and after all processes were killed."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from job_story import JobHistory, make_death, names_of

from outlast.incidents import Event, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.launch.protocol import LiveBudgets, LiveLack, LiveNode, LiveStatus
from outlast.policy.recovery_policy import RecoveryState
from outlast.status.evidence import Evidence
from outlast.status.facts import judge
from outlast.status.report import CheckpointReport, RunState, StatusReport, render


def running_job() -> JobHistory:
    history = JobHistory(num_nodes=2).start_agents("a", "b").start_cycle(0, "a", "b").start_sessions(0, "a", "b")
    for iteration in (1, 11, 21):
        history.add_rank_event(EventKind.PROGRESS, iteration)
        history.add_rank_event(EventKind.PROGRESS, iteration, rank=1, on="b")
        history.now_s += 4.8
    return history


# -- the state -------------------------------------------------------------------------------------------------


def test_a_running_job_has_nodes_ranks_and_a_rate() -> None:
    """The report has each node's ranks and pids, the iteration, and the rate of the newest progress events."""
    report = running_job().judge()
    assert report.state == RunState.RUNNING
    assert [(node.name, node.ranks, len(node.pids)) for node in report.nodes] == [("a", [0], 1), ("b", [1], 1)]
    assert (report.cycle, report.num_cycles, report.world_size, report.iteration) == (0, 1, 2, 21)
    assert report.rate is not None
    assert abs(report.rate - 2.0) < 0.01
    assert report.summary == "running, cycle 0, iteration 21, 2 iterations/s"
    assert (report.exit_code, report.reason, report.waiting) == (None, None, None)


def test_a_finished_job_has_its_exit_code_and_reason() -> None:
    """Once every agent has ended, the exit code and reason are those of the coordinator's node."""
    history = running_job().end_cycle(0, "a", "b", reason="finished", r0=30).end_agents("b", "a")
    report = history.judge(alive=False, after_s=3600)
    assert (report.state, report.exit_code, report.reason) == (RunState.OVER, 0, "the run is finished")
    assert report.iteration == 30
    assert {node.state for node in report.nodes} == {"ended"}
    assert all(not node.pids for node in report.nodes)


def test_the_jobs_exit_code_is_the_coordinators() -> None:
    """The exit code of a node that left the job earlier is not the job's."""
    history = JobHistory(num_nodes=1).start_agents("a", "b").start_cycle(0, "a")
    history.end_agents("b", code=19, reason="unhealthy")
    history.end_agents("a", code=93, reason="all restarts are used")
    assert (history.judge().exit_code, history.judge().state) == (93, RunState.OVER)


def test_a_killed_job_has_no_live_process() -> None:
    """After a SIGKILL of all processes the report has the time since the newest event, and no node is running."""
    report = running_job().judge(alive=False, after_s=180)
    assert report.state == RunState.NO_PROCESS
    assert report.summary.startswith("no live process: last seen 3 min ago")
    assert {node.state for node in report.nodes} == {"lost"}
    assert all(not node.pids for node in report.nodes)


def test_a_job_with_one_live_agent_is_running() -> None:
    """One live agent keeps the job running, even when the others were killed."""
    report = running_job().judge(nodes={"b": False})
    assert report.state == RunState.RUNNING
    assert names_of(report, "lost") == ["b"]


def test_a_remote_job_is_running_while_its_journal_is_recent() -> None:
    """Where processes cannot be checked, recent events or a renewed owner mean running; old events mean unknown."""
    assert running_job().judge(alive=None, after_s=5).state == RunState.RUNNING
    history = running_job()
    renewed_ns = round((history.now_s + 890) * 1e9)
    assert history.judge(alive=None, after_s=900, renewed_ns=renewed_ns).state == RunState.RUNNING, "its owner says so"
    report = running_job().judge(alive=None, after_s=900, unreachable="no coordinator responds at a:29400 (no route)")
    assert report.state == RunState.UNKNOWN
    assert "host-a, host-b" in report.summary
    assert "no coordinator responds at a:29400" in report.summary


def test_the_first_node_waits_for_the_others() -> None:
    """Before the first cycle the report has the number of missing nodes, the present nodes, and the time limit."""
    report = JobHistory(num_nodes=2).start_agents("a").judge(after_s=20)
    assert report.state == RunState.WAITING
    assert report.waiting is not None
    assert (report.waiting.num_missing, report.waiting.num_needed, report.waiting.have) == (1, 2, ["a"])
    assert report.waiting.gives_up_in_s == 579.9
    assert report.summary == "waiting for 1 of 2 nodes (have: a); gives up in 580 s"


def test_a_job_without_a_spare_waits_for_a_lost_node() -> None:
    """After the loss of a node the remaining nodes wait for a replacement."""
    lost = Incident(kind=IncidentKind.NODE_LOST, job="job-1", cycle=0, node="b", evidence={"summary": "it is gone"})
    history = (
        running_job()
        .end_cycle(0, "a", reason="node b is lost")
        .add_incident(lost, proc="coordinator")
        .add_decision(lost)
    )
    report = history.judge(nodes={"b": False})
    assert report.state == RunState.WAITING
    assert report.waiting is not None
    assert report.waiting.have == ["a"]
    assert names_of(report, "lost") == ["b"]
    assert [one.text for one in report.incidents] == ["node b is lost: it is gone"]


def test_a_job_between_two_cycles_is_forming() -> None:
    """All nodes are present, and the next cycle has not started yet."""
    report = running_job().end_cycle(0, "a", "b").judge()
    assert report.state == RunState.FORMING
    assert names_of(report, "ready") == ["a", "b"]


def test_a_cycle_runs_until_its_last_node_has_finished() -> None:
    """A node whose workers have finished does not end the cycle."""
    assert running_job().end_cycle(0, "a", reason="finished").judge().state == RunState.RUNNING
    assert running_job().end_cycle(0, "a", "b", reason="finished").judge().state == RunState.FORMING


def test_spares_and_excluded_nodes_are_distinguished() -> None:
    """A spare waits for a slot; a quarantined node never gets a slot."""
    history = JobHistory(num_nodes=1).start_agents("a", "b", "c").start_cycle(0, "b")
    report = history.judge(recovery_state=RecoveryState(job="job-1", quarantined=("a",)))
    assert (report.spares, report.excluded) == (["c"], ["a"])
    assert names_of(report, "training") == ["b"]


def test_a_restarted_agent_is_not_lost() -> None:
    """A new agent of a node supersedes the end of the former agent."""
    lost = Incident(kind=IncidentKind.NODE_LOST, job="job-1", cycle=0, node="b")
    history = running_job().add_incident(lost, proc="coordinator").end_agents("b", code=1)
    history.start_agents("b")
    assert names_of(history.judge(), "lost") == []


# -- without agents --------------------------------------------------------------------------------------------


def test_a_run_without_agents_is_judged_by_its_ranks() -> None:
    """Under another launcher the state follows from the events and processes of the ranks."""
    history = JobHistory(agents=False).start_sessions(0, "a", "a").add_rank_event(EventKind.PROGRESS, 5)
    report = history.judge()
    assert (report.state, report.launcher, report.iteration, report.budgets) == (RunState.RUNNING, "torchrun", 5, None)
    assert [(node.ranks, len(node.pids)) for node in report.nodes] == [([0, 1], 2)]
    assert history.judge(alive=False).state == RunState.NO_PROCESS
    for rank in (0, 1):
        history.add_rank_event(EventKind.SESSION_ENDED, 9, rank=rank, exit_code=75)
    assert (history.judge(alive=False).state, history.judge(alive=False).exit_code) == (RunState.OVER, 75)


def test_the_newest_launch_in_a_journal_counts() -> None:
    """A session that appends to the journal of an earlier launch replaces its iterations and ranks."""
    history = JobHistory(agents=False).start_sessions(3, "a", "a").add_rank_event(EventKind.PROGRESS, 500, cycle=3)
    history.start_sessions(0, "a").add_rank_event(EventKind.PROGRESS, 7)
    report = history.judge()
    assert (report.iteration, report.world_size) == (7, 1)
    assert [node.ranks for node in report.nodes] == [[0]]


# -- progress --------------------------------------------------------------------------------------------------


def test_a_restart_resets_iteration_and_rate() -> None:
    """After a restart the iteration and the rate are those of the newest cycle."""
    history = running_job().end_cycle(0, "a", "b", r0=25, r1=25).start_cycle(1, "a", "b")
    assert history.judge().iteration == 25
    history.add_rank_event(EventKind.RESTORED, 20, cycle=1, tier="local", generation=20)
    assert (history.judge().iteration, history.judge().rate) == (20, None)


def test_the_rate_covers_the_last_minute() -> None:
    """Slow steps of earlier times do not count."""
    history = JobHistory().start_agents("a").start_cycle(0, "a")
    for iteration, wait_s in ((1, 100.0), (2, 100.0), (3, 4.9), (13, 4.9), (23, 0.0)):
        history.add_rank_event(EventKind.PROGRESS, iteration)
        history.now_s += wait_s
    rate = history.judge().rate
    assert rate is not None
    assert 1.9 < rate < 2.1


def test_steps_longer_than_the_window_have_a_rate() -> None:
    """A step that takes longer than the window still yields a rate."""
    history = JobHistory().start_agents("a").start_cycle(0, "a").add_rank_event(EventKind.PROGRESS, 1)
    history.now_s += 199.9
    assert history.add_rank_event(EventKind.PROGRESS, 2).judge().rate == 0.005


# -- checkpoints -----------------------------------------------------------------------------------------------


def tiers(report: StatusReport) -> dict[str, int]:
    return {one.tier: one.iteration for one in report.checkpoints}


def test_each_tier_has_its_newest_checkpoint() -> None:
    """The newest checkpoint of each tier is reported with its age."""
    history = running_job().add_rank_event(EventKind.SAVE_COMMITTED, 10, tiers=["memory", "local", "global"])
    history.add_rank_event(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "local"])
    report = history.judge(after_s=60)
    assert tiers(report) == {"memory": 20, "local": 20, "global": 10}
    assert isinstance(report.checkpoints[0], CheckpointReport)
    assert report.checkpoints[0].age_s == 60
    assert report.directory == "/shared/ckpt"


def test_ended_processes_lose_their_memory_checkpoints() -> None:
    """The end of the job, the node or the writer process removes checkpoints in its memory; files stay."""
    history = running_job().add_rank_event(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "replica", "local"])
    assert tiers(history.judge()) == {"memory": 20, "local": 20, "replica": 20}
    assert tiers(history.judge(alive=False)) == {"local": 20, "replica": 20}
    history.add(EventKind.WRITER_ENDED, summary="it was killed")
    assert "memory" not in tiers(history.judge())
    in_memory_only = running_job().add_rank_event(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "replica"])
    assert tiers(in_memory_only.judge(alive=False)) == {}


def test_files_of_an_earlier_job_are_reported() -> None:
    """A job that has not saved yet reports the checkpoints that the previous job stored in files."""
    before = JobHistory("job-0").add_rank_event(EventKind.SAVE_COMMITTED, 40, tiers=["memory", "global"])
    report = JobHistory().start_agents("a").judge(earlier=before.events)
    assert [(one.tier, one.iteration, one.job) for one in report.checkpoints] == [("global", 40, "job-0")]


# -- budgets ---------------------------------------------------------------------------------------------------


def test_budgets_are_per_job() -> None:
    """Restarts that the recovery policy granted in this job are deducted; those of the previous job are not."""
    spent = RecoveryState(job="job-1", restarts_without_progress=2, restarts_total=5, progress_known=True)
    budgets = running_job().judge(recovery_state=spent).budgets
    assert budgets is not None
    assert (budgets.restarts_in_a_row.left, budgets.restarts_total.left, budgets.restarts_total.used) == (1, None, 5)
    budgets = running_job().judge(recovery_state=msgspec.structs.replace(spent, job="job-0")).budgets
    assert budgets is not None
    assert (budgets.restarts_in_a_row.left, budgets.restarts_total.used) == (3, 5)


def test_progress_resets_the_budgets() -> None:
    """A checkpoint newer than those before the latest decision resets the budgets, also before the next decision."""
    spent = RecoveryState(
        job="job-1", restarts_without_progress=3, restarts_total=3, cycles_without_progress=2, best_durable=10
    )
    for iteration, used in ((10, (3, 2)), (11, (0, 0))):
        budgets = (
            running_job()
            .add_rank_event(EventKind.SAVE_COMMITTED, iteration, tiers=["global"])
            .judge(recovery_state=spent)
            .budgets
        )
        assert budgets is not None
        assert (budgets.restarts_in_a_row.used, budgets.cycles_without_progress.used) == used
        assert budgets.restarts_total.used == 3


def test_a_journal_without_limits_has_no_budgets() -> None:
    """Events without limits, pids and times are evaluated as far as they go."""
    history = JobHistory()
    history.add(EventKind.JOB_STARTED, command=["train.py"], num_nodes=1, nproc_per_node=1)
    history.start_cycle(0, "a")
    report = history.judge(alive=None)
    assert (report.state, report.budgets, report.num_cycles) == (RunState.RUNNING, None, 1)


# -- incidents -------------------------------------------------------------------------------------------------


def test_a_root_cause_is_listed_once_with_its_decision() -> None:
    """Incidents of its peers are counted with the root cause."""
    history = (
        running_job()
        .add_incident(make_death(1, on="b"), on="b")
        .add_incident(make_death(0))
        .end_cycle(0, "a", "b")
        .add_decision(make_death(1, on="b"))
    )
    (episode,) = history.judge().incidents
    assert episode.text == "rank 1 on node b was ended by SIGKILL at iteration 12"
    assert (episode.remedy, episode.decision, episode.num_reports) == ("restart_workers", "restarting", 2)


def test_the_newest_incidents_come_first() -> None:
    """Of sixty incidents the report has the newest fifty, newest first, and the total number."""
    history = running_job()
    for cycle in range(60):
        history.add_decision(make_death(cycle=cycle))
    report = history.judge()
    assert (report.num_incidents, len(report.incidents), report.incidents[0].cycle) == (60, 50, 59)


def test_a_failed_save_of_many_ranks_is_one_incident() -> None:
    """The reports of all ranks about one failed save are one incident."""
    history = running_job()
    for rank in range(4):
        failed = Incident(kind=IncidentKind.SAVE_FAILED, cycle=0, node="a", rank=rank, iteration=10)
        history.add_incident(failed, proc=f"rank-{rank}")
    (episode,) = history.judge().incidents
    assert (episode.num_reports, episode.remedy) == (4, None)


def test_a_rerun_step_is_reported_with_its_decision() -> None:
    """A decision that a worker makes by itself is listed with its incident."""
    history = running_job()
    decision = {"rung": int(RecoveryLevel.RERUN_STEP), "reason": "the step is run again"}
    incident = {"kind": "invalid_result", "node": "a", "rank": 0, "iteration": 7}
    history.add(EventKind.INCIDENT, proc="rank-0", cycle=0, incident=incident, verdict=decision)
    (episode,) = history.judge().incidents
    assert (episode.remedy, episode.decision) == ("rerun_step", "the step is run again")


def test_an_unknown_incident_kind_is_reported_verbatim() -> None:
    """An incident of a kind from another version does not prevent the report."""
    history = running_job()
    history.add(EventKind.INCIDENT, cycle=0, incident={"kind": "gremlin", "node": "a", "rank": 0})
    assert [one.text for one in history.judge().incidents] == ["gremlin a 0"]


# -- the coordinator's status ----------------------------------------------------------------------------------


def live(**given: object) -> LiveStatus:
    facts: dict[str, object] = {
        "time": "1970-01-01T00:16:40.000Z",
        "run_id": "r",
        "job": "job-1",
        "host": "a",
        "phase": "forming",
        "cycle": 0,
        "num_slots": 2,
        "nodes": (LiveNode(name="a", nproc=2, ready=True),),
        "budgets": LiveBudgets(max_restarts=3),
    }
    return msgspec.convert({**facts, **given}, LiveStatus)


def test_the_coordinator_alone_suffices_for_a_report() -> None:
    """Without a readable run directory the report is made from the coordinator's status."""
    lack = LiveLack(num_missing=1, num_needed=2, waited_s=20.0, gives_up_in_s=580.0)
    report = judge(Evidence(job="job-1", live=live(lack=lack)), round(1001e9))
    assert (report.state, report.sources) == (RunState.WAITING, ["coordinator"])
    assert report.summary == "waiting for 1 of 2 nodes (have: a); gives up in 580 s"
    training = (LiveNode(name="a", slot=0, first_rank=0, nproc=2), LiveNode(name="b", slot=1, first_rank=2, nproc=2))
    report = judge(Evidence(job="job-1", live=live(phase="running", nodes=training)), round(1001e9))
    assert [(node.state, node.ranks) for node in report.nodes] == [("training", [0, 1]), ("training", [2, 3])]
    assert (report.state, report.cycle, report.last_seen_s) == (RunState.RUNNING, 0, 1.0)


def test_the_coordinator_overrides_the_journal() -> None:
    """The coordinator's state and nodes take precedence over the journal."""
    barred = live(phase="running", quarantined=("b",), nodes=(LiveNode(name="a", slot=0, first_rank=0, nproc=1),))
    report = running_job().judge(live=barred, alive=None)
    assert report.sources == ["journal", "coordinator"]
    assert (report.state, report.excluded) == (RunState.RUNNING, ["b"])
    over = running_job().judge(live=live(phase="over", exit_code=93, reason="no progress"))
    assert (over.state, over.exit_code, over.reason) == (RunState.OVER, 93, "no progress")


# -- incomplete journals ---------------------------------------------------------------------------------------


def full_history() -> list[Event]:
    history = running_job().add_rank_event(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "local"])
    history.add_incident(make_death(1, on="b"), on="b").end_cycle(0, "a", "b", r0=25, r1=24).add_decision(
        make_death(1, on="b")
    )
    history.start_cycle(1, "a", "b").start_sessions(1, "a", "b")
    history.add_rank_event(EventKind.RESTORED, 20, cycle=1, tier="local", generation=20).add_rank_event(
        EventKind.PROGRESS, 21, cycle=1
    )
    lost = Incident(kind=IncidentKind.NODE_LOST, job="job-1", cycle=1, node="b")
    history.add_incident(lost, proc="coordinator").end_cycle(1, "a", r0=33).add_decision(
        lost, RecoveryLevel.REPLACE_NODE
    )
    history.start_agents("c").start_cycle(2, "a", "c").add_rank_event(EventKind.PROGRESS, 40, cycle=2)
    history.end_cycle(2, "a", "c", reason="finished", r0=50).end_agents("a", "c")
    return history.events


EVENTS = full_history()


@settings(max_examples=300)
@given(
    kept=st.sets(st.integers(0, len(EVENTS) - 1)),
    until=st.integers(0, len(EVENTS)),
    alive=st.sampled_from([True, False, None]),
    after_s=st.floats(-100, 1e7),
)
def test_any_part_of_a_journal_yields_a_consistent_report(
    kept: set[int], until: int, alive: bool | None, after_s: float
) -> None:
    """Whatever lines are missing, torn or not written yet, a report is made and does not contradict itself."""
    history = JobHistory(num_nodes=2)
    history.events = [event for place, event in enumerate(EVENTS[:until]) if place in kept]
    history.now_s = 1200.0
    report = history.judge(alive=alive, after_s=after_s)
    assert msgspec.json.decode(msgspec.json.encode(report), type=StatusReport) == report
    assert list(render(report, width=80))
    assert (report.waiting is not None) == (report.state == RunState.WAITING)
    assert report.exit_code is None or report.state == RunState.OVER
    assert report.state != RunState.NO_PROCESS or alive is False
    assert all(node.state == "training" or not node.pids for node in report.nodes)
    assert all(age >= 0 for age in (report.last_seen_s or 0, report.iteration_age_s or 0))
    assert report == history.judge(alive=alive, after_s=after_s)


@given(until=st.integers(1, len(EVENTS)))
def test_a_live_job_is_never_reported_as_ended(until: int) -> None:
    """At every moment between its first and its last event a job with live processes is forming, waiting or running."""
    history = JobHistory(num_nodes=2)
    history.events = EVENTS[:until]
    history.now_s = history.events[-1].wall_ns / 1e9
    expected = {RunState.OVER} if until == len(EVENTS) else {RunState.FORMING, RunState.WAITING, RunState.RUNNING}
    assert history.judge(nodes={"b": None}).state in expected
