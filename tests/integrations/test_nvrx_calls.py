"""NVRx's asynchronous calls, straggler detector and injected faults, as two real ranks use them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import multiprocessing
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from pages import run_python

from outlast.errors import CheckpointError, ConfigError, OutlastError
from outlast.integrations.nvrx import async_calls
from outlast.integrations.nvrx.async_calls import AsyncCallsQueue, AsyncRequest, abort_nvrx_checkpoint
from outlast.integrations.nvrx.fault_injection import (
    WorkloadFault,
    dispatch_fault_injection,
    inject_fault,
    register_fault,
)
from outlast.integrations.nvrx.straggler import (
    CallableId,
    Detector,
    PerformanceReport,
    ReportGenerator,
    Statistic,
    StragglerId,
)
from outlast.testing import RankProcesses

SCRIPT = Path(__file__).with_name("nvrx_two_ranks.py")


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_two_ranks_agree_on_calls_stragglers_and_timeouts() -> None:
    """Two real ranks agree on asynchronous calls, on stragglers and on calculated timeouts; a missing peer is an
    error in time."""
    with RankProcesses("outlast.integrations.nvrx", str(SCRIPT), world_size=2, module=True) as ranks:
        codes = ranks.wait(timeout_s=300)
        assert codes == [0, 0], ranks.output(0) + ranks.output(1)
        for rank in range(2):
            assert "ok" in ranks.output(rank).splitlines()


def test_save_is_logged_when_scheduled_and_when_committed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Scheduling and commit of a save are logged once each at INFO; a failed save has no commit line."""
    caplog.set_level("INFO")
    calls = AsyncCallsQueue()

    def fail() -> None:
        raise OSError("full")

    for work in (print, fail):
        calls.schedule_async_request(AsyncRequest(work, (), []))
        with contextlib.suppress(CheckpointError):
            calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    messages = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert messages == [
        "Scheduling async checkpoint save (call 0)",
        "async checkpoint save (call 0) is committed",
        "Scheduling async checkpoint save (call 1)",
    ]


class Training:
    """A model whose optimizer steps on the CPU, with values that change in place."""

    def __init__(self) -> None:
        self.weights = torch.nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.AdamW([self.weights], lr=0.1)
        self.counters = {"samples": 0, "seen": [0]}
        self.order = numpy.zeros(2)

    def step(self) -> None:
        self.weights.grad = torch.ones(4)
        self.optimizer.step()
        self.counters["samples"] += 8  # type: ignore[operator]
        self.counters["seen"][0] += 1  # type: ignore[index]
        self.order += 1

    def state(self) -> dict[str, Any]:
        """Return the state as a loop passes it: nothing is copied."""
        moments = self.optimizer.state[self.weights]
        return {"weights": self.weights, **moments, "counters": self.counters, "order": self.order}


def values(state: dict[str, Any]) -> list[Any]:
    """Return the values that differ between iterations."""
    numbers = [state[name].tolist() for name in ("weights", "step", "exp_avg", "order")]
    return [*numbers, state["counters"]["samples"], state["counters"]["seen"][0]]


