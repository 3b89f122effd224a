"""A group of actors keeps survivors, replaces lost actors, and reaches the weights of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from ray._private.state import actors
from ray_trainer import Trainer, batch_of, plan_fault, weights_after

from outlast import CheckpointConfig, FaultToleranceConfig, clock
from outlast.errors import ActorFailed, ConfigError, DeadlineExceeded, RolledBack
from outlast.incidents import Event, EventKind
from outlast.journal import read
from outlast.ray import ActorGroup, RecoveryConfig
from outlast.ray.recovery import RecoveryReport
from outlast.ray.watch import LossKind

pytestmark = [pytest.mark.process, pytest.mark.extended]
SECTION_S = 6.0
RECOVERY = RecoveryConfig(
    examine_timeout=3.0, ping_timeout=15.0, abort_timeout=20.0, spare_wait=300.0, max_recoveries=3
)
"""Long enough for a busy machine: no actor that only waits is declared lost, and new actors have time to start."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="module")
def group(ray_cluster: object, folder: Path) -> Iterator[ActorGroup]:
    """Run dp2 x tp2 with two spares; each test continues the training of the previous one."""
    with ActorGroup(
        Trainer,
        mesh={"dp": 2, "tp": 2},
        args=(str(folder),),
        num_spares=2,
        checkpoint=CheckpointConfig(
            local_directory=str(folder / "local"), non_persistent_save_interval=1, async_save=False
        ),
        fault_tolerance=FaultToleranceConfig(
            rank_section_timeouts={"step": SECTION_S}, rank_out_of_section_timeout=SECTION_S, num_warmup_iterations=0
        ),
        recovery=RECOVERY,
        run_dir=str(folder / "run"),
    ) as group:
        yield group


def train(group: ActorGroup, num_steps: int) -> None:
    """Make steps, and check that the results come from the right shards, in order."""
    for _ in range(num_steps):
        iteration = (group.iteration or 0) + 1
        batch = batch_of(iteration)
        results = group.run("train_step", batch, iteration)
        assert results == [float(shard.sum()) for shard in batch.chunk(2)]
        assert group.iteration == iteration


def assert_undisturbed(group: ActorGroup) -> None:
    """Compare every rank's weights, bit by bit, with those of a run without failures."""
    expected = weights_after(group.iteration or 0)
    for rank, weights in enumerate(group.run("weights", dispatch="pass_through")):
        assert torch.equal(weights, expected[rank % 2]), f"rank {rank}"


def recover_from(group: ActorGroup, folder: Path, faults: dict[int, str], where: str = "middle") -> RecoveryReport:
    """Make ranks fail in the next step, check that only these are replaced, and return the report."""
    if not group.iteration:
        train(group, 1)  # there is a checkpoint to load
    before, iteration = group.pids, (group.iteration or 0) + 1
    num_recoveries = len(group.recoveries)
    for rank, kind in faults.items():
        plan_fault(folder, where, iteration, rank, kind)
    train(group, 1)
    reports = group.recoveries[num_recoveries:]
    assert len(reports) == 1
    report = reports[0]
    replaced = {rank for rank, kind in faults.items() if kind != "exception"}
    assert {rank for rank, pid in group.pids.items() if pid != before[rank]} == replaced
    assert report.kept == {rank: pid for rank, pid in before.items() if rank not in replaced}
    assert set(report.replaced) == replaced
    assert {one.rank for one in report.lost} == set(faults)
    assert report.repeated
    assert report.iteration == report.begun_at == iteration - 1
    train(group, 2)
    assert_undisturbed(group)
    return report


@pytest.mark.extended
def test_a_group_trains_to_the_weights_of_one_process(group: ActorGroup) -> None:
    """Four actors train to exactly the weights that one process computes."""
    train(group, 3)
    assert_undisturbed(group)
    assert not group.recoveries


def test_only_the_killed_actor_is_replaced(group: ActorGroup, folder: Path) -> None:
    """When an actor is killed during an all-reduce, its peers keep their processes and state, and only that actor is
    replaced."""
    report = recover_from(group, folder, {2: "kill"}, "begin")
    assert [one.kind for one in report.lost] == [LossKind.DIED]
    assert report.loaded == (2,)
    assert report.checkpoint == report.iteration


@pytest.mark.extended
@pytest.mark.slow
def test_an_actor_that_hangs_in_a_section_is_replaced(group: ActorGroup, folder: Path) -> None:
    """An actor that sleeps in its step while its peers wait is identified as the root cause, and only that actor is
    replaced."""
    report = recover_from(group, folder, {1: "sleep"}, "begin")
    lost = report.lost[0]
    assert lost.kind == LossKind.HUNG
    assert "step" in lost.evidence
    assert "inject_fault" in lost.evidence  # the line at which it sleeps
    assert lost.detected_after_s is not None
    assert lost.detected_after_s >= SECTION_S
    assert report.loaded == (1,)


