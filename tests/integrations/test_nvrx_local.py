"""NVRx's local checkpoints over the engine: Megatron-Core's state is restored bit-identically, or not at all."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from outlast.errors import ConfigError
from outlast.integrations.nvrx import local_checkpoints as local
from outlast.testing import RankProcesses

BEGIN = """
import argparse, json, os, sys, warnings
warnings.simplefilter("ignore")
from outlast.integrations import nvrx
nvrx.install()
import numpy as np, torch, torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import CheckpointingException
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

torch.cuda.synchronize = lambda *device: None  # Megatron-Core calls both whatever the device
torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo")
rank = dist.get_rank()

def sharded(iteration):
    draw = torch.Generator().manual_seed(10 * iteration + rank)
    shared = torch.randn(16, generator=torch.Generator().manual_seed(iteration))
    numbers = [{"np_rng_state": np.random.RandomState(iteration).get_state(), "rng": torch.arange(iteration)}]
    return {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("weight", torch.randn(4, 8, generator=draw), (0, rank, 2)),
            "bias": ShardedTensor.from_rank_offsets("bias", shared, replica_id=rank),
        },
        "rng": ShardedObject("rng", numbers, (2,), (rank,)),
        "args": argparse.Namespace(lr=0.1, params_dtype=torch.bfloat16),
        "iteration": iteration,
    }

def aware(iteration, algo="fully_parallel"):
    return MCoreTensorAwareStateDict.from_state_dict(sharded(iteration), algo=algo)[0]

def manage(folder, session="s1"):
    replicas = CliqueReplicationStrategy.from_replication_params(1, 2)
    return LocalCheckpointManager(f"{folder}/node{rank}", session_id=session, repl_strategy=replicas)

def check(saved, iteration, algo):
    expected = list(aware(iteration, algo).tensors)
    assert all(torch.equal(a, b) for a, b in zip(saved.tensors, expected, strict=True))
    if algo == "fully_parallel":  # Megatron-Core puts the ranks' parts together on GPUs only
        return
    want, found = sharded(iteration), saved.to_state_dict(sharded(0), algo=algo)
    for name in ("weight", "bias"):
        assert torch.equal(found["model"][name], want["model"][name].data), name
    given, back = want["rng"].data[0], found["rng"][0]
    assert torch.equal(back["rng"], given["rng"]) and (back["np_rng_state"][1] == given["np_rng_state"][1]).all()
    assert found["args"] == want["args"] and found["iteration"] == iteration
"""

SAVE = (
    BEGIN
    + """
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
manager = manage(sys.argv[1])
assert manager.find_latest() == -1
for iteration in (10, 20):
    given = aware(iteration)
    assert manager.save(given, iteration) is None
    check(given, iteration, "fully_parallel")  # the caller's own object is as before
queue = AsyncCallsQueue(persistent=False)
given = aware(30, "atomic")
queue.schedule_async_request(manager.save(given, 30, is_async=True))
for tensor in given.tensors:
    tensor.zero_()  # training goes on: what was saved is what was given
while queue.get_num_unfinalized_calls():
    queue.maybe_finalize_async_calls(blocking=False)
print("committed", manager.find_latest(), flush=True)
os.kill(os.getpid(), 9) if rank == 1 else dist.barrier()
"""
)

LOAD = (
    BEGIN
    + """
def newest(folder, session="s1"):
    manager, before = manage(folder, session), torch.get_rng_state()
    iteration = manager.find_latest()
    assert torch.equal(before, torch.get_rng_state())
    if iteration >= 0:
        saved, name = manager.load()
        assert name == (iteration, rank, session)
        check(saved, iteration, "atomic" if iteration == 30 else "fully_parallel")
    if folder.endswith("/whole") and iteration == 30:  # whoever looks again finds it again
        assert manager.find_latest() == manager.find_latest() == iteration
        assert manager._stage.name == "READY"
        assert manager.load()[1].iteration == iteration
    return manager, iteration

folder, told = sys.argv[1], {}
for case in ("whole", "lost", "flipped", "torn", "lost_and_flipped", "all_flipped"):
    manager, told[case] = newest(f"{folder}/{case}")
    if case == "all_flipped":  # the training begins elsewhere, and saves beside what is left
        manager.save(aware(31), 31)
        assert manager.find_latest() == 31
        check(manager.load()[0], 31, "fully_parallel")
    manager.close()

manager = manage(f"{folder}/whole")  # training goes on from a newer global checkpoint: it saves without loading
assert manager.find_latest() == 30
try:
    manager.save(aware(30), 30)
except CheckpointingException as error:
    told["older"] = str(error)
manager.save(aware(40), 40)
manager.close()
told["saved without loading"] = newest(f"{folder}/whole")[1]

try:
    newest(f"{folder}/renamed", "s2")
except CheckpointingException as error:
    told["other session"] = str(error)

class Unknown: pass
manager = manage(f"{folder}/lost", "s3")  # on one rank only: the other is told, and does not wait for it
try:
    what = Unknown() if rank == 0 else "value"
    manager.save(MCoreTensorAwareStateDict(common={"what": what}, sharded_state_dict={}), 1)
    raise AssertionError("saved")
except CheckpointingException as error:
    told["unknown class"] = str(error)
    assert "Unknown" in str(error), error
