"""A directory has one live owner, for any order of starts, pauses, deaths and resumptions."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.lease import (
    LeaseOwner,
    LeaseStep,
    OwnerStanding,
    Process,
    Silence,
    find_life,
    is_same_training,
    judge_owner,
)


def _owner(number: int = 1, *, machine: str = "m", **known: object) -> LeaseOwner:
    process = Process(host=machine, machine=machine, pid=number, started=number)
    return LeaseOwner(token=f"t{number}", process=process, run=f"run-{number}", **known)  # type: ignore[arg-type]


class Place:
    """A directory's records and writes, by the number of the writer."""

    def __init__(self) -> None:
        self.records: dict[int, LeaseOwner] = {}
        self.makers: dict[int, Actor] = {}
        self.writes: list[int] = []

    def newest(self) -> int:
        return max(self.records, default=0)


class Actor:
    """A process that requests to write; every method is one atomic action."""

    def __init__(self, place: Place, number: int, machine: str) -> None:
        self.place, self.own = place, _owner(number, machine=machine)
        self.number = 0
        self.is_paused = self.is_dead = self.is_lost = self.is_refused = False
        self.idle_s = 0.0
        """Seconds for which it has renewed nothing."""
        self._seen = 0
        self._silence = Silence()
        self._decided: int | None = None

    @property
    def holds(self) -> bool:
        return self.number > 0 and not self.is_lost and not self.is_dead

    def renew(self) -> None:
        if self.holds and self.check():
            record = self.place.records[self.number]
            self.place.records[self.number] = msgspec.structs.replace(record, renewals=record.renewals + 1)
            self.idle_s = 0.0

    def check(self) -> bool:
        self.is_lost = self.place.newest() != self.number
        return not self.is_lost

    def write(self) -> None:
        if self.holds and self.check():
            self.place.writes.append(self.number)

    def release(self) -> None:
        if self.holds and self.check():
            record = self.place.records[self.number]
            self.place.records[self.number] = msgspec.structs.replace(record, released=True)
            self.is_dead = True

    def look(self, now_s: float, actors: list[Actor]) -> None:
        """Check the newest record and decide; the action is a separate step."""
        if self.number or self.is_refused:
            return
        number = self.place.newest()
        if number != self._seen:
            self._seen, self._silence = number, Silence()
        owner = self.place.records.get(number)
        standing = OwnerStanding()
        if owner is not None:
            self._silence.look((owner.token, owner.renewals), now_s)
            other = next(one for one in actors if one.own.token == owner.token)
            process = None if other.own.process.machine != self.own.process.machine else not other.is_dead
            standing = OwnerStanding(
                is_alive=find_life(owner, process=process, job=None),
                has_changed=self._silence.has_changed,
                silent_s=self._silence.silent_s,
            )
        step = judge_owner(owner, self.own, standing)
        self.is_refused = step is LeaseStep.REFUSE
        self._decided = number if step is LeaseStep.TAKE else None

    def take(self, actors: list[Actor]) -> None:
        """Make the next record, and delete the older ones."""
        if self._decided is None or self.number:
            return
        number, self._decided = self._decided + 1, None
        if number in self.place.records:
            return
        before = self.place.records.get(number - 1)
        self.place.records[number] = self.own
        if self.place.newest() > number:
            del self.place.records[number]
            return
        if before is not None and not before.released:
            other = next(one for one in actors if one.own.token == before.token)
            assert other.is_dead or other.idle_s >= before.expires_s - before.renew_s, (
                "the previous owner was alive and renewed"
            )
        assert number not in self.place.makers, "a number was used twice"
        self.place.makers[number] = self
        self.number = number
        for old in [one for one in self.place.records if one < number]:
            del self.place.records[old]


ACTIONS = st.sampled_from(
    ["look", "look", "take", "take", "write", "pause", "resume", "kill", "release", "tick", "tick"]
)


@given(st.lists(st.tuples(st.integers(0, 3), ACTIONS), max_size=150), st.lists(st.booleans(), min_size=4, max_size=4))
def test_two_owners_never_write(turns: list[tuple[int, str]], is_local: list[bool]) -> None:
    """For any interleaving of checks, actions, pauses and ends of four processes on two machines: a process that renews
    keeps the directory, the previous owner never writes after a takeover, and no number is used twice."""
    place, now_s = Place(), 0.0
    actors = [Actor(place, number + 1, "a" if is_here else "b") for number, is_here in enumerate(is_local)]
    for index, action in turns:
        actor = actors[index]
        if action == "tick":
            now_s += 1.0
            for one in actors:
                one.idle_s += 1.0
                if not one.is_paused and one.idle_s >= one.own.renew_s:
                    one.renew()
        elif action == "resume":
            actor.is_paused = False
        elif actor.is_paused or actor.is_dead:
            continue
        elif action == "pause":
            actor.is_paused = True
        elif action == "kill":
            actor.is_dead = True
        elif action == "look":
            actor.look(now_s, actors)
        elif action == "take":
            actor.take(actors)
        elif action == "release":
            actor.release()
        else:
            actor.write()
        assert sum(one.holds and one.number == place.newest() for one in actors) <= 1
    assert place.writes == sorted(place.writes)


