"""Check for NaN and infinity without re-runs: all ranks take the same action, at once.

A step without a bad value costs one reduction of two integers, on separate connections. Only if a rank has a bad value,
a second reduction with an entry for every rank identifies the ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from outlast.errors import ConfigError, ExitReason, NotFinite
from outlast.policy.rerun import Diagnosis, Finding
from outlast.runtime.consensus import Consensus
from outlast.runtime.diagnoses import leave_diagnosis
from outlast.runtime.process_groups import current_place

log = logging.getLogger(__name__)
Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_MAX_NAMED = 8
"""Ranks that a message lists."""
_TRAINED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_MAX_DEPTH = 100
"""Nesting depth of containers; a save accepts no more."""
_ADVICE = "look at the data and at the ranks named"


class NonFiniteAction(StrEnum):
    """Action when a rank has NaN or infinity."""

    WARN = "warn"
    """Log it, and continue training."""
    SKIP = "skip"
    """Skip the step's update, on all ranks."""
    RAISE = "raise"
    """Raise :class:`outlast.errors.NotFinite`, on all ranks."""
    ROLLBACK = "rollback"
    """Roll back to the last good checkpoint, on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteCheck:
    """Result of a check; the same on all ranks."""

    iteration: int
    """Number of optimizer steps done before this one."""
    action: NonFiniteAction | None = None
    """The action taken; ``None`` = everything is finite."""
    loss_ranks: tuple[int, ...] = ()
    """Ranks whose loss is NaN or infinite."""
    gradient_ranks: tuple[int, ...] = ()
    """Ranks with a NaN or infinite gradient; where gradients are averaged, all ranks as soon as one is bad."""
    num_consecutive: int = 0
    """Failed checks in a row, this one included."""

    @property
    def finite(self) -> bool:
        """Whether everything is finite on all ranks."""
        return self.action is None

    @property
    def should_step(self) -> bool:
        """Whether the optimizers are to step."""
        return self.action in (None, NonFiniteAction.WARN)

    def describe(self) -> str:
        if self.finite:
            return f"loss and gradients are finite at iteration {self.iteration}"
        found = [
            f"{what} of {_name(ranks)}"
            for what, ranks in (("loss", self.loss_ranks), ("gradients", self.gradient_ranks))
            if ranks
        ]
        return (
            f"NaN or infinity at iteration {self.iteration}: {', '.join(found)}; "
            f"{self.num_consecutive} in a row, action {self.action}"
        )


class _LimitReached(NotFinite, SystemExit):
    """The limit of failed checks in a row; if not caught, the process ends with exit code 17, after which nothing
    restarts."""

    def __init__(self, message: str, *, rank: int, iteration: int) -> None:
        super().__init__(message, rank=rank, iteration=iteration)
        self.code = int(ExitReason.FAILED_VALIDATION)


class NonFiniteDetector:
    """Check every step's loss and gradients for NaN and infinity, and take the same action on all ranks.

    ::

        detector = NonFiniteDetector(action="skip")
        ...
        loss.backward()
        if detector.check(loss, optimizer, iteration=iteration).should_step:
            optimizer.step()

    With ``skip``, ``raise`` and ``rollback`` the gradients of the given optimizers are set to ``None``, so that a step
    that is done nevertheless changes no weight and no moment.

    Args:
        action: ``warn``, ``skip``, ``raise`` or ``rollback``.
        max_consecutive: Failed checks in a row, of which the last raises :class:`~outlast.errors.NotFinite` whatever
            the action is; 0 = no limit. If not caught, the process ends with exit code 17
            (``ExitReason.FAILED_VALIDATION``): the run stops instead of being restarted, for a person to decide.
        check_gradients: Check the gradients, too; one pass over them.
        on_rollback: Rolls training back to the last good checkpoint, on all ranks: loads it, or ends the process so
            that its launcher does. Called with the check's result once all ranks have agreed. May be bound later.
        timeout_s: Seconds after which a check fails because a peer does not take part.

    Raises:
        ConfigError: The action is unknown, or the limit negative.
    """

    def __init__(
        self,
        action: NonFiniteAction | str = NonFiniteAction.WARN,
        max_consecutive: int = 10,
        *,
        check_gradients: bool = False,
        on_rollback: Callable[[FiniteCheck], None] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        try:
            self.action = NonFiniteAction(action)
        except ValueError:
            known = ", ".join(repr(known.value) for known in NonFiniteAction)
            raise ConfigError(f"action {action!r} is unknown; take one of {known}") from None
        if max_consecutive < 0:
            raise ConfigError(f"max_consecutive {max_consecutive} is negative; 0 means no limit")
        self.max_consecutive = max_consecutive
        self.check_gradients = check_gradients
        self.num_consecutive = 0
        self._on_rollback = on_rollback
        self._timeout_s = timeout_s
        self._num_checks = 0
        self._consensus: Consensus | None = None

    def bind(self, on_rollback: Callable[[FiniteCheck], None]) -> None:
        """Set the rollback function, unless it was given to the constructor."""
        self._on_rollback = self._on_rollback or on_rollback

    def check(
        self, loss: torch.Tensor | float | None, optimizers: Optimizers = (), *, iteration: int | None = None
    ) -> FiniteCheck:
        """Check a step between its backward pass and its update.

        Args:
            loss: This rank's loss, of any shape; ``None`` = not checked.
            optimizers: The optimizers that will step. Without them, no gradient is checked or dropped: then skip the
                step yourself if ``should_step`` is false.
            iteration: Number of optimizer steps done; by default the number of earlier checks.

        Returns:
            The result, the same on all ranks.

        Raises:
            NotFinite: A value is not finite, and the action is ``raise``, ``max_consecutive`` checks in a row failed,
                or the action is ``rollback`` and no rollback function is set. On all ranks.
            ConfigError: Gradients are to be checked, and no optimizer is given.
            PeerLost: A peer exited, or did not reach the check in time.

        Collective: all ranks of the default group, once a step; the first check opens a group.
        Blocks: until all ranks have reached the check, up to ``timeout_s``; for one synchronization with the device.
        """
        given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        if self.check_gradients and not given:
            raise ConfigError("check_gradients needs the optimizers whose gradients are meant; give them to check()")
        return self._check(loss, given, self.check_gradients, iteration)

    def watch(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Check the optimizer's gradients before each of its steps, without calls of :meth:`check`.

        A step that is to be skipped still runs, without gradients: it changes nothing.

        Returns:
            A handle whose ``remove()`` ends the checks.

        Collective: all ranks must watch the same optimizers and step them in the same order.
        """

        def check_before_step(stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._check(None, [stepping], True, None)

        return optimizer.register_step_pre_hook(check_before_step)

    def close(self) -> None:
        """Close the connections; peers that wait for this rank fail. Idempotent."""
        if self._consensus is not None:
            self._consensus.close()
            self._consensus = None

    def _check(
        self,
        loss: torch.Tensor | float | None,
        optimizers: list[torch.optim.Optimizer],
        with_gradients: bool,
        iteration: int | None,
    ) -> FiniteCheck:
        iteration = self._num_checks if iteration is None else iteration
        self._num_checks += 1
        bad_loss = loss is not None and not _is_finite(loss)
        bad_gradient = with_gradients and any(_not_finite(_gradients(optimizers)))
        loss_ranks, gradient_ranks = self._agree_ranks(bad_loss, bad_gradient, iteration)
        if not loss_ranks and not gradient_ranks:
            self.num_consecutive = 0
            return FiniteCheck(iteration=iteration)
        self.num_consecutive += 1
        found = FiniteCheck(
            iteration=iteration,
            action=self.action,
            loss_ranks=loss_ranks,
            gradient_ranks=gradient_ranks,
            num_consecutive=self.num_consecutive,
        )
        self._act(found, optimizers)
        return found

    def _act(self, found: FiniteCheck, optimizers: list[torch.optim.Optimizer]) -> None:
        if not found.should_step:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
        rank, text = (found.loss_ranks or found.gradient_ranks)[0], found.describe()
        if self.max_consecutive and self.num_consecutive >= self.max_consecutive:
            text += ", which is the limit"
            bad = tuple(sorted({*found.loss_ranks, *found.gradient_ranks}))
            diagnosis = Diagnosis(
                finding=Finding.REPEATED, rank=rank, iteration=found.iteration, message=text, rejected_ranks=bad
            )
            leave_diagnosis(current_place(), diagnosis)
            raise _LimitReached(f"{text}; {_ADVICE}", rank=rank, iteration=found.iteration)
        if self.action is NonFiniteAction.RAISE:
            raise NotFinite(f"{text}; {_ADVICE}", rank=rank, iteration=found.iteration)
        if self.action is NonFiniteAction.ROLLBACK and self._on_rollback is None:
            text += ", but no way to go back is set; give on_rollback, or call bind()"
            raise NotFinite(text, rank=rank, iteration=found.iteration)
        logs_for_all = not dist.is_initialized() or dist.get_rank() == 0  # the result is the same on every rank
        log.log(logging.WARNING if logs_for_all else logging.DEBUG, "%s", text)
        if self.action is NonFiniteAction.ROLLBACK and self._on_rollback is not None:
            self._on_rollback(found)

    def _agree_ranks(
        self, bad_loss: bool, bad_gradient: bool, iteration: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks with a bad loss and those with a bad gradient; one reduction if there are none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return (0,) * bad_loss, (0,) * bad_gradient
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if self._consensus is None:
            self._consensus = Consensus(["is_bad"], world_size=world_size, timeout_s=self._timeout_s)
        if not any(self._consensus.agree([int(bad_loss), int(bad_gradient)])):
            return (), ()
        seen = [0] * 2 * world_size
        seen[rank], seen[world_size + rank] = int(bad_loss), int(bad_gradient)
        flags, ranks = self._consensus.agree(seen), range(world_size)
        return tuple(one for one in ranks if flags[one]), tuple(one for one in ranks if flags[world_size + one])


class StateCheck:
    """Find tensors of a training state in which training produced NaN or infinity.

    Weights must be finite. Other tensors (buffers, moments of an optimizer, averages of weights) may hold infinities,
    as masks and best scores do, but no NaN, unless they held NaN before training began.

    Args:
        state: The state to be trained, before anything is loaded into it: modules, optimizers, tensors, mappings and
            lists of them, and objects with ``state_dict()``, whose modules and optimizers are found among their
            attributes. NumPy arrays hold records, not weights, and are not examined.
        asks_objects: Call ``state_dict()`` of such objects, too, as a save does.

    Blocks: for one synchronization with the device, and one more for each tensor that is not finite.
    """

    def __init__(self, state: Any, *, asks_objects: bool = True) -> None:
        self._asks = asks_objects
        self._held_nan = frozenset(self._find(state, weights=False))

    def find(self, state: Any) -> list[str]:
        """Return the names of this rank's invalid tensors in ``state``."""
        return [name for name in self._find(state, weights=True) if name not in self._held_nan]

    def _find(self, state: Any, *, weights: bool) -> list[str]:
        found: dict[tuple[Any, ...], _Examined] = {}
        for one in _tensors_in(state, "", asks=self._asks):
            if weights or not one.is_weight:
                values = one.values
                key = (values.device, values.data_ptr(), values.dtype, values.shape)
                if key not in found or (one.is_weight and not found[key].is_weight):  # a view of it may come first
                    found[key] = one
        suspects = _not_finite([one.values for one in found.values()])
        return [
            one.name
            for one, is_suspect in zip(found.values(), suspects, strict=True)
            if is_suspect and (one.is_weight or bool(one.values.isnan().any()))
        ]


class _Examined(NamedTuple):
    """A tensor of a state, or this rank's part of it."""

    name: str
    values: torch.Tensor
    is_weight: bool


def _tensors_in(value: Any, name: str, *, asks: bool, is_weight: bool = False, depth: int = 0) -> Iterator[_Examined]:
    """Yield the floating-point tensors of a state; several may be views of the same one."""

    def inside(items: Iterable[tuple[Any, Any]], *, is_weight: bool = False) -> Iterator[_Examined]:
        for key, inner in items:
            path = f"{name}.{key}" if name else str(key)
            yield from _tensors_in(inner, path, asks=asks, is_weight=is_weight, depth=depth + 1)

    if depth > _MAX_DEPTH:  # it contains itself, which no save accepts
        return
    if isinstance(value, torch.Tensor):
        is_weight = is_weight or value.requires_grad
        values = (value.to_local() if isinstance(value, DTensor) else value).detach()
        if values.is_sparse:
            values = values._values()
        if type(values) not in _PLAIN and hasattr(values, "__tensor_flatten__"):
            parts = values.__tensor_flatten__()[0]
            yield from inside(((part, getattr(values, part)) for part in parts), is_weight=is_weight)
        elif values.layout is torch.strided and not values.is_meta:
            values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
            if values.dtype in _TRAINED and values.numel():
                yield _Examined(name, values, is_weight)
    elif isinstance(value, torch.nn.Module):
        yield from inside(value.named_parameters())
        for prefix, module in value.named_modules():
            saved = ((one, it) for one, it in module._buffers.items() if one not in module._non_persistent_buffers_set)
            yield from inside((f"{prefix}.{one}" if prefix else one, it) for one, it in saved)
    elif isinstance(value, Mapping):
        yield from inside(value.items())
    elif isinstance(value, list | tuple):
        yield from inside(enumerate(value))
    elif isinstance(value, torch.optim.Optimizer):
        yield from inside(enumerate(one for group in value.param_groups for one in group["params"]))
        yield from inside((f"state.{number}", one) for number, one in enumerate(value.state.values()))
    elif callable(getattr(value, "state_dict", None)):
        trained = (torch.nn.Module, torch.optim.Optimizer)
        yield from inside((at, one) for at, one in getattr(value, "__dict__", {}).items() if isinstance(one, trained))
        if asks and getattr(value, "holds_weights", True):
            yield from inside([("state_dict", value.state_dict())])


def _is_finite(loss: torch.Tensor | float) -> bool:
    if isinstance(loss, torch.Tensor):
        local = loss.detach()
        return bool(torch.isfinite(local.to_local() if isinstance(local, DTensor) else local).all())
    return math.isfinite(loss)


def _gradients(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return this rank's part of each gradient, without empty ones."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                if gradient is not None and gradient.is_sparse:
                    gradient = gradient._values()
                if gradient is not None and gradient.numel():
                    found.append(gradient.detach())
    return found


def _not_finite(tensors: list[torch.Tensor]) -> list[bool]:
    """Return which tensors have a NaN or infinite element, by their largest magnitude, which cannot overflow."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(number)
    by_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    for (device, _), numbers in by_kind.items():
        largest = torch.stack(list(torch._foreach_norm([tensors[number] for number in numbers], math.inf)))
        places, decisions = by_device.setdefault(device, ([], []))
        places += numbers
        decisions.append(torch.isfinite(largest))
    found = [False] * len(tensors)
    for places, decisions in by_device.values():
        for number, is_finite in zip(places, torch.cat(decisions).tolist(), strict=True):
            found[number] = not is_finite
    return found


def _name(ranks: tuple[int, ...]) -> str:
    named = ", ".join(map(str, ranks[:_MAX_NAMED])) + (
        f" and {len(ranks) - _MAX_NAMED} others" if len(ranks) > _MAX_NAMED else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
