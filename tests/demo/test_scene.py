"""When a fault may strike, and what a scene says of nodes and generations."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from written_events import written

from outlast.demo.plan import Deed, DemoFault, RankScene, Scene, is_time
from outlast.incidents import Event, EventKind, IncidentKind, Rung

KILL = DemoFault(deed=Deed.KILL, iteration=12, rank=1)
LOSE = DemoFault(deed=Deed.LOSE, iteration=12, slot=1)
SPOIL = dataclasses.replace(LOSE, deed=Deed.SPOIL)
NAN = DemoFault(deed=Deed.NAN, iteration=14, rank=0)
FLIP = DemoFault(deed=Deed.FLIP, iteration=14, rank=1)
NEAR = ("memory", "local", "replica")


def event(kind: EventKind, node: str, cycle: int, **data: Any) -> Event:
    return written(kind, on=node, proc="p", cycle=cycle, **data)


def committed(iteration: int, *tiers: str, ranks: tuple[int, ...] = (0, 1), cycle: int = 1) -> list[Event]:
    kind = EventKind.SAVE_COMMITTED
    return [event(kind, "ab"[rank], cycle, iteration=iteration, rank=rank, tiers=list(tiers)) for rank in ranks]


def scene(*iterations: int, cycle: int = 1, restored: int = 5, durable: int = 10) -> Scene:
    """Return two nodes of one rank each and a spare, in a cycle that went on from a generation."""
    events = [
        *(event(EventKind.NODE_JOINED, "a", 0, name=name) for name in "abc"),
        event(EventKind.CYCLE_STARTED, "a", cycle, node_rank=0, ranks=[0], world_size=2),
        event(EventKind.CYCLE_STARTED, "b", cycle, node_rank=1, ranks=[1], world_size=2),
        event(EventKind.RESTORED, "a", cycle, iteration=restored),
        *committed(durable, *NEAR, cycle=cycle),
    ]
    ranks = [
        RankScene(rank=rank, node="ab"[rank], pid=rank + 1, cycle=cycle, iteration=iteration)
        for rank, iteration in enumerate(iterations)
    ]
    return Scene(ranks=tuple(ranks), events=events, running=("a", "b", "c"))


def test_a_fault_strikes_when_all_ranks_are_there_and_a_newer_generation_is_committed() -> None:
    """Every rank has done the iteration, and what would be lost is less than what was won since the last restart."""
    assert is_time(KILL, scene(12, 13), world_size=2, after_cycle=0)
    assert not is_time(KILL, scene(12, 11), world_size=2, after_cycle=0)
    assert not is_time(KILL, scene(12), world_size=2, after_cycle=0)
    assert not is_time(KILL, scene(12, 13, restored=10), world_size=2, after_cycle=0)


def test_a_generation_counts_once_every_rank_knows_of_it() -> None:
    """What one rank alone, or an earlier cycle, saw committed is not waited for, nor a tier that it did not reach."""
    now = scene(12, 13)
    events = [
        *now.events,
        *committed(12, *NEAR, ranks=(1,)),
        *committed(14, "global", cycle=0),
        *committed(8, "global"),
    ]
    now = dataclasses.replace(now, events=events)
    assert now.safe(1, num_ranks=2) == 10
    assert now.safe(1, num_ranks=2, tier="global") == 8
    assert now.safe(1, num_ranks=2, tier="nowhere") == 0


def test_copies_are_spoiled_only_when_the_global_tier_has_something_newer() -> None:
    """A generation of the near tiers is none that ranks without sound copies could go on from."""
    ready = scene(12, 13)
    assert not is_time(SPOIL, ready, world_size=2, after_cycle=0)
    ready = dataclasses.replace(ready, events=[*ready.events, *committed(10, "global")])
    assert is_time(SPOIL, ready, world_size=2, after_cycle=0)


def test_one_fault_a_cycle_and_none_in_a_cycle_that_ends() -> None:
    """A cycle that was struck, or whose end is decided, is left alone."""
    ready = scene(12, 13)
    assert not is_time(KILL, ready, world_size=2, after_cycle=1)
    ending = dataclasses.replace(ready, events=[*ready.events, event(EventKind.VERDICT, "a", 1)])
    assert not is_time(KILL, ending, world_size=2, after_cycle=0)
    assert not is_time(KILL, Scene(ranks=(), events=()), world_size=2, after_cycle=-1)


def test_a_node_is_lost_only_while_a_spare_waits() -> None:
    """A spare that has not joined yet, or is gone, is none."""
    ready = scene(12, 13)
    assert ready.spares == ("c",)
    assert is_time(LOSE, ready, world_size=2, after_cycle=0)
    assert not is_time(LOSE, dataclasses.replace(ready, running=("a", "b")), world_size=2, after_cycle=0)


def judged(now: Scene, rank: int, rung: Rung, *, quarantine: tuple[str, ...] = ()) -> Scene:
    """Return the scene after something was done about a rank's invalid result."""
    kind = EventKind.INCIDENT if rung == Rung.RERUN_STEP else EventKind.VERDICT
    incident = {"kind": IncidentKind.INVALID_RESULT, "rank": rank, "evidence": {"diagnosis": {}}}
    verdict = {"rung": int(rung), "quarantine": list(quarantine)}
    told = event(kind, "a", 0, rank=rank, incident=incident, verdict=verdict)
    return dataclasses.replace(now, events=[*now.events, told])


