"""Digests of a tensor's bytes: 64 bits that differ when a bit, or the order of the bytes, does.

Memory that the CPU can read is digested by xxh3_64, which is faster than memory is read by one core. What lies on an
accelerator is digested there, as copying it to the host would take longer than the step: :func:`weigh` is a sum of all
words, each times an odd pseudo-random weight of its position. Integer sums do not depend on their order, so that it is
the same on every device.

Words are 32 bits wide and weights 64. With words of 64 bits the highest bit of a word would count only whether it was
flipped an even number of times, whatever the weights are (odd x 2**63 is 2**63): two flipped signs would cancel.
``torch.hash_tensor`` is no alternative: it is an XOR, which sees neither order nor equal flips in two places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import xxhash

__all__ = ["digest_tensors", "weigh"]

BLOCK_WORDS = 1 << 17
"""Words that share a factor, beside a weight of their place in the block: 1 MiB of weights for tensors of any size."""
PIECE_BLOCKS = 32
"""Blocks that are weighed at a time: 32 MiB of products, which the cache of an accelerator holds."""
_MASK = (1 << 64) - 1


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the digest of each tensor's elements, in the order of its indices; 0 to 2**64 - 1.

    Element type and shape are not part of it. Digests compare among tensors on devices of the same type.

    Args:
        tensors: Strided tensors on any device, of any element type, shape and stride, empty ones too.

    Blocks: for one synchronisation with each accelerator that holds some of them.
    """
    found = [0] * len(tensors)
    elsewhere: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            found[index] = xxhash.xxh3_64_intdigest(_bytes(tensor).numpy().data)
        else:
            elsewhere.setdefault(tensor.device, []).append(index)
    for indices in elsewhere.values():
        sums = torch.stack([weigh(tensors[index]) for index in indices]).tolist()
        for index, value in zip(indices, sums, strict=True):
            found[index] = value & _MASK
    return found


@torch.no_grad()
def weigh(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 32-bit words, each times the weight of its position; wraps at 64 bits.

    A single changed word always changes it, since a weight is odd; a swap of two words, or equal changes of two, leave
    it as it is for about one pair of positions in 2**32.

    Returns:
        An int64 tensor without dimensions on the tensor's device; nothing is waited for.
    """
    data = _bytes(tensor)
    if data.storage_offset() % 4:
        data = data.clone()  # words cannot be read from there
    num_words, rest = divmod(data.numel(), 4)
    if rest:
        last = torch.zeros(4, dtype=torch.uint8, device=data.device)
        last[:rest] = data[num_words * 4 :]
        total = _weigh_words(last.view(torch.int32), num_words)
    else:
        total = torch.zeros((), dtype=torch.int64, device=data.device)
    words = data[: num_words * 4].view(torch.int32)
    step = BLOCK_WORDS * PIECE_BLOCKS
    for start in range(0, num_words, step):
        total += _weigh_words(words[start : start + step], start)
    return total


def _weigh_words(words: torch.Tensor, start: int) -> torch.Tensor:
    """Weigh words of which the first is number ``start`` of its tensor."""
    weights = _weights(words.device)
    block, offset = divmod(start, BLOCK_WORDS)
    num_blocks = words.numel() // BLOCK_WORDS if offset == 0 else 0
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if num_blocks:
        whole = words[: num_blocks * BLOCK_WORDS].view(num_blocks, BLOCK_WORDS)
        factors = _scatter(torch.arange(block, block + num_blocks, device=words.device))
        total += ((whole * weights).sum(dim=1) * factors).sum()
    rest = words[num_blocks * BLOCK_WORDS :]
    if rest.numel():
        factor = _scatter(torch.tensor(block + num_blocks, device=words.device))
        total += (rest * weights[offset : offset + rest.numel()]).sum() * factor
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return the weights of the places in a block."""
    return _scatter(torch.arange(BLOCK_WORDS, device=device) + (1 << 40))


def _scatter(numbers: torch.Tensor) -> torch.Tensor:
    """Return an odd pseudo-random number for each number: the finaliser of SplitMix64 (Steele and others, 2014)."""
    mixed = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: torch.Tensor, places: int) -> torch.Tensor:
    """Shift to the right with zeros from the left; int64's own shift repeats the sign."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes in one dimension: a view where they lie in order, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
