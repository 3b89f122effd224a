"""The test matrix: a fault of a tier, on one node or all, from the start of a job, in a save, or in a restore.

Each cell trains two nodes of one rank with all tiers, breaks one, and checks the promises to the user:

* training continues while another tier works, and the fault causes no restart;
* a log line contains the tier, the node and the path (checked in the cells of saves);
* after the fault the broken tier holds a new checkpoint again, without a restart;
* no iteration that another tier held is lost, and each step computes the values of a run without faults.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from broken_places import ALL, Bucket, Disk, Fault, why_unavailable
from trained_nodes import NODES, TrainedNodes, newest_checkpoint

from outlast.incidents import EventKind

__all__ = ["MARKS", "Cell", "Tier", "When", "check_cell", "disk_cells", "each_cell", "store_cells", "writer_cells"]

INTERVAL, NEAR_INTERVAL = 20, 10
"""Iterations between two saves to all tiers, and to the node-local tiers."""
TRAINS_S = 120.0
"""Longest time for training to advance while a tier is broken."""
RESPONSE_S, CHECK_S = 15.0, 5.0
"""Time after which hung calls count as failed: those of a start or a load, and those of health checks."""
LOGGED_S = 100.0
"""Longest time until the first log line about the fault; a hung tier is logged after a delay."""
RECOVERS_S = 90.0


class Tier(StrEnum):
    """The tier that is broken."""

    GLOBAL = "global"
    STORE = "s3"
    LOCAL = "local"
    MEMORY = "memory"


class When(StrEnum):
    """When the fault is applied."""

    START = "from-start"
    """Before the agents of a second job start; the first one has saved checkpoints."""
    SAVE = "in-save"
    """While a save to all tiers is under way."""
    RESTORE = "in-restore"
    """During saves; a rank is then killed, and its cycle restarted under the fault."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix."""

    fault: Fault
    tier: Tier
    nodes: tuple[str, ...]
    """Nodes with the fault; empty: all."""
    when: When

    def __str__(self) -> str:
        return f"{self.fault}-{self.tier}-{'one-node' if self.nodes else 'all-nodes'}-{self.when}"


_ONE = NODES[1:]


def disk_cells() -> list[Cell]:
    """Return the cells of directories."""
    cells = []
    for tier in (Tier.GLOBAL, Tier.LOCAL):
        faults = [one for one in Fault if one not in (Fault.ERROR_500, Fault.ERROR_403)]
        for fault in faults:
            shared = tier == Tier.GLOBAL and fault in (Fault.FULL, Fault.NO_INODES)  # full for one is full for all
            if fault == Fault.UNMOUNTED and tier == Tier.GLOBAL:
                continue  # a job does not start if nodes see different directories: test_directory_views.py
            # A run also rejects a directory in which the records of its earlier job have reappeared.
            whens = [when for when in When if fault != Fault.UNMOUNTED or when != When.START]
            cells += [Cell(fault, tier, nodes, when) for nodes in ((ALL,) if shared else (_ONE, ALL)) for when in whens]
    return cells


def store_cells() -> list[Cell]:
    """Return the cells of an object store."""
    faults = (Fault.HUNG, Fault.SLOW, Fault.GONE, Fault.ERROR_500, Fault.ERROR_403)
    return [Cell(fault, Tier.STORE, nodes, when) for fault in faults for nodes in (_ONE, ALL) for when in When]


def writer_cells() -> list[Cell]:
    """Return the cells of the memory tier, which are also those of a replica's partner."""
    faults = (Fault.HUNG, Fault.GONE, Fault.FULL)
    return [Cell(fault, Tier.MEMORY, nodes, when) for fault in faults for nodes in (_ONE, ALL) for when in When]


MARKS = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "available"),
]
"""Marks of the tests of the matrix."""


def each_cell(cells: Sequence[Cell], *, first: Set[str], sample: Set[str]) -> pytest.MarkDecorator:
    """Parametrize a test: ``make test`` runs ``first``, ``make test-all`` also ``sample``, campaigns all cells."""

    def mark(name: str) -> Any:
        return () if name in first else pytest.mark.extended if name in sample else pytest.mark.campaign

    return pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=mark(str(cell))) for cell in cells])


class _Place(Protocol):
    def break_(self, fault: Fault, nodes: Sequence[str] = ALL) -> None: ...

    def lift(self) -> None: ...


