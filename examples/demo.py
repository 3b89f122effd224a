"""Train a small GPT through eight faults, and prove that they change no bit of the result.

``make demo`` runs it, or::

    python examples/demo.py                     other faults with --seed 7, other moments with --iterations 300
    python examples/demo.py --keep runs/demo    keeps the journals, the output and the checkpoints of both runs
    python examples/demo.py --json | jq .bit_identical

``examples/train_gpt.py`` is trained twice on this machine, by two nodes of two ranks, each node a real ``outlast run``:
once undisturbed, and once with two spare nodes while :func:`draw_faults` slows a rank down, makes an activation NaN,
flips a bit of a weight, kills a rank, stops another, loses two nodes and preempts the job. Then each claim is checked
against the journal, and weights, optimizer state and losses of the two runs are compared.

Exit code 0: all claims hold; 1: one does not; 2: an argument is wrong.

The demo also shows how to test any script with a :class:`outlast.testing.Cluster` and a
:class:`outlast.chaos.FaultPlan`.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outlast.chaos import Fault, FaultKind, FaultPlan, verify_fired
from outlast.chaos.draws import MANTISSA_BITS
from outlast.chaos.soak import COMPARED, NPROC_PER_NODE, NUM_NODES, NUM_SPARES, TENSOR, find_differences, settings_of
from outlast.errors import ExitReason, OutlastError
from outlast.goodput import IncidentCost, Ledger
from outlast.incidents import Event, EventKind, IncidentKind, RecoveryLevel
from outlast.testing import Cluster

SCRIPT = Path(__file__).with_name("train_gpt.py")
RANKS = range(NUM_NODES * NPROC_PER_NODE)
LOST = (FaultKind.LOSE_NODE, FaultKind.LOSE_NODE_AND_REPLICAS)
TAKES_A_NODE = (*LOST, FaultKind.BIT_FLIP)
EXPECTED = {
    FaultKind.KILL: IncidentKind.WORKER_DIED,
    FaultKind.STOP: IncidentKind.WORKER_HUNG,
    FaultKind.NAN: IncidentKind.INVALID_RESULT,
    FaultKind.BIT_FLIP: IncidentKind.INVALID_RESULT,
    FaultKind.LOSE_NODE: IncidentKind.NODE_LOST,
    FaultKind.LOSE_NODE_AND_REPLICAS: IncidentKind.NODE_LOST,
}
"""The expected incident of each fault; the slow rank and the preemption end no cycle by an incident."""
MAX_REPORTS = 3
"""Number of reports on wholly slow windows in which the slow rank must be identified."""
PATIENCE = 8
"""Number of reports after which the next fault is injected even if the slow rank was not identified."""
POLL_S = 0.25
STARTING_S, PER_ITERATION_S = 240.0, 3.0
"""Time limit of a run and its increase per iteration, many times the usual duration."""
OPTIONS = (
    "--ft-rank-section-timeouts=setup:60,step:3,checkpointing:30",
    "--ft-rank-out-of-section-timeout=30",
    "--ft-node-heartbeat-timeout=4",
)


# -- the faults --------------------------------------------------------------------------------------------------------


def draw_faults(seed: int) -> list[Fault]:
    """Return the faults in the order in which they are injected; order, victims and tensors depend on the seed alone.

    The slow rank is the first, the loss of a node with all replicas of its state and the preemption are the last. The
    first node is not lost right before the second one, so that another spare has time to join.
    """
    numbers = random.Random(seed)

    def on_a_rank(kind: FaultKind, **details: Any) -> Fault:
        return Fault(kind=kind, rank=numbers.choice(RANKS), on_request=True, **details)

    middle = [
        on_a_rank(FaultKind.KILL),
        on_a_rank(FaultKind.STOP, section="step"),
        on_a_rank(FaultKind.NAN, target="activation", tensor=TENSOR),
        on_a_rank(FaultKind.BIT_FLIP, target="weight", tensor=f"{TENSOR}.weight", bit=numbers.choice(MANTISSA_BITS)),
    ]
    numbers.shuffle(middle)
    middle.insert(numbers.randrange(len(middle)), Fault(kind=FaultKind.LOSE_NODE, on_request=True))
    slow = Fault(kind=FaultKind.SLOW, rank=numbers.choice(RANKS), iteration=numbers.randint(1, 3), factor=10.0)
    last = Fault(kind=FaultKind.LOSE_NODE_AND_REPLICAS, on_request=True)
    return [slow, *middle, last, on_a_rank(FaultKind.SIGTERM)]


def is_ready(events: Sequence[Event], running: Iterable[str]) -> bool:
    """Return whether the run has handled the faults so far, and all nodes have joined.

    ``Cluster.inject`` itself waits until all ranks train again, and have committed a checkpoint since.

    Args:
        events: The journal so far.
        running: Nodes whose agent runs.
    """
    injected = {event.data["fault"] for event in select(events, EventKind.FAULT_SIMULATED)}
    if FaultKind.SLOW not in injected:
        return False
    reports = select(events, EventKind.STRAGGLER_REPORT)
    if not any(report.data["named"] for report in reports) and len(reports) < PATIENCE:
        return False
    if FaultKind.NAN in injected and not any(rung_of(event) == RecoveryLevel.RERUN_STEP for event in events):
        return False
    joined = {event.data["name"] for event in select(events, EventKind.NODE_JOINED)}
    return set(running) <= joined  # a spare can take a slot, and each agent knows of the job that a preemption ends


# -- reading the journal -----------------------------------------------------------------------------------------------


def select(events: Iterable[Event], kind: EventKind, **fields: Any) -> list[Event]:
    """Return the events of a kind whose fields have these values, such as ``job`` and ``cycle``."""
    return [
        event
        for event in events
        if event.kind == kind and all(getattr(event, name) == value for name, value in fields.items())
    ]


def rung_of(event: Event) -> int | None:
    """Return the recovery level of an event's decision; ``None``: it has none."""
    level: int | None = (event.data.get("verdict") or {}).get("rung")
    return level


