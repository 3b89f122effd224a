"""Settings of `outlast run` from options, file and script: their precedence, the hang detection they enable, and the
log line on what is in force."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_agent import SimulatedAgent, simulated_cycle

from outlast import clock
from outlast.config import FaultToleranceConfig
from outlast.config.sources import LayeredSettings
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.control_link import LinkUp
from outlast.launch.cycle import Cycle
from outlast.launch.job_settings import JobSettings
from outlast.launch.node_agent import AgentState
from outlast.launch.options import parse_options
from outlast.monitor.learned_timeouts import LearnedTimeouts
from outlast.monitor.rank_monitor import PlacedRankMonitor
from outlast.policy.deadlines import Learned, Timeouts
from outlast.runtime.fork_server import Exited
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
def test_hang_is_detected_by_the_scripts_timeouts(tmp_path: Path) -> None:
    """The timeouts of the script's config are enforced, options and file take precedence, one line has the source of
    each value, and timeouts learned from a cycle are in force in the next one."""
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
def test_short_plain_script_gets_no_hang_warning(tmp_path: Path) -> None:
    """A script without a session that exits normally within a minute, such as one that prints its help, gets no
    warning about missing hang detection."""
    (tmp_path / "train.py").write_text("print('trains')")
    with Cluster(tmp_path / "train.py", run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2) as cluster:
        assert cluster.wait(timeout_s=300) == [0]
        output = cluster.agent(0).output()
    assert "hang no" not in output


# -- in process: a cycle and the ranks in its heartbeat memory -----------------------------------------------------


@pytest.fixture
def make_cycle(tmp_path: Path) -> Any:
    """Return a function that creates a cycle of two ranks with hang detection, from given options and file."""
    cycles = []

    def make(number: int = 0, **layers: Any) -> Cycle:
        cycle = simulated_cycle(tmp_path, number, **layers)
        cycle.watch(lambda _: None)
        cycles.append(cycle)
        return cycle

    yield make
    for cycle in cycles:
        cycle.close()


def connect(cycle: Cycle, config: FaultToleranceConfig | None = None, local_rank: int = 0) -> None:
    """Connect a rank and disconnect it, as far as the heartbeat memory and the agent's channel show."""
    place = WorkerEnv(local_rank=local_rank, board=cycle.board.path, config_file="")
    PlacedRankMonitor(place, config).close()


def connect_and_apply(cycle: Cycle, config: FaultToleranceConfig | None = None, local_rank: int = 0) -> None:
    """Connect a rank, disconnect it, and apply its settings in the agent."""
    connect(cycle, config, local_rank)
    cycle.apply_script_settings()


@pytest.fixture
def make_agent(tmp_path: Path) -> Any:
    """Return a function that creates an agent that runs a cycle."""
    agents = []

    def make(cycle: Cycle) -> SimulatedAgent:
        agents.append(SimulatedAgent(tmp_path))
        agents[-1].run(cycle)
        return agents[-1]

    yield make
    for one in agents:
        one.close()


def settings_sent(simulated: SimulatedAgent) -> list[str]:
    """Return the script settings that were sent to the coordinator."""
    return [one.fault_tolerance for one in simulated.sent_of(m.ScriptSettings)]