manager.save(MCoreTensorAwareStateDict(common={"what": "value"}, sharded_state_dict={}), 2)
told["next"] = manager.find_latest()
print(json.dumps(told) if rank == 0 else "", flush=True)
dist.barrier()
"""
)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def run(code: str, folder: Path, logs: Path) -> tuple[list[int], str]:
    """Run code on two ranks, each on a node of its own; return their exit codes and the output."""
    script = logs.with_suffix(".py")
    script.write_text(code)
    with RankProcesses(script, str(folder), world_size=2, nodes=["first", "second"], directory=logs) as ranks:
        codes = ranks.wait(timeout_s=200)
        return codes, ranks.tails()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_megatron_state_is_restored_after_any_lost_copy(tmp_path: Path) -> None:
    """Lost, damaged and torn copies are replaced from the other node; without any valid copy all ranks use the older
    iteration, or none, and another session's are rejected."""
    complete = tmp_path / "cases" / "whole"
    codes, output = run(SAVE, complete, tmp_path / "save")
    assert codes[1] == -9, output
    assert output.count("committed 30") == 2, output

    def case(name: str) -> Path:
        return Path(shutil.copytree(complete, tmp_path / "cases" / name))

    def shard(folder: Path, node: int, rank: int, iteration: int = 30) -> Path:
        (found,) = folder.glob(f"node{node}/s1/*/step-{iteration}/rank-{rank:05}.safetensors")
        return found

    shutil.rmtree(case("lost") / "node1")
    flip(shard(case("flipped"), 0, 0))
    os.truncate(shard(case("torn"), 1, 1), 1000)
    shutil.rmtree((both := case("lost_and_flipped")) / "node1")
    flip(shard(both, 0, 1))
    for path in case("all_flipped").rglob("*.safetensors"):
        flip(path)
    for node in (renamed := case("renamed")).iterdir():
        (node / "s1").rename(node / "s2")
    assert renamed.exists()

    codes, output = run(LOAD, tmp_path / "cases", tmp_path / "load")
    assert codes == [0, 0], output
    results = next(line for line in output.splitlines() if line.startswith("{"))
    for text in (
        '"whole": 30, "lost": 30, "flipped": 30, "torn": 30, "lost_and_flipped": 20, "all_flipped": -1',
        "iteration 30 is not newer than the local checkpoint of iteration 30",
        '"saved without loading": 40',
        "holds local checkpoints of session 's1', not of 's2'",
        "__main__.Unknown, which is not one of the classes that are read back",
        '"next": 2',
    ):
        assert text in results, output


class RunsCode:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize("value", [RunsCode(), getattr, torch.load, io.TextIOWrapper, shutil.rmtree])
def test_hollow_state_with_code_is_rejected(value: object) -> None:
    """Functions, and classes that are not known to hold only values, are not read, even by their names."""
    data = pickle.dumps({"here": value})
    with pytest.raises(pickle.UnpicklingError, match="not one of the classes that are read back"):
        local.HollowUnpickler(data, ()).load()


def test_allowed_value_class_is_read(tmp_path: Path) -> None:
    """A state dict with a class of a script can be saved and read once the class was passed to allow_class()."""
    manager = local.LocalCheckpointManager(tmp_path, "alone")
    state = local.BasicTensorAwareStateDict({"value": ScriptValue()})
    with pytest.raises(local.CheckpointingException, match=r"test_nvrx_local\.ScriptValue"):
        manager.save(state, 1)
    local.allow_class(ScriptValue)
    manager.save(state, 1)
    assert manager.find_latest() == 1
    loaded, _ = manager.load()
    assert isinstance(loaded, local.BasicTensorAwareStateDict)
    assert isinstance(loaded.state_dict["value"], ScriptValue)
    manager.close()


class ScriptValue:
    """A class of a script."""


def test_state_dict_round_trip_without_a_process_group(tmp_path: Path) -> None:
    """The calls work without a process group; nested tensors are restored in place, after every search."""
    manager = local.LocalCheckpointManager(tmp_path, "alone")
    with pytest.raises(local.CheckpointingException, match="call find_latest"):
        manager.load()
    given = {"a": torch.arange(3), "b": [{"c": torch.ones(2, dtype=torch.bfloat16)}, 7]}
    manager.save(local.BasicTensorAwareStateDict(given), 5)
    assert torch.equal(given["a"], torch.arange(3))
    assert manager.find_latest() == 5
    saved, name = manager.load()
    assert name == (5, 0, "alone")
    assert isinstance(saved, local.BasicTensorAwareStateDict)
    assert torch.equal(saved.state_dict["a"], given["a"])
    assert torch.equal(saved.state_dict["b"][0]["c"], given["b"][0]["c"])
    assert saved.state_dict["b"][1] == 7
    assert not saved.is_hollow
    with pytest.raises(local.CheckpointingException, match="call find_latest"):
        manager.load()
    assert manager.find_latest() == 5
    reloaded, name = manager.load()
    assert name.iteration == 5
    assert isinstance(reloaded, local.BasicTensorAwareStateDict)
    assert torch.equal(reloaded.state_dict["a"], given["a"])
    manager.save(local.BasicTensorAwareStateDict(given), 6)
    assert manager.find_latest() == 6
    manager.close()


def test_replication_groups_match_nvrx() -> None:
    """Groups are divided as in NVRx, a strategy has the distance of copies, and unsupported values are rejected by
    name."""
    assert local.parse_group_sequence(2, 2, 8) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    with pytest.raises(ConfigError, match="6 ranks cannot be divided"):
        local.parse_group_sequence(2, 2, 6)
    strategy = local.CliqueReplicationStrategy.from_replication_params(8, 3)
    assert (strategy.replication_jump, strategy.replication_factor) == (8, 3)
    with pytest.raises(ConfigError, match="replication_factor=1"):
        local.LazyCliqueReplicationStrategy(8, 1)
    with pytest.raises(ConfigError, match="target_device='cuda'"):
        local.CliqueReplicationStrategy(local.GroupWrapper(), target_device="cuda")
    with pytest.raises(ConfigError, match=r"session_id='\.\./other'"):
        local.LocalCheckpointManager("/tmp", "../other")
