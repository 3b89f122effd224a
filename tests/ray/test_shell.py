"""An actor's shell: groups by axis, getting out of whatever the user's code waits in, nothing left of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from shells import Crew, Plain, wait_until

from outlast.ray.protocol import Aborted, CallFailed, FailureKind, Joined, Mesh

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("ray_cluster"), pytest.mark.extended]
MESH = Mesh(dp=2, tp=2)


@pytest.fixture(scope="module")
def actors(ray_cluster: object) -> Iterator[Crew]:
    """Four actors and a spare."""
    crew = Crew(MESH, num_spares=1, timeouts={"step": 0.5})
    try:
        yield crew
    finally:
        crew.close()


@pytest.fixture
def crew(actors: Crew) -> Crew:
    """Those, in no incarnation."""
    actors.restore()
    return actors


@pytest.mark.slow
def test_each_axis_has_its_group_and_recovery_leaves_processes_alone(crew: Crew) -> None:
    """Groups follow the mesh; survivors blocked in a collective are freed, keep their processes, and go on."""
    crew.join()
    assert [sums["dp"] for sums in crew.call("sums")] == [2.0, 4.0, 2.0, 4.0]
    assert [sums["tp"] for sums in crew.call("sums")] == [1.0, 1.0, 5.0, 5.0]
    assert [(sums["pp"], sums["cp"]) for sums in crew.call("sums")] == [(0, 0), (1, 1), (2, 2), (3, 3)]

    before = crew.pids()
    root_cause = 2
    for how in ("all_reduce", "receive", "send", "new_group", "compute", "swallow"):
        calls = crew.begin_call("hang", how, root_cause)
        crew.wait_in_sections()
        crew.replace(root_cause)
        others = [0, 1, 3]
        aborted = crew.abort(others)
        assert all(one.call_ended for one in aborted), (how, aborted)
        answers = crew.outcomes([calls[rank] for rank in others])
        assert all(isinstance(one, CallFailed) for one in answers), (how, answers)
        # A survivor may learn of the death from its peer before it is told to leave.
        assert {one.kind for one in answers} <= {FailureKind.ABORTED, FailureKind.PEER}, (how, answers)
        assert len(answers) == 3
        crew.spares.append(crew.make())  # for the next one, while this one goes on
        crew.join()
        now = crew.pids()
        assert [now[rank] for rank in others] == [before[rank] for rank in others], how
        assert now[root_cause] != before[root_cause]
        before = now
        assert [sums["dp"] for sums in crew.call("sums")] == [2.0, 4.0, 2.0, 4.0]


def test_what_hangs_is_seen_from_beside_it(crew: Crew) -> None:
    """While a rank sleeps in a section, it answers: the timeout that it exceeds, and where everybody is."""
    import ray

    crew.join()
    crew.begin_call("hang", "all_reduce", 1)
    wait_until(lambda: all(one.exceeded for one in crew.statuses()), "the timeout")
    pulse = crew.statuses()[1]
    assert pulse.due_in_s is not None
    assert pulse.due_in_s < 0
    assert [name for name, _ in pulse.sections] == ["step"]
    assert "section 'step' exceeded 0.5 s" in pulse.exceeded[0]
    positions = ray.get([shell.examine.remote() for shell in crew.slots], timeout=300)
    assert [one.global_rank for one in positions] == [0, 1, 2, 3]
    assert [one.waits_in_collective for one in positions] == [True, False, True, True]
    assert "time.sleep" not in str(positions[0].stack_line)
    from outlast.policy.root_cause import find_root_cause

    assert find_root_cause(positions).position.global_rank == 1


def test_a_join_can_be_left_and_what_is_stale_is_refused(crew: Crew) -> None:
    """Ranks that wait for one that never comes are freed; calls and joins of a given-up incarnation are refused."""
    import ray

    crew.join()
    missing = crew.slots[3]
    crew.abort([0, 1, 2, 3])
    crew.slots[3] = crew.spares.pop(0)
    ray.get(missing.identity.remote(), timeout=300)
    ray.kill(crew.slots[3])
    joins = crew.begin_join()[:3]
    aborted = crew.abort([0, 1, 2])
    assert all(one.call_ended for one in aborted), aborted
    answers = crew.outcomes(joins)
    assert all(isinstance(one, CallFailed) for one in answers), answers

    stale = crew.outcomes(crew.begin_call("look")[:3])
    assert {one.kind for one in stale if isinstance(one, CallFailed)} == {FailureKind.REFUSED}
    crew.incarnation -= 1
    crew.slots[3] = missing
    refused = crew.outcomes(crew.begin_join()[:3])
    assert {one.kind for one in refused if isinstance(one, CallFailed)} == {FailureKind.REFUSED}
    crew.abort([3])
    crew.incarnation += 5
    assert all(isinstance(one, Joined) for one in crew.join())
    assert len(crew.call("sums")) == 4


def test_an_exception_comes_back_as_a_word_whatever_it_is(crew: Crew) -> None:
    """What the user's code raises is told with its text, also where it cannot be pickled; the actor goes on."""
    crew.join()
    before = crew.pids()
    answers = crew.outcomes(crew.begin_call("fail", 2))
    failed = answers[2]
    assert isinstance(failed, CallFailed)
    assert failed.kind == FailureKind.RAISED
    assert "ValueError: on purpose" in failed.summary
    assert "shells.py" in failed.traceback
    assert failed.iteration == 0
    assert failed.error is None
    assert len(crew.call("sums")) == 4
    assert crew.pids() == before


@pytest.mark.campaign
def test_nothing_grows_over_thirty_incarnations(crew: Crew) -> None:
    """Descriptors, threads and memory after thirty aborted incarnations are what they were after the first few."""
    seen = []
    for _ in range(30):
        crew.join()
        calls = crew.begin_call("hang", "all_reduce", 9)
        crew.outcomes(calls)
        seen.append(crew.call("resources"))
        aborted = crew.abort(range(4))
        assert all(isinstance(one, Aborted) and one.call_ended for one in aborted)
    for rank in range(4):
        fds, threads, memory = zip(*(one[rank] for one in seen), strict=True)
        assert max(fds[-5:]) <= max(fds[3:8]) + 4, fds
        assert max(threads[-5:]) <= max(threads[3:8]) + 4, threads
        assert memory[-1] <= memory[5] + 24_000, memory


@pytest.mark.campaign
def test_a_plain_class_begins_anew_after_a_recovery(ray_cluster: object) -> None:
    """A class that is no TrainActor trains in the default group; a recovery makes every object of it anew."""
    crew = Crew(Mesh(dp=2), actor=Plain, num_spares=1)
    try:
        assert [one.iteration for one in crew.join()] == [0, 0]
        assert crew.call("add") == [(2.0, 1), (2.0, 1)]
        assert crew.call("add") == [(2.0, 2), (2.0, 2)]
        assert [one.iteration for one in crew.statuses()] == [2, 2]
        before = crew.pids()
        crew.replace(1)
        crew.abort([0])
        assert [one.iteration for one in crew.join()] == [0, 0]
        assert crew.call("add") == [(2.0, 1), (2.0, 1)]
        assert crew.pids()[0] == before[0]
        assert os.getpid() not in crew.pids()
    finally:
        crew.close()
