"""Train a small model while every rank's speed is compared; one rank becomes slow and is identified.

    python examples/straggler_detection/straggler_detection_example.py

starts four ranks on this machine with ``outlast run``. Any launcher does::

    torchrun --nproc-per-node=8 examples/straggler_detection/straggler_detection_example.py --report-interval 60

The README describes what to look for.
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast import StragglerDetectionConfig
from outlast.env import read_worker
from outlast.straggler import StragglerDetector

WIDTH, BATCH = 128, 64


def train(args: argparse.Namespace) -> None:
    """Train on this rank."""
    place = read_worker()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optim = torch.optim.AdamW(model.parameters())

    config = StragglerDetectionConfig(
        report_time_interval=args.report_interval,
        num_gpu_perf_scores_to_print=5,
        stop_if_detected=args.stop,
        profile_kernels=args.profile_kernels,
    )
    detector = StragglerDetector(config)
    detector.watch(optim)
    for iteration in range(args.iterations):
        with detector.step(iteration):
            with detector.section("data", on_device=False):
                batch = torch.randn(BATCH, WIDTH, device=device)
            with detector.section("forward"):
                loss = (model(batch) - batch).square().mean()
                time.sleep(args.forward_ms / 1e3)  # simulates a larger model
                if place.global_rank == args.slow_rank and iteration >= args.slow_from:
                    time.sleep((args.factor - 1) * args.forward_ms / 1e3)
            with detector.section("backward"):  # includes the all-reduce: all ranks wait for the slowest
                optim.zero_grad()
                loss.backward()
            optim.step()
        report = detector.report_if_due()
        if report is not None and report.should_stop:
            # All ranks have the same report, so all of them exit here; a real training would save first.
            break
    detector.close()
    dist.destroy_process_group()
    if place.global_rank == 0:
        print(f"done after {iteration + 1} iterations", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--report-interval", type=float, default=1.0, help="seconds from one report to the next")
    parser.add_argument("--forward-ms", type=float, default=8.0, help="how long a sound rank's forward takes at least")
    parser.add_argument("--slow-rank", type=int, help="the rank that becomes slow, 2 or the last; -1: none does")
    parser.add_argument("--slow-from", type=int, default=300, help="iteration from which on it is slow")
    parser.add_argument("--factor", type=float, default=1.6, help="times as long as a sound rank's its forward takes")
    parser.add_argument("--stop", action="store_true", help="stop when a rank below the threshold is named")
    parser.add_argument("--profile-kernels", action="store_true", help="compare kernels too")
    args = parser.parse_args()
    if read_worker().launcher == "python":
        outlast = str(Path(sys.executable).with_name("outlast"))
        os.execv(outlast, [outlast, "run", "--standalone", "--nproc-per-node=4", __file__, *sys.argv[1:]])
    last = read_worker().world_size - 1
    if args.slow_rank is None:
        args.slow_rank = min(2, last)
    if not -1 <= args.slow_rank <= last:
        parser.error(f"--slow-rank {args.slow_rank}: the ranks are 0 to {last}; name one of them, or -1 for none")
    logging.basicConfig(level=logging.INFO if read_worker().global_rank == 0 else logging.WARNING, format="%(message)s")
    train(args)


if __name__ == "__main__":
    main()
