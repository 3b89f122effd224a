"""How a run is, from its events: right during it, after it, and after everything was killed."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from job_story import Story, died, names_of

from outlast.incidents import Event, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.launch.protocol import LiveBudgets, LiveLack, LiveNode, LiveStatus
from outlast.policy.recovery_policy import RecoveryState
from outlast.status.evidence import Evidence
from outlast.status.facts import judge
from outlast.status.report import CheckpointReport, RunState, StatusReport, render


def running() -> Story:
    story = Story(num_nodes=2).start_agents("a", "b").start_cycle(0, "a", "b").start_sessions(0, "a", "b")
    for iteration in (1, 11, 21):
        story.tell(EventKind.PROGRESS, iteration)
        story.tell(EventKind.PROGRESS, iteration, rank=1, on="b")
        story.now_s += 4.8
    return story


# -- the state -------------------------------------------------------------------------------------------------


def test_running_job_tells_who_runs_where_and_how_fast() -> None:
    """Each node's ranks and pids, the iteration, and the rate of the last progress lines."""
    report = running().judge()
    assert report.state == RunState.RUNNING
    assert [(node.name, node.ranks, len(node.pids)) for node in report.nodes] == [("a", [0], 1), ("b", [1], 1)]
    assert (report.cycle, report.num_cycles, report.world_size, report.iteration) == (0, 1, 2, 21)
    assert report.rate is not None
    assert abs(report.rate - 2.0) < 0.01
    assert report.summary == "running, cycle 0, iteration 21, 2 iterations/s"
    assert (report.exit_code, report.reason, report.waiting) == (None, None, None)


def test_finished_job_is_over_with_its_code_and_reason() -> None:
    """Once every agent has ended, it is what the coordinator's node says."""
    story = running().end_cycle(0, "a", "b", reason="finished", r0=30).end_agents("b", "a")
    report = story.judge(alive=False, after_s=3600)
    assert (report.state, report.exit_code, report.reason) == (RunState.OVER, 0, "the run is finished")
    assert report.iteration == 30
    assert {node.state for node in report.nodes} == {"ended"}
    assert all(not node.pids for node in report.nodes)


def test_code_of_a_lost_node_does_not_hide_that_of_the_job() -> None:
    """A node that left earlier has a code of its own; the job's is that of the coordinator's node."""
    story = Story(num_nodes=1).start_agents("a", "b").start_cycle(0, "a")
    story.end_agents("b", code=19, reason="unhealthy")
    story.end_agents("a", code=93, reason="all restarts are used")
    assert (story.judge().exit_code, story.judge().state) == (93, RunState.OVER)


def test_killed_job_has_no_live_process_and_says_since_when() -> None:
    """After a SIGKILL of everything nothing is running, whatever the last lines said."""
    report = running().judge(alive=False, after_s=180)
    assert report.state == RunState.NO_PROCESS
    assert report.summary.startswith("no live process: last seen 3 min ago")
    assert {node.state for node in report.nodes} == {"lost"}
    assert all(not node.pids for node in report.nodes)


def test_job_of_which_one_agent_lives_goes_on() -> None:
    """One agent that lives takes the job on, even when the others were killed."""
    report = running().judge(nodes={"b": False})
    assert report.state == RunState.RUNNING
    assert names_of(report, "lost") == ["b"]


def test_job_on_other_machines_is_alive_while_its_journal_is_young_and_unknown_later() -> None:
    """Processes that cannot be seen from here: fresh lines say that they live, old ones say nothing."""
    assert running().judge(alive=None, after_s=5).state == RunState.RUNNING
    story = running()
    renewed_ns = round((story.now_s + 890) * 1e9)
    assert story.judge(alive=None, after_s=900, renewed_ns=renewed_ns).state == RunState.RUNNING, "its owner says so"
    report = running().judge(alive=None, after_s=900, unreachable="no coordinator responds at a:29400 (no route)")
    assert report.state == RunState.UNKNOWN
    assert "host-a, host-b" in report.summary
    assert "no coordinator responds at a:29400" in report.summary


