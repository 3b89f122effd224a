"""The code of Megatron-Bridge's and KempnerForge's resiliency guides runs with changed imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast import Config
from outlast.config.sources import load_config
from outlast.integrations.ft_launcher import write_shims
from outlast.integrations.megatron import ConfigContainer, outlast_config

pytestmark = pytest.mark.extended

FAULT_TOLERANCE = """
from outlast.integrations.megatron import FaultToleranceConfig

cfg.ft = FaultToleranceConfig(
    enable_ft_package=True,
    calc_ft_timeouts=True,
    simulate_fault=False,
    simulated_fault_type="random",
)
"""
STRAGGLERS = """
from outlast.integrations.megatron import NVRxStragglerDetectionConfig

cfg.nvrx_straggler = NVRxStragglerDetectionConfig(
    enabled=True,
    report_time_interval=300.0,
    calc_relative_gpu_perf=True,
    calc_individual_gpu_perf=True,
    num_gpu_perf_scores_to_print=5,
    gpu_relative_perf_threshold=0.7,
    gpu_individual_perf_threshold=0.7,
    stop_if_detected=False,
    enable_logging=True,
)
"""
PREEMPTION = """
import signal
cfg.train.exit_signal_handler = True
cfg.train.exit_signal = signal.SIGTERM
cfg.train.exit_signal_handler_for_dataloader = False
"""
RERUN = """
from outlast.integrations.megatron import RerunStateMachineConfig

cfg.rerun_state_machine = RerunStateMachineConfig(
    rerun_mode="validate_results",
    check_for_nan_in_loss=True,
    check_for_spiky_loss=False,
    spiky_loss_factor=10.0,
)
"""
RESTART = """
from outlast.integrations.megatron import InProcessRestartConfig

cfg.inprocess_restart = InProcessRestartConfig(
    enabled=True,
    granularity="node",
    soft_timeout=60.0,
    hard_timeout=90.0,
)
"""
ASYNC_SAVE = """
cfg.checkpoint.async_save = True
cfg.checkpoint.ckpt_format = "torch_dist"
"""
LOCAL = """
cfg.checkpoint.non_persistent_local_ckpt_dir = "/local/scratch/ckpt"
cfg.checkpoint.non_persistent_local_ckpt_algo = "fully_parallel"
"""
EFFECTS: dict[str, tuple[str, dict[str, Any]]] = {
    FAULT_TOLERANCE: ("fault_tolerance", {"enable_ft_package": True, "calc_ft_timeouts": True}),
    STRAGGLERS: ("straggler_detection", {"enabled": True, "stop_if_detected": False}),
    PREEMPTION: ("preemption", {"exit_signal_handler": True, "exit_signal": "SIGTERM"}),
    RERUN: ("rerun_state_machine", {"rerun_mode": "validate_results", "check_for_nan_in_loss": True}),
    RESTART: ("in_process_restart", {"enabled": True, "soft_timeout": 60.0, "hard_timeout": 90.0}),
    ASYNC_SAVE: ("checkpoint", {"async_save": True, "ckpt_format": "torch_dist"}),
    LOCAL: ("checkpoint", {"local_directory": "/local/scratch/ckpt", "async_save": False}),
}
"""Lines to the section of a session's settings that they are in, and some of its values."""


def configured(*snippets: str) -> Config:
    """Return a session's settings after the guide's code has run on a new container."""
    cfg = ConfigContainer()
    cfg.checkpoint.save = "/ckpt"
    for snippet in snippets:
        exec(snippet, {"cfg": cfg})
    return outlast_config(cfg)


@pytest.mark.parametrize(
    "snippet", EFFECTS, ids=["ft", "straggler", "preemption", "rerun", "restart", "async", "local"]
)
def test_guide_blocks_set_the_session_settings(snippet: str) -> None:
    """Each of the guide's blocks runs unchanged, and its values are those of the session."""
    section, values = EFFECTS[snippet]
    found = getattr(configured(snippet), section)
    assert {name: getattr(found, name) for name in values} == values


def test_guide_blocks_can_be_combined() -> None:
    """All blocks together are not a contradiction; without its block a section is off, or has Bridge's default."""
    config = configured(*EFFECTS)
    assert config.in_process
    assert config.checkpoint is not None
    assert (config.checkpoint.async_save, config.checkpoint.local_directory) == (True, "/local/scratch/ckpt")
    defaults = configured()
    assert (defaults.fault_tolerance, defaults.straggler_detection, defaults.in_process) == (None, None, False)
    assert defaults.rerun_state_machine is not None
    assert defaults.rerun_state_machine.rerun_mode == "disabled"