def test_plain_script_gets_one_hang_warning(
    make_cycle: Any, make_agent: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers without a heartbeat for a minute get one WARNING with the cause and the remedy; workers that have
    connected by then, or have exited, get none."""
    attached, ended, plain = make_cycle(), make_cycle(), make_cycle()
    for worker in ended.workers.values():
        worker.exit_code = 0
    for cycle, expected in ((ended, 0), (attached, 0), (plain, 1)):
        simulated, started_s = make_agent(cycle), clock.now_s()
        if cycle is attached:
            connect_and_apply(cycle)
        for after_s in (10.0, 61.0, 122.0):
            with monkeypatch.context() as patch:
                patch.setattr(clock, "now_s", lambda at_s=started_s + after_s: at_s)
                simulated.receive(m.Remark(text="a minute later"))
            warnings = [one for one in caplog.records if "hang no" in one.message]
            assert len(warnings) == (expected if after_s > 60 else 0)
            assert all(one.levelname == "WARNING" for one in warnings)
    for text in ("outlast.init()", "RankMonitor()"):
        assert text in caplog.text
    assert "enable_ft_package is false" not in caplog.text


def test_settings_of_a_worker_apply_as_another_exits(make_cycle: Any, make_agent: Any) -> None:
    """The settings of a worker are in force even if its message arrives while the agent handles the exit of another
    worker."""
    simulated = make_agent(cycle := make_cycle())
    simulated.fork_server.before_receive = lambda: connect(cycle, FaultToleranceConfig(rank_heartbeat_timeout=7.0))
    simulated.report(Exited(key=1, pid=1, exit_code=0, mono_ns=0))
    assert enforced(cycle).heartbeat_s == 7.0
    assert settings_sent(simulated) == ['{"rank_heartbeat_timeout": 7.0}']


def test_stopped_agent_deregisters_once(make_cycle: Any, make_agent: Any) -> None:
    """An agent sends one `Bye` when it receives the end of the job, before it ends its workers: the host does not
    wait for them."""
    simulated = make_agent(make_cycle())
    for _ in range(2):
        simulated.receive(m.Stop(exit_code=0, reason="over"))
    assert simulated.sent_of(m.Bye) == [m.Bye()]
    assert simulated.state == AgentState.STOPPING


def test_cleared_script_settings_are_sent(make_cycle: Any, make_agent: Any) -> None:
    """The coordinator receives the settings of each script once, including the absence of settings; a new
    coordinator receives the last ones."""
    simulated = make_agent(first := make_cycle())
    connect(first, FaultToleranceConfig(max_node_faults=7))
    simulated.handle_next()
    connect(first, local_rank=1)
    simulated.handle_next()
    for number in (1, 2):
        simulated.run(cycle := make_cycle(number))
        connect(cycle)
        simulated.handle_next()
    assert settings_sent(simulated) == ['{"max_node_faults": 7}', ""]
    simulated.receive(LinkUp(job="job", is_host=False, is_first=False))
    assert settings_sent(simulated)[2:] == [""]


def test_cleared_script_settings_restore_the_launchers() -> None:
    """The coordinator uses the newest script's settings: a script that sets nothing restores those of options and
    file."""
    layers, settings = LayeredSettings(options={"max_no_progress_cycles": 5}), JobSettings(job="job", num_slots=4)
    limits = []
    for script in (FaultToleranceConfig(max_node_faults=7, min_nodes=2, max_restart_delay=9.0).to_json(), "{}"):
        layers = layers.with_script(script)
        settings = settings.changed_by(layers.config)
        given = settings.limits.max_node_faults, settings.min_nodes, settings.limits.max_restart_delay_s
        limits.append((*given, settings.limits.max_no_progress_cycles))
    assert limits == [(7, 2, 9.0, 5), (3, None, 60.0, 5)]
    too_many = FaultToleranceConfig(min_nodes=5, max_node_faults=7)
    assert settings.changed_by(too_many).min_nodes is None


def write_learned(folder: Path, learned: Learned) -> None:
    """Write the file of learned timeouts."""
    (file := LearnedTimeouts.load(folder)).save()
    state = json.loads(file.path.read_text()) | {"learned": msgspec.to_builtins(learned)}
    file.path.write_text(json.dumps(state))


def enforced(cycle: Cycle) -> Timeouts:
    assert cycle.watchdog is not None
    return cycle.watchdog.timeouts


def test_default_timeouts_apply_to_sessions(make_cycle: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without any setting the default heartbeat timeouts are in force and logged in one line."""
    caplog.set_level(logging.DEBUG)
    cycle = make_cycle()
    connect_and_apply(cycle)
    connect_and_apply(cycle, local_rank=1)
    (line,) = [record.getMessage() for record in caplog.records if "watches 2 ranks: section" in record.getMessage()]
    assert "heartbeats: first 1800.0 s (default), later 1800.0 s (default)" in line
    assert enforced(cycle) == Timeouts.from_config(cycle.layers.config, with_defaults=True)
    assert len(enforced(cycle).defaults) == 2


def test_script_can_disable_hang_detection(make_cycle: Any, caplog: pytest.LogCaptureFixture) -> None:
    """enable_ft_package=False in the script's config disables hang detection with a logged reason; an option takes
    precedence."""
    off = FaultToleranceConfig(enable_ft_package=False, rank_section_timeouts={"step": 1.0})
    cycle = make_cycle()
    connect_and_apply(cycle, off)
    assert cycle.watchdog is None
    assert cycle.describe_hang_detection() == "no (enable_ft_package is false, script's config)"
    cycle = make_cycle(options={"enable_ft_package": True})
    connect_and_apply(cycle, off)
    assert enforced(cycle).sections == {"step": 1.0}


def test_differing_or_ineffective_settings_are_reported(make_cycle: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The first rank's settings are in force and a difference of another rank is logged once; a setting that comes
    too late for the agents is logged with the option to use instead."""
    cycle = make_cycle()
    settings = {"node_heartbeat_timeout": 2.0, "gpu_memory_reclaim_timeout": 3.0}
    connect_and_apply(cycle, FaultToleranceConfig(rank_heartbeat_timeout=7.0, **settings))
    connect_and_apply(cycle, FaultToleranceConfig(rank_heartbeat_timeout=8.0), local_rank=1)
    connect_and_apply(cycle, FaultToleranceConfig(rank_heartbeat_timeout=9.0), local_rank=1)
    assert enforced(cycle).heartbeat_s == 7.0
    assert caplog.text.count("local rank 1 differ from another rank's") == 1
    for name in settings:
        assert f"{name} of the script's config has no effect" in caplog.text
        assert f"--ft-{name.replace('_', '-')}" in caplog.text


def test_option_wins_over_a_contradicting_script(make_cycle: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A script's value that contradicts an option is not used, and the line has both and the reason."""
    cycle = make_cycle(options={"initial_rank_heartbeat_timeout": 100.0})
    connect_and_apply(cycle, FaultToleranceConfig(rank_heartbeat_timeout=300.0))
    assert "of the script's config are not used" in caplog.text
    assert enforced(cycle).initial_heartbeat_s == 100.0


def test_unreadable_calculated_timeouts_are_reported(
    make_cycle: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line identifies the rank that wrote them, whichever rank's config is in force."""
    cycle = make_cycle()
    connect_and_apply(cycle, FaultToleranceConfig(rank_heartbeat_timeout=7.0))
    monkeypatch.setattr(cycle.board, "timeouts", ["", "{"].__getitem__)
    cycle.apply_calculated_timeouts()
    assert "the timeouts that local rank 1 calculated are not enforced" in caplog.text
    assert enforced(cycle).heartbeat_s == 7.0


def test_learned_timeouts_replace_defaults(make_cycle: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """With calc_ft_timeouts in the script's config, the section and heartbeat timeouts in ft_state.json are enforced
    and logged as learned; learned sections alone leave heartbeats unchanged. Half of a default is the minimum."""
    caplog.set_level(logging.DEBUG)
    learns = FaultToleranceConfig(calc_ft_timeouts=True)
    write_learned(tmp_path, Learned(sections={"step": 12.0}))
    cycle = make_cycle()
    connect_and_apply(cycle, learns)
    assert enforced(cycle).sections == {"step": 12.0}
    assert enforced(cycle).heartbeat_s == 1800.0
    write_learned(tmp_path, Learned(heartbeat_s=30.0, initial_heartbeat_s=1200.0))
    cycle = make_cycle()
    connect_and_apply(cycle, learns)
    assert (enforced(cycle).initial_heartbeat_s, enforced(cycle).heartbeat_s) == (1200.0, 900.0)
    assert "heartbeats: first 1200.0 s (learned), later 900.0 s (learned)" in caplog.text


# -- the config file of outlast run --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["--config", "--health-config", "--ft-cfg-path", "--ft_cfg_path"])
def test_config_file_option_has_aliases(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's file may be given under the names of outlast and of ft_launcher; its fault tolerance settings come
    after options, its health limits and run directory apply. It needs no [checkpoint], which belongs to the script."""
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
