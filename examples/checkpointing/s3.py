"""Save to an object store: any URL that fsspec knows takes the place of a folder.

    python examples/checkpointing/s3.py s3://bucket/my-run
    outlast run --nproc-per-node 8 examples/checkpointing/s3.py s3://bucket/my-run --local-directory /nvme/my-run
    python examples/checkpointing/s3.py gs://bucket/my-run

Credentials and endpoints are the store's own: for S3 what ``aws`` takes (``AWS_PROFILE``, ``~/.aws``, the machine's
role), for GCS what ``gcloud`` takes; another endpoint, MinIO for example, is ``FSSPEC_S3_ENDPOINT_URL=http://...``.
Needs ``pip install s3fs`` (or ``gcsfs``). Started again with the same URL, it resumes from the newest checkpoint.
"""

import argparse

import torch
from torch import nn

import outlast

WIDTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="s3://bucket/run, gs://bucket/run, or a path")
    parser.add_argument("--local-directory", help="a folder on each node's own disk, for saves that happen more often")
    parser.add_argument("--iterations", type=int, default=40)
    args = parser.parse_args()

    checkpoint = outlast.CheckpointConfig(
        directory=args.directory,
        save_interval=20,  # to all tiers, including the object store
        local_directory=args.local_directory,
        non_persistent_save_interval=5 if args.local_directory else 0,  # to node-local tiers: disks and memory
        most_recent_k=3,  # the object store keeps the newest three ...
        save_retain_interval=1000,  # ... and every thousandth iteration permanently
    )
    run = outlast.init(outlast.Config(checkpoint=checkpoint, seed=0))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(run.device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for iteration in run.steps({"model": model, "optim": optim}, total=args.iterations):
        batch = torch.randn(4, WIDTH, device=run.device)
        loss = (model(batch) - batch).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        if run.global_rank == 0 and (iteration + 1) % 10 == 0:
            print(f"iteration {iteration + 1:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
