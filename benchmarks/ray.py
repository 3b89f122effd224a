"""Benchmark ``ray``: from an actor's death or hang to the next finished step, compared with Ray Train's restart.

An actor of outlast and a function of Ray Train train the same model; one of their ranks fails in one step.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measuring import Mark, MarkWriter, Progress, median, read_marks, run_rounds
from outlast import clock, env
from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.errors import ConfigError, OutlastError, RolledBack
from outlast.simulate.benchmark_results import Bar, BenchResult

try:
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from outlast.ray import ActorGroup, TrainActor

    _LACK = ""
except ImportError as failure:  # measure() raises: reading the marks needs no Ray
    _LACK, TrainActor = str(failure), object  # type: ignore[misc, assignment]

_MESH = {"dp": 2, "tp": 2}
_NUM_RANKS = 4
_SECTION_TIMEOUT_S = 2.0
_SPARES_S = 60.0
STRUCK, TOTAL, VICTIM = 6, 8, 1
"""The step with the fault, the last step, and the failing rank; steps count from 1."""
_PEERS_WAIT_S = 0.3
"""Seconds until the others are in the all-reduce, and the previous step's save is committed."""
_LONGEST_S = 120.0
_LONGEST_RUN_S = 240.0
_WIDTH, _BATCH = 256, 8
_STATE = "state.pt"


@dataclass(frozen=True, slots=True)
class RecoveryTiming:
    """One failure and its recovery."""

    stepped_s: float
    """Seconds from the fault until all ranks had finished a step."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Phases of the recovery's report."""
    beyond_s: float = 0.0
    """Seconds from the end of the section's timeout until the hang was detected."""

    def __str__(self) -> str:
        return f"{self.stepped_s:.3f} s" + (f", found {self.beyond_s:.3f} s late" if self.beyond_s else "")


def measure(*, repeats: int, progress: Progress, num_actors: int | None = None) -> BenchResult:
    """Kill, stop and delay an actor of a group, and kill a worker of Ray Train, in turns.

    ``num_actors``: kill one of so many light actors instead, see ``benchmarks.ray_crowd``.

    Raises:
        ConfigError: Ray Train is not installed.
        OutlastError: A run did not recover, or lost more than it had to.

    Blocks: about a minute a round.
    """
    if _LACK:
        raise ConfigError(f"Ray Train is not installed ({_LACK}); pip install 'ray[train]'")
    if num_actors is not None:
        from benchmarks.ray_crowd import measure_crowds

        with _cluster():
            return measure_crowds(num_actors, repeats=repeats, progress=progress)
    measures: dict[str, Callable[[], RecoveryTiming]] = {
        "outlast, kill": partial(_run_group, "kill"),
        "Ray Train, kill": _run_ray_train,
        "outlast, sleep": partial(_run_group, "sleep"),
        "outlast, stop": partial(_run_group, "stop"),
    }
    with _cluster():
        found = run_rounds(measures, repeats=repeats, progress=progress)
    ours, peers = found["outlast, kill"], found["Ray Train, kill"]
    our_s, peer_s = median([one.stepped_s for one in ours]), median([one.stepped_s for one in peers])
    beyond_s = {kind: median([one.beyond_s for one in found[f"outlast, {kind}"]]) for kind in ("sleep", "stop")}
    phases = {name: _phases(some) for name, some in found.items()}
    return BenchResult(
        "ray",
        (
            Bar("ray_recover_s", our_s, "s", 3.0, "Ray Train", peer_s),
            Bar("ray_recover_vs_train", our_s / peer_s, "x", 0.25, "Ray Train (s)", peer_s),
            Bar("hang_found_beyond_timeout_s", max(beyond_s.values()), "s", 1.0),
        ),
        (
            f"dp2 x tp2 on gloo with one spare, peers in an all-reduce; Ray Train as it is, with {_NUM_RANKS} workers",
            *(f"  {name}: {_describe(values)}" for name, values in phases.items()),
            *(
                f"  {kind}: found {late_s:.3f} s after the section's timeout of {_SECTION_TIMEOUT_S:g} s"
                for kind, late_s in beyond_s.items()
            ),
        ),
        details={"phases_s": phases},
    )


