"""Modules that are imported before workers are forked do not access the devices: forked workers could not use them
then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.testing import Cluster

PRELOADS = """
import json, sys

found = []
asks = {"_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties", "mem_get_info"}

def note(frame, event, called):
    if event == "call":
        code = frame.f_code
        if code.co_name in asks and ("/torch/cuda/" in code.co_filename or "/torch/accelerator/" in code.co_filename):
            found.append([code.co_name, frame.f_back.f_code.co_filename, frame.f_back.f_lineno])
    elif event == "c_call" and getattr(called, "__name__", "").startswith(("_cuda_", "_accelerator_")):
        found.append([called.__name__, frame.f_code.co_filename, frame.f_lineno])

from outlast.launch.run import PRELOAD
from outlast.runtime.forked_worker import preload

failed = {}
sys.setprofile(note)
preload([*PRELOAD, "outlast.session", "outlast.inprocess", "outlast.checkpoint.manager", "outlast.straggler"], failed)
sys.setprofile(None)
import torch
print(json.dumps({"found": found, "failed": failed, "initialised": torch.cuda.is_initialized(), "asks": sorted(asks)}))
"""
WORKER = """
import torch
assert not torch.cuda.is_initialized(), "a context was made before the fork"
assert not torch.cuda._is_in_bad_fork(), "CUDA was asked before the fork"
print("CUDA is untouched", flush=True)
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.cold
def test_preloading_does_not_access_devices() -> None:
    """Importing the modules of the fork server and of a session neither queries devices nor creates a context; even
    counting devices would keep forked workers from using CUDA."""
    finished = subprocess.run(
        [sys.executable, "-c", PRELOADS], timeout=250, check=False, text=True, stdout=subprocess.PIPE
    )
    assert finished.returncode == 0
    report = json.loads(finished.stdout)
    assert (report["found"], report["failed"], report["initialised"]) == ([], {}, False)


@pytest.mark.process
def test_forked_worker_can_initialise_cuda(tmp_path: Path) -> None:
    """A worker of `outlast run` can initialise CUDA: its fork server has neither initialised it nor counted devices."""
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    with Cluster(script, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        assert cluster.wait(timeout_s=250) == [0], cluster.tails()
        assert "CUDA is untouched" in cluster.agent(0).output()
