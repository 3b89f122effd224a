"""PPO on CartPole with actors that may die, hang or raise at any time.

    python examples/ray_ppo.py
    python examples/ray_ppo.py --fail kill@40,stop@80,exception@120
    python examples/ray_ppo.py --fail kill@40,stop@80,exception@120 --compare

Two data shards of two tensor-parallel actors each, and two spares. ``kill`` ends a whole data shard while the other
waits for it in an all-reduce, ``stop`` stops an actor's process, ``exception`` raises in one. What was lost is
replaced, what survived is kept, and with ``--compare`` weights and returns must be those of an undisturbed run, bit for
bit. For that, training must be a function of its state: whatever is drawn is drawn from the iteration.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import nn

import outlast
import outlast.ray

MESH = {"dp": 2, "tp": 2}
EPISODES, EPOCHS, MINIBATCHES, MICROBATCHES = 16, 4, 4, 2
STEPS = EPOCHS * MINIBATCHES  # optimizer steps for each round of episodes
UNITS, DISCOUNT, CLIP, RATE, MAX_NORM = 64, 0.99, 0.2, 0.01, 0.5
STRUCK = {"kill": {"dp": 1}, "stop": {"dp": 0, "tp": 1}, "exception": {"dp": 1, "tp": 1}}  # the rank that fails

Episodes = dict[str, torch.Tensor]


class SumOverSlices(torch.autograd.Function):
    """Sum over the tensor-parallel peers; each one's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the sum, the same on all peers."""
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the sum."""
        return gradients[0], None


class Policy(nn.Module):
    """One hidden layer, of which each tensor-parallel peer has some of the units; two actions and a value come out."""

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        weight, heads = torch.randn(UNITS, 4, generator=draw) / 2, torch.randn(3, UNITS, generator=draw) / 100
        self.weight = nn.Parameter(weight.chunk(parts, dim=0)[part].clone())
        self.bias = nn.Parameter(torch.zeros(UNITS // parts))
        self.heads = nn.Parameter(heads.chunk(parts, dim=1)[part].clone())
        self.offset = nn.Parameter(torch.zeros(3))  # replicated on every peer

    def forward(self, observations: torch.Tensor, peers: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the actions, and values."""
        part = torch.tanh(observations @ self.weight.T + self.bias) @ self.heads.T
        outputs = SumOverSlices.apply(part, peers) + self.offset
        return torch.log_softmax(outputs[:, :2], dim=1), outputs[:, 2]


