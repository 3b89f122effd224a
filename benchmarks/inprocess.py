"""Benchmark ``inprocess``: from a fault to the restarted function, compared with nvidia-resiliency-ext; the quiet cost.

The ranks that fail run a function that is restarted in process, in either library; those of outlast both under
``outlast run``, whose coordinator decides, and as plain processes, one of whose monitor processes decides. The ranks
that measure the quiet cost train the small model of ``numerics`` in blocks of steps, inside and outside the wrapper;
each block has its own process group.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from benchmarks.measuring import (
    Mark,
    MarkWriter,
    MeasuredRounds,
    Progress,
    cost_in_percent,
    describe_round,
    launched_ranks,
    measure_rounds,
    median,
    read_marks,
    select_marks,
    take_turns,
    worker_ranks,
)
from benchmarks.numerics import SmallTraining
from outlast import InProcessRestartConfig, clock, env
from outlast.decoding import parse_json
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.inprocess import Handle, Wrapper
from outlast.simulate.benchmark_results import Bar, BenchResult
from outlast.testing.ranks import RankProcesses, free_port

_PEER = "nvidia_resiliency_ext"
_LAUNCHED = "outlast run"
"""outlast's ranks under ``outlast run``; "outlast": without a launcher."""
_ACTIVE, _SPARES = 4, 1
_GROUP_TIMEOUT_S = 600
_SOFT_TIMEOUT_S, _HARD_TIMEOUT_S = 2.0, 4.0
_RUN_TIMEOUT_S = 60.0
_PEER_TIMEOUT_S = 40.0
_QUIET_ROUND_S = 120.0
_NUM_RESTARTS, _SETTLED = 50, 5
_MOST_FAILURES = 2
_NUM_STEPS, _FAULT_STEP, _STEP_S = 60, 20, 0.002
_NUM_TURNS, _BLOCK, _WARM = 12, 50, 5
"""Blocks of each kind in a round, steps in a block, and uncounted steps before them."""
_STORE_TIMEOUT = timedelta(seconds=60)

Faults = Sequence[tuple[str, int]]
"""By call of the function: the fault and its rank."""

_OURS: tuple[Faults, ...] = (
    (("exception", 1), ("sleep", 2), ("kill", 1)),  # the last one takes the spare
    (("kill", 0),),
    (("stop", 1),),
    (("gil", 1),),
)
_PEERS: tuple[Faults, ...] = ((("exception", 1),), (("kill", 1),), (("kill", 0),), (("sleep", 2),))
_TIMEOUTS_S = {"sleep": _SOFT_TIMEOUT_S, "stop": _HARD_TIMEOUT_S, "gil": _HARD_TIMEOUT_S}
_FATAL = ("kill", "stop", "gil")
_ENDED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a rank with a fatal fault: a rank that does not respond is ended by SIGTERM, then by SIGKILL."""


@dataclass(frozen=True, slots=True)
class FaultTiming:
    """One fault and its recovery; times are seconds since the fault."""

    kind: str
    rank: int
    entered_s: float
    """Until the last active rank was back in the function."""
    stepped_s: float
    """Until the last active rank had finished an iteration there."""
    num_lost: int
    """Processes that ran the function before the fault and not after it."""

    @property
    def name(self) -> str:
        return "kill 0" if (self.kind, self.rank) == ("kill", 0) else self.kind

    @property
    def beyond_s(self) -> float:
        """Seconds until the finished iteration, beyond the timeout that detects a hang."""
        return self.stepped_s - _TIMEOUTS_S.get(self.kind, 0.0)


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Make ranks fail in both libraries, in turns; then restart often, and not at all.

    Raises:
        OutlastError: A run of outlast did not recover, lost a healthy rank, or ended with other weights.

    Blocks: about a minute a round, and two more.
    """
    peer = _Peer(progress)
    ours: dict[str, list[FaultTiming]] = {"outlast": [], _LAUNCHED: []}
    peers: list[FaultTiming] = []
    weights: set[float] = set()
    for number in range(repeats + 1):
        for faults, library in itertools.product(_OURS, ours):
            found, marks = _run_ours(faults, library)
            weights.update(mark.facts["weights"] for mark in select_marks(marks, "done", len(faults)))
            if len(weights) != 1:
                raise OutlastError(f"outlast's final weights differ between ranks or runs ({faults}): {weights}")
            progress(describe_round(number, repeats, f"{library}: {_describe(found)}"))
            ours[library] += found if number else []
        for faults in _PEERS:
            if found := peer.run(faults):
                progress(describe_round(number, repeats, f"{_PEER}: {_describe(found)}"))
            peers += found if number else []
    progress(f"{_NUM_RESTARTS} restarts in a row")
    growth = _restart_often()
    progress("growth after the fifth restart: " + ", ".join(f"{name} {value:.2f} %" for name, value in growth.items()))
    progress(f"steps in turns with the wrapper and without it, {repeats} rounds and one that is dropped")
    limit_s = _QUIET_ROUND_S * (repeats + 1)
    quiet = measure_rounds(
        measure_steps, free_port(), repeats=repeats, progress=progress, timeout_s=limit_s, num_ranks=2
    )
    return BenchResult(
        "inprocess",
        (
            *_fault_bars("", ours["outlast"], peers),
            *_fault_bars("run_", ours[_LAUNCHED], peers),
            quiet.bar("quiet_step_overhead_pct", "wrapped_pct", "%", 0.2),
            Bar("rss_growth_50_pct", growth["rss_bytes"], "%", 2.0),
            Bar("fd_growth_50_pct", growth["num_fds"], "%", 2.0),
            Bar("thread_growth_50_pct", growth["num_threads"], "%", 2.0),
        ),
        (*_notes(ours, peers, quiet), *peer.notes),
    )


