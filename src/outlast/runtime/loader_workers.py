"""Random numbers of data-loader workers that depend on the batch alone.

A worker's generators are seeded once, at its start, so its numbers depend on all its earlier batches, which a training
that resumes within an epoch does not repeat. So each batch carries a seed: the indices are sent to the worker as
:class:`SeededBatch`, which seeds the worker's generators on arrival, before the dataset is asked for the samples.

Rejected: saving each worker's generators with every batch and restoring them in the new workers. It costs more, and
batches would still be made by other workers than before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, get_worker_info


class SeededBatch(list[Any]):
    """The indices of one batch; the worker receives a plain list and seeds its generators.

    Args:
        seed: Whole numbers from 0 that are unique to this batch.
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
    """A batch sampler that adds a seed to the batches of another one.

    Args:
        seed: Returns whole numbers from 0 that are unique to this rank and epoch; called at the start of an epoch.
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
