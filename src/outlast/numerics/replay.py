"""Run a step again: its batches, what it changed, and, after a restart, the contents of a diagnostic save.

Batches are stored without pickle, since reading a pickle runs code from the file: tensors, arrays, numbers and strings,
in containers. Other contents are reported, and not stored.

In addition to its results a run changes random numbers, gradients, and the buffers that a forward pass changes; not
parameters, as the optimizer has not stepped. State that the script keeps elsewhere and changes within the step is not
restored.

Gradients are restored without copies: ``None`` becomes ``None``, one that was there and changed becomes zero, as after
``zero_grad()``. So a gradient must be accumulated within one run.

A buffer, such as BatchNorm's statistics, is copied only if runs change it. That is detected in the first runs, and
again when the module changes between ``eval()`` and ``train()``, by torch's version counter and by value. A copy is
valid while the counter is unchanged. BatchNorm's statistics change without it (torch 2.13), as do changes through
``.data``: such buffers are copied before every run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from outlast.decoding import convert
from outlast.env import WorkerEnv
from outlast.errors import OutlastError
from outlast.numerics.validation import Rejected, StepValidation
from outlast.policy.rerun import Diagnosis, Replay, StepRun, to_number
from outlast.runtime.device import training_device
from outlast.runtime.nested import find_kind
from outlast.runtime.random_numbers import RandomSnapshot, restore_random

log = logging.getLogger(__name__)
T = TypeVar("T")
_SCALARS = (type(None), bool, int, float, str, bytes)
LEARNING_RUNS = 2
"""Runs in which every buffer is copied and compared."""


class _Drawn(NamedTuple):
    """A batch of the current step."""

    batch: Any
    versions: tuple[int, ...]
    """Versions of its tensors when it was drawn."""
    random_after: dict[str, Any]
    """Random numbers after it was drawn."""


class ReplayableIterator(Generic[T]):
    """An iterator that returns the batches of a step again when the step is run again.

    Batches are held by reference until the step is over, not copied. A step that changes its batch in place gets the
    changed one; :meth:`changed` detects that. Where drawing a batch consumes random numbers, so does returning it
    again.

    Args:
        batches: The source of batches.

    Thread: that of the training loop.
    """

    def __init__(self, batches: Iterable[T]) -> None:
        self._source = iter(batches)
        self._drawn: list[_Drawn] = []
        self._random = RandomSnapshot()
        self._given = 0
        self.is_recording = True
        """Whether a step's batches may be needed again."""
        self._replayed: tuple[str, int] | None = None
        self._skip: tuple[str, int] | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self.is_recording:
            return self._draw()
        if self._given == len(self._drawn):
            batch = self._draw()
            self._random.take()
            self._drawn.append(_Drawn(batch, _versions(batch), self._random.state))
        else:
            restore_random(self._drawn[self._given].random_after)
        self._given += 1
        given: T = self._drawn[self._given - 1].batch
        return given

    @property
    def drawn(self) -> Sequence[T]:
        """The batches of this step so far, in order."""
        return tuple(one.batch for one in self._drawn)

    @property
    def random_after(self) -> Sequence[dict[str, Any]]:
        """Random numbers after each of them was drawn."""
        return tuple(one.random_after for one in self._drawn)

    def changed(self) -> bool:
        """Return whether the step changed a tensor of its batches in place."""
        return any(_versions(one.batch) != one.versions for one in self._drawn)

    def rewind(self) -> None:
        """Return this step's batches again, from the first."""
        self._given = 0

    def end_step(self) -> None:
        """Drop the batches that were returned; those drawn and not returned again come next."""
        del self._drawn[: self._given]
        self._given = 0
        if self._replayed is not None:
            self._skip, self._replayed = self._replayed, None

    def replay(self, batches: Sequence[T], random_after: Sequence[dict[str, Any]]) -> None:
        """Return these batches in the next step, instead of others.

        Whether the source is positioned before or after them depends on what the script saved and when. So if the next
        batch drawn from it is the first of these, as many are skipped.

        Args:
            batches: The batches of the step.
            random_after: Random numbers after each of them was drawn.
        """
        pairs = zip(batches, random_after, strict=True)
        self._drawn, self._given = [_Drawn(batch, _versions(batch), after) for batch, after in pairs], 0
        self._replayed = (fingerprint(batches[0]), len(batches)) if batches else None

    def _draw(self) -> T:
        batch = next(self._source)
        if self._skip is not None:
            (first, number), self._skip = self._skip, None
            if fingerprint(batch) == first:
                for _ in range(number):
                    batch = next(self._source)
        return batch


