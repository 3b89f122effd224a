"""One simulated run: faults occur, the shipped policy decides, and every second goes into one part.

Nothing is simulated rank by rank or step by step. Between two faults a cycle is a short sequence of known durations
(detection, restart, waiting for nodes, rendezvous, start-up, load) and then training, whose steps and saves in a time
follow from arithmetic (:class:`TrainingPace`). So the cost of a run is proportional to its faults.

Decisions are the package's own: :func:`outlast.policy.recovery_policy.decide` decides on each cycle's end,
:func:`outlast.policy.checkpoint_plan.choose_partners` on the nodes that hold copies, and
:func:`outlast.policy.recovery_point.choose_recovery_point` on the checkpoint that all ranks load.

While no workers run (detection, restart, waiting for nodes) a process fault has no effect; the loss of a node empties
one more slot, and the same recovery continues. From the rendezvous on every fault ends the cycle.

A lost node loses its own node-local copies, and those that it held for others. Its ranks load from a partner. The node
that takes the slot holds no other's copies until the next save to the node-local tiers. If all partners of a needed
shard are lost, all ranks load from the global tier.

A run that the recovery policy stopped is restarted on the same nodes, from the copies on their disks. A preempted one
gets other nodes, and loads from the global tier.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from outlast.goodput.account import Part
from outlast.incidents import Decision, Incident, IncidentKind, RecoveryLevel
from outlast.policy.checkpoint_plan import choose_partners
from outlast.policy.recovery_point import Copy, Tier, choose_recovery_point
from outlast.policy.recovery_policy import CycleEnd, RecoveryState, begin_job, decide
from outlast.simulate.failures import FaultSchedule, draw_faults
from outlast.simulate.scenario import Scenario, SimulatedFault


class SimulatedStop(msgspec.Struct, frozen=True, kw_only=True):
    """A stop of the run by the recovery policy."""

    at_s: float
    exit_code: int | None
    reason: str
    """The reason of the decision."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run."""

    wall_s: float
    ettr: float
    """Effective training time ratio: the productive share of the wall time."""
    partition: dict[str, float]
    """Name of each :class:`outlast.goodput.Part` to its seconds; they add up to ``wall_s``."""
    num_failures: int
    """Faults that ended a cycle, or took a node."""
    num_by_kind: dict[str, int]
    num_iterations: int
    """Iterations that still count at the end."""
    lost_iterations: int
    """Finished iterations whose result was lost."""
    num_restarts: int
    decisions: dict[str, int]
    """Number of decisions by recovery level."""
    loads: dict[str, int]
    """Number of loads by the farthest tier that a rank loaded from."""
    stops: tuple[SimulatedStop, ...] = ()


def simulate(
    scenario: Scenario,
    seed: int = 0,
    *,
    faults: FaultSchedule | None = None,
    partners: Sequence[Sequence[int]] | None = None,
) -> SimulatedRun:
    """Simulate one run.

    Args:
        scenario: The scenario.
        seed: Seed of the run; the same one gives the same result.
        faults: Its faults; ``None`` = as :func:`draw_faults` draws them.
        partners: Its partners, if already known; see :func:`find_partners`.
    """
    schedule = draw_faults(scenario, seed) if faults is None else faults
    return _World(scenario, find_partners(scenario) if partners is None else partners).run(schedule)


def find_partners(scenario: Scenario) -> Sequence[Sequence[int]]:
    """Return for every slot the slots whose nodes hold copies of its shards."""
    jump = 1 if scenario.replication_jump is None else scenario.replication_jump // scenario.node_size
    # All local ranks of a node have partners on the same nodes, as the jump is a multiple of them: one represents all.
    names = [str(slot) for slot in range(scenario.num_nodes)]
    return choose_partners(names, factor=scenario.copies, jump=jump)


