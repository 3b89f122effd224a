"""Constructed ledgers of runs: small ones with one record of each type, and a large one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from outlast.clock import as_iso
from outlast.goodput.account import (
    CycleSpan,
    IncidentCost,
    JobSpan,
    LoadSpan,
    NodeClock,
    NodeSpan,
    Part,
    SaveSpan,
    Segment,
    SlowRanksWindow,
    Statistics,
    StepSample,
    Warned,
)
from outlast.goodput.ledger import Ledger
from outlast.incidents import Decision, Event, EventKind, Incident, IncidentKind, RecoveryLevel

_CYCLE_S = 600.0
_PARTS = (
    (Part.RENDEZVOUS, 5.0),
    (Part.START_UP, 20.0),
    (Part.LOAD, 5.0),
    (Part.PRODUCTIVE, 500.0),
    (Part.REDONE, 50.0),
    (Part.DETECTION, 15.0),
    (Part.RESTART, 5.0),
)


def make_ledger(*, num_nodes: int = 2, ranks_each: int = 2, num_cycles: int = 3, hostile: str = "") -> Ledger:
    """Return a run in which each cycle but the last ends with an incident.

    Args:
        num_nodes: Nodes, each in every cycle.
        ranks_each: Ranks of a node.
        num_cycles: Cycles of 10 minutes.
        hostile: Appended to every text that a journal may contain.
    """
    ranks = num_nodes * ranks_each
    segments: list[Segment] = []
    cycles: list[CycleSpan] = []
    incidents: list[IncidentCost] = []
    saves: list[SaveSpan] = []
    loads: list[LoadSpan] = []
    windows: list[SlowRanksWindow] = []
    steps: list[StepSample] = []
    partition = dict.fromkeys((str(part) for part in Part), 0.0)
    for number in range(num_cycles):
        start_s = number * _CYCLE_S
        at_s = start_s
        for part, length_s in _PARTS:
            caused = number - 1 if part in (Part.RENDEZVOUS, Part.START_UP, Part.LOAD) else number
            on = caused if part != Part.PRODUCTIVE and 0 <= caused < num_cycles - 1 else None
            segments.append(
                Segment(start_s=at_s, end_s=at_s + length_s, part=part, job="job-1", cycle=number, incident=on)
            )
            partition[str(part)] += length_s
            at_s += length_s
        nodes = tuple(
            NodeSpan(
                node=f"node-{node:03}{hostile}",
                node_rank=node,
                ranks=tuple(range(node * ranks_each, (node + 1) * ranks_each)),
                start_s=start_s + 5,
                end_s=start_s + 595,
            )
            for node in range(num_nodes)
        )
        cycles.append(
            CycleSpan(
                job="job-1", cycle=number, start_s=start_s + 5, end_s=start_s + 595, steps_start_s=start_s + 30,
                world_size=ranks, from_iteration=100 * number, to_iteration=100 * number + 110, nodes=nodes,
                reason=f"a hang{hostile}",
            )
        )  # fmt: skip
        if number < num_cycles - 1:
            incidents.append(_make_incident(number, start_s + 595, ranks, ranks_each, hostile))
        for save in range(4):
            saved_s = start_s + 130 + 100 * save
            saves.append(
                SaveSpan(
                    job="job-1", cycle=number, iteration=100 * number + 25 * save, at_s=saved_s,
                    stall_s=0.2 + 0.1 * save, tiers=("memory", "local", "global")[: 1 + save % 3],
                    duration_s=4.0 + save, num_bytes=10**10,
                )
            )  # fmt: skip
        if number:
            rejected = (f"replica, rank 1: digest differs{hostile}",)
            loads.append(
                LoadSpan(
                    job="job-1", cycle=number, iteration=100 * number, at_s=start_s + 30, load_s=5.0,
                    tiers={"memory": ranks - 1, "replica": 1}, bytes_read={"memory": 10**10, "replica": 10**8},
                    rejected=rejected,
                )
            )  # fmt: skip
        for window in range(3):
            slow = (7 * number) % ranks
            scores = {rank: 0.95 + 0.05 * math.sin(rank + window) for rank in range(ranks)} | {slow: 0.4}
            windows.append(
                SlowRanksWindow(
                    job="job-1", cycle=number, iteration=100 * number + 30 * window,
                    start_s=start_s + 30 + 160 * window, end_s=start_s + 190 + 160 * window,
                    named=(slow,) if window == 2 else (), scores=scores, excess=0.1,
                    why_none="" if window == 2 else f"rank {slow} is slow in {window} of 3 windows{hostile}",
                )
            )  # fmt: skip
        steps += [
            StepSample(
                at_s=start_s + 30 + 50 * sample,
                iteration=100 * number + 10 * sample,
                step_s=5.0 + 0.2 * (sample % 3),
                loss=math.nan if sample == 5 else 8.0 / (1 + 0.1 * number + 0.01 * sample),
            )
            for sample in range(11)
        ]
    wall_s = num_cycles * _CYCLE_S
    num = len(incidents)
    return Ledger(
        run_id=f"made{hostile}",
        began="2026-11-25T23:20:03.866Z",
        began_wall_ns=1_795_648_803_866_541_786,
        wall_s=wall_s,
        state="finished",
        headline=f"finished: 83.3 % goodput in {wall_s / 3600:.0f} h, {num} incidents{hostile}",
        partition=partition,
        ettr=partition[Part.PRODUCTIVE] / wall_s,
        num_iterations=100 * num_cycles,
        lost_iterations=10 * num,
        jobs=(
            JobSpan(
                job="job-1", start_s=0.0, end_s=wall_s, exit_code=0, reason=f"the run is finished{hostile}",
                command=("train.py", f"--name={hostile}"), launcher="outlast", version="0.1.0",
            ),
        ),
        cycles=tuple(cycles),
        incidents=tuple(incidents),
        warned=(
            Warned(
                kind="copy_rejected", text=f"rank 1 rejected a stored copy{hostile}", at_s=29.0, job="job-1", cycle=0,
                node=f"node-000{hostile}", rank=1, iteration=3, evidence={"summary": hostile or "digest differs"},
            ),
        ),
        segments=tuple(segments),
        saves=tuple(saves),
        loads=tuple(loads),
        slow_ranks=tuple(windows),
        steps=tuple(steps),
        statistics=Statistics(
            num_incidents={"worker_hung": num, "all": num},
            mtbf_s={"worker_hung": wall_s / num, "all": wall_s / num} if num else {},
            mttd_s={"worker_hung": 15.0, "all": 15.0} if num else {},
            mttr_s={"restart_workers": 35.0, "all": 35.0} if num else {},
        ),
        clocks=(
            NodeClock(job="job-1", node="node-000", offset_s=0.0),
            NodeClock(job="job-1", node=f"node-001{hostile}", offset_s=1.5, num_anchors=12),
        ),
        notes=(f"3 events were lost on node-001{hostile}",),
    )  # fmt: skip


def _make_incident(number: int, at_s: float, ranks: int, ranks_each: int, hostile: str) -> IncidentCost:
    rank = (13 * number + 1) % ranks
    node = f"node-{rank // ranks_each:03}{hostile}"
    text = f"rank {rank} on node {node} (pid 4711) hangs in section 'step'{hostile}"
    reason = f"{text}; restarting the workers{hostile}"
    evidence: dict[str, Any] = {
        "summary": f"it waits in forward{hostile}",
        "score": math.nan,
        "output": [f"Traceback (most recent call last):{hostile}", f"RuntimeError: {hostile}"],
        f"cause{hostile}": {"type": "RuntimeError", "nested": [{"deep": [hostile, 1.25]}]},
    }
    incident = Incident(
        kind=IncidentKind.WORKER_HUNG, job="job-1", cycle=number, node=node, rank=rank, pid=4711,
        section=f"step{hostile}", iteration=100 * number + 110, evidence=evidence,
    )  # fmt: skip
    parts = {"detection": 15.0, "restart": 5.0, "redone": 50.0, "rendezvous": 5.0, "start_up": 20.0, "load": 5.0}
    parts["detection"] += number % 7
    return IncidentCost(
        index=number,
        kind="worker_hung",
        text=text,
        recovery_level="restart_workers",
        reason=reason,
        job="job-1",
        cycle=number,
        node=node,
        rank=rank,
        iteration=100 * number + 110,
        at_s=at_s,
        since_s=at_s - 15,
        recovered_s=at_s + 35,
        resumed_iteration=100 * (number + 1),
        lost_iterations=10,
        parts=parts,
        cost_s=sum(parts.values()),
        simulated=hostile,
        incident=incident,
        decision=Decision(
            recovery_level=RecoveryLevel.RESTART_WORKERS, reason=reason, quarantine=(f"node-009{hostile}",)
        ),
        evidence={**evidence, "exited": {"pid": 4711, "exit_code": -9, "killed_by_us": True}},
    )


def write_run_files(run_dir: Path, *, cycle: int = 0, rank: int = 1, text: str = "", pid: int = 4711) -> None:
    """Write the stacks and the traceback of a cycle as the agents do."""
    stacks, failures = run_dir / "stacks" / f"cycle-{cycle}", run_dir / "failures" / f"job-1-cycle-{cycle}"
    diagnoses = run_dir / "diagnoses"
    for folder in (stacks, failures, diagnoses):
        folder.mkdir(parents=True, exist_ok=True)
    frame = f'  File "/code/train.py", line 127 in main{text}\n'
    (stacks / f"rank-{rank}.txt").write_text(f"rank {rank} (node node-000, pid {pid}), iteration 110\n\n{frame}")
    for other in range(4):
        if other != rank:
            head = f"rank {other} (node node-000, pid {900 + other}), waits\n\n"
            (stacks / f"rank-{other}.txt").write_text(f'{head}  File "/code/train.py", line 9 in all_reduce{text}\n')
    (failures / f"rank-{rank}.txt").write_text(f"Traceback (most recent call last):\nRuntimeError: out of luck{text}\n")
    (diagnoses / f"job-1-cycle-{cycle}-rank-{rank}.json").write_text('{"finding":"persistent"}')


def write_journal(run_dir: Path, *, text: str = "", is_over: bool = True) -> Path:
    """Write the journal of a run of two ranks in which rank 1 dies once; return the run directory."""
    incident = {
        "kind": "worker_died", "job": "job-1", "cycle": 0, "node": "n0", "rank": 1, "pid": 4711, "exit_code": -9,
        "iteration": 40, "evidence": {"summary": f"out of luck{text}"},
    }  # fmt: skip
    decision = {"rung": 2, "reason": f"restarting the workers{text}"}
    agent, ranks = ("agent", None), [("rank-0", 0), ("rank-1", 1)]
    cycle = {"node_rank": 0, "ranks": [0, 1], "pids": [4710, 4711], "world_size": 2}
    session = {"world_size": 2, "launcher": "outlast"}
    ended = {"reason": "a rank died", "iterations": {"0": 40, "1": 40}}
    kind = EventKind
    events: list[tuple[float, EventKind, list[tuple[str, int | None]], int | None, int | None, dict[str, Any]]] = [
        (0, kind.JOB_STARTED, [agent], None, None, {"command": ["train.py"], "version": "0", "machine": "m"}),
        (2, kind.CYCLE_STARTED, [agent], 0, None, cycle),
        (3, kind.SESSION_STARTED, ranks, 0, None, session),
        (10, kind.STEPS_STARTED, ranks, 0, 0, {}),
        (11, kind.PROGRESS, ranks, 0, 1, {"step_s": 1.0, "loss": 3.0}),
        (50, kind.INCIDENT, [agent], 0, None, {"incident": incident}),
        (51, kind.CYCLE_ENDED, [agent], 0, None, ended),
        (52, kind.DECISION, [("coordinator", None)], 0, None, {"verdict": decision, "incident": incident}),
        (55, kind.CYCLE_STARTED, [agent], 1, None, cycle),
        (56, kind.SESSION_STARTED, ranks, 1, None, session),
        (60, kind.STEPS_STARTED, ranks, 1, 0, {}),
        (61, kind.PROGRESS, ranks, 1, 1, {"step_s": 1.0, "loss": 3.0}),
        (100, kind.PROGRESS, ranks, 1, 40, {"step_s": 1.0, "loss": 2.0}),
    ]
    if is_over:
        events += [
            (100, kind.SESSION_ENDED, ranks, 1, 40, {"exit_code": 0}),
            (101, kind.JOB_ENDED, [agent], None, None, {"exit_code": 0, "reason": "the run is finished"}),
        ]
    files: dict[str, list[bytes]] = {}
    for at_s, what, writers, number, iteration, data in events:
        for proc, rank in writers:
            wall_ns = 1_795_648_803_000_000_000 + int(at_s * 1e9)
            event = Event(
                kind=what, time=as_iso(wall_ns), wall_ns=wall_ns, mono_ns=int(at_s * 1e9), run_id="written",
                job="job-1", node="n0", proc=proc, cycle=number, rank=rank, iteration=iteration, data=data,
            )  # fmt: skip
            files.setdefault(proc, []).append(msgspec.json.encode(event))
    (run_dir / "journal").mkdir(parents=True)
    for proc, lines in files.items():
        (run_dir / "journal" / f"job-1-n0-{proc}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return run_dir