Iterators: TypeAlias = Sequence[ReplayableIterator[Any]]
Batches: TypeAlias = "ReplayableIterator[Any] | Sequence[ReplayableIterator[Any] | None] | None"
"""Source of a step's batches: one iterator, several, or none (a rank that gets its data from another one)."""


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
    return tuple(_version(tensor) for _, tensor in find_kind(batch, torch.Tensor))


class StepReplay:
    """Replay state of this rank: the step to be replayed now, or in the next process."""

    def __init__(self, place: WorkerEnv, device: str) -> None:
        self._place, self._device = place, device
        self.ordered: Replay | None = None
        """The step to be replayed; ``None`` = steps are run for the first time."""
        self.saved: dict[str, Any] | None = None
        """Data for, or from, a diagnostic save: plain values and tensors."""
        self._has_batches = True

    def begin_step(self, iteration: int, iterators: Iterators) -> tuple[dict[int, tuple[Rejected, Any]], list[int]]:
        """Restore batches and random numbers of the step, if it is the one to replay.

        Returns:
            Rejections before the restart, with their results, by call; and the calls in which errors were injected.

        Raises:
            OutlastError: Another step is to be replayed.
        """
        self._has_batches = True
        if self.ordered is None:
            return {}, []
        if self.ordered.iteration != iteration:
            raise OutlastError(
                f"iteration {self.ordered.iteration} is to be replayed, but the step is that of {iteration}; "
                "load the diagnostic save first"
            )
        if self.saved is not None and int(self.saved["iteration"]) != iteration:
            self.saved = None
        self._has_batches = self._give_saved_batches(iterators)
        if not self._has_batches:
            problems = self.saved["problems"] if self.saved is not None else []
            why = ", ".join(problems) or "the original batches are not known"
            log.warning("the step is replayed with new batches instead of the original ones (%s)", why)
        if self.saved is not None:
            restore_random(dict(self.saved["random"]))
            rejections = {}
            for plain, form in self.saved["rejected"]:
                one = convert(plain, Rejected)
                result = to_number(one.value) if form is None else give_back(form, self._place.local_rank)
                rejections[one.call] = (one, result)
            return rejections, list(self.saved["struck"])
        if self._place.global_rank != self.ordered.rank:
            return {}, []
        known = Rejected(call=self.ordered.call, what=self.ordered.what, message="", value=self.ordered.first)
        return {known.call: (known, to_number(known.value))}, []

    def has_same_batch(self, iterators: Iterators) -> bool:
        """Return whether the step had the batches of the run before: the saved ones, or the same drawn again."""
        if self._has_batches:
            return True
        # Without its save, training up to it draws the same batches if the data order is deterministic.
        return self.ordered is not None and bool(self.ordered.batch) and fingerprint_of(iterators) == self.ordered.batch

    def num_tries(self, state: StepRun) -> int:
        """Return the number of replays on the same device, including the current one."""
        return 0 if self.ordered is None else self.ordered.tries + (state is not StepRun.REPLAY_ELSEWHERE)

    def first_seen_on(self) -> tuple[str, str]:
        """Return node and device on which this rank first ran the step."""
        if self.ordered is not None and self.ordered.rank == self._place.global_rank:
            return self.ordered.node, self.ordered.device
        if self.ordered is not None and self.saved is not None:
            return str(self.saved["node"]), str(self.saved["device"])
        return self._place.node, self._device

    def keep(
        self, diagnosis: Diagnosis, validation: StepValidation, iterators: Iterators, random: Mapping[str, Any]
    ) -> None:
        """Record what a replay of this step needs for the next save; batches are referenced, not copied."""
        forms = [[store(batch) for batch in iterator.drawn] for iterator in iterators]
        problems = [text for batches in forms for _, texts in batches for text in texts]
        if problems:
            log.warning("the batches are not saved: %s cannot be stored safely", ", ".join(problems))
        rejected = validation.all_rejected().values()
        self.saved = {
            "iteration": diagnosis.iteration,
            "diagnosis": msgspec.json.encode(diagnosis),
            "node": self._place.node,
            "device": self._device,
            "rejected": [[msgspec.to_builtins(one), store(result)[0]] for one, result in rejected],
            "struck": sorted(validation.injector.injected),
            "batches": None if problems else [[form for form, _ in batches] for batches in forms],
            "random_after": [list(iterator.random_after) for iterator in iterators],
            "problems": problems,
            "random": dict(random),
        }

    def _give_saved_batches(self, iterators: Iterators) -> bool:
        """Return whether the iterators return the saved batches.

        They do not if the batches could not be stored, or the number of iterators changed.
        """
        if self.saved is None or self.saved["batches"] is None or len(self.saved["batches"]) != len(iterators):
            return False
        for iterator, forms, states in zip(iterators, self.saved["batches"], self.saved["random_after"], strict=True):
            iterator.replay([give_back(form, self._place.local_rank) for form in forms], states)
        return True


