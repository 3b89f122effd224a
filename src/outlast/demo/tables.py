"""The tables: what the faults cost and the proof, narrow enough for any terminal; and what was done about each, long.

The narrow table is what is printed; its last row and the line below it count the rows of the table and nothing else.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outlast.demo.account import TIERS, Account, Sources, count_bytes
from outlast.demo.outcome import COMPARED, DemoOutcome, Leaving, Slowed, differences

__all__ = ["render", "write_details"]

_NAMES_AND_FIGURES = re.compile(r"Rank=\S+ Node=\S+ | \([^()]*\)")
_LONG_PATH = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')
_DEEDS = {"restart_workers": "workers restarted", "replace_node": "a spare took over"}
_WIDE = 240
"""Columns of the long table: the longest names of tensors fit into its cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What one fault cost."""

    kind: str
    where: str
    noticed_s: float | None
    going_on_s: float | None
    lost: int | None
    """Iterations."""
    is_ours: bool
    """The demo caused it."""


def render(outcome: DemoOutcome) -> RenderableType:
    """Return what the faults cost and the proof, for a terminal or a file of at least 60 columns."""
    parts: list[RenderableType] = []
    if rows := list(_rows(outcome)):
        legend = "noticed, going on: how long after the fault; lost: iterations done twice"
        parts += [_costs_table(rows), Text(legend, style="dim"), Text()]
    if outcome.undisturbed and outcome.struck:
        parts.append(_proof_table(outcome))
    if outcome.ok:
        jobs = "" if outcome.leaving is None else " in 2 jobs"
        told = f"{_count(rows)}, {outcome.cycles} cycles{jobs}, the same result"
        parts.append(Text(f"bit-identical: {told} ({outcome.wall_s:.0f} s)", style="bold green"))
    else:
        parts += [Text(f"failed: {problem}", style="bold red") for problem in outcome.problems]
    return Group(*parts)


def write_details(outcome: DemoOutcome) -> str:
    """Return the long table, as text: by what each fault was noticed, and what was done about it."""
    console = Console(file=io.StringIO(), width=_WIDE, color_system=None, force_terminal=False)
    console.print(_story_table(outcome))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _rows(outcome: DemoOutcome) -> Iterator[_Row]:
    if (slowed := outcome.slowed) is not None:
        yield _Row(
            kind="straggler",
            where=f"rank {slowed.rank} on {slowed.node}",
            noticed_s=slowed.noticed_after_s,
            going_on_s=None,
            lost=0,
            is_ours=True,
        )
    for one in outcome.incidents:
        yield _Row(
            kind=one.kind,
            where=one.node if one.rank is None else f"rank {one.rank} on {one.node}",
            noticed_s=one.detected_after_s,
            going_on_s=one.recovered_after_s,
            lost=one.redone_iterations,
            is_ours=one.fault is not None,
        )
    if (leaving := outcome.leaving) is not None:
        yield _Row(
            kind="told to leave",
            where=f"rank {leaving.rank} on {leaving.node}",
            noticed_s=leaving.noticed_after_s,
            going_on_s=leaving.going_on_after_s,
            lost=leaving.lost_iterations,
            is_ours=True,
        )


def _narrow_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _count(rows: list[_Row]) -> str:
    faults = sum(row.is_ours for row in rows)
    others = len(rows) - faults
    text = "1 fault" if faults == 1 else f"{faults} faults"
    if others:
        text += f" and {others} incident{'s' if others > 1 else ''} that the demo did not cause"
    return text


def _costs_table(rows: list[_Row]) -> Table:
    table = _narrow_table("What happened")
    for name in ("kind", "where"):
        table.add_column(name)
    for name in ("noticed", "going on", "lost"):
        table.add_column(name, justify="right")
    for row in rows:
        lost = "-" if row.lost is None else str(row.lost)
        table.add_row(row.kind, row.where, _duration(row.noticed_s), _duration(row.going_on_s), lost)
    going_on_s = sum(_as_shown(row.going_on_s) for row in rows if row.going_on_s is not None)
    all_lost = sum(row.lost for row in rows if row.lost is not None)
    table.add_row(f"{len(rows)} in all", "", "", _duration(going_on_s), str(all_lost), style="bold")
    return table


def _story_table(outcome: DemoOutcome) -> Table:
    table = Table(title="What happened", title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("incident", ratio=4)
    table.add_column("by what it was noticed", ratio=5)
    table.add_column("what was done", ratio=4)
    table.add_column("state came from", no_wrap=True)
    table.add_column("noticed\nafter", justify="right", no_wrap=True)
    table.add_column("going on\nafter", justify="right", no_wrap=True)
    table.add_column("done\ntwice", justify="right", no_wrap=True)
    if outcome.slowed is not None:
        _add_slowed(table, outcome.slowed)
    for one in outcome.incidents:
        _add_incident(table, one)
    if outcome.leaving is not None:
        _add_leaving(table, outcome.leaving)
    return table


def _add_incident(table: Table, one: Account) -> None:
    who = f"node {one.node}" if one.rank is None else f"rank {one.rank} on {one.node}"
    at = "" if one.iteration is None else f"\niteration {one.iteration}"
    struck = "" if one.struck is None else f"\n{one.struck}"
    table.add_row(
        escape(f"{one.kind}\n{who}{at}\n({one.fault or 'not caused by the demo'}){struck}"),
        escape(_LONG_PATH.sub(r"\1", one.evidence)),
        escape(_deed(one)),
        _sources(one.sources),
        _duration(one.detected_after_s),
        _duration(one.recovered_after_s),
        "-" if one.redone_iterations is None else str(one.redone_iterations),
    )


def _add_slowed(table: Table, slowed: Slowed) -> None:
    until = "" if slowed.until is None else f" to {slowed.until}"
    if slowed.num_reports is None:
        done = "never named"
    else:
        reports = "1 report" if slowed.num_reports == 1 else f"{slowed.num_reports} reports"
        done = f"named with {reports}, and nobody else" if not slowed.others_named else f"named with {reports}"
    done += ", 0 restarts" if not slowed.restarts else ", restarted"
    table.add_row(
        escape(f"straggler\nrank {slowed.rank} on {slowed.node}\niteration {slowed.since}{until}\n({slowed.fault})"),
        escape(_NAMES_AND_FIGURES.sub("", slowed.evidence) or "-"),
        done,
        "-",
        _duration(slowed.noticed_after_s),
        "-",
        "0",
    )


def _add_leaving(table: Table, leaving: Leaving) -> None:
    codes = " or ".join(map(str, leaving.run_exit_codes)) or "missing"
    if leaving.iteration is None:
        done = f"the ranks did not leave together, exit code {codes}"
    else:
        done = f"all ranks saved iteration {leaving.iteration} and left, exit code {codes}"
    if leaving.resumed_at:
        done += f"; another job went on from iteration {min(leaving.resumed_at.values())}"
    table.add_row(
        escape(
            f"told to leave\nrank {leaving.rank} on {leaving.node}\niteration {leaving.struck_at}\n({leaving.fault})"
        ),
        "its session saw the signal" if leaving.noticed_after_s is not None else "-",
        done,
        _sources(leaving.sources),
        _duration(leaving.noticed_after_s),
        _duration(leaving.going_on_after_s),
        "-" if leaving.lost_iterations is None else str(leaving.lost_iterations),
    )


def _deed(one: Account) -> str:
    if not one.restarts:
        return "step run again in place, 0 restarts"
    deed = _DEEDS.get(one.action, one.action.replace("_", " "))
    if one.quarantined:
        deed = f"{', '.join(one.quarantined)} quarantined, {deed}"
    return deed if one.restored_iteration is None else f"{deed}, going on from iteration {one.restored_iteration}"


def _sources(sources: Sources | None) -> str:
    """Return a line for each tier that ranks came back from, and always one for the global tier."""
    if sources is None:
        return "-"
    lines = []
    for tier in TIERS:
        ranks, num_bytes = sources.num_ranks.get(tier, 0), count_bytes(sources.bytes_read.get(tier, 0))
        if ranks:
            lines.append(f"{tier}: {ranks} ranks, {num_bytes}" if ranks > 1 else f"{tier}: 1 rank, {num_bytes}")
        elif tier == "global":
            lines.append(f"global: {num_bytes}")
    if rejected := sum(sources.rejected.values()):
        lines.append(f"{rejected} bad {'copy' if rejected == 1 else 'copies'} rejected")
    return "\n".join(lines)


def _proof_table(outcome: DemoOutcome) -> Table:
    table = _narrow_table("The results, as SHA-256")
    for name in ("", "undisturbed", "with faults", ""):
        table.add_column(name, no_wrap=True)
    unequal = differences(outcome.undisturbed, outcome.struck)
    for name, text in COMPARED.items():
        shown = [str(result.get(name, "missing"))[:12] for result in (outcome.undisturbed, outcome.struck)]
        table.add_row(text, *shown, "[red]differ[/]" if name in unequal else "[green]the same[/]")
    losses = [result.get("final_loss") for result in (outcome.undisturbed, outcome.struck)]
    verdict = "[red]differ[/]" if "final_loss" in unequal else "[green]the same[/]"
    table.add_row("final loss", *("missing" if loss is None else f"{loss:.6f}" for loss in losses), verdict)
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _as_shown(seconds: float) -> float:
    """Return what is shown of a duration, so that the sum of a column is that of its rows."""
    return round(seconds, 3) if seconds < 1 else round(seconds, 2)
