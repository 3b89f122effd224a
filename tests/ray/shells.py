"""Actor shells that tests control directly, without an ActorGroup, and the actors that they host."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist

from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.ray.protocol import (
    Aborted,
    ActorAssignment,
    ActorIdentity,
    ActorStatus,
    Call,
    CallFailed,
    CallReturned,
    Joined,
    Mesh,
    ShellSettings,
)
from outlast.ray.train_actor import TrainActor, create_shell

LIMIT_S = 240.0


class Trainer(TrainActor):
    """A small model; all ranks of a data shard train it identically."""

    def setup(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "seen": self.seen}

    def train(self, iteration: int, *, save: bool = True, tear: bool = False) -> tuple[float, int]:
        """Do one step, which uses random numbers."""
        with self.section("step"):
            inputs = torch.randn(4, 8) + self.place.dp
            self.optimizer.zero_grad()
            loss = (self.model(inputs) ** 2).mean()
            loss.backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=self.group("dp"))
            with self.update(iteration):
                self.optimizer.step()
                if tear:
                    raise ValueError("in the middle of an update")
                self.seen += 1
        if save:
            handle = self.save(iteration)
            if handle is not None:
                handle.wait(LIMIT_S)
        return float(sum(parameter.detach().sum() for parameter in self.model.parameters())), self.seen

    def save_without(self, root_cause: int, iteration: int) -> None:
        """Make all ranks but the root cause wait for the commit of a save."""
        with self.section("step"):
            if self.place.rank == root_cause:
                time.sleep(1000)
            handle = self.save(iteration, now=True)
            assert handle is not None
            handle.wait(1000)

    def look(self) -> tuple[float, int, int]:
        """Return a sum over the weights, the plain value, and the iteration."""
        return float(sum(one.detach().sum() for one in self.model.parameters())), self.seen, self.iteration

    def sums(self) -> dict[str, float]:
        """Return the sum of the ranks along each axis."""
        found = {}
        for axis in ("pp", "dp", "cp", "tp"):
            mine = torch.tensor([float(self.place.rank)])
            dist.all_reduce(mine, group=self.group(axis))
            found[axis] = float(mine)
        return found

    def hang(self, how: str, root_cause: int) -> str:
        """Make all ranks but the root cause wait for the root cause."""
        with self.section("step"):
            if self.place.rank == root_cause:
                time.sleep(1000)
            match how:
                case "all_reduce":
                    dist.all_reduce(torch.ones(100_000))
                case "receive":
                    dist.recv(torch.ones(1000), src=root_cause)
                case "send":
                    dist.send(torch.ones(30_000_000), dst=root_cause)
                case "new_group":
                    dist.new_group(list(range(self.place.world_size)))
                case "compute":
                    while True:
                        torch.ones(100).sum()
                case "swallow":
                    while True:
                        try:
                            dist.all_reduce(torch.ones(10))
                        except Exception:  # noqa: BLE001 - what users write
                            pass
        return "came out"

    def sleep(self, seconds: float) -> None:
        """Hang in a section."""
        with self.section("step"):
            time.sleep(seconds)

    def fail(self, who: int) -> None:
        """Raise an exception that cannot be pickled, on one rank."""
        if self.place.rank == who:
            error = ValueError("on purpose")
            error.lock = time.get_clock_info  # type: ignore[attr-defined]
            error.file = sys.stderr  # type: ignore[attr-defined]
            raise error

    def resources(self) -> tuple[int, int, int]:
        """Return the number of descriptors, the number of threads, and the resident memory in KiB."""
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * 4


class Wrapped(Trainer):
    """The same model in ``DistributedDataParallel``."""

    def regroup(self) -> None:
        self.wrapped = torch.nn.parallel.DistributedDataParallel(self.model, process_group=self.group("dp"))

    def state(self) -> dict[str, Any]:
        return {"model": self.wrapped if hasattr(self, "wrapped") else self.model, "optimizer": self.optimizer}

    def train_wrapped(self, iteration: int, root_cause: int) -> None:
        """Do one step; the root cause sleeps instead of taking part in the gradients' all-reduce."""
        with self.section("step"):
            self.optimizer.zero_grad()
            loss = (self.wrapped(torch.randn(4, 8) + self.place.dp) ** 2).mean()
            if self.place.rank == root_cause:
                time.sleep(1000)
            loss.backward()
            with self.update(iteration):
                self.optimizer.step()
        handle = self.save(iteration)
        assert handle is not None
        handle.wait(LIMIT_S)


