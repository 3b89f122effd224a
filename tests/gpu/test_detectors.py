"""Slow-rank timing, health checks and replica digests on the device for which they are made."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from device_runs import ON_GPU, PATIENCE_S, needs_gpu

from outlast.health import Status
from outlast.health.devices import ComputeCheck, DeviceMemoryCheck
from outlast.numerics.replica_digest import BLOCK_WORDS, PIECE_BLOCKS, digest_tensors, weigh
from outlast.straggler import StragglerDetector

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 20_000_000
"""About 10 ms on a GPU."""
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
CHECKS_GPUS = """
import json, os, sys
from pathlib import Path
from outlast.health import check_gpu

def driver_files():
    opened = {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(errors="replace").splitlines()}
    return sorted(name for name in opened | mapped if name.startswith("/dev/nvidia"))

results = [[one.name, one.target, one.status.name, one.reason] for one in check_gpu()]
print(json.dumps({"results": results, "driver": driver_files(), "torch": "torch" in sys.modules}))
"""


# -- slow ranks -------------------------------------------------------------------------------------------------------


def measure_sleep_s() -> float:
    """Return the seconds that the device sleeps in a step, measured with its own events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    torch.cuda._sleep(SLEEP_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@needs_gpu("a CPU does not run behind")
def test_sections_measure_device_time_without_waiting() -> None:
    """The time of a section is the device's, not the host's time to queue the work; host sections, hooks of modules and
    optimizers, and the end of a step never wait for the device: torch raises if one does."""
    asleep_s = measure_sleep_s()
    found = StragglerDetector(num_warmup_steps=0)
    model = torch.nn.Linear(256, 256, device="cuda")
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    found.watch({"model": model, "optim": optim})
    inputs = torch.ones(256, 256, device="cuda")
    model(inputs).sum().backward()  # allocations in the first pass wait for the device
    optim.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(20):
            with found.step(number):
                with found.section("asleep"):
                    torch.cuda._sleep(SLEEP_CYCLES)
                with found.section("queued", on_device=False):
                    torch.cuda._sleep(SLEEP_CYCLES)
                model(inputs).sum().backward()
                optim.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    by_name = found.report().ranks[0].by_name
    found.close()
    assert {"asleep", "queued", "forward", "optimizer"} <= by_name.keys()
    assert by_name["asleep"].count >= 15
    assert by_name["asleep"].median_s > 0.5 * asleep_s
    assert by_name["queued"].median_s < 0.5 * asleep_s
    assert by_name["forward"].median_s < by_name["asleep"].median_s


# -- health -----------------------------------------------------------------------------------------------------------


def test_the_compute_check_detects_a_flipped_bit() -> None:
    """The matrix product is bit-exact in every number format; one flipped bit fails the check, which names every
    format."""
    number = 0 if ON_GPU else None
    formats = ["float32", "bfloat16", "float16"] if ON_GPU else ["float32", "float64"]
    outcome = ComputeCheck(device=number).run()
    assert (outcome.status, outcome.facts["formats"]) == (Status.OK, formats), outcome.reason
    flipped = ComputeCheck(device=number, flip=True, num_rounds=1).run()
    assert flipped.status == Status.FAILED
    assert [text.partition(":")[0] for text in flipped.facts["wrong"]] == formats


def test_the_memory_check_passes_on_the_device() -> None:
    """The requested number of bytes of device memory is written and read back without a wrong word."""
    outcome = DeviceMemoryCheck(device=0 if ON_GPU else None, num_bytes=256 << 20).run()
    assert outcome.status == Status.OK, outcome.reason
    assert (outcome.facts["tested_bytes"], outcome.facts["wrong_words"]) == (256 << 20, 0)


@pytest.mark.process
def test_check_gpu_leaves_no_context_behind() -> None:
    """check_gpu() finds the GPU healthy: present, bit-exact, with reliable memory, and without faults in the driver's
    records as far as they are available. The calling process has neither opened the driver nor imported torch."""
    ended = subprocess.run(
        [sys.executable, "-c", CHECKS_GPUS],
        timeout=PATIENCE_S,
        check=False,
        text=True,
        capture_output=True,
        env=dict(os.environ),
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["driver"], found["torch"]) == ([], False)
    statuses = {(name, target): status for name, target, status, _ in found["results"]}
    assert set(statuses.values()) <= {"OK", "SKIPPED"}, found["results"]
    if ON_GPU:
        sure = {("devices", "node"), ("compute", "cuda:0"), ("device memory", "cuda:0")}
        assert {statuses.get(check) for check in sure} == {"OK"}, found["results"]
        assert ("driver", "cuda:0") in statuses
    else:
        assert statuses == {("devices", "node"): "SKIPPED", ("compute", "cpu"): "OK"}


# -- replicas ---------------------------------------------------------------------------------------------------------


def draw_tensor(num_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return random bytes on the host as numbers of a type."""
    generator = torch.Generator().manual_seed(3)
    highest = 2 if dtype == torch.bool else 256
    return torch.randint(0, highest, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_is_the_same_on_every_device(dtype: torch.dtype, device: torch.device) -> None:
    """The device's digest of any element type equals the CPU's."""
    tensor = draw_tensor(8 * 1021, dtype)
    assert int(weigh(tensor.to(device))) == int(weigh(tensor))


@pytest.mark.parametrize(
    "num_bytes",
    [0, 1, 2, 3, 5, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS, 4 * BLOCK_WORDS + 3, 4 * BLOCK_WORDS * PIECE_BLOCKS + 8189],
)
def test_a_digest_of_any_size_is_the_same_on_every_device(num_bytes: int, device: torch.device) -> None:
    """The digests are equal for empty tensors, odd numbers of bytes, and tensors of several blocks and pieces."""
    tensor = draw_tensor(num_bytes)
    on_device = tensor.to(device)
    assert int(weigh(on_device)) == int(weigh(tensor))
    if ON_GPU:
        assert digest_tensors([on_device, on_device]) == [int(weigh(tensor)) % 2**64] * 2


def test_memory_layout_does_not_change_the_device_digest(device: torch.device) -> None:
    """Strides, the offset of a tensor in its storage, and lazy conjugation do not change the digest."""
    tensor = draw_tensor(6 * 10 * 2, torch.bfloat16).view(6, 10)
    expected = int(weigh(tensor))
    on_device = tensor.to(device)
    assert int(weigh(on_device.t().contiguous().t())) == expected
    room = torch.zeros(61, dtype=torch.bfloat16, device=device)
    room[1:] = on_device.reshape(-1)
    assert int(weigh(room[1:])) == expected
    wide = torch.zeros(6, 20, dtype=torch.bfloat16, device=device)
    wide[:, ::2] = on_device
    assert int(weigh(wide[:, ::2])) == expected
    assert int(weigh(on_device.t())) != expected
    number = torch.tensor([1 + 2j])
    assert int(weigh(number.to(device).conj())) == int(weigh(torch.tensor([1 - 2j])))


def test_the_device_digest_detects_flips_and_swaps(device: torch.device) -> None:
    """One flipped bit, two flipped signs, and two swapped words each change the digest; undoing the change restores
    it."""
    numbers = draw_tensor(4 * (2 * BLOCK_WORDS + 5)).view(torch.int32).to(device)
    before = int(weigh(numbers))
    for places, bit in (((0,), 0), ((BLOCK_WORDS + 3,), 30), ((0, 1), 31), ((7, BLOCK_WORDS + 7), 31)):
        for again in (False, True):
            for place in places:
                numbers[place] ^= -(2**31) if bit == 31 else 1 << bit
            assert (int(weigh(numbers)) == before) == again, (places, bit)
    for first, second in ((0, 1), (5, BLOCK_WORDS + 5)):
        swapped = numbers.clone()
        swapped[first], swapped[second] = numbers[second], numbers[first]
        assert int(weigh(swapped)) != before, (first, second)


@needs_gpu("a CPU does not run behind")
def test_digests_are_queued_without_waiting() -> None:
    """The device's digests are queued like any other work; torch raises if the host waits for the device."""
    tensors = [draw_tensor(size).cuda() for size in (3, 4096, 4 * BLOCK_WORDS + 5)]
    sums = [weigh(tensor) for tensor in tensors]  # the weights are allocated by the first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [weigh(tensor) for tensor in tensors]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(one) for one in again] == [int(one) for one in sums]