@pytest.mark.parametrize("machine", ["m", "elsewhere"])
def test_dead_owner_is_replaced(machine: str) -> None:
    """A new process takes the directory of a dead owner at once on the same machine, and after missed renewals
    elsewhere."""
    place = Place()
    first, second = Actor(place, 1, "m"), Actor(place, 2, machine)
    actors = [first, second]
    first.look(0.0, actors)
    first.take(actors)
    first.is_dead = True
    looks = 0
    while not second.number and looks < 100:
        second.look(float(looks), actors)
        second.take(actors)
        first.idle_s += 1.0
        looks += 1
    assert second.number == 2
    assert looks == (1 if machine == "m" else 11)


def test_paused_observer_does_not_expire_the_owner() -> None:
    """A process that slept for an hour between two checks knows as little as after two seconds."""
    silence = Silence()
    for now_s in (0.0, 3600.0, 7200.0):
        silence.look("same", now_s)
    assert silence.silent_s == 4.0
    assert not silence.has_changed


def test_later_stage_of_a_job_takes_over_at_once() -> None:
    """A cycle's ranks, a requeued job and a new host of the coordinator do not wait; the same stage of a job enters in
    addition to its owner only if that is intended."""
    silent = OwnerStanding()
    owner = _owner(1, job="j", stage=(1, 0), allocation="7")
    assert judge_owner(owner, _owner(2, job="j", stage=(2, 0)), silent) is LeaseStep.TAKE
    assert judge_owner(owner, _owner(2, job="j", stage=(1, 1)), silent) is LeaseStep.TAKE
    assert judge_owner(owner, _owner(2, job="j", stage=(1, 0)), silent) is LeaseStep.WAIT
    assert judge_owner(owner, _owner(2, job="other", stage=(2, 0)), silent) is LeaseStep.WAIT
    assert judge_owner(owner, _owner(2, allocation="7", requeues=1), silent) is LeaseStep.TAKE
    assert judge_owner(owner, _owner(2, allocation="7"), OwnerStanding(is_alive=True)) is LeaseStep.REFUSE
    member = _owner(2, job="j", stage=(1, 0), shares=True)
    assert judge_owner(owner, member, silent) is LeaseStep.ENTER
    assert judge_owner(owner, member, OwnerStanding(is_alive=True)) is LeaseStep.ENTER
    assert judge_owner(owner, member, OwnerStanding(is_alive=False)) is LeaseStep.TAKE
    assert judge_owner(owner, member, OwnerStanding(is_alive=True), leads=True) is LeaseStep.TAKE


def test_job_keeps_its_directory_while_ranks_restart() -> None:
    """While ranks restart, only their launcher lives; until it is known to be gone, no process takes the directory
    before the record expires."""
    ranks = _owner(1, outlives=True)
    assert find_life(ranks, process=False, job=True) is True
    assert find_life(ranks, process=False, job=None) is None
    assert find_life(ranks, process=False, job=False) is False
    assert find_life(ranks, process=None, job=False) is None
    assert find_life(_owner(1), process=False, job=None) is False


def test_training_is_identified_by_names_then_script() -> None:
    """One common name is enough, and two runs with names but none in common differ. Without a name on one side the
    script decides; unknown values decide nothing."""

    def same(before: tuple[tuple[str, ...], str | None], own: tuple[tuple[str, ...], str | None]) -> bool:
        (names, script), (own_names, own_script) = before, own
        return is_same_training(_owner(1, names=names, script=script), _owner(2, names=own_names, script=own_script))

    assert same((("id a", "directory /a"), "/x"), (("id b", "directory /a"), "/x"))
    assert same((("id a",), "/x"), (("id a",), "/y"))
    assert not same((("id a",), "/x"), (("id b",), "/x"))
    assert same(((), "/x"), ((), "/x"))
    assert same((("id a",), "/x"), ((), "/x"))
    assert not same(((), "/x"), (("id a",), "/y"))
    assert same(((), None), (("id a",), "/y"))


PLACES = st.lists(st.sampled_from(["a:1", "b:1", "c:1"]), unique=True).map(tuple)


@given(st.sampled_from([None, "x", "y"]), PLACES, st.sampled_from([None, "x", "y"]), PLACES)
def test_processes_of_one_job_share_name_and_place(
    name: str | None, places: tuple[str, ...], other_name: str | None, other_places: tuple[str, ...]
) -> None:
    """Processes of one job have its name and at least one common place, or no places at all; the relation is symmetric,
    and a process that enters belongs to the owner's job."""
    own = _owner(1, job=name, meets_at=places, shares=True)
    owner = _owner(2, job=other_name, meets_at=other_places, shares=True)
    is_same = name is not None and name == other_name and (places == other_places or bool({*places} & {*other_places}))
    assert own.is_of_job(owner) == owner.is_of_job(own) == is_same
    enters = judge_owner(owner, own, OwnerStanding(is_alive=None)) is LeaseStep.ENTER
    assert enters == is_same