def test_first_node_alone_is_waited_for_others() -> None:
    """Before the first cycle: how many nodes are missing, who is there, and when it gives up."""
    report = Story(num_nodes=2).start_agents("a").judge(after_s=20)
    assert report.state == RunState.WAITING
    assert report.waiting is not None
    assert (report.waiting.num_missing, report.waiting.num_needed, report.waiting.have) == (1, 2, ["a"])
    assert report.waiting.gives_up_in_s == 579.9
    assert report.summary == "waiting for 1 of 2 nodes (have: a); gives up in 580 s"


def test_lost_node_without_a_spare_is_waited_for() -> None:
    """After a node was lost, the others wait for one in its place."""
    lost = Incident(kind=IncidentKind.NODE_LOST, job="job-1", cycle=0, node="b", evidence={"summary": "it is gone"})
    story = running().end_cycle(0, "a", reason="node b is lost").see(lost, proc="coordinator").rule(lost)
    report = story.judge(nodes={"b": False})
    assert report.state == RunState.WAITING
    assert report.waiting is not None
    assert report.waiting.have == ["a"]
    assert names_of(report, "lost") == ["b"]
    assert [one.text for one in report.incidents] == ["node b is lost: it is gone"]


def test_between_two_cycles_it_is_forming() -> None:
    """All nodes are there, and the next cycle has not started yet."""
    report = running().end_cycle(0, "a", "b").judge()
    assert report.state == RunState.FORMING
    assert names_of(report, "ready") == ["a", "b"]


def test_node_whose_workers_have_finished_waits_for_the_others() -> None:
    """The cycle runs on until the last node has finished."""
    assert running().end_cycle(0, "a", reason="finished").judge().state == RunState.RUNNING
    assert running().end_cycle(0, "a", "b", reason="finished").judge().state == RunState.FORMING


def test_spares_and_excluded_nodes_are_told_apart() -> None:
    """A spare waits for a slot; a quarantined node gets none."""
    story = Story(num_nodes=1).start_agents("a", "b", "c").start_cycle(0, "b")
    report = story.judge(recovery_state=RecoveryState(job="job-1", quarantined=("a",)))
    assert (report.spares, report.excluded) == (["c"], ["a"])
    assert names_of(report, "training") == ["b"]


def test_agent_that_comes_back_is_not_lost_any_more() -> None:
    """A new life of a node's agent counts, not the end of the former."""
    lost = Incident(kind=IncidentKind.NODE_LOST, job="job-1", cycle=0, node="b")
    story = running().see(lost, proc="coordinator").end_agents("b", code=1)
    story.start_agents("b")
    assert names_of(story.judge(), "lost") == []


# -- without agents --------------------------------------------------------------------------------------------


def test_run_of_another_launcher_is_judged_by_its_ranks() -> None:
    """Without agents of ours the ranks' own lines and processes tell."""
    story = Story(agents=False).start_sessions(0, "a", "a").tell(EventKind.PROGRESS, 5)
    report = story.judge()
    assert (report.state, report.launcher, report.iteration, report.budgets) == (RunState.RUNNING, "torchrun", 5, None)
    assert [(node.ranks, len(node.pids)) for node in report.nodes] == [([0, 1], 2)]
    assert story.judge(alive=False).state == RunState.NO_PROCESS
    for rank in (0, 1):
        story.tell(EventKind.SESSION_ENDED, 9, rank=rank, exit_code=75)
    assert (story.judge(alive=False).state, story.judge(alive=False).exit_code) == (RunState.OVER, 75)


def test_second_launch_in_the_same_files_is_the_one_that_counts() -> None:
    """A session of plain python appends to the file of the launch before; that one's iterations are history."""
    story = Story(agents=False).start_sessions(3, "a", "a").tell(EventKind.PROGRESS, 500, cycle=3)
    story.start_sessions(0, "a").tell(EventKind.PROGRESS, 7)
    report = story.judge()
    assert (report.iteration, report.world_size) == (7, 1)
    assert [node.ranks for node in report.nodes] == [[0]]


