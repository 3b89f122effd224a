"""What follows when a worker judged a result invalid (exit codes 16 and 17).

Exit code 16 asks to have the result run again before it is judged. In this order:

1. Soon after a load from a near tier that copy is distrusted; the next cycle loads another one.
2. Another device decides: the node that saw the result is held back, a spare takes its slot, and the next cycle
   replays the saved batches. Once for each result.
3. Without another device the same one tries again, a bounded number of times for each result.
4. Soon after a load from the global tier that generation is distrusted; the next cycle loads an older one.
5. Stop, with the diagnosis.

Exit code 17 brings a verdict. A *correct* result stops the run at once: what trained it would do so again. A device's
*persistent* fault takes its node out, where the world can do without it; else the node gets one more chance for as long
as there is no progress. Where ranks outvoted one whose replica differed, without a replay, a second such verdict soon
after a load points at the copy that was loaded. A code that brings no verdict, or comes from a replay that decided
nothing, leads to steps 1, 4 and 5. Replicas that differ without a majority have no culprit and nothing to replay: their
workers start again on the same devices, a bounded number of times.

Each remedy is tried once, or as often as stated, for the same result: the ladder remembers in its cases what was tried.

A result that was invalid twice on one device is either that device's persistent fault or the correct result of bad data
or a bad model. Only another device can decide. Where there is none, the same one may try again a few times; it can only
show that the result is not reproducible after all. A *case* is an invalid result without a verdict yet, with the
replays that were granted to find one. Its step and the device on which the result was seen first identify it. It is
closed by progress: training committed a generation beyond its iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from outlast.errors import ExitReason
from outlast.incidents import Incident, Rung
from outlast.policy.ladder_state import CycleEnd, LadderState, Limits
from outlast.policy.quarantine import Distrusted, Judgement, Load, judge
from outlast.policy.rerun import Diagnosis, Finding, InvalidResultCase, Replay

__all__ = ["Remedy", "file_case", "find_remedy", "open_cases"]

_GLOBAL = "global"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to do about an invalid result, if a budget allows it where it is a restart."""

    what: str
    """What happened, for people."""
    action: str
    """What is done about it and why, for people."""
    stops: bool = False
    """The run stops with the diagnosis; everything else is a restart."""
    rung: Rung = Rung.RESTART_WORKERS
    distrusted: Distrusted | None = None
    """A copy that is not loaded again, restart or not."""
    quarantine: str = ""
    """Node that gets no slot any more; empty = none."""
    hold_back: str = ""
    """Node that gets no slot in the next cycle; empty = none."""
    replay: Replay | None = None
    """What the next cycle replays."""
    case: InvalidResultCase | None = None
    """What is remembered of the result once the restart is granted."""
    faulty_node: str = ""
    """Node that it is charged to; empty = it is not known whose fault it is."""
    is_device_fault: bool = False
    """A device of that node is at fault, and it has this one chance to show otherwise."""


def find_remedy(state: LadderState, end: CycleEnd, limits: Limits) -> Remedy:
    """Return what to do after a cycle that ended because of an invalid result."""
    assert end.is_invalid_result
    assert end.incident is not None
    what, diagnosis = _describe(end.incident, end.diagnosis), end.diagnosis
    if end.exit_code == ExitReason.RESUME_TO_DISAMBIGUATE:
        return _disambiguate(state, end, end.incident, limits, what)
    if diagnosis is not None and diagnosis.finding == Finding.CORRECT:
        return Remedy(what=what, action="stopping: training would come to the same result again", stops=True)
    if diagnosis is not None and diagnosis.finding == Finding.REPEATED:
        return Remedy(what=what, action="stopping: it came in as many steps in a row as are allowed", stops=True)
    if diagnosis is not None and diagnosis.finding == Finding.PERSISTENT:
        return _blame(state, end, diagnosis, what)
    if diagnosis is None:
        return _judge_copy(what, _judge(state, end.load, _iteration(end)), faulty_node=end.incident.node)
    # A last try, or one on another device, that decided nothing: what is left is the copy that was trained on.
    case = _find_case(state.cases, end.incident, diagnosis, end.load, is_replay=_is_replay(state, diagnosis))
    return _judge_copy(what, _judge(state, case.load, diagnosis.iteration))


def _disambiguate(state: LadderState, end: CycleEnd, incident: Incident, limits: Limits, what: str) -> Remedy:
    diagnosis = end.diagnosis
    is_replay = _is_replay(state, diagnosis)
    case = _find_case(state.cases, incident, diagnosis, end.load, is_replay=is_replay)
    judgement = _judge(state, case.load, _iteration(end))
    faulty = "" if diagnosis is not None else incident.node
    if judgement.distrusted is not None and judgement.distrusted.tier != _GLOBAL:
        return _judge_copy(what, judgement, faulty_node=faulty)
    if diagnosis is None or diagnosis.finding == Finding.SPLIT:
        if case.same_device < limits.max_same_device_reruns:
            attempt = f"try {case.same_device + 1} of {limits.max_same_device_reruns}"
            known = "there is no diagnosis" if diagnosis is None else "there is no device to hold back"
            action = f"{known}, restarting the workers on the same devices, {attempt}"
            return Remedy(what=what, action=action, case=_granted_here(case), faulty_node=faulty)
        return _judge_copy(what, judgement, faulty_node=faulty)
    if diagnosis.node and end.num_spares > 0 and not case.elsewhere:
        return Remedy(
            what=what,
            action=f"a spare takes the slot of node {diagnosis.node}, which is held back, and replays it",
            rung=Rung.REPLACE_NODE,
            hold_back=diagnosis.node,
            replay=diagnosis.replay(tries=max(diagnosis.tries, case.same_device)),
            case=msgspec.structs.replace(case, elsewhere=case.elsewhere + 1),
        )
    tries = max(case.same_device, diagnosis.tries)
    came_from_elsewhere = is_replay and diagnosis.replayed_on not in ("", diagnosis.device)
    if tries < diagnosis.max_tries and not came_from_elsewhere:
        action = f"no other device is free, replaying it on the same one, try {tries + 1} of {diagnosis.max_tries}"
        return Remedy(what=what, action=action, replay=diagnosis.replay(tries=tries), case=_granted_here(case))
    return _judge_copy(what, judgement)


