"""Proofs that each setting of fault tolerance and health has an effect."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from scenes import Proof, Scene, differs

from outlast.config import FaultToleranceConfig, HealthConfig
from outlast.env import WorkerEnv
from outlast.health.devices import probe_devices
from outlast.health.node import probe_node
from outlast.health.probing import CheckResult, Status
from outlast.incidents import Incident, IncidentKind
from outlast.launch.checkups import CheckedUp, Occasion
from outlast.launch.node_health import NodeHealth
from outlast.monitor import hang_watch
from outlast.monitor.learned_timeouts import FILE_NAME, LearnedTimeouts, Observation
from outlast.monitor.rank_monitor import PlacedRankMonitor
from outlast.monitor.watchdog import HangReport
from outlast.policy.deadlines import Expired, Subject
from outlast.runtime import processes
from outlast.runtime.board import Board
from outlast.runtime.event_loop import Timers
from outlast.runtime.journal import Journal


def timeouts_are_stored_in_state_directory(scene: Scene) -> None:
    """Learned timeouts are stored in state_directory, and in the run directory by default."""
    for name in ("there", None):
        folder = None if name is None else str(scene.folder / name)
        config = FaultToleranceConfig(calc_ft_timeouts=True, state_directory=folder)
        monitor = PlacedRankMonitor(WorkerEnv(), config, scene.folder)
        monitor.finish()
        monitor.close()
        assert (scene.folder / "there" / FILE_NAME).exists()
        assert (scene.folder / FILE_NAME).exists() is (name is None)


def learned_sections(config: FaultToleranceConfig) -> Any:
    learned = LearnedTimeouts.load("/nonexistent")
    observation = Observation(longest_s={"checkpointing": 3.0}, counts={"checkpointing": 1})
    learned.merge([observation], cycle="0", config=config, finished=True)
    return learned.learned.sections


def a_hung_rank_gets_the_configured_signal(scene: Scene) -> None:
    """The monitor process sends the configured signal, and SIGKILL by default."""
    signals = hang_watch.signal
    ends, terminates = FaultToleranceConfig(), FaultToleranceConfig(rank_termination_signal="SIGTERM")
    sent = signals_sent_to_a_hung_rank(scene, [ends, terminates], is_gone=lambda *_: True)
    assert sent == [signals.SIGKILL, signals.SIGTERM, signals.SIGCONT]


def a_hung_rank_has_the_grace_time(scene: Scene) -> None:
    """Between that signal and SIGKILL the monitor process waits for the configured time."""
    waited: list[float] = []

    def is_gone(_: Any, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return False

    graces = (FaultToleranceConfig().rank_termination_grace, 5.0)
    configs = [FaultToleranceConfig(rank_termination_signal="SIGTERM", rank_termination_grace=one) for one in graces]
    sent = signals_sent_to_a_hung_rank(scene, configs, is_gone=is_gone)
    assert waited == [30.0, 5.0]
    assert sent.count(hang_watch.signal.SIGKILL) == 2


def signals_sent_to_a_hung_rank(scene: Scene, configs: list[FaultToleranceConfig], is_gone: Any) -> list[int]:
    """Return the signals that the monitor process sends to a hung rank, for all configs in turn."""
    sent: list[int] = []
    scene.patch.setattr(hang_watch, "examine", lambda *_, **__: [])
    scene.patch.setattr(hang_watch.signal, "pidfd_send_signal", lambda _, number: sent.append(number))
    scene.patch.setattr(processes, "has_ended", is_gone)
    expired_heartbeat = Expired(
        subject=Subject.HEARTBEAT, local_rank=0, global_rank=0, pid=1, section=None,
        timeout_s=1, elapsed_s=2, since_ns=0, iteration=0,
    )  # fmt: skip
    for config in configs:
        board = Board.create()
        task = hang_watch.HangWatchTask(
            pid=os.getpid(),
            node="n",
            rank=0,
            config=config.to_json(),
            stacks_dir=str(scene.folder),
        )
        hang_watch.HangWatch(task, board, worker=-1).end_worker(HangReport(expired=[expired_heartbeat], states=[]))
        board.close()
    return sent


F = FaultToleranceConfig
FAULT_TOLERANCE: dict[str, Proof] = {
    "state_directory": timeouts_are_stored_in_state_directory,
    "safety_factor": differs(learned_sections, F, safety_factor=2.0),
    "rank_termination_signal": a_hung_rank_gets_the_configured_signal,
    "rank_termination_grace": a_hung_rank_has_the_grace_time,
}


# -- health --------------------------------------------------------------------------------------------------------


class RecordingProber:
    """A prober that records its requests, and finds one healthy GPU."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def ask(self, task: Any, name: str, target: str, *, timeout_s: float) -> CheckResult:
        self.requests.append((task, name, target, timeout_s))
        facts = {"num_devices": 1, "kind": "cuda"} if name == "devices" else {}
        return CheckResult(name=name, target=target, status=Status.OK, reason="", took_s=0.0, facts=facts)