class Plain:
    """A class that is not a :class:`TrainActor`, with unknown state."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self) -> tuple[float, int]:
        self.calls += 1
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total), self.calls


class ShellDriver:
    """Controls shells as an ActorGroup does, one incarnation after the other."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        actor: type = Trainer,
        num_spares: int = 0,
        checkpoint: CheckpointConfig | None = None,
        timeouts: dict[str, float | None] | None = None,
        nodes: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.mesh, self.incarnation = mesh, -1
        self._settings = ShellSettings(
            group=f"test-{uuid.uuid4().hex[:8]}",
            checkpoint=checkpoint,
            fault_tolerance=FaultToleranceConfig(rank_section_timeouts=timeouts or {}, num_warmup_iterations=0),
        )
        self._actor, self._environment = actor, environment
        made = [self.make(nodes[n % len(nodes)] if nodes else None) for n in range(mesh.size + num_spares)]
        self.slots, self.spares = made[: mesh.size], made[mesh.size :]
        try:
            self.identities(self.spares)
        except BaseException:
            self.close()  # the caller has no object to close
            raise

    def make(self, node: str | None = None) -> Any:
        """Start another shell, on a given node."""
        options: dict[str, Any] = {"num_cpus": 1}
        runtime_env = {"env_vars": self._environment} if self._environment else None
        if node is not None:
            options["scheduling_strategy"] = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                node, soft=False
            )
        return create_shell(self._actor, (), {}, self._settings, runtime_env, options)

    def identities(self, shells: Sequence[Any] | None = None) -> list[ActorIdentity]:
        """Return the identities of actors, by default of those with slots."""
        shells = self.slots if shells is None else shells
        return list(ray.get([shell.identity.remote() for shell in shells], timeout=LIMIT_S))

    def pids(self) -> list[int]:
        return [one.pid for one in self.identities()]

    def statuses(self) -> list[ActorStatus]:
        return list(ray.get([shell.status.remote() for shell in self.slots], timeout=LIMIT_S))

    def begin_join(
        self, has: Sequence[int | None] | None = None, writers: Sequence[str | None] | None = None
    ) -> list[Any]:
        self.incarnation += 1
        addr, port = ray.get(self.slots[0].host_store.remote(), timeout=LIMIT_S)
        return [
            shell.join.remote(
                ActorAssignment(
                    incarnation=self.incarnation,
                    rank=rank,
                    mesh=self.mesh,
                    local_rank=0,
                    local_world_size=self.mesh.size,
                    node_rank=0,
                    store_addr=addr,
                    store_port=port,
                    timeout_s=LIMIT_S,
                    has=has[rank] if has else None,
                    writer=writers[rank] if writers else None,
                )
            )
            for rank, shell in enumerate(self.slots)
        ]

    def join(
        self, has: Sequence[int | None] | None = None, writers: Sequence[str | None] | None = None
    ) -> list[Joined]:
        joined = ray.get(self.begin_join(has, writers), timeout=LIMIT_S)
        assert all(isinstance(one, Joined) for one in joined), joined
        return list(joined)

    def begin_call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        call = Call(incarnation=self.incarnation, method=method)
        parcel = ray.put((args, kwargs))
        return [shell.call.remote(call, parcel) for shell in self.slots]

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks; return their values."""
        answers = self.outcomes(self.begin_call(method, *args, **kwargs))
        returned = [one for one in answers if isinstance(one, CallReturned)]
        assert len(returned) == len(answers), answers
        return [one.value for one in returned]

    def outcomes(self, calls: list[Any]) -> list[CallReturned | CallFailed]:
        return list(ray.get(calls, timeout=LIMIT_S))

    def wait_in_sections(self) -> None:
        """Wait until every rank is in a section."""
        wait_until(lambda: all(one.sections for one in self.statuses()), "every rank's section")

    def abort(self, ranks: Sequence[int], timeout_s: float = 20.0) -> list[Aborted]:
        aborting = [self.slots[rank].abort.remote(self.incarnation, timeout_s) for rank in ranks]
        return list(ray.get(aborting, timeout=LIMIT_S))

    def replace(self, rank: int) -> None:
        """End the actor of a rank, whatever its state, and give its slot to a spare."""
        ray.kill(self.slots[rank])
        self.slots[rank] = self.spares.pop(0) if self.spares else self.make()

    def restore(self) -> None:
        """Abort the incarnation, replace the actors that do not return from it, and provide a spare."""
        for rank, aborted in enumerate(self.abort(range(self.mesh.size), 2.0)):
            if not aborted.call_ended:
                self.replace(rank)
        if not self.spares:
            self.spares.append(self.make())

    def close(self) -> None:
        for shell in [*self.slots, *self.spares]:
            ray.kill(shell)


def wait_until(check: Any, what: str) -> None:
    """Wait until a check is true."""
    end = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.01)