@dataclass(frozen=True, slots=True)
class TrainingPace:
    """Duration of iterations with the saves after them."""

    step_s: float
    node_every: int
    """Iterations between two saves to the node-local tiers; 0 = none."""
    global_every: int
    """Iterations between two saves to all tiers; 0 = none. Such a save replaces one to the node-local tiers."""
    node_stall_s: float
    global_stall_s: float

    def time_of(self, start: int, num: int) -> float:
        """Return the seconds of iterations and the saves after them, the last one included."""
        return num * self.step_s + self.stalls(start, num)

    def stalls(self, start: int, num: int) -> float:
        """Return the seconds of the saves alone."""

        def num_saves(every: int) -> int:
            return (start + num) // every - start // every if every else 0

        num_near = num_saves(self.node_every) - num_saves(math.lcm(self.node_every, self.global_every))
        return num_near * self.node_stall_s + num_saves(self.global_every) * self.global_stall_s

    def count(self, start: int, seconds: float) -> int:
        """Return how many iterations are done in some time, with the saves after them."""
        if seconds <= 0:
            return 0
        most = int(seconds / self.step_s) + 1
        return bisect_right(range(most + 1), seconds, key=lambda num: self.time_of(start, num)) - 1

    def split(self, start: int, seconds: float) -> tuple[int, float, float]:
        """Return the iterations finished in some time, the seconds in steps (an unfinished one too) and in saves."""
        num = self.count(start, seconds)
        stalls_s = self.stalls(start, num)
        rest_s = seconds - num * self.step_s - stalls_s
        if rest_s < self.step_s:
            return num, seconds - stalls_s, stalls_s
        num += 1  # its step is done, the save after it is not
        return num, num * self.step_s, max(0.0, seconds - num * self.step_s)

    def newest(self, start: int, seconds: float, every: int, save_s: float) -> int | None:
        """Return the newest iteration whose save was committed, ``save_s`` after its stall, in some time."""
        if every == 0 or seconds <= save_s:
            return None
        found = (start + self.count(start, seconds - save_s)) // every * every
        return found if found > start else None


_INCIDENT = {
    SimulatedFault.PROCESS: IncidentKind.WORKER_DIED,
    SimulatedFault.HANG: IncidentKind.WORKER_HUNG,
    SimulatedFault.NODE: IncidentKind.NODE_LOST,
    SimulatedFault.RACK: IncidentKind.NODE_LOST,
}
_TAKES_NODES = (SimulatedFault.NODE, SimulatedFault.RACK)
_SIGKILL = -9


