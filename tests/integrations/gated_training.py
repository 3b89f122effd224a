"""A training of two ranks that waits at gates for what a test does to a rank. Run as a program, by launchers.

At a gate, ``@CYCLE:RANK:ITERATION``, the rank writes its pid to ``gate-CYCLE`` in the folder and waits for a signal,
once. The first rank leaves a digest of what was trained, which :func:`undisturbed` tells beforehand. With
``--heartbeats`` there is no session: heartbeats alone, and a checkpoint of the script's own. Arguments with ``=`` in
them are a plug-in's.
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

    def wait_until(self, look: Callable[[], object], timeout_s: float = 200) -> None:
        until = time.monotonic() + timeout_s
        while not look():
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
    """Run a launcher in ``folder``; end every process that it leaves behind."""
    environment = {**os.environ, TOKEN: uuid.uuid4().hex, **variables}
    words = ["/bin/sh", "-c", f'cd "{folder}" && exec "$@"', "sh", *command]
    process = LoggedProcess("launcher", words, environment, folder / "log")
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
    """Return a rank's gradient, which depends on everything that a resumed run could have wrong."""
    data = torch.randn(16, generator=torch.Generator().manual_seed(1000 * iteration + rank))
    return (weight @ data - 1) * data / 16


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()


def undisturbed(total: int) -> str:
    """Return the digest of what a run of so many iterations trains."""
    weight, momentum = torch.zeros(16), torch.zeros(16)
    for iteration in range(total):
        step(weight, momentum, [gradient(weight, iteration, rank) for rank in range(WORLD_SIZE)])
    return digest(weight)


def first_iteration(folder: Path, *, cycle: int) -> int:
    """Return with which iteration a cycle began."""
    ran = [line.split() for line in (folder / "rank-0").read_text().splitlines()]
    return next(int(iteration) for number, iteration in ran if int(number) == cycle)


def wait_at_gate(folder: Path, gates: list[str], rank: int, iteration: int) -> None:
    """Wait for a signal, if there is a gate here that nobody has waited at."""
    cycle = os.environ.get("OUTLAST_CYCLE", "0")
    gate = folder / f"gate-{cycle}"
    if f"@{cycle}:{rank}:{iteration}" not in gates or gate.exists():
        return
    (folder / "writing").write_text(str(os.getpid()))
    (folder / "writing").rename(gate)
    while not (folder / f"open-{cycle}").exists():  # a test opens it when a signal is to be survived
        time.sleep(0.02)


def iterations(folder: Path, total: int, state: dict[str, torch.Tensor], watches_itself: bool) -> Iterator[int]:
    if not watches_itself:
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
    begin = 0
    if own.exists():
        loaded = torch.load(own)
        begin = loaded.pop("iteration")
        for name, value in loaded.items():
            state[name].copy_(value)
    for iteration in range(begin, total):
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


def train(folder: str, total: int, gates: list[str], watches_itself: bool = False) -> None:
    """Train; also what a ``run.Partial`` calls."""
    torch.manual_seed(0)
    state = {"weight": torch.zeros(16), "momentum": torch.zeros(16)}
    for iteration in iterations(Path(folder), total, state, watches_itself):
        own = gradient(state["weight"], iteration, dist.get_rank())
        gathered = [torch.zeros(16) for _ in range(WORLD_SIZE)]
        wait_at_gate(Path(folder), gates, dist.get_rank(), iteration)
        dist.all_gather(gathered, own)
        step(state["weight"], state["momentum"], gathered)
    if dist.get_rank() == 0:
        Path(folder, "digest").write_text(digest(state["weight"]))


def main() -> None:
    words = [word for word in sys.argv[1:] if "=" not in word]
    gates = [word for word in words if word.startswith("@")]
    own = [word for word in words if not word.startswith(("@", "--"))]
    train(own[0], int(own[1]), gates, "--heartbeats" in words)


if __name__ == "__main__":
    main()