@dataclass(kw_only=True)
class _Writers:
    """The nodes' checkpoint writers, which hold the memory tier and receive replicas."""

    run: TrainedNodes | None = None
    _broken: list[tuple[psutil.Process, Fault]] = field(default_factory=list)

    def break_(self, fault: Fault, nodes: Sequence[str] = ALL) -> None:
        assert self.run is not None
        for node in nodes or NODES:
            writer = self.run.wait_for_writer(node)
            self._broken.append((writer, fault))
            match fault:
                case Fault.HUNG:
                    writer.send_signal(signal.SIGSTOP)
                case Fault.GONE:
                    writer.send_signal(signal.SIGKILL)
                case Fault.FULL:  # neither new memory nor growing files
                    resource.prlimit(writer.pid, resource.RLIMIT_AS, (writer.memory_info().vms, resource.RLIM_INFINITY))
                case _:
                    raise ValueError(f"a writer cannot have the fault {fault}")

    def lift(self) -> None:
        for writer, fault in self._broken:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if fault == Fault.HUNG:
                    writer.send_signal(signal.SIGCONT)
                elif fault == Fault.FULL:
                    resource.prlimit(writer.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._broken.clear()


@dataclass(kw_only=True)
class _Locals:
    """The nodes' local disks."""

    disks: dict[str, Disk]

    def break_(self, fault: Fault, nodes: Sequence[str] = ALL) -> None:
        for node in nodes or NODES:
            self.disks[node].break_(fault)

    def lift(self) -> None:
        for disk in self.disks.values():
            disk.lift()


@dataclass(kw_only=True)
class _World:
    """All places of a cell."""

    folder: Path
    shared: Disk
    locals: _Locals
    writers: _Writers
    bucket: Bucket | None
    url: str = ""

    def run(self) -> TrainedNodes:
        """Return the next job, not started."""
        settings = {}
        for node in NODES:
            settings[node] = {
                "directory": self.url or str(self.shared.path(node) / "run"),
                "local_directory": str(self.locals.disks[node].path(node)),
                "save_interval": INTERVAL,
                "non_persistent_save_interval": NEAR_INTERVAL,
                "response_timeout": RESPONSE_S,
            }
        bucket = self.bucket
        environments = {} if bucket is None else {node: bucket.environment(node) for node in NODES}
        sections = f"[health]\ncheck_timeout = {CHECK_S}"
        return TrainedNodes(self.folder, settings, environments=environments, sections=sections)

    def place(self, tier: Tier) -> _Place:
        """Return the place that a cell breaks."""
        if tier == Tier.STORE:
            assert self.bucket is not None
            return self.bucket
        places: dict[Tier, _Place] = {Tier.GLOBAL: self.shared, Tier.LOCAL: self.locals, Tier.MEMORY: self.writers}
        return places[tier]

    def path(self, tier: Tier, node: str) -> str:
        """Return the path in a log line about a tier; the memory tier has none."""
        match tier:
            case Tier.GLOBAL:
                return str(self.shared.path(node))
            case Tier.STORE:
                return self.url
            case Tier.LOCAL:
                return str(self.locals.disks[node].path(node))
            case Tier.MEMORY:
                return ""

    def newest(self, tier: Tier, run: TrainedNodes) -> int:
        """Return the newest checkpoint in a tier that all nodes have."""
        match tier:
            case Tier.GLOBAL:
                return newest_checkpoint(self.shared.files / "run")
            case Tier.STORE:
                assert self.bucket is not None
                return self.bucket.newest_checkpoint(self.url)
            case Tier.LOCAL:
                return min(newest_checkpoint(self.locals.disks[node].files / node) for node in NODES)
            case Tier.MEMORY:
                return max(run.committed("memory"), default=0)


@contextlib.contextmanager
def _open_world(folder: Path, server: Any | None, name: str) -> Iterator[_World]:
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(Disk(folder / "shared", NODES))
        disks = {node: stack.enter_context(Disk(folder / f"disk-{node[-1]}", [node])) for node in NODES}
        bucket, url = None, ""
        if server is not None:
            bucket, url = stack.enter_context(Bucket(server, NODES)), f"s3://{server.bucket}/{name}"
        writers = _Writers()
        stack.callback(writers.lift)
        yield _World(folder=folder, shared=shared, locals=_Locals(disks=disks), writers=writers, bucket=bucket, url=url)


def check_cell(cell: Cell, folder: Path, server: Any | None = None) -> None:
    """Run one cell and check it.

    Args:
        cell: The cell.
        folder: An empty folder.
        server: The S3 server, for cells of an object store.
    """
    with _open_world(folder, server, str(cell)) as world:
        place = world.place(cell.tier)
        if cell.when == When.START:
            with world.run() as first:
                first.wait_until(
                    "two checkpoints in the durable tier", lambda: world.newest(_durable(world), first) >= 2 * INTERVAL
                )
                first.stop()
            num_committed = min(world.newest(Tier.LOCAL, first), world.newest(_durable(world), first))
            if cell.tier != Tier.MEMORY:
                place.break_(cell.fault, cell.nodes)
            with world.run() as run:
                world.writers.run = run
                if cell.tier == Tier.MEMORY:
                    place.break_(cell.fault, cell.nodes)
                run.wait_for_iteration(num_committed + 5 * INTERVAL, TRAINS_S)
                _check_end(cell, world, run, cycle=0, least_iteration=num_committed)
            return
        with world.run() as run:
            world.writers.run = run
            run.wait_for_iteration(2 * INTERVAL)
            run.wait_for_save_to_begin(INTERVAL)
            place.break_(cell.fault, cell.nodes)
            started = run.iteration
            if cell.when == When.SAVE:
                run.wait_for_iteration(started + 5 * INTERVAL, TRAINS_S)
                _check_end(cell, world, run, cycle=0, least_iteration=0)
                return
            run.wait_for_iteration(started + 3 * NEAR_INTERVAL, TRAINS_S)
            num_committed = _held_elsewhere(cell, run)
            run.kill_worker(1)
            run.wait_for_iteration(num_committed + 5 * INTERVAL, TRAINS_S, cycle=1)
            _check_end(cell, world, run, cycle=1, least_iteration=num_committed)


def _durable(world: _World) -> Tier:
    return Tier.STORE if world.url else Tier.GLOBAL


def _held_elsewhere(cell: Cell, run: TrainedNodes) -> int:
    """Return the newest iteration that all ranks had committed to a tier without the fault."""
    by_rank = dict.fromkeys(range(len(NODES)), 0)
    for event in run.events(EventKind.SAVE_COMMITTED):
        if event.rank is not None and set(event.data["tiers"]) - {cell.tier, "replica"}:
            by_rank[event.rank] = max(by_rank[event.rank], event.iteration or 0)
    return min(by_rank.values())


def _check_end(cell: Cell, world: _World, run: TrainedNodes, *, cycle: int, least_iteration: int) -> None:
    """Check the log, lift the fault, and check that its tier recovers."""
    affected_nodes = cell.nodes or NODES
    # A node reports a shared directory that hangs on another node by its own path of it.
    paths = [world.path(cell.tier, node) for node in (affected_nodes if cell.tier == Tier.LOCAL else NODES)]
    word = "global" if cell.tier == Tier.STORE else str(cell.tier)
    # An empty folder looks like a new one, and a slow disk is not an error; one line is expected per fault and tier.
    is_logged = cell.when != When.SAVE or cell.fault in (Fault.UNMOUNTED, Fault.SLOW)
    end_s = time.monotonic() + LOGGED_S
    while not is_logged and time.monotonic() < end_s:
        is_logged = any(_has_line(run, word, node, path) for node in affected_nodes for path in paths)
        time.sleep(0.1)
    world.place(cell.tier).lift()
    lifted = run.iteration
    run.wait_until(
        f"a checkpoint in the tier {cell.tier} after iteration {lifted}, where the fault ended",
        lambda: world.newest(cell.tier, run) > lifted,
        RECOVERS_S,
    )
    assert run.cycle == cycle, f"the fault caused a restart\n{run.shown()}"
    for event in run.events(EventKind.RESTORED):
        if event.cycle == cycle and event.job == run.events(EventKind.PROGRESS)[-1].job:
            assert (event.iteration or 0) >= least_iteration, (
                f"another tier had iteration {least_iteration}\n{run.shown()}"
            )
    run.check_weights()
    assert is_logged, f"no line has the tier {word}, one of the nodes {affected_nodes}, and the path\n{run.shown()}"


def _has_line(run: TrainedNodes, tier: str, node: str, path: str) -> bool:
    """Return whether a line contains a tier, a node and a path; the path itself may contain the node's name."""
    return any(node in line.replace(path, "") if path else node in line for line in run.lines(tier, path))
