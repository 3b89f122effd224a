"""A plan of faults: read from a file or made in Python, checked, and compared with the faults that were injected.

A fault specifies what goes wrong, where and when; nothing here injects it.

Plans need no coordination: values that a fault leaves open are drawn from the seed, the fault's index and the
iteration, so that all ranks draw the same in each cycle. Each draw has its own key (fault, purpose, iteration), so that
it does not matter which ranks draw, how often, or from which iteration a restarted run resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from outlast.config.base import from_mapping, nearest, parse_text, require, require_finite
from outlast.config.sources import load_values
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.journal import read


class FaultKind(StrEnum):
    """The kind of a fault."""

    NAN = "nan"
    """One element of the target becomes NaN."""
    INF = "inf"
    """One element of the target becomes infinite."""
    SIGN_FLIP = "sign_flip"
    """One element of the target changes its sign; of those drawn from the seed, one that is not 0 if there is any."""
    BIT_FLIP = "bit_flip"
    """One bit of one element of the target is flipped, whatever the element's type."""
    KILL = "kill"
    """The process receives SIGKILL."""
    STOP = "stop"
    """The process receives SIGSTOP: all of its threads hang."""
    SLEEP = "sleep"
    """The training thread sleeps for ``duration_s``; other threads continue."""
    HOLD_GIL = "hold_gil"
    """The training thread holds the GIL in C code for ``duration_s``: no Python code of the process runs."""
    SLOW = "slow"
    """From then on the forward of each module in the state takes ``factor`` times as long, for ``duration_s``: a slow
    rank."""
    EXCEPTION = "exception"
    """``outlast.chaos.SimulatedError`` is raised."""
    EXIT = "exit"
    """``SystemExit`` with ``exit_code`` is raised."""
    SIGTERM = "sigterm"
    """The process receives SIGTERM, as before a preemption."""
    KILL_AGENT = "kill_agent"
    """From outside: a node's agent receives SIGKILL; its workers and its writer, with the memory tier, end with it."""
    STOP_AGENT = "stop_agent"
    """From outside: a node's agent receives SIGSTOP, for ``duration_s``; its workers and its writer continue."""
    KILL_COORDINATOR = "kill_coordinator"
    """From outside: the agent that hosts the coordinator receives SIGKILL."""
    STOP_COORDINATOR = "stop_coordinator"
    """From outside: the agent that hosts the coordinator receives SIGSTOP, for ``duration_s``."""
    LOSE_NODE = "lose_node"
    """From outside: a node's agent receives SIGKILL, and the run's files in the node's folder of the local tier are
    deleted."""
    LOSE_NODE_AND_REPLICAS = "lose_node_and_replicas"
    """From outside: as lose_node, after one byte was changed in every replica that other nodes hold of the state of its
    ranks: only the global tier has it. Waits until the cycle has committed a checkpoint there."""
    CORRUPT_COPY = "corrupt_copy"
    """From outside: one byte in the middle of one copy in ``tier`` is changed."""
    TRUNCATE_COPY = "truncate_copy"
    """From outside: one file of a copy in ``tier`` is cut to half of its length; not in memory, which is sealed."""
    DELETE_COPY = "delete_copy"
    """From outside: one file of a copy in ``tier`` is deleted; in memory, its pages are freed and read as zeros."""
    DISK_FULL = "disk_full"
    """From outside: for ``duration_s``, each file of a checkpoint that a node's writer process makes in ``tier`` fails
    there with "no space left on device"; nothing is really filled."""
    SLOW_DISK = "slow_disk"
    """From outside: for ``duration_s``, each such file takes ``delay_s`` longer."""
    PARTITION = "partition"
    """From outside, under ``--netns``: for ``duration_s`` a node and the others cannot reach each other."""
    DELAY = "delay"
    """From outside, under ``--netns``: for ``duration_s`` a node's packets arrive ``delay_s`` later."""
    LOSS = "loss"
    """From outside, under ``--netns``: for ``duration_s`` a ``share`` of the packets that a node sends is lost."""

    @property
    def is_numeric(self) -> bool:
        """Whether the fault changes a number; otherwise it applies to the process."""
        return self in _NUMERIC

    @property
    def is_outside(self) -> bool:
        """Whether ``outlast chaos run`` injects the fault from outside; otherwise a rank's session does."""
        return self in _OUTSIDE

    @property
    def is_of_copies(self) -> bool:
        return self in _OF_COPIES

    @property
    def is_of_networks(self) -> bool:
        """Whether the fault impairs a node's network, which requires ``--netns``."""
        return self in _OF_NETWORKS

    @property
    def needs_netem(self) -> bool:
        """Whether the kernel's packet scheduler netem injects the fault."""
        return self in _BY_NETEM

    @property
    def is_gentle(self) -> bool:
        """Whether the fault causes no restart, unless the run is configured to restart on it."""
        return self.is_of_copies or self.is_of_disks or self in _GENTLE

    @property
    def is_of_disks(self) -> bool:
        return self in _OF_DISKS


