"""A plan's faults in one rank, injected by hooks that the session calls.

While no fault is due, a hook compares two integers. A fault that is injected once a run first writes a marker to the
run directory; without a run directory, faults are injected in cycle 0 only.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outlast import clock, env
from outlast.chaos.plan import (
    Fault,
    FaultKind,
    FaultPlan,
    FaultTarget,
    Occurrence,
    claim_marker,
    marker_of,
    planned_faults,
)
from outlast.chaos.process_faults import inject_process_fault
from outlast.config import Config, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.runtime.device import device_name
from outlast.runtime.journal import Journal

if TYPE_CHECKING:
    import torch

    from outlast.chaos.model_faults import Slowing


log = logging.getLogger(__name__)
LossT = TypeVar("LossT")
_HORIZON = 256
"""Number of iterations for which a fault with a rate is drawn ahead."""
_SIMULATED_KINDS = {"rank_hung": FaultKind.STOP, "rank_killed": FaultKind.KILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class FiredFault:
    """One injection into this rank, as it is recorded."""

    fault: str
    """The fault's name or kind."""
    fault_id: str
    """Identifies the fault in the plan: its index and a fingerprint."""
    rank: int
    device: str
    iteration: int
    """Number of completed optimizer steps."""
    details: Mapping[str, Any]
    """The change; of a number its position, and its value before and after."""