def fault_timings(marks: Sequence[Mark], faults: Faults) -> list[FaultTiming] | None:
    """Return the timing of each fault from the ranks' marks; ``None``: some marks are still missing."""
    found = []
    for iteration, (kind, rank) in enumerate(faults):
        before, fault = select_marks(marks, "entered", iteration), select_marks(marks, "fault", iteration)
        entered, stepped = select_marks(marks, "entered", iteration + 1), select_marks(marks, "stepped", iteration + 1)
        if not fault or len(stepped) < _ACTIVE:
            return None
        at_ns = min(mark.at_ns for mark in fault)
        found.append(
            FaultTiming(
                kind=kind,
                rank=rank,
                entered_s=(max(mark.at_ns for mark in entered) - at_ns) / 1e9,
                stepped_s=(max(mark.at_ns for mark in stepped) - at_ns) / 1e9,
                num_lost=len({mark.pid for mark in before} - {mark.pid for mark in entered}),
            )
        )
    return found


# -- runs with faults ------------------------------------------------------------------------------------------------


@contextmanager
def _group(library: str, faults: Faults) -> Iterator[tuple[RankProcesses, Path]]:
    """Run the ranks of a library; yield them and the folder of their marks."""
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
        arguments, num_ranks = (library, folder, json.dumps(faults), free_port()), _ACTIVE + _SPARES
        launch = partial(launched_ranks, Path(folder, "run")) if library == _LAUNCHED else worker_ranks
        with launch(run_rank, *arguments, num_ranks=num_ranks, directory=Path(folder, "logs")) as ranks:
            yield ranks, Path(folder)


def _run_ours(
    faults: Faults, library: str = "outlast", timeout_s: float = _RUN_TIMEOUT_S
) -> tuple[list[FaultTiming], list[Mark]]:
    """Run one group of outlast to its end; check that it recovered, and lost only ranks with a fatal fault."""
    with _group(library, faults) as (ranks, folder):
        codes = ranks.wait(timeout_s)
        marks = read_marks(folder)
        found = fault_timings(marks, faults)
        doomed = sum(kind in _FATAL for kind, _ in faults) if library == "outlast" else 0
        if found is None or sum(code in _ENDED for code in codes) != doomed or codes.count(0) != len(codes) - doomed:
            shown = faults if len(faults) < _NUM_RESTARTS else f"{len(faults)} faults"
            raise OutlastError(f"outlast did not recover from {shown}; exit codes {codes}\n{ranks.tails()}")
    for one in found:
        if one.num_lost != (one.kind in _FATAL):
            raise OutlastError(f"outlast lost {one.num_lost} ranks in a fault of one ({one.name}); look at its journal")
    return found, marks