# -- how far it is ---------------------------------------------------------------------------------------------


def test_iteration_goes_back_with_the_cycle() -> None:
    """After a restart the iteration is that of the newest cycle, and the rate that of its lines."""
    story = running().end_cycle(0, "a", "b", r0=25, r1=25).start_cycle(1, "a", "b")
    assert story.judge().iteration == 25
    story.tell(EventKind.RESTORED, 20, cycle=1, tier="local", generation=20)
    assert (story.judge().iteration, story.judge().rate) == (20, None)


def test_rate_is_that_of_the_last_minute() -> None:
    """What was slow an hour ago does not count."""
    story = Story().start_agents("a").start_cycle(0, "a")
    for iteration, wait_s in ((1, 100.0), (2, 100.0), (3, 4.9), (13, 4.9), (23, 0.0)):
        story.tell(EventKind.PROGRESS, iteration)
        story.now_s += wait_s
    rate = story.judge().rate
    assert rate is not None
    assert 1.9 < rate < 2.1


def test_slow_steps_have_a_rate_too() -> None:
    """A step that takes longer than the window still tells a rate."""
    story = Story().start_agents("a").start_cycle(0, "a").tell(EventKind.PROGRESS, 1)
    story.now_s += 199.9
    assert story.tell(EventKind.PROGRESS, 2).judge().rate == 0.005


# -- what is saved ---------------------------------------------------------------------------------------------


def tiers(report: StatusReport) -> dict[str, int]:
    return {one.tier: one.iteration for one in report.checkpoints}


def test_newest_checkpoint_of_each_tier_is_named() -> None:
    """Each tier has its own newest checkpoint, with its age."""
    story = running().tell(EventKind.SAVE_COMMITTED, 10, tiers=["memory", "local", "global"])
    story.tell(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "local"])
    report = story.judge(after_s=60)
    assert tiers(report) == {"memory": 20, "local": 20, "global": 10}
    assert isinstance(report.checkpoints[0], CheckpointReport)
    assert report.checkpoints[0].age_s == 60
    assert report.directory == "/shared/ckpt"


def test_memory_of_ended_processes_holds_nothing() -> None:
    """With the job, the node or the writer process, what they held in memory is gone; files stay."""
    story = running().tell(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "replica", "local"])
    assert tiers(story.judge()) == {"memory": 20, "local": 20, "replica": 20}
    assert tiers(story.judge(alive=False)) == {"local": 20, "replica": 20}
    story.add(EventKind.WRITER_ENDED, summary="it was killed")
    assert "memory" not in tiers(story.judge())
    in_memory_alone = running().tell(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "replica"])
    assert tiers(in_memory_alone.judge(alive=False)) == {}


def test_what_an_earlier_job_saved_is_there_for_the_next() -> None:
    """A job that has saved nothing yet goes on from what the one before left in files."""
    before = Story("job-0").tell(EventKind.SAVE_COMMITTED, 40, tiers=["memory", "global"])
    report = Story().start_agents("a").judge(earlier=before.events)
    assert [(one.tier, one.iteration, one.job) for one in report.checkpoints] == [("global", 40, "job-0")]


# -- budgets ---------------------------------------------------------------------------------------------------


def test_budgets_are_the_jobs_own() -> None:
    """What the recovery policy has granted in this job is taken off; what it had granted in the last one is not."""
    spent = RecoveryState(job="job-1", restarts_without_progress=2, restarts_total=5, progress_known=True)
    budgets = running().judge(recovery_state=spent).budgets
    assert budgets is not None
    assert (budgets.restarts_in_a_row.left, budgets.restarts_total.left, budgets.restarts_total.used) == (1, None, 5)
    budgets = running().judge(recovery_state=msgspec.structs.replace(spent, job="job-0")).budgets
    assert budgets is not None
    assert (budgets.restarts_in_a_row.left, budgets.restarts_total.used) == (3, 5)


