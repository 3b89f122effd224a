"""The kernel that digests chunks on a device: its tables, and devices without it.

Its results are compared with the host on a real device, in ``tests/gpu/test_device_loading.py``.
"""

from __future__ import annotations

import logging
import random
import re

import pytest
import torch
import xxhash

from outlast.checkpoint.shard import CHUNK_BYTES
from outlast.runtime import device_digest
from outlast.runtime.device_digest import find_digests, kernel_source

WORD = (1 << 64) - 1


def tables(source: str) -> dict[str, list[int]]:
    """Return the kernel's tables of constants, by name."""
    found = re.findall(r"([A-Z]+)\[\d+\] = \{([^}]*)\}", source)
    return {name: [int(word.strip().removesuffix("ULL"), 16) for word in text.split(",")] for name, text in found}


def digest_by(constants: dict[str, list[int]], data: bytes) -> int:
    """Digest some KiB with the kernel's tables, as XXH3 is specified."""
    sums, num_blocks = list(constants["START"]), len(data) // 1024
    for block in range(num_blocks):
        is_end = block == num_blocks - 1
        for stripe in range(16):
            for place in range(8):
                at = block * 1024 + stripe * 64 + place * 8
                value = int.from_bytes(data[at : at + 8], "little")
                is_last = is_end and stripe == 15
                keyed = value ^ (constants["LAST"][place] if is_last else constants["SECRET"][stripe + place])
                sums[place ^ 1] += value
                sums[place] += (keyed & 0xFFFFFFFF) * (keyed >> 32)
        sums = [one & WORD for one in sums]
        if not is_end:
            pairs = zip(sums, constants["SECRET"][16:], strict=True)
            sums = [((one ^ (one >> 47) ^ key) * 0x9E3779B1) & WORD for one, key in pairs]
    mixed = [one ^ key for one, key in zip(sums, constants["MERGED"], strict=True)]
    products = [mixed[place] * mixed[place + 1] for place in range(0, 8, 2)]
    total = (len(data) * 0x9E3779B185EBCA87 + sum((one & WORD) ^ (one >> 64) for one in products)) & WORD
    total = ((total ^ (total >> 37)) * 0x165667919E3779F9) & WORD
    return total ^ (total >> 32)


@pytest.mark.parametrize("num_kib", [1, 2, 5])
def test_kernel_tables_match_xxh3(num_kib: int) -> None:
    """A digest computed with the kernel's constants equals the digest in a shard's manifest."""
    data = random.Random(num_kib).randbytes(num_kib * 1024)
    assert digest_by(tables(kernel_source(len(data))), data) == xxhash.xxh3_64_intdigest(data)


def test_chunk_size_fits_the_kernel() -> None:
    """A chunk is a whole number of the pieces that the kernel reads ahead."""
    numbers = dict(re.findall(r"#define (BLOCKS|AHEAD) (\d+)\n", kernel_source(CHUNK_BYTES)))
    assert int(numbers["BLOCKS"]) * 1024 == CHUNK_BYTES
    assert int(numbers["BLOCKS"]) % int(numbers["AHEAD"]) == 0


def test_cpu_has_no_digest_kernel() -> None:
    """A device whose memory is the host's has no kernel."""
    assert find_digests(torch.device("cpu"), CHUNK_BYTES) is None


def test_host_digests_if_the_kernel_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If torch has no NVRTC, or one that is too old for the device, compilation is tried once and one line reports
    that the host digests."""
    devices = []

    def architecture_of(device: torch.device) -> str:
        devices.append(device)
        return "sm_999"

    monkeypatch.setattr(device_digest, "architecture_of", architecture_of)
    monkeypatch.setattr(device_digest, "_found", {})
    with caplog.at_level(logging.INFO):
        assert find_digests(torch.device("cpu"), CHUNK_BYTES) is None
        assert find_digests(torch.device("cpu"), CHUNK_BYTES) is None
    assert len(devices) == 1
    assert len([line for line in caplog.messages if line.startswith("the host digests what is loaded")]) == 1
