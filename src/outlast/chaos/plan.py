"""A plan of faults, seeded: read from a file or made in Python, checked, and armed on every rank.

A plan needs no coordination. Whatever it leaves open is drawn from the seed, the fault's place in the plan and the
iteration, so that all ranks draw the same, in each cycle anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast import clock
from outlast.chaos.fault import Fault
from outlast.config.base import from_mapping, nearest, parse_text, require
from outlast.config.files import load_values
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.runtime.journal import Journal

if TYPE_CHECKING:
    from outlast.chaos.armed import ArmedFaults

__all__ = ["FaultPlan"]


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

    def arm(
        self,
        place: WorkerEnv,
        *,
        run_dir: str | os.PathLike[str] | None,
        journal: Journal,
        device: str,
        time: clock.Clock | None = None,
    ) -> ArmedFaults:
        """Return the faults as one rank sees them, ready to strike.

        Args:
            place: This worker's place.
            run_dir: Folder of the markers by which a fault comes once a run; none: it comes in cycle 0 only.
            journal: Where each fault is written.
            device: Name of the hardware that this rank computes on (``runtime.device.device_name``).
            time: The clock of ``after_s``, which runs from here on; ``None`` = the machine's own.

        Raises:
            ConfigError: A fault is for a rank that does not exist.
        """
        from outlast.chaos.armed import ArmedFaults

        return ArmedFaults(self, place, run_dir=run_dir, journal=journal, device=device, time=time or clock.MONOTONIC)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
