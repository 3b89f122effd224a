"""Draw a plan from a seed: a fault every few seconds, each kind equally often."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from outlast.chaos.plan import Fault, FaultKind, FaultPlan, FaultTarget, FaultTier
from outlast.config.base import nearest
from outlast.errors import ConfigError

SLOW_FACTOR = 10.0
SLOW_S = 6.0
STOPPED_S = 8.0
"""Longer than the ``--ft-node-heartbeat-timeout`` of a run that must detect it."""
FULL_S = 2.0
"""Short enough that fewer saves fail than a run may fail in a row."""
SLOW_DISK_S = 6.0
FILE_DELAY_S = 0.3
IMPAIRED_S, PACKET_DELAY_S, LOST_SHARE = 6.0, 0.02, 0.02
MANTISSA_BITS = range(8, 20)
"""Bits of a float32 that rounding keeps, and that do not make a number large enough to be detected."""


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """Return the kinds in a list such as ``kill,stop``; ``all``: every kind.

    Raises:
        ConfigError: A kind is unknown, or the list is empty.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return tuple(FaultKind)
    known = [kind.value for kind in FaultKind]
    for name in names:
        if name not in known:
            raise ConfigError(f"--kinds: {name!r} is unknown; {nearest(name, known)}")
    if not names:
        raise ConfigError("--kinds names none; write all, or some of " + ", ".join(known))
    return tuple(dict.fromkeys(FaultKind(name) for name in names))


def draw_plan(
    seed: int, kinds: Sequence[FaultKind], *, every_s: float, minutes: float, num_ranks: int, tensor: str | None = None
) -> FaultPlan:
    """Draw a plan with ``at_s`` for each fault.

    Nodes are drawn at the injection, from those that carry ranks: a lost node's successor has another name.

    Args:
        seed: Source of all draws, including those at the injection.
        kinds: Kinds to draw; each round contains every kind, in random order.
        every_s: Seconds between two faults.
        minutes: Length of the plan.
        num_ranks: Number of ranks.
        tensor: Pattern of the names of weights and modules to change; ``None``: any.

    Raises:
        ConfigError: The plan would contain no fault, or ``kinds`` is empty.
    """
    if not kinds:
        raise ConfigError("there are no kinds to draw from; name some")
    if not (math.isfinite(every_s) and every_s > 0 and math.isfinite(minutes) and num_ranks > 0):
        raise ConfigError("the interval, the length and the number of ranks must be above 0; correct them")
    count = int(minutes * 60 / every_s)
    if count < 1:
        raise ConfigError(f"{minutes:g} min have no room for a fault every {every_s:g} s; give more minutes")
    numbers = random.Random(seed)
    order: list[FaultKind] = []
    while len(order) < count:
        order += numbers.sample(list(kinds), len(kinds))
    faults = tuple(
        Fault(kind=kind, at_s=round((index + 1) * every_s, 3), **_details(kind, numbers, num_ranks, tensor))
        for index, kind in enumerate(order[:count])
    )
    return FaultPlan(seed=seed, faults=faults)


def _details(kind: FaultKind, numbers: random.Random, num_ranks: int, tensor: str | None) -> dict[str, Any]:
    """Return the values that a fault of a kind needs, except its time."""
    if kind.is_of_copies:
        tiers = [tier for tier in FaultTier if kind != FaultKind.TRUNCATE_COPY or tier != FaultTier.MEMORY]
        return {"tier": numbers.choice(tiers)}
    if kind.is_of_disks:
        found = {"tier": numbers.choice([FaultTier.LOCAL, FaultTier.GLOBAL])}
        slow = kind == FaultKind.SLOW_DISK
        return found | ({"duration_s": SLOW_DISK_S, "delay_s": FILE_DELAY_S} if slow else {"duration_s": FULL_S})
    if kind in (FaultKind.STOP_AGENT, FaultKind.STOP_COORDINATOR, FaultKind.PARTITION):
        return {"duration_s": STOPPED_S}
    if kind == FaultKind.DELAY:
        return {"duration_s": IMPAIRED_S, "delay_s": PACKET_DELAY_S}
    if kind == FaultKind.LOSS:
        return {"duration_s": IMPAIRED_S, "share": LOST_SHARE}
    if kind.is_outside:
        return {}
    details: dict[str, Any] = {"rank": numbers.randrange(num_ranks)}
    if kind in (FaultKind.NAN, FaultKind.INF):
        details |= {"target": FaultTarget.ACTIVATION, "tensor": tensor}
    elif kind.is_numeric:
        details |= {"target": FaultTarget.WEIGHT, "tensor": tensor and f"{tensor}.weight"}
        if kind == FaultKind.BIT_FLIP:
            details["bit"] = numbers.choice(MANTISSA_BITS)
    elif kind == FaultKind.SLOW:
        details |= {"factor": SLOW_FACTOR, "duration_s": SLOW_S}
    elif kind == FaultKind.SLEEP:
        details["duration_s"] = STOPPED_S
    elif kind == FaultKind.HOLD_GIL:
        details |= {"duration_s": STOPPED_S, "section": "step"}
    elif kind == FaultKind.STOP:
        details["section"] = "step"
    return details