@contextmanager
def _cluster() -> Iterator[None]:
    """Run a separate Ray on this machine."""
    before = env.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"})
    with (
        tempfile.TemporaryDirectory(
            prefix="olb-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,  # short for sockets
        redirect_stdout(sys.stderr),  # Ray prints there, too, that a worker died
    ):
        ray.init(
            address="local",
            num_cpus=2 * (_NUM_RANKS + 1),
            num_gpus=0,
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
            env.update(before)


def _run_group(fault: str) -> RecoveryTiming:
    """Make one actor of a group fail, and check that the others were kept."""
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        with ActorGroup(
            BenchActor,
            _MESH,
            args=(name, fault),
            num_spares=1,
            checkpoint=CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=1),
            fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"step": _SECTION_TIMEOUT_S}),
        ) as group:
            _await_spare(group)
            pids, done_ns = group.pids, {}
            while (iteration := (group.iteration or 0) + 1) <= TOTAL:
                try:
                    group.run("train_step", batch_of(iteration), iteration=iteration)
                except RolledBack:
                    continue  # the previous step was not committed yet: it is repeated
                done_ns[iteration] = clock.now_ns()
            kept, recoveries = group.pids, group.recoveries
        marks = read_marks(folder)
    changed = [rank for rank, pid in pids.items() if kept[rank] != pid]
    if changed != [VICTIM] or len(recoveries) != 1:
        reports = "; ".join(report.describe() for report in recoveries)
        raise OutlastError(f"a fault of rank {VICTIM} ({fault}) cost ranks {changed}: {reports}")
    report = recoveries[0]
    struck_ns = when_rank(marks, "killed" if fault == "kill" else "entered", VICTIM, STRUCK)
    if struck_ns is None:
        raise OutlastError(f"rank {VICTIM} did not fail in step {STRUCK} ({fault})")
    stepped_s = (min(at_ns for at_ns in done_ns.values() if at_ns > struck_ns) - struck_ns) / 1e9
    again_ns = min(one.at_ns for one in marks if one.pid == kept[VICTIM])
    again_s = (again_ns - struck_ns) / 1e9
    detect_s = again_s - report.total_s  # the report's time begins with the evidence
    phases_s = {**report.phases_s, "detect": detect_s, "recovery": report.total_s, "step": stepped_s - again_s}
    return RecoveryTiming(stepped_s, phases_s, 0.0 if fault == "kill" else detect_s - _SECTION_TIMEOUT_S)


def _await_spare(group: ActorGroup) -> None:
    """Wait until the spare has started, as in a run that has lasted for a while."""
    until_s = clock.now_s() + _SPARES_S
    while not group.spares:
        if clock.now_s() > until_s:
            raise OutlastError(f"the spare actor did not start within {_SPARES_S:g} s")
        time.sleep(0.05)


def _run_ray_train() -> RecoveryTiming:
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        run_ray_train(Path(name), num_workers=_NUM_RANKS)
        marks = read_marks(Path(name))
    killed_ns = when_rank(marks, "killed", VICTIM, STRUCK)
    if killed_ns is None:
        raise OutlastError(f"no worker of Ray Train was killed in step {STRUCK}")
    stages_s = {
        stage: (at_ns - killed_ns) / 1e9
        for stage in ("began", "loaded", "stepped")
        if (at_ns := when_all(marks, stage, since_ns=killed_ns, num_ranks=_NUM_RANKS)) is not None
    }
    if "stepped" not in stages_s:
        raise OutlastError("Ray Train ended without another step of all workers")
    return RecoveryTiming(stages_s["stepped"], stages_s)


def when_all(marks: Sequence[Mark], name: str, *, since_ns: int, num_ranks: int) -> int | None:
    """Return when the last rank first marked a name after a moment; ``None``: not all did."""
    first: dict[int, int] = {}
    for mark in marks:
        if mark.name == name and mark.at_ns > since_ns:
            first.setdefault(mark.rank, mark.at_ns)
    return max(first.values()) if len(first) == num_ranks else None


def when_rank(marks: Sequence[Mark], name: str, rank: int, iteration: int) -> int | None:
    """Return when a rank first marked a name in a step; ``None``: never."""
    return next((one.at_ns for one in marks if (one.name, one.rank, one.iteration) == (name, rank, iteration)), None)


