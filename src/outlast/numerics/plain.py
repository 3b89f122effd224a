"""Nested values that can be stored without running anybody's code: tensors, arrays, numbers, texts, in containers.

Whatever else a batch holds is named, and not stored: to pickle it would mean to run what a file says when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from outlast.runtime.device import training_device

__all__ = ["fingerprint", "give_back", "store", "tensors_in"]

_SCALARS = (type(None), bool, int, float, str, bytes)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def store(value: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a form of a nested value that a checkpoint can hold, and what it cannot.

    Returns:
        The form, which refers to the tensors and does not copy them, and an empty list; or ``None`` and the places and
        types of what cannot be stored.
    """
    problems: list[str] = []
    on_device: list[str] = []
    plain = _store(value, "", on_device, problems)
    return (None, problems) if problems else ({"value": plain, "on_device": on_device}, [])


def give_back(stored: Mapping[str, Any], local_rank: int) -> Any:
    """Return what :func:`store` was given; what was on a device comes to this rank's.

    Args:
        stored: The form.
        local_rank: This rank's on its node.
    """
    return _give_back(stored["value"], "", frozenset(stored["on_device"]), training_device(local_rank))


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that tell one nested value from another; of foreign objects only the type counts.

    Blocks: until the tensors were copied from their device.
    """
    digest = xxhash.xxh3_64()
    _digest(value, digest)
    return digest.hexdigest()


def _store(value: Any, path: str, on_device: list[str], problems: list[str]) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is torch.Tensor and value.layout == torch.strided and value.device.type != "meta":
        if not (value.is_quantized or value.requires_grad):
            if value.device.type != "cpu":
                on_device.append(path)
            return value
    elif kind is np.ndarray and value.dtype.kind in "biuf" and value.dtype.isnative:
        return value
    elif kind is dict and all(type(key) in _SCALARS for key in value):
        return {key: _store(inner, f"{path}.{key}", on_device, problems) for key, inner in value.items()}
    elif kind is list or kind is tuple:
        return kind(_store(inner, f"{path}.{index}", on_device, problems) for index, inner in enumerate(value))
    problems.append(f"{path.removeprefix('.') or 'the batch'} of type {kind.__name__}")
    return None


def _give_back(value: Any, path: str, on_device: frozenset[str], device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device) if path in on_device else value
    if isinstance(value, dict):
        return {key: _give_back(inner, f"{path}.{key}", on_device, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_give_back(inner, f"{path}.{i}", on_device, device) for i, inner in enumerate(value))
    return value


def _digest(value: Any, digest: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.layout == torch.strided and type(value) is torch.Tensor and value.device.type != "meta":
            data = value.detach().cpu().contiguous().reshape(-1)
            digest.update(data.view(torch.uint8).numpy() if data.numel() else b"")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes() if value.dtype.kind in "biufc" else b"")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            digest.update(repr(key).encode())
            _digest(inner, digest)
    elif isinstance(value, list | tuple):
        for inner in value:
            _digest(inner, digest)
    elif isinstance(value, _SCALARS):
        digest.update(repr(value).encode())