def injection_of(kind: FaultKind, events: Iterable[Event]) -> Event | None:
    """Return the injection of the fault of a kind; each kind is injected once."""
    return next((event for event in select(events, EventKind.FAULT_SIMULATED) if event.data["fault"] == kind), None)


def cost_of(kind: FaultKind, ledger: Ledger) -> IncidentCost | None:
    """Return the incident caused by the fault of a kind, with its cost."""
    costs = (cost for cost in ledger.incidents if cost.fault is not None)
    return next((cost for cost in costs if cost.fault is not None and cost.fault.data["fault"] == kind), None)


def group_by_process(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each process separately, in the order of writing."""
    processes: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        processes.setdefault((event.job, event.node, event.proc), []).append(event)
    return list(processes.values())


@dataclass(frozen=True)
class Sources:
    """The sources from which one cycle's ranks were restored."""

    iteration: int
    tiers: dict[int, str]
    """Tier by rank."""
    global_bytes: int
    """Bytes that all ranks read in the global tier."""
    rejected_replicas: int
    """Damaged replicas that ranks rejected."""

    def describe(self) -> str:
        tiers = ", ".join(f"rank {rank} from {tier}" for rank, tier in sorted(self.tiers.items()))
        rejected = f", {self.rejected_replicas} replicas rejected" if self.rejected_replicas else ""
        return f"{tiers}; {self.global_bytes} bytes of the global tier{rejected}"


def sources_after(cost: IncidentCost, events: Sequence[Event]) -> Sources | None:
    """Return the sources after an incident; ``None``: the ranks were not restored."""
    restored = [event for event in select(events, EventKind.RESTORED, job=cost.job) if (event.cycle or 0) > cost.cycle]
    for cycle in sorted({event.cycle or 0 for event in restored}):
        of_cycle = [event for event in restored if event.cycle == cycle]
        if {event.rank for event in of_cycle} == set(RANKS):
            incidents = [
                event.data["incident"] for event in select(events, EventKind.INCIDENT, job=cost.job, cycle=cycle)
            ]
            rejected = [one for one in incidents if one["kind"] == IncidentKind.COPY_REJECTED]
            return Sources(
                iteration=max(event.iteration or 0 for event in of_cycle),
                tiers={event.rank: event.data["tier"] for event in of_cycle if event.rank is not None},
                global_bytes=sum(event.data["bytes_read"].get("global", 0) for event in of_cycle),
                rejected_replicas=sum(one["evidence"]["tier"] == "replica" for one in rejected),
            )
    return None


# -- the claims --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A statement that must be true of the run, and the evidence in the journal."""

    text: str
    holds: bool
    evidence: str


def check_all(ledger: Ledger, events: Sequence[Event]) -> Iterator[Claim]:
    yield from check_slow_rank(events)
    for kind, expected in EXPECTED.items():
        cost = cost_of(kind, ledger)
        is_rerun = cost is not None and cost.recovery_level == RecoveryLevel.RERUN_STEP.name.lower()
        yield Claim(
            text=f"{kind}: detected as {expected}, and {'no rank' if kind == FaultKind.NAN else 'the ranks'} restarted",
            holds=cost is not None and cost.kind == expected and is_rerun == (kind == FaultKind.NAN),
            evidence="it caused no incident" if cost is None else cost.reason or cost.text,
        )
        if cost is not None:
            yield from check_invalid_result(kind, cost)
            yield from check_sources(kind, cost, events)
    yield from check_preemption(events)


def check_slow_rank(events: Sequence[Event]) -> Iterator[Claim]:
    """The slow rank is identified by the third report on a wholly slow window, no other rank is, and none restarts."""
    injected = injection_of(FaultKind.SLOW, events)
    if injected is None:
        yield Claim("slow: a rank is slowed down", False, "no rank was slowed down")
        return
    since, rank = injected.iteration or 0, injected.rank
    reports = sorted(select(events, EventKind.STRAGGLER_REPORT), key=lambda event: event.mono_ns)
    here = [one for one in reports if (one.job, one.cycle) == (injected.job, injected.cycle)]
    at = next((at for at, one in enumerate(here) if rank in one.data["named"]), None)
    begins = [0, *(one.iteration or 0 for one in here)]
    number = None if at is None else sum(begin >= since for begin in begins[: at + 1])
    incidents = [event.data["incident"] for event in select(events, EventKind.INCIDENT)]
    summary = next((one["evidence"].get("summary") for one in incidents if one["kind"] == IncidentKind.STRAGGLER), "")
    yield Claim(
        text=f"slow: rank {rank} is identified by report {MAX_REPORTS} on a window in which it was slow all the time",
        holds=number is not None and number <= MAX_REPORTS,
        evidence="it was not identified" if number is None else f"report {number}: {summary}",
    )
    named = {one for report in here for one in report.data["named"]} - {rank}
    named |= {one for report in reports if report not in here for one in report.data["named"]}
    yield Claim("slow: no other rank is identified", not named, f"ranks {sorted(named)}" if named else "none")
    exits = [(event.data.get("incident") or {}).get("exit_code") for event in select(events, EventKind.DECISION)]
    num_restarts = exits.count(ExitReason.STRAGGLER)
    yield Claim("slow: no rank is restarted for it", not num_restarts, f"{num_restarts} restarts")


def check_invalid_result(kind: FaultKind, cost: IncidentCost) -> Iterator[Claim]:
    """A NaN is diagnosed as transient; the tensor of a flipped bit is found, and the rank's node is quarantined."""
    diagnosis = cost.evidence.get("diagnosis") or {}
    if kind == FaultKind.NAN:
        finding = diagnosis.get("finding")
        yield Claim("nan: the value is found transient", finding == "transient", f"{diagnosis.get('what')}: {finding}")
    if kind == FaultKind.BIT_FLIP and cost.fault is not None and cost.decision is not None:
        found, flipped = diagnosis.get("what"), cost.fault.data["tensor"]
        yield Claim("bit_flip: the tensor is found", found == flipped, f"{flipped} was changed, {found} was found")
        nodes = cost.decision.quarantine
        yield Claim(f"bit_flip: {cost.node} is quarantined", nodes == (cost.node,), ", ".join(nodes) or "no node")


def check_sources(kind: FaultKind, cost: IncidentCost, events: Sequence[Event]) -> Iterator[Claim]:
    """Each rank is restored from the expected tier.

    * After a killed or a hung rank: from the memory or the disk of its node.
    * After a lost or a quarantined node: its ranks from their replicas on the other node.
    * After a node that was lost with all replicas: its ranks reject these and are restored from the global tier, and
    all
      resume from the newest checkpoint there. Before that no rank reads a byte of the global tier.
    """
    if kind == FaultKind.NAN or cost.fault is None:
        return
    text, sources = f"{kind}: the ranks resume from where they should", sources_after(cost, events)
    if sources is None:
        yield Claim(text, False, "they never resumed")
        return
    victims = [cost.rank]
    if kind in TAKES_A_NODE:
        starts = select(events, EventKind.CYCLE_STARTED, job=cost.job, cycle=cost.cycle, node=cost.node)
        victims = [rank for event in starts for rank in event.data["ranks"]]
    if kind != FaultKind.LOSE_NODE_AND_REPLICAS:
        expected = ("replica",) if kind in TAKES_A_NODE else ("memory", "local")
        come_back = all(sources.tiers.get(rank or 0) in expected for rank in victims)
        yield Claim(text, bool(victims) and come_back and not sources.global_bytes, sources.describe())
        return
    commits = [event for event in select(events, EventKind.SAVE_COMMITTED) if "global" in event.data["tiers"]]
    newest = max((event.iteration or 0 for event in commits if event.mono_ns <= cost.fault.mono_ns), default=None)
    num_corrupted = cost.fault.data["replicas_corrupted"]
    yield Claim(
        text,
        holds=bool(victims)
        and num_corrupted > 0
        and sources.rejected_replicas >= len(victims)
        and all(sources.tiers.get(rank or 0) == "global" for rank in victims)
        and newest is not None
        and sources.iteration >= newest,
        evidence=f"{num_corrupted} replicas corrupted; {sources.describe()}; resumed from {sources.iteration}; "
        f"newest in the global tier: {newest}",
    )


def check_preemption(events: Sequence[Event]) -> Iterator[Claim]:
    """All ranks save and exit after one iteration; the next job resumes from that iteration and finishes."""
    injected = injection_of(FaultKind.SIGTERM, events)
    if injected is None:
        yield Claim("sigterm: a rank is preempted", False, "no rank was preempted")
        return
    at = injected.iteration or 0
    after = [event for event in events if event.job == injected.job and event.mono_ns >= injected.mono_ns]
    following = [event for event in events if event.job != injected.job and event.mono_ns >= injected.mono_ns]
    notices = select(after, EventKind.NOTICE, rank=injected.rank)
    yield Claim(f"sigterm: rank {injected.rank} receives it", bool(notices), f"{len(notices)} notices")
    ends = {event.rank: event for event in select(after, EventKind.SESSION_ENDED)}
    exits = {rank: (event.iteration, event.data["exit_code"]) for rank, event in sorted(ends.items(), key=str)}
    iteration = next((iteration for iteration, _ in exits.values()), None) or 0
    is_same = exits == dict.fromkeys(RANKS, (iteration, int(ExitReason.PREEMPTED)))
    yield Claim(
        "sigterm: all ranks exit after one iteration, with 75",
        is_same and iteration >= at and exit_codes(after) == {ExitReason.PREEMPTED},
        f"injected at {at}; rank to iteration and exit code: {exits}; the job's exit codes: {exit_codes(after)}",
    )
    commits = [event for event in select(after, EventKind.SAVE_COMMITTED) if "global" in event.data["tiers"]]
    newest = max((event.iteration or 0 for event in commits), default=None)
    saved = {event.rank for event in commits if event.iteration == iteration}
    yield Claim(
        "sigterm: all ranks commit that iteration to the global tier, as the newest",
        newest == iteration and saved == set(RANKS),
        f"{len(saved)} ranks have committed {iteration}; the newest is {newest}",
    )
    resumed = {event.rank: event.iteration for event in select(following, EventKind.RESTORED, cycle=0)}
    yield Claim(
        "sigterm: the next job resumes from that iteration, and finishes",
        resumed == dict.fromkeys(RANKS, iteration) and ExitReason.FINISHED in exit_codes(following),
        f"rank to iteration: {resumed}; the job's exit codes: {exit_codes(following)}",
    )


def exit_codes(events: Iterable[Event]) -> set[int]:
    return {event.data["exit_code"] for event in select(events, EventKind.JOB_ENDED)}


def check_processes(cluster: Cluster, events: Sequence[Event], local: Path) -> Iterator[Claim]:
    """The run ends with 0, and no process and no disk of a lost node is left."""
    yield Claim("the run ends with exit code 0", cluster.exit_code == 0, f"exit code {cluster.exit_code}")
    lost = {str(event.data["node"]) for kind in LOST if (event := injection_of(kind, events)) is not None}
    left = sorted(name for name in lost if (local / name).exists())
    yield Claim("the disks of lost nodes are gone", not left, f"left: {', '.join(left) or 'none'}")
    try:
        cluster.assert_no_orphans(within_s=5.0)
    except AssertionError as error:
        yield Claim("no process is left", False, str(error))
    else:
        yield Claim("no process is left", True, "none is left")


def check_result(undisturbed: dict[str, Any], faulted: dict[str, Any]) -> Claim:
    """Both runs have ended with the same bits."""
    differ = find_differences(undisturbed, faulted)
    evidence = f"different or missing: {', '.join(differ)}" if differ else f"weights {undisturbed['weights'][:12]}"
    return Claim("weights, optimizer state and losses are bit-identical to the undisturbed run's", not differ, evidence)


# -- the runs ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The result of the demo."""

    claims: list[Claim]
    costs: list[dict[str, Any]]
    """Cost of each fault."""
    faulted: dict[str, Any]
    """The script's result in the run with faults."""
    is_identical: bool
    """Whether it is bit-identical to the undisturbed run's."""
    cycles: int
    jobs: int

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


def run_both(folder: Path, *, seed: int, iterations: int, is_quiet: bool) -> Outcome:
    """Train undisturbed and with faults, and check all claims."""
    size = f"{NUM_NODES} nodes x {NPROC_PER_NODE} ranks"
    printer = Printer(is_quiet=is_quiet)
    printer.line(f"Undisturbed: {size}")
    first = make_cluster(folder / "undisturbed", iterations)
    claims = list(train(first, [], iterations, printer))
    events = first.events()
    incidents = select(events, EventKind.INCIDENT)
    named = [rank for report in select(events, EventKind.STRAGGLER_REPORT) for rank in report.data["named"]]
    evidence = f"{len(incidents)} incidents, {len(named)} slow ranks"
    claims.append(Claim("undisturbed: no incident, and no slow rank", not incidents and not named, evidence))
    undisturbed = read_result(folder / "undisturbed")
    if not all(claim.holds for claim in claims):
        return Outcome(claims=claims, costs=[], faulted={}, is_identical=False, cycles=0, jobs=0)

    printer.line(f"With faults: {size} + {NUM_SPARES} spare nodes")
    faults = draw_faults(seed)
    plan = FaultPlan(seed=seed, faults=tuple(faults))
    second = make_cluster(folder / "with-faults", iterations, plan)
    claims += train(second, faults, iterations, printer)
    events, faulted = second.events(), read_result(folder / "with-faults")
    missing = [fault.describe() for fault in verify_fired(plan, second.run_dir)]
    evidence = f"{'; '.join(missing)}; give more --iterations" if missing else f"{len(faults)} faults"
    claims.append(Claim("all faults are injected", not missing, evidence))
    ledger = Ledger.from_files(group_by_process(events))
    claims += check_all(ledger, events)
    claims.append(same := check_result(undisturbed, faulted))
    cycles = {(event.job, event.cycle) for event in select(events, EventKind.CYCLE_STARTED)}
    costs = list(find_costs(ledger, events))
    return Outcome(
        claims=claims,
        costs=costs,
        faulted=faulted,
        is_identical=same.holds,
        cycles=len(cycles),
        jobs=second.num_jobs,
    )


def make_cluster(folder: Path, iterations: int, plan: FaultPlan | None = None) -> Cluster:
    """Write the settings of one training, and return the cluster that runs it."""
    folder.mkdir(parents=True)
    config = folder / "outlast.json"
    config.write_text(json.dumps(settings_of(folder), indent=2))
    num_spares = 0 if plan is None else NUM_SPARES
    return Cluster(
        SCRIPT,
        f"--config={config}",
        f"--iterations={iterations}",
        f"--out={folder / 'result.json'}",
        run_dir=folder / "run",
        num_nodes=NUM_NODES,
        # One spare is announced at most: were it two, each half of a divided network could be complete.
        num_spares=min(num_spares, 1),
        num_started=NUM_NODES + num_spares,
        nproc_per_node=NPROC_PER_NODE,
        options=OPTIONS,
        fault_plan=plan,
    )


def train(cluster: Cluster, faults: Sequence[Fault], iterations: int, printer: "Printer") -> Iterator[Claim]:
    """Run a cluster to its end, and inject each fault when the run is ready for it."""
    pending = [fault for fault in faults if fault.on_request]
    next_s = 0.0
    printer.begin()
    with cluster:
        try:
            for _ in cluster.supervise(STARTING_S + PER_ITERATION_S * iterations):
                if time.monotonic() < next_s:
                    continue
                next_s = time.monotonic() + POLL_S
                events = cluster.events()
                printer.show(events)
                running = [agent.name for agent in cluster.agents if agent.running]
                if pending and is_ready(events, running) and cluster.inject(pending[0]):
                    pending.pop(0)
        except OutlastError as error:
            yield Claim("the run ends in time", False, str(error))
        events = cluster.events()
        printer.show(events)
        claims = list(check_processes(cluster, events, cluster.run_dir.parent / "local"))
        if not all(claim.holds for claim in claims):
            print(cluster.tails(), file=sys.stderr)
        yield from claims


def read_result(folder: Path) -> dict[str, Any]:
    """Return what the script has written about a run; empty = it did not end."""
    path = folder / "result.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return result


# -- what is printed ---------------------------------------------------------------------------------------------------


class Printer:
    """Print a line for each event that matters, as it comes."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._begin_ns = 0
        self._printed: set[tuple[str, str, int]] = set()

    def begin(self) -> None:
        """Count seconds from the next event."""
        self._begin_ns = 0

    def line(self, text: str) -> None:
        if not self._is_quiet:
            print(text, flush=True)

    def show(self, events: Iterable[Event]) -> None:
        """Print the new events."""
        for event in events:
            key = (event.node, event.proc, event.mono_ns)
            if key not in self._printed:
                self._printed.add(key)
                self._begin_ns = self._begin_ns or event.mono_ns
                if (text := describe(event)) is not None:
                    self.line(f"{max(0, event.mono_ns - self._begin_ns) / 1e9:7.2f} s  {text}")


def describe(event: Event) -> str | None:
    """Return the line of an event; ``None``: it is not printed."""
    data = event.data
    if event.kind == EventKind.NODE_JOINED and data.get("spare"):
        return f"{data['name']} waits as a spare"
    if event.kind == EventKind.CYCLE_STARTED:
        return f"cycle {event.cycle}: {event.node} runs ranks {data['ranks']} of {data['world_size']}"
    if event.kind == EventKind.FAULT_SIMULATED:
        target = f"rank {event.rank}, {data['tensor']}" if "tensor" in data else data["target"]
        return f"FAULT: {data['fault']}: {target}, at iteration {event.iteration}"
    if event.kind in (EventKind.INCIDENT, EventKind.DECISION):
        if reason := (data.get("verdict") or {}).get("reason"):
            return f"decided: {reason}"
        incident = data.get("incident") or {}
        who = f"rank {incident['rank']}" if incident.get("rank") is not None else incident.get("node", "")
        return f"detected by {event.node}: {incident.get('kind')}, {who}"
    if event.kind == EventKind.NOTICE:
        return f"detected by {event.node if event.rank is None else f'rank {event.rank}'}: preemption"
    if event.kind == EventKind.RESTORED:
        return f"rank {event.rank}: restored iteration {event.iteration} from {data['tier']}"
    if event.kind in (EventKind.SESSION_ENDED, EventKind.JOB_ENDED):
        who = event.node if event.rank is None else f"rank {event.rank} after iteration {event.iteration}"
        return f"{who}: exit code {data['exit_code']}"
    return None


def find_costs(ledger: Ledger, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Yield for each fault its detection, its recovery and the repeated iterations."""
    for injected in select(events, EventKind.FAULT_SIMULATED):
        kind = FaultKind(injected.data["fault"])
        node = injected.data.get("node") or injected.node
        cost = cost_of(kind, ledger)
        detected_s = None if cost is None or cost.since_s is None else cost.at_s - cost.since_s
        recovered_s = None
        if cost is not None and cost.since_s is not None and cost.recovered_s is not None:
            recovered_s = cost.recovered_s - cost.since_s
        if kind == FaultKind.SLOW:
            reports = [one for one in select(events, EventKind.STRAGGLER_REPORT) if injected.rank in one.data["named"]]
            detected_s = min(((one.mono_ns - injected.mono_ns) / 1e9 for one in reports), default=None)
        yield {
            "fault": str(kind),
            "where": node if injected.rank is None else f"rank {injected.rank} on {node}",
            "iteration": injected.iteration,
            "detected_after_s": detected_s,
            "recovered_after_s": recovered_s,
            "redone_iterations": 0 if cost is None else cost.lost_iterations,
        }


def print_outcome(outcome: Outcome, wall_s: float) -> None:
    """Print each fault's cost, each claim with its evidence, and the result in one line."""
    if outcome.costs:
        print(f"\n{'fault':<24}{'where':<20}{'detected':>10}{'recovered':>11}{'redone':>8}")
    for cost in outcome.costs:
        detected, recovered = format_s(cost["detected_after_s"]), format_s(cost["recovered_after_s"])
        redone = "-" if cost["redone_iterations"] is None else cost["redone_iterations"]
        print(f"{cost['fault']:<24}{cost['where']:<20}{detected:>10}{recovered:>11}{redone:>8}")
    print()
    for claim in outcome.claims:
        print(f"{'ok    ' if claim.holds else 'FAILED'} {claim.text}\n       {claim.evidence}")
    failed = sum(not claim.holds for claim in outcome.claims)
    if failed:
        print(f"\nfailed: {failed} of {len(outcome.claims)} claims do not hold ({wall_s:.0f} s)")
        return
    counts = f"{len(outcome.costs)} faults, {outcome.cycles} cycles in {outcome.jobs} jobs"
    weights = outcome.faulted["weights"][:12]
    print(f"\nbit-identical: {counts}, {len(outcome.claims)} claims hold, weights {weights} ({wall_s:.0f} s)")


def format_s(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def to_json(outcome: Outcome, *, seed: int, wall_s: float, folder: Path | None) -> str:
    result = outcome.faulted
    return json.dumps(
        {
            "bit_identical": outcome.is_identical,
            "faults": outcome.costs,
            "claims": [asdict(claim) for claim in outcome.claims],
            "cycles": outcome.cycles,
            "jobs": outcome.jobs,
            "final_loss": result.get("final_loss"),
            "wall_s": round(wall_s, 2),
            "seed": seed,
            "iterations": result.get("iterations"),
            "digests": {name: result.get(name) for name in COMPARED},
            "folder": None if folder is None else str(folder),
        }
    )


def main() -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=0, help="draws the order, the victims and the tensors of the faults"
    )
    parser.add_argument("--iterations", type=int, default=150, help="length of each run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep everything in this new or empty folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    args = parser.parse_args()
    if args.keep is not None and args.keep.exists() and (not args.keep.is_dir() or any(args.keep.iterdir())):
        parser.error(f"--keep {args.keep} is not an empty folder; name a new one")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # ends the clusters, as Ctrl-C does
    folder = Path(tempfile.mkdtemp(prefix="outlast-demo-")) if args.keep is None else args.keep.resolve()
    began_s, stays = time.monotonic(), args.keep is not None
    try:
        outcome = run_both(folder, seed=args.seed, iterations=args.iterations, is_quiet=args.json)
        wall_s = time.monotonic() - began_s
        stays = stays or not outcome.holds
        if args.json:
            print(to_json(outcome, seed=args.seed, wall_s=wall_s, folder=folder if stays else None))
        else:
            print_outcome(outcome, wall_s)
            page = (
                folder / "report.html" if stays else Path(tempfile.mkdtemp(prefix="outlast-demo-page-")) / "report.html"
            )
            write_page(folder / "with-faults" / "run", page)
            print(f"\nThe run as a page, for a browser:\n{page}" if page.exists() else "")
        if stays:
            print(f"Journals, output and checkpoints are stored in {folder}", file=sys.stderr)
        return 0 if outcome.holds else 1
    except BrokenPipeError:  # the reader of the output has exited, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted; every process of the demo has been ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)


def write_page(run_dir: Path, page: Path) -> None:
    """Write the HTML report of a run, as ``outlast report`` does."""
    command = [sys.executable, "-m", "outlast", "report", str(run_dir), f"--html={page}", "--no-trace"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    sys.exit(main())