@pytest.mark.parametrize(
    ("fault", "rung", "other"),
    [(NAN, Rung.RERUN_STEP, Rung.REPLACE_NODE), (FLIP, Rung.REPLACE_NODE, Rung.RERUN_STEP)],
)
def test_nothing_strikes_while_a_number_that_was_struck_is_not_judged(
    fault: DemoFault, rung: Rung, other: Rung
) -> None:
    """From two iterations before it a restart would wipe out what it does; earlier, and once it is judged, none."""
    ready = scene(12, 13)
    assert not is_time(KILL, ready, world_size=2, after_cycle=0, planned=[fault])
    late = dataclasses.replace(fault, iteration=16)
    assert is_time(KILL, ready, world_size=2, after_cycle=0, planned=[late])
    assert fault.rank is not None
    assert is_time(KILL, judged(ready, fault.rank, rung), world_size=2, after_cycle=0, planned=[fault])
    assert not is_time(KILL, judged(ready, fault.rank, other), world_size=2, after_cycle=0, planned=[fault])
    assert not is_time(KILL, judged(ready, 1 - fault.rank, rung), world_size=2, after_cycle=0, planned=[fault])


def test_a_node_is_not_lost_when_a_flipped_bit_will_need_the_spare() -> None:
    """It comes whether a spare waits or not; a quarantined node is none."""
    ready, flip = scene(12, 13), dataclasses.replace(FLIP, iteration=40)
    assert not is_time(LOSE, ready, world_size=2, after_cycle=0, planned=[flip])
    assert is_time(KILL, ready, world_size=2, after_cycle=0, planned=[flip])
    more = [*ready.events, event(EventKind.NODE_JOINED, "a", 0, name="d")]
    two = dataclasses.replace(ready, events=more, running=("a", "b", "c", "d"))
    assert is_time(LOSE, two, world_size=2, after_cycle=0, planned=[flip])
    after = judged(two, 1, Rung.REPLACE_NODE, quarantine=("d",))
    assert after.quarantined == {"d"}
    assert after.spares == ("c",)
    assert is_time(LOSE, after, world_size=2, after_cycle=0, planned=[flip])


def test_nothing_strikes_from_outside_before_a_slow_rank_is_named() -> None:
    """A restart would make it fast again; after many reports without its name the demo goes on, and says so later."""
    ready, slow = scene(12, 13), DemoFault(deed=Deed.SLOW, iteration=2, rank=1)

    def reported(*named: int, times: int = 1) -> Scene:
        told = event(EventKind.STRAGGLER_REPORT, "a", 1, rank=0, named=list(named))
        return dataclasses.replace(ready, events=[*ready.events, *[told] * times])

    assert not is_time(KILL, ready, world_size=2, after_cycle=0, planned=[slow])
    assert not is_time(KILL, reported(0), world_size=2, after_cycle=0, planned=[slow])
    assert is_time(KILL, reported(0, 1), world_size=2, after_cycle=0, planned=[slow])
    assert not is_time(KILL, reported(times=3), world_size=2, after_cycle=0, planned=[slow])
    assert is_time(KILL, reported(times=8), world_size=2, after_cycle=0, planned=[slow])


def test_a_notice_to_leave_waits_for_its_iteration_alone() -> None:
    """What was not saved yet is saved then."""
    leave = DemoFault(deed=Deed.LEAVE, iteration=12, rank=1)
    ready = scene(12, 13, restored=10, durable=10)
    assert is_time(leave, ready, world_size=2, after_cycle=0)
    assert not is_time(leave, ready, world_size=2, after_cycle=1)
    assert not is_time(leave, scene(11, 13), world_size=2, after_cycle=0)


def test_the_next_jobs_cycles_are_its_own() -> None:
    """They are numbered anew; what the job before saved, restored and carried counts no more."""
    before = scene(12, 13, cycle=4)
    again = [dataclasses.replace(one, cycle=0) if isinstance(one, RankScene) else one for one in before.ranks]
    start = event(EventKind.CYCLE_STARTED, "b", 0, node_rank=0, ranks=[0], world_size=2)
    after = Scene(ranks=tuple(again), events=[*before.events, msgspec.structs.replace(start, job="next")])
    assert (before.cycle, after.cycle) == (4, 0)
    assert after.holder(0) == "b"
    assert after.safe(4, num_ranks=2) == 0
    assert after.ranks_by_node() == {"b": (0,)}


def test_what_has_struck_is_on_record() -> None:
    """A fault of the plan by its name and rank."""
    struck = event(EventKind.FAULT_SIMULATED, "a", 1, rank=0, fault=str(Deed.NAN))
    now = dataclasses.replace(scene(12, 13), events=[struck])
    assert now.has_struck(NAN)
    assert not now.has_struck(FLIP)
    assert not now.has_struck(dataclasses.replace(NAN, rank=1))


def test_the_scene_knows_who_holds_a_slot_and_what_is_safe() -> None:
    """The newest cycle's holder, the newest generation, and the foremost rank's iteration."""
    now = scene(12, 13)
    assert now.holder(1) == "b"
    assert now.ranks_by_node() == {"a": (0,), "b": (1,)}
    assert (now.durable, now.iteration, now.cycle) == (10, 13, 1)
    with pytest.raises(LookupError, match="slot 2"):
        now.holder(2)
