"""A plan's faults as one rank sees them: struck from hooks that the training loop calls.

While nothing is due, a hook compares two integers. A fault that comes once a run leaves a marker in the run
directory before it strikes; without a run directory, only cycle 0 is struck.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outlast import clock
from outlast.chaos.draw import Occurrence, planned_faults
from outlast.chaos.fault import Fault, FaultKind, FaultTarget
from outlast.chaos.plan import FaultPlan
from outlast.chaos.process_faults import strike_process
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import Event, EventKind
from outlast.runtime.journal import Journal

if TYPE_CHECKING:
    import torch

    from outlast.chaos.damage import Damage
    from outlast.chaos.slowing import Slowing

__all__ = ["ArmedFaults"]

log = logging.getLogger(__name__)
LossT = TypeVar("LossT")
_HORIZON = 256
"""Iterations for which a fault with a rate is drawn ahead."""


class ArmedFaults:
    """Let a plan's faults befall this rank; made by :meth:`FaultPlan.arm`, which explains the arguments.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        plan: FaultPlan,
        place: WorkerEnv,
        *,
        run_dir: str | os.PathLike[str] | None,
        journal: Journal,
        device: str,
        time: clock.Clock,
    ) -> None:
        self._place, self._journal, self._device, self._time = place, journal, device, time
        self._markers = None if run_dir is None else Path(run_dir) / "faults"
        planned = list(planned_faults(plan))
        for here in planned:
            rank = here.fault.rank
            if rank is not None and rank >= place.world_size and place.cycle == 0:  # later, the world may have shrunk
                last = place.world_size - 1
                raise ConfigError(f"faults[{here.index}]: rank={rank} does not exist, ranks end at {last}; name one")
        remembers = run_dir is not None or place.cycle == 0
        planned = [here for here in planned if (remembers or here.fault.persistent) and here.can_befall(place, device)]
        self._planned = [here for here in planned if here.fault.after_s is None]
        started_ns = time.now_ns()
        self._timed = [
            (started_ns + int(here.fault.after_s * 1e9), here)
            for here in planned
            if here.fault.after_s is not None and here.befalls(place, device, 0)
        ]
        self.sections = frozenset(here.fault.section for here in planned if here.fault.section is not None)
        """The sections for which :meth:`enter_section` is to be called."""
        self._has_durable = False
        self._next = 0
        self._due_at = -1
        self._due_now: tuple[Occurrence, ...] = ()
        self._struck_between = -1
        self._spent: set[str] = set()
        self._events: dict[tuple[str, int], Event] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._state: Mapping[str, Any] = {}
        self._slowings: list[Slowing] = []

    @property
    def fired(self) -> tuple[Event, ...]:
        """What struck this rank in this cycle, as it is in the journal."""
        return tuple(self._events.values())

    def before_step(self, iteration: int, state: Mapping[str, Any], *, has_durable: bool = True) -> None:
        """Let befall what is due before or in the coming step, other than in its loss and gradients.

        Args:
            iteration: Number of optimizer steps done.
            state: The script's state, in which weights and modules are found.
            has_durable: Whether there is something to come back from, or nothing is saved at all.

        Raises:
            ConfigError: A fault names a tensor, an element or a bit that does not exist.
            SimulatedError, SystemExit: The fault of that kind.
        """
        self._has_durable, self._state = has_durable, state
        if self._hooks:
            self._remove_hooks()
        if iteration < self._next:
            return
        self._strike_between_steps(iteration)
        for occurrence in self._due(iteration):
            if occurrence.fault.target == FaultTarget.WEIGHT:
                self._strike_weight(occurrence, state)
            elif occurrence.fault.target == FaultTarget.ACTIVATION:
                self._await_forward(occurrence, state)

    def on_loss(self, iteration: int, loss: LossT) -> LossT:
        """Return the loss as it is to be seen: a number or a tensor; a changed tensor is another one.

        Args:
            iteration: Number of optimizer steps done before this step.
            loss: What is about to be validated.
        """
        if iteration < self._next:
            return loss
        for occurrence in self._due(iteration):
            if occurrence.fault.target == FaultTarget.LOSS:
                loss = self._strike_loss(occurrence, loss)
        return loss

    def after_backward(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Let befall the gradients what is due in this step; call it before the optimizer's step.

        Args:
            iteration: Number of optimizer steps done before this step.
            state: As for :meth:`before_step`.

        Raises:
            ConfigError: A fault names a tensor, an element or a bit that does not exist.
        """
        if iteration < self._next:
            return
        for occurrence in self._due(iteration):
            if occurrence.fault.target == FaultTarget.GRADIENT:
                from outlast.chaos.tensors import choose_gradient

                self._strike_chosen(occurrence, choose_gradient(state, occurrence))

    def after_step(self, iteration: int, state: Mapping[str, Any], *, has_durable: bool = True) -> None:
        """Let befall what is due between this step and the next; call it once what is due was saved.

        Args:
            iteration: Number of optimizer steps done, this one included.
            state: As for :meth:`before_step`.
            has_durable: As for :meth:`before_step`.

        Raises:
            SimulatedError, SystemExit: The fault of that kind.
        """
        self._has_durable, self._state = has_durable, state
        if self._hooks:
            self._remove_hooks()
        if iteration < self._next:
            return
        self._strike_between_steps(iteration)
        self._strike_timed(None, iteration)

    def enter_section(self, name: str, iteration: int) -> None:
        """Let befall what is due in a section; call it as soon as the section is open.

        Args:
            name: The section's name.
            iteration: Number of optimizer steps done.

        Raises:
            SimulatedError, SystemExit: The fault of that kind.
        """
        if name in self.sections:
            self._strike_due_processes(name, iteration)
            self._strike_timed(name, iteration)

    def close(self) -> None:
        """Let nothing befall any more; idempotent."""
        self._remove_hooks()
        while self._slowings:
            self._slowings.pop().remove()
        self._planned, self._timed, self._due_now, self._next = [], [], (), sys.maxsize

    # -- what is due ---------------------------------------------------------------------------------------

    def _due(self, iteration: int) -> tuple[Occurrence, ...]:
        if iteration != self._due_at:
            self._due_at = iteration
            self._due_now = tuple(
                Occurrence(here, iteration)
                for here in self._planned
                if here.is_due(iteration) and here.befalls(self._place, self._device, iteration)
            )
            self._look_ahead()
        return self._due_now

    def _look_ahead(self) -> None:
        """Set the first iteration at which the hooks have to look again."""
        if self._due_now or self._timed:
            self._next = self._due_at
            return
        coming = (here.next_due(self._due_at + 1, horizon=_HORIZON) for here in self._planned)
        self._next = min((number for number in coming if number is not None), default=sys.maxsize)

    def _strike_between_steps(self, iteration: int) -> None:
        if self._struck_between != iteration:  # the step's end comes before the next one's beginning
            self._struck_between = iteration
            self._strike_due_processes(None, iteration)

    def _strike_due_processes(self, section: str | None, iteration: int) -> None:
        for occurrence in self._due(iteration):
            if not FaultKind(occurrence.fault.kind).is_numeric and occurrence.fault.section == section:
                self._strike_process(occurrence)

    def _strike_timed(self, section: str | None, iteration: int) -> None:
        now_ns = self._time.now_ns() if self._timed else 0
        for entry in tuple(self._timed):
            not_before_ns, here = entry
            is_early = now_ns < not_before_ns or (here.fault.once_durable and not self._has_durable)
            if here.fault.section == section and not is_early:
                self._timed.remove(entry)
                self._look_ahead()
                self._strike_process(Occurrence(here, iteration))

    # -- strikes -------------------------------------------------------------------------------------------

    def _strike_process(self, occurrence: Occurrence) -> None:
        if self._claim(occurrence):
            rank = self._place.global_rank
            self._write(occurrence, target=f"rank {rank}")
            if occurrence.fault.kind == FaultKind.SLOW:
                return self._slow_down(occurrence.fault)
            strike_process(occurrence.fault, f"rank {rank} after iteration {occurrence.iteration}")

    def _slow_down(self, fault: Fault) -> None:
        from outlast.chaos.slowing import Slowing

        assert fault.factor is not None
        slowing = Slowing(self._state, factor=fault.factor, duration_s=fault.duration_s)
        if not slowing.slows:
            log.warning("%s: there is no module in the state", fault.describe())
        self._slowings.append(slowing)

    def _strike_weight(self, occurrence: Occurrence, state: Mapping[str, Any]) -> None:
        from outlast.chaos.tensors import choose_weight

        self._strike_chosen(occurrence, choose_weight(state, occurrence))

    def _strike_chosen(self, occurrence: Occurrence, chosen: tuple[str, torch.Tensor] | None) -> None:
        from outlast.chaos.damage import damage

        if chosen is None:
            log.warning("%s: there is nothing that it could change", occurrence.fault.describe())
        elif self._claim(occurrence):
            name, tensor = chosen
            self._write_damage(occurrence, name, damage(tensor, occurrence))

    def _strike_loss(self, occurrence: Occurrence, loss: LossT) -> LossT:
        import torch

        from outlast.chaos.damage import can_damage, damage

        copy = loss.clone() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
        if not can_damage(occurrence.fault.kind, copy):
            log.warning("%s: it cannot change a %s", occurrence.fault.describe(), copy.dtype)
            return loss
        if not self._claim(occurrence):
            return loss
        self._write_damage(occurrence, None, damage(copy, occurrence))
        return copy if isinstance(loss, torch.Tensor) else copy.item()  # type: ignore[return-value]

    def _await_forward(self, occurrence: Occurrence, state: Mapping[str, Any]) -> None:
        from outlast.chaos.tensors import choose_module

        chosen = choose_module(state, occurrence)
        if chosen is None:
            log.warning("%s: there is no module in the state", occurrence.fault.describe())
            return
        name, module = chosen
        self._hooks.append(module.register_forward_hook(partial(self._on_forward, occurrence, name)))

    def _on_forward(self, occurrence: Occurrence, name: str, module: object, arguments: object, output: Any) -> Any:
        from outlast.chaos.damage import can_damage, damage
        from outlast.chaos.tensors import replace_first

        def change(tensor: torch.Tensor) -> torch.Tensor | None:
            if not can_damage(occurrence.fault.kind, tensor) or not self._claim(occurrence):
                return None
            copy = tensor.clone()
            self._write_damage(occurrence, name, damage(copy, occurrence))
            return copy

        changed, done = replace_first(output, change)
        return changed if done else None

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    # -- once a run, and on record -------------------------------------------------------------------------

    def _claim(self, occurrence: Occurrence) -> bool:
        """Return whether the fault may strike now; one that comes once a run leaves its marker here."""
        fault = occurrence.fault
        if fault.persistent:
            return True
        key = occurrence.planned.fault_id
        if fault.rate is not None:
            key += f"-iteration-{occurrence.iteration}"
        if fault.node is not None:
            key += f"-local-rank-{self._place.local_rank}"
        if key in self._spent:
            return False
        self._spent.add(key)
        if self._markers is None:
            return True
        self._markers.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._markers / key, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return False
        return True

    def _write_damage(self, occurrence: Occurrence, tensor: str | None, done: Damage) -> None:
        details: dict[str, Any] = {"target": occurrence.fault.target}
        if tensor is not None:
            details["tensor"] = tensor
        details["element"] = done.element
        if done.bit is not None:
            details["bit"] = done.bit
        self._write(occurrence, **details, before=_number(done.before), after=_number(done.after))

    def _write(self, occurrence: Occurrence, **details: Any) -> None:
        """Put a strike on record; a persistent fault's once a cycle for each iteration."""
        key = (occurrence.planned.fault_id, occurrence.iteration)
        if key in self._events:
            return
        rank, label = self._place.global_rank, occurrence.fault.label
        said = ", ".join(f"{name} {value}" for name, value in details.items())
        log.warning("simulating %s on rank %d after iteration %d: %s", label, rank, occurrence.iteration, said)
        self._events[key] = self._journal.write(
            EventKind.FAULT_SIMULATED,
            rank=rank,
            iteration=occurrence.iteration,
            fault=label,
            **details,
            device=self._device,
            fault_id=occurrence.planned.fault_id,
        )


def _number(value: float) -> float | str:
    """Return a number as JSON can hold it: what is not finite as a text."""
    return value if isinstance(value, int) or abs(value) < float("inf") else str(value)
