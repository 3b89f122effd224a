"""NVRx's fault tolerance client over the engine: Megatron's calls, a hang, learned timeouts."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outlast
from outlast.config import Config, FaultToleranceConfig
from outlast.errors import ConfigError
from outlast.integrations.nvrx.fault_tolerance import (
    NvrxFaultToleranceConfig,
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from outlast.integrations.nvrx.nested import dict_list_map_inplace, dict_list_map_outplace
from outlast.monitor import RankMonitor
from outlast.monitor.rank_monitor import PlacedRankMonitor, open_monitor
from outlast.policy.deadlines import FLOOR_S

LOOP = Path(__file__).with_name("nvrx_megatron_loop.py")
OPTIONS = [
    "--ft-rank_section_timeouts=setup:600,step:180,checkpointing:420",
    "--ft-rank_out_of_section_timeout=300",
]
OUTLAST = ["outlast", "run", "--nproc-per-node=2"]
SHIM = ["-m", "outlast.integrations.nvrx"]


def launch(launcher: list[str], *arguments: str, folder: Path) -> tuple[int, str]:
    """Run a launcher in a folder; return its exit code and output."""
    with subprocess.Popen(
        [sys.executable, "-m", *launcher, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its workers
            output, _ = process.communicate(timeout=300)
            raise AssertionError(f"the launcher did not end: {output}") from None
    return process.returncode, output


def digest(output: str) -> str:
    """Return the digest of the weights at the end of a run."""
    found = re.search(r"trained \d+ to 20 (\w{64})", output)
    assert found, output
    return found[1]


def calculated(folder: Path) -> dict[str, float]:
    """Return the calculated timeouts of a run, by section."""
    state = json.loads((folder / "ckpt" / "ft_state.json").read_text())["current_timeouts"]["section"]
    return {name: state["section"][name] for name in state["calculated_sections"]}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_learned_timeouts_detect_a_hang(tmp_path: Path) -> None:
    """Learned timeouts are written, and detect a hanging rank in the next run, which ends with the weights of an
    undisturbed run."""
    code, output = launch(OUTLAST, "--run-dir=run", *OPTIONS, *SHIM, str(LOOP), "ckpt", "20", "none", folder=tmp_path)
    assert code == 0, output
    undisturbed = digest(output)
    assert '{"setup": 600.0, "step": 180.0, "checkpointing": 420.0}' in output
    learned = calculated(tmp_path)
    assert set(learned) == {"step", "checkpointing"}
    assert FLOOR_S <= learned["step"] < 180  # the longest step took half a second
    (tmp_path / "ckpt" / "weights.pt").unlink()

    code, output = launch(OUTLAST, "--run-dir=again", *SHIM, str(LOOP), "ckpt", "20", "stop", folder=tmp_path)
    assert code == 0, output
    assert f"section 'step' exceeded {learned['step']:.1f} s" in output
    assert "rank 1 on node" in output
    assert re.search(r"trained 15 to 20", output), "it did not go on from its checkpoint"
    assert digest(output) == undisturbed
    assert set(calculated(tmp_path)) == {"setup", "step", "checkpointing"}, "a load was seen, so setup is learned"


@pytest.mark.campaign
@pytest.mark.process
def test_learned_timeouts_are_enforced_under_torchrun(tmp_path: Path) -> None:
    """Under stock torchrun, loaded timeouts are enforced without any configuration."""
    (tmp_path / "ckpt").mkdir()
    section = {"section": {"step": 10.5}, "calculated_sections": ["step"]}
    (tmp_path / "ckpt" / "ft_state.json").write_text(json.dumps({"current_timeouts": {"section": section}}))
    launcher = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--monitor-interval=0.1",
    ]
    code, output = launch(launcher, *SHIM, str(LOOP), "ckpt", "20", "stop", folder=tmp_path)
    assert code == 0, output
    assert "section 'step' exceeded 10.5 s" in output
    assert re.search(r"trained 15 to 20", output)


LATE = """
import os, sys, time
import outlast
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
from outlast.config import Config, FaultToleranceConfig

client = RankMonitorClient()
client.init_workload_monitoring(num_warmup_iters=0)
client.start_section("setup")
time.sleep(2.0)  # the agent takes the client's settings first
config = Config(fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"late": 0.7}))
with outlast.init(config) as run:
    client.end_section("setup")
    if os.environ["OUTLAST_CYCLE"] == "0":
        client.start_section("late")
        time.sleep(3600)
    if run.global_rank == 1:
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "a test"))
        raise RuntimeError("as it announced")
    time.sleep(3600)
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_session_shares_the_clients_monitor_and_request_ends(tmp_path: Path) -> None:
    """A later session shares the client's monitor and enforces its config; a shutdown request ends the job with 93
    at the next failure."""
    script = tmp_path / "train.py"
    script.write_text(LATE)
    code, output = launch(OUTLAST, "--max-restarts=5", *SHIM, str(script), folder=tmp_path)
    assert "section 'late' exceeded 0.7 s" in output
    assert "differ from another rank's" not in output
    assert code == 93, output
    assert "the script requests: ShutdownWorkload (a test)" in output
    assert "2 cycles" in output