def checks_of_node(config: HealthConfig) -> Any:
    prober: Any = RecordingProber()
    probe_node(prober, config, places=("/tmp",), node="n")
    return prober.requests


def checks_of_gpu(config: HealthConfig) -> Any:
    prober: Any = RecordingProber()
    assert list(probe_devices(prober, config, node="n"))
    return prober.requests


def node_health_actions(config: HealthConfig) -> Any:
    """Return the actions of an agent for its node: before it joins, after two faults, and when it is unhealthy."""
    checkups, timers = SimpleNamespace(config=config, begin=Mock(), close=Mock()), Timers()
    health = NodeHealth(
        checkups,  # type: ignore[arg-type]
        client=Mock(node="n"),
        journal=Mock(**{"incident.return_value": Incident(kind=IncidentKind.NODE_UNHEALTHY)}),
        timers=timers,
        is_alone=False,
    )
    health.note_connected(is_host=False)
    was_admitted = health.may_join
    for _ in range(2):
        health.suspect()
        health.note_cleared()
    failed = CheckResult(name="disk", target="/", status=Status.FAILED, reason="full", took_s=0.0)
    if not was_admitted:
        health.take(CheckedUp(Occasion.JOINING, (failed,)))
    return (
        was_admitted,
        checkups.begin.mock_calls,
        [name for name in ("check-up", "retry", "unreported") if timers.is_set(name)],
        health.stop is not None,
    )


def ranks_are_checked_at_the_interval(scene: Scene) -> None:
    """All ranks are checked after every interval of steps, within the timeout."""
    from outlast.session import checks

    check = Mock(return_value=Mock(run=Mock(return_value=Mock(has_failed=False))))
    scene.patch.setattr(checks, "ProcessGroupCheck", check)
    for interval, times in ((1, 6), (3, 2)):
        check.return_value.run.reset_mock()
        liveness = checks.RankLiveness(
            HealthConfig(process_group_interval=interval, process_group_timeout=11.0), WorkerEnv(), Mock(spec=Journal)
        )
        for iteration in range(1, 7):
            liveness.check(iteration)
        assert check.return_value.run.call_count == times
        assert check.call_args.kwargs == {"timeout_s": 11.0}


H = HealthConfig
HEALTH: dict[str, Proof] = {
    "device_timeout": differs(checks_of_gpu, H, device_timeout=3.0),
    "max_clock_skew": differs(checks_of_node, H, max_clock_skew=3.0),
    "network_interfaces": differs(checks_of_node, H, network_interfaces=("eth7",)),
    "commands": differs(checks_of_node, H, commands=("true",)),
    "gpu_memory_test_gib": differs(checks_of_gpu, H, gpu_memory_test_gib=0.0),
    "after_fault": differs(node_health_actions, H, after_fault=False),
    "gpus": differs(node_health_actions, H, gpus=False),
    "process_group_interval": ranks_are_checked_at_the_interval,
    "process_group_timeout": ranks_are_checked_at_the_interval,
}