class _World:
    def __init__(self, scenario: Scenario, partners: Sequence[Sequence[int]]) -> None:
        costs = scenario.costs
        self._scenario, self._costs, self._partners = scenario, costs, partners
        self._limits = scenario.limits_in_force
        self._end_s = scenario.duration_s
        self._pace = TrainingPace(
            scenario.slow_step_s,
            scenario.node_every,
            scenario.global_every,
            costs.save_stall_s,
            costs.global_save_stall_s,
        )
        self._saves = bool(scenario.node_every or scenario.global_every)
        self._rendezvous_s = costs.rendezvous_of(scenario.num_nodes)
        self._detection_s = {
            SimulatedFault.PROCESS: costs.detection_s,
            SimulatedFault.HANG: costs.hang_timeout_s,
            SimulatedFault.NODE: costs.node_timeout_s,
            SimulatedFault.RACK: costs.node_timeout_s,
        }
        self._load_s = {
            Tier.MEMORY: costs.load_memory_s,
            Tier.LOCAL: costs.load_local_s,
            Tier.REPLICA: costs.load_replica_s,
            Tier.GLOBAL: costs.load_global_s,
        }
        self._parts: dict[Part, float] = dict.fromkeys((part for part in Part if part != Part.UNOBSERVED), 0.0)
        self._steps_s = 0.0
        self._finished = 0
        self._num_restarts = 0
        self._kept = 0.0
        self._by_kind: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._stops: list[SimulatedStop] = []
        self._state = RecoveryState()
        self._cycle = 0
        self._near: int | None = None
        self._in_memory = scenario.use_memory
        self._global: int | None = None
        self._is_over = False
        self._allocate(0.0)

    # -- nodes and copies ---------------------------------------------------------------------------------------------

    def _allocate(self, at_s: float) -> None:
        self._spares = self._scenario.spares
        self._repairs: list[float] = []
        self._empty: set[int] = set()
        self._names: dict[int, str] = {}
        self._num_new = 0
        self._needs: set[int] = set()
        """Slots whose node does not hold its own node-local copies."""
        self._holes: set[int] = set()
        """Slots whose node does not hold its partners' node-local copies."""
        self._near = None  # it was stored on other nodes
        self._begin_recovery(at_s, 0.0, 0.0)

    def _slots_of(self, kind: int, slot: int) -> list[int]:
        if kind == SimulatedFault.NODE:
            return [slot]
        size = self._scenario.nodes_per_rack
        first = slot // size * size
        return list(range(first, min(first + size, self._scenario.num_nodes)))

    def _lose(self, slots: Sequence[int], back_s: float) -> None:
        """Lose the nodes of slots; they are repaired, or replaced, at a time."""
        for slot in slots:
            self._empty.add(slot)
            insort(self._repairs, back_s)
        self._needs.update(slots)
        self._holes.update(slots)

    def _take_back(self, until_s: float) -> None:
        num = bisect_right(self._repairs, until_s)
        if num:
            del self._repairs[:num]
            self._spares += num

    # -- recovery
    # -----------------------------------------------------------------------------------------------------------

    def _begin_recovery(self, at_s: float, detection_s: float, restart_s: float) -> None:
        self._began_s, self._detection, self._restart = at_s, detection_s, restart_s
        self._plan()

    def _plan(self) -> None:
        """Compute when training continues, and from where."""
        down_s = self._began_s + self._detection + self._restart
        lacking = len(self._empty) - self._spares
        formed_s = down_s if lacking <= 0 else max(down_s, self._repairs[lacking - 1])
        tier, self._iteration = self._choose()
        load_s = 0.0 if tier is None else self._load_s[tier]
        self._tier = tier
        self._formed_s = formed_s
        self._ready_s = formed_s + self._rendezvous_s + self._costs.start_up_s + load_s
        self._phases = (
            (Part.DETECTION, self._detection),
            (Part.RESTART, self._restart),
            (Part.IDLE, formed_s - down_s),
            (Part.RENDEZVOUS, self._rendezvous_s),
            (Part.START_UP, self._costs.start_up_s),
            (Part.LOAD, load_s),
        )

    def _choose(self) -> tuple[Tier | None, int]:
        """Return the farthest tier that is loaded from, and the iteration; ``None`` = training starts from the
        beginning."""
        if self._near is not None and any(
            all(partner in self._holes for partner in self._partners[slot]) for slot in self._needs
        ):
            self._near = None
        # One rank whose node was lost and one whose node was not represent all ranks.
        farthest = [Copy(self._global, f"at-{self._global}", Tier.GLOBAL)] if self._global is not None else []
        copies = [list(farthest) for _ in range(2 if self._needs else 1)]
        if self._near is not None:
            name = f"at-{self._near}"
            copies[0].append(Copy(self._near, name, Tier.MEMORY if self._in_memory else Tier.LOCAL, "own"))
            if self._needs:
                copies[1].append(Copy(self._near, name, Tier.REPLICA, "partner"))
        point = choose_recovery_point(copies)
        if point is None:
            return None, 0
        return max(copy.tier for copy in point.copies), point.checkpoint

    def _form(self) -> None:
        self._take_back(self._formed_s)
        self._spares -= len(self._empty)
        for slot in self._empty:
            self._num_new += 1
            self._names[slot] = f"node-new-{self._num_new}"
        self._empty.clear()

    def _load(self) -> None:
        if self._tier is not None:
            self._loads[str(self._tier)] += 1
        if self._tier == Tier.GLOBAL:
            self._near = None  # older than the loaded one, or gone
        self._needs.clear()
        self._in_memory = self._scenario.use_memory

    # -- time ----------------------------------------------------------------------------------------------------------

    def _spend(self, part: Part, from_s: float, to_s: float) -> None:
        self._parts[part] += max(0.0, min(to_s, self._end_s) - from_s)

    def _spend_recovery(self, until_s: float) -> None:
        now_s = self._began_s
        for part, duration_s in self._phases:
            if now_s >= until_s:
                return
            self._parts[part] += min(duration_s, until_s - now_s)
            now_s += duration_s

    def _train(self, until_s: float) -> int | None:
        """Train until a time; return the newest iteration that was committed in this cycle."""
        start, seconds = self._iteration, until_s - self._ready_s
        num, steps_s, stalls_s = self._pace.split(start, seconds)
        self._parts[Part.SAVE_STALL] += stalls_s
        self._steps_s += steps_s
        self._finished += num
        self._iteration = start + num
        self._kept = self._iteration + max(0.0, steps_s / self._pace.step_s - num)
        costs, pace = self._costs, self._pace
        near = None
        if pace.node_every:  # a save to all tiers includes the node-local ones
            saves = [pace.newest(start, seconds, every, costs.save_s) for every in (pace.node_every, pace.global_every)]
            near = max((one for one in saves if one is not None), default=None)
        far = pace.newest(start, seconds, pace.global_every, costs.global_save_s)
        if near is not None:
            self._near = near
            self._holes.clear()
        if far is not None:
            self._global = far
        return max((one for one in (near, far) if one is not None), default=None)

    # -- faults --------------------------------------------------------------------------------------------------------

    def run(self, faults: FaultSchedule) -> SimulatedRun:
        for at_s, kind, slot, repair_s in zip(faults.times, faults.kinds, faults.slots, faults.repairs, strict=True):
            if self._is_over or at_s >= self._end_s:
                break
            if at_s >= self._began_s:  # before that the job waits, and has no nodes
                self._inject(at_s, SimulatedFault(kind), slot, repair_s)
        if not self._is_over:
            self._finish()
        return self._sum_up()

    def _inject(self, at_s: float, kind: SimulatedFault, slot: int, repair_s: float) -> None:
        if at_s < self._formed_s:
            self._inject_while_down(at_s, kind, slot, repair_s)
            return
        self._form()
        if at_s < self._ready_s:
            self._spend_recovery(at_s)
            trained, durable = False, None
        else:
            self._spend_recovery(self._ready_s)
            self._load()
            trained, durable = True, self._train(at_s)
        self._by_kind[kind.name.lower()] += 1
        if kind == SimulatedFault.PREEMPTION:
            self._leave(at_s, durable, trained=trained)
        else:
            self._end_cycle(at_s, kind, slot, repair_s, durable)

    def _inject_while_down(self, at_s: float, kind: SimulatedFault, slot: int, repair_s: float) -> None:
        if kind == SimulatedFault.PREEMPTION:
            self._by_kind[kind.name.lower()] += 1
            self._spend_recovery(at_s)
            self._leave(at_s, None, trained=False)
        elif kind in _TAKES_NODES:
            slots = [one for one in self._slots_of(kind, slot) if one not in self._empty]
            if slots:
                self._by_kind[kind.name.lower()] += 1
                self._take_back(at_s)
                self._lose(slots, at_s + repair_s)
                self._plan()

    def _end_cycle(self, at_s: float, kind: SimulatedFault, slot: int, repair_s: float, durable: int | None) -> None:
        detected_s = at_s + self._detection_s[kind]
        node = self._names.get(slot) or f"node-{slot}"
        is_process = kind not in _TAKES_NODES
        incident = Incident(
            kind=_INCIDENT[kind],
            cycle=self._cycle,
            node=node,
            rank=slot * self._scenario.node_size if is_process else None,
            exit_code=_SIGKILL if kind == SimulatedFault.PROCESS else None,
        )
        if not is_process:
            self._lose(self._slots_of(kind, slot), at_s + repair_s)
        self._take_back(detected_s)
        ran_s = max(0.0, at_s - self._formed_s)
        decision = self._ask(incident=incident, durable_iteration=durable, num_spares=self._spares, ran_s=ran_s)
        if decision.recovery_level == RecoveryLevel.STOP:
            self._spend(Part.DETECTION, at_s, detected_s)
            self._stop(detected_s, decision)
            return
        if (
            decision.recovery_level == RecoveryLevel.REPLACE_NODE and is_process
        ):  # it failed too often, and a spare takes its slot
            self._lose([slot], detected_s + repair_s)
        self._begin_recovery(at_s, detected_s - at_s, self._costs.restart_s + decision.delay_s)

    def _ask(self, **facts: Any) -> Decision:
        end = CycleEnd(cycle=self._cycle, progress_known=self._saves, had_session=True, **facts)
        self._state, decision = decide(self._state, end, self._limits)
        self._decisions[decision.recovery_level.name.lower()] += 1
        self._cycle += 1
        return decision

    def _leave(self, at_s: float, durable: int | None, *, trained: bool) -> None:
        left_s = at_s
        if trained and self._scenario.global_every:
            left_s += self._costs.global_save_stall_s + self._costs.global_save_s
            self._spend(Part.SAVE_STALL, at_s, left_s)
            self._global = durable = self._iteration
        saved = self._global is not None
        decision = self._ask(incident=None, preempted=True, preempted_saved=saved, durable_iteration=durable)
        assert decision.recovery_level == RecoveryLevel.REQUEUE_JOB, decision
        self._wait(left_s, self._scenario.queue_s, keeps_nodes=False)

    def _stop(self, at_s: float, decision: Decision) -> None:
        """Stop by decision of the recovery policy, until a person restarts the run."""
        if at_s < self._end_s:
            self._stops.append(SimulatedStop(at_s=at_s, exit_code=decision.exit_code, reason=decision.reason))
        self._wait(at_s, self._scenario.restart_stopped_s, keeps_nodes=True)

    def _wait(self, from_s: float, wait_s: float | None, *, keeps_nodes: bool) -> None:
        """Wait until the next job begins; ``None`` = none does."""
        until_s = self._end_s if wait_s is None else from_s + wait_s
        self._spend(Part.QUEUED, from_s, until_s)
        if until_s >= self._end_s:
            self._kept = self._choose()[1]  # saved iterations still count
            self._is_over = True
            return
        self._num_restarts += self._state.restarts_total
        self._state = begin_job(self._state)
        self._num_restarts -= self._state.restarts_total
        if keeps_nodes:
            self._in_memory = False  # the agents ended; the copies on disks remain
            self._begin_recovery(until_s, 0.0, 0.0)
        else:
            self._allocate(until_s)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self._end_s < self._ready_s:
            self._spend_recovery(self._end_s)
            self._kept = self._iteration
        else:
            self._spend_recovery(self._ready_s)
            self._load()
            self._train(self._end_s)

    def _sum_up(self) -> SimulatedRun:
        scenario, parts = self._scenario, self._parts
        parts[Part.PRODUCTIVE] = min(self._kept * scenario.step_s, self._steps_s)
        parts[Part.STRAGGLER] = parts[Part.PRODUCTIVE] * scenario.slow_share
        parts[Part.REDONE] = max(0.0, self._steps_s - parts[Part.PRODUCTIVE] - parts[Part.STRAGGLER])
        return SimulatedRun(
            wall_s=scenario.duration_s,
            ettr=parts[Part.PRODUCTIVE] / scenario.duration_s,
            partition={part.value: seconds for part, seconds in parts.items()},
            num_failures=sum(self._by_kind.values()),
            num_by_kind=dict(sorted(self._by_kind.items())),
            num_iterations=int(self._kept),
            lost_iterations=max(0, self._finished - int(self._kept)),
            num_restarts=self._num_restarts + self._state.restarts_total,
            decisions=dict(sorted(self._decisions.items())),
            loads=dict(sorted(self._loads.items())),
            stops=tuple(self._stops),
        )
