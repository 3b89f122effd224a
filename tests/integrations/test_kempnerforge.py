"""The names of KempnerForge's resilience module do what they promise, and on all ranks alike."""

from __future__ import annotations

import signal
from pathlib import Path

import pages
import pytest
import torch

from outlast.errors import ConfigError, NotFinite
from outlast.integrations import kempnerforge
from outlast.testing import RankProcesses

LOOP = """
import math, os, sys
import torch, torch.distributed as dist
from outlast.integrations.kempnerforge import NaNDetector, ShutdownHandler, check_nccl_health, log_job_info
dist.init_process_group("gloo")
rank = dist.get_rank()
log_job_info()
assert check_nccl_health(timeout_sec=60.0)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
detector = NaNDetector(action="skip", max_consecutive=3)
with ShutdownHandler(timeout_sec=100.0) as handler:
    stepped, step = [], 0
    while not handler.should_shutdown():
        loss = weight.sum() * (math.nan if step == 2 and rank == 1 else 1.0)
        loss.backward()
        if detector.check_loss(loss, step, optimizer):
            optimizer.step()
            stepped.append(step)
        optimizer.zero_grad()
        step += 1
        if step == 5:
            print("at step 5", flush=True)
    assert stepped == [one for one in range(step) if one != 2], stepped
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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_ranks_signal_and_one_ranks_nan_count_on_all_ranks(number: int, tmp_path: Path) -> None:
    """A step that is NaN on one rank is skipped on both; a signal to one rank has both leave after the same step."""
    (script := tmp_path / "train.py").write_text(LOOP)
    with RankProcesses(script, world_size=2, directory=tmp_path / "logs") as ranks:
        ranks.wait_for("at step 5", timeout_s=120, ranks=range(2))
        ranks.signal(1, number)
        assert ranks.wait(timeout_s=120) == [75, 75], ranks.tails()


def test_the_detector_raises_where_it_should() -> None:
    """``raise`` raises at once; any action ends the run at the limit; what is not an action is refused."""
    with pytest.raises(NotFinite):
        kempnerforge.NaNDetector(action="raise").check_loss(float("inf"), 1)
    detector = kempnerforge.NaNDetector(max_consecutive=2)
    assert detector.check_loss(float("nan"), 1)
    assert detector.consecutive_count == 1
    with pytest.raises(NotFinite) as caught:
        detector.check_loss(torch.tensor(float("nan")), 2)
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == 17
    with pytest.raises(ConfigError, match="'retry'"):
        kempnerforge.NaNDetector(action="retry")


@pytest.mark.slow
@pytest.mark.process
def test_the_health_of_a_machine_without_gpus_is_that_of_its_cpu() -> None:
    """Where there is no GPU its arithmetic is checked, in another process."""
    assert kempnerforge.check_gpu_health()


def test_a_handler_that_is_not_registered_hears_nothing() -> None:
    """It neither shuts down nor fails; finishing is idempotent."""
    handler = kempnerforge.ShutdownHandler()
    assert not handler.should_shutdown()
    handler.finish()
    handler.finish()


def test_the_names_on_the_page_are_there() -> None:
    """The block of the page's section imports them as it says."""
    (block,) = [one for one in pages.python_blocks("slurm.md") if "integrations.kempnerforge" in one]
    namespace: dict[str, object] = {}
    exec(block, namespace)
    assert set(kempnerforge.__all__) <= set(namespace)