@pytest.mark.campaign
@pytest.mark.process
def test_node_is_excluded_on_request(tmp_path: Path) -> None:
    """After a request to exclude the node, a failure counts as the node's, and the run continues."""
    code, output = launch(OUTLAST, *OPTIONS, *SHIM, str(LOOP), "ckpt", "20", "exclude", folder=tmp_path)
    assert code == 0, output
    assert "the script requests: ExcludeThisNode (a test)" in output
    assert "no spare waits for its slot" in output
    assert re.search(r"trained 15 to 20", output)


# -- in this process, without a launcher -------------------------------------------------------------------------------


@pytest.fixture
def client() -> Iterator[RankMonitorClient]:
    """Return a client that is shut down after the test."""
    new_client = RankMonitorClient()
    yield new_client
    new_client.shutdown_workload_monitoring()
    assert open_monitor() is None


def test_client_calls_out_of_order_raise(client: RankMonitorClient) -> None:
    """Calls before init, sections that are open twice or not open, and too few measurements are errors."""
    for call in (client.send_heartbeat, client.end_all_sections, client.calculate_and_set_hb_timeouts):
        with pytest.raises(RankMonitorClientError, match="not initialised"):
            call()
    client.shutdown_workload_monitoring()  # harmless
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="called before"):
        client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="'step' is not open"):
        client.end_section("step")
    client.start_section("step")
    with pytest.raises(RankMonitorClientError, match="'step' is open already"):
        client.start_section("step")
    client.start_section("checkpointing")
    client.end_section("step")  # the sections overlap
    client.end_all_sections()
    with pytest.raises(RankMonitorClientError, match="no rank has closed two heartbeats"):
        client.calculate_and_set_hb_timeouts()
    assert client.calculate_and_set_hb_timeouts(skip_if_not_ready=True) is False
    with pytest.raises(RankMonitorClientError, match="no rank has closed setup"):
        client.calculate_and_set_section_timeouts(["setup", "step"])
    with pytest.raises(RankMonitorClientError, match="use outlast run"):
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode))


def test_timeouts_are_calculated_merged_and_restored(client: RankMonitorClient) -> None:
    """Calculated timeouts are the longest time times the safety factor, averaged with the last ones, and survive a
    round trip through ``state_dict()``."""
    client.init_workload_monitoring()
    assert client.section_timeouts is not None
    assert client.section_timeouts.section == {}
    client.load_state_dict(
        {"current_timeouts": {"section": {"section": {"step": 90.0}, "calculated_sections": ["step"]}}}
    )
    for _ in range(3):
        client.send_heartbeat()
        client.start_section("step")
        client.end_section("step")
    assert client.calculate_and_set_section_timeouts(["step"]) is True
    # A busy machine may take more than the 2 s that correspond to the minimum of 10 s.
    assert 50.0 <= client.section_timeouts.section["step"] < 90.0, "the mean of 90 and 10, or a little more"
    assert client.section_timeouts.out_of_section is not None
    assert FLOOR_S <= client.section_timeouts.out_of_section < 90.0
    assert client.section_timeouts.are_valid
    assert client.section_timeouts.were_calculated
    assert client.calculate_and_set_hb_timeouts() is True
    assert client.hb_timeouts is not None
    assert client.hb_timeouts.initial is not None
    assert client.hb_timeouts.subsequent is not None
    assert min(client.hb_timeouts.initial, client.hb_timeouts.subsequent) >= FLOOR_S
    state = json.loads(json.dumps(client.state_dict()))
    client.shutdown_workload_monitoring()
    assert state["current_timeouts"]["section"]["calculated_sections"] == ["step"]
    other = RankMonitorClient()
    other.load_state_dict(state)
    other.init_workload_monitoring(num_warmup_iters=0)
    try:
        assert other.section_timeouts == client.section_timeouts
        assert other.hb_timeouts == client.hb_timeouts
        assert other.state_dict() == client.state_dict()
    finally:
        other.shutdown_workload_monitoring()


