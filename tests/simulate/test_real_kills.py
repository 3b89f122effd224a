"""The simulation compared with a real run: it predicts the goodput of a run whose ranks are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from outlast import clock
from outlast.goodput import Ledger
from outlast.incidents import EventKind
from outlast.policy.recovery_policy import Limits
from outlast.simulate.run import simulate
from outlast.simulate.scenario import RecoveryCosts, Scenario
from outlast.testing import Cluster

SCRIPT = """
import sys, time
import torch, outlast

model = torch.nn.Linear(64, 64)
saves = outlast.CheckpointConfig(directory=sys.argv[1], save_interval=10**6, non_persistent_save_interval=5)
run = outlast.init(outlast.Config(checkpoint=saves))
state = {"model": model}
for iteration in run.steps(state, total=10**6):
    time.sleep(0.02)
"""
MANY = 100_000
PARTS = ("detection", "restart", "rendezvous", "load", "start_up")
MEAN_S = 2.0
"""Mean time between two kills."""


def train_under_kills(folder: Path, num_kills: int, seed: int) -> Ledger:
    """Train on two nodes of one rank while ranks are killed; return the ledger."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    draw = Random(seed)
    options = [f"--max-restarts={MANY}", f"--ft-max-no-progress-cycles={MANY}", "--ft-max-node-faults=0"]
    with Cluster(
        script, str(folder / "ckpt"), run_dir=folder / "run", num_nodes=2, nproc_per_node=1, options=options
    ) as cluster:
        assert cluster.wait_for(lambda event: event.kind == EventKind.PROGRESS, 120.0) is not None
        next_s = clock.now_s()
        for _ in range(num_kills):
            next_s += draw.expovariate(1 / MEAN_S)
            time.sleep(max(0.0, next_s - clock.now_s()))  # the time between two kills, not a wait for an event
            with contextlib.suppress(ProcessLookupError):
                os.kill(cluster.worker_pid(draw.randrange(2)), signal.SIGKILL)
        return Ledger.read(folder / "run")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_the_simulation_predicts_the_goodput_under_kills(tmp_path: Path) -> None:
    """With costs measured over 25 kills the simulation predicts the share of productive time under 200 other kills
    within 5 percentage points."""
    known = train_under_kills(tmp_path / "known", 25, seed=1)
    incident_parts = [one.parts for one in known.incidents if one.recovered_s is not None]
    costs = {name: fmean(parts.get(name, 0.0) for parts in incident_parts) for name in PARTS}
    stalls = [save.stall_s for save in known.saves]
    durations = [save.duration_s for save in known.saves if save.duration_s is not None]
    steps = [step.step_s for step in known.steps if step.step_s]
    real = train_under_kills(tmp_path / "real", 200, seed=2)
    scenario = Scenario(
        num_ranks=2,
        ranks_per_node=1,
        num_spares=0,
        duration_s=real.wall_s,
        step_s=fmean(steps),
        failure_every_s=real.wall_s / len(real.incidents),  # a kill of a dead worker is not an incident
        process_share=1.0,
        hang_share=0.0,
        node_share=0.0,
        rack_share=0.0,
        interval_iterations=5,
        global_interval_s=0.0,
        costs=RecoveryCosts(
            save_stall_s=fmean(stalls),
            save_s=fmean(durations),
            detection_s=costs["detection"],
            restart_s=costs["restart"],
            rendezvous_s=costs["rendezvous"],
            load_memory_s=costs["load"],
            start_up_s=costs["start_up"],
        ),
        limits=Limits(max_restarts=MANY, max_no_progress_cycles=MANY, max_node_faults=0),
    )
    predicted = fmean(simulate(scenario, seed).ettr for seed in range(20))
    assert real.ettr is not None
    print(f"real {real.ettr:.4f}, simulated {predicted:.4f}, {len(real.incidents)} incidents", file=sys.stderr)
    assert len(real.incidents) >= 150, "some kills hit a dead worker, or a start that had not begun"
    assert abs(predicted - real.ettr) < 0.05
