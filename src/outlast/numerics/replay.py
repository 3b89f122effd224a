"""What it takes to run a step again: its batches, and, after a restart, all that a diagnostic save holds of it.

Batches are stored without running anybody's code when they are read: tensors, arrays, numbers and texts, in containers.
Whatever else a batch holds is named, and not stored, since reading a pickle runs code from the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from outlast.decoding import convert
from outlast.env import WorkerEnv
from outlast.errors import OutlastError
from outlast.numerics.validation import Rejected, StepValidation
from outlast.policy.rerun import Diagnosis, Replay, StepRun, decode_diagnosis, encode_diagnosis, to_number
from outlast.runtime.device import RandomSnapshot, restore_random, training_device

__all__ = ["Batches", "ReplayableIterator", "StepReplay", "as_iterators", "fingerprint", "give_back", "store"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_SCALARS = (type(None), bool, int, float, str, bytes)


class ReplayableIterator(Generic[T]):
    """An iterator that gives the batches of a step again when the step is run again.

    It holds them by reference until the step is over: nothing is copied. A step that changes its batch in place gets
    the changed one; :meth:`changed` detects it. Where drawing a batch draws random numbers, giving it again advances
    them as far.

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

        Whether the source stands before or behind them depends on what the script saved and when. So the first batch
        that is drawn from it afterwards is compared: if it is the first of these, as many are skipped.
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


Iterators: TypeAlias = Sequence[ReplayableIterator[Any]]
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


class StepReplay:
    """What this rank knows of the step that is to be replayed, or is to be in the next process.

    Args:
        place: This worker's place.
        device: What this rank computes on.
    """

    def __init__(self, place: WorkerEnv, device: str) -> None:
        self._place, self._device = place, device
        self.ordered: Replay | None = None
        """The step that is to be replayed; ``None``: steps are run for the first time."""
        self.saved: dict[str, Any] | None = None
        """What this rank keeps of a step, for a diagnostic save or from one: plain values and tensors."""
        self._has_batches = True

    def last_on_same_device(self, tries: int) -> Replay:
        """Return the replay that the save describes, after ``tries`` on the same device.

        Raises:
            OutlastError: No diagnostic save was loaded.
        """
        if self.saved is None:
            raise OutlastError("there is nothing to replay; load the state of a diagnostic save first")
        return decode_diagnosis(self.saved["diagnosis"]).replay(tries=tries)

    def begin_step(self, iteration: int, iterators: Iterators) -> tuple[dict[int, tuple[Rejected, Any]], list[int]]:
        """Restore batches and random numbers of the step, if it is the one to replay.

        Args:
            iteration: Number of optimizer steps done.
            iterators: What the step draws from.

        Returns:
            What was rejected before the restart, with its result, by call; and the calls in which errors were injected.

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
            why = ", ".join(problems) or "they are not known"
            log.warning("the step is replayed with new batches instead of its own (%s)", why)
        if self.saved is not None:
            restore_random(dict(self.saved["random"]))
            return self._saved_rejections(self.saved), list(self.saved["struck"])
        if self._place.global_rank != self.ordered.rank:
            return {}, []
        known = Rejected(call=self.ordered.call, what=self.ordered.what, message="", value=self.ordered.first)
        return {known.call: (known, to_number(known.value))}, []

    def has_same_batch(self, iterators: Iterators) -> bool:
        """Return whether the step had the batches of the run before: the saved ones, or the same drawn again."""
        if self._has_batches:
            return True
        # Without its save: training up to it draws the same ones, if the data comes in the same order.
        return self.ordered is not None and bool(self.ordered.batch) and fingerprint_of(iterators) == self.ordered.batch

    def num_tries(self, state: StepRun) -> int:
        """Return the number of replays on the same device, the one that runs included."""
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
        """Keep what a replay of this step needs for the save that follows; batches are referred to, not copied.

        Args:
            diagnosis: Why the ranks leave.
            validation: The step's.
            iterators: What the step draws from.
            random: This rank's random numbers at the begin of the step.
        """
        forms = [[store(batch) for batch in iterator.drawn] for iterator in iterators]
        problems = [text for batches in forms for _, texts in batches for text in texts]
        if problems:
            log.warning("the batches are not saved: %s cannot be stored safely", ", ".join(problems))
        rejected = validation.all_rejected().values()
        self.saved = {
            "iteration": diagnosis.iteration,
            "diagnosis": encode_diagnosis(diagnosis),
            "node": self._place.node,
            "device": self._device,
            "rejected": [[msgspec.to_builtins(one), store(result)[0]] for one, result in rejected],
            "struck": sorted(validation.injector.struck),
            "batches": None if problems else [[form for form, _ in batches] for batches in forms],
            "random_after": [list(iterator.random_after) for iterator in iterators],
            "problems": problems,
            "random": dict(random),
        }

    def forget(self) -> None:
        """Continue with steps that are run for the first time."""
        self.ordered = self.saved = None

    def _give_saved_batches(self, iterators: Iterators) -> bool:
        """Return whether the iterators give the saved batches.

        They do not if the batches could not be stored, or there are more or fewer iterators now.
        """
        if self.saved is None or self.saved["batches"] is None or len(self.saved["batches"]) != len(iterators):
            return False
        for iterator, forms, states in zip(iterators, self.saved["batches"], self.saved["random_after"], strict=True):
            iterator.replay([give_back(form, self._place.local_rank) for form in forms], states)
        return True

    def _saved_rejections(self, saved: Mapping[str, Any]) -> dict[int, tuple[Rejected, Any]]:
        rejections = {}
        for plain, form in saved["rejected"]:
            one = convert(plain, Rejected)
            result = to_number(one.value) if form is None else give_back(form, self._place.local_rank)
            rejections[one.call] = (one, result)
        return rejections


def fingerprint_of(iterators: Iterators) -> str:
    """Return a fingerprint of what was drawn for the step that runs; empty without iterators."""
    return fingerprint([iterator.drawn for iterator in iterators]) if iterators else ""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def store(value: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a form of a nested value that a checkpoint can hold, and what it cannot.

    Returns:
        The form, which refers to the tensors and does not copy them, and an empty list; or ``None`` and the places and
        types of what cannot be stored.
    """
    problems: list[str] = []
    on_device: list[str] = []
    plain = _store(value, "", on_device, problems)
    return (None, problems) if problems else ({"value": plain, "on_device": on_device}, [])


def give_back(stored: Mapping[str, Any], local_rank: int) -> Any:
    """Return what :func:`store` was given; what was on a device comes to this rank's.

    Args:
        stored: The form.
        local_rank: This rank's on its node.
    """
    return _give_back(stored["value"], "", frozenset(stored["on_device"]), training_device(local_rank))


def fingerprint(value: Any) -> str:
    """Return 16 hexadecimal digits that identify a nested value; of foreign objects only the type counts.

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