@pytest.mark.slow
def test_a_stopped_actor_is_replaced(group: ActorGroup, folder: Path) -> None:
    """An actor that is stopped in its step does not respond while its peers do, and only that actor is replaced."""
    report = recover_from(group, folder, {3: "stop"}, "begin")
    assert report.lost[0].kind == LossKind.SILENT
    assert report.loaded == (3,)


@pytest.mark.extended
@pytest.mark.campaign
@pytest.mark.slow
def test_several_actors_are_replaced_at_once(group: ActorGroup, folder: Path) -> None:
    """When ranks 0 and 3 die together, 1 and 2 continue in their processes and slots, with another first rank."""
    report = recover_from(group, folder, {0: "killtogether", 3: "killtogether"}, "begin")
    assert report.loaded == (0, 3)


def test_an_exception_replaces_no_actor(group: ActorGroup, folder: Path) -> None:
    """When an actor raises while its peers wait, all processes are kept, it loads the state, and the call is
    repeated."""
    report = recover_from(group, folder, {2: "exception"}, "begin")
    assert [one.kind for one in report.lost] == [LossKind.RAISED]
    assert "a fault on purpose in rank 2" in report.lost[0].evidence
    assert report.loaded == (2,)


def test_a_death_in_the_update_reloads_the_checkpoint(group: ActorGroup, folder: Path) -> None:
    """An actor that dies in its update leaves peers with newer state than the checkpoint: all return to the same
    state."""
    report = recover_from(group, folder, {1: "kill"}, "update")
    assert 1 in report.loaded


@pytest.mark.campaign
def test_a_survivor_that_dies_in_the_recovery_is_replaced(group: ActorGroup, folder: Path) -> None:
    """A survivor that dies while the group is formed again is replaced in the same recovery."""
    plan_fault(folder, "regroup", -1, 0, "kill")
    before = group.pids
    with_spare = recover_from_two(group, folder, 2)
    assert with_spare.rounds == 2
    assert set(with_spare.kept) == {1, 3}
    assert {rank for rank, pid in group.pids.items() if pid != before[rank]} == {0, 2}


def recover_from_two(group: ActorGroup, folder: Path, rank: int) -> RecoveryReport:
    """Make a rank die in the next step, with another failure already planned."""
    num_recoveries, iteration = len(group.recoveries), (group.iteration or 0) + 1
    plan_fault(folder, "begin", iteration, rank, "kill")
    train(group, 2)
    assert_undisturbed(group)
    assert len(group.recoveries) == num_recoveries + 1
    return group.recoveries[-1]


@pytest.mark.extended
@pytest.mark.slow
def test_a_spare_that_dies_in_setup_is_replaced(group: ActorGroup, folder: Path) -> None:
    """Another spare takes the slot in the same recovery."""
    plan_fault(folder, "setup", -1, 1, "kill")
    report = recover_from_two(group, folder, 1)
    assert report.rounds == 2
    assert set(report.kept) == {0, 2, 3}
    assert [one.rank for one in report.lost] == [1, 1]


@pytest.mark.extended
@pytest.mark.slow
def test_spares_are_replenished_after_losses(group: ActorGroup) -> None:
    """After all these losses there are two spares again, and no more actors than slots and spares."""
    wait_for_spares(group, 2)
    assert len(set(group.pids.values()) | set(group.spares)) == 6


def wait_for_spares(group: ActorGroup, num: int) -> None:
    deadline = clock.now_s() + 90
    while len(group.spares) < num:
        assert clock.now_s() < deadline, "the pool was not filled again"
        group.run("calls")


def test_the_journal_has_each_loss_and_recovery(group: ActorGroup, folder: Path) -> None:
    """Every loss is an incident of the journal, with rank, process and evidence, and each recovery is an event."""
    events = list(read(folder / "run"))
    incidents = [event.data["incident"] for event in events if event.kind == EventKind.INCIDENT]
    assert [(one["rank"], one["pid"]) for one in incidents] == [
        (lost.rank, lost.pid) for report in group.recoveries for lost in report.lost
    ]
    assert sum(event.kind == EventKind.ACTORS_RECOVERED for event in events) == len(group.recoveries)


@pytest.mark.extended
def test_a_killed_keeper_is_replaced_without_losing_saves(group: ActorGroup, folder: Path) -> None:
    """A keeper that is killed between two steps is replaced without a recovery, later saves are committed, and there is
    one incident."""
    before, num_recoveries = journal_of(folder, EventKind.INCIDENT), len(group.recoveries)
    alive = (one for one in actors().values() if one["State"] == "ALIVE")
    (pid,) = (one["Pid"] for one in alive if one["ActorClassName"] == "NodeKeeper")
    writers = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    assert not psutil.wait_procs(writers, timeout=300)[1]  # the writer ends with its keeper
    train(group, 2)
    deadline_s = clock.now_s() + 60
    while len(journal_of(folder, EventKind.INCIDENT)) == len(before):
        assert clock.now_s() < deadline_s, "the killed keeper is not replaced"
        time.sleep(0.05)
    train(group, 1)
    (incident,) = journal_of(folder, EventKind.INCIDENT)[len(before) :]
    assert incident.data["incident"]["kind"] == "writer_lost"
    assert len(group.recoveries) == num_recoveries
    committed = {event.iteration for event in journal_of(folder, EventKind.SAVE_COMMITTED)}
    assert {group.iteration - 2, group.iteration - 1, group.iteration} <= committed
    assert_undisturbed(group)


