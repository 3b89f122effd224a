"""Workers start only once the GPU memory of their killed predecessors is free, and wait for a limited time.

Only NVML is replaced, in the probe process: the stand-in reads the memory in use from a file.
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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from simulated_agent import SimulatedAgent, simulated_cycle

from outlast.config import FaultToleranceConfig, HealthConfig
from outlast.health.devices import read_memory_use
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.launch import device_memory
from outlast.launch import protocol as m
from outlast.launch.agent_events import SignalReceived
from outlast.launch.checkups import CheckedUp, Occasion
from outlast.launch.device_memory import MemoryReclaim, MemoryReclaimed, choose_gpus, find_held
from outlast.launch.node_agent import AgentState
from outlast.launch.node_health import NodeHealth
from outlast.runtime.fork_server import Cleared, Exited, Started
from outlast.testing.ranks import TOKEN, LoggedProcess, end_processes, having_argument, processes_with

GIB = 2**30
BEFORE = GIB // 2
"""Memory in use by other processes."""
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
"""A rank that records the memory in use as it starts, takes memory, and is killed, alone or with the process that
forked it, once the agent has recorded that the rank runs."""


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
def test_visible_gpus_are_selected(visible: str | None, chosen: str) -> None:
    """GPUs are selected by index, UUID or prefix of a UUID; if the selection is ambiguous, all GPUs count."""
    assert choose_gpus(["GPU-aa", "GPU-ab", "GPU-b"], visible) == tuple(f"GPU-{name}" for name in chosen.split())


def test_memory_beyond_the_baseline_is_held() -> None:
    """Memory in use before, memory within the tolerance and GPUs that were not there before do not count as held."""
    used = {"GPU-0": 100, "GPU-1": 111, "GPU-2": 50, "GPU-3": 10}
    assert find_held(used, {"GPU-0": 90, "GPU-1": 100, "GPU-2": 100}, tolerance_bytes=10) == {"GPU-1": 11}


# -- the wait ------------------------------------------------------------------------------------------------------


def set_use(folder: Path, num_bytes: int) -> None:
    """Set the memory in use on the second GPU of the stand-in for NVML."""
    (folder / "new").write_text(str(num_bytes))
    (folder / "new").replace(folder / "used")


def wait_until(condition: Callable[[], Any], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a stand-in for NVML for probe processes of a node with GPUs."""
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(PYNVML)
    set_use(folder, BEFORE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).strip(":"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device_memory, "has_gpus", lambda: True)
    return folder


class Reclaim:
    """A memory reclaim and its owner's mailbox."""

    def __init__(self, **settings: float) -> None:
        self.mailbox: queue.SimpleQueue[MemoryReclaimed] = queue.SimpleQueue()
        self.memory = MemoryReclaim(FaultToleranceConfig(**settings), self.mailbox.put)  # type: ignore[arg-type]

    def wait(self) -> MemoryReclaimed:
        """Wait once, as an agent does, and return the result."""
        self.memory.begin()
        return self.take()

    def take(self) -> MemoryReclaimed:
        result = self.mailbox.get(timeout=300)
        self.memory.take(result)
        return result


@pytest.fixture
def make_reclaim() -> Iterator[Callable[..., Reclaim]]:
    """Return a function that creates a memory reclaim; all are closed at the end."""
    made: list[Reclaim] = []

    def make(**settings: float) -> Reclaim:
        made.append(Reclaim(**settings))
        return made[-1]

    yield make
    for reclaim in made:
        reclaim.memory.close()
    wait_until(lambda: not threads() and not probes())


def probes() -> list[psutil.Process]:
    """Return the probe processes of this process."""
    return having_argument(psutil.Process().children(), "outlast.health.node")


def threads() -> list[threading.Thread]:
    return [reclaim for reclaim in threading.enumerate() if reclaim.name == "outlast-gpu-memory"]


