"""What a run of a step changes besides its results, and how it is put back before the step is run again.

Random numbers, gradients, and the buffers that a forward pass changes. Parameters are not among them: the optimizer has
not stepped. Nor is what the script keeps elsewhere and changes within the step.

Gradients are put back without copies: one that was ``None`` becomes ``None``, one that was there and was changed
becomes zero, as ``zero_grad()`` leaves it. So what is accumulated into a gradient must be accumulated within one run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outlast.numerics.buffers import Buffers
from outlast.runtime.random_numbers import RandomSnapshot

__all__ = ["Rewinder"]


class Rewinder:
    """Remember the beginning of a run, and go back to it.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self.random = RandomSnapshot()
        self._gradients = _Gradients()
        self._buffers = Buffers()

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Put back gradients and buffers of these modules too; a module that is known already changes nothing."""
        for module in modules:
            self._gradients.add(module)
            self._buffers.add(module)

    def begin(self) -> None:
        """Remember what there is at the beginning of a run.

        Blocks: never; costs about 10 us, 50 ns for each parameter, and a copy of the buffers that runs change.
        """
        self.random.take()
        self._gradients.begin()
        self._buffers.begin()

    def end_run(self) -> None:
        """Learn from a run that is over.

        Blocks: in the first runs, until the device has computed the buffers.
        """
        self._buffers.end_run()

    def rewind(self) -> None:
        """Go back to where :meth:`begin` was called."""
        self.random.restore()
        self._gradients.rewind()
        self._buffers.rewind()


class _Gradients:
    def __init__(self) -> None:
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._listed: list[torch.nn.Parameter] = []
        self._versions: list[int | None] = []

    def add(self, module: torch.nn.Module) -> None:
        self._parameters.update((id(parameter), parameter) for parameter in module.parameters())
        self._listed = list(self._parameters.values())

    def begin(self) -> None:
        self._versions = [None if (grad := one.grad) is None else grad._version for one in self._listed]

    def rewind(self) -> None:
        with torch.no_grad():
            for parameter, version in zip(self._listed, self._versions, strict=True):
                if version is None:
                    parameter.grad = None
                elif parameter.grad is not None and parameter.grad._version != version:
                    parameter.grad.zero_()