class _Peer:
    """The peer, while it recovers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._failures: dict[Faults, int] = {}
        self._is_there = importlib.util.find_spec(_PEER) is not None
        self.notes = [] if self._is_there else [f"{_PEER} is not installed; make bench-peers installs it"]

    def run(self, faults: Faults) -> list[FaultTiming]:
        """Run one group of the peer; empty: it did not recover, or is not installed."""
        if not self._is_there or self._failures.get(faults, 0) >= _MOST_FAILURES:
            return []
        with _group("nvrx", faults) as (ranks, folder):
            try:  # not to the end: its processes take seconds more
                return ranks.wait_until(lambda: fault_timings(read_marks(folder), faults), _PEER_TIMEOUT_S)
            except DeadlineExceeded as error:
                name = faults[0][0] if faults[0] != ("kill", 0) else "kill 0"
                self._failures[faults] = self._failures.get(faults, 0) + 1
                self._progress(f"{_PEER}: {name}: {str(error).splitlines()[0]}")
                if self._failures[faults] == _MOST_FAILURES:
                    self.notes.append(f"{_PEER}: {name}: did not recover in {_PEER_TIMEOUT_S:.0f} s, twice; left out")
                return []


def _restart_often() -> dict[str, float]:
    """Return the growth in percent of the worst rank's resources from the fifth restart to the last."""
    faults = [("exception", number % _ACTIVE) for number in range(_NUM_RESTARTS)]
    _, marks = _run_ours(faults, timeout_s=2 * _RUN_TIMEOUT_S)
    growth = {}
    for resource in ("rss_bytes", "num_fds", "num_threads"):
        after = {mark.pid: mark.facts[resource] for mark in select_marks(marks, "stepped", _NUM_RESTARTS)}
        before = {mark.pid: mark.facts[resource] for mark in select_marks(marks, "stepped", _SETTLED)}
        growth[resource] = max(100 * (after[pid] / before[pid] - 1) for pid in after)
    return growth


# -- a failing rank ------------------------------------------------------------------------------------------------


def run_rank(library: str, folder: str, faults: str, port: str) -> None:
    """Run a rank of a group until the function has ended.

    Args:
        library: ``outlast``, ``outlast run`` or ``nvrx``.
        folder: Folder of the marks.
        faults: The faults as JSON.
        port: Port of a store for the peer.
    """
    torch.set_num_threads(1)
    function = _FailingFunction(MarkWriter(folder), parse_json(faults))
    wrapped = _wrap_nvrx(function, int(port)) if library == "nvrx" else _wrap_ours(function)
    wrapped()


class _FailingFunction:
    """Consecutive all-reduces, with the plan's faults."""

    def __init__(self, mark: MarkWriter, faults: Faults) -> None:
        self._mark, self._faults = mark, faults
        self._process = psutil.Process()

    def __call__(self, iteration: int, store: Store | None = None) -> None:
        place = env.read_worker()
        rank = place.global_rank
        self._mark("entered", rank, iteration)
        kind, victim = self._faults[iteration] if iteration < len(self._faults) else ("none", -1)
        group: dict[str, Any] = {"timeout": timedelta(seconds=_GROUP_TIMEOUT_S)}
        if store is not None:
            group |= {"store": store, "rank": rank, "world_size": place.world_size}
        dist.init_process_group("gloo", **group)
        weights = torch.zeros(1 << 12)
        for step in range(_NUM_STEPS):
            gradient = torch.full_like(weights, 0.1 * (rank + 1) * (step + 1))
            if step == _FAULT_STEP and rank == victim:
                self._mark("fault", rank, iteration, kind=kind)
                _fail(kind)
            dist.all_reduce(gradient)
            weights += gradient / 7
            if step == 0:
                self._mark("stepped", rank, iteration, **self._resources())
            time.sleep(_STEP_S)
        self._mark("done", rank, iteration, weights=weights.double().sum().item())

    def _resources(self) -> dict[str, int]:
        return {
            "rss_bytes": self._process.memory_info().rss,
            "num_fds": self._process.num_fds(),
            "num_threads": self._process.num_threads(),
        }


