"""The names of KempnerForge's resilience module behave as documented, identically on all ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pages
import pytest
import torch

from outlast.errors import ConfigError, NotFinite
from outlast.health import CheckResult, Status
from outlast.integrations import kempnerforge
from outlast.testing import Cluster, RankProcesses

LOOP = """
import math, os, sys
import torch, torch.distributed as dist
from outlast.integrations.kempnerforge import NaNDetector, ShutdownHandler, check_nccl_health, log_job_info
dist.init_process_group("gloo")
rank = dist.get_rank()
log_job_info()
assert check_nccl_health(timeout_sec=60.0)
weight = torch.nn.Parameter(torch.ones(1))
model = torch.nn.Module()
model.weight = weight
optimizer = torch.optim.SGD([weight], lr=0.1)
detector = NaNDetector(action="skip", max_consecutive=3)
with ShutdownHandler(timeout_sec=100.0) as handler:
    assert not handler.shutdown_requested and handler.signal_received is None
    stepped, step = [], 0
    while not handler.should_shutdown():
        loss = weight.sum() * (math.nan if step == 2 and rank == 1 else 1.0)
        loss.backward()
        if step == 3 and rank == 0:
            weight.grad.fill_(math.inf)
        if detector.check_loss(loss, step, optimizer) and detector.check_gradients(model, step):
            optimizer.step()
            stepped.append(step)
        optimizer.zero_grad()
        step += 1
        if step == 5:
            print("at step 5", flush=True)
    assert stepped == [one for one in range(step) if one not in (2, 3)], stepped
    assert handler.shutdown_requested
    assert (handler.signal_received is not None) == (rank == 1)
    assert (detector.state.total_nans, detector.state.nan_steps) == (1, [2])
    steps = [None, None]
    dist.all_gather_object(steps, step)
    assert steps[0] == steps[1], steps
    print("saved at", step, flush=True)
detector.close()
dist.destroy_process_group()
sys.exit(75)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.extended)])
def test_signal_and_nan_of_one_rank_affect_all_ranks(number: int, tmp_path: Path) -> None:
    """A NaN loss or gradient on one rank skips the step on both; a signal to one rank stops both after the same
    step."""
    (script := tmp_path / "train.py").write_text(LOOP)
    with RankProcesses(script, world_size=2, directory=tmp_path / "logs") as ranks:
        ranks.wait_for("at step 5", timeout_s=300, ranks=range(2))
        ranks.signal(1, number)
        assert ranks.wait(timeout_s=300) == [75, 75], ranks.tails()


def test_nan_detector_actions_and_limit() -> None:
    """``raise`` raises at once, other actions report; at the limit a rollback is requested, and one more bad step
    ends the script."""
    with pytest.raises(NotFinite):
        kempnerforge.NaNDetector(action="raise").check_loss(float("inf"), 1)
    for action in ("warn", "skip"):
        detector = kempnerforge.NaNDetector(action=action, max_consecutive=2)
        assert detector.check_loss(0.5, 0)
        assert not detector.check_loss(float("nan"), 1)
        assert detector.consecutive_count == 1
        assert not detector.should_rollback
        assert not detector.should_rollback
        assert not detector.check_loss(torch.tensor(float("nan")), 2)
        assert detector.should_rollback
        with pytest.raises(NotFinite) as caught:
            detector.check_loss(torch.tensor(float("nan")), 3)
        assert isinstance(caught.value, SystemExit)
        assert caught.value.code == 17
        detector.reset()
        assert not detector.should_rollback
    with pytest.raises(ConfigError, match="'retry'"):
        kempnerforge.NaNDetector(action="retry")


STOPPED = """
import atexit, math, sys, time
import torch.distributed as dist
from outlast.integrations.kempnerforge import NaNDetector

def main():
    dist.init_process_group("gloo")
    detector = NaNDetector(action="warn", max_consecutive=10)
    if sys.argv[1:] == ["reset"]:
        for step in range(10):
            assert not detector.check_loss(math.nan, step)
        detector.reset()
        return
    for step in range(100):
        if not detector.check_loss(math.nan if step >= 3 else 1.0, step):
            if detector.should_rollback:
                break
            continue
    atexit.register(print, "what the script registered runs", flush=True)
    if dist.get_rank():
        atexit.register(time.sleep, 2)  # runs first: rank 0 has exited
    print("after the loop, at step", step)
    dist.destroy_process_group()

main()
"""


