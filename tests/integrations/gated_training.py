"""A training program with two ranks that stops at gates, where a test sends a signal to a rank. Launchers run it.

At a gate, ``@CYCLE:RANK:ITERATION``, the rank writes its pid to ``gate-CYCLE`` in the folder and waits for a signal,
once. The first rank writes a digest of the trained weights, which :func:`undisturbed` computes in advance. With
``--heartbeats`` there is no session: only heartbeats, and a checkpoint that the script writes itself. Arguments with
``=`` belong to a plug-in.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from outlast.testing.ranks import TOKEN, LoggedProcess, end_processes

WORLD_SIZE = 2
PROGRAM = Path(__file__)


class Launch:
    """A running launcher of this training, for tests."""

    def __init__(self, folder: Path, process: LoggedProcess) -> None:
        self.folder, self.process = folder, process

    def wait_until(self, is_met: Callable[[], object], timeout_s: float = 200) -> None:
        until = time.monotonic() + timeout_s
        while not is_met():
            assert self.process.running, self.process.tail(60)
            assert time.monotonic() < until, self.process.tail(60)
            time.sleep(0.02)

    def signal_at_gate(self, cycle: int, number: int) -> None:
        """Wait until a rank waits at a gate, and send it a signal."""
        gate = self.folder / f"gate-{cycle}"
        self.wait_until(gate.exists)
        os.kill(int(gate.read_text()), number)


@contextmanager
def launched(folder: Path, *command: str, **variables: str) -> Iterator[Launch]:
    """Run a launcher in ``folder``; end every remaining process afterwards."""
    environment = {**os.environ, TOKEN: uuid.uuid4().hex, **variables}
    arguments = ["/bin/sh", "-c", f'cd "{folder}" && exec "$@"', "sh", *command]
    process = LoggedProcess("launcher", arguments, environment, folder / "log")
    try:
        yield Launch(folder, process)
    finally:
        if process.running:
            process.kill()
        end_processes(environment[TOKEN])


def step(weight: torch.Tensor, momentum: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    momentum.mul_(0.9).add_(torch.stack(gradients).sum(0) / WORLD_SIZE)
    weight.sub_(0.1 * momentum)


def gradient(weight: torch.Tensor, iteration: int, rank: int) -> torch.Tensor:
    """Return a rank's gradient, which depends on the complete state that a run resumes."""
    data = torch.randn(16, generator=torch.Generator().manual_seed(1000 * iteration + rank))
    return (weight @ data - 1) * data / 16


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()


def undisturbed(total: int) -> str:
    """Return the digest of the weights after an undisturbed run of ``total`` iterations."""
    weight, momentum = torch.zeros(16), torch.zeros(16)
    for iteration in range(total):
        step(weight, momentum, [gradient(weight, iteration, rank) for rank in range(WORLD_SIZE)])
    return digest(weight)


def first_iteration(folder: Path, *, cycle: int) -> int:
    """Return the first iteration of a cycle."""
    rows = [line.split() for line in (folder / "rank-0").read_text().splitlines()]
    return next(int(iteration) for number, iteration in rows if int(number) == cycle)


def wait_at_gate(folder: Path, gates: list[str], rank: int, iteration: int) -> None:
    """Wait for a signal if there is a gate here that has not been used."""
    cycle = os.environ.get("OUTLAST_CYCLE", "0")
    gate = folder / f"gate-{cycle}"
    if f"@{cycle}:{rank}:{iteration}" not in gates or gate.exists():
        return
    (folder / "writing").write_text(str(os.getpid()))
    (folder / "writing").rename(gate)
    while not (folder / f"open-{cycle}").exists():  # a test opens the gate if the rank must survive the signal
        time.sleep(0.02)


def iterations(folder: Path, total: int, state: dict[str, torch.Tensor], sends_heartbeats: bool) -> Iterator[int]:
    if not sends_heartbeats:
        import outlast
        from outlast.config import CheckpointConfig

        checkpoint = CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=2)
        run = outlast.init(outlast.Config(checkpoint=checkpoint))
        for iteration in run.steps(state, total=total):
            note(folder, run.global_rank, iteration)
            yield iteration
        return
    from outlast.monitor import RankMonitor

    dist.init_process_group("gloo")
    monitor, own = RankMonitor(), folder / "own.pt"
    first = 0
    if own.exists():
        loaded = torch.load(own)
        first = loaded.pop("iteration")
        for name, value in loaded.items():
            state[name].copy_(value)
    for iteration in range(first, total):
        monitor.heartbeat()
        note(folder, dist.get_rank(), iteration)
        yield iteration
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save({**state, "iteration": iteration + 1}, folder / "saving.pt")
            (folder / "saving.pt").rename(own)
    monitor.finish()


def note(folder: Path, rank: int, iteration: int) -> None:
    with open(folder / f"rank-{rank}", "a") as file:
        print(os.environ.get("OUTLAST_CYCLE", "0"), iteration, file=file)


def train(folder: str, total: int, gates: list[str], sends_heartbeats: bool = False) -> None:
    """Train. A ``run.Partial`` calls this function, too."""
    torch.manual_seed(0)
    state = {"weight": torch.zeros(16), "momentum": torch.zeros(16)}
    for iteration in iterations(Path(folder), total, state, sends_heartbeats):
        own = gradient(state["weight"], iteration, dist.get_rank())
        gathered = [torch.zeros(16) for _ in range(WORLD_SIZE)]
        wait_at_gate(Path(folder), gates, dist.get_rank(), iteration)
        dist.all_gather(gathered, own)
        step(state["weight"], state["momentum"], gathered)
    if dist.get_rank() == 0:
        Path(folder, "digest").write_text(digest(state["weight"]))


def main() -> None:
    arguments = [word for word in sys.argv[1:] if "=" not in word]
    gates = [word for word in arguments if word.startswith("@")]
    own = [word for word in arguments if not word.startswith(("@", "--"))]
    train(own[0], int(own[1]), gates, "--heartbeats" in arguments)


if __name__ == "__main__":
    main()