_NUMERIC = frozenset({FaultKind.NAN, FaultKind.INF, FaultKind.SIGN_FLIP, FaultKind.BIT_FLIP})
_OF_COPIES = frozenset({FaultKind.CORRUPT_COPY, FaultKind.TRUNCATE_COPY, FaultKind.DELETE_COPY})
_OF_DISKS = frozenset({FaultKind.DISK_FULL, FaultKind.SLOW_DISK})
_OF_COORDINATORS = frozenset({FaultKind.KILL_COORDINATOR, FaultKind.STOP_COORDINATOR})
_STOPPED = frozenset({FaultKind.STOP_AGENT, FaultKind.STOP_COORDINATOR})
_BY_NETEM = frozenset({FaultKind.DELAY, FaultKind.LOSS})
_OF_NETWORKS = _BY_NETEM | {FaultKind.PARTITION}
_GENTLE = _BY_NETEM | {FaultKind.SLOW, FaultKind.NAN, FaultKind.INF}
_PASSING = _OF_DISKS | _OF_NETWORKS
LOST_NODES = frozenset({FaultKind.LOSE_NODE, FaultKind.LOSE_NODE_AND_REPLICAS})
_OUTSIDE = _OF_COPIES | _PASSING | _OF_COORDINATORS | _STOPPED | LOST_NODES | {FaultKind.KILL_AGENT}
_LASTING = frozenset({FaultKind.SLEEP, FaultKind.HOLD_GIL, FaultKind.SLOW})


class FaultTarget(StrEnum):
    """The numbers that a numeric fault changes."""

    LOSS = "loss"
    """The value that is validated; the gradients keep theirs."""
    WEIGHT = "weight"
    """A parameter of a module in the state, or a tensor given in the state, before the step's forward. The damage
    stays until a checkpoint is loaded."""
    GRADIENT = "gradient"
    """A parameter's gradient, after the backward and any reduction among ranks."""
    ACTIVATION = "activation"
    """The output of a module within the state's modules."""