def fingerprint_of(iterators: Iterators) -> str:
    """Return a fingerprint of the batches drawn for the current step; empty without iterators."""
    return fingerprint([iterator.drawn for iterator in iterators]) if iterators else ""


def store(value: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a form of a nested value that a checkpoint can hold, and the problems.

    Returns:
        The form, which references the tensors, and an empty list; or ``None`` and the paths and types of what cannot be
        stored.
    """
    problems: list[str] = []
    on_device: list[str] = []
    plain = _store(value, "", on_device, problems)
    return (None, problems) if problems else ({"value": plain, "on_device": on_device}, [])


def give_back(stored: Mapping[str, Any], local_rank: int) -> Any:
    """Return the value that :func:`store` was given; device tensors are moved to this rank's device."""
    return _give_back(stored["value"], "", frozenset(stored["on_device"]), training_device(local_rank))


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that identify a nested value; of other objects only the type counts.

    Blocks: until the tensors were copied from their device.
    """
    digest = xxhash.xxh3_64()
    _digest(value, digest)
    return digest.hexdigest()


def _store(value: Any, path: str, on_device: list[str], problems: list[str]) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is torch.Tensor and value.layout == torch.strided and value.device.type != "meta":
        if not (value.is_quantized or value.requires_grad):
            if value.device.type != "cpu":
                on_device.append(path)
            return value
    elif kind is np.ndarray and value.dtype.kind in "biuf" and value.dtype.isnative:
        return value
    elif kind is dict and all(type(key) in _SCALARS for key in value):
        return {key: _store(inner, f"{path}.{key}", on_device, problems) for key, inner in value.items()}
    elif kind is list or kind is tuple:
        return kind(_store(inner, f"{path}.{index}", on_device, problems) for index, inner in enumerate(value))
    problems.append(f"{path.removeprefix('.') or 'the batch'} of type {kind.__name__}")
    return None


def _give_back(value: Any, path: str, on_device: frozenset[str], device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device) if path in on_device else value
    if isinstance(value, dict):
        return {key: _give_back(inner, f"{path}.{key}", on_device, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_give_back(inner, f"{path}.{i}", on_device, device) for i, inner in enumerate(value))
    return value


def _digest(value: Any, digest: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.layout == torch.strided and type(value) is torch.Tensor and value.device.type != "meta":
            data = value.detach().cpu().contiguous().reshape(-1)
            digest.update(data.view(torch.uint8).numpy() if data.numel() else b"")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes() if value.dtype.kind in "biufc" else b"")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            digest.update(repr(key).encode())
            _digest(inner, digest)
    elif isinstance(value, list | tuple):
        for inner in value:
            _digest(inner, digest)
    elif isinstance(value, _SCALARS):
        digest.update(repr(value).encode())


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
    """Its values then, if known; ``None`` also where there was no buffer."""
    is_known: bool = False
    """Whether its state then is known."""
    changes: bool = False
    """Whether runs change it."""
    is_silent: bool = False
    """Whether they change it without a change of its version."""
    changes_outside: bool = False
    """Whether it changes between runs, and was never seen to change in one."""

    def is_same(self) -> bool:
        tensor = self.owner.get(self.name)
        return tensor is self.tensor and _version(tensor) == self.version

    def look(self, *, learning: bool) -> bool:
        """Record the buffer at the beginning of a run; return whether its values are still to be copied."""
        same = self.is_same()
        if self.is_known and same and not (self.is_silent or learning):
            return False
        if self.is_known and not (self.changes or same):
            # It changed since the last run began, but no run was seen to change it: outside, if that happened before.
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
        if not self.is_same():
            self.changes = True
        elif self.tensor is not None and self.copy is not None and not _is_equal(self.tensor, self.copy):
            self.changes = self.is_silent = True
        self.changes_outside = self.changes_outside and not self.changes

    def rewind(self) -> bool:
        """Restore the buffer; return ``False`` if it changed and its earlier values are not known."""
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


class Rewinder:
    """Record the state at the beginning of a run, and restore it.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self.random = RandomSnapshot()
        self._modules: list[torch.nn.Module] = []
        self._modes: list[bool] = []
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._gradient_versions: list[int | None] = []
        self._buffers: dict[tuple[int, str], _WatchedBuffer] = {}
        self._runs_to_learn = 0
        self._silent: list[_WatchedBuffer] = []
        self._others: list[_WatchedBuffer] = []
        self._copies: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Restore gradients and buffers of these modules, too; a module's buffers are listed once."""
        for module in modules:
            self._parameters.update((id(parameter), parameter) for parameter in module.parameters())
            if any(one is module for one in self._modules):
                continue
            self._modules.append(module)
            for prefix, inner in module.named_modules():
                is_silent = isinstance(inner, torch.nn.modules.batchnorm._NormBase)
                owner: dict[str, Any] = inner._buffers
                for name in owner:
                    label = f"{prefix}.{name}" if prefix else name
                    buffer = _WatchedBuffer(owner, name, label, is_silent=is_silent, changes=is_silent)
                    self._buffers.setdefault((id(owner), name), buffer)
            self._relearn()

    def begin(self) -> None:
        """Record the state at the beginning of a run.

        Blocks: never; costs about 5 us, 50 ns per parameter, 0.2 us per buffer, and a copy of the buffers that runs
        change.
        """
        self.random.take()
        parameters = self._parameters.values()
        self._gradient_versions = [None if (grad := one.grad) is None else grad._version for one in parameters]
        if [module.training for module in self._modules] != self._modes:
            self._relearn()
        if self._runs_to_learn:
            self._copy([buffer for buffer in self._buffers.values() if buffer.look(learning=True)])
            return
        copied = [buffer for buffer in self._others if buffer.look(learning=False)]
        if all(buffer.owner.get(buffer.name) is buffer.tensor for buffer in self._silent):
            # Hot path: every step of a model with BatchNorm, with hundreds of small buffers.
            if self._sources:
                with torch.no_grad():
                    torch._foreach_copy_(self._copies, self._sources)
        else:
            copied += [buffer for buffer in self._silent if buffer.look(learning=False)]
            self._list_silent()
        self._copy(copied)

    def end_run(self) -> None:
        """Learn which buffers the run changed, in the first runs.

        Blocks: in the first runs, until the device has computed the buffers.
        """
        if self._runs_to_learn:
            for buffer in self._buffers.values():
                buffer.learn()
            self._runs_to_learn -= 1
            if not self._runs_to_learn:
                self._list_silent()

    def rewind(self) -> None:
        self.random.restore()
        with torch.no_grad():
            for parameter, version in zip(self._parameters.values(), self._gradient_versions, strict=True):
                if version is None:
                    parameter.grad = None
                elif parameter.grad is not None and parameter.grad._version != version:
                    parameter.grad.zero_()
            lost = [buffer.label for buffer in self._buffers.values() if not buffer.rewind()]
        if lost:
            log.warning("%s changed within a step for the first time and cannot be put back", ", ".join(lost))

    def _relearn(self) -> None:
        self._modes = [module.training for module in self._modules]
        self._runs_to_learn = LEARNING_RUNS

    def _list_silent(self) -> None:
        self._silent = [buffer for buffer in self._buffers.values() if buffer.is_silent]
        self._others = [buffer for buffer in self._buffers.values() if not buffer.is_silent]
        pairs = [(one.copy, one.tensor) for one in self._silent if one.copy is not None and one.tensor is not None]
        self._copies, self._sources = [copy for copy, _ in pairs], [tensor for _, tensor in pairs]

    def _copy(self, buffers: list[_WatchedBuffer]) -> None:
        if not buffers:
            return
        with torch.no_grad():
            for buffer in buffers:
                assert buffer.copy is not None
                assert buffer.tensor is not None
                buffer.copy.copy_(buffer.tensor)


def _version(tensor: torch.Tensor | None) -> int:
    # Tensors created in inference mode have no version.
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same values; NaN equals NaN."""
    if a.layout != torch.strided or a.is_quantized:
        return True
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
