"""The events of a job as its processes would write them, added one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from outlast.incidents import Decision, Event, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.policy.recovery_policy import RecoveryState
from outlast.policy.run_view import RunView
from outlast.status.evidence import Evidence, JobProcess, processes_in
from outlast.status.facts import judge
from outlast.status.report import StatusReport

__all__ = ["HERE", "JobHistory", "make_death", "names_of"]

HERE = "this-boot/pid:[1]"


class JobHistory:
    """Collects events; each is a tenth of a second after the one before, unless :attr:`now_s` is moved.

    Args:
        job: The job's name.
        num_nodes: Nodes that train.
        agents: Whether ``outlast run`` starts the workers.
    """

    def __init__(self, job: str = "job-1", *, num_nodes: int = 1, agents: bool = True) -> None:
        self.job, self.num_nodes, self.agents = job, num_nodes, agents
        self.events: list[Event] = []
        self.now_s = 1000.0
        self._next_pid = 100

    def add(
        self,
        kind: EventKind,
        on: str = "a",
        *,
        proc: str = "agent",
        cycle: int | None = None,
        rank: int | None = None,
        iteration: int | None = None,
        **data: Any,
    ) -> JobHistory:
        self.now_s += 0.1
        ns = round(self.now_s * 1e9)
        event = Event(
            kind=kind,
            wall_ns=ns,
            mono_ns=ns,
            run_id="r",
            job=self.job,
            node=on,
            proc=proc,
            cycle=cycle,
            rank=rank,
            iteration=iteration,
            data=data,
        )
        self.events.append(event)
        return self

    def start_agents(self, *names: str, machine: str = HERE) -> JobHistory:
        """Start agents; the first one hosts the coordinator."""
        for name in names:
            self._next_pid += 1
            self.add(
                EventKind.JOB_STARTED,
                name,
                command=["train.py"],
                num_nodes=self.num_nodes,
                nproc_per_node=1,
                limits={"max_restarts": 3, "max_restarts_total": None, "max_no_progress_cycles": 3},
                join_timeout_s=600.0,
                pid=self._next_pid,
                pid_started=7,
                host=f"host-{name}",
                machine=machine,
            )
            self.add(EventKind.NODE_JOINED, names[0], proc="coordinator", cycle=0, name=name, spare=False)
        return self

    def start_cycle(self, number: int, *names: str) -> JobHistory:
        """Start a cycle with one rank a node."""
        for node_rank, name in enumerate(names):
            self._next_pid += 1
            self.add(
                EventKind.CYCLE_STARTED,
                name,
                cycle=number,
                node_rank=node_rank,
                ranks=[node_rank],
                pids=[self._next_pid],
                world_size=len(names),
            )
        return self

    def start_sessions(self, number: int, *names: str, machine: str = HERE) -> JobHistory:
        """Start each node's session."""
        for rank, name in enumerate(names):
            self._next_pid += 1
            self.add(
                EventKind.SESSION_STARTED,
                name,
                proc=f"rank-{rank}",
                cycle=number,
                rank=rank,
                world_size=len(names),
                launcher="outlast" if self.agents else "torchrun",
                directory="/shared/ckpt",
                local_directory=None,
                pid=self._next_pid,
                pid_started=7,
                host=f"host-{name}",
                machine=machine,
            )
        return self

    def add_rank_event(
        self, kind: EventKind, iteration: int, *, cycle: int = 0, rank: int = 0, on: str = "a", **data: Any
    ) -> JobHistory:
        """Add an event that a rank writes."""
        return self.add(kind, on, proc=f"rank-{rank}", cycle=cycle, rank=rank, iteration=iteration, **data)

    def add_incident(self, incident: Incident, *, on: str = "a", proc: str = "agent") -> JobHistory:
        return self.add(EventKind.INCIDENT, on, proc=proc, cycle=incident.cycle, incident=as_dict(incident))

    def add_decision(
        self,
        incident: Incident,
        recovery_level: RecoveryLevel = RecoveryLevel.RESTART_WORKERS,
        reason: str = "restarting",
    ) -> JobHistory:
        decision = as_dict(Decision(recovery_level=recovery_level, reason=f"{incident.describe()}; {reason}"))
        found = as_dict(incident)
        return self.add(EventKind.DECISION, proc="coordinator", cycle=incident.cycle, verdict=decision, incident=found)

    def end_cycle(self, number: int, *names: str, reason: str = "rank 0 died", **iterations: int) -> JobHistory:
        """End a cycle on some nodes; ``iterations`` by rank as ``r0=57``."""
        by_rank = {name.removeprefix("r"): iteration for name, iteration in iterations.items()}
        for name in names:
            self.add(EventKind.CYCLE_ENDED, name, cycle=number, reason=reason, iterations=by_rank)
        return self

    def end_agents(self, *names: str, code: int = 0, reason: str = "the run is finished") -> JobHistory:
        """End agents, in order."""
        for name in names:
            self.add(EventKind.JOB_ENDED, name, exit_code=code, reason=reason)
        return self

    def evidence(self, *, alive: bool | None = True, **given: Any) -> Evidence:
        """Return the events as evidence; ``alive``: whether the processes run; ``nodes``: the same for single nodes."""
        view = RunView.of([*given.pop("earlier", ()), *self.events])
        living: dict[JobProcess, bool | None] = dict.fromkeys(processes_in(view.job(self.job)), alive)
        living |= {one: given["nodes"][one.node] for one in living if one.node in given.get("nodes", {})}
        given.pop("nodes", None)
        given.setdefault("recovery_state", RecoveryState())
        return Evidence(run_dir="/runs/r", job=self.job, view=view, living=living, **given)

    def judge(self, *, after_s: float = 0.0, alive: bool | None = True, **given: Any) -> StatusReport:
        """Return the report that is made ``after_s`` seconds after the newest event."""
        return judge(self.evidence(alive=alive, **given), round((self.now_s + after_s) * 1e9))


def as_dict(value: Incident | Decision) -> dict[str, Any]:
    """Return the journal's form of an incident or a decision."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return found


def make_death(
    rank: int = 0, *, cycle: int = 0, on: str = "a", kind: IncidentKind = IncidentKind.WORKER_DIED
) -> Incident:
    """Return an incident of a rank."""
    return Incident(kind=kind, job="job-1", cycle=cycle, node=on, rank=rank, exit_code=-9, iteration=12)


def names_of(report: StatusReport, state: str) -> Sequence[str]:
    """Return the nodes of a report in a state."""
    return [node.name for node in report.nodes if node.state == state]