def test_budgets_are_fresh_once_the_job_has_made_progress() -> None:
    """A checkpoint beyond those that the newest decision knew of resets the budgets, also before the next decision."""
    spent = RecoveryState(
        job="job-1", restarts_without_progress=3, restarts_total=3, cycles_without_progress=2, best_durable=10
    )
    for iteration, used in ((10, (3, 2)), (11, (0, 0))):
        budgets = (
            running().tell(EventKind.SAVE_COMMITTED, iteration, tiers=["global"]).judge(recovery_state=spent).budgets
        )
        assert budgets is not None
        assert (budgets.restarts_in_a_row.used, budgets.cycles_without_progress.used) == used
        assert budgets.restarts_total.used == 3


def test_journal_of_an_earlier_version_has_no_budgets_and_is_read() -> None:
    """Lines without limits, pids and times are judged as far as they go."""
    story = Story()
    story.add(EventKind.JOB_STARTED, command=["train.py"], num_nodes=1, nproc_per_node=1)
    story.start_cycle(0, "a")
    report = story.judge(alive=None)
    assert (report.state, report.budgets, report.num_cycles) == (RunState.RUNNING, None, 1)


# -- what went wrong -------------------------------------------------------------------------------------------


def test_cause_of_a_cycles_end_stands_once_with_what_was_decided() -> None:
    """What it did to peers is counted with it."""
    story = running().see(died(1, on="b"), on="b").see(died(0)).end_cycle(0, "a", "b").rule(died(1, on="b"))
    (episode,) = story.judge().incidents
    assert episode.text == "rank 1 on node b was ended by SIGKILL at iteration 12"
    assert (episode.remedy, episode.decision, episode.num_reports) == ("restart_workers", "restarting", 2)


def test_newest_trouble_comes_first_and_all_are_counted() -> None:
    """Sixty incidents: the newest fifty, newest first, and the number of all."""
    story = running()
    for cycle in range(60):
        story.rule(died(cycle=cycle))
    report = story.judge()
    assert (report.num_incidents, len(report.incidents), report.incidents[0].cycle) == (60, 50, 59)


def test_failed_saves_of_many_ranks_are_one_trouble() -> None:
    """Each rank reports a failed save; it is one."""
    story = running()
    for rank in range(4):
        failed = Incident(kind=IncidentKind.SAVE_FAILED, cycle=0, node="a", rank=rank, iteration=10)
        story.see(failed, proc=f"rank-{rank}")
    (episode,) = story.judge().incidents
    assert (episode.num_reports, episode.remedy) == (4, None)


def test_step_that_was_run_again_says_so() -> None:
    """What a worker decided at once stands with its incident."""
    story = running()
    decision = {"rung": int(RecoveryLevel.RERUN_STEP), "reason": "the step is run again"}
    incident = {"kind": "invalid_result", "node": "a", "rank": 0, "iteration": 7}
    story.add(EventKind.INCIDENT, proc="rank-0", cycle=0, incident=incident, verdict=decision)
    (episode,) = story.judge().incidents
    assert (episode.remedy, episode.decision) == ("rerun_step", "the step is run again")


def test_kind_of_another_version_is_told_as_it_is() -> None:
    """An incident of a kind that is not known here does not keep the rest from being told."""
    story = running()
    story.add(EventKind.INCIDENT, cycle=0, incident={"kind": "gremlin", "node": "a", "rank": 0})
    assert [one.text for one in story.judge().incidents] == ["gremlin a 0"]


# -- the coordinator's word ------------------------------------------------------------------------------------


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


def test_coordinator_alone_is_enough() -> None:
    """Where no run directory can be read, what the coordinator says is told."""
    lack = LiveLack(num_missing=1, num_needed=2, waited_s=20.0, gives_up_in_s=580.0)
    report = judge(Evidence(job="job-1", live=live(lack=lack)), round(1001e9))
    assert (report.state, report.sources) == (RunState.WAITING, ["coordinator"])
    assert report.summary == "waiting for 1 of 2 nodes (have: a); gives up in 580 s"
    training = (LiveNode(name="a", slot=0, first_rank=0, nproc=2), LiveNode(name="b", slot=1, first_rank=2, nproc=2))
    report = judge(Evidence(job="job-1", live=live(phase="running", nodes=training)), round(1001e9))
    assert [(node.state, node.ranks) for node in report.nodes] == [("training", [0, 1]), ("training", [2, 3])]
    assert (report.state, report.cycle, report.last_seen_s) == (RunState.RUNNING, 0, 1.0)


