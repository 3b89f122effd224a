"""Warn of a data order that a restart cannot repeat: a shuffled loader that uses the global generator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


def warn_of_global_order() -> Callable[[], None]:
    """Log once when a ``RandomSampler`` without a generator starts; return a function that ends the check.

    Such a sampler's order depends on the global generator at that moment: a restart within the epoch gets another
    order, so that samples are trained twice or not at all. Subclasses, such as Accelerate's, have other rules.
    """
    from torch.utils.data import RandomSampler

    original = RandomSampler.__iter__
    has_warned = False

    def watched(sampler: RandomSampler) -> Iterator[int]:
        nonlocal has_warned
        if not has_warned and type(sampler) is RandomSampler and sampler.generator is None:
            has_warned = True
            log.warning(
                "a DataLoader with shuffle=True draws its order from torch's global generator (RandomSampler with "
                "generator=None): after a restart within an epoch the order is another one; give the loader "
                "generator=torch.Generator(), and seed that with the epoch"
            )
        return original(sampler)

    RandomSampler.__iter__ = watched  # type: ignore[method-assign]

    def end() -> None:
        if RandomSampler.__iter__ is watched:
            RandomSampler.__iter__ = original  # type: ignore[method-assign]

    return end