def _fail(kind: str) -> None:
    """Fail in one way; only an exception returns."""
    match kind:
        case "exception":
            raise RuntimeError("the benchmark's own fault")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(3600)
        case "gil":  # no signal ends the wait for a mutex, and PyDLL does not release the interpreter's lock
            mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
            lock(mutex)
            lock(mutex)
        case _:
            raise ValueError(f"unknown fault {kind!r}")


def _wrap_ours(failing: _FailingFunction) -> Callable[[], object]:
    config = InProcessRestartConfig(
        active_world_size=_ACTIVE,
        granularity="rank",
        soft_timeout=_SOFT_TIMEOUT_S,
        hard_timeout=_HARD_TIMEOUT_S,
        max_no_progress_restarts=_NUM_RESTARTS,
    )

    def function(handle: Handle) -> None:
        failing(handle.iteration)

    function.__annotations__["handle"] = Handle
    wrapped: Callable[[], object] = Wrapper(config)(function)
    return wrapped


def _wrap_nvrx(failing: _FailingFunction, port: int) -> Callable[[], object]:
    """Wrap the function in nvidia-resiliency-ext, with intervals as short as outlast's."""
    inprocess = importlib.import_module(f"{_PEER}.inprocess")
    ranks = importlib.import_module(f"{_PEER}.inprocess.rank_assignment")
    master_port = int(env.environ()["MASTER_PORT"])

    def function(call: Any = None) -> None:
        store = TCPStore(
            "127.0.0.1",
            master_port,
            is_master=env.read_worker().global_rank == 0,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
        )
        failing(call.iteration, PrefixStore(str(call.iteration), store))

    function.__annotations__["call"] = inprocess.CallWrapper
    tenth, one = timedelta(seconds=0.1), timedelta(seconds=1)
    wrapped: Callable[[], object] = inprocess.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": port},
        rank_assignment=inprocess.Compose(ranks.MaxActiveWorldSize(_ACTIVE), ranks.FillGaps()),
        monitor_thread_interval=tenth,
        monitor_process_interval=tenth,
        heartbeat_interval=tenth,
        progress_watchdog_interval=tenth,
        last_call_wait=tenth,
        heartbeat_timeout=one * _HARD_TIMEOUT_S,
        soft_timeout=one * _SOFT_TIMEOUT_S,
        hard_timeout=one * _HARD_TIMEOUT_S,
        termination_grace_time=tenth,
    )(function)
    return wrapped


# -- the quiet cost --------------------------------------------------------------------------------------------------