def test_outlast_state_is_loaded_and_unknown_state_rejected(client: RankMonitorClient) -> None:
    """An ``ft_state.json`` of outlast can be loaded; other content is rejected with the remedy."""
    outlast_form = {"learned": {"sections": {"step": 7.0}, "heartbeat_s": 8.0, "initial_heartbeat_s": 9.0}}
    empty: dict[str, dict[str, float]] = {"before": {}, "seen": {}}
    client.load_state_dict({"version": 1, "cycle": "a-0", **outlast_form, **empty})
    client.init_workload_monitoring()
    assert client.section_timeouts is not None
    assert client.section_timeouts.section == {"step": 7.0}
    assert client.hb_timeouts is not None
    assert client.hb_timeouts.subsequent == 8.0
    with pytest.raises(ConfigError, match=r"remove ft_state.json"):
        client.load_state_dict({"anything": 1})


def test_client_and_session_share_a_monitor(tmp_path: Path) -> None:
    """Client and session share a monitor, created in either order; after the session the client has its own."""
    client = RankMonitorClient()
    client.init_workload_monitoring()
    own = open_monitor()
    client.start_section("setup")
    config = Config(fault_tolerance=FaultToleranceConfig(safety_factor=3.0))
    with outlast.init(config):
        shared = open_monitor()
        assert isinstance(shared, PlacedRankMonitor)
        assert shared is not own
        assert [section.name for section in shared.board_state.sections] == ["setup"]
        client.shutdown_workload_monitoring()
        assert shared is open_monitor()
        assert shared.board_state.depth == 0
        client = RankMonitorClient()
        client.init_workload_monitoring()
        assert shared is open_monitor()
        assert client.cfg is not None
        assert client.cfg.safety_factor == 3.0
        client.start_section("step")
        with pytest.raises(outlast.OutlastError, match="has a RankMonitor already"):
            RankMonitor()  # a second monitor of another caller is still rejected
    client.end_section("step")
    assert open_monitor() not in (None, own, shared)
    client.shutdown_workload_monitoring()
    assert open_monitor() is None


def test_config_has_nvrx_fields_and_yaml(tmp_path: Path) -> None:
    """The config class has the extension's fields and defaults, and reads its YAML."""
    path = tmp_path / "settings"
    path.write_text(
        "model:\n  fault_tolerance:\n    rank_heartbeat_timeout: 60\n    rank_termination_signal: sigterm\n    x: 1\n"
        "    gpu_memory_reclaim_timeout: 20\n    gpu_memory_poll_interval: 2\n    num_warmup_iterations: 3\n"
    )
    config = NvrxFaultToleranceConfig.from_yaml_file(str(path))
    assert (config.rank_heartbeat_timeout, config.initial_rank_heartbeat_timeout) == (60, None)
    outlast_form = config.to_outlast()
    assert (outlast_form.rank_termination_signal, outlast_form.num_warmup_iterations) == ("SIGTERM", 3)
    assert NvrxFaultToleranceConfig().to_outlast().num_warmup_iterations == 5
    assert {name: value for name, value in outlast_form.given.items() if name.startswith(("gpu_memory", "max_no"))} == {
        "gpu_memory_reclaim_timeout": 20  # the launcher sets values equal to the extension's defaults
    }
    with pytest.raises(ConfigError, match="not used here: x"):
        NvrxFaultToleranceConfig.from_yaml_file(str(path), ignore_not_recognized=False)
    path.write_text("model: {}\n")
    with pytest.raises(ConfigError, match="there is no section 'fault_tolerance'"):
        NvrxFaultToleranceConfig.from_yaml_file(str(path))


@pytest.mark.parametrize(
    ("setting", "value", "replacement"),
    [
        ("pci_topo_file", "/topology", r"health\.network_interfaces"),
        ("enable_nic_monitor", True, r"health\.network_interfaces"),
        ("enable_nic_healthcheck", False, r"health\.before_joining=false"),
        ("storage_healthcheck_path", "/data", r"health\.commands"),
        ("segment", 4, "not chosen by NVLink domain"),
        ("numa_bind_strict", False, "--numa-binding"),
        ("checkpoint_iteration_file", "latest.txt", r"monitor\.set_durable_iteration"),
        ("cycle_info_dir", "/info", "outlast status RUN_DIR --json"),
        ("max_no_progress_cycles", 0, "must be at least 1"),
        ("rank_heartbeat_timeout", 0, "must be above 0"),
        ("rank_heartbeat_timeout", "soon", "'soon' does not fit"),
        ("rank_section_timeouts", [180], "does not fit; write name:seconds"),
        ("log_level", None, "is not a level"),
        ("rank_termination_signal", -999, "is not a signal"),
    ],
)
def test_unsupported_settings_are_rejected_with_a_replacement(setting: str, value: object, replacement: str) -> None:
    """The error contains the setting with its value, and the replacement."""
    with pytest.raises(ConfigError, match=rf"{setting}.*{replacement}"):
        NvrxFaultToleranceConfig(**{setting: value})  # type: ignore[arg-type]