class Stage:
    """A callable object that stages; its result refers to the training's state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __call__(self) -> dict[str, Any]:
        return self.state


def stage(state: dict[str, Any], *, non_blocking: bool) -> dict[str, Any]:
    """Stage as Megatron does: a tensor on the CPU is passed on."""
    to_cpu = {name: one.to("cpu", non_blocking=non_blocking) for name, one in state.items() if torch.is_tensor(one)}
    return {**state, **to_cpu}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("passed", ["argument", "keyword", "partial", "staged", "stage_object"])
def test_late_call_writes_the_values_of_its_request(persistent: bool, passed: str) -> None:
    """A call that runs two steps later writes the values of the iteration in which it was scheduled; tensors that
    shared memory share it again."""
    training, may_write = Training(), threading.Event()
    written: list[dict[str, Any]] = []
    for _ in range(3):
        training.step()
    expected = values(copy.deepcopy(training.state()))

    def write(gate: threading.Event, state: dict[str, Any]) -> None:
        gate.wait(60)
        written.append(state)

    state = {**training.state(), "view": training.weights.detach()[1:3]}
    request = {
        "argument": AsyncRequest(write, (may_write, state), []),
        "keyword": AsyncRequest(write, (may_write,), [], async_fn_kwargs={"state": state}),
        "partial": AsyncRequest(functools.partial(write, state=state), (may_write,), []),
        "staged": AsyncRequest(
            write, (may_write, None), [], preload_fn=functools.partial(stage, state, non_blocking=True)
        ),
        "stage_object": AsyncRequest(write, (may_write, None), [], preload_fn=Stage(state)),
    }[passed]
    calls = AsyncCallsQueue(persistent=persistent)
    calls.schedule_async_request(request)
    for _ in range(2):
        training.step()
    may_write.set()
    calls.close()
    assert values(written[0]) == expected != values(training.state())
    with torch.no_grad():
        written[0]["weights"].zero_()
    assert written[0]["view"].tolist() == [0.0, 0.0]
    assert training.weights.tolist() != [0.0] * 4


def test_uncopyable_arguments_are_rejected_by_name(tmp_path: Path) -> None:
    """Handles reach the call as the same objects, only the used bytes of a view are copied, and an object that can
    be neither copied nor shared is rejected."""
    calls, seen = AsyncCallsQueue(), []
    large = torch.arange(1 << 16)
    handles = threading.Lock(), queue.Queue[int](), multiprocessing.get_context("fork").Queue()
    with (tmp_path / "log").open("w") as file:
        calls.schedule_async_request(AsyncRequest(lambda *given: seen.append(given), (file, *handles, large[4:8]), []))
        calls.maybe_finalize_async_calls(blocking=True)
        assert all(given is own for given, own in zip(seen[0], (file, *handles), strict=False))
    assert seen[0][-1].tolist() == [4, 5, 6, 7]
    assert seen[0][-1].untyped_storage().nbytes() <= 64
    with pytest.raises(OutlastError, match=r"argument 1 of async_fn cannot be copied .*builtins.generator"):
        calls.schedule_async_request(AsyncRequest(print, (1, {"batches": (one for one in range(3))}), []))
    assert calls.get_num_unfinalized_calls() == 0
    calls.close()


def test_three_consecutive_failures_raise(caplog: pytest.LogCaptureFixture) -> None:
    """Failed calls are logged, the third in a row is raised, and a success resets the count."""
    calls = AsyncCallsQueue(persistent=False)

    def fail() -> None:
        raise OSError("full")

    def finalised(work: Callable[[], None]) -> list[int]:
        calls.schedule_async_request(AsyncRequest(work, (), []))
        numbers: list[int] = []
        while calls.get_num_unfinalized_calls():
            numbers += calls.maybe_finalize_async_calls()
        return numbers

    assert [finalised(work) for work in (fail, fail, lambda: None, fail, fail)] == [[], [], [2], [], []]
    assert caplog.text.count("is given up, and what it wrote is not committed") == 4
    with pytest.raises(CheckpointError, match="3 calls in a row failed"):
        finalised(fail)
    calls.close()


def test_wait_for_a_call_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting for a call has a time limit, after which it counts as failed; closing with abort does not wait."""
    monkeypatch.setattr(async_calls, "CALL_TIMEOUT_S", 0.05)
    calls, may_finish = AsyncCallsQueue(), threading.Event()
    finalised: list[int] = []
    calls.schedule_async_request(AsyncRequest(may_finish.wait, (60,), [lambda: finalised.append(1)]))
    with pytest.raises(CheckpointError, match=r"has not ended within 0.05 s"):
        calls.maybe_finalize_async_calls(blocking=True)
    calls.schedule_async_request(AsyncRequest(None, (), [lambda: finalised.append(2)]))
    calls.close(abort=True)
    assert "are not finalised, and what they wrote is not committed: 1" in caplog.text
    may_finish.set()
    assert finalised == []
    with pytest.raises(RuntimeError, match="add functions before that"):
        AsyncRequest(None, (), []).freeze().add_finalize_fn(print)


def test_straggler_thresholds_match_nvrx() -> None:
    """A straggler has a score below the threshold that is not within the noise of the ranks; ranks without a score
    are not stragglers."""
    report = PerformanceReport(
        gpu_relative_perf_scores={0: 1.0, 1: 0.75, 2: 0.74, 3: float("nan")},
        section_relative_perf_scores={"a": {0: 0.5}, "b": {0: 1.0}},
        gpu_individual_perf_scores={1: 0.6},
        section_individual_perf_scores={},
        rank_to_node={0: "n0", 1: "n1", 2: "n2"},
        local_section_summaries={},
        local_kernel_summaries={},
        generate_report_elapsed_time=1.0,
        gather_on_rank0=True,
        rank=0,
    )
    assert report.identify_stragglers() == {
        "straggler_gpus_relative": {StragglerId(2, "n2")},
        "straggler_gpus_individual": {StragglerId(1, "n1")},
        "straggler_sections_relative": {"a": {StragglerId(0, "n0")}},
        "straggler_sections_individual": {},
    }
    noise = frozenset({("relative", "kernels", 2), ("relative", "section a", 0)})
    found = dataclasses.replace(report, within_noise=noise).identify_stragglers()  # type: ignore[arg-type]
    assert found["straggler_gpus_relative"] == set()
    assert found["straggler_sections_relative"] == {}
    assert found["straggler_gpus_individual"] == {StragglerId(1, "n1")}