def test_coordinator_knows_better_than_the_journal() -> None:
    """What the coordinator says of state and nodes goes before what was written earlier."""
    barred = live(phase="running", quarantined=("b",), nodes=(LiveNode(name="a", slot=0, first_rank=0, nproc=1),))
    report = running().judge(live=barred, alive=None)
    assert report.sources == ["journal", "coordinator"]
    assert (report.state, report.excluded) == (RunState.RUNNING, ["b"])
    over = running().judge(live=live(phase="over", exit_code=93, reason="no progress"))
    assert (over.state, over.exit_code, over.reason) == (RunState.OVER, 93, "no progress")


# -- whatever there is -----------------------------------------------------------------------------------------


def whole_story() -> list[Event]:
    story = running().tell(EventKind.SAVE_COMMITTED, 20, tiers=["memory", "local"])
    story.see(died(1, on="b"), on="b").end_cycle(0, "a", "b", r0=25, r1=24).rule(died(1, on="b"))
    story.start_cycle(1, "a", "b").start_sessions(1, "a", "b")
    story.tell(EventKind.RESTORED, 20, cycle=1, tier="local", generation=20).tell(EventKind.PROGRESS, 21, cycle=1)
    lost = Incident(kind=IncidentKind.NODE_LOST, job="job-1", cycle=1, node="b")
    story.see(lost, proc="coordinator").end_cycle(1, "a", r0=33).rule(lost, RecoveryLevel.REPLACE_NODE)
    story.start_agents("c").start_cycle(2, "a", "c").tell(EventKind.PROGRESS, 40, cycle=2)
    story.end_cycle(2, "a", "c", reason="finished", r0=50).end_agents("a", "c")
    return story.events


EVENTS = whole_story()


@settings(max_examples=300)
@given(
    kept=st.sets(st.integers(0, len(EVENTS) - 1)),
    until=st.integers(0, len(EVENTS)),
    alive=st.sampled_from([True, False, None]),
    after_s=st.floats(-100, 1e7),
)
def test_any_part_of_a_journal_gives_a_report(kept: set[int], until: int, alive: bool | None, after_s: float) -> None:
    """Whatever lines are missing, torn or not written yet: a report comes, and does not contradict itself."""
    story = Story(num_nodes=2)
    story.events = [event for place, event in enumerate(EVENTS[:until]) if place in kept]
    story.now_s = 1200.0
    report = story.judge(alive=alive, after_s=after_s)
    assert msgspec.json.decode(msgspec.json.encode(report), type=StatusReport) == report
    assert list(render(report, width=80))
    assert (report.waiting is not None) == (report.state == RunState.WAITING)
    assert report.exit_code is None or report.state == RunState.OVER
    assert report.state != RunState.NO_PROCESS or alive is False
    assert all(node.state == "training" or not node.pids for node in report.nodes)
    assert all(age >= 0 for age in (report.last_seen_s or 0, report.iteration_age_s or 0))
    assert report == story.judge(alive=alive, after_s=after_s)


@given(until=st.integers(1, len(EVENTS)))
def test_every_moment_of_a_run_has_its_state(until: int) -> None:
    """From its first line to its last a job whose processes live is never taken for dead or over."""
    story = Story(num_nodes=2)
    story.events = EVENTS[:until]
    story.now_s = story.events[-1].wall_ns / 1e9
    expected = {RunState.OVER} if until == len(EVENTS) else {RunState.FORMING, RunState.WAITING, RunState.RUNNING}
    assert story.judge(nodes={"b": None}).state in expected
