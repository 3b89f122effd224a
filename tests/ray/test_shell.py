"""An actor's shell: groups by axis, interruption of blocked user code, and no leaked resources."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from shells import Plain, ShellDriver, wait_until

from outlast.ray.protocol import Aborted, CallFailed, FailureKind, Joined, Mesh

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("ray_cluster"), pytest.mark.extended]
MESH = Mesh(dp=2, tp=2)


@pytest.fixture(scope="module")
def actors(ray_cluster: object) -> Iterator[ShellDriver]:
    """Start four actors and a spare."""
    driver = ShellDriver(MESH, num_spares=1, timeouts={"step": 0.5})
    try:
        yield driver
    finally:
        driver.close()


@pytest.fixture
def driver(actors: ShellDriver) -> ShellDriver:
    """Return the actors, in no incarnation."""
    actors.restore()
    return actors


@pytest.mark.slow
def test_recovery_rebuilds_groups_and_keeps_processes(driver: ShellDriver) -> None:
    """Groups follow the mesh; survivors that are blocked in a collective are freed, keep their processes, and
    continue."""
    driver.join()
    assert [sums["dp"] for sums in driver.call("sums")] == [2.0, 4.0, 2.0, 4.0]
    assert [sums["tp"] for sums in driver.call("sums")] == [1.0, 1.0, 5.0, 5.0]
    assert [(sums["pp"], sums["cp"]) for sums in driver.call("sums")] == [(0, 0), (1, 1), (2, 2), (3, 3)]

    before = driver.pids()
    root_cause = 2
    for how in ("all_reduce", "receive", "send", "new_group", "compute", "swallow"):
        calls = driver.begin_call("hang", how, root_cause)
        driver.wait_in_sections()
        driver.replace(root_cause)
        others = [0, 1, 3]
        aborted = driver.abort(others)
        assert all(one.call_ended for one in aborted), (how, aborted)
        answers = driver.outcomes([calls[rank] for rank in others])
        assert all(isinstance(one, CallFailed) for one in answers), (how, answers)
        # A survivor may detect the death of its peer before it receives the abort.
        assert {one.kind for one in answers} <= {FailureKind.ABORTED, FailureKind.PEER}, (how, answers)
        assert len(answers) == 3
        driver.spares.append(driver.make())  # for the next incarnation, while this one continues
        driver.join()
        now = driver.pids()
        assert [now[rank] for rank in others] == [before[rank] for rank in others], how
        assert now[root_cause] != before[root_cause]
        before = now
        assert [sums["dp"] for sums in driver.call("sums")] == [2.0, 4.0, 2.0, 4.0]


def test_a_hanging_actor_still_reports_its_status(driver: ShellDriver) -> None:
    """While a rank sleeps in a section, its shell reports the exceeded timeout and the position of every thread."""
    import ray

    driver.join()
    driver.begin_call("hang", "all_reduce", 1)
    wait_until(lambda: all(one.exceeded for one in driver.statuses()), "the timeout")
    pulse = driver.statuses()[1]
    assert pulse.due_in_s is not None
    assert pulse.due_in_s < 0
    assert [name for name, _ in pulse.sections] == ["step"]
    assert "section 'step' exceeded 0.5 s" in pulse.exceeded[0]
    positions = ray.get([shell.examine.remote() for shell in driver.slots], timeout=300)
    assert [one.global_rank for one in positions] == [0, 1, 2, 3]
    assert [one.waits_in_collective for one in positions] == [True, False, True, True]
    assert "time.sleep" not in str(positions[0].stack_line)
    from outlast.policy.root_cause import find_root_cause

    assert find_root_cause(positions).position.global_rank == 1


def test_a_join_can_be_aborted_and_stale_calls_are_rejected(driver: ShellDriver) -> None:
    """Ranks that wait for a missing rank are freed; calls and joins of an aborted incarnation are rejected."""
    import ray

    driver.join()
    missing = driver.slots[3]
    driver.abort([0, 1, 2, 3])
    driver.slots[3] = driver.spares.pop(0)
    ray.get(missing.identity.remote(), timeout=300)
    ray.kill(driver.slots[3])
    joins = driver.begin_join()[:3]
    aborted = driver.abort([0, 1, 2])
    assert all(one.call_ended for one in aborted), aborted
    answers = driver.outcomes(joins)
    assert all(isinstance(one, CallFailed) for one in answers), answers

    stale = driver.outcomes(driver.begin_call("look")[:3])
    assert {one.kind for one in stale if isinstance(one, CallFailed)} == {FailureKind.REFUSED}
    driver.incarnation -= 1
    driver.slots[3] = missing
    refused = driver.outcomes(driver.begin_join()[:3])
    assert {one.kind for one in refused if isinstance(one, CallFailed)} == {FailureKind.REFUSED}
    driver.abort([3])
    driver.incarnation += 5
    assert all(isinstance(one, Joined) for one in driver.join())
    assert len(driver.call("sums")) == 4


def test_any_user_exception_is_returned_as_text(driver: ShellDriver) -> None:
    """An exception of the user's code is returned with its text, also where it cannot be pickled; the actor
    continues."""
    driver.join()
    before = driver.pids()
    answers = driver.outcomes(driver.begin_call("fail", 2))
    failed = answers[2]
    assert isinstance(failed, CallFailed)
    assert failed.kind == FailureKind.RAISED
    assert "ValueError: on purpose" in failed.summary
    assert "shells.py" in failed.traceback
    assert failed.iteration == 0
    assert failed.error is None
    assert len(driver.call("sums")) == 4
    assert driver.pids() == before


@pytest.mark.campaign
def test_thirty_incarnations_leak_no_resources(driver: ShellDriver) -> None:
    """Descriptors, threads and memory after thirty aborted incarnations equal those after the first few."""
    seen = []
    for _ in range(30):
        driver.join()
        calls = driver.begin_call("hang", "all_reduce", 9)
        driver.outcomes(calls)
        seen.append(driver.call("resources"))
        aborted = driver.abort(range(4))
        assert all(isinstance(one, Aborted) and one.call_ended for one in aborted)
    for rank in range(4):
        fds, threads, memory = zip(*(one[rank] for one in seen), strict=True)
        assert max(fds[-5:]) <= max(fds[3:8]) + 4, fds
        assert max(threads[-5:]) <= max(threads[3:8]) + 4, threads
        assert memory[-1] <= memory[5] + 24_000, memory


@pytest.mark.campaign
def test_a_plain_class_is_recreated_after_a_recovery(ray_cluster: object) -> None:
    """A class that is not a TrainActor trains in the default group; a recovery constructs every object of it again."""
    driver = ShellDriver(Mesh(dp=2), actor=Plain, num_spares=1)
    try:
        assert [one.iteration for one in driver.join()] == [0, 0]
        assert driver.call("add") == [(2.0, 1), (2.0, 1)]
        assert driver.call("add") == [(2.0, 2), (2.0, 2)]
        assert [one.iteration for one in driver.statuses()] == [2, 2]
        before = driver.pids()
        driver.replace(1)
        driver.abort([0])
        assert [one.iteration for one in driver.join()] == [0, 0]
        assert driver.call("add") == [(2.0, 1), (2.0, 1)]
        assert driver.pids()[0] == before[0]
        assert os.getpid() not in driver.pids()
    finally:
        driver.close()
