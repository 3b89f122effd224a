"""Train a small byte-level GPT on the Python standard library's own sources.

Runs unchanged, on CPUs or GPUs, with one or many ranks::

    outlast run --nproc-per-node 4 examples/train_gpt.py --checkpoint-dir /tmp/gpt
    torchrun --nproc-per-node 4 examples/train_gpt.py --checkpoint-dir /tmp/gpt
    python examples/train_gpt.py --checkpoint-dir /tmp/gpt

Started again with the same folder, it resumes from the newest checkpoint. However often it was killed and restarted in
between, and whatever NaNs and flipped bits befell it, the result is bit-identical to that of an undisturbed run with as
many ranks. ``--config outlast.toml`` sets more than a folder: two tiers, comparing replicas, a plan of faults.
"""

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path

import torch
from torch import nn

import outlast

BATCH, CONTEXT, DIM, HEADS, LAYERS, VOCABULARY = 6, 96, 96, 4, 4, 256
TEXT_BYTES = 2_000_000


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_attention(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Predict the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text() -> torch.Tensor:
    """Return the first bytes of the standard library's sources, sorted by name."""
    text, folder = bytearray(), Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def draw_batch(text: torch.Tensor, seed: int, iteration: int, rank: int) -> torch.Tensor:
    """Return a batch that depends on the arguments alone, so that a restart repeats it."""
    numbers = torch.Generator().manual_seed((seed << 48) + (iteration << 16) + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=numbers)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def digest(value: object) -> str:
    """Return the SHA-256 of a state's names, numbers and tensors' bytes."""
    sha = hashlib.sha256()

    def add(part: object) -> None:
        if isinstance(part, dict):
            for name in sorted(part, key=str):
                sha.update(str(name).encode())
                add(part[name])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            sha.update(part.cpu().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())

    add(value)
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--checkpoint-dir", help="where checkpoints are saved, and loaded from: a path or a URL")
    parser.add_argument("--save-interval", type=int, default=20, help="iterations between two checkpoints")
    parser.add_argument("--config", help="instead of these two: outlast's settings, a .toml, .yaml or .json file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write digests of the result to this JSON file")
    args = parser.parse_args()

    saves = None
    if args.checkpoint_dir:
        saves = outlast.CheckpointConfig(directory=args.checkpoint_dir, save_interval=args.save_interval)
    run = outlast.init(args.config or outlast.Config(checkpoint=saves))
    # One thread per rank: sums are split, and so rounded, by the number of threads, which differs between launchers.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text = read_text()
    model = GPT().to(run.device)
    ddp = model
    if run.world_size > 1:
        ddp = nn.parallel.DistributedDataParallel(model)
        # DDP sorts its buckets again after a process's first backward pass, and a gradient's place in them decides in
        # which order the ranks' shares are added. So that restarts change no bit, the first pass is one for nothing.
        ddp(text[None, :CONTEXT].long().to(run.device)).sum().backward()
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, args.iterations, eta_min=3e-4)
    state = {"model": ddp, "optim": optim, "sched": sched, "losses": []}

    for iteration in run.steps(state, total=args.iterations):
        for attempt in run.attempts():
            batch = draw_batch(text, args.seed, iteration, run.global_rank).to(run.device)
            loss = nn.functional.cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optim.zero_grad()
            loss.backward()
            attempt.validate(loss)
        optim.step()
        sched.step()
        state["losses"].append(loss.item())
        if run.global_rank == 0 and (iteration + 1) % 10 == 0:
            print(f"iteration {iteration + 1:5d}  loss {loss.item():.4f}", flush=True)

    if run.global_rank == 0:
        result = {
            "iterations": run.iteration,
            "final_loss": state["losses"][-1],
            "weights": digest(model.state_dict()),
            "optimizer": digest(optim.state_dict()),
            "losses": digest(state["losses"]),
        }
        print(f"final loss {result['final_loss']:.4f} after {run.iteration} iterations")
        if args.out:
            Path(args.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
