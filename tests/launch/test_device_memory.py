"""Workers start only once the GPU memory of those that were killed before them is free, and wait for it within bounds.

NVML alone is a stand-in here, which the probe process finds in NVML's place: it reads what is in use from a file.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from outlast.config import FaultToleranceConfig, HealthConfig
from outlast.health.devices import read_memory_use
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.launch import device_memory
from outlast.launch.checkups import CheckedUp, Occasion
from outlast.launch.device_memory import MemoryReclaim, MemoryReclaimed, choose_gpus, find_held
from outlast.launch.node_agent import AgentState, NodeAgent
from outlast.launch.node_health import NodeHealth
from outlast.testing.ranks import TOKEN, LoggedProcess, end_processes, processes_with

GIB = 2**30
BEFORE = GIB // 2
"""What others have in use."""
PYNVML = """
import os
from types import SimpleNamespace

FOLDER = os.path.dirname(__file__)

class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlShutdown():
    pass

def nvmlDeviceGetCount():
    return 2

def nvmlDeviceGetHandleByIndex(index):
    return index

def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}"

def nvmlDeviceGetMemoryInfo(handle):
    if handle == 0:
        return SimpleNamespace(used=0)
    with open(f"{FOLDER}/used") as file:
        used = int(file.read())
    with open(f"{FOLDER}/readings", "a") as file:
        file.write(f"{used}\\n")
    return SimpleNamespace(used=used)
"""
LAUNCHER = """
import sys
import outlast.launch.device_memory as device_memory
from outlast.cli.main import main

device_memory.has_gpus = lambda: True
sys.exit(main())
"""
"""`outlast run` on a node that has GPUs."""
LEAKS = """
import os, pathlib, signal, sys, time

folder, cycle = pathlib.Path(sys.argv[1]), int(os.environ["OUTLAST_CYCLE"])
(folder / f"cycle-{cycle}").write_text((folder / "used").read_text())
if cycle < int(sys.argv[2]):
    (folder / "new").write_text(str(3 * 2**30))
    (folder / "new").replace(folder / "used")
    journals = lambda: pathlib.Path(sys.argv[4]).rglob("*.jsonl")
    while sum(one.read_text().count('"cycle_started"') for one in journals()) <= cycle:
        time.sleep(0.01)
    os.kill(os.getppid() if sys.argv[3] == "fork server" else os.getpid(), signal.SIGKILL)
    signal.pause()
"""
"""A rank that notes what is in use as it starts, takes memory, and is killed, alone or with what forked it: once the
agent has written that it runs, of which it hears from what forked it."""


# -- decisions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, "aa ab b"),
        ("", ""),
        ("-1", ""),
        ("0", "aa"),
        (" 2,0", "b aa"),
        ("0,-1,1", "aa"),
        ("GPU-b", "b"),
        ("GPU-ab,0", "ab aa"),
        ("GPU-a", "aa ab b"),
        ("GPU-c", "aa ab b"),
        ("3", "aa ab b"),
        ("MIG-1234", "aa ab b"),
    ],
)
def test_gpus_that_workers_can_see_count(visible: str | None, chosen: str) -> None:
    """They are named by index, by UUID or by its beginning; if it is not certain which are meant, all of them count."""
    assert choose_gpus(["GPU-aa", "GPU-ab", "GPU-b"], visible) == tuple(f"GPU-{name}" for name in chosen.split())


def test_memory_is_held_where_more_is_in_use_than_before() -> None:
    """What was in use before counts for nothing, the tolerance is not waited for, nor a GPU that was not there."""
    used = {"GPU-0": 100, "GPU-1": 111, "GPU-2": 50, "GPU-3": 10}
    assert find_held(used, {"GPU-0": 90, "GPU-1": 100, "GPU-2": 100}, tolerance_bytes=10) == {"GPU-1": 11}


# -- the wait ------------------------------------------------------------------------------------------------------


def lay_use(folder: Path, num_bytes: int) -> None:
    """Have the stand-in for NVML report this much in use on its second GPU."""
    (folder / "new").write_text(str(num_bytes))
    (folder / "new").replace(folder / "used")


def wait_until(condition: Callable[[], Any], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a stand-in for NVML, which probe processes use; the node has GPUs."""
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(PYNVML)
    lay_use(folder, BEFORE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).strip(":"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device_memory, "has_gpus", lambda: True)
    return folder


