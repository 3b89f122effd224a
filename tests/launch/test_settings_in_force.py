"""Under `outlast run` settings hold wherever they are written, hangs are noticed, and the start says what holds."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from outlast.config import FaultToleranceConfig
from outlast.config.sources import LayeredSettings
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity
from outlast.launch.coordinator_client import CoordinatorClient
from outlast.launch.coordinator_server import CoordinatorServer
from outlast.launch.cycle import Cycle, WorkerLaunch
from outlast.launch.in_process_recovery import InProcessRecovery
from outlast.launch.job_settings import JobSettings
from outlast.launch.node_agent import AgentState, NodeAgent
from outlast.launch.options import parse_options
from outlast.launch.workers import WorkerProcess
from outlast.monitor.learned_timeouts import LearnedTimeouts
from outlast.monitor.rank_monitor import PlacedRankMonitor
from outlast.policy.deadlines import Learned, Timeouts
from outlast.runtime.board import Board
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.fork_server import Exited
from outlast.runtime.postmortem import Postmortem
from outlast.runtime.run_key import RunKey
from outlast.testing import Cluster

# The loop and the file of "Getting started", with timeouts for a test.
SCRIPT = """
import os, sys, time
import torch
import outlast

folder = sys.argv[1]
run = outlast.init(folder + "/outlast.toml")
state = {"model": torch.nn.Linear(2, 2)}
for iteration in run.steps(state, total=40):
    if iteration == 20 and not os.path.exists(folder + "/hung"):
        open(folder + "/hung", "w").close()
        time.sleep(3600)
    time.sleep(0.005)
"""
SETTINGS = """
[checkpoint]
directory = "{folder}/checkpoints"
save_interval = 5

[fault_tolerance]
enable_ft_package = true
calc_ft_timeouts = true
rank_section_timeouts = {{ setup = 600, step = 1, checkpointing = 420 }}
rank_out_of_section_timeout = 300
"""
FILE = """
[fault_tolerance]
rank_out_of_section_timeout = 200
safety_factor = 1000
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_hang_is_noticed_by_the_scripts_own_config_and_timeouts_are_learned(tmp_path: Path) -> None:
    """The timeouts of the script's config are enforced, those of option and file come before them, one line says which
    came from where, and what a cycle taught about sections and heartbeats is in force in the next one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "outlast.toml").write_text(SETTINGS.format(folder=tmp_path))
    (tmp_path / "run.toml").write_text(FILE)
    options = ["--ft-initial-rank-heartbeat-timeout=2000", f"--config={tmp_path}/run.toml"]
    train, run = tmp_path / "train.py", tmp_path / "run"
    with Cluster(train, str(tmp_path), run_dir=run, num_nodes=1, nproc_per_node=1, options=options) as cluster:
        assert cluster.wait(timeout_s=300) == [0], cluster.tails()
        output, events = cluster.agent(0).output(), cluster.events()
    # On a busy machine an earlier line reports that the script has not called outlast.init() yet.
    lines = [line for line in output.splitlines() if "protected: " in line and "hang unknown" not in line]
    for text in (
        "checkpointing 420 s, setup 600 s, step 1 s from script's config",
        f"outside of sections 200 s from {tmp_path}/run.toml",
        "first heartbeat 2000 s from option, heartbeat 1800 s from default",
    ):
        assert text in lines[0]
    hangs = [event.data["incident"] for event in events if event.kind == EventKind.INCIDENT]
    assert (IncidentKind.WORKER_HUNG, "step", 20) in [(one["kind"], one["section"], one["iteration"]) for one in hangs]
    restored = [event.iteration for event in events if event.kind == EventKind.RESTORED]
    assert {15, 20} & set(restored), "nothing that was saved is lost"
    assert "from learned" in lines[-1]
    assert "1800 s" not in lines[-1]
    learned = LearnedTimeouts.load(tmp_path / "checkpoints").learned
    assert {"setup", "step"} <= learned.sections.keys()
    assert "checkpointing" not in learned.sections, "saves in the background cost training almost nothing, or a lot"
    assert learned.heartbeat_s is not None
    assert learned.initial_heartbeat_s is not None
    assert "hang no" not in output


@pytest.mark.process
def test_a_plain_script_that_soon_ends_is_told_nothing_of_hangs(tmp_path: Path) -> None:
    """A script without a session that ends in order within a minute, such as one that prints its help, gets no warning
    that its hangs are not noticed."""
    (tmp_path / "train.py").write_text("print('trains')")
    with Cluster(tmp_path / "train.py", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        output = cluster.agent(0).output()
    assert "hang no" not in output


# -- in process: a cycle and the ranks on its board ----------------------------------------------------------------


@pytest.fixture
def make_cycle(tmp_path: Path) -> Any:
    """Return a function that makes a cycle of two ranks, watched, with given options and file."""
    cycles = []

    def make(**layers: Any) -> Cycle:
        parts: dict[str, Any] = dict.fromkeys(("start", "spawns"))
        parts["start"] = SimpleNamespace(cycle=0, node_rank=0, num_nodes=1)
        parts["logs"] = SimpleNamespace(start=lambda: None, stop=lambda **_: None)
        parts["workers"] = {key: WorkerProcess(local_rank=key, global_rank=key) for key in range(2)}
        parts["board"] = board = Board.create(num_ranks=2)
        parts["in_process"] = InProcessRecovery(
            board=board, workers=parts["workers"], is_alone=True, job="job", cycle=0, node="n"
        )
        options: Any = SimpleNamespace(layers=LayeredSettings(**layers), run_dir=tmp_path)
        cycle = Cycle(**parts, options=options, job="job", node="n", postmortem=Postmortem(2))
        cycle.watch(lambda _: None)
        cycles.append(cycle)
        return cycle

    yield make
    for cycle in cycles:
        cycle.close()


def attach_only(cycle: Cycle, config: FaultToleranceConfig | None = None, local_rank: int = 0) -> None:
    """Have a rank come and go, as far as the board and the agent's channel show."""
    place = WorkerEnv(local_rank=local_rank, board=cycle.board.path, config_file="")
    PlacedRankMonitor(place, config).close()


