"""Two ranks that use NVRx's asynchronous calls and its straggler detector; the test expects the output ``ok``."""

import sys
import threading
import time

import nvidia_resiliency_ext.attribution.straggler as straggler
import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

from outlast.errors import CheckpointError, PeerLost
from outlast.integrations.nvrx import async_calls


def fail() -> None:
    raise OSError("no space left")


def check_async_calls(rank: int) -> None:
    """A call is finalised once it has ended on all ranks, and on none if it failed on one; staged state is used."""
    if rank == 0:
        AsyncCallsQueue()  # as on a rank from before a restart: ranks may have created different numbers of queues
    calls, may_finish, done = AsyncCallsQueue(), threading.Event(), []
    calls.warmup_persistent_caller(rank)
    staged = []

    def work(path: str, state: str) -> None:
        staged.append((path, state))
        may_finish.wait(60)

    request = AsyncRequest(work, ("a", None), [], preload_fn=lambda: "state")
    request.add_finalize_fn(lambda: done.append(0))
    assert calls.schedule_async_request(request) == 0
    assert calls.get_num_unfinalized_calls() == 1
    if rank == 0:
        may_finish.set()  # rank 1's call still runs
    assert calls.maybe_finalize_async_calls() == []
    assert done == []
    dist.barrier()
    may_finish.set()
    assert calls.maybe_finalize_async_calls(blocking=True) == [0]
    assert done == [0]
    assert staged == [("a", "state")]

    # A failed call of rank 1 is dropped on both ranks, and the next call is finalised.
    bad = AsyncRequest(fail if rank == 1 else lambda: None, (), [lambda: done.append(1)])
    assert calls.schedule_async_request(bad) == 1
    assert calls.schedule_async_request(AsyncRequest(None, (), [lambda: done.append(2)])) == 2
    with pytest.raises(CheckpointError, match=r"call 1 is given up, .*: rank 1 failed with OSError: no space left"):
        calls.maybe_finalize_async_calls(blocking=True)
    assert done == [0, 2]
    assert calls.get_num_unfinalized_calls() == 0

    # Without a collective, from the other rank's record.
    may_finish.clear()
    calls.schedule_async_request(AsyncRequest(may_finish.wait, (60,), [lambda: done.append(3)]))
    if rank == 0:
        may_finish.set()
        while calls._calls and not calls._calls[0].ended.is_set():
            time.sleep(0.01)
        assert calls.maybe_finalize_async_calls(no_dist=True) == []
        dist.barrier()
    else:
        dist.barrier()
        may_finish.set()
    while not calls.maybe_finalize_async_calls(no_dist=True):
        time.sleep(0.01)
    assert done == [0, 2, 3]

    # A finalization that fails on one rank has failed on both.
    calls.schedule_async_request(AsyncRequest(None, (), [fail] if rank == 0 else []))
    with pytest.raises(CheckpointError, match="was not finalised: rank 0 failed with OSError"):
        calls.close()
    calls.close()  # closing is idempotent
    AsyncRequest(lambda: done.append("ran"), (), [lambda: done.append("finalised")]).execute_sync()
    assert done[-2:] == ["ran", "finalised"]


def check_a_lost_peer(rank: int) -> None:
    """Waiting without a collective for a missing rank raises PeerLost within the limit."""
    limits = async_calls.CALL_TIMEOUT_S, async_calls.CALL_MARGIN_S
    async_calls.CALL_TIMEOUT_S, async_calls.CALL_MARGIN_S = 1.0, 0.5
    calls = AsyncCallsQueue()
    calls.schedule_async_request(AsyncRequest(None, (), []))
    if rank == 0:
        with pytest.raises(PeerLost, match=r"did not reach the end of asynchronous call 0 within 1.5 s"):
            calls.maybe_finalize_async_calls(blocking=True, no_dist=True)
    calls.close(abort=True)
    async_calls.CALL_TIMEOUT_S, async_calls.CALL_MARGIN_S = limits
    dist.barrier()


class Step:
    """A training step that takes rank 1 about five hundred times as long."""

    def __init__(self, rank: int) -> None:
        self.size = 768 if rank == 1 else 96
        self.a = torch.ones(self.size, self.size)

    def train(self) -> None:
        for _ in range(5):
            torch.mm(self.a, self.a)
        dist.barrier()


def check_straggler(rank: int) -> None:
    """Rank 0's report identifies the slow rank by its kernels; other ranks get no report; wrapped methods are
    restored."""
    step = Step(rank)
    straggler.Detector.initialize(report_time_interval=0.001, node_name=f"node-{rank}")
    straggler.Detector.wrap_callables([straggler.CallableId(step, "train")])
    reports = []
    for _ in range(20):
        step.train()
        with straggler.Detector.detection_section("own", profile_cuda=False):
            time.sleep(0.05 if rank == 1 else 0.002)
        reports.append(straggler.Detector.generate_report_if_interval_elapsed())
        elapsed = straggler.Detector.is_interval_elapsed()
        flags = [None, None]
        dist.all_gather_object(flags, elapsed)
        assert flags[0] == flags[1], "ranks differ in when a report is due"
        assert (reports[-1] is not None) == (elapsed and rank == 0)
    last = straggler.Detector.generate_report()
    straggler.Detector.shutdown()
    assert "train" not in vars(step)
    assert not straggler.Detector.initialized
    if rank == 1:
        assert last is None
        return
    first = next(report for report in reports if report is not None)
    assert first.rank_to_node == {0: "node-0", 1: "node-1"}
    scores = first.gpu_relative_perf_scores
    assert scores[1] < 0.7 < scores[0], scores
    assert first.gpu_individual_perf_scores == {0: 1.0, 1: 1.0}
    assert first.section_relative_perf_scores["own"][1] < 0.7, first.section_relative_perf_scores
    assert first.local_section_summaries["own"][straggler.Statistic.NUM] == 17
    assert first.local_section_summaries["own"][straggler.Statistic.MED] >= 2
    found = first.identify_stragglers(gpu_rel_threshold=0.7)
    assert found["straggler_gpus_relative"] == {straggler.StragglerId(1, "node-1")}
    assert found["straggler_gpus_individual"] == set()
    assert found["straggler_sections_relative"]["own"] == {straggler.StragglerId(1, "node-1")}


def check_client(rank: int) -> None:
    """Timeouts are calculated from the longest times of all ranks, and are identical on all ranks."""
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.start_section("step")
    time.sleep(0.5 if rank == 1 else 0.0)
    client.end_section("step")
    client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    assert client.section_timeouts is not None
    assert client.section_timeouts.section["step"] >= 2.5
    states = [None, None]
    dist.all_gather_object(states, client.state_dict())
    assert states[0] == states[1]
    client.shutdown_workload_monitoring()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    check_async_calls(rank)
    check_a_lost_peer(rank)
    check_straggler(rank)
    check_client(rank)
    dist.barrier()
    print("ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