class ArmedFaults:
    """Inject the faults of a plan into this rank, from the hooks below; a session calls them.

    Args:
        plan: The faults, the same on all ranks.
        global_rank: This rank.
        world_size: Number of ranks.
        local_rank: This rank's number on its node.
        node: Name of its node.
        device: Name of its device: ``gpu-<uuid>``, or ``<node>/cpu-<local rank>``.
        cycle: Number of restarts of the job's workers.
        run_dir: Directory of the markers of injected faults; ``None``: faults are injected in cycle 0 only.
        record: Called with each fault before it is injected.
        now_ns: The monotonic clock of ``after_s``, which counts from here.

    Raises:
        ConfigError: A fault is for a rank that does not exist.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        plan: FaultPlan,
        *,
        global_rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        node: str = "localhost",
        device: str = "localhost/cpu-0",
        cycle: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
        record: Callable[[FiredFault], object] | None = None,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        place = WorkerEnv(global_rank=global_rank, world_size=world_size, local_rank=local_rank, node=node, cycle=cycle)
        self._place, self._device, self._record, self._now_ns = place, device, record, now_ns
        self._markers = None if run_dir is None else Path(run_dir) / "faults"
        planned = list(planned_faults(plan))
        for here in planned:
            rank = here.fault.rank
            if rank is not None and rank >= world_size and cycle == 0:  # later, the world may have shrunk
                last = world_size - 1
                raise ConfigError(f"faults[{here.index}]: rank={rank} does not exist, ranks end at {last}; name one")
        remembers = run_dir is not None or cycle == 0
        planned = [one for one in planned if (remembers or one.fault.persistent) and one.can_apply_to(place, device)]
        self._unreleased = [one for one in planned if one.is_released and run_dir is not None]
        self._run_dir = run_dir
        self._planned = [one for one in planned if one.fault.after_s is None and not one.is_released]
        started_ns = now_ns()
        self._timed = [
            (started_ns + int(one.fault.after_s * 1e9), one)
            for one in planned
            if one.fault.after_s is not None and one.applies_to(place, device, 0)
        ]
        self.sections = frozenset(one.fault.section for one in planned if one.fault.section is not None)
        """The sections for which :meth:`enter_section` must be called."""
        self._has_durable = False
        self._next = 0
        self._due_at = -1
        self._due_now: tuple[Occurrence, ...] = ()
        self._injected_between = -1
        self._spent: set[str] = set()
        self._fired: dict[tuple[str, int], FiredFault] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._state: Mapping[str, Any] = {}
        self._slowings: list[Slowing] = []

    @property
    def fired(self) -> tuple[FiredFault, ...]:
        """The injections into this rank in this cycle."""
        return tuple(self._fired.values())

    def before_step(self, iteration: int, state: Mapping[str, Any], *, has_durable: bool = True) -> None:
        """Apply the faults due before or in the coming step, except those in its loss and gradients.

        Args:
            iteration: Number of completed optimizer steps.
            state: The script's state, which contains weights and modules.
            has_durable: Whether a durable checkpoint exists, or the script saves none.

        Raises:
            ConfigError: A fault names a tensor, an element or a bit that does not exist.
            SimulatedError, SystemExit: A fault of that kind is due.
        """
        if not self._begin_or_end_step(iteration, state, has_durable):
            return
        for occurrence in self._due_in(FaultTarget.WEIGHT, iteration):
            self._inject_tensor(occurrence, state)
        for occurrence in self._due_in(FaultTarget.ACTIVATION, iteration):
            self._await_forward(occurrence, state)

    def on_loss(self, iteration: int, loss: LossT) -> LossT:
        """Return the loss that the step validates: the given number or tensor, or a changed copy.

        Args:
            iteration: Number of optimizer steps completed before this step.
            loss: The loss to validate.
        """
        for occurrence in self._due_in(FaultTarget.LOSS, iteration):
            loss = self._inject_loss(occurrence, loss)
        return loss

    def after_backward(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Apply the faults due in the gradients of this step; called before the optimizer's step.

        Args:
            iteration: Number of optimizer steps completed before this step.
            state: As for :meth:`before_step`.

        Raises:
            ConfigError: A fault names a tensor, an element or a bit that does not exist.
        """
        for occurrence in self._due_in(FaultTarget.GRADIENT, iteration):
            self._inject_tensor(occurrence, state)

    def after_step(self, iteration: int, state: Mapping[str, Any], *, has_durable: bool = True) -> None:
        """Apply the faults due between this step and the next; called after the due saves.

        Args:
            iteration: Number of completed optimizer steps, including this one.
            state: As for :meth:`before_step`.
            has_durable: As for :meth:`before_step`.

        Raises:
            SimulatedError, SystemExit: A fault of that kind is due.
        """
        if self._begin_or_end_step(iteration, state, has_durable):
            self._inject_timed(None, iteration)

    def enter_section(self, name: str, iteration: int) -> None:
        """Apply the faults due in a section; called as soon as the section is open.

        Args:
            name: The section's name.
            iteration: Number of completed optimizer steps.

        Raises:
            SimulatedError, SystemExit: A fault of that kind is due.
        """
        if name in self.sections:
            self._inject_due_processes(name, iteration)
            self._inject_timed(name, iteration)

    def close(self) -> None:
        """Apply no faults from now on. Idempotent."""
        self._remove_hooks()
        while self._slowings:
            self._slowings.pop().remove()
        self._planned, self._timed, self._due_now, self._next = [], [], (), sys.maxsize
        self._unreleased = []

    def _due(self, iteration: int) -> tuple[Occurrence, ...]:
        if iteration != self._due_at:
            self._due_at = iteration
            self._due_now = tuple(
                Occurrence(here, iteration)
                for here in self._planned
                if here.is_due(iteration) and here.applies_to(self._place, self._device, iteration)
            )
            self._look_ahead()
        return self._due_now

    def _due_in(self, target: FaultTarget, iteration: int) -> Sequence[Occurrence]:
        """Return the numeric faults that are due; one comparison while there are none."""
        return () if iteration < self._next else [one for one in self._due(iteration) if one.fault.target == target]

    def _look_ahead(self) -> None:
        """Set the first iteration at which the hooks must check again."""
        if self._due_now or self._timed:
            self._next = self._due_at
            return
        coming = (here.next_due(self._due_at + 1, horizon=_HORIZON) for here in self._planned)
        self._next = min((number for number in coming if number is not None), default=sys.maxsize)

    def _begin_or_end_step(self, iteration: int, state: Mapping[str, Any], has_durable: bool) -> bool:
        """Apply the faults due between two steps; return whether others may be due."""
        self._has_durable, self._state = has_durable, state
        self._remove_hooks()
        if self._unreleased and self._injected_between != iteration:
            self._plan_released(iteration)
        if iteration < self._next:
            return False
        if self._injected_between != iteration:  # a step's end precedes the next one's begin
            self._injected_between = iteration
            self._inject_due_processes(None, iteration)
        return True

    def _plan_released(self, iteration: int) -> None:
        """Plan released faults for this iteration; one file check per unreleased fault."""
        assert self._run_dir is not None
        for one in tuple(self._unreleased):
            if marker_of(self._run_dir, one.fault_id, due=True).exists():
                self._unreleased.remove(one)
                fault = replace(one.fault, at_s=None, on_request=False, iteration=iteration)
                if fault.node is None and fault.device is None:
                    fault = replace(fault, rank=self._place.global_rank)
                self._planned.append(replace(one, fault=fault))
                self._due_at, self._next = -1, iteration

    def _inject_due_processes(self, section: str | None, iteration: int) -> None:
        for occurrence in self._due(iteration):
            if not FaultKind(occurrence.fault.kind).is_numeric and occurrence.fault.section == section:
                self._inject_process(occurrence)

    def _inject_timed(self, section: str | None, iteration: int) -> None:
        now_ns = self._now_ns() if self._timed else 0
        for entry in tuple(self._timed):
            not_before_ns, here = entry
            is_early = now_ns < not_before_ns or (here.fault.once_durable and not self._has_durable)
            if here.fault.section == section and not is_early:
                self._timed.remove(entry)
                self._look_ahead()
                self._inject_process(Occurrence(here, iteration))

    def _inject_process(self, occurrence: Occurrence) -> None:
        if not self._claim(occurrence):
            return
        rank, fault = self._place.global_rank, occurrence.fault
        self._report(occurrence, target=f"rank {rank}")
        if fault.kind != FaultKind.SLOW:
            return inject_process_fault(fault, f"rank {rank} after iteration {occurrence.iteration}")
        from outlast.chaos.model_faults import Slowing

        assert fault.factor is not None
        slowing = Slowing(self._state, factor=fault.factor, duration_s=fault.duration_s)
        if not slowing.slows:
            log.warning("%s: there is no module in the state", fault.describe())
        self._slowings.append(slowing)

    def _inject_tensor(self, occurrence: Occurrence, state: Mapping[str, Any]) -> None:
        from outlast.chaos.model_faults import choose_tensor

        chosen = choose_tensor(state, occurrence)
        if chosen is None:
            log.warning("%s: there is nothing that it could change", occurrence.fault.describe())
        elif self._claim(occurrence):
            self._damage(occurrence, *chosen)

    def _inject_loss(self, occurrence: Occurrence, loss: LossT) -> LossT:
        import torch

        from outlast.chaos.model_faults import can_damage

        copy = loss.clone() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
        if not can_damage(occurrence.fault.kind, copy):
            log.warning("%s: it cannot change a %s", occurrence.fault.describe(), copy.dtype)
            return loss
        if not self._claim(occurrence):
            return loss
        self._damage(occurrence, None, copy)
        return copy if isinstance(loss, torch.Tensor) else copy.item()  # type: ignore[return-value]

    def _await_forward(self, occurrence: Occurrence, state: Mapping[str, Any]) -> None:
        from outlast.chaos.model_faults import choose_module

        chosen = choose_module(state, occurrence)
        if chosen is None:
            log.warning("%s: there is no module in the state", occurrence.fault.describe())
            return
        name, module = chosen
        self._hooks.append(module.register_forward_hook(partial(self._on_forward, occurrence, name)))

    def _on_forward(self, occurrence: Occurrence, name: str, module: object, arguments: object, output: Any) -> Any:
        from outlast.chaos.model_faults import can_damage, replace_first

        def change(tensor: torch.Tensor) -> torch.Tensor | None:
            if not can_damage(occurrence.fault.kind, tensor) or not self._claim(occurrence):
                return None
            copy = tensor.clone()
            self._damage(occurrence, name, copy)
            return copy

        changed, done = replace_first(output, change)
        return changed if done else None

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _claim(self, occurrence: Occurrence) -> bool:
        """Return whether the fault may be injected now; the marker of one that is injected once a run is written
        here."""
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
        return claim_marker(self._markers / key)

    def _damage(self, occurrence: Occurrence, name: str | None, tensor: torch.Tensor) -> None:
        """Change an element of a tensor in place, and record it."""
        from outlast.chaos.model_faults import damage

        done = damage(tensor, occurrence)
        details: dict[str, Any] = {"target": occurrence.fault.target}
        if name is not None:
            details["tensor"] = name
        details["element"] = done.element
        if done.bit is not None:
            details["bit"] = done.bit
        self._report(occurrence, **details, before=_number(done.before), after=_number(done.after))

    def _report(self, occurrence: Occurrence, **details: Any) -> None:
        """Log and record an injection; for a persistent fault once per cycle and iteration."""
        key = (occurrence.planned.fault_id, occurrence.iteration)
        if key in self._fired:
            return
        rank, label = self._place.global_rank, occurrence.fault.label
        text = ", ".join(f"{name} {value}" for name, value in details.items())
        log.warning("simulating %s on rank %d after iteration %d: %s", label, rank, occurrence.iteration, text)
        self._fired[key] = fired = FiredFault(
            fault=label,
            fault_id=occurrence.planned.fault_id,
            rank=rank,
            device=self._device,
            iteration=occurrence.iteration,
            details=details,
        )
        if self._record is not None:
            self._record(fired)


