"""Batches of a step, to be given again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from outlast.numerics.plain import fingerprint, tensors_in
from outlast.runtime.random_numbers import RandomSnapshot, restore_random

__all__ = ["Batches", "ReplayableIterator", "as_iterators"]

T = TypeVar("T")


class ReplayableIterator(Generic[T]):
    """An iterator that gives the batches of a step again when the step is run again.

    It holds them by reference until the step is over: nothing is copied. A step that changes its batch in place gets
    the changed one; :meth:`changed` says so. Where drawing a batch draws random numbers, giving it again moves them on
    as far.

    Args:
        batches: What to draw from.

    Thread: that of the training loop.
    """

    def __init__(self, batches: Iterable[T]) -> None:
        self._source = iter(batches)
        self._drawn: list[T] = []
        self._versions: list[tuple[int, ...]] = []
        self._random = RandomSnapshot()
        self._random_after: list[dict[str, Any]] = []
        self._given = 0
        self.is_recording = True
        """Whether a step's batches may be wanted again."""
        self._replayed: tuple[str, int] | None = None
        self._skip: tuple[str, int] | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self.is_recording:
            return self._draw()
        if self._given == len(self._drawn):
            batch = self._draw()
            self._drawn.append(batch)
            self._versions.append(_versions(batch))
            self._random.take()
            self._random_after.append(self._random.state)
        else:
            restore_random(self._random_after[self._given])
        self._given += 1
        return self._drawn[self._given - 1]

    @property
    def drawn(self) -> Sequence[T]:
        """The batches of this step so far, in order."""
        return tuple(self._drawn)

    @property
    def random_after(self) -> Sequence[dict[str, Any]]:
        """Random numbers after each of them was drawn."""
        return tuple(self._random_after)

    def changed(self) -> bool:
        """Return whether the step changed a tensor of its batches in place."""
        return any(_versions(batch) != seen for batch, seen in zip(self._drawn, self._versions, strict=True))

    def rewind(self) -> None:
        """Give this step's batches again, from the first."""
        self._given = 0

    def end_step(self) -> None:
        """Forget the batches that were given; what was drawn and not given again comes next."""
        del self._drawn[: self._given], self._versions[: self._given], self._random_after[: self._given]
        self._given = 0
        if self._replayed is not None:
            self._skip, self._replayed = self._replayed, None

    def replay(self, batches: Sequence[T], random_after: Sequence[dict[str, Any]]) -> None:
        """Give these batches to the step that begins, instead of others.

        Args:
            batches: See above.
            random_after: Random numbers after each of them was drawn.

        Whether the source stands before them or behind them depends on what the script saved and when. So the first
        batch that is drawn from it afterwards is looked at: if it is the first of these, as many are passed over.
        """
        self._drawn, self._given = list(batches), 0
        self._versions = [_versions(batch) for batch in batches]
        self._random_after = list(random_after)
        self._replayed = (fingerprint(batches[0]), len(batches)) if batches else None

    def _draw(self) -> T:
        batch = next(self._source)
        if self._skip is not None:
            (first, number), self._skip = self._skip, None
            if fingerprint(batch) == first:
                for _ in range(number):
                    batch = next(self._source)
        return batch


Batches: TypeAlias = "ReplayableIterator[Any] | Sequence[ReplayableIterator[Any] | None] | None"
"""What a step draws from: one iterator, several, or none (a rank that gets its data from another one)."""


def as_iterators(batches: Batches) -> tuple[ReplayableIterator[Any], ...]:
    """Return the iterators of a step.

    Raises:
        TypeError: One of them cannot be rewound.
    """
    several = batches if isinstance(batches, list | tuple) else [batches]
    for one in several:
        if one is not None and not isinstance(one, ReplayableIterator):
            raise TypeError(
                f"a {type(one).__name__} cannot be rewound; wrap it once, before the first step: "
                "outlast.numerics.ReplayableIterator(batches)"
            )
    return tuple(one for one in several if isinstance(one, ReplayableIterator))


def _versions(batch: Any) -> tuple[int, ...]:
    # A tensor made in inference mode counts no changes.
    return tuple(tensor._version for tensor in tensors_in(batch) if not torch.is_inference(tensor))