def attach(cycle: Cycle, config: FaultToleranceConfig | None = None, local_rank: int = 0) -> None:
    """Have a rank come and go, and the agent look."""
    attach_only(cycle, config, local_rank)
    cycle.apply_script_settings()


class Watching:
    """An agent whose workers run, and what it sent the coordinator."""

    def __init__(self, cycle: Cycle) -> None:
        self.sent: list[Any] = []
        self.mailbox, self.fork_server = Mailbox[object](), Mailbox[Exited]()
        self.on_receive = lambda: None
        """Called between the wait for news of the workers and the look at it."""
        workers: Any = Mock(fileno=self.fork_server.fileno, receive=self._receive)
        self.client = CoordinatorClient(Mock(node="n", epoch="e", send=self.sent.append), addr="n", nproc=2, wish=None)
        options: Any = SimpleNamespace(max_nodes=1, num_slots=1, run_dir="", torchrun=SimpleNamespace(max_restarts=3))
        options.workers_stop_timeout_s = 60.0
        self.agent = NodeAgent(
            WorkerLaunch(options=options, kind="exec", argv=(), env={}, spec=Mock(local_world_size=2), logs=Mock()),
            workers=workers,
            writer=None,
            client=self.client,
            checkups=None,
            memory=Mock(waited_s=0.0),
            mailbox=self.mailbox,
            began_s=0.0,
        )
        self.go_on(cycle)
        self.agent._state = AgentState.RUNNING

    def _receive(self) -> Exited:
        self.on_receive()
        return self.fork_server.take_all()[0]

    def go_on(self, cycle: Cycle) -> None:
        """Have another cycle run."""
        self.agent._cycle = cycle

    def wait_once(self) -> None:
        """Wait for news, and handle it."""
        self.agent._wait_and_handle()

    @property
    def told(self) -> list[str]:
        """What it sent of the script's settings."""
        return [one.fault_tolerance for one in self.sent if isinstance(one, m.ScriptSettings)]


@pytest.fixture
def watch() -> Any:
    """Return a function that makes an agent of a cycle."""
    agents = []

    def make(cycle: Cycle) -> Watching:
        agents.append(Watching(cycle))
        return agents[-1]

    yield make
    for one in agents:
        one.mailbox.close()
        one.fork_server.close()


