"""What a run of a step changes besides its results, and how it is put back before the step is run again.

Random numbers, gradients, and the buffers that a forward pass changes (BatchNorm's statistics). Parameters are not
among them: the optimizer has not stepped.

Gradients are put back without copies: one that was ``None`` becomes ``None``, one that was there and was changed
becomes zero, as ``zero_grad()`` leaves it. So what is accumulated into a gradient must be accumulated within one run.

A buffer is copied only where that is needed: which ones a run changes is learned in the first runs, and again when the
module goes from ``eval()`` to ``train()`` or back, by torch's version counter and by value. A copy is good for as long
as the counter stands still; BatchNorm's statistics change without it (torch 2.13), and are copied always.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from outlast.runtime.random_numbers import RandomSnapshot

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
        """Learn from a run that is over."""
        self._buffers.learn()

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
class _Slot:
    """One buffer of one module."""

    owner: dict[str, torch.Tensor | None]
    name: str
    label: str
    tensor: torch.Tensor | None = None
    """The buffer at the beginning of the run."""
    version: int = -1
    """Its version then."""
    copy: torch.Tensor | None = None
    """Its values then; ``None`` = none were copied."""
    copied: bool = False
    changes: bool = False
    """Whether runs change it."""
    silent: bool = False
    """Whether they change it without its version telling, as through ``.data``."""
    changed_outside: bool = False
    """Whether it changes between runs, and no run was seen to change it."""

    def is_unchanged(self) -> bool:
        tensor = self.owner.get(self.name)
        return tensor is self.tensor and (tensor is None or tensor._version == self.version)


@dataclass(slots=True)
class _Buffers:
    slots: dict[tuple[int, str], _Slot] = field(default_factory=dict)
    modules: list[tuple[torch.nn.Module, bool]] = field(default_factory=list)
    """The modules that are watched, and whether they were in training mode."""
    runs_to_learn: int = LEARNING_RUNS

    def add(self, module: torch.nn.Module) -> None:
        self.modules.append((module, module.training))
        for prefix, inner in module.named_modules():
            is_silent = isinstance(inner, torch.nn.modules.batchnorm._NormBase)
            owner: dict[str, Any] = inner._buffers
            for name in owner:
                if (id(owner), name) not in self.slots:
                    label = f"{prefix}.{name}" if prefix else name
                    self.slots[id(owner), name] = _Slot(owner, name, label, silent=is_silent, changes=is_silent)
                    self.runs_to_learn = LEARNING_RUNS

    def begin(self) -> None:
        if any(module.training != was for module, was in self.modules):
            self.modules = [(module, module.training) for module, _ in self.modules]
            self.runs_to_learn = LEARNING_RUNS
        sources: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for slot in self.slots.values():
            tensor = slot.owner.get(slot.name)
            unchanged = slot.is_unchanged()
            if slot.copied and unchanged and not (slot.silent or self.runs_to_learn):
                continue
            if slot.copied and not (slot.changes or unchanged):
                # It was changed since, by no run that was watched: outside of runs if that was seen before.
                slot.changed_outside = self.runs_to_learn > 0 or slot.changed_outside
                slot.changes = not slot.changed_outside
            slot.tensor, slot.version = tensor, -1 if tensor is None else tensor._version
            if tensor is None or (slot.changed_outside and not self.runs_to_learn):
                slot.copy, slot.copied = None, tensor is None
                continue
            if slot.copy is None or slot.copy.shape != tensor.shape or slot.copy.dtype != tensor.dtype:
                slot.copy = tensor.detach().clone()
            else:
                sources.append(tensor.detach())
                copies.append(slot.copy)
            slot.copied = True
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(copies, sources)

    def learn(self) -> None:
        if self.runs_to_learn:
            self.runs_to_learn -= 1
            for slot in self.slots.values():
                tensor = slot.owner.get(slot.name)
                if not slot.is_unchanged():
                    slot.changes = True
                elif tensor is not None and slot.copy is not None and not _equal(tensor, slot.copy):
                    slot.changes = slot.silent = True
                slot.changed_outside = slot.changed_outside and not slot.changes

    def rewind(self) -> None:
        lost = []
        with torch.no_grad():
            for slot in self.slots.values():
                if slot.is_unchanged() and not slot.silent:
                    continue
                slot.changes = True
                slot.changed_outside = False
                if not slot.copied:
                    lost.append(slot.label)
                    continue
                slot.owner[slot.name] = slot.tensor
                if slot.tensor is not None and slot.copy is not None:
                    slot.tensor.copy_(slot.copy)
                    slot.version = slot.tensor._version
        if lost:
            log.warning(
                "this run is the first to change the buffers %s; they are not put back, and from now on they are",
                ", ".join(lost),
            )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, NaN being equal to NaN."""
    if a.layout != torch.strided or a.is_quantized:
        return True
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
