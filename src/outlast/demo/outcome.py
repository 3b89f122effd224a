"""The outcome: whether the result is the same, and what the faults cost; as an object for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.demo.account import Account
from outlast.demo.leaving import Leaving
from outlast.demo.slowed import Slowed
from outlast.demo.sources import Sources

__all__ = ["COMPARED", "Outcome", "differences"]

COMPARED = {"weights": "weights", "optimizer": "optimizer state", "losses": "loss history"}
"""What is compared, by its name in a result, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo found."""

    seed: int
    undisturbed: Mapping[str, Any]
    """What the script wrote about the undisturbed run; empty when it did not get there."""
    struck: Mapping[str, Any]
    """What it wrote about the other run."""
    incidents: tuple[Account, ...]
    slowed: Slowed | None = None
    """Whether the slow rank was named; ``None`` = none was slow."""
    leaving: Leaving | None = None
    """How it was left and went on; ``None`` = it did not come to that."""
    cycles: int
    """Cycles of the run with faults, over all of its jobs."""
    wall_s: float
    """Seconds for everything."""
    problems: tuple[str, ...]
    """What went wrong; empty = nothing."""
    folder: str | None = None
    """Where everything was kept; ``None`` = nothing was."""
    details: str | None = None
    """File that says what was done about each fault; ``None`` = none was written."""

    @property
    def bit_identical(self) -> bool:
        """Whether both runs ended, with the same bits."""
        return bool(self.undisturbed) and not differences(self.undisturbed, self.struck)

    @property
    def ok(self) -> bool:
        """Whether the demo has shown what it is to show."""
        return self.bit_identical and not self.problems

    def to_json(self) -> str:
        """Return everything as one JSON object on one line."""
        return json.dumps(
            {
                "bit_identical": self.bit_identical,
                "incidents": [_incident_fields(one) for one in self.incidents],
                "slowed": None if self.slowed is None else dataclasses.asdict(self.slowed),
                "preemption": None if self.leaving is None else _leaving_fields(self.leaving),
                "cycles": self.cycles,
                "final_loss": self.struck.get("final_loss"),
                "wall_s": round(self.wall_s, 2),
                "seed": self.seed,
                "iterations": self.struck.get("iterations"),
                "digests": {name: self.struck.get(name) for name in COMPARED},
                "problems": list(self.problems),
                "folder": self.folder,
            }
        )


def differences(undisturbed: Mapping[str, Any], struck: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what is not the same in two results, or is missing in one."""
    names = dict.fromkeys([*COMPARED, *undisturbed, *struck])
    return tuple(
        name for name in names if name not in undisturbed or name not in struck or undisturbed[name] != struck[name]
    )


def _incident_fields(one: Account) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "rank": one.rank,
        "node": one.node,
        "cycle": one.cycle,
        "fault": one.fault,
        "iteration": one.iteration,
        "detected_after_s": one.detected_after_s,
        "recovered_after_s": one.recovered_after_s,
        "redone_iterations": one.redone_iterations,
        "restarts": one.restarts,
        "restored_iteration": one.restored_iteration,
        "evidence": one.evidence,
        "action": one.action,
        "verdict": one.verdict,
        "finding": one.finding,
        "named": one.named,
        "struck": one.struck,
        "quarantined": list(one.quarantined),
        "victims": list(one.victims),
        "copies_spoiled": one.copies_spoiled,
        **_source_fields(one.sources),
    }


def _leaving_fields(leaving: Leaving) -> dict[str, Any]:
    exit_code, next_exit_code = (
        codes[0] if len(codes) == 1 else None for codes in (leaving.run_exit_codes, leaving.next_exit_codes)
    )
    return {
        "rank": leaving.rank,
        "node": leaving.node,
        "fault": leaving.fault,
        "struck_at": leaving.struck_at,
        "noticed_after_s": leaving.noticed_after_s,
        "left_after_s": leaving.left_after_s,
        "iteration": leaving.iteration,
        "ranks_that_saved": leaving.saved_by.get(leaving.iteration or 0, 0),
        "exit_code": exit_code,
        "resumed_at": min(leaving.resumed_at.values(), default=None),
        "lost_iterations": leaving.lost_iterations,
        "going_on_after_s": leaving.going_on_after_s,
        "next_exit_code": next_exit_code,
        **_source_fields(leaving.sources),
    }


def _source_fields(sources: Sources | None) -> dict[str, Any]:
    if sources is None:
        return dict.fromkeys(("tiers", "bytes_read", "global_bytes_read", "copies_rejected"))
    return {
        "tiers": sources.num_ranks,
        "bytes_read": dict(sources.bytes_read),
        "global_bytes_read": sources.global_bytes,
        "copies_rejected": dict(sources.rejected),
    }
