"""Change one element of a tensor in place, and say what it was and what it is.

Works on the memory of this rank: of a distributed tensor, on its local part. Complex numbers count as two elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outlast.chaos.draw import Occurrence
from outlast.chaos.fault import FaultKind
from outlast.errors import ConfigError

__all__ = ["Damage", "can_damage", "damage", "flip_bit", "local_part"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type that shows the bits of an element, by its size in bytes."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What was done to a tensor."""

    element: int
    bit: int | None
    before: float
    after: float


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank behind a tensor, without its history; complex numbers as pairs."""
    with torch.no_grad():
        to_local = getattr(tensor, "to_local", None)
        local: torch.Tensor = (tensor if to_local is None else to_local()).detach()
        return torch.view_as_real(local) if local.is_complex() else local


def can_damage(kind: str, tensor: torch.Tensor) -> bool:
    """Say whether a fault of this kind can befall the tensor: not an empty one, NaN and sign only where there are."""
    if kind != FaultKind.BIT_FLIP and not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return local_part(tensor).numel() > 0


def damage(tensor: torch.Tensor, occurrence: Occurrence) -> Damage:
    """Let a numeric fault befall a tensor, in place.

    Args:
        tensor: One that :func:`can_damage` accepts; its history does not see the change.
        occurrence: The fault, and the iteration for which element and bit are drawn.

    Raises:
        ConfigError: The fault names an element or a bit that the tensor does not have.
    """
    fault, local = occurrence.fault, local_part(tensor)
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
        flip_bit(place, bit)
    elif fault.kind == FaultKind.SIGN_FLIP:
        flip_bit(place, 8 * place.element_size() - 1)
    else:
        place.copy_(torch.tensor(math.nan if fault.kind == FaultKind.NAN else math.inf))
    return Damage(element, bit, before, place.item())


def flip_bit(place: torch.Tensor, bit: int) -> None:
    """Flip one bit, counted from the least significant, of a tensor without dimensions, in place."""
    integer = _INTEGERS[place.element_size()]
    mask = 1 << bit
    if integer != torch.uint8 and bit == 8 * place.element_size() - 1:
        mask = -mask  # the sign bit of a signed integer alone
    place.view(integer).bitwise_xor_(torch.tensor(mask, dtype=integer, device=place.device))


def _draw_element(local: torch.Tensor, occurrence: Occurrence) -> int:
    if occurrence.fault.kind == FaultKind.SIGN_FLIP:
        nonzero = local.reshape(-1).nonzero()  # the sign of 0 changes no result
        if len(nonzero):
            return int(nonzero[occurrence.draw(len(nonzero), "element")].item())
    return occurrence.draw(local.numel(), "element")


def _position(element: int, shape: torch.Size) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        position.append(index)
    return tuple(reversed(position))