def test_nvrx_values_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """Values that only the extension accepts are accepted, and settings without effect are logged."""
    assert NvrxFaultToleranceConfig(rank_heartbeat_timeout=5400).to_outlast().rank_heartbeat_timeout == 5400
    assert NvrxFaultToleranceConfig(rank_section_timeouts=None).to_outlast().rank_section_timeouts == {}  # type: ignore[arg-type]
    assert caplog.text == ""
    config = NvrxFaultToleranceConfig(initial_rank_heartbeat_timeout=60, rank_heartbeat_timeout=5400)
    assert (config.initial_rank_heartbeat_timeout, config.to_outlast().initial_rank_heartbeat_timeout) == (60, 5400)
    assert "initial_rank_heartbeat_timeout=60 is below rank_heartbeat_timeout=5400" in caplog.text
    NvrxFaultToleranceConfig(workload_check_interval=1.0)
    assert "without effect here: workload_check_interval (a hang is detected when its timeout passes)" in caplog.text


def test_config_survives_a_yaml_round_trip(tmp_path: Path) -> None:
    """Settings survive a round trip through YAML; options take precedence over a file."""
    config = NvrxFaultToleranceConfig(rank_section_timeouts={"setup": 600.0, "step": None})
    config.rank_termination_signal = "sigusr2"  # type: ignore[assignment]
    config.log_level = "DBG"  # type: ignore[assignment]
    path = tmp_path / "ft"
    config.to_yaml_file(str(path))
    reloaded = NvrxFaultToleranceConfig.from_yaml_file(str(path), ignore_not_recognized=False)
    assert reloaded == config
    assert (reloaded.rank_termination_signal, reloaded.log_level) == (signal.SIGUSR2, logging.DEBUG)
    options = argparse.Namespace(
        ft_cfg_path=str(path), ft_safety_factor="3.5", ft_rank_section_timeouts="step:180,setup:", ft_log_level=None
    )
    read = NvrxFaultToleranceConfig.from_args(options)
    assert (read.safety_factor, read.rank_section_timeouts) == (3.5, {"step": 180.0, "setup": None})
    assert read.rank_termination_signal == signal.SIGUSR2
    config.rank_heartbeat_timeout = -1.0
    with pytest.raises(ConfigError, match=r"rank_heartbeat_timeout=-1\.0 must be above 0"):
        config.to_yaml_file(str(path))
    with pytest.raises(ConfigError, match="cannot be written"):
        reloaded.to_yaml_file(str(tmp_path / "none" / "ft"))


def test_nested_values_are_mapped_in_place() -> None:
    """``dict_list_map_inplace()`` keeps the containers and replaces their contents."""
    inner = [1, {"b": 2}]
    outer = {"a": inner}
    assert dict_list_map_inplace(lambda x: x + 1, outer) is outer
    assert outer == {"a": [2, {"b": 3}]}
    assert outer["a"] is inner
    assert dict_list_map_outplace(str, outer) == {"a": ["2", {"b": "3"}]}
    assert outer == {"a": [2, {"b": 3}]}


LONG_STEPS = """
import os, time
from outlast.integrations.nvrx.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring(num_warmup_iters=0)
client.load_state_dict({client.CURRENT_TIMEOUTS_STATE_KEY: {"section": {
    "section": {"step": 3.0}, "calculated_sections": ["step"]}}})
with open("cycles", "a") as cycles:
    cycles.write("x")
client.start_section("step")
if len(open("cycles").read()) < 3:
    time.sleep(3600)  # a long step, which nothing tells from a hang
client.end_section("step")
client.shutdown_workload_monitoring()
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(400)
def test_calculated_timeout_is_doubled_and_then_dropped(tmp_path: Path) -> None:
    """A calculated timeout is doubled after an unexplained hang, and dropped after the second one."""
    (tmp_path / "train.py").write_text(LONG_STEPS)
    arguments = ["--nproc-per-node=1", "--max-restarts=2", "--run-dir=run", "train.py"]
    code, output = launch(["outlast", "run"], *arguments, folder=tmp_path)
    assert code == 0, output
    assert "section 'step' exceeded 10.0 s" in output
    assert "the calculated timeout of section step was exceeded, and nothing shows a hang: it is doubled" in output
    assert "section 'step' exceeded 20.0 s" in output
    assert "nothing shows a hang: it is not used any more" in output
