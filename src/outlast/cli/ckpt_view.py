"""How ``outlast ckpt`` looks to people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress

    from outlast.checkpoint.catalogue.entries import Generation, Leftover, ListedPlace
    from outlast.checkpoint.catalogue.pruning import Plan

__all__ = ["ReadingProgress", "render_places", "render_plan", "render_verified"]

MAX_PROBLEMS = 20
"""Told of one generation; ``--json`` has all."""


def render_places(places: Iterable[ListedPlace], *, now_ns: int) -> Iterator[Table | str]:
    """Yield what ``ls`` prints.

    Args:
        places: As listed.
        now_ns: Nanoseconds since the epoch, for ages.
    """
    for place in places:
        yield from _render_place(place, word="valid")
        for leftover in place.leftovers:
            yield f"  {_describe_leftover(leftover, now_ns)}"


def render_verified(places: Sequence[ListedPlace], num_bytes_read: int) -> Iterator[Table | str]:
    """Yield what ``verify`` prints."""
    num_generations = num_bad = num_problems = 0
    for place in places:
        yield from _render_place(place, word="verified")
        num_generations += len(place.generations)
        num_problems += len(place.problems)
        num_bad += sum(not entry.valid or bool(entry.problems) for entry in place.generations)
    if not num_generations:
        yield "[red]there is no generation[/red]"
    elif num_bad:
        bad = f"{num_bad} of {_count(num_generations)} with bad or missing parts"
        yield f"[red]{bad}[/red], {_size(num_bytes_read)} read"
    elif num_problems:
        yield f"[yellow]the generations are right, not all beside them[/yellow], {_size(num_bytes_read)} read"
    else:
        yield f"[green]every byte of {_count(num_generations)} is right[/green], {_size(num_bytes_read)} read"
    unverified = [name for place in places for entry in place.generations for name in entry.unverified]
    if unverified:
        more = f" and {len(unverified) - 1} more" if len(unverified) > 1 else ""
        yield f"not compared, since an earlier version kept no digest: {escape(unverified[0])}{more}"


def render_plan(place: ListedPlace, plan: Plan, *, is_done: bool) -> Iterator[str]:
    """Yield what ``prune`` prints before it asks.

    Args:
        place: Where.
        plan: What goes.
        is_done: Nothing will be deleted: it was only asked what would go.
    """
    if not plan.generations and not plan.remains:
        yield f"[bold]{escape(place.path)}[/bold]: nothing to delete"
        return
    would = "would be deleted" if is_done else "to be deleted"
    yield f"[bold]{escape(place.path)}[/bold]: {_size(plan.num_bytes)} {would}"
    for found in plan.generations:
        entry = found.entry
        kind = "saved for diagnosis" if entry.suspect else "valid" if entry.valid else "not valid"
        yield f"  generation {entry.iteration}, {kind}, {_size(entry.num_bytes)}"
    for remains in plan.remains:
        yield f"  {escape(remains.entry.name)}, {_size(remains.entry.num_bytes)}"


class ReadingProgress:
    """How much has been read, on standard error, when that is a terminal. Thread: any."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._progress: Progress | None = None

    def __enter__(self) -> ReadingProgress:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = ("{task.description}", BarColumn(), DownloadColumn(True), TransferSpeedColumn())
            console = Console(stderr=True)
            self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._progress.add_task("reading", total=self._num_bytes)
            self._progress.start()
        return self

    def begin(self, iteration: int) -> None:
        """Name the generation that is read."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"generation {iteration}")

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        if self._progress is not None:
            self._progress.advance(self._task, num_bytes)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _render_place(place: ListedPlace, *, word: str) -> Iterator[Table | str]:
    facts = ["local tier" if place.tier == "local" else "global tier"]
    if place.run is not None:
        facts.append(place.run)
    if place.latest is not None:
        facts.append(f"latest {place.latest}")
    yield f"[bold]{escape(place.path)}[/bold]  {escape(', '.join(facts) if place.tier != 'empty' else 'empty')}"
    for problem in place.problems:
        yield f"  [yellow]{escape(str(problem))}[/yellow]"
    if not place.generations:
        yield "  no generation"
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  generation", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("finite", no_wrap=True)
    table.add_column("attempt", no_wrap=True)
    if place.tier == "local":
        table.add_column("where (+ copies of other nodes' ranks)", overflow="fold")
    else:
        table.add_column("files", justify="right")
    for entry in place.generations:
        table.add_row(
            str(entry.iteration),
            _state(entry, word),
            _size(entry.num_bytes),
            _ranks(entry),
            "-" if entry.restored_from is None else str(entry.restored_from),
            {True: "yes", False: "[yellow]no[/yellow]", None: "?"}[entry.finite],
            escape(entry.attempt or "?"),
            escape(_where(entry)) if place.tier == "local" else str(entry.num_files),
        )
    yield table
    for entry in place.generations:
        for problem in entry.problems[:MAX_PROBLEMS]:
            yield f"  [{'red' if not entry.valid else 'yellow'}]{entry.iteration}[/]: {escape(str(problem))}"
        if len(entry.problems) > MAX_PROBLEMS:
            yield f"  {entry.iteration}: and {len(entry.problems) - MAX_PROBLEMS} more; --json names all"


def _state(entry: Generation, word: str) -> str:
    if not entry.valid:
        state = "[red]bad[/red]"
    elif entry.problems:
        state = "[yellow]degraded[/yellow]"
    else:
        state = f"[green]{word}[/green]"
    return f"{state}, suspect" if entry.suspect else state


def _ranks(entry: Generation) -> str:
    if entry.world_size is None:
        return "?"
    num_here = entry.world_size - len(entry.missing) - len(entry.elsewhere) - len(entry.rebuildable)
    if num_here == entry.world_size:
        return f"all {entry.world_size}" if entry.world_size > 1 else "1"
    lacks = [f"lacks {_ranges(entry.missing)}"] if entry.missing else []
    lacks += [f"{_ranges(entry.elsewhere)} elsewhere"] if entry.elsewhere else []
    lacks += [f"{_ranges(entry.rebuildable)} by parity"] if entry.rebuildable else []
    return f"{num_here} of {entry.world_size}, {', '.join(lacks)}"


def _where(entry: Generation) -> str:
    parts = []
    for one in entry.held:
        own = _ranges(one.own) or "-"
        replicas = f" +{_ranges(one.replicas)}" if one.replicas else ""
        parities = f" parity {_ranges(one.parities)}" if one.parities else ""
        parts.append(f"{one.node}: {own}{replicas}{parities}")
    return "; ".join(parts)


def _ranges(ranks: Sequence[int]) -> str:
    """Return numbers in few words: 0-3,7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _describe_leftover(leftover: Leftover, now_ns: int) -> str:
    what = {
        "attempt": "attempt, failed or under way",
        "aside": "set aside by another attempt",
        "deletion": "remains of a deletion",
    }[leftover.kind]
    if leftover.modified_ns is None:
        return f"{escape(leftover.name)}: {what}, {_size(leftover.num_bytes)}"
    age_h = max(0, now_ns - leftover.modified_ns) / 3.6e12
    age = f"{age_h:.0f} h" if age_h >= 1.5 else f"{age_h * 60:.0f} min"
    return f"{escape(leftover.name)}: {what}, {_size(leftover.num_bytes)}, {age} old"


def _count(num_generations: int) -> str:
    return f"{num_generations} generation{'' if num_generations == 1 else 's'}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 100 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