class Waiting:
    """What waits for the memory, and its owner's mailbox."""

    def __init__(self, **settings: float) -> None:
        self.mailbox: queue.SimpleQueue[MemoryReclaimed] = queue.SimpleQueue()
        self.memory = MemoryReclaim(FaultToleranceConfig(**settings), self.mailbox.put)  # type: ignore[arg-type]

    def wait(self) -> MemoryReclaimed:
        """Wait once, as an agent does, and return what came of it."""
        self.memory.begin()
        return self.take()

    def take(self) -> MemoryReclaimed:
        over = self.mailbox.get(timeout=300)
        self.memory.take(over)
        return over


@pytest.fixture
def waiting() -> Iterator[Callable[..., Waiting]]:
    """Return a function that makes one; all are closed at the end."""
    made: list[Waiting] = []

    def make(**settings: float) -> Waiting:
        made.append(Waiting(**settings))
        return made[-1]

    yield make
    for one in made:
        one.memory.close()
    wait_until(lambda: not threads() and not probes())


def probes() -> list[psutil.Process]:
    """Return the probe processes of this process."""
    return [one for one in psutil.Process().children() if "outlast.health.node" in one.cmdline()]


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "outlast-gpu-memory"]


@pytest.mark.process
def test_memory_is_waited_for_once_workers_have_started(nvml: Path, waiting: Callable[..., Waiting]) -> None:
    """The first workers wait for a reading alone; the next ones until the memory is back, however late."""
    one = waiting(gpu_memory_reclaim_timeout=600, gpu_memory_poll_interval=0.01)
    assert one.memory.is_awaited
    assert one.wait() == MemoryReclaimed()
    assert not one.memory.is_awaited
    one.memory.begin()  # no workers were there since
    one.memory.note_started()
    lay_use(nvml, 3 * GIB)
    one.memory.begin()
    one.memory.begin()
    wait_until(lambda: (nvml / "readings").read_text().count(str(3 * GIB)) >= 3)
    assert one.memory.is_awaited
    assert one.mailbox.empty()
    lay_use(nvml, BEFORE + 2**20)
    assert one.take().waited_s > 0
    assert not one.memory.is_awaited
    assert one.mailbox.empty()
    assert len(probes()) == len(threads()) == 1


@pytest.mark.process
def test_memory_that_stays_is_waited_for_once(
    nvml: Path, waiting: Callable[..., Waiting], caplog: pytest.LogCaptureFixture
) -> None:
    """It holds workers back for a bounded time; one warning names GPU and amount; then it counts as another's, and less
    of it again once it has come back."""
    one = waiting(gpu_memory_reclaim_timeout=0.5, gpu_memory_poll_interval=0.01, gpu_memory_tolerance_mb=100)
    one.wait()
    for used, num_warnings in ((3 * GIB, 1), (3 * GIB, 1), (BEFORE, 1), (GIB, 2)):
        lay_use(nvml, used)
        one.memory.note_started()
        assert one.memory.is_awaited
        one.wait()
        assert not one.memory.is_awaited
        assert caplog.text.count("GPU memory was not released") == num_warnings
    assert "GPU-1 has 2.50 GiB more in use than before the workers; the next workers start nevertheless" in caplog.text
    assert "GPU-1 has 0.50 GiB more" in caplog.text
    assert "GPU-0" not in caplog.text


