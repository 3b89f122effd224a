"""The view: what is shown while the demo runs, and the lines at its end.

While it runs there is a screen that changes, or lines alone, or nothing. Each event that matters becomes one line; the
screen has the newest of them above a picture of the ranks, and is gone when the run is over: the journal, and the page
that is made of it, have everything. Both are made from the same scene, so that they cannot contradict each other.

At the end there is a line for each fault with what it cost, narrow enough for any terminal, and one with the verdict.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outlast import clock
from outlast.decoding import convert
from outlast.demo.outcome import DemoOutcome, count_bytes
from outlast.demo.plan import Scene, Shape
from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind, Incident, Rung, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One fault, and what it cost."""

    kind: str
    where: str
    noticed_s: float | None
    going_on_s: float | None = None
    lost: int | None
    """Iterations."""
    is_ours: bool = True
    """Whether the demo caused it."""


def render(outcome: DemoOutcome) -> RenderableType:
    """Return what the faults cost and the verdict, for a terminal or a file of at least 60 columns."""
    parts: list[RenderableType] = []
    if rows := list(_rows(outcome)):
        parts.append(_costs_table(rows))
    if outcome.ok:
        jobs = "" if outcome.leaving is None else " in 2 jobs"
        told = f"{_count(rows)}, {outcome.cycles} cycles{jobs}, weights {str(outcome.struck['weights'])[:12]}"
        parts.append(Text(f"bit-identical: {told} ({outcome.wall_s:.0f} s)", style="bold green"))
    else:
        parts += [Text(f"failed: {problem}", style="bold red") for problem in outcome.problems]
    return Group(*parts)


def _rows(outcome: DemoOutcome) -> Iterator[_Row]:
    if (slowed := outcome.slowed) is not None:
        where = f"rank {slowed.rank} on {slowed.node}"
        yield _Row(kind="straggler", where=where, noticed_s=slowed.noticed_after_s, lost=0)
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
            kind="preempted",
            where=f"rank {leaving.rank} on {leaving.node}",
            noticed_s=leaving.noticed_after_s,
            going_on_s=leaving.going_on_after_s,
            lost=leaving.lost_iterations,
        )


def _count(rows: list[_Row]) -> str:
    faults = sum(row.is_ours for row in rows)
    others = len(rows) - faults
    text = "1 fault" if faults == 1 else f"{faults} faults"
    if others:
        text += f" and {others} incident{'s' if others > 1 else ''} that the demo did not cause"
    return text