def arm_configured(
    config: Config, fault_tolerance: FaultToleranceConfig, place: WorkerEnv, journal: Journal
) -> ArmedFaults | None:
    """Return the armed faults of a session's settings; ``None``: there are none.

    Args:
        config: The session's settings.
        fault_tolerance: The fault tolerance settings in force.
        place: This worker's place.
        journal: Records each fault.

    Raises:
        ConfigError: The plan cannot be read or is not valid, or a fault is for a rank that does not exist.
    """
    path = env.fault_plan() or config.fault_plan
    plan = FaultPlan() if path is None else FaultPlan.load(path)
    if fault_tolerance.simulate_fault:
        plan = replace(plan, faults=(*plan.faults, simulated_fault(fault_tolerance, place)))
    if not plan.faults:
        return None
    return arm_here(plan, place, journal, device=device_name(place.device or place.node, place.local_rank))


def arm_here(
    plan: FaultPlan, place: WorkerEnv, journal: Journal, *, device: str, now_ns: Callable[[], int] = clock.now_ns
) -> ArmedFaults:
    """Arm a plan on a worker; faults are written to its journal, and markers to its run directory."""

    def record(fired: FiredFault) -> None:
        journal.write(
            EventKind.FAULT_SIMULATED,
            rank=fired.rank,
            iteration=fired.iteration,
            fault=fired.fault,
            **fired.details,
            device=fired.device,
            fault_id=fired.fault_id,
        )

    return ArmedFaults(
        plan,
        global_rank=place.global_rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        node=place.node,
        device=device,
        cycle=place.cycle,
        run_dir=place.run_dir,
        record=record,
        now_ns=now_ns,
    )


def simulated_fault(config: FaultToleranceConfig, place: WorkerEnv) -> Fault:
    """Return the fault of ``simulate_fault``: a rank that hangs or is killed, once a run.

    Values that the settings leave open are drawn from the run's name, so that all ranks draw the same.

    Raises:
        ConfigError: The rank does not exist.
    """
    draw = random.Random(f"simulated fault of {place.run_id}")
    drawn_type, drawn_rank = draw.choice(sorted(_SIMULATED_KINDS)), draw.randrange(place.world_size)
    name = drawn_type if config.simulated_fault_type == "random" else config.simulated_fault_type
    rank = drawn_rank if config.simulated_fault_rank is None else config.simulated_fault_rank
    if rank >= place.world_size:
        raise ConfigError(f"simulated_fault_rank={rank} does not exist, ranks end at {place.world_size - 1}; name one")
    delay_s = config.simulated_fault_base_delay
    return Fault(name=name, kind=_SIMULATED_KINDS[name], rank=rank, after_s=delay_s, once_durable=True)


def _number(value: float) -> float | str:
    """Return a number in a form that JSON supports: infinity and NaN as text."""
    return value if isinstance(value, int) or abs(value) < float("inf") else str(value)