class FaultTier(StrEnum):
    """The tier in which a copy is damaged, or writing is impaired."""

    MEMORY = "memory"
    """The memory of a node's writer process: the shards of the node's own ranks."""
    LOCAL = "local"
    """A node's folder on its disk: the shards of its own ranks."""
    REPLICA = "replica"
    """The same folder: the shards of other nodes' ranks."""
    GLOBAL = "global"
    """The checkpoints that all ranks share; a folder, not a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a :class:`~outlast.chaos.FaultPlan`.

    Raises:
        ConfigError: A value is unknown, out of range, or contradicts another; the message names it.
    """

    kind: str
    """The kind of the fault."""

    target: str | None = None
    """The value that a numeric fault changes: loss, weight, gradient or activation."""

    tensor: str | None = None
    """Shell-style pattern of the name of the weight or gradient, such as ``model.layers.*.weight``, or of the module
    whose output is changed; the first part is the key in the state. One match is drawn from the seed; none = among
    all."""

    element: int | None = None
    """Which element of the tensor (on this rank, counted row by row); none = drawn from the seed."""

    bit: int | None = None
    """Which bit is flipped, from 0, the least significant; none = drawn from the seed."""

    rank: int | None = None
    """Global rank in which the fault is injected, on any node. Without rank, node and device one rank is drawn from the
    seed."""

    node: str | None = None
    """Name of the node in all of whose ranks the fault is injected."""

    device: str | None = None
    """Name of the device in all of whose ranks the fault is injected: ``gpu-<uuid>`` of a GPU, else ``<node>/cpu-<local
    rank>``."""

    iteration: int | None = None
    """Number of completed optimizer steps at which the fault is injected: in the next step, or right before it."""

    rate: float | None = None
    """Instead of an iteration: expected number of injections per step, at most 1; drawn from the seed for each step."""

    after_s: float | None = None
    """Instead of an iteration, for process faults: earliest time of the injection, in seconds after the session's
    start."""

    at_s: float | None = None
    """Instead of an iteration, under ``outlast chaos run``: earliest time of the injection, in seconds after the run's
    first step. The injection waits while the ranks restart."""

    on_request: bool = False
    """Instead of an iteration: inject the fault when a test requests it with ``outlast.testing.Cluster.inject``."""

    once_durable: bool = False
    """With ``after_s``: also wait until there is a checkpoint to resume from."""

    section: str | None = None
    """Section in which a process fault is injected, as soon as it is entered; none = between two steps, outside all
    sections. In ``setup`` no step is complete yet."""

    duration_s: float | None = None
    """Duration of a sleep, hold_gil, slow, stop_agent, stop_coordinator, disk_full, slow_disk, partition, delay or loss
    in seconds; none = permanently, or until the process ends. The last five require it."""

    factor: float | None = None
    """Factor of the slowdown under slow; above 1."""

    tier: str | None = None
    """Tier in which a copy is damaged: memory, local, replica or global; tier whose disk is full or slow: local or
    global."""

    checkpoint: int | None = None
    """Iteration of the checkpoint whose copy is damaged; none = the newest committed one."""

    delay_s: float | None = None
    """Seconds that each file takes longer under slow_disk, and each packet under delay."""

    share: float | None = None
    """Share of the packets that is lost under loss; above 0, at most 1."""

    exit_code: int = 1
    """Exit code of the kind exit."""

    persistent: bool = False
    """Inject it each time the rank, node or device computes the step, also in re-runs and after restarts; off: once a
    run."""

    name: str | None = None
    """What the journal calls it; none = its kind."""

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            object.__setattr__(self, name, parse_text(hint, getattr(self, name), where=name))
        require_finite(self)
        require(self.kind in _KINDS, f"kind={self.kind!r} is unknown; {nearest(self.kind, _KINDS)}")
        if FaultKind(self.kind).is_numeric:
            self._check_numeric()
        elif FaultKind(self.kind).is_outside:
            self._check_outside()
        else:
            self._check_process()
        self._check_victim()
        self._check_moment()
        if not FaultKind(self.kind).is_outside:
            self._check_absent("tier", "checkpoint", "delay_s", "share")
        for name in ("name", "section", "tensor", "node", "device"):
            text = getattr(self, name)
            require(text is None or (text != "" and text.isprintable()), f"{name}={text!r} must be a printable text")

    @property
    def label(self) -> str:
        return self.name or self.kind

    def describe(self) -> str:
        """Return one line for people: fault, place and time."""
        what = self.label if self.target is None else f"{self.label} in the {self.target}"
        if self.tensor is not None:
            what += f" {self.tensor}"
        if self.rank is not None:
            whom = f"rank {self.rank}"
        elif self.node is not None:
            whom = f"node {self.node}"
        elif FaultKind(self.kind) in _OF_COORDINATORS:
            whom = "the coordinator's node"
        elif FaultKind(self.kind).is_outside:
            whom = "a drawn node" if self.tier is None else f"the {self.tier} tier"
        else:
            whom = "a drawn rank" if self.device is None else f"device {self.device}"
        if self.iteration is not None:
            when = f"at iteration {self.iteration}"
        elif self.at_s is not None:
            when = f"after {self.at_s:g} s of the run"
        elif self.on_request:
            when = "on request"
        else:
            when = f"after {self.after_s} s" if self.rate is None else f"at a rate of {self.rate} a step"
        where = f" in section {self.section!r}" if self.section else ""
        return f"{what} on {whom} {when}{where}{', persistent' if self.persistent else ''}"

    def to_mapping(self) -> dict[str, Any]:
        """Return the values that differ from the defaults."""
        given = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in given.items() if value != default}

    def _check_numeric(self) -> None:
        require(self.target is not None, f"target is missing; a {self.kind} needs one of {', '.join(sorted(_TARGETS))}")
        target = self.target or ""
        require(target in _TARGETS, f"target={target!r} is unknown; {nearest(target, _TARGETS)}")
        require(self.target != FaultTarget.LOSS or self.tensor is None, "tensor is not for target='loss'; leave it out")
        require(
            self.bit is None or (self.kind == FaultKind.BIT_FLIP and 0 <= self.bit < 64),
            f"bit={self.bit} is for kind='bit_flip', from 0 to the element's last bit; correct it or leave it out",
        )
        require(self.element is None or self.element >= 0, f"element={self.element} must not be negative")
        self._check_absent("section", "duration_s", "factor", "after_s")

    def _check_process(self) -> None:
        self._check_absent("target", "tensor", "element", "bit")
        require(
            self.duration_s is None or (self.kind in _LASTING and self.duration_s > 0),
            f"duration_s={self.duration_s} is for kind sleep, hold_gil and slow, and above 0; correct it or leave it "
            "out",
        )
        if self.kind == FaultKind.SLOW:
            require(self.factor is not None, "factor is missing; a slow needs one above 1")
            self._check_absent("section", "rate")

        require(
            self.factor is None or (self.kind == FaultKind.SLOW and self.factor > 1),
            f"factor={self.factor} is for kind slow, and above 1; correct it or leave it out",
        )

    def _check_outside(self) -> None:
        kind = FaultKind(self.kind)
        self._check_absent("target", "tensor", "element", "bit", "section", "factor", "rate", "after_s", "device")
        require(not self.persistent, f"persistent is not for kind={self.kind!r}; leave it out")
        if kind in _OF_COORDINATORS or self.tier == FaultTier.GLOBAL:
            self._check_absent("node")
        if not kind.is_of_copies:
            self._check_absent("rank", "checkpoint")
        if kind not in _STOPPED | _PASSING:
            self._check_absent("duration_s")
        if not (kind.is_of_copies or kind.is_of_disks):
            self._check_absent("tier")
        if kind not in (FaultKind.SLOW_DISK, FaultKind.DELAY):
            self._check_absent("delay_s")
        if kind != FaultKind.LOSS:
            self._check_absent("share")
        for name, is_needed in (
            ("tier", kind.is_of_copies or kind.is_of_disks),
            ("duration_s", kind in _PASSING),
            ("delay_s", kind in (FaultKind.SLOW_DISK, FaultKind.DELAY)),
            ("share", kind == FaultKind.LOSS),
        ):
            require(not is_needed or getattr(self, name) is not None, f"{name} is missing; a {self.kind} needs it")
        for name in ("duration_s", "delay_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value} must be above 0")
        require(self.share is None or 0 < self.share <= 1, f"share={self.share} must be above 0 and at most 1")
        require(self.checkpoint is None or self.checkpoint >= 0, f"checkpoint={self.checkpoint} must not be negative")
        if self.tier is not None:
            require(self.tier in _TIERS, f"tier={self.tier!r} is unknown; {nearest(self.tier, _TIERS)}")
            can_be = {FaultTier.LOCAL, FaultTier.GLOBAL} if kind.is_of_disks else set(FaultTier)
            if kind == FaultKind.TRUNCATE_COPY:
                can_be.remove(FaultTier.MEMORY)
            names = ", ".join(tier for tier in FaultTier if tier in can_be)
            require(self.tier in can_be, f"tier={self.tier!r} is not for kind={self.kind!r}; write one of {names}")

    def _check_absent(self, *names: str) -> None:
        for name in names:
            require(getattr(self, name) is None, f"{name} is not for kind={self.kind!r}; leave it out")

    def _check_victim(self) -> None:
        given = [name for name in ("rank", "node", "device") if getattr(self, name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are given; keep one")
        require(self.rank is None or self.rank >= 0, f"rank={self.rank} must not be negative")

    def _check_moment(self) -> None:
        moments = ("iteration", "rate", "after_s", "at_s", "on_request")
        given = [name for name in moments if getattr(self, name) is not None and getattr(self, name) is not False]
        require(
            len(given) == 1,
            f"{' and '.join(given)} are given; keep one" if given else "iteration is missing; give it, or a rate",
        )
        require(self.iteration is None or self.iteration >= 0, f"iteration={self.iteration} must not be negative")
        require(self.rate is None or 0 < self.rate <= 1, f"rate={self.rate} must be above 0 and at most 1")
        require(self.after_s is None or self.after_s >= 0, f"after_s={self.after_s} must not be negative")
        require(self.at_s is None or self.at_s >= 0, f"at_s={self.at_s} must not be negative")
        require(not self.once_durable or self.after_s is not None, "once_durable needs after_s; give it, such as 0")
        require(
            not self.persistent or self.iteration is not None or self.rate is not None,
            "persistent needs an iteration or a rate, not after_s, at_s or on_request; change one",
        )
        require(
            self.exit_code == 1 or self.kind == FaultKind.EXIT, "exit_code is for kind='exit'; change one of the two"
        )
        require(0 <= self.exit_code <= 255, f"exit_code={self.exit_code} must be from 0 to 255")


_KINDS = frozenset(kind.value for kind in FaultKind)
_TARGETS = frozenset(target.value for target in FaultTarget)
_TIERS = frozenset(tier.value for tier in FaultTier)


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Fault)


_SCALE = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The faults to inject into a run.

    Raises:
        ConfigError: A value is wrong; the message names it.
    """

    seed: int = 0
    """Source of all values that the faults leave open."""

    faults: tuple[Fault, ...] = ()
    """The faults, in any order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", parse_text(int, self.seed, where="seed"))
        require(isinstance(self.faults, Iterable), f"faults={self.faults!r} is not a list of faults; write a list")
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
            where: Name of their source for errors.

        Raises:
            ConfigError: The plan is not valid; one line that names the key.
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
        """Return the plan as plain values, without defaults."""
        return {"seed": self.seed, "faults": [fault.to_mapping() for fault in self.faults]}

    def to_json(self) -> str:
        """Return the plan as JSON, which :meth:`load` reads."""
        return json.dumps(self.to_mapping(), indent=2) + "\n"

    def to_toml(self) -> str:
        """Return the plan as TOML, which :meth:`load` reads."""
        faults = (f"\n[[faults]]\n{tomli_w.dumps(fault.to_mapping())}" for fault in self.faults)
        return f"seed = {self.seed}\n{''.join(faults)}"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault of a plan, with the key of its draws."""

    seed: int
    index: int
    """Index in the plan."""
    fault: Fault
    fault_id: str
    """Identifies the fault in the journal and in its marker: index and fingerprint, so that an edited fault differs."""

    @property
    def is_released(self) -> bool:
        """Whether the rank that injects the fault waits for its release from outside."""
        return not FaultKind(self.fault.kind).is_outside and (self.fault.at_s is not None or self.fault.on_request)

    def draw(self, count: int, purpose: str, iteration: int = 0) -> int:
        """Draw a number from 0 to ``count - 1``."""
        return self._number(purpose, iteration) * count // _SCALE

    def is_due(self, iteration: int) -> bool:
        """Return whether the fault is due in the step at this iteration, on any rank; not for one with ``after_s``."""
        if self.fault.rate is None:
            return iteration == self.fault.iteration
        return self._number("due", iteration) < self.fault.rate * _SCALE

    def applies_to(self, place: WorkerEnv, device: str, iteration: int) -> bool:
        """Return whether the fault applies to this rank if it is due in the step at this iteration."""
        fault = self.fault
        if FaultKind(fault.kind).is_outside:
            return False
        if fault.rank is not None:
            return place.global_rank == fault.rank
        if fault.node is not None:
            return place.node == fault.node
        if fault.device is not None:
            return device == fault.device
        return place.global_rank == self.draw(place.world_size, "rank", iteration)

    def can_apply_to(self, place: WorkerEnv, device: str) -> bool:
        """Return whether the fault applies to this rank at any iteration."""
        is_drawn = self.fault.rank is None and self.fault.node is None and self.fault.device is None
        return (is_drawn and self.fault.rate is not None) or self.applies_to(place, device, self.fault.iteration or 0)

    def next_due(self, iteration: int, *, horizon: int) -> int | None:
        """Return the first iteration, from the given one on, at which the fault is due.

        Args:
            iteration: First iteration to check.
            horizon: Number of iterations to check if each must be drawn.

        Returns:
            The iteration; ``iteration + horizon`` if none is due before; ``None``: the fault is never due again.
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
    """One occasion on which a fault is due on this rank."""

    planned: PlannedFault
    iteration: int

    @property
    def fault(self) -> Fault:
        return self.planned.fault

    def draw(self, count: int, purpose: str) -> int:
        """Draw a number from 0 to ``count - 1`` for this iteration."""
        return self.planned.draw(count, purpose, self.iteration)


def planned_faults(plan: FaultPlan) -> Iterator[PlannedFault]:
    """Yield a plan's faults with their ids."""
    for index, fault in enumerate(plan.faults):
        content = json.dumps([plan.seed, fault.to_mapping()], sort_keys=True).encode()
        fingerprint = hashlib.blake2b(content, digest_size=4).hexdigest()
        yield PlannedFault(plan.seed, index, fault, f"{index}-{fingerprint}")


@dataclass(frozen=True, slots=True)
class MissingFault:
    """A planned fault that was not injected, or not each time that it was due."""

    index: int
    """Index in the plan."""
    fault: Fault
    iterations: tuple[int, ...]
    """Iterations at which it was due; empty: not known (``after_s``, or a rate that drew no iteration)."""
    reached: int
    """The highest iteration in the journal."""

    def describe(self) -> str:
        where = f" (due at {', '.join(map(str, self.iterations))})" if self.fault.rate and self.iterations else ""
        return f"faults[{self.index}] was not injected: {self.fault.describe()}{where}; the run reached {self.reached}"


def marker_of(run_dir: str | os.PathLike[str], fault_id: str, *, due: bool = False) -> Path:
    """Return the file that records a fault's injection; with ``due``, the file that releases it."""
    return Path(run_dir) / "faults" / (f"{fault_id}.due" if due else fault_id)


def claim_marker(path: Path) -> bool:
    """Create a marker; return whether it did not exist before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    return True


def verify_fired(plan: FaultPlan, run_dir: str | os.PathLike[str]) -> list[MissingFault]:
    """Return the faults of a plan that were not injected into a run, in the plan's order; empty: all were.

    A fault with a rate is missing if it was not injected at one of its iterations that the run is known to have
    reached, or if it drew none.

    Args:
        plan: The plan of the run.
        run_dir: The run directory; its journal is read.
    """
    injected: defaultdict[str, set[int]] = defaultdict(set)
    reached = 0
    for event in read(run_dir):
        reached = max(reached, event.iteration or 0)
        if event.kind == EventKind.FAULT_SIMULATED and event.iteration is not None:
            injected[str(event.data.get("fault_id"))].add(event.iteration)
    missing = []
    for planned in planned_faults(plan):
        due = _due(planned, reached)
        left = tuple(iteration for iteration in due if iteration not in injected[planned.fault_id])
        if left or not injected[planned.fault_id]:
            missing.append(MissingFault(planned.index, planned.fault, left, reached))
    return missing


def _due(planned: PlannedFault, reached: int) -> tuple[int, ...]:
    if planned.fault.rate is not None:
        return tuple(iteration for iteration in range(reached) if planned.is_due(iteration))
    if planned.fault.iteration is None or FaultKind(planned.fault.kind).is_outside:
        return ()  # injected from outside after the iteration, perhaps later
    return (planned.fault.iteration,)
