"""The effects of faults on a model: changed elements of weights, gradients and activations, or slower forwards.

Changes affect this rank's memory: the local part of a distributed tensor. A complex number counts as two elements.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from outlast import clock
from outlast.chaos.plan import FaultKind, FaultTarget, Occurrence
from outlast.config.base import nearest
from outlast.errors import ConfigError

T = TypeVar("T")


def choose_tensor(state: Mapping[str, Any], occurrence: Occurrence) -> tuple[str, torch.Tensor] | None:
    """Return name and tensor of the weight or gradient that a fault changes; ``None``: none matches.

    Raises:
        ConfigError: The fault's pattern matches no weight of this rank.
    """

    def pick(weight: torch.Tensor) -> torch.Tensor | None:
        tensor = weight.grad if occurrence.fault.target == FaultTarget.GRADIENT else weight
        return tensor if tensor is not None and can_damage(occurrence.fault.kind, tensor) else None

    return _choose(dict(_weights(state)), occurrence, pick)


def choose_module(state: Mapping[str, Any], occurrence: Occurrence) -> tuple[str, torch.nn.Module] | None:
    """Return name and module whose output a fault changes; without a pattern, one without submodules.

    Raises:
        ConfigError: The fault's pattern matches no module of this rank.
    """

    def pick(module: torch.nn.Module) -> torch.nn.Module | None:
        return module if occurrence.fault.tensor is not None or next(module.children(), None) is None else None

    return _choose(dict(_named_modules(state)), occurrence, pick)


def replace_first(output: Any, change: Callable[[torch.Tensor], torch.Tensor | None]) -> tuple[Any, bool]:
    """Return a copy of a module's output with its first changeable tensor replaced, and whether there was one.

    Args:
        output: A tensor, or nested tuples, lists and dicts of tensors; not modified.
        change: Returns the replacement of a tensor; ``None``: try the next one.
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


def _choose(named: Mapping[str, T], occurrence: Occurrence, pick: Callable[[T], T | None]) -> tuple[str, T] | None:
    """Draw one of the names whose value ``pick`` accepts, and return it with the result of ``pick``."""
    pattern = occurrence.fault.tensor
    names = sorted(name for name in named if pattern is None or fnmatchcase(name, pattern))
    if pattern is not None and not names:
        raise ConfigError(f"tensor={pattern!r} fits no name on this rank; {nearest(pattern, named)}")
    found = [(name, part) for name in names if (part := pick(named[name])) is not None]
    return found[occurrence.draw(len(found), "tensor")] if found else None


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


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type with the bits of an element, by its size in bytes."""


@dataclass(frozen=True, slots=True)
class Damage:
    """The change of a tensor."""

    element: int
    bit: int | None
    before: float
    after: float


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a tensor, without autograd history; complex numbers as pairs."""
    with torch.no_grad():
        to_local = getattr(tensor, "to_local", None)
        local: torch.Tensor = (tensor if to_local is None else to_local()).detach()
        return torch.view_as_real(local) if local.is_complex() else local


def can_damage(kind: str, tensor: torch.Tensor) -> bool:
    """Return whether a fault of a kind can change the tensor: it has elements, and its type has NaN and a sign."""
    if kind != FaultKind.BIT_FLIP and not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return _local_part(tensor).numel() > 0


def damage(tensor: torch.Tensor, occurrence: Occurrence) -> Damage:
    """Apply a numeric fault to a tensor, in place.

    Args:
        tensor: A tensor that :func:`can_damage` accepts; autograd does not see the change.
        occurrence: The fault, and the iteration for the draws of element and bit.

    Raises:
        ConfigError: The fault names an element or a bit that the tensor does not have.
    """
    fault, local = occurrence.fault, _local_part(tensor)
    element = fault.element
    if element is None:
        element = _draw_element(local, occurrence)
    elif element >= local.numel():
        raise ConfigError(
            f"element={element} does not exist, {fault.describe()}: there are {local.numel()} on this rank"
        )
    place = local[_position(element, local.shape)]
    bit, before = None, place.item()
    if fault.kind == FaultKind.BIT_FLIP:
        num_bits = 8 * place.element_size()
        bit = occurrence.draw(num_bits, "bit") if fault.bit is None else fault.bit
        if bit >= num_bits:
            raise ConfigError(f"bit={bit} does not exist, {fault.describe()}: {place.dtype} has {num_bits} bits")
        _flip_bit(place, bit)
    elif fault.kind == FaultKind.SIGN_FLIP:
        _flip_bit(place, 8 * place.element_size() - 1)
    else:
        place.copy_(torch.tensor(math.nan if fault.kind == FaultKind.NAN else math.inf))
    return Damage(element, bit, before, place.item())


def _flip_bit(place: torch.Tensor, bit: int) -> None:
    """Flip one bit, counted from the least significant, of a zero-dimensional tensor, in place."""
    integer = _INTEGERS[place.element_size()]
    mask = 1 << bit
    if integer != torch.uint8 and bit == 8 * place.element_size() - 1:
        mask = -mask  # the sign bit of a signed integer alone
    place.view(integer).bitwise_xor_(torch.tensor(mask, dtype=integer, device=place.device))


def _draw_element(local: torch.Tensor, occurrence: Occurrence) -> int:
    if occurrence.fault.kind == FaultKind.SIGN_FLIP:
        nonzero = local.reshape(-1).nonzero()  # the sign of 0 has no effect
        if len(nonzero):
            return int(nonzero[occurrence.draw(len(nonzero), "element")].item())
    return occurrence.draw(local.numel(), "element")


def _position(element: int, shape: torch.Size) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        position.append(index)
    return tuple(reversed(position))


_NUM_LAST = 9
"""Number of a module's last forwards whose median duration counts."""


class Slowing:
    """Stretch the forward of every module of a state, on the host.

    The rank sleeps, so that other ranks of the machine keep their speed. The time is a multiple of the median of a
    module's last forwards, so that a single disturbed one is not multiplied.

    Args:
        state: A mapping with the modules; other values are ignored. A module in ``DistributedDataParallel`` is
            unwrapped,
            so that waiting for other ranks is not stretched.
        factor: Factor of a forward's duration; above 1.
        duration_s: Seconds until it ends by itself; ``None``: never.

    Thread: that of the training loop.
    """

    def __init__(self, state: Mapping[str, Any], *, factor: float, duration_s: float | None) -> None:
        self._factor = factor
        self._ends_s = float("inf") if duration_s is None else clock.now_s() + duration_s
        self._began_s = 0.0
        self._lasted_s: dict[torch.nn.Module, deque[float]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for _, module in _modules(state):
            self._handles.append(module.register_forward_pre_hook(self._begin))
            # Before the script's hooks, so that a hook that times the forward includes the sleep.
            self._handles.append(module.register_forward_hook(self._end, prepend=True))

    @property
    def slows(self) -> bool:
        """Whether a module is slowed."""
        return bool(self._handles)

    def remove(self) -> None:
        """Restore the modules' speed. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, *_: object) -> None:
        self._began_s = clock.now_s()

    def _end(self, module: torch.nn.Module, *_: object) -> None:
        now_s = clock.now_s()
        if now_s < self._ends_s:
            lasted_s = self._lasted_s.setdefault(module, deque(maxlen=_NUM_LAST))
            lasted_s.append(now_s - self._began_s)
            time.sleep((self._factor - 1) * sorted(lasted_s)[(len(lasted_s) - 1) // 2])
