"""One time for all nodes: clocks are aligned by events that several nodes see at the same moment.

Within a node the monotonic clock orders events, so that a wall clock that is set meanwhile has no effect. Between nodes
wall clocks may differ. All ranks end a load, and an iteration, together, and the workers of a cycle start together: the
median difference over these events is a node's offset from the reference node. Only offsets above :data:`TRUSTED_S` are
subtracted: clocks kept by a time server are closer to each other than such events.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from outlast.goodput.account import NodeClock
from outlast.incidents import Event, EventKind

TRUSTED_S = 0.1
_ANCHORS = frozenset({EventKind.CYCLE_STARTED, EventKind.RESTORED, EventKind.STEPS_STARTED, EventKind.PROGRESS})
_Key = tuple[str, str]
_Anchor = tuple[str, str, int | None, int | None, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """An event with its aligned time."""

    time_ns: int
    """Nanoseconds since the epoch, by the reference node's clock."""
    event: Event


def align(files: Sequence[Sequence[Event]]) -> tuple[list[Moment], tuple[NodeClock, ...]]:
    """Return all events by aligned time, those of one process in their order, and the alignment of each node's clock.

    Args:
        files: The events of each file of a journal, in its order.
    """
    owners = _find_owners(files)
    bases: dict[_Key, list[int]] = defaultdict(list)
    keys: list[list[_Key]] = []
    for events in files:
        of_file = [owners.get((event.job, event.node), (event.job, event.node)) for event in events]
        keys.append(of_file)
        for event, key in zip(events, of_file, strict=True):
            bases[key].append(event.wall_ns - event.mono_ns)
    base_ns = {key: median_low(values) for key, values in bases.items()}
    seen = _find_anchors(files, keys, base_ns)
    offsets, num_anchors = _solve(seen, Counter({key: len(values) for key, values in bases.items()}))
    moments = []
    for events, of_file in zip(files, keys, strict=True):
        newest_ns = 0
        for event, key in zip(events, of_file, strict=True):
            newest_ns = max(newest_ns, event.mono_ns + base_ns[key] - offsets.get(key, 0))
            moments.append(Moment(newest_ns, event))
    moments.sort(key=lambda moment: moment.time_ns)
    return moments, tuple(_describe(files, owners, offsets, num_anchors))


def _find_owners(files: Sequence[Sequence[Event]]) -> dict[tuple[str, str], _Key]:
    """Return the monotonic clock of each node in each job: nodes on one machine share it."""
    machines: dict[tuple[str, str], set[str]] = defaultdict(set)
    for events in files:
        for event in events:
            if event.kind in (EventKind.JOB_STARTED, EventKind.SESSION_STARTED):
                machines[event.job, event.node].add(str(event.data.get("machine", "")))
    # A node that was restarted within a job, or reports no machine, has its own clock.
    return {place: ("", next(iter(names))) for place, names in machines.items() if len(names) == 1 and all(names)}


def _find_anchors(
    files: Sequence[Sequence[Event]], keys: Sequence[Sequence[_Key]], base_ns: dict[_Key, int]
) -> dict[_Anchor, dict[_Key, int]]:
    """Return, for events that several clocks saw, when each of them saw it first."""
    seen: dict[_Anchor, dict[_Key, int]] = defaultdict(dict)
    for events, of_file in zip(files, keys, strict=True):
        counts = Counter[tuple[str, str, int | None, int | None]]()
        for event, key in zip(events, of_file, strict=True):
            if event.kind not in _ANCHORS:
                continue
            name = (str(event.kind), event.job, event.cycle, event.iteration)
            counts[name] += 1  # repeated after an in-process restart
            anchor = (*name, counts[name])
            time_ns = event.mono_ns + base_ns[key]
            seen[anchor][key] = min(time_ns, seen[anchor].get(key, time_ns))
    return {anchor: times for anchor, times in seen.items() if len(times) > 1}


def _solve(seen: dict[_Anchor, dict[_Key, int]], sizes: Counter[_Key]) -> tuple[dict[_Key, int], dict[_Key, int]]:
    """Return the nanoseconds by which each clock is ahead, and the number of anchors used.

    Starts from the clock with the most events; clocks that share an anchor with an aligned one come next.
    """
    offsets: dict[_Key, int] = {}
    num_anchors: dict[_Key, int] = {}
    for reference, _ in sizes.most_common():
        if reference in offsets:
            continue
        offsets[reference], num_anchors[reference] = 0, 0
        while True:
            ahead: dict[_Key, list[int]] = defaultdict(list)
            for times in seen.values():
                known = [time_ns - offsets[key] for key, time_ns in times.items() if key in offsets]
                if known:
                    middle_ns = median_low(known)
                    for key, time_ns in times.items():
                        if key not in offsets:
                            ahead[key].append(time_ns - middle_ns)
            if not ahead:
                break
            for key, values in ahead.items():
                offset_ns = median_low(values)
                offsets[key] = offset_ns if abs(offset_ns) > TRUSTED_S * 1e9 else 0
                num_anchors[key] = len(values)
    return offsets, num_anchors


def _describe(
    files: Sequence[Sequence[Event]],
    owners: dict[tuple[str, str], _Key],
    offsets: dict[_Key, int],
    num_anchors: dict[_Key, int],
) -> list[NodeClock]:
    places = dict.fromkeys((event.job, event.node) for events in files for event in events)
    found = []
    for job, node in sorted(places):
        key = owners.get((job, node), (job, node))
        offset_s = offsets.get(key, 0) / 1e9
        found.append(NodeClock(job=job, node=node, offset_s=offset_s, num_anchors=num_anchors.get(key, 0)))
    return found
