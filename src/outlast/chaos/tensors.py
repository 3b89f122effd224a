"""Find by name what a numeric fault can befall: weights, gradients and modules of a script's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from outlast.chaos.damage import can_damage
from outlast.chaos.draw import Occurrence
from outlast.config.base import nearest
from outlast.errors import ConfigError

__all__ = ["choose_gradient", "choose_module", "choose_weight", "replace_first"]

T = TypeVar("T")


def choose_weight(state: Mapping[str, Any], occurrence: Occurrence) -> tuple[str, torch.Tensor] | None:
    """Return name and tensor of the weight that a fault befalls; ``None`` when none fits.

    Raises:
        ConfigError: No weight of this rank has a name that fits the fault's pattern.
    """
    return _choose(dict(_weights(state)), occurrence, lambda weight: can_damage(occurrence.fault.kind, weight))


def choose_gradient(state: Mapping[str, Any], occurrence: Occurrence) -> tuple[str, torch.Tensor] | None:
    """Return name and tensor of the gradient that a fault befalls; ``None`` when there is none that fits.

    Raises:
        ConfigError: No weight of this rank has a name that fits the fault's pattern.
    """

    def has_gradient(weight: torch.Tensor) -> bool:
        return weight.grad is not None and can_damage(occurrence.fault.kind, weight.grad)

    chosen = _choose(dict(_weights(state)), occurrence, has_gradient)
    if chosen is None or chosen[1].grad is None:
        return None
    return chosen[0], chosen[1].grad


def choose_module(state: Mapping[str, Any], occurrence: Occurrence) -> tuple[str, torch.nn.Module] | None:
    """Return name and module whose output a fault befalls; without a pattern, one that has no modules within.

    Raises:
        ConfigError: No module of this rank has a name that fits the fault's pattern.
    """
    any_will_do = occurrence.fault.tensor is not None
    return _choose(
        dict(_named_modules(state)), occurrence, lambda module: any_will_do or next(module.children(), None) is None
    )


def replace_first(output: Any, change: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[Any, bool]:
    """Return a module's output with its first tensor that can be changed replaced, and whether there was one.

    Args:
        output: A tensor, or tuples, lists and dicts of some; nothing of it is changed.
        change: Returns what a tensor is replaced by; ``None``: go on to the next.
    """
    if isinstance(output, torch.Tensor):
        changed = change(output)
        return (output, False) if changed is None else (changed, True)
    if isinstance(output, Mapping):
        for key, value in output.items():
            new, done = replace_first(value, change)
            if done:
                copy = output.copy() if hasattr(output, "copy") else dict(output)
                copy[key] = new
                return copy, True
    elif isinstance(output, list | tuple):
        for index, value in enumerate(output):
            new, done = replace_first(value, change)
            if done:
                parts = [*output[:index], new, *output[index + 1 :]]
                return (type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)), True
    return output, False


def _choose(named: Mapping[str, T], occurrence: Occurrence, fits: Callable[[T], bool]) -> tuple[str, T] | None:
    pattern = occurrence.fault.tensor
    names = sorted(name for name in named if pattern is None or fnmatchcase(name, pattern))
    if pattern is not None and not names:
        raise ConfigError(f"tensor={pattern!r} fits no name on this rank; {nearest(pattern, named)}")
    names = [name for name in names if fits(named[name])]
    if not names:
        return None
    name = names[occurrence.draw(len(names), "tensor")]
    return name, named[name]


def _modules(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    for key, value in state.items():
        if isinstance(value, DistributedDataParallel):
            yield key, value.module
        elif isinstance(value, torch.nn.Module):
            yield key, value


def _named_modules(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    for key, module in _modules(state):
        for name, part in module.named_modules():
            yield (f"{key}.{name}" if name else key), part


def _weights(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, module in _modules(state):
        for name, weight in module.named_parameters():
            yield f"{key}.{name}", weight
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield key, value
