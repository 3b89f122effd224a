"""The stage: the demo's nodes as real agents on this machine, their settings, and the faults that strike them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

import outlast
from outlast import chaos, clock
from outlast.chaos.copies import files_of_steps
from outlast.demo.plan import Deed, DemoFault, Loss, RankScene, Scene, Shape
from outlast.errors import ExitReason, OutlastError
from outlast.incidents import Event, EventKind
from outlast.journal import read
from outlast.runtime.board import held_pages
from outlast.runtime.journal import Journal
from outlast.testing.cluster import Agent, Cluster

_NAME = "train_gpt.py"
_SHARE = Path("share", "outlast", "examples", _NAME)


def find_example() -> Path:
    """Return the path of ``examples/train_gpt.py``: in the checkout, or where the wheel has put it.

    Raises:
        OutlastError: It is in neither place.
    """
    for path in _candidates():
        if path.is_file():
            return path.resolve()
    raise OutlastError(
        f"the demo's script {_NAME} is not installed; reinstall outlast, or run the demo in a checkout of its sources"
    )


def _candidates() -> Iterator[Path]:
    package = Path(outlast.__file__).resolve().parent
    checkout = package.parents[1]
    if (checkout / "pyproject.toml").is_file():
        yield checkout / "examples" / _NAME
    try:
        files = metadata.files("outlast") or []
    except metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())) for file in files if file.name == _NAME)
    yield package.parent / _SHARE  # pip install --target moves it there, and records the old place


_SHARD = re.compile(r"rank-(\d+)\.safetensors")


def find_copies(folder: Path, own: Collection[int]) -> list[Path]:
    """Return the shards of other nodes' ranks in a node's folder, of all generations.

    Args:
        folder: The node's folder in the local tier; may be missing.
        own: The ranks of the node itself.
    """
    shards = ((path, _SHARD.fullmatch(path.name)) for path in sorted(files_of_steps(folder, "rank-*.safetensors")))
    return [path for path, match in shards if match is not None and int(match[1]) not in own]


class Spoiler:
    """Flip one byte in the middle of each file that it is shown, once."""

    def __init__(self) -> None:
        self._done: set[tuple[int, int]] = set()

    def spoil(self, path: Path) -> bool:
        """Flip a byte; return whether it was this call that did: not when done before, or the file is gone or empty."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # its generation has just been replaced by a newer one, or committed
            return False
        try:
            status = os.fstat(fd)
            if status.st_size == 0 or (status.st_dev, status.st_ino) in self._done:
                return False
            self._done.add((status.st_dev, status.st_ino))
            (byte,) = os.pread(fd, 1, status.st_size // 2)
            os.pwrite(fd, bytes([byte ^ 0x10]), status.st_size // 2)
            return True
        finally:
            os.close(fd)


_DIGEST_INTERVAL = 2
_MANTISSA_BITS = range(8, 20)
"""Of a float32: one that rounding does not level out, and that makes no number so large that it would be noticed."""
_LAYERS = "model.blocks.*"
_SLOW_FACTOR = 10.0
_SLOW_SCORE = 0.2
"""A rank that takes less than five times as long is not named: where four ranks share two cores, one that happens to
wait for a core takes several times as long for things of a few milliseconds."""
_REPORT_S = 1.0


def write_settings(
    path: Path, shape: Shape, *, checkpoints: Path, local: Path, faults: Sequence[DemoFault] = (), seed: int = 0
) -> None:
    """Write the settings of the training script.

    Args:
        path: The file, JSON; the plan of faults, if there are any, is put beside it.
        shape: The world's size and the intervals between saves.
        checkpoints: Folder of the global tier.
        local: Folder of all nodes' local folders.
        faults: What strikes; those that the demo causes from outside are left out.
        seed: Draws which tensors, elements and bits are struck.
    """
    settings: dict[str, Any] = {
        "checkpoint": {
            "directory": str(checkpoints),
            "local_directory": str(local),
            "save_interval": shape.global_save_interval,
            "non_persistent_save_interval": shape.save_interval,
        },
        "replica_digest": {"interval": _DIGEST_INTERVAL},
        "straggler_detection": {
            "enabled": True,
            "report_time_interval": _REPORT_S,
            "calc_individual_gpu_perf": False,  # a cycle is too short to know a rank's own best
            "noticeable_score": _SLOW_SCORE,
            "gpu_relative_perf_threshold": _SLOW_SCORE,
            "check_machine": False,  # all ranks share one
            "num_gpu_perf_scores_to_print": 0,
            "enable_logging": False,
        },
    }
    plan = fault_plan(faults, seed)
    if plan.faults:
        beside = path.with_name("faults.toml")
        beside.write_text(plan.to_toml())
        settings["fault_plan"] = str(beside)
    path.write_text(json.dumps(settings, indent=2) + "\n")


def fault_plan(faults: Sequence[DemoFault], seed: int) -> chaos.FaultPlan:
    """Return the faults that strike the training from within, as a plan that the session of each rank arms."""
    numbers = random.Random(seed)
    planned = []
    for fault in faults:
        what: dict[str, Any]
        match fault.deed:
            case Deed.SLOW:
                what = {"kind": "slow", "factor": _SLOW_FACTOR}
            case Deed.NAN:
                what = {"kind": "nan", "target": "activation", "tensor": _LAYERS}
            case Deed.FLIP:
                bit = numbers.choice(_MANTISSA_BITS)
                what = {"kind": "bit_flip", "target": "weight", "tensor": f"{_LAYERS}.weight", "bit": bit}
            case _:
                continue
        planned.append(chaos.Fault(rank=fault.rank, iteration=fault.iteration, name=fault.deed, **what))
    return chaos.FaultPlan(seed=seed, faults=tuple(planned))


_LOSS = re.compile(r"^iteration\s+(\d+)\s+loss\s+([-+.\w]+)$\n", re.MULTILINE)
_TAIL_LINES = 25
_END_S = 5.0
_STOP_S = 1.0
TIMEOUTS = (
    "--ft-rank-section-timeouts=setup:60,step:3,checkpointing:30",
    "--ft-rank-out-of-section-timeout=30",
    "--ft-node-heartbeat-timeout=4",
)


class Stage:
    """Train the example on nodes of this machine; use as a context manager, which ends every process.

    Args:
        script: The training script.
        folder: Its own folder: journal, generations, result and output. Each node's disk is a folder in ``local``.
        shape: The world's size and the number of iterations.
        faults: The faults of the run; those that strike from outside are not planned.
        seed: Draws what the faults leave open; the training's own seed is always the same.
        num_spares: Nodes more than train; which ones wait as spares is decided by who comes first.
        num_reserves: Nodes that come later: one each time that one is lost.

    Thread: the main thread.
    """

    def __init__(
        self,
        script: Path,
        *,
        folder: Path,
        shape: Shape,
        faults: Sequence[DemoFault] = (),
        seed: int = 0,
        num_spares: int = 0,
        num_reserves: int = 0,
    ) -> None:
        self.folder = folder
        self.shape = shape
        self.result_path = folder / "result.json"
        self.killed: list[str] = []
        """Nodes whose agent was killed on purpose."""
        self._local = folder / "local"
        self._config = folder / "outlast.json"
        self._faults, self._seed = faults, seed
        self._num_later, self._num_reserves = max(0, num_spares - 1), num_reserves
        self._spoiler = Spoiler()
        self._problems: list[str] = []
        self._events: list[Event] = []
        self._sizes: dict[str, int] = {}
        self._leaving: tuple[Agent, ...] = ()
        """Those whose run got a notice."""
        self._was_resumed = False
        self._journal: Journal | None = None
        self._cluster = Cluster(
            script,
            f"--config={self._config}",
            f"--iterations={shape.iterations}",
            f"--out={self.result_path}",
            run_dir=folder / "run",
            num_nodes=shape.num_nodes,
            num_spares=min(num_spares, 1),
            nproc_per_node=shape.nproc_per_node,
            options=TIMEOUTS,
        )

    def __enter__(self) -> Stage:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_settings(
            self._config,
            self.shape,
            checkpoints=self.folder / "checkpoints",
            local=self._local,
            faults=self._faults,
            seed=self._seed,
        )
        self._cluster.__enter__()
        # The agents count on one spare only (--nnodes=2:3). Were four nodes announced, each half of a divided network
        # could be complete: two that lost the coordinator together with its node would wait for the others.
        for _ in range(self._num_later):
            self._cluster.add_node()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self._cluster.close()
            if self._journal is not None:
                self._journal.close()

    @property
    def running(self) -> bool:
        """Whether any agent runs."""
        return any(agent.running for agent in self._cluster.agents)

    def look(self) -> Scene:
        """Return what the cluster looks like now."""
        self._read_journal()
        ranks = [one for agent in self._cluster.agents if agent.running for one in _read_boards(agent)]
        return Scene(
            ranks=tuple(sorted(ranks, key=lambda one: one.rank)),
            events=self._events,
            loss=self._read_loss(),
            running=tuple(agent.name for agent in self._cluster.agents if agent.running),
        )

    def strike(self, fault: DemoFault, scene: Scene) -> bool:
        """Cause a fault from outside, and write into the journal that and when it was caused.

        Returns:
            Whether it was caused: a rank is not stopped in the moments between two steps. Then try again.
        """
        if fault.deed.loses_node:
            assert fault.slot is not None
            self._lose(scene.holder(fault.slot), fault, scene)
            return True
        victim = next(one for one in scene.ranks if one.rank == fault.rank and one.cycle == scene.cycle)
        if fault.deed == Deed.STOP:
            if not self._stop(victim):
                return False
            self._note(fault, scene, node=victim.node, pid=victim.pid)
            return True
        self._note(fault, scene, node=victim.node, pid=victim.pid)
        if fault.deed == Deed.LEAVE:
            self._leaving = tuple(agent for agent in self._cluster.agents if agent.running)
        os.kill(victim.pid, signal.SIGTERM if fault.deed == Deed.LEAVE else signal.SIGKILL)
        return True

    @property
    def may_resume(self) -> bool:
        """Whether the run got a notice, has exited with its state saved, and can be started again."""
        left = bool(self._leaving) and all(_exit_code(agent) == ExitReason.PREEMPTED for agent in self._leaving)
        return left and not self._was_resumed

    def resume(self, scene: Scene) -> None:
        """Start the run again: another job, on the nodes that had ranks when it was left."""
        self._was_resumed = True
        for node in sorted(scene.ranks_by_node()):
            self._cluster.add_node(node)

    def problems(self) -> list[str]:
        """Return what went wrong with the processes, once all agents ended; empty = nothing.

        Blocks: up to 5 s, if processes are left behind.
        """
        found = list(self._problems)
        for agent in self._cluster.agents:
            expected = ExitReason.PREEMPTED if agent in self._leaving else ExitReason.FINISHED
            if (code := agent.wait(0)) != expected and agent.name not in self.killed:
                instead = "" if expected == ExitReason.FINISHED else f" instead of {expected}"
                found.append(f"the agent of {agent.name} ended with exit code {code}{instead}")
        try:
            self._cluster.assert_no_orphans(within_s=_END_S)
        except AssertionError as error:
            found.append(str(error))
        if not self.result_path.is_file():
            found.append("the training wrote no result")
        return found

    def events(self) -> list[Event]:
        """Return all that is in the journal."""
        self._read_journal()
        return list(self._events)

    def tails(self) -> str:
        """Return the end of every agent's output."""
        return "\n".join(agent.tail(_TAIL_LINES) for agent in self._cluster.agents)

    def _stop(self, victim: RankScene) -> bool:
        """Stop a rank's process within a step, whose timeout is short; return whether it is stopped."""
        os.kill(victim.pid, signal.SIGSTOP)
        process, deadline_s = psutil.Process(victim.pid), clock.now_s() + _STOP_S
        while process.status() != psutil.STATUS_STOPPED and clock.now_s() < deadline_s:
            time.sleep(0.001)
        now = (one for one in _read_boards(self._cluster.agent(victim.node)) if one.pid == victim.pid)
        if any(one.section.startswith("step") for one in now):
            return True
        os.kill(victim.pid, signal.SIGCONT)
        return False

    def _lose(self, name: str, fault: DemoFault, scene: Scene) -> None:
        """Lose a node with all that it holds: its processes, with the memory of its writer, and its disk."""
        survivors = {node: ranks for node, ranks in scene.ranks_by_node().items() if node != name}
        spoiled = self._spoil(survivors) if fault.deed == Deed.SPOIL else None
        self.killed.append(name)
        self._note(fault, scene, node=name, pid=self._cluster.agent(name).pid, copies_spoiled=spoiled)
        self._cluster.agent(name).kill()
        try:
            self._cluster.assert_no_orphans(within_s=_END_S)
            shutil.rmtree(self._local / name)
        except (AssertionError, OSError) as error:
            self._problems.append(f"{name} is not wholly gone: {error}")
        if fault.deed == Deed.SPOIL:
            self._spoil(survivors)  # those that came in between
        if self._num_reserves:
            self._num_reserves -= 1
            self._cluster.add_node()

    def _spoil(self, survivors: Mapping[str, tuple[int, ...]]) -> int:
        copies = [path for node, ranks in survivors.items() for path in find_copies(self._local / node, ranks)]
        return sum(self._spoiler.spoil(path) for path in copies)

    def _note(self, fault: DemoFault, scene: Scene, *, node: str, pid: int, copies_spoiled: int | None = None) -> None:
        if self._journal is None:
            job = next((event.job for event in scene.events), "demo")
            run_id = self._cluster.run_id
            self._journal = Journal(self._cluster.run_dir, run_id=run_id, job=job, node="demo", proc="demo")
        who = f"node {node}" if fault.rank is None else f"rank {fault.rank}"
        self._journal.write(
            EventKind.FAULT_SIMULATED,
            cycle=scene.cycle,
            rank=fault.rank,
            iteration=scene.iteration,
            fault=fault.deed,
            target=f"{who} (pid {pid})",
            expected=fault.deed.expected,
            node=node,
            copies_spoiled=copies_spoiled,
        )

    def _read_journal(self) -> None:
        """Read the journal, if it has grown since the last time."""
        paths = (self._cluster.run_dir / "journal").glob("*.jsonl")
        sizes = {path.name: path.stat().st_size for path in paths}
        if sizes != self._sizes:
            self._sizes = sizes
            self._events = list(read(self._cluster.run_dir))

    def _read_loss(self) -> Loss | None:
        for event in reversed(self._events):
            if event.kind == EventKind.CYCLE_STARTED and 0 in event.data["ranks"]:
                losses = _LOSS.findall(self._cluster.agent(event.node).output())
                return Loss(iteration=int(losses[-1][0]), value=float(losses[-1][1])) if losses else None
        return None


def _exit_code(agent: Agent) -> int | None:
    return None if agent.running else agent.wait(0)


def _read_boards(agent: Agent) -> Iterator[RankScene]:
    """Yield the ranks of an agent's running cycle, from the board in its memory."""
    found: dict[int, RankScene] = {}
    for state in held_pages(agent.pid):  # oldest cycle first
        found[state.global_rank] = RankScene(
            rank=state.global_rank,
            node=agent.name,
            pid=state.pid,
            cycle=state.cycle,
            iteration=state.iteration,
            section="/".join(section.name for section in state.sections),
        )
    yield from found.values()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals that end the demo wait: what is being ended must be ended to the last process and file.

    They are put off by handlers, as a mask of this thread would let another thread take them.

    Thread: the main thread.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