def test_a_plain_script_is_told_once_that_its_hangs_are_not_noticed(
    make_cycle: Any, watch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that have shown no sign of life for a minute get one WARNING with what is known, and what changes that;
    those that have attached by then, or have ended, get none."""
    attached, ended, plain = make_cycle(), make_cycle(), make_cycle()
    attach(attached)
    for worker in ended.workers.values():
        worker.exit_code = 0
    watching = watch(ended)
    for cycle, num_said in ((ended, 0), (attached, 0), (plain, 1), (plain, 1)):
        watching.go_on(cycle)
        watching.agent._log_protection()
        said = [one for one in caplog.records if "hang no" in one.message]
        assert len(said) == num_said
        assert all(one.levelname == "WARNING" for one in said)
    for text in ("outlast.init()", "RankMonitor()"):
        assert text in caplog.text
    assert "enable_ft_package is false" not in caplog.text


def test_a_worker_that_attaches_as_another_ends_is_noticed(make_cycle: Any, watch: Any) -> None:
    """What it sets is in force though its word comes as the agent looks at the end of another worker."""
    watching = watch(cycle := make_cycle())
    watching.fork_server.put(Exited(key=1, pid=1, exit_code=0, mono_ns=0))
    watching.on_receive = lambda: attach_only(cycle, FaultToleranceConfig(rank_heartbeat_timeout=7.0))
    watching.wait_once()
    assert enforced(cycle).heartbeat_s == 7.0
    assert watching.told == ['{"rank_heartbeat_timeout": 7.0}']


def test_the_host_waits_for_no_workers_of_a_node_that_stops(make_cycle: Any, watch: Any) -> None:
    """An agent says goodbye when it learns that the job is over, once, and then ends its workers."""
    watching = watch(make_cycle())
    for _ in range(2):
        watching.mailbox.put(m.Stop(exit_code=0, reason="over"))
        watching.wait_once()
    assert [one for one in watching.sent if isinstance(one, m.Bye)] == [m.Bye()]
    assert watching.agent._state == AgentState.STOPPING


def test_what_a_later_cycle_does_not_set_is_told_as_well(make_cycle: Any, watch: Any) -> None:
    """The coordinator hears of each script's settings once, also that there are none; a new one hears of the last."""
    watching = watch(first := make_cycle())
    attach_only(first, FaultToleranceConfig(max_node_faults=7))
    watching.wait_once()
    attach_only(first, local_rank=1)
    watching.wait_once()
    for _ in range(2):
        watching.go_on(cycle := make_cycle())
        attach_only(cycle)
        watching.wait_once()
    assert watching.told == ['{"max_node_faults": 7}', ""]
    watching.client.register(is_running=True, is_joining=False, has_finished=False)
    assert watching.told[2:] == [""]


def test_what_a_script_does_not_set_any_more_is_the_launchers_again() -> None:
    """The coordinator goes by the newest script's settings: one that sets nothing leaves those of options and file."""
    layers, job = LayeredSettings(options={"max_no_progress_cycles": 5}), JobSettings(job="job", num_slots=4)
    identity = JobIdentity(run_id="run", key=RunKey.of_run_id("run"))
    server = CoordinatorServer((), job, identity, layers=layers, on_error=lambda _: None)
    limits = []
    for text in (FaultToleranceConfig(max_node_faults=7, min_nodes=2, max_restart_delay=9.0).to_json(), ""):
        server._handle(m.ScriptSettings(node="n", epoch="e", fault_tolerance=text))
        settings = server._coordinator.settings
        given = settings.limits.max_node_faults, settings.min_nodes, settings.limits.max_restart_delay_s
        limits.append((*given, settings.limits.max_no_progress_cycles))
    server.close()
    assert limits == [(7, 2, 9.0, 5), (3, None, 60.0, 5)]


def enforced(cycle: Cycle) -> Timeouts:
    assert cycle.watchdog is not None
    return cycle.watchdog._timeouts


def test_nothing_given_enforces_the_defaults_for_sessions(make_cycle: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With no setting anywhere the default timeouts of heartbeats are in force, and one line says so."""
    caplog.set_level(logging.DEBUG)
    cycle = make_cycle()
    attach(cycle)
    attach(cycle, local_rank=1)
    (line,) = [record.getMessage() for record in caplog.records if "watches 2 ranks: section" in record.getMessage()]
    assert "heartbeats: first 1800.0 s (default), later 1800.0 s (default)" in line
    assert enforced(cycle) == Timeouts.from_config(cycle.layers.config, with_defaults=True)
    assert len(enforced(cycle).defaults) == 2


def test_the_script_can_switch_hang_detection_off(make_cycle: Any, caplog: pytest.LogCaptureFixture) -> None:
    """enable_ft_package=False in the script's config is obeyed and said; a yes by option comes before it."""
    off = FaultToleranceConfig(enable_ft_package=False, rank_section_timeouts={"step": 1.0})
    cycle = make_cycle()
    attach(cycle, off)
    assert cycle.watchdog is None
    assert cycle.describe_hang_detection() == "no (enable_ft_package is false, script's config)"
    cycle = make_cycle(options={"enable_ft_package": True})
    attach(cycle, off)
    assert enforced(cycle).sections == {"step": 1.0}


def test_ranks_that_differ_and_settings_without_effect_are_named(
    make_cycle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The first rank's settings hold and another's are said to differ, once; what comes too late for the agents is said
    with where to give it."""
    cycle = make_cycle()
    settings = {"node_heartbeat_timeout": 2.0, "gpu_memory_reclaim_timeout": 3.0}
    attach(cycle, FaultToleranceConfig(rank_heartbeat_timeout=7.0, **settings))
    attach(cycle, FaultToleranceConfig(rank_heartbeat_timeout=8.0), local_rank=1)
    attach(cycle, FaultToleranceConfig(rank_heartbeat_timeout=9.0), local_rank=1)
    assert enforced(cycle).heartbeat_s == 7.0
    assert caplog.text.count("local rank 1 differ from another rank's") == 1
    for name in settings:
        assert f"{name} of the script's config has no effect" in caplog.text
        assert f"--ft-{name.replace('_', '-')}" in caplog.text


def test_a_script_that_contradicts_an_option_keeps_the_options(
    make_cycle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A script's value that cannot stand beside an option's is not used, and the line says which and why."""
    cycle = make_cycle(options={"initial_rank_heartbeat_timeout": 100.0})
    attach(cycle, FaultToleranceConfig(rank_heartbeat_timeout=300.0))
    assert "of the script's config are not used" in caplog.text
    assert enforced(cycle).initial_heartbeat_s == 100.0


def test_calculated_timeouts_that_cannot_be_read_name_their_rank(
    make_cycle: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says which rank wrote them, whichever rank's config is in force."""
    cycle = make_cycle()
    attach(cycle, FaultToleranceConfig(rank_heartbeat_timeout=7.0))
    monkeypatch.setattr(cycle.board, "timeouts", ["", "{"].__getitem__)
    cycle.apply_calculated_timeouts()
    assert "the timeouts that local rank 1 calculated are not enforced" in caplog.text
    assert enforced(cycle).heartbeat_s == 7.0


def test_learned_timeouts_take_the_place_of_defaults(
    make_cycle: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """With calc_ft_timeouts in the script's config, what ft_state.json holds of sections and of heartbeats is enforced,
    and said to be learned; one that learned sections alone leaves heartbeats as they are. Half of a default is the
    least."""
    caplog.set_level(logging.DEBUG)
    learns = FaultToleranceConfig(calc_ft_timeouts=True)
    learned = LearnedTimeouts.load(tmp_path)
    learned._state = msgspec.structs.replace(learned._state, learned=Learned(sections={"step": 12.0}))
    learned.save()
    cycle = make_cycle()
    attach(cycle, learns)
    assert enforced(cycle).sections == {"step": 12.0}
    assert enforced(cycle).heartbeat_s == 1800.0
    learned._state = msgspec.structs.replace(
        learned._state, learned=Learned(heartbeat_s=30.0, initial_heartbeat_s=1200.0)
    )
    learned.save()
    cycle = make_cycle()
    attach(cycle, learns)
    assert (enforced(cycle).initial_heartbeat_s, enforced(cycle).heartbeat_s) == (1200.0, 900.0)
    assert "heartbeats: first 1200.0 s (learned), later 900.0 s (learned)" in caplog.text


# -- the file of outlast run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["--config", "--health-config", "--ft-cfg-path", "--ft_cfg_path"])
def test_the_file_has_all_its_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's file may be given under our names and that of ft_launcher; its fault tolerance comes after options,
    its health limits and run directory count too. It needs no [checkpoint], which is the script's."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("run.toml").write_text(
        'run_dir = "there"\n[fault_tolerance]\nenable_ft_package = true\nmax_node_faults = 7\nmin_nodes = 1\n'
        "[health]\nmin_open_files = 12\n"
    )
    options = parse_options([name, "run.toml", "--ft-min-nodes=none", "train.py"])
    assert (options.fault_tolerance.max_node_faults, options.fault_tolerance.min_nodes) == (7, None)
    assert options.layers.source("max_node_faults") == "run.toml"
    assert options.health is not None
    assert options.health.min_open_files == 12
    assert options.run_dir == tmp_path / "there"
    with pytest.raises(ConfigError, match=r"--no-health-check and \[health\] of run.toml contradict"):
        parse_options([name, "run.toml", "--no-health-check", "train.py"])
