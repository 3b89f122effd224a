"""The outcome: whether the result is the same, what the faults cost, and how that is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outlast.demo.account import Account
from outlast.demo.sources import TIERS, Sources, count_bytes

__all__ = ["Outcome", "differences", "render"]

_COMPARED = {"weights": "weights", "optimizer": "optimizer state", "losses": "loss history"}
_LONG_PATH = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')
_DEEDS = {"restart_workers": "workers restarted", "replace_node": "a spare took over"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo found."""

    seed: int
    undisturbed: Mapping[str, Any]
    """What the script wrote about the undisturbed run; empty when it did not get there."""
    struck: Mapping[str, Any]
    """What it wrote about the other run."""
    incidents: tuple[Account, ...]
    cycles: int
    """Cycles of the run with faults."""
    wall_s: float
    """Seconds for everything."""
    problems: tuple[str, ...]
    """What went wrong; empty = nothing."""
    folder: str | None = None
    """Where everything was kept; ``None`` = nothing was."""

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
                "cycles": self.cycles,
                "final_loss": self.struck.get("final_loss"),
                "wall_s": round(self.wall_s, 2),
                "seed": self.seed,
                "iterations": self.struck.get("iterations"),
                "digests": {name: self.struck.get(name) for name in _COMPARED},
                "problems": list(self.problems),
                "folder": self.folder,
            }
        )


def differences(undisturbed: Mapping[str, Any], struck: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what is not the same in two results, or is missing in one."""
    names = dict.fromkeys([*_COMPARED, *undisturbed, *struck])
    return tuple(
        name for name in names if name not in undisturbed or name not in struck or undisturbed[name] != struck[name]
    )


def render(outcome: Outcome) -> RenderableType:
    """Return the proof and the table of incidents, for a terminal or a file."""
    parts: list[RenderableType] = []
    if outcome.incidents:
        parts += [_incident_table(outcome.incidents), _costs(outcome.incidents), Text()]
    if outcome.undisturbed and outcome.struck:
        parts += [_proof_table(outcome), Text()]
    if outcome.ok:
        told = f"bit-identical: {len(outcome.incidents)} incidents, {outcome.cycles} cycles, the same result"
        parts.append(Text(f"{told} ({outcome.wall_s:.0f} s)", style="bold green"))
    else:
        parts += [Text(f"failed: {problem}", style="bold red") for problem in outcome.problems]
    if outcome.folder is not None:
        parts.append(Text(f"journal, output and generations of both runs are in {outcome.folder}"))
    return Group(*parts)


def _incident_table(incidents: tuple[Account, ...]) -> Table:
    table = Table(title="What happened", title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("incident", ratio=4, overflow="fold")
    table.add_column("by what it was noticed", ratio=5, overflow="fold")
    table.add_column("what was done", ratio=4, overflow="fold")
    table.add_column("state came from", no_wrap=True)
    table.add_column("noticed\nafter", justify="right", no_wrap=True)
    table.add_column("going on\nafter", justify="right", no_wrap=True)
    table.add_column("done\ntwice", justify="right", no_wrap=True)
    for one in incidents:
        who = f"node {one.node}" if one.rank is None else f"rank {one.rank} on {one.node}"
        at = "" if one.iteration is None else f"\niteration {one.iteration}"
        struck = "" if one.struck is None else f"\n{one.struck}"
        table.add_row(
            escape(f"{one.kind}\n{who}{at}\n({one.fault or 'not caused by the demo'}){struck}"),
            escape(_LONG_PATH.sub(r"\1", one.evidence)),
            escape(_deed(one)),
            _sources(one),
            _duration(one.detected_after_s),
            _duration(one.recovered_after_s),
            "-" if one.redone_iterations is None else str(one.redone_iterations),
        )
    return table


def _deed(one: Account) -> str:
    if not one.restarts:
        return "step run again in place, 0 restarts"
    deed = _DEEDS.get(one.action, one.action.replace("_", " "))
    if one.quarantined:
        deed = f"{', '.join(one.quarantined)} quarantined, {deed}"
    return deed if one.restored_iteration is None else f"{deed}, going on from iteration {one.restored_iteration}"


def _sources(one: Account) -> str:
    """Return a line for each tier that ranks came back from, and always one for the global tier."""
    if one.sources is None:
        return "-"
    lines = []
    for tier in TIERS:
        ranks, num_bytes = one.sources.num_ranks.get(tier, 0), count_bytes(one.sources.bytes_read.get(tier, 0))
        if ranks:
            lines.append(f"{tier}: {ranks} ranks, {num_bytes}" if ranks > 1 else f"{tier}: 1 rank, {num_bytes}")
        elif tier == "global":
            lines.append(f"global: {num_bytes}")
    if rejected := sum(one.sources.rejected.values()):
        lines.append(f"{rejected} bad {'copy' if rejected == 1 else 'copies'} rejected")
    return "\n".join(lines)


def _costs(incidents: tuple[Account, ...]) -> Text:
    lost_s = sum(one.recovered_after_s or 0 for one in incidents)
    twice = sum(one.redone_iterations or 0 for one in incidents)
    return Text(f" in all: {lost_s:.1f} s without a new iteration, {twice} iterations done twice", style="dim")


def _proof_table(outcome: Outcome) -> Table:
    table = Table(title="The results, as SHA-256", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "undisturbed", "with faults", ""):
        table.add_column(name, no_wrap=True)
    unequal = differences(outcome.undisturbed, outcome.struck)
    for name, text in _COMPARED.items():
        shown = [str(result.get(name, "missing"))[:16] for result in (outcome.undisturbed, outcome.struck)]
        table.add_row(text, *shown, "[red]differ[/]" if name in unequal else "[green]the same[/]")
    losses = [result.get("final_loss") for result in (outcome.undisturbed, outcome.struck)]
    verdict = "[red]differ[/]" if "final_loss" in unequal else "[green]the same[/]"
    table.add_row("final loss", *("missing" if loss is None else f"{loss:.6f}" for loss in losses), verdict)
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


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


def _source_fields(sources: Sources | None) -> dict[str, Any]:
    if sources is None:
        return dict.fromkeys(("tiers", "bytes_read", "global_bytes_read", "copies_rejected"))
    return {
        "tiers": sources.num_ranks,
        "bytes_read": dict(sources.bytes_read),
        "global_bytes_read": sources.global_bytes,
        "copies_rejected": dict(sources.rejected),
    }