@pytest.mark.process
def test_memory_of_started_workers_is_awaited(nvml: Path, make_reclaim: Callable[..., Reclaim]) -> None:
    """The first workers wait only for a reading; the next ones until the memory is free, however late."""
    reclaim = make_reclaim(gpu_memory_reclaim_timeout=600, gpu_memory_poll_interval=0.01)
    assert reclaim.memory.is_awaited
    assert reclaim.wait() == MemoryReclaimed()
    assert not reclaim.memory.is_awaited
    reclaim.memory.begin()  # no workers were started since
    reclaim.memory.note_started()
    set_use(nvml, 3 * GIB)
    reclaim.memory.begin()
    reclaim.memory.begin()
    wait_until(lambda: (nvml / "readings").read_text().count(str(3 * GIB)) >= 3)
    assert reclaim.memory.is_awaited
    assert reclaim.mailbox.empty()
    set_use(nvml, BEFORE + 2**20)
    assert reclaim.take().waited_s > 0
    assert not reclaim.memory.is_awaited
    assert reclaim.mailbox.empty()
    assert len(probes()) == len(threads()) == 1


@pytest.mark.process
def test_memory_that_is_not_released_is_awaited_once(
    nvml: Path, make_reclaim: Callable[..., Reclaim], caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that is not released delays workers for a limited time and is logged once with GPU and amount; from then
    on it counts as another process's memory."""
    reclaim = make_reclaim(gpu_memory_reclaim_timeout=0.5, gpu_memory_poll_interval=0.01, gpu_memory_tolerance_mb=100)
    reclaim.wait()
    for used, num_warnings in ((3 * GIB, 1), (3 * GIB, 1), (BEFORE, 1), (GIB, 2)):
        set_use(nvml, used)
        reclaim.memory.note_started()
        assert reclaim.memory.is_awaited
        reclaim.wait()
        assert not reclaim.memory.is_awaited
        assert caplog.text.count("GPU memory was not released") == num_warnings
    assert "GPU-1 has 2.50 GiB more in use than before the workers; the next workers start nevertheless" in caplog.text
    assert "GPU-1 has 0.50 GiB more" in caplog.text
    assert "GPU-0" not in caplog.text


@pytest.mark.process
def test_memory_of_invisible_gpus_is_not_awaited(
    nvml: Path, make_reclaim: Callable[..., Reclaim], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory of another job's workers on another GPU of the node delays no worker."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    reclaim = make_reclaim(gpu_memory_reclaim_timeout=600)
    reclaim.wait()
    set_use(nvml, 3 * GIB)
    reclaim.memory.note_started()
    reclaim.wait()
    assert not caplog.records


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_hung_or_dead_probe_does_not_block_workers(
    number: int,
    nvml: Path,
    make_reclaim: Callable[..., Reclaim],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a hung driver the memory in use is unknown: workers start after a limited time with a warning, and the next
    wait has a new probe process."""
    reclaim = make_reclaim(gpu_memory_reclaim_timeout=600)
    reclaim.wait()
    (probe,) = probes()
    os.kill(probe.pid, number)
    with monkeypatch.context() as patch:
        patch.setattr(device_memory, "_READ_S", 1.0)
        reclaim.memory.note_started()
        assert not reclaim.wait().is_last
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "workers start without a wait for GPU memory" in record.getMessage()
    assert not reclaim.memory.is_awaited
    assert not probe.is_running()
    reclaim.memory.note_started()
    reclaim.wait()
    assert len(caplog.records) == 1


@pytest.mark.process
def test_nothing_is_awaited_without_nvml(
    nvml: Path, make_reclaim: Callable[..., Reclaim], caplog: pytest.LogCaptureFixture
) -> None:
    """One line at the start reports that NVML is missing, and no thread or process is left."""
    caplog.set_level(logging.INFO)
    (nvml / "pynvml.py").write_text("raise ImportError")
    reclaim = make_reclaim()
    reclaim.memory.begin()
    assert reclaim.take().is_last
    wait_until(lambda: not threads() and not probes())
    reclaim.memory.note_started()
    assert not reclaim.memory.is_awaited
    reclaim.memory.begin()
    (record,) = caplog.records
    assert (record.levelno, "nvidia-ml-py is not installed" in record.getMessage()) == (logging.INFO, True)


@pytest.mark.process
@pytest.mark.parametrize("case", ["no GPU", "switched off", "hidden"])
def test_nothing_is_awaited_without_gpus(
    case: str, make_reclaim: Callable[..., Reclaim], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, with a timeout of 0 and with all GPUs hidden there is no thread, no process and no wait."""
    monkeypatch.setattr(device_memory, "has_gpus", lambda: case != "no GPU")
    if case == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reclaim = make_reclaim(**({"gpu_memory_reclaim_timeout": 0.0} if case == "switched off" else {}))
    reclaim.memory.begin()
    reclaim.memory.note_started()
    assert not reclaim.memory.is_awaited
    assert not threads()
    assert not probes()


@pytest.mark.process
def test_close_interrupts_a_wait(
    nvml: Path, make_reclaim: Callable[..., Reclaim], caplog: pytest.LogCaptureFixture
) -> None:
    """A job that ends during a wait for memory leaves no thread or process and logs no warning."""
    reclaim = make_reclaim(gpu_memory_reclaim_timeout=600, gpu_memory_poll_interval=300)
    reclaim.wait()
    set_use(nvml, 3 * GIB)
    reclaim.memory.note_started()
    reclaim.memory.begin()
    wait_until(lambda: str(3 * GIB) in (nvml / "readings").read_text())
    reclaim.memory.close()
    reclaim.memory.close()
    wait_until(lambda: not threads() and not probes())
    assert not caplog.records


# -- the agent -----------------------------------------------------------------------------------------------------


def test_the_wait_follows_workers_and_checks(tmp_path: Path) -> None:
    """The wait begins once all workers are gone and after a check of the GPUs, which uses memory as well."""
    with closing(SimulatedAgent(tmp_path, "--nnodes=2")) as agent:
        begin = agent.memory.begin

        def begins() -> bool:
            is_called = begin.called
            begin.reset_mock()
            return is_called

        agent.join()
        assert begins(), "no worker is left"
        agent.run(simulated_cycle(tmp_path))
        begins()
        agent.receive(m.Remark(text="while training"))
        assert not begins(), "the workers run"
        for number, uses_gpus in enumerate((False, True), 1):
            agent.report(Exited(key=0, pid=1, exit_code=1, mono_ns=1))
            agent.report(Exited(key=1, pid=2, exit_code=1, mono_ns=1))
            assert agent.state == AgentState.JOINING
            assert not begins(), "killed workers are not reaped yet"
            agent.report(Cleared())
            assert begins() is not uses_gpus
            agent.receive(CheckedUp(Occasion.FAULT, ()))
            assert begins()
            agent.run(simulated_cycle(tmp_path, number))
            begins()
        for key in range(2):
            agent.report(Started(key=key, pid=key + 1))
        agent.receive(SignalReceived(signal.SIGTERM))
        assert agent.state == AgentState.LEAVING
        assert not begins(), "no cycle follows"


def test_a_gpu_check_uses_the_gpus_until_its_result() -> None:
    """From its second fault on a node's GPUs are checked, and are in use until the result is there."""
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
    """`outlast run` on a node with GPUs, with a rank that takes memory and is killed."""

    def __init__(self, folder: Path, nvml: Path, process: LoggedProcess) -> None:
        self.folder, self.nvml, self.process = folder, nvml, process

    def in_use_at_start(self, cycle: int) -> int | None:
        """Return the memory in use when a cycle's rank started; ``None`` if it has not started."""
        path = self.nvml / f"cycle-{cycle}"
        return int(path.read_text()) if path.exists() and path.read_text() else None

    def wait_for_readings(self, num_bytes: int, times: int) -> None:
        """Wait until the agent has read this much memory in use, as often as given."""

        def is_read() -> bool:
            assert self.process.running, self.process.tail()
            readings = (self.nvml / "readings").read_text() if (self.nvml / "readings").exists() else ""
            return readings.split().count(str(num_bytes)) >= times

        wait_until(is_read)


@contextmanager
def launched(folder: Path, nvml: Path, *options: str, num_faults: int = 1, victim: str = "rank") -> Iterator[Launched]:
    (folder / "train.py").write_text(LEAKS)
    token = uuid.uuid4().hex
    arguments = ["--nproc-per-node=1", f"--run-dir={folder / 'run'}", "--no-health-check", *options]
    script = [str(folder / "train.py"), str(nvml), str(num_faults), victim, str(folder / "run")]
    command = [sys.executable, "-c", LAUNCHER, "run", *arguments, *script]
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
def test_a_restart_waits_for_the_release_of_memory(victim: str, nvml: Path, tmp_path: Path) -> None:
    """After a rank or its fork server is killed, no rank starts until the memory is released; log and journal have the
    wait."""
    options = "--ft-gpu-memory-reclaim-timeout=600", "--ft-gpu-memory-poll-interval=0.2"
    with launched(tmp_path, nvml, *options, victim=victim) as run:
        run.wait_for_readings(3 * GIB, times=8)
        assert run.in_use_at_start(0) == BEFORE
        assert run.in_use_at_start(1) is None
        set_use(nvml, BEFORE)
        assert run.process.wait(300) == 0, run.process.tail()
        assert run.in_use_at_start(1) == BEFORE
        assert "the GPU memory of the previous workers was released after" in run.process.output()
    starts = [event.data for event in read(tmp_path / "run") if event.kind == EventKind.CYCLE_STARTED]
    assert "gpu_memory_wait_s" not in starts[0]
    assert starts[1]["gpu_memory_wait_s"] > 1


@pytest.mark.process
@pytest.mark.slow
def test_a_restart_waits_for_memory_once_up_to_the_timeout(nvml: Path, tmp_path: Path) -> None:
    """Memory that is never released delays the restart up to the timeout, after the first fault only; the job
    continues."""
    with launched(tmp_path, nvml, "--ft-gpu-memory-reclaim-timeout=1", num_faults=2) as run:
        assert run.process.wait(300) == 0, run.process.tail()
        assert [run.in_use_at_start(cycle) for cycle in range(3)] == [BEFORE, 3 * GIB, 3 * GIB]
        assert run.process.output().count("GPU memory was not released within") == 1


@pytest.mark.process
@pytest.mark.slow
def test_a_waiting_job_can_be_stopped(nvml: Path, tmp_path: Path) -> None:
    """SIGTERM ends an agent that waits for memory at once, with all its processes."""
    with launched(tmp_path, nvml, "--ft-gpu-memory-reclaim-timeout=3600") as run:
        run.wait_for_readings(3 * GIB, times=2)
        run.process.signal(signal.SIGTERM)
        assert run.process.wait(120) == 143, run.process.tail()
        assert run.in_use_at_start(1) is None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.process
def test_memory_of_a_killed_process_is_released(make_reclaim: Callable[..., Reclaim], tmp_path: Path) -> None:
    """On a real GPU the wait for a killed process with 2 GiB ends with the memory in use at its value before."""
    before = read_memory_use()
    assert isinstance(before, dict), before
    reclaim = make_reclaim()
    reclaim.wait()
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
        reclaim.memory.note_started()
        held = read_memory_use()
        assert isinstance(held, dict)
        assert any((held[gpu] or 0) - (before[gpu] or 0) >= 2**31 for gpu in before)
    finally:
        process.kill()
    assert not reclaim.wait().is_last
    after = read_memory_use()
    assert isinstance(after, dict)
    assert all((after[gpu] or 0) - (before[gpu] or 0) <= 512 * 2**20 for gpu in before)
