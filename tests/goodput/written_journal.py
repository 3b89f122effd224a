"""Events of a simulated run, written by hand: times in seconds, several nodes and clock offsets."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from outlast.clock import as_iso
from outlast.incidents import Event, EventKind

BEGAN_NS = 1_800_000_000_000_000_000


class WrittenRun:
    """Collects events by process.

    Args:
        ahead_s: Node to the seconds by which its wall clock is ahead.
    """

    def __init__(self, ahead_s: dict[str, float] | None = None, *, num_ranks: int = 2) -> None:
        self.ahead_s = ahead_s or {}
        self.files: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
        self.nodes = {f"n{rank}": (rank,) for rank in range(num_ranks)}

    def write(
        self, at_s: float, kind: EventKind, *, node: str = "n0", proc: str = "agent", job: str = "j", **more: Any
    ) -> None:
        """Write one event; ``cycle``, ``rank`` and ``iteration`` go into the envelope."""
        wall_ns = BEGAN_NS + int((at_s + self.ahead_s.get(node, 0.0)) * 1e9)
        mono_ns = int((at_s + 1000 * (1 + list(self.nodes).index(node))) * 1e9)
        envelope = {name: more.pop(name, None) for name in ("cycle", "rank", "iteration")}
        event = Event(
            kind=kind, wall_ns=wall_ns, mono_ns=mono_ns, run_id="r", job=job, node=node, proc=proc,
            time=as_iso(wall_ns), data=more, **envelope,
        )  # fmt: skip
        self.files[job, node, proc].append(event)

    def on_ranks(self, at_s: float, kind: EventKind, **more: Any) -> None:
        """Write one event of each rank."""
        for node, ranks in self.nodes.items():
            for rank in ranks:
                self.write(at_s, kind, node=node, proc=f"rank-{rank}", rank=rank, **more)

    def start_job(self, at_s: float, job: str = "j") -> None:
        for node in self.nodes:
            data = {"machine": f"m-{node}", "command": ["train.py"], "version": "0"}
            self.write(at_s, EventKind.JOB_STARTED, node=node, job=job, **data)

    def start_cycle(self, at_s: float, cycle: int, job: str = "j") -> None:
        for node, ranks in self.nodes.items():
            size = len(self.nodes)
            data = {"node_rank": ranks[0], "ranks": list(ranks), "pids": [1], "world_size": size}
            self.write(at_s, EventKind.CYCLE_STARTED, node=node, job=job, cycle=cycle, **data)
        self.on_ranks(at_s, EventKind.SESSION_STARTED, job=job, cycle=cycle, launcher="outlast run", world_size=size)

    def kill(
        self,
        at_s: float,
        cycle: int,
        reached: int,
        *,
        decided_s: float,
        recovery_level: int = 2,
        job: str = "j",
        delay_s: float = 0.0,
    ) -> None:
        """Let rank 1 die, detected at once and decided on later."""
        incident = {"kind": "worker_died", "job": job, "cycle": cycle, "node": "n1", "rank": 1, "exit_code": -9}
        self.write(at_s, EventKind.INCIDENT, node="n1", job=job, cycle=cycle, rank=1, incident=incident)
        for node, ranks in self.nodes.items():
            iterations = {str(rank): reached for rank in ranks}
            self.write(at_s, EventKind.CYCLE_ENDED, node=node, job=job, cycle=cycle, reason="x", iterations=iterations)
        decision = {"rung": recovery_level, "reason": "restarting the workers", "delay_s": delay_s}
        data = {"verdict": decision, "incident": incident}
        self.write(decided_s, EventKind.DECISION, proc="coordinator", job=job, cycle=cycle, **data)

    def end_job(self, at_s: float, job: str = "j", exit_code: int = 0, reason: str = "the run is finished") -> None:
        for node in self.nodes:
            self.write(at_s, EventKind.JOB_ENDED, node=node, job=job, exit_code=exit_code, reason=reason)

    def save(self, folder: Path) -> Path:
        """Write the journal of a run directory; return the directory."""
        (folder / "journal").mkdir(parents=True)
        for (job, node, proc), events in self.files.items():
            lines = b"\n".join(msgspec.json.encode(event) for event in events)
            (folder / "journal" / f"{job}-{node}-{proc}.jsonl").write_bytes(lines + b"\n")
        return folder


def two_hundred_minutes(ahead_s: dict[str, float] | None = None) -> WrittenRun:
    """Return the worked example: 100 minutes effective, 10 load, 10 save, 40 lost, 15 restart, 25 slow-down.

    Iterations take a minute, slow ones 1.25 minutes. 40 iterations are lost, as nothing was saved before.
    """
    run, minute = WrittenRun(ahead_s), 60.0
    run.start_job(0.0)
    run.start_cycle(0.0, 0)
    run.on_ranks(0.0, EventKind.STEPS_STARTED, cycle=0, iteration=0)
    run.on_ranks(1 * minute, EventKind.PROGRESS, cycle=0, iteration=1, step_s=60.0, loss=2.0)
    run.kill(40 * minute, 0, 40, decided_s=55 * minute)  # 40 lost, 15 restart
    run.start_cycle(55 * minute, 1)
    run.on_ranks(65 * minute, EventKind.RESTORED, cycle=1, iteration=0, generation=0, tier="global", load_s=600.0)
    run.on_ranks(65 * minute, EventKind.STEPS_STARTED, cycle=1, iteration=0)
    run.on_ranks(66.25 * minute, EventKind.PROGRESS, cycle=1, iteration=1, step_s=75.0)
    run.write(
        190 * minute, EventKind.STRAGGLER_REPORT, proc="rank-0", cycle=1, rank=0, iteration=100, named=[1],
        scores=[1.0, 0.8],
    )  # fmt: skip
    run.on_ranks(200 * minute, EventKind.SAVE_SCHEDULED, cycle=1, iteration=100, stall_s=600.0, tiers=["global"])
    run.on_ranks(
        200 * minute, EventKind.SAVE_COMMITTED, cycle=1, iteration=100, generation=100, duration_s=600.0, num_bytes=5,
        tiers=["global"],
    )  # fmt: skip
    run.on_ranks(200 * minute, EventKind.SESSION_ENDED, cycle=1, iteration=100, exit_code=0)
    run.end_job(200 * minute)
    return run