def test_detector_rejects_invalid_use() -> None:
    """Invalid values, calls out of order and missing callables are errors by name."""
    with pytest.raises(RuntimeError, match="used without making one"):
        Detector()
    for call in (Detector.generate_report, Detector.is_interval_elapsed, Detector.detection_section("a").__enter__):
        with pytest.raises(RuntimeError, match="not initialised") as raised:
            call()
        assert isinstance(raised.value, OutlastError)
    for invalid in ({"scores_to_compute": "fast"}, {"profiling_interval": 0}, {"report_time_interval": 0}):
        with pytest.raises(ConfigError, match=next(iter(invalid))):
            Detector.initialize(**invalid)
    with pytest.raises(ConfigError, match="arg_filter_fn"):
        CallableId(str, "upper", arg_filter_fn=bool)
    Detector.initialize(gather_on_rank0=False)
    try:
        with pytest.raises(OutlastError, match="called before"):
            Detector.initialize()
        with pytest.raises(OutlastError, match="no such callable"):
            Detector.wrap_callables([CallableId(sys, "nothing")])
        for _ in range(2):
            with Detector.detection_section(profile_cuda=False):
                pass
            with Detector.detection_section("kernels", profile_cuda=False):
                pass
        with pytest.raises(KeyError), Detector.detection_section("raises", profile_cuda=False):
            raise KeyError
        report = Detector.generate_report()
        assert report is not None
        (section,) = [name for name in report.local_section_summaries if name != "kernels"]
        assert section.startswith(__file__)
        assert report.section_individual_perf_scores["kernels"] == {0: 1.0}
    finally:
        Detector.shutdown()
        Detector.shutdown()


FAULTS = """
import sys, time
from nvidia_resiliency_ext.shared_utils.inject_fault import *
try:
    dispatch_fault_injection(Fault[sys.argv[1]], 0.0, lambda: print("now", flush=True))
    while True:
        maybe_raise_workload_exception()
        time.sleep(0.01)
except InjectedException:
    clear_workload_exception()
    maybe_raise_workload_exception()
    print("raised", flush=True)
"""


def summary(*times_ms: float) -> dict[Statistic, float]:
    """Return a script's summary of some times."""
    mean = sum(times_ms) / len(times_ms)
    return {Statistic.MED: sorted(times_ms)[len(times_ms) // 2], Statistic.AVG: mean, Statistic.NUM: len(times_ms)}


def test_reports_are_computed_from_script_summaries() -> None:
    """Individual scores compare with the rank's best medians, weighted by time; a new kernel starts with 1."""
    generator = ReportGenerator(["individual_perf_scores"], gather_on_rank0=False, node_name="mine")

    def score(kernels: dict[str, dict[Statistic, float]]) -> float:
        report = generator.generate_report({"forward": summary(5.0)}, kernels)
        assert report is not None
        assert (report.gpu_relative_perf_scores, dict(report.rank_to_node)) == ({}, {0: "mine"})
        assert report.section_individual_perf_scores == {"forward": {0: 1.0}}
        assert "ncclDevKernel_AllReduce" not in report.local_kernel_summaries
        return report.gpu_individual_perf_scores[0]

    first = {"gemm": summary(1.0, 1.0, 2.0), "ncclDevKernel_AllReduce": summary(9.0)}
    assert score(first) == 1.0
    assert score({**first, "gemm": summary(4.0, 4.0, 8.0), "ncclDevKernel_AllReduce": summary(90.0)}) == 0.25
    assert score({"new": summary(3.0)}) == 1.0
    assert score({"gemm": summary(0.5)}) == 1.0
    assert score(first) == 0.5
    assert math.isnan(score({}))
    with pytest.raises(ConfigError, match="the summary of 'gemm' has no AVG, NUM"):
        generator.generate_report({}, {"gemm": {Statistic.MED: 1.0}})
    for invalid in ({"pg": object()}, {"scores_to_compute": []}):
        with pytest.raises(ConfigError):
            ReportGenerator(**{"scores_to_compute": "all", **invalid})


@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("WORKLOAD_EXC", 0),
        ("ASYNC_EXC", 0),
        ("SIGNAL_EXC", 0),
        ("SIGKILL", -9),
        ("OS_ABORT", -6),
    ],
)
def test_injected_faults_end_or_interrupt_the_process(tmp_path: Path, fault: str, code: int) -> None:
    """Each fault ends or interrupts the process in its way, after the callback."""
    script = tmp_path / "fault.py"
    script.write_text(FAULTS)
    completed = run_python("-m", "outlast.integrations.nvrx", script, fault, cwd=tmp_path, code=code)
    assert completed.stdout.split() == ["now", "raised"] if code == 0 else ["now"]
    assert f"the fault {fault} is injected on purpose" in completed.stderr


