"""Random numbers of a data loader's workers that depend on the batch alone.

A worker's generators are seeded once, when it starts, and what it draws then depends on all batches that it has made. A
training that resumes within an epoch does not make those again. So each batch brings a seed of its own: the indices
are sent to the worker as :class:`SeededBatch`, which seeds the worker's generators as it arrives there, before the
dataset is asked for the samples.

Rejected: to save each worker's generators with every batch and to give them back to the workers that take over. It
costs more, and batches would still be made by other workers than before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, get_worker_info


class SeededBatch(list[Any]):
    """The indices of one batch; a loader's worker gets a plain list of them, and seeds its generators.

    Args:
        indices: The samples.
        seed: Whole numbers from 0 that tell this batch from all others.
    """

    def __init__(self, indices: Sequence[Any], seed: Sequence[int]) -> None:
        super().__init__(indices)
        self._seed = tuple(seed)

    def __reduce__(self) -> tuple[Callable[..., list[Any]], tuple[Any, ...]]:
        return _arrive, (list(self), self._seed)


def _arrive(indices: list[Any], seed: tuple[int, ...]) -> list[Any]:
    if get_worker_info() is not None:
        import numpy as np
        import torch

        words = np.random.SeedSequence(seed).generate_state(8)
        random.seed(words[:4].tobytes())
        np.random.seed(words[4:6])
        torch.default_generator.manual_seed(int.from_bytes(words[6:].tobytes()) >> 1)
    return indices


class SeededBatches(BatchSampler):
    """A batch sampler whose batches bring a seed to the workers; in all else it is the given one.

    Args:
        batches: The batch sampler.
        seed: Returns whole numbers from 0 that tell this rank's epoch from all others; called as an epoch begins.
    """

    def __init__(self, batches: Any, seed: Callable[[], Sequence[int]]) -> None:
        self._batches, self._seed = batches, seed

    def __iter__(self) -> Iterator[list[Any]]:
        of_epoch = self._seed()
        for number, indices in enumerate(self._batches):
            yield SeededBatch(indices, (*of_epoch, number))

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)
