"""Save to each node's own disk with a copy on another node, lose a node, and resume from the copy.

    python examples/checkpointing/replicated.py /tmp/replicated

starts two nodes and a spare on this machine, kills the agent of one node in the middle of training, and deletes its
disk. The spare takes its rank; what that rank had comes from the other node, and no shared folder is needed.

On real machines each of them runs the same line, and what is below ``train`` is the whole script::

    outlast run --nnodes=2:3 --nproc-per-node=8 --rdzv-endpoint=$HEAD:29400 --rdzv-id=my-run \\
        examples/checkpointing/replicated.py --train /nvme/my-run
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import outlast
from outlast.incidents import EventKind
from outlast.journal import Event
from outlast.testing import Cluster

ITERATIONS, SAVE_INTERVAL, WIDTH = 1000, 20, 256


def _is_replicated(event: Event) -> bool:
    """Return whether a checkpoint of iteration 40 or later is on a second node."""
    if event.kind != EventKind.SAVE_COMMITTED or event.iteration is None:
        return False
    return event.iteration >= 40 and "replica" in event.data["tiers"]


def train(local_directory: str) -> None:
    """Train on this rank; every 20 iterations all ranks save to their nodes, and each node to another."""
    checkpoint = outlast.CheckpointConfig(
        local_directory=local_directory,  # each node creates a folder with its name there
        non_persistent_save_interval=SAVE_INTERVAL,
        replication_factor=2,  # two nodes hold each shard; this is the default
    )
    run = outlast.init(outlast.Config(checkpoint=checkpoint, seed=0))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(run.device)
    optim = torch.optim.AdamW(model.parameters())
    for _ in run.steps({"model": model, "optim": optim}, total=ITERATIONS):
        batch = torch.randn(64, WIDTH, device=run.device)
        loss = (model(batch) - batch).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()


def lose_a_node(folder: Path) -> int:
    """Run ``train`` on two nodes with a spare, and lose one; return an exit code."""
    disks = folder / "disks"
    script = (__file__, "--train", str(disks))
    with Cluster(*script, run_dir=folder / "run", num_nodes=2, num_spares=1, nproc_per_node=1) as cluster:
        cluster.wait_for(_is_replicated, timeout_s=60)
        lost = next(e.node for e in cluster.events() if e.kind == EventKind.CYCLE_STARTED and 1 in e.data["ranks"])
        cluster.agent(lost).kill()
        shutil.rmtree(disks / lost)
        print(f"{lost}, which carried rank 1, is gone, its memory and its disk too", flush=True)
        codes = dict(zip([agent.name for agent in cluster.agents], cluster.wait(timeout_s=60), strict=True))
        restored = [event for event in cluster.events() if event.kind == EventKind.RESTORED]
    for event in sorted(restored, key=lambda event: event.rank or 0):
        read = ", ".join(f"{num_bytes:,} bytes from {tier}" for tier, num_bytes in event.data["bytes_read"].items())
        print(f"rank {event.rank} on {event.node} resumed from iteration {event.iteration}: {read}")
    print("exit codes: " + ", ".join(f"{name} {code}" for name, code in codes.items()))
    return max(code for name, code in codes.items() if name != lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where disks, journal and logs go; with --train, the local directory")
    parser.add_argument("--train", action="store_true", help="be one of the ranks")
    args = parser.parse_args()
    if args.train:
        train(str(args.folder))
    else:
        sys.exit(lose_a_node(args.folder))


if __name__ == "__main__":
    main()
