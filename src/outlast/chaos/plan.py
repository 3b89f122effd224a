"""A plan of faults, seeded: read from a file or made in Python, checked, drawn from, and compared with what struck.

A plan needs no coordination. Whatever it leaves open is drawn from the seed, the fault's place in the plan and the
iteration, so that all ranks draw the same, in each cycle. Each draw has a key of its own (fault, purpose, iteration)
and depends on nothing else, so that it does not matter which ranks draw, how often, or from which iteration a restarted
run resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.chaos.fault import Fault
from outlast.config.base import from_mapping, nearest, parse_text, require
from outlast.config.files import load_values
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.journal import read

__all__ = ["FaultPlan", "MissingFault", "Occurrence", "PlannedFault", "planned_faults", "verify_fired"]

_SCALE = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which faults strike a run.

    Raises:
        ConfigError: A value is wrong; the message names it.
    """

    seed: int = 0
    """What the faults leave open is drawn from it."""

    faults: tuple[Fault, ...] = ()
    """The faults, in any order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", parse_text(int, self.seed, where="seed"))
        require(isinstance(self.faults, Iterable), f"faults={self.faults!r} is no list of faults; write a list")
        object.__setattr__(self, "faults", tuple(self.faults))
        for fault in self.faults:
            require(isinstance(fault, Fault), f"faults holds {fault!r}; make it an outlast.chaos.Fault")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FaultPlan:
        """Read a plan from a ``.toml``, ``.json`` or ``.yaml`` file.

        Raises:
            ConfigError: The file cannot be read, or the plan is wrong; one line that names file and key.
        """
        return cls.from_mapping(load_values(path)[0], where=os.fspath(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str = "fault plan") -> FaultPlan:
        """Make a plan from plain values: ``seed``, and ``faults``, a list with one mapping for each fault.

        Args:
            values: The values.
            where: What to call their source in an error.

        Raises:
            ConfigError: The plan is wrong; one line that names the key.
        """
        known = ("seed", "faults")
        for key in values:
            if key not in known:
                raise ConfigError(f"{where}: unknown key {key!r}; {nearest(str(key), known)}")
        listed = values.get("faults", [])
        if not isinstance(listed, list | tuple) or not all(isinstance(fault, Mapping) for fault in listed):
            raise ConfigError(f"{where}: faults: not a list of faults; write [[faults]] above each one's keys")
        faults = tuple(
            from_mapping(Fault, fault, where=f"{where}: faults[{index}]") for index, fault in enumerate(listed)
        )
        return cls(seed=parse_text(int, values.get("seed", 0), where=f"{where}: seed"), faults=faults)

    def to_mapping(self) -> dict[str, Any]:
        """Return the plan as plain values, without what is left at its default."""
        return {"seed": self.seed, "faults": [fault.to_mapping() for fault in self.faults]}

    def to_json(self) -> str:
        """Return the plan as JSON, which :meth:`load` reads."""
        return json.dumps(self.to_mapping(), indent=2) + "\n"

    def to_toml(self) -> str:
        """Return the plan as TOML, which :meth:`load` reads."""
        lines = [f"seed = {self.seed}"]
        for fault in self.faults:
            lines += ["", "[[faults]]", *(f"{name} = {_toml(value)}" for name, value in fault.to_mapping().items())]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault together with what distinguishes its draws from those of others."""

    seed: int
    index: int
    """Its place in the plan, from 0."""
    fault: Fault
    fault_id: str
    """Names it in the journal and in its marker: place and fingerprint; an edited fault is another."""

    def draw(self, count: int, purpose: str, iteration: int = 0) -> int:
        """Return a number from 0 to below ``count``."""
        return self._number(purpose, iteration) * count // _SCALE

    def is_due(self, iteration: int) -> bool:
        """Return whether the step at this iteration is struck, on any rank; not for one with ``after_s``."""
        if self.fault.rate is None:
            return iteration == self.fault.iteration
        return self._number("due", iteration) < self.fault.rate * _SCALE

    def applies_to(self, place: WorkerEnv, device: str, iteration: int) -> bool:
        """Return whether this rank is struck when the step at this iteration is."""
        fault = self.fault
        if fault.rank is not None:
            return place.global_rank == fault.rank
        if fault.node is not None:
            return place.node == fault.node
        if fault.device is not None:
            return device == fault.device
        return place.global_rank == self.draw(place.world_size, "rank", iteration)

    def can_apply_to(self, place: WorkerEnv, device: str) -> bool:
        """Return whether this rank is struck at any iteration."""
        is_drawn = self.fault.rank is None and self.fault.node is None and self.fault.device is None
        return (is_drawn and self.fault.rate is not None) or self.applies_to(place, device, self.fault.iteration or 0)

    def next_due(self, iteration: int, *, horizon: int) -> int | None:
        """Return the first iteration from this one on at which it is due.

        Args:
            iteration: Where to begin.
            horizon: How many iterations to look at where each has to be drawn.

        Returns:
            The iteration; ``iteration + horizon`` if nothing is due before; ``None`` when it is never due again.
        """
        if self.fault.rate is None:
            due = self.fault.iteration
            return due if due is not None and due >= iteration else None
        ahead = range(iteration, iteration + horizon)
        return next((number for number in ahead if self.is_due(number)), ahead.stop)

    def _number(self, purpose: str, iteration: int) -> int:
        key = f"{self.seed}/{self.index}/{purpose}/{iteration}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that a fault is due on this rank."""

    planned: PlannedFault
    iteration: int

    @property
    def fault(self) -> Fault:
        """The fault."""
        return self.planned.fault

    def draw(self, count: int, purpose: str) -> int:
        """Return a number from 0 to below ``count``, drawn for this iteration."""
        return self.planned.draw(count, purpose, self.iteration)


