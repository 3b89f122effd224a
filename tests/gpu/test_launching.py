"""The launcher and the GPU: only workers use it, each has the right one, and memory of an ended worker is free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from device_runs import LAUNCHED, ON_GPU, PATIENCE_S, driver_files, needs_gpu

from outlast.testing import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.process]

COMPUTES = """
import json, os, sys, time
from pathlib import Path
import torch

assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
device = "cuda" if torch.cuda.is_available() else "cpu"
assert float((torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)).sum()) == 64**3
print("computed on", device, flush=True)
deadline = time.monotonic() + 100
while not Path(sys.argv[1], "go").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""
SHOWS_DEVICES = """
import json, os, sys
from pathlib import Path
import torch

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
found = {"world_size": int(os.environ["WORLD_SIZE"]), "device": str(torch.cuda.get_device_properties(local).uuid)}
Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(json.dumps(found))
"""
SHOWS_PLACE = """
import json, os, sys
from pathlib import Path

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")
place = {name: os.environ.get(name) for name in names}
Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(json.dumps(place))
"""
HOLDS_MEMORY = """
import json, os, signal, sys
from pathlib import Path
import torch

note = Path(sys.argv[1], "memory.json")
free, _ = torch.cuda.mem_get_info()
if os.environ["OUTLAST_CYCLE"] == "0":
    num_bytes = free // 2
    block = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    note.write_text(json.dumps({"held": num_bytes, "left": torch.cuda.mem_get_info()[0]}))
    os.kill(os.getpid(), signal.SIGKILL)
known = json.loads(note.read_text())
block = torch.zeros(known["held"], dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
note.write_text(json.dumps({**known, "free_after": free, "allocated": block.numel()}))
"""

EXCEEDS_MEMORY = """
import torch


def forward():
    return torch.zeros(torch.cuda.mem_get_info()[1] + (1 << 30), dtype=torch.uint8, device="cuda")


forward()
"""


def write_script(folder: Path, code: str) -> Path:
    script = folder / "script.py"
    script.write_text(code)
    return script


def read_places(folder: Path) -> list[Any]:
    """Return the records of the ranks in a folder, in the order of their ranks."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*"))]


@pytest.mark.parametrize("options", [[], LAUNCHED], ids=["checked", "unchecked"])
def test_only_workers_use_the_driver(tmp_path: Path, options: list[str]) -> None:
    """While a worker computes on the GPU, neither the agent (with or without a health check of the node) nor the fork
    server has opened the GPU's driver: they have no context and use no GPU memory. CUDA was not initialised before the
    fork: the worker can use it."""
    script = write_script(tmp_path, COMPUTES)
    with Cluster(
        script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options
    ) as cluster:
        cluster.wait_for(f"computed on {'cuda' if ON_GPU else 'cpu'}", PATIENCE_S)
        worker = cluster.worker_pid(0)
        fork_server = psutil.Process(worker).ppid()
        assert "outlast.runtime.fork_server" in " ".join(psutil.Process(fork_server).cmdline())
        pids = {"agent": cluster.agent(0).pid, "fork_server": fork_server}
        used = {name: driver_files(pid) for name, pid in pids.items()}
        used_by_worker = driver_files(worker)
        (tmp_path / "go").touch()
        assert cluster.wait(PATIENCE_S) == [0], cluster.tails()
    assert used == {"agent": set(), "fork_server": set()}
    if ON_GPU and not used_by_worker:
        pytest.skip("/proc does not show here which processes use the driver: not even the worker has its files")


@needs_gpu("there are no GPUs to count")
def test_nproc_gpu_starts_one_worker_per_gpu(tmp_path: Path) -> None:
    """With --nproc-per-node=gpu as many workers start as there are GPUs, each on its own GPU."""
    script = write_script(tmp_path, SHOWS_DEVICES)
    options = ["--nproc-per-node=gpu", *LAUNCHED]
    with Cluster(script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=1, options=options) as cluster:
        assert cluster.wait(PATIENCE_S) == [0], cluster.tails()
    found = read_places(tmp_path)
    assert len(found) == torch.cuda.device_count()
    assert {place["world_size"] for place in found} == {torch.cuda.device_count()}
    assert len({place["device"] for place in found}) == len(found)


@pytest.mark.parametrize("visible", [None, "3,5"], ids=["all", "some"])
@pytest.mark.parametrize("virtual", [False, True], ids=["own_number", "virtual"])
def test_workers_see_the_same_devices_as_under_torchrun(tmp_path: Path, virtual: bool, visible: str | None) -> None:
    """LOCAL_RANK and CUDA_VISIBLE_DEVICES of every worker equal those under torchrun, with and without
    --virtual-local-rank, whether or not the node sets CUDA_VISIBLE_DEVICES."""
    options = ["--nproc-per-node=2", *(["--virtual-local-rank"] * virtual)]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"OMP_NUM_THREADS": "1"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    launchers = {
        "torchrun": ["torch.distributed.run", "--standalone"],
        "outlast": ["outlast", "run", *LAUNCHED, f"--run-dir={tmp_path / 'run'}"],
    }
    found = {}
    for name, (module, *words) in launchers.items():
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-m", module, *words, *options, str(write_script(folder, SHOWS_PLACE)), str(folder)]
        ended = subprocess.run(
            command,
            env=environment,
            timeout=PATIENCE_S / 2,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert ended.returncode == 0, ended.stdout
        found[name] = read_places(folder)
    assert len(found["torchrun"]) == 2
    assert found["outlast"] == found["torchrun"]


@needs_gpu("there is no memory of a device")
def test_memory_of_a_killed_rank_is_free_for_the_next(tmp_path: Path) -> None:
    """A rank is killed while it uses half of the GPU's free memory; the rank of the next cycle finds that memory free
    at its start and allocates as much."""
    script = write_script(tmp_path, HOLDS_MEMORY)
    options = ["--no-health-check", "--ft-gpu-memory-reclaim-timeout=20"]  # never reached where other tests use the GPU
    run_dir = tmp_path / "run"
    with Cluster(script, str(tmp_path), run_dir=run_dir, num_nodes=1, nproc_per_node=1, options=options) as cluster:
        assert cluster.wait(PATIENCE_S) == [0], cluster.tails()
    memory = json.loads((tmp_path / "memory.json").read_text())
    assert memory["allocated"] == memory["held"] > 0
    assert memory["free_after"] >= memory["held"]
    assert memory["free_after"] >= memory["left"] + memory["held"] // 2


@needs_gpu("there is no memory of a device")
def test_out_of_memory_is_reported_with_rank_and_line(tmp_path: Path) -> None:
    """A rank that exceeds the GPU's memory is the root cause: the last line has torch's exception with the requested
    bytes, the rank, and the line of the script."""
    script = write_script(tmp_path, EXCEEDS_MEMORY)
    options = ["--max-restarts=1", *LAUNCHED]
    run_dir = tmp_path / "run"
    with Cluster(script, run_dir=run_dir, num_nodes=1, nproc_per_node=1, options=options) as cluster:
        assert cluster.wait(PATIENCE_S) == [1], cluster.tails()
        last = next(line for line in cluster.agent(0).output().splitlines() if "job over" in line)
    assert "rank 0 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in last
    assert "(script.py:6 in forward)" in last
