"""Ranks that save and load on command and report the result as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from outlast.checkpoint.writer_client import WriterProcess
from outlast.errors import DeadlineExceeded
from outlast.testing import RankProcesses

__all__ = ["Ranks"]

ANSWER = "answer: "


class Ranks(RankProcesses):
    """One rank per node, in processes that run until the ``with`` block ends.

    Args:
        nodes: Name of each rank's node, with the node's writer.
        log: Folder for their output.
        width: Of the model; the state takes about 12 bytes times its square.
    """

    def __init__(self, nodes: dict[str, WriterProcess], log: Path, *, width: int = 160) -> None:
        # A FileStore: each new connection to a TCPStore resolves host names, and hundreds are made here.
        store = log.with_name(f"{log.name}-{uuid.uuid4().hex}.store")
        super().__init__(
            __file__,
            str(width),
            os.fspath(store),
            world_size=len(nodes),
            directory=log,
            nodes=[*nodes],
            stdin=True,
            environments=[{"OUTLAST_WRITER": writer.address} for writer in nodes.values()],
        )

    def tell(self, *, timeout_s: float = 200.0, **command: Any) -> list[dict[str, Any]]:
        """Send one command to all ranks and return their responses.

        Raises:
            AssertionError: A rank died, or does not answer.
        """
        try:
            for rank in range(self.world_size):
                self.send(rank, json.dumps(command))
            lines = [self.next_line(rank, timeout_s, containing=ANSWER) for rank in range(self.world_size)]
        except (DeadlineExceeded, BrokenPipeError) as error:
            raise AssertionError(f"a rank does not answer: {error}") from error
        return [json.loads(line.partition(ANSWER)[2]) for line in lines]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for rank in range(self.world_size):
                self.end_input(rank)  # ranks exit when their input is closed
            with contextlib.suppress(DeadlineExceeded):
                self.wait(10)
        super().__exit__(kind, error, trace)


# -- the code below runs in the ranks --------------------------------------------------------------------------


def _main() -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        store = dist.FileStore(sys.argv[2], world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    training = _Training(torch, rank, int(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        do = getattr(training, command.pop("do"))
        sys.stdout.write(f"\n{ANSWER}{json.dumps(do(**command))}\n")  # in one write, because of log lines


class _Training:
    """A training state that differs at each iteration and on each rank."""

    def __init__(self, torch: Any, rank: int, width: int) -> None:
        self._torch, self._rank, self._width = torch, rank, width
        self._model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
        self._optim = torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self._state = {"model": self._model, "optim": self._optim, "losses": []}
        self._saving: Any = None

    def save(self, *, config: dict[str, Any], iterations: list[int], job: str) -> dict[str, Any]:
        """Load the newest checkpoint, train and save; return the digest of each checkpoint."""
        manager = self._manager(config, job)
        manager.load_latest(self._state)
        saved = {}
        for iteration in iterations:
            self._train()
            handle = manager.save(self._state, iteration)
            saved[iteration] = self._digest()
            handle.wait(100)
        manager.close()
        return {"saved": saved}

    def begin(self, *, config: dict[str, Any], iteration: int, num_more: int, journal: str) -> dict[str, Any]:
        """Train one iteration, save it, and train on during the save; return the digests."""
        if self._saving is None:
            self._saving = self._manager(config, "job", journal)
        self._train()
        self._handle = self._saving.save(self._state, iteration)
        saved = self._digest()
        for _ in range(num_more):
            self._train()
        return {"saved": saved, "now": self._digest(), "done": self._handle.done, "step": self._step()}

    def finish(self, *, leave: bool) -> dict[str, Any]:
        """Wait for the save; return its error, if any."""
        from outlast.errors import CheckpointError

        error = None
        try:
            self._handle.wait(100)
        except CheckpointError as failure:
            error = str(failure)
        if leave:
            self._saving.close()
            self._saving = None
        return {"error": error}

    def load(self, *, config: dict[str, Any]) -> dict[str, Any]:
        """Overwrite the live state, load, and return the state's digest."""
        from outlast.errors import CheckpointError

        self._spoil()
        spoiled = self._digest()
        manager = self._manager(config, "job")
        try:
            restored = manager.load_latest(self._state)
            if restored is None:
                return {"nothing": True, "untouched": self._digest() == spoiled}
            return {
                "iteration": restored.iteration,
                "tiers": restored.tiers,
                "digest": self._digest(),
                "step": self._step(),
                "rejected": [(one.checkpoint, one.tier, one.rank, one.reason) for one in restored.rejected],
                "read": restored.bytes_read,
            }
        except CheckpointError as error:
            return {"error": str(error), "kind": type(error).__name__, "untouched": self._digest() == spoiled}
        finally:
            manager.close()

    def _manager(self, config: dict[str, Any], job: str, journal: str | None = None) -> Any:
        from dataclasses import replace

        from outlast.checkpoint.manager import open_manager
        from outlast.config import CheckpointConfig
        from outlast.env import read_worker
        from outlast.runtime.journal import Journal

        events = Journal(journal, run_id="r", job=job, node=read_worker().node, proc=f"rank-{self._rank}")
        return open_manager(CheckpointConfig(**config), env=replace(read_worker(), job=job), journal=events)

    def _train(self) -> None:
        self._optim.zero_grad()
        loss = self._model(self._torch.randn(8, self._width)).square().mean()
        loss.backward()
        self._optim.step()
        self._state["losses"].append(loss.item())

    def _step(self) -> float:
        """Return the step count of the optimizer."""
        (first, *_) = self._optim.state.values()
        return float(first["step"])

    def _spoil(self) -> None:
        """Overwrite all values, so that correct values must have been loaded."""
        self._torch.manual_seed(7)
        for value in self._model.state_dict().values():
            value.fill_(-1)
        for moments in self._optim.state.values():
            for moment in moments.values():
                moment.fill_(-2.0)
        self._state["losses"] = ["spoiled"]

    def _digest(self) -> str:
        """Return the SHA-256 of the state, including the random number generator."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self._model.state_dict().items()):
            sha.update(name.encode() + tensor.numpy().tobytes())
        for index, moments in sorted(self._optim.state_dict()["state"].items()):
            for name, tensor in sorted(moments.items()):
                sha.update(f"{index}.{name}".encode() + tensor.numpy().tobytes())
        sha.update(repr(self._state["losses"]).encode())
        sha.update(self._torch.get_rng_state().numpy().tobytes())
        return sha.hexdigest()


if __name__ == "__main__":
    _main()