TRAIN = f"""
import os, sys
import torch
import outlast
from outlast.integrations.megatron import ConfigContainer, outlast_config

cfg = ConfigContainer()
cfg.train.train_iters = 12
cfg.checkpoint.save = sys.argv[1]
cfg.checkpoint.save_interval = 4
{FAULT_TOLERANCE}
{PREEMPTION}
{RERUN}
{ASYNC_SAVE}
cfg.rerun_state_machine.rerun_mode = sys.argv[2]
run = outlast.init(outlast_config(cfg))
model = torch.nn.Linear(2, 2)
optim = torch.optim.SGD(model.parameters(), 0.1)
for iteration in run.steps({{"model": model, "optim": optim}}, total=cfg.train.train_iters):
    for attempt in run.attempts():
        loss = model(torch.ones(2)).sum()
        is_bad = len(sys.argv) > 3 and iteration == 6 and run.global_rank == 1
        attempt.validate(loss * float("nan") if is_bad else loss)
    optim.zero_grad()
    loss.backward()
    optim.step()
print("trained", run.iteration, flush=True)
"""


def run_ft_launcher(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the guide's ``ft_launcher`` command line, found on PATH, on one node with two workers."""
    (script := tmp_path / "your_training_script.py").write_text(TRAIN)
    write_shims(tmp_path / "shims")
    line = """
    export GROUP_RANK=0  # required for non-Slurm
    ft_launcher \\
        --rdzv_backend=c10d --rdzv_endpoint=${MASTER_ADDR}:${MASTER_PORT} \\
        --nnodes=${NUM_NODES} --nproc-per-node=${NUM_GPUS_PER_NODE} \\
        --ft-rank_section_timeouts=setup:600,step:180,checkpointing:420 \\
        --ft-rank_out_of_section_timeout=300 \\
    """
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'shims'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "NUM_NODES": "1", "NUM_GPUS_PER_NODE": "2"},
    }
    return subprocess.run(
        ["/bin/sh", "-c", line.rstrip().removesuffix("\\") + ' "$@"', "sh", str(script), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.process
def test_guide_launch_line_trains(tmp_path: Path) -> None:
    """The guide's timeouts are in effect, each save is logged when it is scheduled and committed, and learned
    timeouts are stored next to the checkpoints."""
    completed = run_ft_launcher(tmp_path, "ckpt", "validate_results")
    output = completed.stdout + completed.stderr
    assert completed.returncode == 0, output
    assert output.count("trained 12") == 2
    for timeout in ("setup 600 s", "step 180 s", "checkpointing 420 s", "outside of sections 300 s"):
        assert timeout in output, output
    scheduled = re.findall(r"INFO \[rank 0\] Scheduling async checkpoint save of iteration (\d+) ", output)
    committed = re.findall(r"INFO \[rank 0\] saved iteration (\d+) to memory, global in ", output)
    assert scheduled == ["4", "8", "12"], output
    assert sorted({*committed, "12"}) == sorted(committed), output  # a newer save may replace an older one
    assert set(committed) <= set(scheduled)
    assert output.count("Scheduling async checkpoint save") == 3
    assert (tmp_path / "ckpt" / "ft_state.json").exists()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_nan_fails_training_with_disabled_reruns(tmp_path: Path) -> None:
    """With Bridge's default ``rerun_mode`` a NaN loss does not end with exit code 0."""
    completed = run_ft_launcher(tmp_path, "ckpt", "disabled", "nan")
    output = completed.stdout + completed.stderr
    assert completed.returncode not in (0, None), output
    assert "trained" not in completed.stdout
    assert re.search(r"(?i)nan", output), output


def test_kempnerforge_config_is_read(tmp_path: Path) -> None:
    """The guide's two settings are read by their names; 0 = no check."""
    (path := tmp_path / "train.toml").write_text(
        "[train]\n"
        "shutdown_timeout_sec       = 600.0   # ShutdownHandler hard deadline (0 = disabled)\n"
        "nccl_health_check_interval = 0       # NCCL ping every N steps (0 = disabled)\n"
    )
    config = load_config(path)
    assert config.preemption is not None
    assert config.preemption.shutdown_timeout == 600.0
    assert config.health is not None
    assert config.health.process_group_interval == 0
