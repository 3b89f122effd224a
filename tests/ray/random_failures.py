"""Seeded random sequences of failures, each run on a group of real actors that recovers from them.

Run as a script with seeds as arguments: starts one Ray cluster of two nodes, runs one sequence after the other and
prints a line of JSON for each. A group serves several sequences: each continues the training of the previous one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ray.cluster_utils import Cluster
from ray_machines import leaked, run_ray
from ray_trainer import Trainer, batch_of, plan_fault, weights_after

from outlast import CheckpointConfig, FaultToleranceConfig, OutlastError, clock
from outlast.errors import ActorFailed, DeadlineExceeded, RolledBack, SparesExhausted
from outlast.ray import ActorGroup, RecoveryConfig

NUM_STEPS = 6
NUM_SPARES = 2
LIMIT_S = 120.0
"""Time limit of a sequence, which takes less than a second without failures."""
RECOVERY = RecoveryConfig(
    ping_interval=0.2,
    ping_timeout=3.0,
    examine_timeout=0.7,
    abort_timeout=4.0,
    join_timeout=30.0,
    spare_wait=30.0,
    max_rounds=5,
    max_recoveries=5,
)
SECTION_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One failure."""

    kind: str
    """``kill``, ``stop``, ``sleep``, ``exception``, or ``node``: all actors of the second node, and the node."""
    where: str
    """A place in ``Trainer.train_step``; ``setup`` or ``regroup``: during a recovery; ``spare``, or ``outside``."""
    step: int
    """Step of the sequence, from 1."""
    rank: int = 0
    after_s: float = 0.0
    """Seconds after the begin of the step, for failures from outside."""


def draw(seed: int) -> tuple[Event, ...]:
    """Return a sequence of one to four failures."""
    rng = random.Random(seed)
    events: list[Event] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind = rng.choice(("kill",) * 4 + ("exception",) * 2 + ("stop", "sleep"))
        step, rank, luck = rng.randrange(1, NUM_STEPS + 1), rng.randrange(4), rng.random()
        where = rng.choice(("begin", "middle", "before_update", "update", "after_update", "end"))
        if events and luck < 0.3:  # at the same time
            step = events[-1].step
        elif events and luck < 0.5:  # within a recovery
            where = rng.choice(("setup", "regroup"))
            kind = rng.choice(("kill", "kill", "exception"))
        elif luck > 0.94:
            kind, where = "node", "outside"
        elif luck > 0.86:
            kind, where = rng.choice(("kill", "stop")), rng.choice(("spare", "outside"))
        after_s = round(rng.uniform(0, 0.05), 3) if where in ("outside", "spare") else 0.0
        events.append(Event(kind=kind, where=where, step=step, rank=rank, after_s=after_s))
    return tuple(events)


