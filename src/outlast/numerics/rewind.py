"""What a run of a step changes besides its results, and how it is put back before the step is run again.

Random numbers, gradients, and the buffers that a forward pass changes. Parameters are not among them: the optimizer has
not stepped. Nor is what the script keeps elsewhere and changes within the step.

Gradients are put back without copies: one that was ``None`` becomes ``None``, one that was there and was changed
becomes zero, as ``zero_grad()`` leaves it. So what is accumulated into a gradient must be accumulated within one run.

A buffer, such as BatchNorm's statistics, is copied only where that is needed: which ones a run changes is learned in
the first runs, and again when the module goes from ``eval()`` to ``train()`` or back, by torch's version counter and by
value. A copy is good for as long as the counter stands still. BatchNorm's statistics change without it (torch 2.13), as
does what is changed through ``.data``: what was seen to change so is copied before every run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from outlast.runtime.device import RandomSnapshot

__all__ = ["Rewinder"]

log = logging.getLogger(__name__)
LEARNING_RUNS = 2
"""Runs in which every buffer is copied and compared."""


class Rewinder:
    """Remember the beginning of a run, and go back to it.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self.random = RandomSnapshot()
        self._gradients = _Gradients()
        self._buffers = _Buffers()

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


@dataclass(slots=True)
class _WatchedBuffer:
    """One buffer of one module."""

    owner: dict[str, torch.Tensor | None]
    name: str
    label: str
    tensor: torch.Tensor | None = None
    """The buffer at the beginning of the run."""
    version: int = -1
    """Its version then."""
    copy: torch.Tensor | None = None
    """Its values then, if they are known; ``None`` also where there was no buffer."""
    is_known: bool = False
    """Whether it is known what it was then."""
    changes: bool = False
    """Whether runs change it."""
    is_silent: bool = False
    """Whether they change it without a change of its version."""
    changes_outside: bool = False
    """Whether it changes between runs, and no run was seen to change it."""

    def is_same(self) -> bool:
        tensor = self.owner.get(self.name)
        return tensor is self.tensor and _version(tensor) == self.version

    def look(self, *, learning: bool) -> bool:
        """Look at the buffer at the beginning of a run; return whether its values are still to be copied."""
        same = self.is_same()
        if self.is_known and same and not (self.is_silent or learning):
            return False
        if self.is_known and not (self.changes or same):
            # It changed since the last run began, and no run was seen to do it: outside, if that was seen before.
            self.changes_outside = learning or self.changes_outside
            self.changes = not self.changes_outside
        tensor = self.tensor = self.owner.get(self.name)
        self.version = _version(tensor)
        self.is_known = tensor is None or learning or not self.changes_outside
        if tensor is None or not self.is_known:
            self.copy = None
            return False
        if self.copy is None or self.copy.shape != tensor.shape or self.copy.dtype != tensor.dtype:
            self.copy = tensor.detach().clone()
            return False
        return True

    def learn(self) -> None:
        """Compare the buffer at the end of a run."""
        if not self.is_same():
            self.changes = True
        elif self.tensor is not None and self.copy is not None and not _is_equal(self.tensor, self.copy):
            self.changes = self.is_silent = True
        self.changes_outside = self.changes_outside and not self.changes

    def rewind(self) -> bool:
        """Put the buffer back; return ``False`` if it changed and it is not known what it was."""
        if self.is_same() and not self.is_silent:
            return True
        self.changes, self.changes_outside = True, False
        if not self.is_known:
            return False
        self.owner[self.name] = self.tensor
        if self.tensor is not None and self.copy is not None:
            self.tensor.copy_(self.copy)
            self.version = _version(self.tensor)
        return True


class _Buffers:
    """Remember the buffers of modules at the beginning of a run, and put them back.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str], _WatchedBuffer] = {}
        self._modules: list[torch.nn.Module] = []
        self._modes: list[bool] = []
        self._runs_to_learn = 0
        self._silent: list[_WatchedBuffer] = []
        self._others: list[_WatchedBuffer] = []
        self._copies: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, module: torch.nn.Module) -> None:
        """Watch a module's buffers; one that is watched already changes nothing."""
        if any(one is module for one in self._modules):
            return
        self._modules.append(module)
        for prefix, inner in module.named_modules():
            is_silent = isinstance(inner, torch.nn.modules.batchnorm._NormBase)
            owner: dict[str, Any] = inner._buffers
            for name in owner:
                label = f"{prefix}.{name}" if prefix else name
                slot = _WatchedBuffer(owner, name, label, is_silent=is_silent, changes=is_silent)
                self._slots.setdefault((id(owner), name), slot)
        self._learn_anew()

    def begin(self) -> None:
        """Remember what there is.

        Blocks: never; costs 0.2 us for each buffer, and a copy of those that runs change.
        """
        if [module.training for module in self._modules] != self._modes:
            self._learn_anew()
        if self._runs_to_learn:
            self._copy([slot for slot in self._slots.values() if slot.look(learning=True)])
            return
        copied = [slot for slot in self._others if slot.look(learning=False)]
        if all(slot.owner.get(slot.name) is slot.tensor for slot in self._silent):
            # Here comes every step of a model with BatchNorm, with hundreds of small buffers.
            if self._sources:
                with torch.no_grad():
                    torch._foreach_copy_(self._copies, self._sources)
        else:
            copied += [slot for slot in self._silent if slot.look(learning=False)]
            self._list_silent()
        self._copy(copied)

    def end_run(self) -> None:
        """Learn from a run that is over, if there is something to learn.

        Blocks: in the first runs, until the device has computed it.
        """
        if self._runs_to_learn:
            for slot in self._slots.values():
                slot.learn()
            self._runs_to_learn -= 1
            if not self._runs_to_learn:
                self._list_silent()

    def rewind(self) -> None:
        """Put back what there was when :meth:`begin` was called."""
        with torch.no_grad():
            lost = [slot.label for slot in self._slots.values() if not slot.rewind()]
        if lost:
            log.warning("%s changed within a step for the first time and cannot be put back", ", ".join(lost))

    def _learn_anew(self) -> None:
        self._modes = [module.training for module in self._modules]
        self._runs_to_learn = LEARNING_RUNS

    def _list_silent(self) -> None:
        slots = list(self._slots.values())
        self._silent = [slot for slot in slots if slot.is_silent]
        self._others = [slot for slot in slots if not slot.is_silent]
        pairs = [(slot.copy, slot.tensor) for slot in self._silent]
        self._copies = [copy for copy, tensor in pairs if copy is not None and tensor is not None]
        self._sources = [tensor for copy, tensor in pairs if copy is not None and tensor is not None]

    def _copy(self, slots: list[_WatchedBuffer]) -> None:
        with torch.no_grad():
            for slot in slots:
                assert slot.copy is not None
                assert slot.tensor is not None
                slot.copy.copy_(slot.tensor)


def _version(tensor: torch.Tensor | None) -> int:
    # What was made in inference mode counts no changes.
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, NaN being equal to NaN."""
    if a.layout != torch.strided or a.is_quantized:
        return True
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