def journal_of(folder: Path, kind: EventKind) -> list[Event]:
    return [event for event in read(folder / "run") if event.kind == kind]


def test_a_repeated_exception_is_raised_to_the_caller(group: ActorGroup) -> None:
    """An exception that is raised twice is raised to the caller, with its cause; the group is unchanged and usable."""
    before, iteration = group.pids, group.iteration
    with pytest.raises(ActorFailed, match="'fail' failed again") as raised:
        group.run("fail", dispatch="pass_through")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert raised.value.iteration == iteration
    assert group.pids == before
    train(group, 1)
    assert_undisturbed(group)


def test_invalid_calls_reach_no_actor(group: ActorGroup) -> None:
    """An unknown method or dispatch, and arguments that cannot be divided, are errors in the caller."""
    num_recoveries = len(group.recoveries)
    with pytest.raises(ConfigError, match="no method 'train_stop'"):
        group.run("train_stop")
    with pytest.raises(ConfigError, match="dispatch"):
        group.run("weights", dispatch="mash")
    with pytest.raises(ConfigError, match="weights"):
        group.run("train_step", batch_of(1)[:3], 1)
    assert len(group.recoveries) == num_recoveries


@pytest.mark.campaign
def test_an_actor_that_hangs_outside_sections_is_replaced(group: ActorGroup, folder: Path) -> None:
    """The time outside of sections counts within a call, from its begin. Where the step was already saved, it is not
    repeated: the caller receives the group's iteration."""
    time.sleep(SECTION_S + 0.5)  # an idle group has no timeout
    train(group, 1)
    before, iteration, num_recoveries = group.pids, (group.iteration or 0) + 1, len(group.recoveries)
    plan_fault(folder, "end", iteration, 1, "sleep")
    with pytest.raises(RolledBack) as raised:
        group.run("train_step", batch_of(iteration), iteration)
    assert (raised.value.iteration, group.iteration) == (iteration, iteration)
    (report,) = group.recoveries[num_recoveries:]
    assert [(one.rank, one.kind) for one in report.lost] == [(1, LossKind.HUNG)]
    assert "time outside sections exceeded" in report.lost[0].evidence
    assert report.kept == {rank: pid for rank, pid in before.items() if rank != 1}
    train(group, 1)
    assert_undisturbed(group)


@pytest.mark.extended
@pytest.mark.campaign
@pytest.mark.slow
def test_equally_slow_actors_are_not_replaced(group: ActorGroup) -> None:
    """When all actors are too slow at the same place, none is replaced, the call is repeated once, and its error
    reports it."""
    before, iteration, num_recoveries = group.pids, group.iteration, len(group.recoveries)
    with pytest.raises(ActorFailed, match="ranks 0, 1, 2, 3 are indistinguishable") as raised:
        group.run("dawdle", 600.0)
    assert raised.value.rank is None
    assert [report.lost for report in group.recoveries[num_recoveries:]] == [(), ()]
    assert (group.pids, group.iteration) == (before, iteration)
    train(group, 1)
    assert_undisturbed(group)


def test_ctrl_c_ends_only_the_wait(group: ActorGroup) -> None:
    """After an interrupted wait the group is unchanged: the call continues, and the next one begins after it."""
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    num_recoveries = len(group.recoveries)
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores SIGINT
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            group.run("linger", 4.0)
    finally:
        timer.cancel()  # if the call failed: the signal would end pytest
        timer.join()
        signal.signal(signal.SIGINT, earlier)
    train(group, 1)
    assert_undisturbed(group)
    assert len(group.recoveries) == num_recoveries


def test_calls_can_be_awaited(group: ActorGroup) -> None:
    """Submitted calls run in order, with the arguments as they were at submission; an event loop may await them, and a
    thread may wait with a timeout."""

    async def train_two() -> list[object]:
        first = (group.iteration or 0) + 1
        steps = [group.submit("train_step", batch_of(one), one) for one in (first, first + 1)]
        return [await step for step in steps]

    before = group.iteration or 0
    assert len(asyncio.run(train_two())) == 2
    assert group.iteration == before + 2
    pending = group.submit("linger", 3.0)
    with pytest.raises(DeadlineExceeded, match="it continues"):
        pending.result(0.05)
    batch = batch_of(before + 3)
    waiting = group.submit("train_step", batch, before + 3)
    batch.zero_()
    assert pending.result() == ["lingered", "lingered"]
    assert pending.is_done
    waiting.result()
    assert_undisturbed(group)
