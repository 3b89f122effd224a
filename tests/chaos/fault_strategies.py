"""Hypothesis strategies for faults and plans."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from outlast.chaos import Fault, FaultKind, FaultPlan, FaultTarget, FaultTier

_names = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1).filter(
    lambda text: text.isprintable() and text.strip().lower() not in ("none", "null")
)
_counts = st.integers(min_value=0, max_value=2**40)
_seconds = st.floats(min_value=1e-9, max_value=1e9)


INSIDE = [kind for kind in FaultKind if not kind.is_outside]
OUTSIDE = [kind for kind in FaultKind if kind.is_outside]


@st.composite
def outside_faults(draw: st.DrawFn) -> Fault:
    """Draw any accepted fault that is injected from outside."""
    kind = draw(st.sampled_from(OUTSIDE))
    given: dict[str, Any] = {"kind": kind, "name": draw(st.none() | _names)}
    moment = draw(st.sampled_from(["iteration", "at_s"]))
    given[moment] = draw(_counts if moment == "iteration" else _seconds)
    if kind.is_of_copies:
        tiers = [tier for tier in FaultTier if (kind, tier) != (FaultKind.TRUNCATE_COPY, FaultTier.MEMORY)]
        given["tier"] = draw(st.sampled_from(tiers))
        given["checkpoint"] = draw(st.none() | _counts)
    if kind.is_of_disks:
        given["tier"] = draw(st.sampled_from([FaultTier.LOCAL, FaultTier.GLOBAL]))
        given["duration_s"] = draw(_seconds)
    if kind.is_of_networks:
        given["duration_s"] = draw(_seconds)
    if kind in (FaultKind.SLOW_DISK, FaultKind.DELAY):
        given["delay_s"] = draw(_seconds)
    if kind == FaultKind.LOSS:
        given["share"] = draw(st.floats(min_value=0, max_value=1, exclude_min=True))
    if kind in (FaultKind.STOP_AGENT, FaultKind.STOP_COORDINATOR):
        given["duration_s"] = draw(st.none() | _seconds)
    if "coordinator" not in kind and given.get("tier") != FaultTier.GLOBAL:
        victim = draw(st.sampled_from([None, "node", *(["rank"] * kind.is_of_copies)]))
        if victim is not None:
            given[victim] = draw(_names if victim == "node" else _counts)
    return Fault(**given)


@st.composite
def faults(draw: st.DrawFn, world_size: int | None = None) -> Fault:
    """Draw any accepted fault that a rank's session injects; its rank, if it has one, is below ``world_size``."""
    kind = draw(st.sampled_from(INSIDE))
    given: dict[str, Any] = {"kind": kind, "name": draw(st.none() | _names)}
    ranks = _counts if world_size is None else st.integers(min_value=0, max_value=world_size - 1)
    victim = draw(st.sampled_from([None, "rank", "node", "device"]))
    if victim is not None:
        given[victim] = draw(ranks if victim == "rank" else _names)
    moments = ["iteration", "rate", "at_s", "on_request", *([] if kind.is_numeric else ["after_s"])]
    if kind == FaultKind.SLOW:
        moments.remove("rate")
    moment = draw(st.sampled_from(moments))
    if moment == "iteration":
        given[moment] = draw(_counts)
    elif moment == "on_request":
        given[moment] = True
    else:
        given[moment] = draw(st.floats(min_value=0, max_value=1, exclude_min=True) if moment == "rate" else _seconds)
    if moment == "after_s":
        given["once_durable"] = draw(st.booleans())
    elif moment in ("iteration", "rate"):
        given["persistent"] = draw(st.booleans())
    if kind.is_numeric:
        given["target"] = draw(st.sampled_from(FaultTarget))
        if given["target"] != FaultTarget.LOSS:
            given["tensor"] = draw(st.none() | _names)
        given["element"] = draw(st.none() | _counts)
        if kind == FaultKind.BIT_FLIP:
            given["bit"] = draw(st.none() | st.integers(min_value=0, max_value=63))
    elif kind == FaultKind.SLOW:
        given["factor"] = draw(st.floats(min_value=1, max_value=1e6, exclude_min=True))
    else:
        given["section"] = draw(st.none() | _names)
    if kind in (FaultKind.SLEEP, FaultKind.HOLD_GIL, FaultKind.SLOW):
        given["duration_s"] = draw(st.none() | _seconds)
    if kind == FaultKind.EXIT:
        given["exit_code"] = draw(st.integers(min_value=0, max_value=255))
    return Fault(**given)


def plans(world_size: int | None = None, *, outside: bool = False) -> st.SearchStrategy[FaultPlan]:
    """Draw any accepted plan; with ``outside``, also with faults that are injected from outside."""
    each = faults(world_size) | outside_faults() if outside else faults(world_size)
    return st.builds(FaultPlan, seed=st.integers(min_value=-(2**63), max_value=2**63 - 1), faults=st.lists(each))