class Trainer(outlast.ray.TrainActor):
    """Play one actor's share of the episodes, and train on its share of the samples."""

    def __init__(self, failures: dict[int, str], folder: str) -> None:
        torch.set_num_threads(1)
        self.failures, self.folder = failures, Path(folder)

    def setup(self) -> None:
        """Create this actor's slice of the model."""
        self.policy = Policy(self.place.tp, self.place.tp_size)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=RATE)

    def state(self) -> dict[str, Any]:
        """Return the state to save and load."""
        return {"policy": self.policy, "optimizer": self.optimizer}

    @torch.no_grad()
    def play(self, number: int) -> Episodes:
        """Play this shard's episodes of one round, which depend on the round and the shard alone."""
        seed = number * self.place.dp_size + self.place.dp
        draw = torch.Generator().manual_seed(seed)
        steps = []
        with closing(gymnasium.make_vec("CartPole-v1", EPISODES, "vector_entry_point")) as environments:
            observed, _ = environments.reset(seed=seed)
            alive = np.ones(EPISODES, dtype=bool)
            while alive.any():
                observations = torch.as_tensor(observed, dtype=torch.float32)
                logs, values = self.policy(observations, self.group("tp"))
                actions = torch.multinomial(logs.exp(), 1, generator=draw)
                steps.append((observations, actions[:, 0], logs.gather(1, actions)[:, 0], values, torch.tensor(alive)))
                observed, _, fallen, timed_out, _ = environments.step(actions[:, 0].numpy())
                alive &= ~(fallen | timed_out)
        observations, actions, logs, values, lived = (torch.stack(column) for column in zip(*steps, strict=True))
        returns, later = torch.zeros_like(values), torch.zeros(EPISODES)
        for step in reversed(range(len(steps))):
            later = returns[step] = lived[step] * (0.1 + DISCOUNT * later)
        columns = {"observations": observations, "actions": actions, "logs": logs, "returns": returns}
        samples = {name: column[lived] for name, column in columns.items()} | {"gains": (returns - values)[lived]}
        return samples | {"lengths": lived.sum(dim=0).float()}

    def train_step(self, batch: Episodes, iteration: int, weights: torch.Tensor) -> float:
        """Take one optimizer step with this shard's samples of a minibatch, accumulated over micro-batches."""
        with self.section("step"):
            self.optimizer.zero_grad()
            total = 0.0
            for micro, weight in zip(split(batch), weights.chunk(MICROBATCHES), strict=True):
                loss = (self.losses(micro) * weight).sum()
                loss.backward()
                total += loss.item()
            self.strike(iteration)
            self.add_up_gradients(weights.sum())
            with self.update(iteration):
                self.optimizer.step()
        self.save(iteration)
        return total

    def add_up_gradients(self, num_samples: torch.Tensor) -> None:
        """Make the gradients those of all shards' samples, and clip them by the norm of the whole model's.

        No rank gets through both sums unless all ranks got here, so that none has moved its weights if one is lost.
        """
        gradients = [parameter.grad for parameter in self.policy.parameters()]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), num_samples[None]])
        dist.all_reduce(flat, group=self.group("dp"))
        *sums, total = flat.split([*(gradient.numel() for gradient in gradients), 1])
        squares = [part.div_(total).square().sum() for part in sums]
        squares[-1] /= self.place.tp_size  # the offset is replicated on every slice
        norm = torch.stack(squares).sum()
        dist.all_reduce(norm, group=self.group("tp"))
        for gradient, part in zip(gradients, sums, strict=True):
            gradient.copy_(part.view_as(gradient) * (MAX_NORM / norm.sqrt()).clamp(max=1))

    def losses(self, samples: Episodes) -> torch.Tensor:
        """Return PPO's clipped loss of each sample, with that of its value and a bonus for entropy."""
        logs, values = self.policy(samples["observations"], self.group("tp"))
        ratio = (logs.gather(1, samples["actions"][:, None])[:, 0] - samples["logs"]).exp()
        gain = torch.minimum(ratio * samples["gains"], ratio.clamp(1 - CLIP, 1 + CLIP) * samples["gains"])
        entropy = -(logs.exp() * logs).sum(dim=1)
        return (values - samples["returns"]).square() / 2 - gain - 0.01 * entropy

    def digest(self) -> str:
        """Return a digest of this actor's weights."""
        tensors = [*self.policy.parameters()]
        tensors += [value for moments in self.optimizer.state.values() for value in moments.values()]
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]

    def strike(self, iteration: int) -> None:
        """Fail here if planned; only once, not when the call is repeated."""
        kind = self.failures.get(iteration)
        if kind is None or any(getattr(self.place, axis) != at for axis, at in STRUCK[kind].items()):
            return
        try:
            (self.folder / f"{kind}-{iteration}-{self.place.rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(0.3)  # until the others wait in the all-reduce
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError(f"planned for iteration {iteration}")


def split(batch: Episodes) -> Iterator[Episodes]:
    """Yield the micro-batches of a minibatch."""
    for columns in zip(*(column.chunk(MICROBATCHES) for column in batch.values()), strict=True):
        yield dict(zip(batch, columns, strict=True))


def minibatch(episodes: Episodes, iteration: int) -> Episodes:
    """Return the samples of one optimizer step: always the same ones for the same iteration."""
    epoch, part = divmod(iteration % STEPS, MINIBATCHES)
    draw = torch.Generator().manual_seed(iteration // STEPS * EPOCHS + epoch)
    chosen = torch.randperm(len(episodes["gains"]), generator=draw).chunk(MINIBATCHES)[part]
    return {name: column[chosen] for name, column in episodes.items() if name != "lengths"}


def train(group: outlast.ray.ActorGroup, iterations: int) -> dict[int, float]:
    """Train up to ``iterations`` optimizer steps despite failures; return the mean return of each round."""
    rounds: dict[int, Episodes] = {}
    returns, num_recoveries = {}, 0
    for step in group.steps(iterations):
        with step as iteration:
            number = iteration // STEPS
            if number not in rounds:
                episodes = outlast.ray.concat(group.run("play", number))
                gains = episodes["gains"]
                rounds[number] = episodes | {"gains": (gains - gains.mean()) / gains.std()}
                rounds.pop(number - 2, None)
                returns[number] = episodes["lengths"].mean().item()
                print(f"iteration {iteration:4}: mean return {returns[number]:5.1f}", flush=True)
            group.run("train_step", minibatch(rounds[number], iteration), iteration=iteration + 1)
        if step.rolled_back:
            print(f"went back to iteration {group.iteration}", flush=True)
        for number, report in enumerate(group.recoveries[num_recoveries:], num_recoveries + 1):
            show(number, report)
            num_recoveries = number
    return returns


def play_through(iterations: int, failures: dict[int, str], folder: Path) -> dict[str, Any]:
    """Train once, with these failures by iteration; return the result."""
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with outlast.ray.ActorGroup(
        Trainer,
        mesh=MESH,
        args=(failures, str(folder)),
        num_spares=2 if failures else 0,
        num_cpus=1,
        checkpoint=outlast.CheckpointConfig(local_directory=str(folder / "kept"), non_persistent_save_interval=1),
        run_dir=str(folder / "run"),
    ) as group:
        returns = train(group, iterations)
        digests = group.run("digest", dispatch="pass_through")
        recoveries = [outline(report) for report in group.recoveries]
    return {
        "digests": digests,
        "returns": returns,
        "recoveries": recoveries,
        "seconds": round(time.monotonic() - begun, 1),
    }


def say(text: str) -> None:
    """Print a line, in several where the terminal is too narrow for it, none of which breaks a word."""
    width, indent = shutil.get_terminal_size().columns, " " * 12
    print(
        textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False), flush=True
    )


def show(number: int, report: outlast.ray.RecoveryReport) -> None:
    """Print a recovery report."""
    say(f"recovery {number}, from a failure in {report.method}, took {report.total_s:.2f} s:")
    for lost in report.lost:
        say(f"  lost      rank {lost.rank} (pid {lost.pid}) {lost.kind}: {lost.evidence}")
    for what, ranks in (("kept", report.kept), ("replaced", report.replaced)):
        say(f"  {what:9} {', '.join(f'rank {rank} (pid {pid})' for rank, pid in sorted(ranks.items())) or 'none'}")
    say(f"  loaded    {', '.join(f'rank {rank}' for rank in report.loaded) or 'none'}: iteration {report.iteration}")
    say(f"  times     {', '.join(f'{phase} {took:.2f} s' for phase, took in report.phases_s.items())}")


def outline(report: outlast.ray.RecoveryReport) -> dict[str, Any]:
    """Return a recovery report as JSON values."""
    return {
        "lost": [{"rank": lost.rank, "kind": str(lost.kind), "evidence": lost.evidence} for lost in report.lost],
        "kept": sorted(report.kept),
        "replaced": sorted(report.replaced),
        "loaded": sorted(report.loaded),
        "seconds": round(report.total_s, 3),
        "phases": report.phases_s,
    }


def parse_failures(text: str) -> dict[int, str]:
    """Return kinds of failures by iteration, from ``kill@40,stop@80``."""
    failures = {}
    for item in filter(None, text.split(",")):
        kind, _, iteration = item.partition("@")
        if kind not in STRUCK or not iteration.isdecimal():
            raise argparse.ArgumentTypeError(f"{item!r} is not one of {', '.join(STRUCK)} with @ and an iteration")
        failures[int(iteration)] = kind
    return failures


def main() -> int:
    """Train, or train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10 * STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--fail", type=parse_failures, default={}, metavar="KIND@ITERATION,...", help="what fails when")
    parser.add_argument(
        "--compare", action="store_true", help="also train without failures; fail unless both end with the same weights"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there what happened")
    options = parser.parse_args()
    logging.getLogger("outlast").addHandler(logging.NullHandler())  # its warnings are printed below
    room = {"num_cpus": 8, "object_store_memory": 200_000_000}  # as if: the actors are small
    ray.init(**room, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    runs = {}
    with tempfile.TemporaryDirectory(prefix="ray-ppo-", ignore_cleanup_errors=True) as folder:
        if options.compare:
            print("undisturbed:")
            runs["undisturbed"] = play_through(options.iterations, {}, Path(folder, "undisturbed"))
        print(f"with failures: {', '.join(f'{kind} at {at}' for at, kind in options.fail.items()) or 'none'}")
        runs["disturbed"] = play_through(options.iterations, options.fail, Path(folder, "disturbed"))
    ray.shutdown()
    equal = all(run[what] == runs["disturbed"][what] for run in runs.values() for what in ("digests", "returns"))
    for name, run in runs.items():
        say(f"{name:12} {run['seconds']:5.1f} s, weights and moments of each rank: {' '.join(run['digests'])}")
        say(f"{'':12} mean returns {' '.join(f'{mean:.1f}' for mean in run['returns'].values())}")
    if options.compare:
        print(
            "both runs ended with the same weights, bit for bit"
            if equal
            else "the runs did NOT end with the same weights"
        )
    happened = len(runs["disturbed"]["recoveries"]) >= len(options.fail)
    if not happened:
        say("fewer recoveries than failures: one was planned beyond the end, or not detected")
    if options.json:
        options.json.write_text(json.dumps({"equal": equal, **runs}, indent=1), encoding="utf-8")
    return 0 if equal and happened else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ray ends the actors with this process
