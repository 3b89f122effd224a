"""Train, save and exit on a notice, and resume there.

    python examples/preemption/leave_in_time.py /tmp/leave &
    kill -TERM %1                    # or: touch /tmp/leave/please-leave
    python examples/preemption/leave_in_time.py /tmp/leave

The README describes what to look for. With several ranks, on several machines, it is the same script::

    outlast run --nnodes=2 --nproc-per-node=8 --rdzv-endpoint=$HEAD:29400 \\
        examples/preemption/leave_in_time.py /shared/leave
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import outlast


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Numbers, made by the loader's workers."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), index % 17 / 17)


def main() -> None:
    """Train until a notice comes, or to the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where checkpoints and the run directory go")
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--timeout", type=float, default=60, help="seconds from the first notice to the end")
    parser.add_argument("--workers", type=int, default=2, help="the data loader's")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    config = outlast.Config(
        checkpoint=outlast.CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=200),
        preemption=outlast.PreemptionConfig(
            exit_signal="SIGTERM,SIGUSR1",
            exit_signal_handler_for_dataloader=True,  # a signal to the whole process group leaves the workers alone
            shutdown_timeout=arguments.timeout,
            notice_file=str(folder / "please-leave"),
            poll_interval=0.5,
        ),
        run_dir=str(folder / "run"),
        seed=0,
    )
    torch.set_num_threads(1)
    with outlast.init(config) as run:
        model = nn.Linear(32, 32).to(run.device)
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=arguments.workers)
        batches = iter(loader)
        begun_at = None
        for iteration in run.steps({"model": model, "optim": optim}, total=arguments.iterations):
            if begun_at is None:
                begun_at = iteration
                print(f"rank {run.global_rank} begins at iteration {iteration}", flush=True)
            batch = next(batches).to(run.device)
            optim.zero_grad()
            (model(batch) - batch).square().mean().backward()
            optim.step()
        print(f"rank {run.global_rank} is done after {run.iteration} iterations", flush=True)


if __name__ == "__main__":
    main()