@pytest.mark.process
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_code_after_the_loop_runs_at_the_tenth_nan(tmp_path: Path, num_nodes: int) -> None:
    """At the limit the script exits its loop, and all ranks run their remaining code, also a slower one after
    another has exited with 17. After a reset the exit code is the script's."""
    (script := tmp_path / "train.py").write_text(STOPPED)
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=num_nodes, nproc_per_node=2 // num_nodes) as cluster:
        assert cluster.wait(timeout_s=300) == [17] * num_nodes, cluster.tails()
        output = "".join(agent.output() for agent in cluster.agents)
    assert output.count("after the loop, at step 12") == output.count("what the script registered runs") == 2, output
    assert "NaN or infinity at iteration 12: loss of ranks 0, 1; 10 in a row" in output
    with RankProcesses(script, "reset", world_size=1, directory=tmp_path / "logs") as ranks:
        assert ranks.wait(timeout_s=300) == [0], ranks.tails()


def test_nan_detector_state_accumulates_until_reset() -> None:
    """``state`` has the numbers of bad steps and the last good loss until it is reset; without a limit no rollback
    is requested."""
    detector = kempnerforge.NaNDetector(max_consecutive=0, max_history=1)
    assert detector.check_loss(torch.tensor([1.0, 2.0]), 3)
    for step in (4, 5):
        assert not detector.check_loss(float("inf"), step)
    assert detector.state == kempnerforge.NaNState(
        consecutive_nans=2, total_nans=2, last_good_loss=1.5, last_good_step=3, nan_steps=[4]
    )
    assert not detector.should_rollback
    detector.reset()
    assert (detector.state, detector.consecutive_count) == (kempnerforge.NaNState(), 0)


@pytest.mark.parametrize("action", ["warn", "skip", "raise"])
def test_nonfinite_gradients_are_reported(action: str) -> None:
    """``check_gradients`` reports a bad gradient or raises, does not count it as a bad loss, and ``skip`` drops
    gradients."""
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad is not None
    detector = kempnerforge.NaNDetector(action=action, max_consecutive=1)
    assert detector.check_gradients(model, 0)
    assert detector.check_gradients(torch.nn.Module(), 0)
    model.bias.grad.fill_(float("nan"))
    if action == "raise":
        with pytest.raises(NotFinite, match="gradients of rank 0"):
            detector.check_gradients(model, 1)
    else:
        assert not detector.check_gradients(model, 1)
    assert detector.state == kempnerforge.NaNState()
    assert (model.weight.grad is None) == (action != "warn")


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_health_without_gpus_checks_the_cpu() -> None:
    """Without a GPU the arithmetic of the CPU is checked; the result has KempnerForge's keys and a truth value."""
    assert kempnerforge.log_health_status()
    health = kempnerforge.check_gpu_health()
    assert health
    assert health == {
        "cuda_available": False,
        "device_accessible": False,
        "compute_ok": False,
        "memory_ok": False,
        "error": "CUDA not available",
    }
    missing_gpu = kempnerforge.check_gpu_health(0)
    assert not missing_gpu
    assert "this node has no GPU" in str(missing_gpu["error"])


@pytest.mark.parametrize(
    ("name", "status", "failed_keys"),
    [
        ("compute", Status.FAILED, {"compute_ok"}),
        ("compute", Status.TIMED_OUT, {"compute_ok", "device_accessible"}),
        ("device memory", Status.FAILED, {"memory_ok"}),
        ("driver", Status.FAILED, set()),
        ("driver", Status.SKIPPED, None),
    ],
)
def test_gpu_health_has_kempnerforges_keys(name: str, status: Status, failed_keys: set[str] | None) -> None:
    """Each failed check is visible in its key, in the error, and in the truth value."""
    results = [
        CheckResult(
            name=one, target="cuda:0", status=status if one == name else Status.OK, reason="why", took_s=0.1,
            facts={"num_devices": 8},
        )
        for one in ("devices", "compute", "device memory", "driver")
    ]  # fmt: skip
    health = kempnerforge.GPUHealth(results)
    assert health.pop("error") == ("" if failed_keys is None else f"{name} cuda:0: {status.replace('_', ' ')}: why")
    assert {key for key, is_good in health.items() if not is_good} == (failed_keys or set())
    assert bool(health) is (failed_keys is None)


def test_single_process_is_healthy_outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group NCCL counts as healthy; without Slurm there is no job."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOBID", raising=False)
    assert kempnerforge.check_nccl_health()
    assert not kempnerforge.is_slurm_job()
    assert not kempnerforge.is_slurm_requeue()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert kempnerforge.is_slurm_job()
    assert kempnerforge.is_slurm_requeue()


def test_unregistered_shutdown_handler_does_nothing() -> None:
    """A handler that is not registered does not shut down; finishing is idempotent."""
    handler = kempnerforge.ShutdownHandler()
    assert not handler.should_shutdown()
    handler.finish()
    handler.finish()


def test_documented_names_can_be_imported() -> None:
    """The block of the page imports all names."""
    (block,) = [one for one in pages.python_blocks("slurm.md") if "integrations.kempnerforge" in one]
    namespace: dict[str, object] = {}
    exec(block, namespace)
    assert set(kempnerforge.__all__) <= set(namespace)
