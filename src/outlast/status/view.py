"""How ``outlast status`` looks to people: lines that say the most important first."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from outlast.status.report import BudgetReport, NodeReport, NodeState, RunState, StatusReport

__all__ = ["render", "terminal_width"]

MAX_NODES = 16
MAX_TROUBLES = 5
_LABEL = 11


def render(report: StatusReport, *, width: int | None = None) -> Iterator[str]:
    """Yield the lines of a report.

    Args:
        report: What is told.
        width: Columns at which lines are wrapped between words; ``None``: they are not.
    """
    for label, text in _entries(report):
        if width is None:
            yield f"{label:<{_LABEL}}{text}".rstrip()
            continue
        yield from textwrap.wrap(
            text,
            max(width, 40),
            initial_indent=f"{label:<{_LABEL}}",
            subsequent_indent=" " * _LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [label]


def terminal_width() -> int:
    """Return the columns of the terminal."""
    return shutil.get_terminal_size().columns


def _entries(report: StatusReport) -> Iterator[tuple[str, str]]:
    """Yield labels and texts."""
    started_by = f", started by {report.launcher}" if report.launcher else ""
    yield "run", f"{report.run}, job {report.job}{started_by}"
    if report.run_dir is not None:
        yield "directory", report.run_dir
    yield "state", str(report.state) if report.state == RunState.RUNNING else report.summary
    if report.state == RunState.RUNNING and (report.iteration_age_s or 0) > 60:
        yield "", f"no iteration was reported for {_duration(report.iteration_age_s or 0)}"
    if report.iteration is not None:
        rate = "" if report.rate is None else f", {report.rate:.3g} iterations/s"
        yield "iteration", f"{report.iteration}{rate}, {_duration(report.iteration_age_s or 0)} ago"
    if report.cycle is not None:
        cycles = f", {_count(report.num_cycles, 'cycle')} in this job" if report.num_cycles > 1 else ""
        ranks = "" if report.world_size is None else f", {_count(report.world_size, 'rank')}"
        yield "cycle", f"{report.cycle}{ranks}{cycles}"
    yield from _nodes(report.nodes)
    if report.budgets is not None:
        budgets = report.budgets
        progress = _budget(budgets.cycles_without_progress) if budgets.progress_known else "not known"
        yield (
            "budgets",
            f"restarts in a row {_budget(budgets.restarts_in_a_row)}, in the whole run "
            f"{_budget(budgets.restarts_total)}; cycles without progress {progress}",
        )
    saved = [f"{one.tier} {one.iteration} ({_duration(one.age_s)} ago)" for one in report.generations]
    if saved or report.directory or report.local_directory:
        yield "saved", ", ".join(saved) or "nothing yet"
    places = [f"{tier} {place}" for tier, place in (("local", report.local_directory), ("global", report.directory))]
    if any((report.local_directory, report.directory)):
        yield "", "in " + ", ".join(place for place in places if not place.endswith("None"))
    yield from _incidents(report)
    for problem in report.problems:
        yield "problem", problem


def _nodes(nodes: Sequence[NodeReport]) -> Iterator[tuple[str, str]]:
    if len(nodes) > 1:
        counts = Counter(str(node.state) for node in nodes)
        yield "nodes", ", ".join(f"{number} {state}" for state, number in counts.items())
    width = max((len(node.name) for node in nodes[:MAX_NODES]), default=0)
    for node in nodes[:MAX_NODES]:
        label = "node" if len(nodes) == 1 else ""
        yield label, _node(node, width)
    if len(nodes) > MAX_NODES:
        yield "", f"and {len(nodes) - MAX_NODES} more; --json names all"


def _node(node: NodeReport, width: int) -> str:
    parts = [str(node.state)]
    if node.ranks:
        parts.append(f"{'rank' if len(node.ranks) == 1 else 'ranks'} {_ranges(node.ranks)}")
    if node.pids:
        shown = ", ".join(str(pid) for pid in node.pids[:8]) + (", ..." if len(node.pids) > 8 else "")
        parts.append(f"{'pid' if len(node.pids) == 1 else 'pids'} {shown}")
    if node.lost_ranks:
        parts.append(f"without {_ranges(node.lost_ranks)}")
    if node.agent_pid is not None and node.state not in (NodeState.ENDED, NodeState.LOST):
        parts.append(f"agent pid {node.agent_pid}")
    if node.host is not None and node.host.split(".")[0] != node.name:
        parts.append(f"on {node.host}")
    return f"{node.name:<{width}}  {', '.join(parts)}"


def _incidents(report: StatusReport) -> Iterator[tuple[str, str]]:
    if not report.num_incidents:
        yield "incidents", "none"
        return
    shown = report.incidents[:MAX_TROUBLES]
    more = "" if len(shown) == report.num_incidents else f", the newest {len(shown)}"
    yield "incidents", f"{report.num_incidents}{more}"
    for one in shown:
        where = "" if one.cycle is None else f", cycle {one.cycle}"
        times = "" if one.num_reports == 1 else f" (reported {one.num_reports} times)"
        decision = "" if one.decision is None else f"; {one.decision}"
        yield "", f"{_duration(one.age_s)} ago{where}: {one.text}{times}{decision}"


def _budget(budget: BudgetReport) -> str:
    return f"{budget.used} of {budget.limit}" if budget.limit is not None else f"{budget.used} (no limit)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _duration(age_s: float) -> str:
    """Return seconds in the unit that people would use."""
    for limit, unit, name in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if age_s < limit:
            return f"{age_s / unit:.0f} {name}"
    return f"{age_s / 86400:.0f} days"


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers in few words: 0-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
