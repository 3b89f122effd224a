"""Choose the tensors of a save that are examined for infinities and NaN.

A buffer that held infinities and no NaN when saving began, such as a causal mask, is not examined while its bytes stay
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outlast.checkpoint.save import Save
from outlast.checkpoint.shard import MAY_BE_INFINITE, TensorSpan, digest, is_finite
from outlast.checkpoint.state import FlatState
from outlast.runtime.nested import find_kind

MAX_NAMED = 3
"""Tensors per rank, and ranks, that a warning lists."""
_WITH_INFINITIES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2})


def infinite_buffers(state: Mapping[str, Any], flat: FlatState) -> dict[str, str]:
    """Return the digests of the modules' buffers that hold infinities and no NaN, by their name in a save.

    Blocks: until the device has computed the buffers.
    """
    buffers = {
        buffer.data_ptr(): buffer
        for _, module in find_kind(state, torch.nn.Module)
        for buffer in module.buffers()
        if type(buffer) is torch.Tensor
        and buffer.dtype in _WITH_INFINITIES
        and buffer.is_contiguous()
        and buffer.numel()
    }
    return {
        named.name: digest(buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        for named in flat.tensors
        if (buffer := buffers.get(named.tensor.data_ptr())) is not None
        and buffer.shape == named.tensor.shape
        and bool((numbers := buffer.float() if buffer.element_size() == 1 else buffer).isinf().any())
        and not bool(numbers.isnan().any())
    }


def examined(save: Save) -> list[TensorSpan]:
    """Return the tensors to examine for infinities and NaN. The save must be staged."""
    tensors = [tensor for tensor in save.tensors if tensor.dtype in MAY_BE_INFINITE]
    if not save.infinite or save.arena is None:
        return tensors
    with save.arena.view(save.num_bytes) as image:

        def is_unchanged(tensor: TensorSpan) -> bool:
            if (known := save.infinite.get(tensor.name)) is None:
                return False
            with image[tensor.offset : tensor.offset + tensor.num_bytes] as data:
                return digest(data) == known

        return [tensor for tensor in tensors if not is_unchanged(tensor)]


def find_infinite(save: Save) -> tuple[str, ...]:
    found: list[str] = []
    if save.arena is None:
        return ()
    tensors = examined(save)
    with save.arena.view(save.num_bytes) as image:
        for tensor in tensors:
            with image[tensor.offset : tensor.offset + tensor.num_bytes] as data:
                if len(found) < MAX_NAMED and not is_finite(data, tensor.dtype):
                    found.append(tensor.name)
    return tuple(found)
