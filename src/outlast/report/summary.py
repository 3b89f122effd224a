"""The summary on a terminal: the headline, the division of time, the newest incidents, means, notes.

At most about 40 lines of 100 columns for any run. Control characters are removed from the journal's texts, since a
worker's log line may contain any.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from outlast.goodput.account import IncidentCost, Part
from outlast.goodput.ledger import Ledger
from outlast.wording import count

MAX_INCIDENTS = 10
_MAX_NOTES = 3
_MAX_MEANS = 3
_BAR_COLUMNS = 40
_INCIDENT = 2
"""Column of the incidents' text."""
_LEAST_SHARE = 0.0005
"""Parts below this share are combined in one line."""
_COLORS = {
    Part.PRODUCTIVE: "blue",
    Part.STRAGGLER: "cyan",
    Part.REDONE: "yellow",
    Part.SAVE_STALL: "green",
    Part.DETECTION: "red",
    Part.RESTART: "red",
    Part.RENDEZVOUS: "magenta",
    Part.LOAD: "green",
    Part.START_UP: "yellow",
}
_DONE = {
    "rerun_step": "step run again",
    "restart_in_process": "restarted in process",
    "restart_workers": "workers restarted",
    "replace_node": "node replaced",
    "requeue_job": "left to the scheduler",
    "stop": "stopped",
}
"""Name of a recovery level to the action taken."""


def summarize(ledger: Ledger, *, width: int = 100, ascii_only: bool = False) -> RenderableType:
    """Return the summary.

    Args:
        ledger: The run's account.
        width: Columns of the terminal.
        ascii_only: The terminal cannot show block characters.
    """
    run = f"run {ledger.run_id}" if ledger.run_id else "run"
    began = f"began {ledger.began}, {count(len(ledger.jobs), 'job')}, {count(len(ledger.cycles), 'cycle')}"
    at = "" if ledger.num_iterations is None else f", at iteration {ledger.num_iterations}"
    parts: list[RenderableType] = [
        Text(plain(ledger.headline), style="bold"),
        Text(plain(f"{run}, {began}{at}"), style="dim"),
        Text(),
        _partition(ledger, width, "#" if ascii_only else "█"),
    ]
    if ledger.incidents:
        parts += [Text(), _incidents(ledger, width, "*" if ascii_only else "◀")]
    if means := list(_means(ledger)):
        parts += [Text(), *means]
    if ledger.notes:
        parts.append(Text())
        parts += [Text(f"note: {plain(note)}", no_wrap=True, overflow="ellipsis") for note in ledger.notes[:_MAX_NOTES]]
        if (left := len(ledger.notes) - _MAX_NOTES) > 0:
            parts.append(Text(f"and {count(left, 'more note')}: in the page and in --json"))
    return Group(*parts)


def render_to_console(console: Console, ledger: Ledger) -> None:
    console.print(summarize(ledger, width=console.width, ascii_only="utf" not in console.encoding.lower()))


def describe_time(seconds: float) -> str:
    """Return seconds in a readable unit, short times with more digits: ``136 ms``, ``4.19 s``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.3g} s"
    for limit_s, unit_s, name in ((90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds / 86400:.3g} days"


def plain(text: str) -> str:
    """Return a text in one line without control characters, so that it cannot change the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _partition(ledger: Ledger, width: int, block: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    wall_s = ledger.wall_s or 1.0
    columns = max(5, min(_BAR_COLUMNS, width - 40))
    small: list[tuple[str, float]] = []
    largest = max(ledger.partition.values(), default=0.0) or 1.0
    for part in Part:
        seconds = ledger.partition.get(str(part), 0.0)
        if seconds <= 0:
            continue
        if seconds < _LEAST_SHARE * wall_s:
            small.append((_name(part), seconds))
            continue
        bar = Text(block * max(1, round(columns * seconds / largest)), style=_COLORS.get(part, "bright_black"))
        table.add_row(_name(part), f"{100 * seconds / wall_s:.1f} %", describe_time(seconds), bar)
    if small:
        names = ", ".join(name for name, _ in small)
        seconds = sum(seconds for _, seconds in small)
        table.add_row("other", f"{100 * seconds / wall_s:.1f} %", describe_time(seconds), Text(names, style="dim"))
    return table


def _incidents(ledger: Ledger, width: int, mark: str) -> RenderableType:
    newest = ledger.incidents[-MAX_INCIDENTS:]
    costliest = max(ledger.incidents, key=lambda one: one.cost_s)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    rows = [
        (
            str(one.index + 1),
            describe_time(one.at_s),
            _where(one),
            _DONE.get(one.recovery_level, plain(one.recovery_level)) or "-",
            "-" if one.lost_iterations is None else str(one.lost_iterations),
            describe_time(one.cost_s),
        )
        for one in newest
    ]
    heads = ("#", "after", "incident", "done", "redone", "cost")
    widths = [max(len(head), *(len(row[place]) for row in rows)) for place, head in enumerate(heads)]
    # Only the text may be cut: the numbers are the purpose of the table.
    room = max(20, width - sum(widths) + widths[_INCIDENT] - 2 * len(heads) - 1)
    for head in heads:
        table.add_column(head, justify="left" if head in ("incident", "done") else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one, row in zip(newest, rows, strict=True):
        is_costliest = one is costliest and one.cost_s > 0
        cells = [Text(cell) for cell in row]
        cells[_INCIDENT].truncate(room, overflow="ellipsis")
        table.add_row(
            *cells, Text(mark if is_costliest else "", style="bold red"), style="bold" if is_costliest else None
        )
    older = len(ledger.incidents) - len(newest)
    legend = f"{mark} costliest" if any(one is costliest for one in newest) else f"costliest: {costliest.index + 1}"
    if older:
        legend += f"; {count(older, 'older incident')}: in the page and in --json"
    return Group(table, Text(legend, style="dim"))


def _where(one: IncidentCost) -> str:
    who = f", rank {one.rank}" if one.rank is not None else ""
    who += f" on {one.node}" if one.node and one.rank is not None else f", {one.node}" if one.node else ""
    cause = f" ({one.simulated})" if one.simulated else ""
    return plain(f"{_name(one.kind)}{who}{cause}")


def _means(ledger: Ledger) -> Iterator[Text]:
    """Yield the means over all incidents, each followed by those of the most frequent kinds."""
    statistics = ledger.statistics
    for name, of, words in (
        ("MTBF", statistics.mtbf_s, "between failures"),
        ("MTTD", statistics.mttd_s, "to detect"),
        ("MTTR", statistics.mttr_s, "to recover"),
    ):
        if "all" not in of:
            continue
        others = sorted((key for key in of if key != "all"), key=lambda key: -statistics.num_incidents.get(key, 0))
        each = ", ".join(f"{_DONE.get(key, _name(key))} {describe_time(of[key])}" for key in others[:_MAX_MEANS])
        line = Text(f"{name} {describe_time(of['all']):>8} {words}", no_wrap=True, overflow="ellipsis")
        yield line.append(f"  ({plain(each)})" if each else "", style="dim")


def _name(word: str) -> str:
    return str(word).replace("_", " ")


def list_files(written: dict[str, Path]) -> Iterator[Text]:
    """Yield a line for each written file, with its kind."""
    for what, path in written.items():
        yield Text(f"{what:<6} {path}", no_wrap=True, overflow="fold")