def _costs_table(rows: list[_Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("incident")
    table.add_column("where")
    for name in ("noticed", "going on", "redone"):
        table.add_column(name, justify="right")
    for row in rows:
        lost = "-" if row.lost is None else str(row.lost)
        table.add_row(row.kind, row.where, _duration(row.noticed_s), _duration(row.going_on_s), lost)
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def tell(event: Event) -> str | None:
    """Return the line for an event; ``None`` when it is none of the story."""
    data = event.data
    match event.kind:
        case EventKind.NODE_JOINED if data.get("spare"):
            return f"{data['name']} waits as a spare"
        case EventKind.CYCLE_STARTED:
            first, last = min(data["ranks"]), max(data["ranks"])
            ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
            return f"cycle {event.cycle}: {event.node} runs {ranks} of {data['world_size']}"
        case EventKind.FAULT_SIMULATED:
            spoiled = "" if data.get("copies_spoiled") is None else f", {data['copies_spoiled']} copies damaged"
            target = f"rank {event.rank}, {data['tensor']}" if "tensor" in data else data["target"]
            return f"FAULT: {data['fault']}: {target}, at iteration {event.iteration}{spoiled}"
        case EventKind.INCIDENT:
            decided = f"; decided: {data['verdict']['reason']}" if "verdict" in data else ""
            return f"noticed by {event.node}: {convert(data['incident'], Incident).describe()}{decided}"
        case EventKind.VERDICT:
            verdict = convert(data["verdict"], Verdict)
            return f"decided: {verdict.reason}" if verdict.rung != Rung.STOP or verdict.exit_code else None
        case EventKind.NOTICE:
            who = event.node if event.rank is None else f"rank {event.rank}"
            why = data.get("reason") or f"signal {data['signal']}"
            return f"noticed by {who}: preempted ({why})"
        case EventKind.SESSION_ENDED if data["exit_code"] == ExitReason.PREEMPTED:
            return f"rank {event.rank}: saved, and left after iteration {event.iteration} with exit code 75"
        case EventKind.JOB_ENDED if data["exit_code"] == ExitReason.PREEMPTED:
            return f"{event.node}: the job is over, exit code 75"
        case EventKind.RESTORED:
            read = sum(data["bytes_read"].values())
            return f"rank {event.rank}: restored iteration {event.iteration} from {data['tier']}, {count_bytes(read)}"
        case _:
            return None


_REFRESH_S = 0.2
_EVERY = 20
"""Iterations between two lines on how far the training is."""
_INDENT = 10
"""The width of the time before a line; a continuation line is two columns further to the right."""
_BAR = 40
_SPARE_ROWS = 2
"""Rows of the screen that stay free: the title, and the cursor's."""


def wrap(text: str, width: int) -> str:
    """Return a line in lines of a width, made of whole words; a longer word has a line of its own."""
    return textwrap.fill(
        text,
        max(width, 2 * _INDENT),
        subsequent_indent=" " * (_INDENT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


class View:
    """What is printed and shown; this one prints nothing.

    Args:
        shape: The world's size and the number of iterations.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._told: set[tuple[str, str, int]] = set()
        self._begin_ns: int | None = None
        self._next_iteration = 0
        self._is_at_end = False

    @contextmanager
    def act(self, title: str) -> Iterator[None]:
        """Show one of the demo's runs, until the block is left."""
        self._told.clear()
        self._begin_ns, self._next_iteration, self._is_at_end = None, 0, False
        self._open(title)
        try:
            yield
        finally:
            self._close()

    def show(self, scene: Scene) -> None:
        """Show what the cluster looks like, and print what is new since the last time."""

    def _open(self, title: str) -> None: ...

    def _close(self) -> None: ...

    def _new_lines(self, scene: Scene) -> Iterator[str]:
        for event in scene.events:
            if (key := (event.node, event.proc, event.mono_ns)) not in self._told:
                self._told.add(key)
                if (line := tell(event)) is not None:
                    yield f"{self._since_begin(event):6.2f} s  {line}"
        if scene.loss is not None and scene.loss.iteration >= self._next_iteration:
            self._next_iteration = scene.loss.iteration // _EVERY * _EVERY + _EVERY
            yield f"{self._at(scene.loss.iteration)}, loss {scene.loss.value:.4f}"
        if scene.is_training and scene.iteration >= self.shape.iterations and not self._is_at_end:
            self._is_at_end = True
            yield f"{self._at(scene.iteration)}, the last one"

    def _at(self, iteration: int) -> str:
        return f"{'':{_INDENT}}iteration {iteration} of {self.shape.iterations}"

    def _since_begin(self, event: Event) -> float:
        if self._begin_ns is None:
            self._begin_ns = event.mono_ns
        return max(0, event.mono_ns - self._begin_ns) / 1e9


SilentView = View
"""For a reader that is a program."""


class PlainView(View):
    """Tell everything in lines of whole words, for a log, a pipe, or a terminal that can do no more.

    Args:
        shape: The world's size and the number of iterations.
        write: Called with each line, or several.
        width: Columns.
    """

    def __init__(self, shape: Shape, write: Callable[[str], None], *, width: int) -> None:
        super().__init__(shape)
        self._write, self._width = write, width

    def show(self, scene: Scene) -> None:
        """Tell what is new."""
        for line in self._new_lines(scene):
            self._write(wrap(line, self._width))

    def _open(self, title: str) -> None:
        self._write(wrap(title, self._width))


class LiveView(View):
    """Show a screen that changes: the newest lines, and below them a picture of the ranks.

    Args:
        shape: The world's size and the number of iterations.
        console: The terminal.
    """

    def __init__(self, shape: Shape, console: Console) -> None:
        super().__init__(shape)
        self._console = console
        self._live: Live | None = None
        self._next_s = 0.0
        self._iteration = 0
        self._lines: list[Text] = []
        """All of this run, wrapped; the screen has the newest."""

    def show(self, scene: Scene) -> None:
        """Redraw the screen, a few times a second."""
        if self._live is not None and clock.now_s() >= self._next_s:
            self._next_s = clock.now_s() + _REFRESH_S
            self._live.update(self._draw(scene), refresh=True)

    def _open(self, title: str) -> None:
        self._iteration = 0
        self._lines.clear()
        self._console.print(Text(wrap(title, self._console.width), style="bold"), soft_wrap=True)
        self._live = Live(Text("starting", style="dim"), console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, scene: Scene) -> RenderableType:
        for line in self._new_lines(scene):
            wrapped = wrap(line, self._console.width).splitlines()
            self._lines += (Text(part, style=_style(line), no_wrap=True, overflow="ellipsis") for part in wrapped)
        picture = self._picture(scene)
        num_rows = len(self._console.render_lines(picture, pad=False))
        room = max(0, self._console.height - num_rows - _SPARE_ROWS)
        return Group(*self._lines[len(self._lines) - min(room, len(self._lines)) :], picture)

    def _picture(self, scene: Scene) -> RenderableType:
        if scene.is_training:
            self._iteration = scene.iteration
            facts = [f"iteration {self._iteration} of {self.shape.iterations}"]
        else:
            facts = [f"starting again after iteration {self._iteration}" if self._iteration else "starting"]
        facts.append(f"cycle {max(scene.cycle, 0)}")
        if scene.loss is not None:
            facts.append(f"loss {scene.loss.value:.4f} at {scene.loss.iteration}")
        if scene.durable is not None:
            facts.append(f"saved {scene.durable}")
        bar = Table.grid()  # a line of its own
        bar.add_row(ProgressBar(total=self.shape.iterations, completed=self._iteration, width=_BAR))
        ranks = [self._ranks(scene)] if scene.running else []
        return Group(Text(), bar, Text("  ".join(facts), style="bold"), *ranks)

    def _ranks(self, scene: Scene) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("rank", "node", "pid", "iteration", "in section"):
            justify = "left" if name in ("node", "in section") else "right"
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        known = {one.rank: one for one in scene.ranks if one.cycle == scene.cycle}
        for rank in range(self.shape.world_size):
            one = known.get(rank)
            if one is None:
                table.add_row(str(rank), "-", "-", "-", "", style="yellow")
            else:
                table.add_row(str(rank), one.node, str(one.pid), str(one.iteration), one.section)
        waits = "waits as a spare" if scene.cycle >= 0 else "has joined"
        for node in scene.spares:
            table.add_row("", node, "", "", waits, style="dim")
        for node in sorted(scene.quarantined):
            table.add_row("", node, "", "", "is quarantined", style="dim")
        return table


def _style(line: str) -> str:
    if "FAULT:" in line:
        return "bold red"
    if "noticed by" in line:
        return "yellow"
    return "green" if "decided:" in line else "dim"
