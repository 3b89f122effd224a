"""The process in which ``outlast bench numerics`` measures digests: one thread, and more bytes than caches hold.

Prints one line of JSON a round: GB/s by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from outlast.bench.measuring import timed
from outlast.numerics.tensor_digest import digest_tensors

NUM_TENSORS = 32
TENSOR_BYTES = 16 << 20
_NUM_PASSES = 3


def _gb_s(work: Callable[[list[torch.Tensor]], object], tensors: list[torch.Tensor]) -> float:
    seconds = min(timed(lambda: work(tensors))[0] for _ in range(_NUM_PASSES))
    return sum(tensor.nbytes for tensor in tensors) / seconds / 1e9


def _hash_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.hash_tensor(tensor) for tensor in tensors]


def main() -> None:
    """Measure; argument: the number of rounds."""
    torch.set_num_threads(1)
    tensors = [torch.randn(TENSOR_BYTES // 2).to(torch.bfloat16) for _ in range(NUM_TENSORS)]
    whole = [tensor.view(torch.int64) for tensor in tensors]
    for _ in range(int(sys.argv[1])):
        found = {
            "digest": _gb_s(digest_tensors, tensors),
            "hash_tensor": _gb_s(_hash_tensors, tensors),
            "hash_tensor_of_int64": _gb_s(_hash_tensors, whole),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
