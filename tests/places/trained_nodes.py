"""Two nodes that train in lockstep, their steps, and the expected result of a run without a fault."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from broken_places import processes_named

from outlast.incidents import Event, EventKind
from outlast.testing import Cluster

__all__ = ["LIMIT_S", "NODES", "Step", "TrainedNodes", "newest_checkpoint"]

NODES = ("node-0", "node-1")
LIMIT_S = 240.0
"""Longest time that a test waits for a condition: a busy machine is slow."""
_SIZE = 64
_POLL_S = 0.01

_SCRIPT = """
import hashlib, os, pathlib, sys, time
import torch
import torch.distributed as dist
import outlast

folder, step_s, state_bytes = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
node, cycle = os.environ["OUTLAST_NODE"], os.environ["OUTLAST_CYCLE"]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
run = outlast.init(folder / f"config-{node}.toml")
state = {"weight": torch.zeros(SIZE), "ballast": torch.zeros(state_bytes // 4)}
log = open(folder / f"steps-{rank}.txt", "a", buffering=1)
due = None
for iteration in run.steps(state, total=10**9):
    part = torch.randn(SIZE)
    dist.all_reduce(part)
    state["weight"].mul_(0.9).add_(part)
    now = time.monotonic()
    due = now if due is None else due
    time.sleep(max(0.0, due - now))  # the time that a step computes
    due = max(due, now - step_s) + step_s
    digest = hashlib.sha256(state["weight"].numpy().tobytes()).hexdigest()
    log.write(f"{cycle} {iteration + 1} {time.monotonic():.6f} {digest} {os.getpid()}\\n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One completed step, as its rank recorded it."""

    cycle: int
    iteration: int
    end_s: float
    """On the monotonic clock of this machine."""
    digest: str
    """Of the weights after the step."""
    pid: int


@functools.cache
def _expected(iterations: int) -> tuple[str, ...]:
    draws = [torch.Generator().manual_seed(rank) for rank in range(len(NODES))]
    weight, digests = torch.zeros(_SIZE), []
    for _ in range(iterations):
        first, second = (torch.randn(_SIZE, generator=draw) for draw in draws)
        weight.mul_(0.9).add_(first + second)
        digests.append(hashlib.sha256(weight.numpy().tobytes()).hexdigest())
    return tuple(digests)


def _expected_digest(iteration: int) -> str:
    """Return the digest of the weights after an iteration of a run without faults."""
    most = 1000
    while most < iteration:
        most *= 2
    return _expected(most)[iteration - 1]


class TrainedNodes:
    """Run the training on two nodes of one rank each, as ``outlast run`` agents; use as a context manager.

    Args:
        folder: For the script, its settings and its record; kept between two jobs of one run.
        checkpoint: Settings of ``[checkpoint]`` for each node.
        options: More options of ``outlast run``.
        environments: For each node variables of its agent.
        step_s: Seconds that a step computes.
        state_bytes: Size of what is saved in addition to the weights.
        sections: More sections of the config file.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Mapping[str, Mapping[str, Any]],
        *,
        options: Sequence[str] = (),
        environments: Mapping[str, Mapping[str, str]] | None = None,
        step_s: float = 0.02,
        state_bytes: int = 1 << 16,
        sections: str = "",
    ) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(_SCRIPT.replace("SIZE", str(_SIZE)))
        for node in NODES:
            lines = [f"{name} = {json.dumps(value)}" for name, value in checkpoint[node].items()]
            (folder / f"config-{node}.toml").write_text("\n".join([sections, "[checkpoint]", *lines, ""]))
        self._environments = environments or {}
        self._had = {rank: len(self.steps(rank)) for rank in range(len(NODES))}
        self.cluster = Cluster(
            script,
            *(str(folder), str(step_s), str(state_bytes)),
            run_dir=folder / "run",
            num_nodes=len(NODES),
            num_started=0,
            nproc_per_node=1,
            options=["--rdzv-id=places", *options],
        )

    def __enter__(self) -> TrainedNodes:
        self.cluster.__enter__()
        try:
            for rank, node in enumerate(NODES):
                options = [f"--node-rank={rank}", f"--config={self.folder / f'config-{node}.toml'}"]
                self.cluster.add_node(node, options=options, environment=self._environments.get(node))
        except BaseException:
            self.cluster.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.close()

    def steps(self, rank: int = 0) -> list[Step]:
        """Return the steps of all jobs of the run so far."""
        path = self.folder / f"steps-{rank}.txt"
        if not path.exists():
            return []
        parsed = []
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                cycle, iteration, end_s, digest, pid = line.split()
                parsed.append(
                    Step(cycle=int(cycle), iteration=int(iteration), end_s=float(end_s), digest=digest, pid=int(pid))
                )
        return parsed

    @property
    def new_steps(self) -> list[Step]:
        """The steps of this job, on rank 0."""
        return self.steps()[self._had[0] :]

    @property
    def iteration(self) -> int:
        """The newest step of this job."""
        return steps[-1].iteration if (steps := self.new_steps) else 0

    @property
    def cycle(self) -> int:
        """The newest cycle of this job that trained; -1 before."""
        return steps[-1].cycle if (steps := self.new_steps) else -1

    def wait_until(self, description: str, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until a condition holds.

        Raises:
            AssertionError: The limit passed, or an agent ended; the message holds the end of their output.
        """
        end_s = time.monotonic() + limit_s
        while not condition():
            has_ended = not all(agent.running for agent in self.cluster.agents)
            assert not has_ended or condition(), f"an agent ended without: {description}\n{self.shown()}"
            assert time.monotonic() < end_s, f"{limit_s:g} s passed without: {description}\n{self.shown()}"
            time.sleep(_POLL_S)

    def wait_for_iteration(self, least_iteration: int, limit_s: float = LIMIT_S, *, cycle: int = 0) -> None:
        """Wait until this job has completed an iteration, in the given cycle or a later one."""
        self.wait_until(
            f"iteration {least_iteration} in cycle {cycle}",
            lambda: self.cycle >= cycle and self.iteration >= least_iteration,
            limit_s,
        )

    def wait_for_save_to_begin(self, interval: int) -> int:
        """Wait until an iteration that is saved has just ended; return its number."""
        first = (self.iteration // interval + 1) * interval
        end_s = time.monotonic() + LIMIT_S
        while self.iteration < first:
            assert time.monotonic() < end_s, self.shown()
            time.sleep(0.001)
        return first

    def committed(self, tier: str) -> list[int]:
        """Return the iterations committed to a tier, by the journal."""
        return [event.iteration or 0 for event in self.events(EventKind.SAVE_COMMITTED) if tier in event.data["tiers"]]

    def events(self, kind: EventKind) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in self.cluster.events() if event.kind == kind]

    def lines(self, *texts: str) -> list[str]:
        """Return the lines of all agents' output that contain all of some texts."""
        output = "\n".join(agent.output() for agent in self.cluster.agents)
        return [line for line in output.splitlines() if all(text in line for text in texts)]

    def shown(self) -> str:
        """Return the end of each agent's output, without the log lines of saves."""
        parts = [f"iteration {self.iteration} in cycle {self.cycle}"]
        for agent in self.cluster.agents:
            lines = [line for line in agent.output().splitlines() if " INFO [rank" not in line]
            parts += [f"--- {agent.name} ---", *(line[:600] for line in [*lines[:6], "...", *lines[6:][-10:]])]
        return "\n".join(parts)

    def writer(self, node: str) -> psutil.Process:
        """Return a node's checkpoint writer."""
        agent = psutil.Process(self.cluster.agent(node).pid)
        return next(processes_named(agent.children(recursive=True), "outlast.checkpoint.writer"))

    def wait_for_writer(self, node: str) -> psutil.Process:
        """Return a node's checkpoint writer; wait until it runs."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
                return self.writer(node)
            assert time.monotonic() < end_s, self.shown()
            time.sleep(_POLL_S)

    def kill_worker(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        psutil.Process(self.steps(rank)[-1].pid).send_signal(signal.SIGKILL)

    def stop(self) -> list[int]:
        """Request a shutdown of the job, as a scheduler does; return the agents' exit codes."""
        for agent in self.cluster.agents:
            agent.signal(signal.SIGTERM)
        return self.cluster.wait(LIMIT_S)

    def check_weights(self) -> None:
        """Check that each step of each rank computed the values of a run without faults."""
        for rank in range(len(NODES)):
            for step in self.steps(rank):
                assert step.digest == _expected_digest(step.iteration), (rank, step)

    def redone(self) -> int:
        """Return how many iterations of this job were computed more than once."""
        done = [step.iteration for step in self.new_steps]
        return len(done) - len(set(done))


def newest_checkpoint(folder: Path) -> int:
    """Return the newest committed checkpoint of a directory, by its files."""
    names = (path.parent.name for path in folder.glob("step-*/manifest.json"))
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))), default=0)
