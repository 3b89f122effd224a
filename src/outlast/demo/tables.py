"""The tables: what happened, what was done, what it cost, and the proof; for a terminal or a file."""

from __future__ import annotations

import re

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outlast.demo.account import Account
from outlast.demo.leaving import Leaving
from outlast.demo.outcome import COMPARED, Outcome, differences
from outlast.demo.slowed import Slowed
from outlast.demo.sources import TIERS, Sources, count_bytes

__all__ = ["render"]

_NAMES_AND_FIGURES = re.compile(r"Rank=\S+ Node=\S+ | \([^()]*\)")
_LONG_PATH = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')
_DEEDS = {"restart_workers": "workers restarted", "replace_node": "a spare took over"}


def render(outcome: Outcome) -> RenderableType:
    """Return the proof and the table of incidents, for a terminal or a file."""
    parts: list[RenderableType] = []
    if outcome.incidents or outcome.slowed is not None or outcome.leaving is not None:
        parts += [_story_table(outcome), _costs(outcome), Text()]
    if outcome.undisturbed and outcome.struck:
        parts += [_proof_table(outcome), Text()]
    if outcome.ok:
        jobs = "" if outcome.leaving is None else " in 2 jobs"
        told = f"{len(outcome.incidents)} incidents, {outcome.cycles} cycles{jobs}, the same result"
        parts.append(Text(f"bit-identical: {told} ({outcome.wall_s:.0f} s)", style="bold green"))
    else:
        parts += [Text(f"failed: {problem}", style="bold red") for problem in outcome.problems]
    if outcome.folder is not None:
        parts.append(Text(f"journal, output and generations of both runs are in {outcome.folder}"))
    return Group(*parts)


def _story_table(outcome: Outcome) -> Table:
    table = Table(title="What happened", title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("incident", ratio=4, overflow="fold")
    table.add_column("by what it was noticed", ratio=5, overflow="fold")
    table.add_column("what was done", ratio=4, overflow="fold")
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


def _costs(outcome: Outcome) -> Text:
    lost_s = sum(one.recovered_after_s or 0 for one in outcome.incidents)
    twice = sum(one.redone_iterations or 0 for one in outcome.incidents)
    if outcome.leaving is not None:
        lost_s += outcome.leaving.going_on_after_s or 0
        twice += outcome.leaving.lost_iterations or 0
    return Text(f" in all: {lost_s:.1f} s without a new iteration, {twice} iterations done twice", style="dim")


def _proof_table(outcome: Outcome) -> Table:
    table = Table(title="The results, as SHA-256", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "undisturbed", "with faults", ""):
        table.add_column(name, no_wrap=True)
    unequal = differences(outcome.undisturbed, outcome.struck)
    for name, text in COMPARED.items():
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
