"""Fault tolerance and health: what each setting changes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from scenes import Proof, Scene, differs

from outlast.chaos.armed import arm_configured, simulated_fault
from outlast.config import Config, FaultToleranceConfig, HealthConfig
from outlast.config.sources import LayeredSettings
from outlast.env import WorkerEnv
from outlast.health.devices import probe_devices
from outlast.health.node import probe_node
from outlast.health.probing import CheckResult, Status
from outlast.incidents import Incident, IncidentKind, Rung
from outlast.launch import device_memory
from outlast.launch import protocol as m
from outlast.launch.agent_events import AgentStops, Timers
from outlast.launch.control import JobIdentity
from outlast.launch.coordinator_server import CoordinatorServer
from outlast.launch.membership import JobSettings
from outlast.launch.node_health import CheckedUp, NodeHealth, Occasion
from outlast.launch.options import parse_options
from outlast.monitor import hang_watch
from outlast.monitor.rank_monitor import PlacedRankMonitor
from outlast.monitor.watchdog import FILE_NAME, HangReport, LearnedTimeouts, Observation
from outlast.policy import ladder
from outlast.policy.deadlines import BoardSection, ExitLimit, Expired, Subject, Timeouts, deadlines
from outlast.policy.ladder import CycleEnd, LadderState
from outlast.runtime.board import Board, RankState
from outlast.runtime.journal import Journal
from outlast.runtime.run_key import RunKey

S = 1_000_000_000
PLACE = WorkerEnv(world_size=8, run_id="run")
STATES = (
    RankState(local_rank=0, attached=True, attached_ns=S),
    RankState(local_rank=0, attached=True, attached_ns=S, last_heartbeat_ns=2 * S),
    RankState(local_rank=0, attached=True, attached_ns=S, sections=(BoardSection("step", S, 0),), depth=1),
    RankState(local_rank=0, attached=True, attached_ns=S, sections=(BoardSection("step", S, 5),), depth=1),
    RankState(local_rank=0, attached=True, attached_ns=S, left_ns=3 * S),
)


def overdue(config: FaultToleranceConfig) -> list[list[int]]:
    """Return when ranks in several states would be taken for hung."""
    return [deadlines(state, Timeouts.from_config(config)) for state in STATES]


def learns_only_when_told(scene: Scene) -> None:
    """Durations are kept in ft_state.json with calc_ft_timeouts alone."""
    for config in (FaultToleranceConfig(), FaultToleranceConfig(calc_ft_timeouts=True)):
        assert not (scene.folder / FILE_NAME).exists()
        monitor = PlacedRankMonitor(WorkerEnv(), config, scene.folder)
        monitor.finish()
        monitor.close()
    assert (scene.folder / FILE_NAME).exists()


def learns_in_a_folder(scene: Scene) -> None:
    """Durations are kept where state_directory says, and in the run directory otherwise."""
    for name in ("there", None):
        folder = None if name is None else str(scene.folder / name)
        config = FaultToleranceConfig(calc_ft_timeouts=True, state_directory=folder)
        monitor = PlacedRankMonitor(WorkerEnv(), config, scene.folder)
        monitor.finish()
        monitor.close()
        assert (scene.folder / "there" / FILE_NAME).exists()
        assert (scene.folder / FILE_NAME).exists() is (name is None)


def learned_from(config: FaultToleranceConfig) -> Any:
    learned = LearnedTimeouts.load("/nonexistent")
    seen = Observation(longest_s={"checkpointing": 3.0}, counts={"checkpointing": 1})
    learned.merge([seen], cycle="0", config=config, finished=True)
    return learned.learned.sections


def ends_a_hung_rank_with_the_signal(scene: Scene) -> None:
    """The watch sends the configured signal, and SIGKILL without one."""
    signals = hang_watch.signal
    ends, terminates = FaultToleranceConfig(), FaultToleranceConfig(rank_termination_signal="SIGTERM")
    sent = sent_to_a_hung_rank(scene, [ends, terminates], is_gone=lambda *_: True)
    assert sent == [signals.SIGKILL, signals.SIGTERM, signals.SIGCONT]


def waits_for_the_handler_of_a_hung_rank(scene: Scene) -> None:
    """Between that signal and SIGKILL the watch waits as long as configured."""
    waited: list[float] = []

    def is_gone(_: Any, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return False

    graces = (FaultToleranceConfig().rank_termination_grace, 5.0)
    configs = [FaultToleranceConfig(rank_termination_signal="SIGTERM", rank_termination_grace=one) for one in graces]
    sent = sent_to_a_hung_rank(scene, configs, is_gone=is_gone)
    assert waited == [30.0, 5.0]
    assert sent.count(hang_watch.signal.SIGKILL) == 2


def sent_to_a_hung_rank(scene: Scene, configs: list[FaultToleranceConfig], is_gone: Any) -> list[int]:
    """Return the signals that the watch sends to a rank that hangs, with each config in turn."""
    sent: list[int] = []
    scene.patch.setattr(hang_watch, "examine", lambda *_, **__: [])
    scene.patch.setattr(hang_watch.signal, "pidfd_send_signal", lambda _, number: sent.append(number))
    scene.patch.setattr(hang_watch.HangWatch, "_is_gone", is_gone)
    late = Expired(
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
        hang_watch.HangWatch(task, board, worker=-1).end_worker(HangReport(expired=[late], states=[]))
        board.close()
    return sent


def settled(config: FaultToleranceConfig) -> JobSettings:
    """Return the coordinator's settings once a script's config reached it."""
    server = CoordinatorServer(
        (),
        JobSettings(job="job", num_slots=4),
        JobIdentity(run_id="run", key=RunKey.of_run_id("run")),
        node="n",
        layers=LayeredSettings(),
        on_error=lambda _: None,
    )
    try:
        server._take_script_settings(m.ScriptSettings(node="n", epoch="e", fault_tolerance=config.to_json()))
        assert server._coordinator._ladder.limits == server._coordinator.settings.limits
        assert server._coordinator._forming.settings is server._coordinator.settings
        return server._coordinator.settings
    finally:
        server.close()


def verdicts(config: FaultToleranceConfig) -> list[Rung]:
    """Return what follows cycle after cycle that ends without progress on one node."""
    state, rungs = LadderState(), []
    for cycle in range(8):
        incident = Incident(kind=IncidentKind.WORKER_FAILED, cycle=cycle, node="a", rank=0, exit_code=1)
        end = CycleEnd(cycle=cycle, incident=incident, progress_known=True, num_spares=1)
        state, verdict = ladder.decide(state, end, settled(config).limits)
        rungs.append(verdict.rung)
    return rungs


def delays(config: FaultToleranceConfig) -> list[float]:
    """Return how long the restarts wait after cycles that end without progress."""
    state, waits = LadderState(), []
    for cycle in range(3):
        incident = Incident(kind=IncidentKind.WORKER_FAILED, cycle=cycle, node="a", rank=0, exit_code=1)
        end = CycleEnd(cycle=cycle, incident=incident, progress_known=True)
        state, verdict = ladder.decide(state, end, settled(config).limits)
        waits.append(verdict.delay_s)
    return waits


def may_shrink(config: FaultToleranceConfig) -> int | None:
    return settled(config).min_nodes


def beats_as_often_as_told(scene: Scene) -> None:
    """A node that counts as lost sooner gives signs of life more often."""
    from outlast.launch import coordinator_client, run

    intervals = []

    def connect(*_: Any, beat_interval_s: float, relay: Any, **__: Any) -> Any:
        intervals.append(beat_interval_s)
        relay.close()
        raise ConnectionError

    scene.patch.chdir(scene.folder)
    scene.patch.setattr(coordinator_client, "ControlLink", connect)
    (scene.folder / "train.py").touch()
    for argv in ([], ["--ft-node-heartbeat-timeout=1"]):
        try:
            run._make_client(
                parse_options([*argv, "train.py"]),
                Mock(),
                Mock(),
                Mock(),
                endpoints=(),
                records=Mock(),
                new_job="job",
                last_job="",
                nproc=1,
            )
        except ConnectionError:
            pass
    assert intervals == [1.0, 0.2]


def leaves_within_the_agents_grace(scene: Scene) -> None:
    """Under an agent a session has ended within the time that the agent gives."""
    board = Board.create()
    scene.patch.setenv("OUTLAST_RUN_ID", "run")
    scene.patch.setenv("OUTLAST_BOARD", board.path)
    with scene.session(Config(fault_tolerance=FaultToleranceConfig(shutdown_grace=7.0))) as run:
        assert run._preemption._listener.deadline_s == 7.0
    with scene.session(Config()) as run:
        assert run._preemption._listener.deadline_s == 60.0
    board.close()


def waits_for_gpu_memory(config: FaultToleranceConfig) -> Any:
    """Return how often, and for how long, memory was looked at until workers started beside 600 MiB of others."""
    now_s, waits = 0.0, []

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        waits.append(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "has_gpus", lambda: False)
        patch.setattr(device_memory, "clock", SimpleNamespace(now_s=lambda: now_s))
        memory = device_memory.MemoryReclaim(config, Mock())
        patch.setattr(memory, "_closed", Mock(wait=wait, **{"is_set.return_value": False}))
        patch.setattr(memory, "_read", lambda: {"GPU-0": 600 << 20})
        memory._wait({"GPU-0": 0}, config.gpu_memory_reclaim_timeout)
    return waits


def armed(config: FaultToleranceConfig) -> bool:
    return arm_configured(Config(), config, PLACE, Mock(spec=Journal)) is not None


def fault(config: FaultToleranceConfig) -> Any:
    return simulated_fault(config, PLACE)


SIMULATES = {"simulate_fault": True, "simulated_fault_type": "rank_hung", "simulated_fault_rank": 1}
F = FaultToleranceConfig
FAULT_TOLERANCE: dict[str, Proof] = {
    "enable_ft_package": differs(overdue, F, {"rank_heartbeat_timeout": 3.0}, enable_ft_package=False),
    "calc_ft_timeouts": learns_only_when_told,
    "state_directory": learns_in_a_folder,
    "initial_rank_heartbeat_timeout": differs(overdue, F, initial_rank_heartbeat_timeout=3.0),
    "rank_heartbeat_timeout": differs(overdue, F, rank_heartbeat_timeout=3.0),
    "rank_section_timeouts": differs(overdue, F, rank_section_timeouts={"step": 3.0}),
    "rank_out_of_section_timeout": differs(overdue, F, rank_out_of_section_timeout=3.0),
    "exit_timeout": differs(ExitLimit.from_config, F, exit_timeout=3.0),
    "safety_factor": differs(learned_from, F, safety_factor=2.0),
    "num_warmup_iterations": differs(overdue, F, {"rank_section_timeouts": {"step": 3.0}}, num_warmup_iterations=0),
    "rank_termination_signal": ends_a_hung_rank_with_the_signal,
    "rank_termination_grace": waits_for_the_handler_of_a_hung_rank,
    "max_no_progress_cycles": differs(verdicts, F, {"max_node_faults": 0}, max_no_progress_cycles=2),
    "max_restart_delay": differs(delays, F, max_restart_delay=0.0),
    "max_node_faults": differs(verdicts, F, max_node_faults=1),
    "min_nodes": differs(may_shrink, F, min_nodes=2),
    "node_heartbeat_timeout": beats_as_often_as_told,
    "shutdown_grace": leaves_within_the_agents_grace,
    "gpu_memory_reclaim_timeout": differs(waits_for_gpu_memory, F, gpu_memory_reclaim_timeout=2.0),
    "gpu_memory_tolerance_mb": differs(waits_for_gpu_memory, F, gpu_memory_tolerance_mb=1024.0),
    "gpu_memory_poll_interval": differs(waits_for_gpu_memory, F, gpu_memory_poll_interval=3.0),
    "simulate_fault": differs(armed, F, simulate_fault=True),
    "simulated_fault_type": differs(fault, F, SIMULATES, simulated_fault_type="rank_killed"),
    "simulated_fault_rank": differs(fault, F, SIMULATES, simulated_fault_rank=2),
    "simulated_fault_base_delay": differs(fault, F, SIMULATES, simulated_fault_base_delay=5.0),
}


# -- health --------------------------------------------------------------------------------------------------------


class Asked:
    """A prober that keeps what it is asked, and finds one sound GPU."""

    def __init__(self) -> None:
        self.questions: list[Any] = []

    def ask(self, task: Any, name: str, target: str, *, timeout_s: float) -> CheckResult:
        self.questions.append((task, name, target, timeout_s))
        facts = {"num_devices": 1, "kind": "cuda"} if name == "devices" else {}
        return CheckResult(name=name, target=target, status=Status.OK, reason="", took_s=0.0, facts=facts)


def asked_of_node(config: HealthConfig) -> Any:
    prober: Any = Asked()
    probe_node(prober, config, places=("/tmp",), node="n")
    return prober.questions


def asked_of_gpu(config: HealthConfig) -> Any:
    prober: Any = Asked()
    assert list(probe_devices(prober, config, node="n"))
    return prober.questions


def life_of_a_node(config: HealthConfig) -> Any:
    """Return what an agent does with its node: before it joins, after two faults, and when it is found unfit."""
    checkups, timers = SimpleNamespace(config=config, begin=Mock(), close=Mock()), Timers()
    health = NodeHealth(
        checkups,  # type: ignore[arg-type]
        client=Mock(node="n"),
        journal=Mock(**{"incident.return_value": Incident(kind=IncidentKind.NODE_UNHEALTHY)}),
        timers=timers,
        is_alone=False,
        mailbox=(mailbox := Mock()),
    )
    was_admitted = health.is_admitted
    for _ in range(2):
        health.suspect()
        health.note_cleared()
    failed = CheckResult(name="disk", target="/", status=Status.FAILED, reason="full", took_s=0.0)
    if not was_admitted:
        health.note_connected(is_host=False)
        health.take(CheckedUp(Occasion.JOINING, (failed,)))
    return (
        was_admitted,
        checkups.begin.mock_calls,
        sorted(timers._deadlines),
        any(isinstance(call.args[0], AgentStops) for call in mailbox.put.mock_calls),
    )


def looks_before_it_joins(scene: Scene) -> None:
    """A node joins unseen with before_joining off, and waits to be looked at with it on."""
    from outlast.launch import run

    scene.patch.chdir(scene.folder)
    (scene.folder / "train.py").touch()
    made = Mock()
    scene.patch.setattr(run, "Checkups", made)
    for value in (True, False):
        (scene.folder / "run.toml").write_text(f"[health]\nbefore_joining = {str(value).lower()}\n")
        run._begin_checkups(parse_options(["--config=run.toml", "train.py"]), Mock())
        assert made.return_value.begin.called is value
        made.reset_mock()
    assert life_of_a_node(HealthConfig())[0] is False
    assert life_of_a_node(HealthConfig(before_joining=False))[0] is True


def asks_the_ranks(scene: Scene) -> None:
    """All ranks are asked after every interval of steps, and may take the timeout."""
    from outlast.session import checks

    check = Mock(return_value=Mock(run=Mock(return_value=Mock(has_failed=False))))
    scene.patch.setattr(checks, "ProcessGroupCheck", check)
    for interval, times in ((1, 6), (3, 2)):
        check.return_value.run.reset_mock()
        asks = checks.RankLiveness(
            HealthConfig(process_group_interval=interval, process_group_timeout=11.0), PLACE, Mock(spec=Journal)
        )
        for iteration in range(1, 7):
            asks.check(iteration)
        assert check.return_value.run.call_count == times
        assert check.call_args.kwargs == {"timeout_s": 11.0}


H = HealthConfig
HEALTH: dict[str, Proof] = {
    "check_timeout": differs(asked_of_node, H, check_timeout=3.0),
    "device_timeout": differs(asked_of_gpu, H, device_timeout=3.0),
    "min_free_disk_gib": differs(asked_of_node, H, min_free_disk_gib=3.0),
    "min_free_shm_gib": differs(asked_of_node, H, min_free_shm_gib=3.0),
    "min_free_memory_gib": differs(asked_of_node, H, min_free_memory_gib=3.0),
    "min_open_files": differs(asked_of_node, H, min_open_files=3),
    "max_clock_skew": differs(asked_of_node, H, max_clock_skew=3.0),
    "network_interfaces": differs(asked_of_node, H, network_interfaces=("eth7",)),
    "commands": differs(asked_of_node, H, commands=("true",)),
    "gpu_memory_test_gib": differs(asked_of_gpu, H, gpu_memory_test_gib=0.0),
    "before_joining": looks_before_it_joins,
    "after_fault": differs(life_of_a_node, H, after_fault=False),
    "gpus": differs(life_of_a_node, H, gpus=False),
    "retry_interval": differs(life_of_a_node, H, retry_interval=3.0),
    "node_interval": differs(life_of_a_node, H, {"before_joining": False}, node_interval=3.0),
    "process_group_interval": asks_the_ranks,
    "process_group_timeout": asks_the_ranks,
    "simulate_wrong_gemm": differs(asked_of_node, H, simulate_wrong_gemm="n"),
}
