"""The view: what is shown while the demo runs, and the tables at its end.

While it runs there are lines with a picture below them, lines alone, or nothing. Each event that matters becomes one
line that stays. The picture shows what changes all the time; no fact is in it alone. Both are made from the same scene,
so that they cannot contradict each other.

At the end a table narrow enough for any terminal has what the faults cost, and another has the proof; the last row of
the first counts its rows and nothing else. A long table, for a file, has by what each fault was noticed, and what was
done about it. Both tables of faults are made of the same rows.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outlast import clock
from outlast.decoding import convert
from outlast.demo.outcome import (
    COMPARED,
    TIERS,
    Account,
    DemoOutcome,
    Leaving,
    Slowed,
    Sources,
    count_bytes,
    differences,
)
from outlast.demo.plan import Scene, Shape
from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind, Incident, Rung, Verdict

_NAMES_AND_FIGURES = re.compile(r"Rank=\S+ Node=\S+ | \([^()]*\)")
_LONG_PATH = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')
_DEEDS = {"restart_workers": "workers restarted", "replace_node": "a spare took over"}
_WIDE = 240
"""Columns of the long table: the longest names of tensors fit into its cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One fault: what it cost, by what it was noticed, and what was done about it."""

    kind: str
    where: str
    noticed_s: float | None
    going_on_s: float | None = None
    lost: int | None
    """Iterations."""
    fault: str | None
    """What the demo did; ``None`` = it did not cause this."""
    at: str = ""
    """The iterations at which it happened."""
    struck: str = ""
    """The tensor that was struck."""
    evidence: str
    done: str
    sources: Sources | None = None


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
    if outcome.slowed is not None:
        yield _slowed_row(outcome.slowed)
    for one in outcome.incidents:
        yield _Row(
            kind=one.kind,
            where=one.node if one.rank is None else f"rank {one.rank} on {one.node}",
            noticed_s=one.detected_after_s,
            going_on_s=one.recovered_after_s,
            lost=one.redone_iterations,
            fault=one.fault,
            at="" if one.iteration is None else str(one.iteration),
            struck=one.struck or "",
            evidence=_LONG_PATH.sub(r"\1", one.evidence),
            done=_deed(one),
            sources=one.sources,
        )
    if outcome.leaving is not None:
        yield _leaving_row(outcome.leaving)


def _slowed_row(slowed: Slowed) -> _Row:
    if slowed.num_reports is None:
        done = "never named"
    else:
        reports = "1 report" if slowed.num_reports == 1 else f"{slowed.num_reports} reports"
        done = f"named with {reports}, and nobody else" if not slowed.others_named else f"named with {reports}"
    return _Row(
        kind="straggler",
        where=f"rank {slowed.rank} on {slowed.node}",
        noticed_s=slowed.noticed_after_s,
        lost=0,
        fault=slowed.fault,
        at=f"{slowed.since}" if slowed.until is None else f"{slowed.since} to {slowed.until}",
        evidence=_NAMES_AND_FIGURES.sub("", slowed.evidence) or "-",
        done=done + (", restarted" if slowed.restarts else ", 0 restarts"),
    )


def _leaving_row(leaving: Leaving) -> _Row:
    codes = " or ".join(map(str, leaving.run_exit_codes)) or "missing"
    if leaving.iteration is None:
        done = f"the ranks did not leave together, exit code {codes}"
    else:
        done = f"all ranks saved iteration {leaving.iteration} and left, exit code {codes}"
    if leaving.resumed_at:
        done += f"; another job went on from iteration {min(leaving.resumed_at.values())}"
    return _Row(
        kind="preempted",
        where=f"rank {leaving.rank} on {leaving.node}",
        noticed_s=leaving.noticed_after_s,
        going_on_s=leaving.going_on_after_s,
        lost=leaving.lost_iterations,
        fault=leaving.fault,
        at=str(leaving.struck_at),
        evidence="its session saw the signal" if leaving.noticed_after_s is not None else "-",
        done=done,
        sources=leaving.sources,
    )


def _narrow_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _count(rows: list[_Row]) -> str:
    faults = sum(row.fault is not None for row in rows)
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
    for row in _rows(outcome):
        node = "" if row.where.startswith("rank ") else "node "
        at = f"\niteration {row.at}" if row.at else ""
        struck = f"\n{row.struck}" if row.struck else ""
        table.add_row(
            escape(f"{row.kind}\n{node}{row.where}{at}\n({row.fault or 'not caused by the demo'}){struck}"),
            escape(row.evidence),
            escape(row.done),
            _sources(row.sources),
            _duration(row.noticed_s),
            _duration(row.going_on_s),
            "-" if row.lost is None else str(row.lost),
        )
    return table


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
    """Tell everything in lines, and show below them a picture that changes, on a terminal.

    Args:
        shape: The world's size and the number of iterations.
        console: The terminal.
    """

    def __init__(self, shape: Shape, console: Console) -> None:
        super().__init__(shape)
        self._console = console
        self._live: Live | None = None
        self._next_s = 0.0
        self._scene: Scene | None = None
        self._iteration = 0

    def show(self, scene: Scene) -> None:
        """Print what is new and redraw the picture, a few times a second."""
        self._scene = scene
        if clock.now_s() >= self._next_s:
            self._next_s = clock.now_s() + _REFRESH_S
            self._redraw(scene)

    def _open(self, title: str) -> None:
        self._scene, self._iteration = None, 0
        self._tell(title, "bold")
        self._live = Live(Text("starting", style="dim"), console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def _close(self) -> None:
        if self._live is None:
            return
        try:
            if self._scene is not None:
                self._redraw(self._scene)
        finally:
            self._live.stop()
            self._live = None

    def _redraw(self, scene: Scene) -> None:
        for line in self._new_lines(scene):
            self._tell(line, _style(line))
        if self._live is not None:
            self._live.update(self._draw(scene), refresh=True)

    def _tell(self, line: str, style: str) -> None:
        self._console.print(Text(wrap(line, self._console.width), style=style), soft_wrap=True)

    def _draw(self, scene: Scene) -> RenderableType:
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