def _blame(state: LadderState, end: CycleEnd, diagnosis: Diagnosis, what: str) -> Remedy:
    """Return the answer to a device's persistent fault."""
    node = state.replay.node if state.replay is not None and _is_replay(state, diagnosis) else diagnosis.node
    if not diagnosis.replayed_on and state.blamed:
        judgement = _judge(state, end.load, diagnosis.iteration)
        if judgement.distrusted is not None:
            return _judge_copy(what, judgement)
    if node in state.held_back:
        action = f"node {node} is quarantined, restarting the workers on the others"
        return Remedy(what=what, action=action, quarantine=node, faulty_node=node, is_device_fault=True)
    if node and node not in state.quarantined and (end.num_spares > 0 or end.may_shrink):
        heir = "a spare takes its slot" if end.num_spares > 0 else "training continues without it"
        action = f"node {node} is quarantined, {heir}"
        rung = Rung.REPLACE_NODE
        return Remedy(what=what, action=action, rung=rung, quarantine=node, faulty_node=node, is_device_fault=True)
    if node in state.blamed:
        action = f"stopping: node {node} had its chance since the last progress, and no other one waits for its slot"
        return Remedy(what=what, action=action, stops=True, faulty_node=node)
    where = f"node {node}" if node else "its node"
    action = f"no other node waits for the slot of {where}, restarting the workers there, once"
    return Remedy(what=what, action=action, faulty_node=node, is_device_fault=True)


def _judge_copy(what: str, judgement: Judgement, *, faulty_node: str = "") -> Remedy:
    """Return the answer that blames the copy that was loaded, or none: then the run stops."""
    if judgement.distrusted is None:
        action = f"{judgement.reason}: stopping, its diagnosis is in the journal"
        return Remedy(what=what, action=action, stops=True, faulty_node=faulty_node)
    what, action = f"{what}; {judgement.reason}", "restarting the workers, which load another copy"
    return Remedy(what=what, action=action, distrusted=judgement.distrusted, faulty_node=faulty_node)


def _judge(state: LadderState, load: Load | None, iteration: int | None) -> Judgement:
    return judge(load, iteration, known=state.distrusted, loads=state.loads)


def _is_replay(state: LadderState, diagnosis: Diagnosis | None) -> bool:
    """Return whether the cycle was started to replay this very result."""
    return diagnosis is not None and state.replay is not None and diagnosis.iteration == state.replay.iteration


def _iteration(end: CycleEnd) -> int | None:
    assert end.incident is not None
    return end.diagnosis.iteration if end.diagnosis is not None else end.incident.iteration


def _describe(incident: Incident, diagnosis: Diagnosis | None) -> str:
    text = f"{incident.describe()}: a result was judged invalid"
    if diagnosis is not None and diagnosis.describe() not in text:
        text += f": {diagnosis.describe()}"
    return text


def _find_case(
    cases: Sequence[InvalidResultCase],
    incident: Incident,
    diagnosis: Diagnosis | None,
    load: Load | None,
    *,
    is_replay: bool,
) -> InvalidResultCase:
    """Return the case of an invalid result: the one that is open already, or a new one.

    Args:
        cases: The open ones.
        incident: The cycle's end.
        diagnosis: What the workers knew.
        load: What the cycle had loaded.
        is_replay: The cycle was started to replay this result: what it loaded is the diagnostic save.
    """
    if diagnosis is None:
        new = InvalidResultCase(iteration=incident.iteration, device=incident.node, rank=incident.rank, load=load)
    else:
        rank = None if diagnosis.device else diagnosis.rank
        new = InvalidResultCase(
            iteration=diagnosis.iteration, device=diagnosis.device or diagnosis.node, rank=rank, load=load
        )
    known = next((case for case in cases if _key(case) == _key(new)), None)
    if known is None:
        return msgspec.structs.replace(new, load=None) if is_replay else new
    return known if is_replay else msgspec.structs.replace(known, load=load)


def _granted_here(case: InvalidResultCase) -> InvalidResultCase:
    """Return a case after one more try on the same device was granted."""
    return msgspec.structs.replace(case, same_device=case.same_device + 1)


def file_case(cases: Sequence[InvalidResultCase], case: InvalidResultCase) -> tuple[InvalidResultCase, ...]:
    """Return the cases with one added, or replaced by what became of it."""
    return (*(other for other in cases if _key(other) != _key(case)), case)


def open_cases(cases: Sequence[InvalidResultCase], durable_iteration: int | None) -> tuple[InvalidResultCase, ...]:
    """Return the cases that are still open after a cycle.

    Args:
        cases: Those before it.
        durable_iteration: The newest generation that it committed; ``None`` = none. Where a case's iteration is not
            known, any commit closes it.
    """
    return tuple(
        case
        for case in cases
        if durable_iteration is None or (case.iteration is not None and durable_iteration <= case.iteration)
    )


def _key(case: InvalidResultCase) -> tuple[int | None, str, int | None]:
    return case.iteration, case.device, case.rank
