"""Save without stopping: training continues between the copy of its state and the commit.

Runs unchanged with one or many ranks::

    python examples/checkpointing/asynchronous.py /tmp/checkpoints
    outlast run --nproc-per-node 2 examples/checkpointing/asynchronous.py /tmp/checkpoints

What to look for: iterations between ``iteration 100`` and the line ``saved iteration 100 to global``, which says what
is saved, to which tiers, and how long that took.
Started again with the same folder and more ``--iterations``, it resumes from the newest checkpoint.
"""

import argparse

import torch
from torch import nn

import outlast

VOCABULARY, WIDTH = 128_000, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="where checkpoints are saved, and loaded from")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--save-interval", type=int, default=100)
    args = parser.parse_args()

    # async_save is the default: save() returns once the state is copied, and a separate process does the rest.
    # overlap_staging=True would hide most of the copy, too.
    checkpoint = outlast.CheckpointConfig(directory=args.directory, save_interval=args.save_interval)
    run = outlast.init(outlast.Config(checkpoint=checkpoint, seed=0))
    words = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)  # as in fine-tuning: large, and not trained
    model = nn.Sequential(words, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)).to(run.device)
    optim = torch.optim.AdamW(model[1:].parameters())

    for iteration in run.steps({"model": model, "optim": optim}, total=args.iterations):
        batch = torch.randint(VOCABULARY, (64,), device=run.device)
        loss = nn.functional.cross_entropy(model(batch), batch % 2)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if run.global_rank == 0 and (iteration + 1) % 10 == 0:
            print(f"iteration {iteration + 1:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