def planned_faults(plan: FaultPlan) -> Iterator[PlannedFault]:
    """Yield a plan's faults with their names."""
    for index, fault in enumerate(plan.faults):
        content = json.dumps([plan.seed, fault.to_mapping()], sort_keys=True).encode()
        fingerprint = hashlib.blake2b(content, digest_size=4).hexdigest()
        yield PlannedFault(plan.seed, index, fault, f"{index}-{fingerprint}")


@dataclass(frozen=True, slots=True)
class MissingFault:
    """A planned fault that did not strike, or not each time that it was due."""

    index: int
    """Its place in the plan, from 0."""
    fault: Fault
    iterations: tuple[int, ...]
    """Where it was due; empty when that is not known: with ``after_s``, or with a rate that drew no iteration."""
    reached: int
    """The highest iteration that the journal knows of."""

    def describe(self) -> str:
        """Return one line for people."""
        where = f" (due at {', '.join(map(str, self.iterations))})" if self.fault.rate and self.iterations else ""
        return f"faults[{self.index}] did not strike: {self.fault.describe()}{where}; the run reached {self.reached}"


def verify_fired(plan: FaultPlan, run_dir: str | os.PathLike[str]) -> list[MissingFault]:
    """Return the faults of a plan that did not strike in a run, in the plan's order; none: all did.

    A fault with a rate is missing when it did not strike at one of the iterations drawn for it, of those that the
    run is known to have reached, or when it drew none at all.

    Args:
        plan: The plan that the run was given.
        run_dir: The run directory; its journal is read.
    """
    struck: defaultdict[str, set[int]] = defaultdict(set)
    reached = 0
    for event in read(run_dir):
        reached = max(reached, event.iteration or 0)
        if event.kind == EventKind.FAULT_SIMULATED and event.iteration is not None:
            struck[str(event.data.get("fault_id"))].add(event.iteration)
    missing = []
    for planned in planned_faults(plan):
        due = _due(planned, reached)
        left = tuple(iteration for iteration in due if iteration not in struck[planned.fault_id])
        if left or not struck[planned.fault_id]:
            missing.append(MissingFault(planned.index, planned.fault, left, reached))
    return missing


def _due(planned: PlannedFault, reached: int) -> tuple[int, ...]:
    if planned.fault.rate is not None:
        return tuple(iteration for iteration in range(reached) if planned.is_due(iteration))
    return () if planned.fault.iteration is None else (planned.fault.iteration,)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