def test_all_ranks_draw_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks draw the same ranks, fault and delay, exclude the first ranks, and inject a registered fault."""
    seen: list[tuple[str, int, float]] = []
    meteor = register_fault("METEOR", lambda delay, callback: seen.append(("METEOR", 0, delay)))
    assert WorkloadFault["METEOR"] is meteor in WorkloadFault
    assert (
        register_fault("METEOR", lambda delay, callback: seen.append(("METEOR", int(os.environ["RANK"]), delay)))
        is meteor
    )
    monkeypatch.setenv("WORLD_SIZE", "6")
    for rank in range(6):
        monkeypatch.setenv("RANK", str(rank))
        inject_fault((meteor,), (2, 3), keep_alive=2, delay=(1.0, 9.0), seed=4)
    assert len(seen) in (2, 3)
    assert {rank for _, rank, _ in seen} <= {2, 3, 4, 5}
    assert len({delay for _, _, delay in seen}) == 1
    given: dict[str, Any] = {"faults": (meteor,), "num_faults": 1, "keep_alive": 0, "delay": 0.0, "seed": 0}
    for name, invalid in {"faults": (), "num_faults": (3, 2), "keep_alive": 7, "delay": -1.0}.items():
        with pytest.raises(ConfigError, match=name):
            inject_fault(**given | {name: invalid})


def test_queue_accepts_process_priorities() -> None:
    """The persistent thread has the priorities of its queue, or of the warm-up; options of a process are rejected by
    name."""
    seen: list[tuple[int, int]] = []

    def note() -> None:
        thread = threading.get_native_id()
        seen.append((os.getpriority(os.PRIO_PROCESS, thread), psutil.Process(thread).ionice().ioclass))

    priority = os.getpriority(os.PRIO_PROCESS, 0)
    AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=19, io_priority=3)
    for calls in (AsyncCallsQueue(), AsyncCallsQueue(True, False, 10, 2), AsyncCallsQueue(persistent=False)):
        calls.schedule_async_request(AsyncRequest(note, (), []))
        calls.close()
    assert seen[:2] == [(19, 3), (max(10, priority), 2)]
    assert seen[2][0] == os.getpriority(os.PRIO_PROCESS, 0) == priority
    for invalid in ({"cpu_priority": 20}, {"io_priority": 4}, {"sigterm_timeout": 60.0}, {"cpu_shm_mode": True}):
        with pytest.raises(ConfigError, match=next(iter(invalid))):
            AsyncCallsQueue(**invalid)  # type: ignore[arg-type]


def test_abort_closes_every_queue(caplog: pytest.LogCaptureFixture) -> None:
    """abort_nvrx_checkpoint() finalises nothing, does not wait, drops calls that have not started, and resets the
    call numbers."""
    calls, may_finish, seen = AsyncCallsQueue(), threading.Event(), []
    calls.schedule_async_request(AsyncRequest(may_finish.wait, (60,), [lambda: seen.append("finalised")]))
    running = [one for one in threading.enumerate() if one.name == "outlast-async-calls"]
    calls.schedule_async_request(AsyncRequest(lambda: seen.append("written"), (), []))
    abort_nvrx_checkpoint()
    assert "are not finalised, and what they wrote is not committed: 0, 1" in caplog.text
    may_finish.set()
    for thread in running:
        thread.join(60)
    assert calls.schedule_async_request(AsyncRequest(lambda: seen.append("new"), (), [])) == 0
    calls.close()
    assert seen == ["new"]


def test_gpu_faults_are_rejected() -> None:
    """A fault that cannot be injected is rejected, and the error contains the replacement."""
    with pytest.raises(ConfigError, match=r"GPU_SLEEP is not supported.*Fault\.SIGSTOP"):
        dispatch_fault_injection(WorkloadFault.GPU_SLEEP, 1.0, None)
    with pytest.raises(ConfigError, match="delay=-1"):
        dispatch_fault_injection(WorkloadFault.SIGKILL, -1, None)
    with pytest.raises(ConfigError, match="is not a fault"):
        dispatch_fault_injection("SIGKILL", 1.0, None)  # type: ignore[arg-type]
