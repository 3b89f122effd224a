"""Proofs that each setting of in-process restarts, slow rank detection and actor groups has an effect."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from scenes import Proof, Scene, differs

from outlast import clock
from outlast.config import InProcessRestartConfig, RecoveryConfig, StragglerDetectionConfig
from outlast.env import WorkerEnv
from outlast.errors import ActorFailed, ConfigError, DeadlineExceeded
from outlast.inprocess import Handle, Wrapper, rank
from outlast.inprocess.protocol import MonitorTask
from outlast.policy.slowness import RankTimings, summarise
from outlast.policy.stragglers import Streaks, judge
from outlast.straggler import Report, StragglerDetector

# -- in-process restarts -------------------------------------------------------------------------------------------


def task(config: InProcessRestartConfig) -> MonitorTask:
    """Return the task of the agent process."""
    return MonitorTask.of(config, WorkerEnv(), host="h", call=0, labels={})


def enabled_protects_the_function(_: Scene) -> None:
    """enabled=False returns the function unchanged, and rejects a function that needs a handle; by default the
    function is wrapped."""

    def train(call: Handle | None = None) -> Handle | None:
        return call

    def needs(call: Handle) -> None: ...

    off = InProcessRestartConfig(enabled=False)
    assert Wrapper(off)(train) is train
    assert Wrapper(InProcessRestartConfig(soft_timeout=5.0))(train) is not train
    with pytest.raises(ConfigError, match=r"enabled is off, but .*needs.* takes a Handle"):
        Wrapper(off)(needs)


def progress_is_checked_at_the_interval(scene: Scene) -> None:
    """The monitor thread checks progress at the shorter of both intervals."""
    intervals = []

    def start(*_: Any, interval_s: float, **__: Any) -> Any:
        intervals.append(interval_s)
        raise ConnectionError

    scene.patch.setattr(rank.leaving, "Background", Mock())
    for name in ("StatusReporter", "Bootstrap", "MonitorLink", "MonitorTask", "Page", "own_address"):
        scene.patch.setattr(rank, name, Mock())
    scene.patch.setattr(rank, "MonitorThread", start)
    for config in (InProcessRestartConfig(), InProcessRestartConfig(progress_watchdog_interval=0.25)):
        with pytest.raises(ConnectionError):
            rank.WrappedRank(config, Wrapper(config)._plugins).run(lambda: None, (), {})
    assert intervals == [1.0, 0.25]


I = InProcessRestartConfig  # noqa: E741
IN_PROCESS: dict[str, Proof] = {
    "enabled": enabled_protects_the_function,
    "monitor_process_logdir": differs(task, I, monitor_process_logdir="logs"),
    "heartbeat_interval": differs(task, I, heartbeat_interval=3.0),
    "heartbeat_timeout": differs(task, I, heartbeat_timeout=50.0),
    "completion_timeout": differs(task, I, completion_timeout=3.0),
    "monitor_thread_interval": differs(task, I, monitor_thread_interval=0.5),
    "monitor_process_interval": differs(task, I, monitor_process_interval=0.5),
    "progress_watchdog_interval": progress_is_checked_at_the_interval,
    "last_call_wait": differs(task, I, last_call_wait=3.0),
}


# -- slow ranks ----------------------------------------------------------------------------------------------------

TIMES_S = {0: 0.01, 1: 0.01, 2: 0.01, 3: 0.0125}


def timings(best_s: float = 0.009) -> tuple[RankTimings, ...]:
    """Return a window of four ranks, of which the last is slower; all ranks have been faster before."""
    return tuple(
        RankTimings(
            rank=number,
            node="n",
            num_steps=10,
            step_s=seconds,
            sections=(summarise("forward", [seconds] * 10, best_s=best_s),),
            wait_s=0.02 - seconds,
        )
        for number, seconds in TIMES_S.items()
    )


def judged_windows(config: StragglerDetectionConfig) -> Any:
    """Return the findings of three windows: scores, reported ranks, and ranks below a threshold."""
    streaks, findings = Streaks(), None
    for _ in range(3):
        streaks, findings = judge(streaks, timings(), config)
    assert findings is not None
    return findings.relative, findings.individual, findings.named_ranks, findings.below_threshold, findings.why_none


def report_of(scene: Scene, config: StragglerDetectionConfig) -> tuple[Report, bool]:
    """Return the report of a detector whose last rank is slow, and whether machines were checked."""
    checks = Mock(return_value=())
    detector = StragglerDetector(config, global_rank=0)
    scene.patch.setattr(detector, "_gather", lambda _: timings())
    scene.patch.setattr(detector, "_check_machines", checks)
    for _ in range(3):
        last = detector.report()
    detector.close()
    return last, checks.called


def machines_are_checked(scene: Scene) -> None:
    """The machine of a reported rank is checked unless check_machine is off."""
    assert report_of(scene, StragglerDetectionConfig())[1]
    assert not report_of(scene, StragglerDetectionConfig(check_machine=False))[1]


T = StragglerDetectionConfig
STRAGGLER: dict[str, Proof] = {
    "gpu_relative_perf_threshold": differs(judged_windows, T, gpu_relative_perf_threshold=0.95),
    "gpu_individual_perf_threshold": differs(judged_windows, T, gpu_individual_perf_threshold=0.95),
    "noticeable_score": differs(judged_windows, T, {"gpu_relative_perf_threshold": 0.5}, noticeable_score=0.6),
    "check_machine": machines_are_checked,
}


# -- groups of actors ----------------------------------------------------------------------------------------------

pytest.importorskip("ray", reason="groups of actors need Ray")
from outlast.ray import actor_group, pool, recovery, watch  # noqa: E402
from outlast.ray.pool import Pool, Reply  # noqa: E402
from outlast.ray.protocol import Mesh  # noqa: E402
from outlast.ray.recovery import Incarnation, Progress, Recovery  # noqa: E402
from outlast.ray.replies import ActorPing  # noqa: E402
from outlast.ray.watch import AwaitedActor, Gathered, Watch  # noqa: E402

MESH = Mesh.of({"dp": 2})


def actor(number: int) -> Any:
    return SimpleNamespace(
        number=number,
        bundle=0,
        node="n",
        pid=number,
        handle=Mock(),
        identity=SimpleNamespace(device="", node_id="n", node="n"),
    )


def incarnation() -> Incarnation:
    return Incarnation(number=0, mesh=MESH, members={0: actor(0), 1: actor(1)})


def progress() -> Progress:
    return Progress(method="", first=incarnation())


def recover(scene: Scene, config: RecoveryConfig, *, spares: tuple[Any, ...] = ()) -> Any:
    """Return a recovery whose actors do not respond, and the durations of its waits."""
    waits: list[float] = []

    def replies(refs: dict[Any, Any], timeout_s: float) -> dict[Any, Any]:
        waits.append(timeout_s)
        return {key: Reply(value=("h", 1)) for key in refs}

    scene.patch.setattr(recovery, "await_replies", replies)
    returns = {"wait_for_spares.return_value": False, "answering.return_value": []}
    actors = Mock(num_starting=0, usable=spares, draining={}, keepers=None, **returns)
    checks = Mock(**{"gather.return_value": Gathered(values={})})
    return Recovery(config, actors, checks), actors, checks, waits


def join_limits(scene: Scene, config: RecoveryConfig) -> Any:
    """Return the limits for joining the members of an incarnation."""
    subject, _, checks, waits = recover(scene, config)
    members = incarnation()
    subject.join_members(members, {}, progress())
    order = members.members[1].handle.join.remote.call_args.args[0]
    return waits, checks.gather.call_args.kwargs, order.timeout_s


def changes_join_limits(**change: Any) -> Proof:
    """Return the proof that a setting changes the limits of joining."""

    def proof(scene: Scene) -> None:
        assert join_limits(scene, RecoveryConfig()) != join_limits(scene, RecoveryConfig(**change))

    return proof


def recovery_ends_after_max_rounds(scene: Scene) -> None:
    """A recovery that fails repeatedly ends after max_rounds attempts."""
    for number in (1, 3):
        subject, *_ = recover(scene, RecoveryConfig(max_rounds=number))
        work = progress()
        scene.patch.setattr(subject, "abort_members", lambda *_: {})
        scene.patch.setattr(subject, "_fill", lambda *_: (MESH, recovery.Formation(slots=())))
        scene.patch.setattr(subject, "_assign_slots", lambda *_: {0: actor(0)})
        scene.patch.setattr(subject, "join_members", lambda *_: Gathered(unclear={0}))
        with pytest.raises(ActorFailed, match=f"max_rounds={number}"):
            subject.recover_in_rounds(incarnation(), Gathered(), work)
        assert work.num_rounds == number


def aborted_calls_have_time_to_end(scene: Scene) -> None:
    """An actor has abort_timeout to leave an interrupted call, and examine_timeout more for its response."""
    aborts_s = []
    for config in (
        RecoveryConfig(abort_timeout=3.0),
        RecoveryConfig(abort_timeout=9.0),
        RecoveryConfig(abort_timeout=3.0, examine_timeout=2.0),
    ):
        subject, _, _, waits = recover(scene, config)
        aborted = recovery.Aborted(call_ended=True, iteration=1)
        replies = recovery.await_replies

        def abort(refs: dict[Any, Any], timeout_s: float, replies: Any = replies, aborted: Any = aborted) -> Any:
            return {key: Reply(value=aborted) for key in replies(refs, timeout_s)}

        scene.patch.setattr(recovery, "await_replies", abort)
        subject.abort_members(incarnation(), Gathered())
        aborts_s.append(round(waits[0], 1))
    assert aborts_s == [3.7, 9.7, 5.0]


def actors_are_pinged_at_the_interval(scene: Scene) -> None:
    """A working actor is pinged at every ping_interval."""
    waits = []

    def wait(*_: Any, timeout: float, **__: Any) -> Any:
        waits.append(round(timeout, 2))
        return [], []

    scene.patch.setattr(watch.ray, "wait", wait)
    for config in (RecoveryConfig(), RecoveryConfig(ping_interval=0.1)):
        now_s = clock.now_s()
        waiting = {0: AwaitedActor(actor=actor(0), call="ref", alive_s=now_s, ping=ActorPing(due_s=now_s + 99))}
        Watch(config, Mock()).wait_for_event(waiting, math.inf)
    assert waits == [0.5, 0.1]


def silence_limit_s(config: RecoveryConfig) -> float:
    """Return the number of seconds after which an actor that does not respond is lost."""
    return Watch(config, Mock()).silent_s(
        AwaitedActor(actor=actor(0), call="ref", alive_s=0.0, ping=ActorPing(asked_s=0.0))
    )


def pool_of(config: RecoveryConfig) -> Any:
    return Pool(Mock(), 1, {}, "PACK", config, keepers=None, journal=Mock())


def group_with(scene: Scene, config: RecoveryConfig) -> Any:
    """Return a group whose thread does nothing."""
    for name in ("ray", "Pool", "create_shell"):
        scene.patch.setattr(actor_group, name, Mock())
    scene.patch.setattr(actor_group.ActorGroup, "_run", lambda self: self._formed.set_result(None))
    return actor_group.ActorGroup(object, {"dp": 1}, recovery=config)


def closing_has_a_limit(scene: Scene) -> None:
    """Actors have close_timeout to exit, and closing the group takes that much longer."""
    limits, waits = [], []
    scene.patch.setattr(pool, "await_replies", lambda _, timeout_s: waits.append(timeout_s))
    for seconds in (10.0, 2.0):
        subject = group_with(scene, RecoveryConfig(close_timeout=seconds))
        thread: Any = Mock(**{"is_alive.return_value": True})
        subject._thread = thread
        with pytest.raises(DeadlineExceeded):
            subject.close()
        limits.append(thread.join.call_args.args[0])
        pool_of(RecoveryConfig(close_timeout=seconds)).close()
    assert limits[0] - limits[1] == 8.0
    assert waits == [10.0, 2.0]


V = RecoveryConfig
RECOVERY: dict[str, Proof] = {
    "ping_interval": actors_are_pinged_at_the_interval,
    "ping_timeout": differs(silence_limit_s, V, ping_timeout=3.0),
    "examine_timeout": aborted_calls_have_time_to_end,
    "store_timeout": changes_join_limits(store_timeout=3.0),
    "abort_timeout": aborted_calls_have_time_to_end,
    "join_timeout": changes_join_limits(join_timeout=3.0),
    "collective_timeout": changes_join_limits(collective_timeout=3.0),
    "close_timeout": closing_has_a_limit,
    "max_rounds": recovery_ends_after_max_rounds,
}