class Stage:
    """The cluster and the group on which sequences run."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.node: Any = None
        self.group: ActorGroup | None = None
        self.pids: set[int] = set()
        """Pids of all actors that the group has had."""

    def prepare(self) -> ActorGroup:
        """Return a group of 4 actors and their spares on two nodes."""
        if self.node is None:
            self.node = self.cluster.add_node(num_cpus=4, num_gpus=0, object_store_memory=100 << 20)
        if self.group is None:
            self.group = ActorGroup(
                Trainer,
                mesh={"dp": 2, "tp": 2},
                args=(str(self.folder),),
                num_spares=NUM_SPARES,
                placement="SPREAD",
                checkpoint=CheckpointConfig(
                    directory=str(self.folder / "global"),
                    save_interval=2,
                    local_directory=str(self.folder / "local"),
                    non_persistent_save_interval=1,
                ),
                fault_tolerance=FaultToleranceConfig(
                    rank_section_timeouts={"step": SECTION_S},
                    rank_out_of_section_timeout=SECTION_S,
                    num_warmup_iterations=0,
                ),
                recovery=RECOVERY,
            )
        return self.group

    def lose_node(self) -> None:
        """Kill the second node with all of its processes."""
        node, self.node = self.node, None
        if node is not None:
            self.cluster.remove_node(node, allow_graceful=False)

    def close_group(self) -> list[str]:
        """Close the group; return its leaked resources."""
        group, self.group = self.group, None
        if group is None:
            return []
        self.note_pids(group)
        group.close()
        pids, self.pids = self.pids, set()
        return leaked(pids)

    def note_pids(self, group: ActorGroup) -> None:
        """Record the pids of actors and spares."""
        self.pids |= {*group.pids.values(), *group.spares}


def run_sequence(seed: int, stage: Stage) -> dict[str, Any]:
    """Run one sequence and classify its end."""
    events = draw(seed)
    group = stage.prepare()
    for path in stage.folder.glob("*.fault"):
        path.unlink()  # unused faults of the previous sequence
    begin_s, first, num_recoveries = clock.now_s(), group.iteration or 0, len(group.recoveries)
    found: dict[str, Any] = {"verdict": "converged", "why": ""}
    try:
        outside = plan(stage, events, first)
        weights = None
        while weights is None:  # a failure after the last step may roll back, too
            train(group, stage, outside, first, begin_s + LIMIT_S)
            pending = group.submit("weights", dispatch="pass_through")
            with contextlib.suppress(RolledBack):
                weights = pending.result(max(1.0, begin_s + LIMIT_S - clock.now_s()))
        expected = weights_after(first + NUM_STEPS)
        if not all(torch.equal(one, expected[rank % 2]) for rank, one in enumerate(weights)):
            found["verdict"] = "torn"
    except (ActorFailed, SparesExhausted) as error:
        found = {"verdict": "stopped", "why": f"{type(error).__name__}: {error}"}
    except DeadlineExceeded as error:
        found = {"verdict": "hung", "why": str(error)}
    except OutlastError as error:
        found = {"verdict": "untyped", "why": f"{type(error).__name__}: {error}"}
    seconds = clock.now_s() - begin_s
    left: list[str] = []
    if found["verdict"] != "converged" or any(event.kind == "node" for event in events):
        left = stage.close_group()
    else:
        stage.note_pids(group)
    if left:
        found = {"verdict": "leaked", "why": "; ".join(left)}
    reports = [report.describe() for report in group.recoveries[num_recoveries:]]
    return {
        "seed": seed,
        "events": [asdict(event) for event in events],
        "seconds": round(seconds, 2),
        **found,
        "recoveries": len(reports),
        "reports": reports if found["verdict"] not in ("converged",) else [],
    }


def plan(stage: Stage, events: tuple[Event, ...], first: int) -> list[Event]:
    """Plan the faults that actors inject; return the failures that come from outside."""
    for event in events:
        if event.where not in ("outside", "spare"):
            at = -1 if event.where in ("setup", "regroup") else first + event.step
            plan_fault(stage.folder, event.where, at, event.rank, event.kind)
    return [event for event in events if event.where in ("outside", "spare")]


def train(group: ActorGroup, stage: Stage, outside: list[Event], first: int, deadline_s: float) -> None:
    """Train for the sequence's steps, repeating steps after a rollback; each failure occurs once."""
    while (iteration := (group.iteration or 0) + 1) <= first + NUM_STEPS:
        due = [event for event in outside if first + event.step <= iteration]
        timers = [threading.Timer(event.after_s, cause_failure, (group, stage, event)) for event in due]
        outside[:] = [event for event in outside if event not in due]
        for timer in timers:
            timer.start()
        try:
            pending = group.submit("train_step", batch_of(iteration), iteration)
            pending.result(max(1.0, deadline_s - clock.now_s()))
        except RolledBack:
            continue
        finally:
            for timer in timers:
                timer.join()


def cause_failure(group: ActorGroup, stage: Stage, event: Event) -> None:
    """Cause a failure from outside."""
    if event.kind == "node":
        stage.lose_node()
        return
    pids = list(group.spares) if event.where == "spare" else list(group.pids.values())
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[event.rank % len(pids)], getattr(signal, f"SIG{event.kind.upper()}"))


def main() -> None:
    """Run the sequences of the given seeds; exit with 1 if one ended in a way that is not allowed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the cluster, too
    logging.basicConfig(level=os.environ.get("LEVEL", "ERROR"))
    is_well = True
    with run_ray() as cluster, TemporaryDirectory(prefix="outlast-failures-") as name:
        stage = Stage(cluster, Path(name))
        for seed in map(int, sys.argv[1:]):
            outcome = run_sequence(seed, stage)
            is_well &= outcome["verdict"] in ("converged", "stopped")
            print(json.dumps(outcome), flush=True)
        left = stage.close_group()
        print(json.dumps({"seed": None, "verdict": "leaked" if left else "clean", "why": "; ".join(left)}), flush=True)
    sys.exit(0 if is_well and not left else 1)


if __name__ == "__main__":
    main()
