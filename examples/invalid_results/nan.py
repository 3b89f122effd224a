"""Inject a NaN and diagnose it: a transient one, a bad batch, or a broken device.

    python examples/invalid_results/nan.py /tmp/nan --plant transient
    python examples/invalid_results/nan.py /tmp/nan --plant bad-batch
    python examples/invalid_results/nan.py /tmp/nan --plant broken-device

starts a node and a spare on this machine. The README describes what to look for. On real machines each of them runs the
same line, and what is below ``train`` is the whole script::

    outlast run --nnodes=1:2 --nproc-per-node=8 --rdzv-endpoint=$HEAD:29400 --rdzv-id=my-run \\
        examples/invalid_results/nan.py --train /shared/my-run
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import outlast
from outlast.chaos import Fault, FaultPlan
from outlast.env import read_worker
from outlast.incidents import Event, EventKind, IncidentKind
from outlast.testing import Cluster

ITERATIONS, STRUCK, WIDTH = 30, 15, 64
FAULTS = ("none", "transient", "bad-batch", "broken-device")


def draw(plant: str) -> Iterator[torch.Tensor]:
    """Yield batches forever; the same ones in each process, so that a restart only skips."""
    for number in itertools.count():
        batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))
        if plant == "bad-batch" and number == STRUCK:
            batch[3, 5] = float("nan")
        yield batch


def train(folder: Path, plant: str) -> None:
    """Train on this rank; each result is validated before the optimizer's step."""
    config = outlast.Config(
        checkpoint=outlast.CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=10),
        fault_plan=write_plan(folder, plant),
        seed=0,
    )
    with outlast.init(config) as run:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)).to(run.device)
        optim = torch.optim.AdamW(model.parameters())
        batches: Iterator[torch.Tensor] | None = None
        for iteration in run.steps({"model": model, "optim": optim}, total=ITERATIONS):
            batches = batches or itertools.islice(draw(plant), iteration, None)
            for attempt in run.attempts(batches):  # one; a second one after an invalid result
                batch = attempt.next_batch().to(run.device)
                optim.zero_grad()
                loss = (model(batch) - batch).square().mean()
                loss.backward()
                attempt.validate(loss)
            optim.step()
        if run.global_rank == 0:
            print(f"trained {run.iteration} iterations, checksum {checksum(model)}", flush=True)


def write_plan(folder: Path, plant: str) -> str | None:
    """Write the fault plan; return the settings file that names it."""
    place = read_worker()
    if plant == "transient":
        fault = Fault(kind="nan", target="activation", iteration=STRUCK, rank=0)
    elif plant == "broken-device":
        broken = folder / "broken-node"  # the one that trains first; the spare is healthy
        if place.cycle == 0:
            broken.write_text(place.node)
        fault = Fault(kind="nan", target="activation", iteration=STRUCK, node=broken.read_text(), persistent=True)
    else:
        return None
    path = folder / f"faults-{place.cycle}-{place.global_rank}.toml"
    path.write_text(FaultPlan(faults=(fault,)).to_toml())
    return str(path)


def checksum(model: nn.Module) -> str:
    """Return a digest of the weights."""
    return float(sum(weight.double().sum().item() for weight in model.parameters())).hex()


def play(folder: Path, plant: str) -> int:
    """Run ``train`` on a node, with a spare; return the run's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    script = (__file__, "--train", str(folder), "--plant", plant)
    with Cluster(*script, run_dir=folder / "run", num_nodes=1, num_spares=1, nproc_per_node=1) as cluster:
        for node in ("node-0", "node-1"):
            cluster.wait_for(partial(has_joined, node), timeout_s=60)
        (folder / "go").touch()  # the spare has joined: training may begin
        code = max(cluster.wait(timeout_s=60))
        events, outputs = cluster.events(), "".join(agent.output() for agent in cluster.agents)
    for event in events:
        if event.kind == EventKind.INCIDENT and event.data["incident"]["kind"] == IncidentKind.INVALID_RESULT:
            print(f"found:   {event.data['incident']['evidence']['summary']}")
        elif event.kind == EventKind.DECISION:
            print(f"verdict: {event.data['verdict']['reason']}")
    print("".join(line + "\n" for line in outputs.splitlines() if line.startswith("trained")), end="")
    print(f"exit code {code}, {sum(event.kind == EventKind.CYCLE_STARTED for event in events)} cycles")
    return code


def has_joined(node: str, event: Event) -> bool:
    """Return whether an event reports that a node joined."""
    return event.kind == EventKind.NODE_JOINED and event.data["name"] == node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for checkpoints, journal and logs")
    parser.add_argument("--plant", choices=FAULTS, default="transient", help="what goes wrong in iteration 15")
    parser.add_argument("--train", action="store_true", help="be one of the ranks")
    args = parser.parse_args()
    if args.train:
        end = time.monotonic() + 60
        while read_worker().cycle == 0 and not (args.folder / "go").exists() and time.monotonic() < end:
            time.sleep(0.02)
        train(args.folder, args.plant)
    else:
        sys.exit(play(args.folder, args.plant))


if __name__ == "__main__":
    main()