def _phases(some: Sequence[RecoveryTiming]) -> dict[str, float]:
    names = dict.fromkeys(name for one in some for name in one.phases_s)
    return {name: round(median([one.phases_s[name] for one in some if name in one.phases_s]), 4) for name in names}


def _describe(phases_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases_s.items())


# -- training -------------------------------------------------------------------------------------------------------


class BenchFault:
    """The fault of one rank.

    Args:
        folder: Folder of the marks.
        kind: ``kill``, ``sleep``, ``stop``, or ``none``.
    """

    def __init__(self, folder: str, kind: str) -> None:
        self._folder, self._kind = Path(folder), kind
        self._mark = MarkWriter(self._folder)

    def strike(self, rank: int, iteration: int) -> None:
        """Fail once, if it is this rank's turn."""
        if self._kind == "none" or (rank, iteration) != (VICTIM, STRUCK):
            return
        try:
            (self._folder / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        if self._kind == "sleep":
            time.sleep(_LONGEST_S)
        if self._kind == "stop":
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        time.sleep(_PEERS_WAIT_S)
        self._mark("killed", rank, iteration)
        os.kill(os.getpid(), signal.SIGKILL)


def batch_of(iteration: int) -> torch.Tensor:
    return torch.full((_BATCH, _WIDTH), float(iteration))


def _make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Linear(_WIDTH, _WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class BenchActor(TrainActor):
    """Train a layer; gradients are reduced over both axes."""

    def __init__(self, folder: str, fault: str) -> None:
        self._mark, self._fault = MarkWriter(Path(folder)), BenchFault(folder, fault)

    def setup(self) -> None:
        self.model, self.optimizer = _make_model()

    def state(self) -> Mapping[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train_step(self, batch: torch.Tensor, iteration: int) -> float:
        rank = self.place.rank
        with self.section("step"):
            self._mark("entered", rank, iteration)
            self._fault.strike(rank, iteration)
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(batch).square().mean()
            loss.backward()
            for parameter in self.model.parameters():
                for axis in ("tp", "dp"):
                    dist.all_reduce(parameter.grad, group=self.group(axis))
            with self.update(iteration):
                self.optimizer.step()
        self.save(iteration)
        self._mark("stepped", rank, iteration)
        return float(loss.detach())


def run_ray_train(folder: Path, *, num_workers: int) -> None:
    """Train with ``TorchTrainer`` until it has recovered from the kill and has ended.

    Raises:
        OutlastError: It did not recover.

    Blocks: about half a minute.
    """
    trainer = TorchTrainer(
        _train,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            name="bench",
            storage_path=str(folder / "results"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    run: Future[object] = Future()

    def fit() -> None:
        try:
            run.set_result(trainer.fit())
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            run.set_exception(error)

    # A thread handles no signals, so that Ctrl-C ends this program; a thread that never ends delays nothing.
    threading.Thread(target=fit, name="outlast-bench-ray-train", daemon=True).start()
    try:
        run.result(_LONGEST_RUN_S)
    except (ray.train.TrainingFailedError, TimeoutError) as error:
        raise OutlastError(f"Ray Train did not recover from the kill in {_LONGEST_RUN_S:g} s: {error}") from error


def _train(config: dict[str, Any]) -> None:
    mark, fault = MarkWriter(Path(config["folder"])), BenchFault(config["folder"], "kill")
    rank, first = dist.get_rank(), 1
    mark("began", rank, 0)
    model, optimizer = _make_model()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as name:
            saved = torch.load(Path(name) / _STATE, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"] + 1
    mark("loaded", rank, first - 1)
    for iteration in range(first, TOTAL + 1):
        fault.strike(rank, iteration)
        optimizer.zero_grad()
        loss = model(batch_of(iteration)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        mark("stepped", rank, iteration)
        _report(rank, iteration, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _report(rank: int, iteration: int, state: dict[str, Any]) -> None:
    """Save as Ray Train's guide does: rank 0 writes, all report."""
    metrics = {"iteration": iteration}
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        torch.save({**state, "iteration": iteration}, Path(name) / _STATE)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(name))