def measure_steps(num_rounds: str, port: str) -> Iterator[dict[str, float]]:
    """Yield the median step of each kind in milliseconds, and the wrapper's cost in percent.

    ``port`` is for the store of the groups without the wrapper.

    Collective: both ranks.
    """
    torch.set_num_threads(1)
    rank, group_numbers = env.read_worker().global_rank, itertools.count(1)
    store = TCPStore("127.0.0.1", int(port), is_master=rank == 0, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    batch_size: int | None = None
    watching_shares: list[float] = []  # share of a core of the monitor thread and process, by block

    def block() -> tuple[float, float]:
        """Return the seconds of a step, and the share of a core of this rank's other threads and processes."""
        nonlocal batch_size
        training = SmallTraining(batch_size)
        batch_size = training.batch.shape[0]
        for _ in range(_WARM):
            training.step()
        watching_ns, begin_ns = _watching_ns(), clock.now_ns()
        for _ in range(_BLOCK):
            training.step()
        taken_ns, watched_ns = clock.now_ns() - begin_ns, _watching_ns() - watching_ns
        del training
        dist.destroy_process_group()
        return taken_ns / 1e9 / _BLOCK, watched_ns / taken_ns

    def plain() -> float:
        group = PrefixStore(str(next(group_numbers)), store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=2, timeout=_STORE_TIMEOUT)
        return block()[0]

    def in_wrapper() -> tuple[float, float]:
        dist.init_process_group("gloo", timeout=_STORE_TIMEOUT)
        return block()

    def wrapped() -> float:
        found = wrapper()
        assert found is not None, "no rank is a spare here"
        seconds, share = found
        watching_shares.append(share)
        return seconds

    config = InProcessRestartConfig(soft_timeout=_SOFT_TIMEOUT_S, hard_timeout=_HARD_TIMEOUT_S)
    wrapper: Callable[[], tuple[float, float] | None] = Wrapper(config)(in_wrapper)
    order = random.Random(0)  # the same on both ranks
    for _ in range(int(num_rounds)):
        found_s = take_turns({"plain": plain, "wrapped": wrapped}, _NUM_TURNS, order)
        yield {
            **{f"{name}_ms": median(seconds) * 1e3 for name, seconds in found_s.items()},
            "wrapped_pct": cost_in_percent(found_s["wrapped"], found_s["plain"]),
            "watching_cpu_pct": 100 * median(watching_shares),
        }
        watching_shares.clear()


def _watching_ns() -> int:
    """Return the processor time of this process's other Python threads and of its children."""
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()]
    tasks = [Path(f"/proc/self/task/{number}") for number in others]
    for child in psutil.Process().children():
        tasks += Path(f"/proc/{child.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


# -- the result ------------------------------------------------------------------------------------------------------


def _fault_bars(prefix: str, ours: Sequence[FaultTiming], peers: Sequence[FaultTiming]) -> list[Bar]:
    def of(found: Sequence[FaultTiming], name: str, figure: str) -> float | None:
        values = [float(getattr(one, figure)) for one in found if one.name == name]
        return median(values) if values else None

    def bar(name: str, kind: str, limit: float, figure: str) -> Bar:
        peer_value = of(peers, kind, figure)
        return Bar(prefix + name, of(ours, kind, figure), "s", limit, None if peer_value is None else _PEER, peer_value)

    beyond_s = [of(ours, kind, "beyond_s") for kind in _TIMEOUTS_S]
    longest_s = max(value for value in beyond_s if value is not None)
    peer_s = of(peers, "sleep", "beyond_s")
    return [
        bar("exception_s", "exception", 0.2, "entered_s"),
        bar("sigkill_s", "kill", 0.4, "stepped_s"),
        bar("sigkill_rank0_s", "kill 0", 0.4, "stepped_s"),
        Bar(
            prefix + "hang_beyond_timeout_s", longest_s, "s", 0.5, None if peer_s is None else f"{_PEER}, sleep", peer_s
        ),
    ]


def _notes(ours: Mapping[str, Sequence[FaultTiming]], peers: Sequence[FaultTiming], quiet: MeasuredRounds) -> list[str]:
    notes = [
        f"{_ACTIVE} ranks on gloo and {_SPARES} spare; the group's own timeout is {_GROUP_TIMEOUT_S} s, "
        f"soft timeout {_SOFT_TIMEOUT_S:g} s, hard timeout {_HARD_TIMEOUT_S:g} s"
    ]
    for library, found in (*ours.items(), (_PEER, peers)):
        for name in dict.fromkeys(one.name for one in found):
            some = [one for one in found if one.name == name]
            entered_s, stepped_s = median(one.entered_s for one in some), median(one.stepped_s for one in some)
            worst_s, lost = max(one.stepped_s for one in some), sum(one.num_lost for one in some) / len(some)
            notes.append(
                f"  {library}: {name}: back in the function after {entered_s:.3f} s, an iteration finished after "
                f"{stepped_s:.3f} s (at worst {worst_s:.3f} s), {lost:.2g} processes lost"
            )
    notes.append(
        f"steps: {quiet.median('plain_ms'):.4g} ms as they are, {quiet.median('wrapped_ms'):.4g} ms in the wrapper; "
        f"what watches a rank takes {quiet.median('watching_cpu_pct'):.3g} % of a core"
    )
    return notes


def _describe(found: Sequence[FaultTiming]) -> str:
    return ", ".join(f"{one.name} {one.stepped_s:.3f} s" for one in found)