@pytest.mark.process
def test_memory_of_gpus_that_are_not_visible_is_not_waited_for(
    nvml: Path, waiting: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What another job's workers take on another GPU of the node keeps nobody waiting."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one = waiting(gpu_memory_reclaim_timeout=600)
    one.wait()
    lay_use(nvml, 3 * GIB)
    one.memory.note_started()
    one.wait()
    assert not caplog.records


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_probe_that_hangs_or_dies_keeps_nobody_waiting(
    number: int,
    nvml: Path,
    waiting: Callable[..., Waiting],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A driver that does not return means memory that is not known: workers start after a bounded time, with a warning.
    The next wait has another probe process."""
    one = waiting(gpu_memory_reclaim_timeout=600)
    one.wait()
    (probe,) = probes()
    os.kill(probe.pid, number)
    with monkeypatch.context() as patch:
        patch.setattr(device_memory, "_READ_S", 1.0)
        one.memory.note_started()
        assert not one.wait().is_last
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "workers start without a wait for GPU memory" in record.getMessage()
    assert not one.memory.is_awaited
    assert not probe.is_running()
    one.memory.note_started()
    one.wait()
    assert len(caplog.records) == 1


@pytest.mark.process
def test_without_nvml_nothing_is_waited_for(
    nvml: Path, waiting: Callable[..., Waiting], caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so at the start, and neither a thread nor a process stays."""
    caplog.set_level(logging.INFO)
    (nvml / "pynvml.py").write_text("raise ImportError")
    one = waiting()
    one.memory.begin()
    assert one.take().is_last
    wait_until(lambda: not threads() and not probes())
    one.memory.note_started()
    assert not one.memory.is_awaited
    one.memory.begin()
    (record,) = caplog.records
    assert (record.levelno, "nvidia-ml-py is not installed" in record.getMessage()) == (logging.INFO, True)


@pytest.mark.process
@pytest.mark.parametrize("why", ["no GPU", "switched off", "hidden"])
def test_a_node_without_gpus_has_nothing_for_it(
    why: str, waiting: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, with a timeout of 0, and with all GPUs hidden: no thread, no process, no wait."""
    monkeypatch.setattr(device_memory, "has_gpus", lambda: why != "no GPU")
    if why == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one = waiting(**({"gpu_memory_reclaim_timeout": 0.0} if why == "switched off" else {}))
    one.memory.begin()
    one.memory.note_started()
    assert not one.memory.is_awaited
    assert not threads()
    assert not probes()


@pytest.mark.process
def test_the_end_cuts_a_wait_short(
    nvml: Path, waiting: Callable[..., Waiting], caplog: pytest.LogCaptureFixture
) -> None:
    """A job that ends while memory is waited for leaves neither thread nor process, and no complaint about it."""
    one = waiting(gpu_memory_reclaim_timeout=600, gpu_memory_poll_interval=300)
    one.wait()
    lay_use(nvml, 3 * GIB)
    one.memory.note_started()
    one.memory.begin()
    wait_until(lambda: str(3 * GIB) in (nvml / "readings").read_text())
    one.memory.close()
    one.memory.close()
    wait_until(lambda: not threads() and not probes())
    assert not caplog.records


# -- the agent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "are_cleared", "uses_gpus", "begins"),
    [
        (AgentState.JOINING, True, False, True),
        (AgentState.JOINING, False, False, False),
        (AgentState.JOINING, True, True, False),
        (AgentState.RUNNING, True, False, False),
        (AgentState.LEAVING, True, False, False),
    ],
)
def test_an_agent_waits_when_neither_workers_nor_a_check_have_the_memory(
    state: AgentState, are_cleared: bool, uses_gpus: bool, begins: bool
) -> None:
    """Memory is looked at when all workers are gone, and behind a check of the GPUs, which takes some for itself."""
    agent: Any = Mock(_state=state, _is_done=False, _start=None)
    agent._workers.are_cleared, agent._health.uses_gpus, agent._health.stop = are_cleared, uses_gpus, None
    NodeAgent._advance(agent)
    assert agent._memory.begin.called is begins


@pytest.mark.parametrize("is_awaited", [True, False])
def test_no_worker_starts_while_memory_is_waited_for(is_awaited: bool) -> None:
    """A start that was ordered stays where it is until the wait is over."""
    agent: Any = Mock(_state=AgentState.JOINING, _is_done=False)
    agent._health.stop, agent._health.is_looking, agent._memory.is_awaited = None, False, is_awaited
    NodeAgent._advance(agent)
    assert agent._start_cycle.called is not is_awaited


def test_a_check_of_the_gpus_comes_before_the_wait() -> None:
    """From its second fault on a node's GPUs are checked: they are in use until the result is there."""
    checkups: Any = Mock(config=HealthConfig(before_joining=False))
    others = {"client": Mock(), "journal": Mock(), "timers": Mock()}
    health = NodeHealth(checkups, **others, is_alone=False)
    for is_checked in (False, True):
        health.suspect()
        health.note_cleared()
        assert health.uses_gpus is is_checked
        health.take(CheckedUp(Occasion.FAULT, ()))
        assert not health.uses_gpus


class Launched:
    """`outlast run` on a node that has GPUs, with a rank that takes memory and is killed."""

    def __init__(self, folder: Path, nvml: Path, process: LoggedProcess) -> None:
        self.folder, self.nvml, self.process = folder, nvml, process

    def in_use_at_start(self, cycle: int) -> int | None:
        """Return what was in use as a cycle's rank started; ``None`` = it has not."""
        path = self.nvml / f"cycle-{cycle}"
        return int(path.read_text()) if path.exists() and path.read_text() else None

    def wait_until_looked_at(self, num_bytes: int, times: int) -> None:
        """Wait until the agent has seen this much in use, so many times."""

        def is_seen() -> bool:
            assert self.process.running, self.process.tail()
            seen = (self.nvml / "readings").read_text() if (self.nvml / "readings").exists() else ""
            return seen.split().count(str(num_bytes)) >= times

        wait_until(is_seen)


@contextmanager
def launched(folder: Path, nvml: Path, *options: str, num_faults: int = 1, victim: str = "rank") -> Iterator[Launched]:
    (folder / "train.py").write_text(LEAKS)
    token = uuid.uuid4().hex
    words = ["--nproc-per-node=1", f"--run-dir={folder / 'run'}", "--no-health-check", *options]
    script = [str(folder / "train.py"), str(nvml), str(num_faults), victim, str(folder / "run")]
    command = [sys.executable, "-c", LAUNCHER, "run", *words, *script]
    process = LoggedProcess("agent", command, {**os.environ, TOKEN: token}, folder / "log")
    try:
        yield Launched(folder, nvml, process)
        if not process.running:
            wait_until(lambda: not processes_with(token), 60)
    finally:
        if process.running:
            process.kill()
        end_processes(token)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "fork server"])
def test_a_restart_waits_for_memory_that_comes_back_late(victim: str, nvml: Path, tmp_path: Path) -> None:
    """A rank is killed, or what forked it, and its memory stays in use: no rank starts until it is free; log and
    journal have the wait."""
    options = "--ft-gpu-memory-reclaim-timeout=600", "--ft-gpu-memory-poll-interval=0.2"
    with launched(tmp_path, nvml, *options, victim=victim) as run:
        run.wait_until_looked_at(3 * GIB, times=8)
        assert run.in_use_at_start(0) == BEFORE
        assert run.in_use_at_start(1) is None
        lay_use(nvml, BEFORE)
        assert run.process.wait(300) == 0, run.process.tail()
        assert run.in_use_at_start(1) == BEFORE
        assert "the GPU memory of the previous workers was released after" in run.process.output()
    starts = [event.data for event in read(tmp_path / "run") if event.kind == EventKind.CYCLE_STARTED]
    assert "gpu_memory_wait_s" not in starts[0]
    assert starts[1]["gpu_memory_wait_s"] > 1


@pytest.mark.process
@pytest.mark.slow
def test_a_restart_does_not_wait_forever(nvml: Path, tmp_path: Path) -> None:
    """Memory that never comes back is waited for up to the timeout, after the first fault alone; the job goes on."""
    with launched(tmp_path, nvml, "--ft-gpu-memory-reclaim-timeout=1", num_faults=2) as run:
        assert run.process.wait(300) == 0, run.process.tail()
        assert [run.in_use_at_start(cycle) for cycle in range(3)] == [BEFORE, 3 * GIB, 3 * GIB]
        assert run.process.output().count("GPU memory was not released within") == 1


@pytest.mark.process
@pytest.mark.slow
def test_a_job_can_be_stopped_while_memory_is_waited_for(nvml: Path, tmp_path: Path) -> None:
    """SIGTERM ends an agent that waits, at once, with all that it has started."""
    with launched(tmp_path, nvml, "--ft-gpu-memory-reclaim-timeout=3600") as run:
        run.wait_until_looked_at(3 * GIB, times=2)
        run.process.signal(signal.SIGTERM)
        assert run.process.wait(120) == 143, run.process.tail()
        assert run.in_use_at_start(1) is None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.process
def test_memory_of_a_killed_process_comes_back(waiting: Callable[..., Waiting], tmp_path: Path) -> None:
    """On a real GPU: a process takes 2 GiB and is killed; the wait ends, and what is in use is what was before."""
    before = read_memory_use()
    assert isinstance(before, dict), before
    one = waiting()
    one.wait()
    code = (
        "import pathlib, signal, sys, torch\n"
        "held = torch.ones(2**31, dtype=torch.uint8, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "holds")]
    process = LoggedProcess("holder", command, dict(os.environ), tmp_path / "log")
    try:
        wait_until((tmp_path / "holds").exists)
        one.memory.note_started()
        held = read_memory_use()
        assert isinstance(held, dict)
        assert any((held[gpu] or 0) - (before[gpu] or 0) >= 2**31 for gpu in before)
    finally:
        process.kill()
    assert not one.wait().is_last
    after = read_memory_use()
    assert isinstance(after, dict)
    assert all((after[gpu] or 0) - (before[gpu] or 0) <= 512 * 2**20 for gpu in before)
