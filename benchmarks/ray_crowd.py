"""The part of benchmark ``ray`` with hundreds of light actors, which import no torch and train nothing.

The driver is real: it starts the actors, monitors their calls, and recovers. Each actor is a Ray process that answers
at once as a training actor does. This measures a recovery's cost for the driver and Ray by the number of actors,
without process groups, set-up and loading.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import ray

from benchmarks.measuring import Progress, median
from outlast import clock
from outlast.config import RecoveryConfig
from outlast.errors import OutlastError
from outlast.ray.pool import Actor, Pool
from outlast.ray.protocol import (
    Aborted,
    ActorAssignment,
    ActorIdentity,
    ActorStatus,
    Call,
    CallFailed,
    CallReturned,
    FailureKind,
    Joined,
    Mesh,
)
from outlast.ray.recovery import Incarnation, Recovery
from outlast.ray.replies import await_replies
from outlast.ray.watch import Watch
from outlast.runtime.journal import Journal
from outlast.simulate.benchmark_results import Bar, BenchResult

SIZES = (16, 64, 256)
_BARS_S = {16: 2.0, 64: 3.0, 256: 10.0}
_START_S = 1200.0
_WAIT_S = 120.0
_TELL = 32
"""Progress is reported once per so many started actors: some forty start in a minute on each core."""
_WAIT, _STEP = "wait", "step"


class LightShell:
    """Answer as an actor's shell does, without a training."""

    def __init__(self) -> None:
        self._left: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._waiting = False

    def _leaving(self, incarnation: int) -> threading.Event:
        with self._lock:
            return self._left.setdefault(incarnation, threading.Event())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator, unused-ignore]
    def identity(self) -> ActorIdentity:
        if "torch" in sys.modules:
            raise OutlastError("a light actor has imported torch")
        return ActorIdentity(node_id=ray.get_runtime_context().get_node_id(), node="", pid=os.getpid(), device="")

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator, unused-ignore]
    def status(self) -> ActorStatus:
        return ActorStatus(iteration=0, sections=((_WAIT, 0.0),) if self._waiting else ())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator, unused-ignore]
    def host_store(self) -> tuple[str, int]:
        """Return no address: the actors form no process group."""
        return "", 0

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator, unused-ignore]
    def abort(self, incarnation: int, timeout_s: float) -> Aborted:
        """End the waiting call."""
        self._leaving(incarnation).set()
        return Aborted(call_ended=True, iteration=0)

    def join(self, assignment: ActorAssignment) -> Joined:
        return Joined(iteration=0, checkpoint=None, loaded=False, origin="kept", phases={})

    def call(self, call: Call, parcel: object) -> CallReturned | CallFailed:
        """Return at once, or wait until the incarnation ends."""
        if call.method == _STEP:
            return CallReturned(iteration=0)
        self._waiting = True
        self._leaving(call.incarnation).wait(_WAIT_S)
        self._waiting = False
        return CallFailed(kind=FailureKind.ABORTED, summary="left", iteration=0)


def _create(options: Mapping[str, Any]) -> Any:
    return ray.remote(concurrency_groups={"control": 2})(LightShell).options(max_restarts=0, **options).remote()


def measure_crowds(num_actors: int, *, repeats: int, progress: Progress) -> BenchResult:
    """Kill one of ``num_actors`` light actors, and of smaller groups, again and again; Ray must run.

    Args:
        num_actors: The largest group; the smaller ones are those of ``SIZES``.
        repeats: Counted kills in each group; one more precedes them.
        progress: Called with a line for every kill.

    Raises:
        OutlastError: A recovery replaced more than the killed actor.

    Blocks: seconds for each actor to start, and some minutes.
    """
    bars, notes, details = [], [], {}
    for size in [*(size for size in SIZES if size < num_actors), num_actors]:
        found = _recover_again_and_again(size, repeats + 1, progress)[1:]
        phases = {name: median([phases_s[name] for _, phases_s in found]) for name in found[0][1]}
        bar_s = next((bar_s for limit, bar_s in _BARS_S.items() if size <= limit), size / 25)
        bars.append(Bar(f"ray_recover_{size}_s", median([seconds for seconds, _ in found]), "s", bar_s))
        notes.append(f"  {size} actors: {', '.join(f'{name} {seconds:.3f} s' for name, seconds in phases.items())}")
        details[str(size)] = phases
    first = "light actors without torch: what a recovery costs the driver and Ray, without process groups and loading"
    return BenchResult("ray", tuple(bars), (first, *notes), details={"phases_s": details})


def _recover_again_and_again(size: int, times: int, progress: Progress) -> list[tuple[float, Mapping[str, float]]]:
    """Return for each kill the seconds until all actors have done the next step, and the recovery's phases."""
    config = RecoveryConfig(start_timeout=_START_S, ping_timeout=30.0, max_recoveries=times + 1)
    journal = Journal(None, run_id="bench", job="bench", node="", proc="driver")
    pool = Pool(_create, size + 1, {}, "PACK", config, keepers=None, journal=journal)
    watch = Watch(config, pool)
    recovery = Recovery(config, pool, watch)
    found = []
    try:
        pool.open()
        for wanted in (*range(_TELL, size + 1, _TELL), size + 1):
            pool.require(wanted)
            progress(f"{wanted} of {size + 1} actors started, one of them a spare")
        current = recovery.form(Mesh(dp=size))
        for number in range(times):
            if not pool.wait_for_spares(1, _WAIT_S):
                raise OutlastError(f"no spare started within {_WAIT_S:g} s")
            current, seconds, phases_s = _recover_once(current, size // 2, watch, recovery)
            progress(f"{size} actors, kill {number + 1} of {times}: {seconds:.3f} s")
            found.append((seconds, phases_s))
    finally:
        pool.close()
    return found


def _recover_once(
    current: Incarnation, victim: int, watch: Watch, recovery: Recovery
) -> tuple[Incarnation, float, Mapping[str, float]]:
    refs = _call(current.members, current.number, _WAIT)
    deadline_s = clock.now_s() + _WAIT_S
    while True:
        asked = {rank: actor.handle.status.remote() for rank, actor in current.members.items()}
        replies = await_replies(asked, _WAIT_S).values()
        if all(reply.value is not None and reply.value.sections for reply in replies):
            break
        if clock.now_s() > deadline_s:
            raise OutlastError("not all actors came to their call")
    begun_s = clock.now_s()
    os.kill(current.members[victim].pid, signal.SIGKILL)
    gathered = watch.gather(current.members, refs)
    detected_s = clock.now_s()
    following, report = recovery.recover(current, gathered, method=_WAIT)
    if not watch.gather(following.members, _call(following.members, following.number, _STEP)).is_whole:
        raise OutlastError("the step after the recovery failed")
    seconds = clock.now_s() - begun_s
    if set(report.replaced) != {victim} or len(report.kept) != len(current.members) - 1:
        raise OutlastError(f"more was lost than rank {victim}: {report.describe()}")
    return following, seconds, {"detect": detected_s - begun_s, **report.phases_s}


def _call(members: Mapping[int, Actor], incarnation: int, method: str) -> dict[int, Any]:
    message = Call(incarnation=incarnation, method=method)
    return {rank: actor.handle.call.remote(message, ()) for rank, actor in members.items()}
