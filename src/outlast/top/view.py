"""The view of ``outlast top``: lines for a terminal of any size, or for a file.

The most important lines come first. If there are more ranks than lines, the worst come first, and one line summarises
the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from outlast.status.report import (
    NodeState,
    RunState,
    StatusReport,
    count_nodes,
    describe_incidents,
    describe_safety,
    describe_waiting,
)
from outlast.top.look import RankLine, TopReport
from outlast.wording import count, duration, number_ranges, one_line

MAX_RANKS, MAX_INCIDENTS = 32, 5
"""Limits if the output is not a terminal."""
MIN_RANK_LINES = 3
OLD_S = 10.0
"""A rank with an older heartbeat is sorted before the others."""
_LABEL = 11
_HEAD = ("RANK", "NODE", "PID", "STATE", "ITERATION", "HEARTBEAT", "SECTION")
_SEVERITY = ("lost", "ended", "stopped", "unknown", "restarting", "excluded", "starting", "joining", "ready")
"""States of ranks, worst first; all other states are normal."""
_COLOURS = {"lost": "red", "ended": "red", "stopped": "red", "unknown": "yellow", "restarting": "yellow"}
_STATE_COLOURS = {
    RunState.RUNNING: "green",
    RunState.WAITING: "yellow",
    RunState.FORMING: "yellow",
    RunState.NO_PROCESS: "red",
    RunState.UNKNOWN: "red",
}


def show(report: TopReport, *, width: int | None = None, height: int | None = None, hint: str = "") -> list[Text]:
    """Return the lines of a view.

    Args:
        report: The report to show.
        width: Columns at which lines are cut; ``None`` = not cut.
        height: Maximum number of lines; ``None`` = no limit.
        hint: The last line of a view with a height.
    """
    head = list(_describe_run(report))
    incidents = [_entry(label, text) for label, text in describe_incidents(report.status, MAX_INCIDENTS)]
    if height is None:
        num_ranks = MAX_RANKS
    else:
        left = height - len(head) - (1 if hint else 0) - 1  # the table's own first line
        num_ranks = max(MIN_RANK_LINES, left - len(incidents))
        num_ranks = min(num_ranks, len(report.ranks))
        incidents = incidents[: max(1, left - num_ranks)]
    lines = [*head, *_list_ranks(report.ranks, num_ranks), *incidents]
    if height is not None:
        lines = lines[: height - (1 if hint else 0)]
        if hint:
            lines.append(Text(hint, style="dim"))
    for line in lines:
        line.no_wrap = True
        if width is not None:
            line.truncate(width, overflow="ellipsis")
    return lines


def plain(lines: Sequence[Text]) -> str:
    """Return the lines as text without colours."""
    return "\n".join(line.plain.rstrip() for line in lines)


# -- the run -----------------------------------------------------------------------------------------------------


def _entry(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "bold"), (one_line(text), style))


def _describe_run(report: TopReport) -> Iterator[Text]:
    status = report.status
    state = str(status.state) if status.state == RunState.RUNNING else status.summary
    cycle = "" if status.cycle is None else f", cycle {status.cycle}"
    ranks = "" if status.world_size is None else f", {count(status.world_size, 'rank')}"
    style = _STATE_COLOURS.get(status.state, "red" if status.exit_code else "green")
    yield _entry("run", f"{status.run}, job {status.job}{cycle}{ranks}")
    yield _entry("state", state, style)
    if (line := _describe_progress(report)) is not None:
        yield _entry("iteration", line)
    for one in report.unanswered:
        why = "" if one.reason is None else f": {one.reason}"
        yield _entry("no reply", f"{one.what}: no response for {duration(one.for_s)}{why}", "yellow")
    yield from _describe_nodes(status)
    if status.waiting is not None:
        yield _entry("waits for", describe_waiting(status.waiting), "yellow")
    for label, text in describe_safety(status):
        yield _entry(label, text)
    for problem in status.problems:
        yield _entry("problem", problem, "yellow")


def _describe_progress(report: TopReport) -> str | None:
    if report.iteration is None:
        return None
    parts = [str(report.iteration) + ("" if report.total is None else f" of {report.total}")]
    if report.rate is not None and report.status.state == RunState.RUNNING:
        parts.append(f"{report.rate:.3g} iterations/s")
    if report.left_s is not None:
        parts.append(f"{duration(report.left_s)} left")
    if report.goodput is not None:
        parts.append(f"goodput {report.goodput:.1%}")
    return ", ".join(parts)


def _describe_nodes(status: StatusReport) -> Iterator[Text]:
    if not status.nodes:
        return
    lost = [node.name for node in status.nodes if node.state in (NodeState.LOST, NodeState.EXCLUDED)]
    yield _entry("nodes", count_nodes(status.nodes), "yellow" if lost else "")
    if status.spares:
        yield _entry("spares", _name_some(status.spares))
    if lost:
        yield _entry("", f"lost or excluded: {_name_some(lost)}", "yellow")


def _name_some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# -- its ranks ---------------------------------------------------------------------------------------------------


def rank_badness(line: RankLine, farthest: int) -> tuple[int, int, int, int]:
    """Return the sort key of ranks that do not all have a line: the smallest is the worst.

    A lag of one iteration and a heartbeat some seconds old do not count, because the order would change constantly.

    Args:
        line: The rank.
        farthest: The highest iteration of all ranks.
    """
    severity = _SEVERITY.index(line.state) if line.state in _SEVERITY else len(_SEVERITY)
    behind = 0 if line.iteration is None else farthest - line.iteration
    age_s = line.heartbeat_age_s or 0.0
    old = int(age_s // OLD_S) if line.source == "board" else 0
    return severity, -behind if behind > 1 else 0, -old, line.rank


def _list_ranks(ranks: Sequence[RankLine], num: int) -> Iterator[Text]:
    """Yield a table of ranks by node; of more than ``num`` the worst, and a line for the others."""
    if not ranks:
        return
    shown = list(ranks)
    others: list[RankLine] = []
    if len(ranks) > num:
        farthest = max((line.iteration for line in ranks if line.iteration is not None), default=0)
        by_badness = sorted(ranks, key=lambda line: rank_badness(line, farthest))
        shown, others = by_badness[: num - 1], by_badness[num - 1 :]
    rows = [_cells(line) for line in shown]
    if not others:  # a node's name is shown at its first rank
        for number in range(len(rows) - 1, 0, -1):
            if shown[number].node == shown[number - 1].node:
                rows[number] = (rows[number][0], "", *rows[number][2:])
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    yield Text(_join(_HEAD, widths), style="bold")
    for line, row in zip(shown, rows, strict=True):
        style = _COLOURS.get(
            line.state, "yellow" if line.source == "board" and (line.heartbeat_age_s or 0) > OLD_S else ""
        )
        yield Text(_join(row, widths), style=style)
    if others:
        yield Text(one_line(describe_others(others)), style="dim")


def describe_others(others: Sequence[RankLine]) -> str:
    """Return one line that summarises the ranks without a line."""
    counts = Counter(line.state for line in others)
    what = f"and {len(others)} more: "
    what += ", ".join(f"{'all' if len(counts) == 1 else number} {state}" for state, number in counts.most_common())
    done = [line.iteration for line in others if line.iteration is not None]
    if done:
        low, high = min(done), max(done)
        what += f", iteration {low}" if low == high else f", iterations {low} to {high}"
    ranks = number_ranges(line.rank for line in others)
    return what + f" (ranks {', '.join(ranks[:6])}{', ...' if len(ranks) > 6 else ''})"


def _cells(line: RankLine) -> tuple[str, ...]:
    section = line.section or ("-" if line.source == "board" else "")
    if line.section is not None and line.section_s is not None:
        section = f"{section} ({_seconds(line.section_s)})"
    age = "" if line.heartbeat_age_s is None else f"{_seconds(line.heartbeat_age_s)} ago"
    if line.source == "journal" and age:
        age = f"({age})"
    pid, iteration = ("" if value is None else str(value) for value in (line.pid, line.iteration))
    return str(line.rank), line.node, pid, line.state, iteration, age, section


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    right = {0, 2, 4, 5}
    line = "  ".join(
        f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return one_line(line).rstrip()
