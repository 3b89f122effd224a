"""The page ``report.html``: one file with its data as JSON, its styles and its script; it loads nothing.

Texts of the journal may contain anything: here they are JSON with ``<`` escaped, and in the page they become text
nodes, never markup. Data that grows with ranks, cycles or time is stored in columns of numbers and thinned above a
limit, so that the page opens quickly; a note reports what is left out.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from outlast import clock
from outlast.goodput.account import IncidentCost, LoadSpan, Part, Warned
from outlast.goodput.ledger import Ledger
from outlast.incidents import IncidentKind, RecoveryLevel
from outlast.report.attachments import RunFiles
from outlast.version import __version__
from outlast.wording import count, number_ranges

MAX_SEGMENTS = 40_000
MAX_NODE_SPANS = 120_000
MAX_POINTS = 2_000
"""Points of one curve."""
MAX_CELLS = 1_200_000
"""Scores of the heat map."""
MAX_RANK_ROWS = 4_096
"""Rows of the heat map."""
MAX_INCIDENTS = 2_000
_MAX_TEXT, _MAX_ITEMS, _MAX_DEPTH = 6_000, 200, 6
_LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
"""A score from 0 to 1 as one of 64 characters; ``-`` = no score."""
_PLACES = re.compile(r"\{\{(\w+)\}\}")


def make_page(ledger: Ledger, *, run_dir: Path | None = None) -> bytes:
    """Return the page as UTF-8.

    Args:
        ledger: The run's account.
        run_dir: Directory of stacks and tracebacks; ``None`` = the page has none.
    """
    files = resources.files("outlast.report")
    parts = {name: files.joinpath(f"{name}.js").read_bytes() for name in ("elements", "timeline", "page")}
    parts["style"] = files.joinpath("page.css").read_bytes()
    parts["data"] = embed(_Contents(ledger, run_dir).build())
    # One pass, so that inserted text is not searched for placeholders.
    page = files.joinpath("page.html").read_text(encoding="utf-8")
    pieces = _PLACES.split(page)
    return b"".join(parts[piece] if place % 2 else piece.encode() for place, piece in enumerate(pieces))


def embed(value: Any) -> bytes:
    """Return a value as JSON that is safe in a script element."""
    data = msgspec.json.encode(value)
    for unsafe in ("<", ">", "&", "\u2028", "\u2029"):
        data = data.replace(unsafe.encode(), f"\\u{ord(unsafe):04x}".encode())
    return data


def meanings(words: type[StrEnum]) -> dict[str, str]:
    """Return each member's value with its docstring, in one line without markup."""
    body = ast.parse(inspect.getsource(words)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            assert isinstance(statement.value, ast.Constant)
            assert isinstance(following.value, ast.Constant)
            found[str(statement.value.value)] = " ".join(str(following.value.value).replace("``", "").split())
    return found


def thin(points: Sequence[tuple[float, float, int]], limit: int = MAX_POINTS) -> list[tuple[float, float, int]]:
    """Thin points to about ``limit``: of each stretch the first, the lowest and the highest stay, in order."""
    if len(points) <= limit:
        return list(points)
    width = math.ceil(3 * len(points) / limit)
    kept: list[tuple[float, float, int]] = []
    for begin in range(0, len(points), width):
        stretch = points[begin : begin + width]
        places = {
            0,
            min(range(len(stretch)), key=lambda place: stretch[place][1]),
            max(range(len(stretch)), key=lambda place: stretch[place][1]),
        }
        kept += [stretch[place] for place in sorted(places)]
    return kept


class _Contents:
    """The page's data of one run."""

    def __init__(self, ledger: Ledger, run_dir: Path | None) -> None:
        self._ledger = ledger
        self._notes = list(ledger.notes)
        self._files = RunFiles(run_dir, [job.job for job in ledger.jobs])
        self._cycles = {(one.job, one.cycle): place for place, one in enumerate(ledger.cycles)}
        self._parts = {str(part): place for place, part in enumerate(Part)}

    def build(self) -> dict[str, Any]:
        ledger = self._ledger
        texts = meanings(Part)
        built = {
            "run": {
                "id": ledger.run_id,
                "began": ledger.began,
                "began_ms": ledger.began_wall_ns // 1_000_000,
                **_pick(ledger, "wall_s", "state", "headline", "ettr", "num_iterations", "lost_iterations"),
                **_pick(ledger, "lost_is_minimum", "num_in_process", "num_spared"),
                "num_incidents": len(ledger.incidents),
                "made": clock.as_iso(clock.wall_ns()),
                "version": __version__,
            },
            "parts": [
                {"name": name, "meaning": texts[name], "seconds": ledger.partition.get(name, 0.0)}
                for name in self._parts
            ],
            "kinds": meanings(IncidentKind),
            "segments": self._segments(),
            "jobs": [msgspec.to_builtins(job) | {"command": " ".join(job.command)[:_MAX_TEXT]} for job in ledger.jobs],
            "cycles": [
                {
                    **_pick(one, "job", "cycle", "world_size", "num_in_process"),
                    "start": _round(one.start_s),
                    "end": _round(one.end_s),
                    "steps_start": _round(one.steps_start_s),
                    "from": one.from_iteration,
                    "to": one.to_iteration,
                    "reason": one.reason[:_MAX_TEXT],
                }
                for one in ledger.cycles
            ],
            "nodes": self._nodes(),
            "incidents": self._incidents(),
            "warned": self._warned(),
            "saves": self._saves(),
            "loads": [self._load(one) for one in ledger.loads[-MAX_POINTS:]],
            "slow": self._slow_ranks(),
            "steps": {
                "step_s": thin([(_round(s.at_s), s.step_s, s.iteration) for s in ledger.steps if s.step_s is not None]),
                "loss": thin(
                    [
                        (_round(s.at_s), s.loss, s.iteration)
                        for s in ledger.steps
                        if s.loss is not None and math.isfinite(s.loss)
                    ]
                ),
            },
            "statistics": ledger.statistics,
            "clocks": ledger.clocks[:_MAX_ITEMS],
        }
        return {**built, "notes": self._notes}  # last: the notes are complete now

    def _cycle(self, job: str, cycle: int | None) -> int:
        return -1 if cycle is None else self._cycles.get((job, cycle), -1)

    def _segments(self) -> dict[str, list[Any]]:
        """Return the run's stretches as columns; above the limit the shortest are merged into the one before."""
        segments = list(self._ledger.segments)
        places = range(len(segments))
        kept = set(places)
        if len(segments) > MAX_SEGMENTS:
            longest = sorted(places, key=lambda place: segments[place].start_s - segments[place].end_s)[:MAX_SEGMENTS]
            least_s = segments[longest[-1]].end_s - segments[longest[-1]].start_s
            num = len(segments) - MAX_SEGMENTS
            self._notes.append(
                f"the timeline leaves out the {num} shortest stretches, up to {least_s:.3g} s; sums do not"
            )
            kept = set(longest)
        rows: list[list[Any]] = []
        for place, one in enumerate(segments):
            end, slow = _round(one.end_s), _round(one.straggler_s) if one.straggler_s else 0
            if place not in kept and rows:
                rows[-1][1] = end
                continue
            incident = -1 if one.incident is None else one.incident
            part, cycle = self._parts[str(one.part)], self._cycle(one.job, one.cycle)
            rows.append([_round(one.start_s), end, part, cycle, incident, slow])
        return _columns(rows, "start", "end", "part", "cycle", "incident", "slow")

    def _nodes(self) -> dict[str, Any]:
        """Return the ranks of each node over time: columns, and the tables of names that they index."""
        names: dict[str, int] = {}
        layouts: dict[tuple[int, ...], int] = {}
        num = sum(len(one.nodes) for one in self._ledger.cycles)
        concerned = {one.node for one in self._ledger.incidents} | {one.node for one in self._ledger.warned}
        rows: list[list[Any]] = []
        for place, cycle in enumerate(self._ledger.cycles):
            for one in sorted(cycle.nodes, key=lambda node: (node.node_rank is None, node.node_rank or 0)):
                if num > MAX_NODE_SPANS and one.node not in concerned:
                    continue
                node = names.setdefault(one.node, len(names))
                layout = layouts.setdefault(one.ranks, len(layouts))
                rows.append([place, node, layout, _round(one.start_s), _round(one.end_s)])
        if num > MAX_NODE_SPANS:
            self._notes.append("the timeline has only the nodes that had an incident: there are too many")
        described = [
            {
                "text": ", ".join(number_ranges(ranks)),
                "ranks": [ranks[0], -len(ranks)] if _follows(ranks) else list(ranks),
            }
            for ranks in layouts
        ]
        columns = _columns(rows, "cycle", "node", "layout", "start", "end")
        return {**columns, "names": list(names), "layouts": described}

    def _incidents(self) -> list[dict[str, Any]]:
        ledger = self._ledger
        shown = list(ledger.incidents)
        if len(shown) > MAX_INCIDENTS:
            shown = sorted(sorted(shown, key=lambda one: -one.cost_s)[:MAX_INCIDENTS], key=lambda one: one.index)
            left_out = count(len(ledger.incidents) - MAX_INCIDENTS, "incident")
            self._notes.append(f"{left_out} that cost least are left out of the page; --json has them")
        jobs_of: dict[int, list[str]] = defaultdict(list)
        for job, number in self._cycles:
            jobs_of[number].append(job)
        files = {  # the costliest first, within the limits of size
            one.index: self._files.find(one, cycle_jobs=jobs_of[one.cycle])
            for one in sorted(shown, key=lambda one: -one.cost_s)
        }
        found = []
        for one in shown:
            entry = self._incident(one)
            entry["files"] = files[one.index]
            found.append(entry)
        return found

    def _incident(self, one: IncidentCost) -> dict[str, Any]:
        incident, decision = one.incident, one.decision
        evidence = {key: value for key, value in one.evidence.items() if key not in ("file", "output", "exited")}
        output = one.evidence.get("output")
        load = next((load for load in self._ledger.loads if load.at_s >= one.at_s), None)
        until_s = one.recovered_s if one.recovered_s is not None else math.inf
        return {
            **_pick(
                one,
                "index",
                "kind",
                "recovery_level",
                "job",
                "cycle",
                "node",
                "rank",
                "iteration",
                "parts",
                "simulated",
            ),
            "text": one.text[:_MAX_TEXT],
            "reason": one.reason.removeprefix(one.text).lstrip(":; ")[:_MAX_TEXT],
            "at": one.at_s,
            "since": one.since_s,
            "recovered": one.recovered_s,
            "resumed": one.resumed_iteration,
            "lost": one.lost_iterations,
            "cost": one.cost_s,
            "section": incident.section if incident is not None else None,
            "pid": incident.pid if incident is not None else None,
            "exit_code": incident.exit_code if incident is not None else None,
            "quarantine": decision.quarantine if decision is not None else (),
            "hold_back": decision.hold_back if decision is not None else (),
            "exited": one.evidence.get("exited"),
            "output": [str(line)[:_MAX_TEXT] for line in output[-_MAX_ITEMS:]] if isinstance(output, list) else [],
            "evidence": bounded(evidence),
            "load": self._load(load)
            if load is not None and load.at_s <= until_s and one.recovery_level != _RERUN
            else None,
        }

    def _warned(self) -> list[dict[str, Any]]:
        warned: Sequence[Warned] = self._ledger.warned
        if len(warned) > MAX_INCIDENTS:
            self._notes.append(
                f"the oldest {len(warned) - MAX_INCIDENTS} warnings are left out of the page; --json has them"
            )
        return [
            {
                **_pick(one, "kind", "job", "cycle", "node", "rank", "iteration", "num_reports"),
                "text": one.text[:_MAX_TEXT],
                "at": one.at_s,
                "evidence": bounded({key: value for key, value in one.evidence.items() if key != "file"}),
            }
            for one in warned[-MAX_INCIDENTS:]
        ]

    def _load(self, one: LoadSpan) -> dict[str, Any]:
        return {
            **_pick(one, "iteration", "load_s", "tiers", "bytes_read"),
            "at": _round(one.at_s),
            "rejected": [line[:_MAX_TEXT] for line in one.rejected[:_MAX_ITEMS]],
        }

    def _saves(self) -> dict[str, Any]:
        saves = self._ledger.saves
        tiers: dict[str, dict[str, Any]] = {}
        for one in saves:
            for tier in one.tiers or ("none",):
                of_tier = tiers.setdefault(tier, {"num": 0, "newest": 0, "num_bytes": 0, "at": 0.0})
                of_tier["num"] += 1
                of_tier["num_bytes"] += one.num_bytes
                if one.iteration >= of_tier["newest"]:
                    of_tier["newest"], of_tier["at"] = one.iteration, one.at_s
        return {
            "num": len(saves),
            "tiers": tiers,
            "stall": thin([(_round(one.at_s), one.stall_s, one.iteration) for one in saves]),
            "duration": thin(
                [(_round(one.at_s), one.duration_s, one.iteration) for one in saves if one.duration_s is not None]
            ),
            "bytes": thin([(_round(one.at_s), float(one.num_bytes), one.iteration) for one in saves if one.num_bytes]),
        }

    def _slow_ranks(self) -> dict[str, Any] | None:
        """Return the heat map: for each window a text with one character per rank, or for the lowest of several."""
        windows = self._ledger.slow_ranks
        size = 1 + max((rank for one in windows for rank in (*one.scores, *one.named)), default=-1)
        if not size:
            return None
        ranks_each = math.ceil(size / MAX_RANK_ROWS)
        num_rows = math.ceil(size / ranks_each)
        windows_each = max(1, math.ceil(len(windows) * num_rows / MAX_CELLS))
        named: dict[int, dict[str, Any]] = {}
        for one in windows:
            for rank in one.named:
                of_rank = named.setdefault(
                    rank, {"rank": rank, "num": 0, "lowest": 1.0, "first": one.start_s, "last": 0.0}
                )
                of_rank["num"] += 1
                of_rank["lowest"] = min(of_rank["lowest"], one.scores.get(rank, 1.0))
                of_rank["last"] = one.end_s
        columns = []
        for begin in range(0, len(windows), windows_each):
            group = windows[begin : begin + windows_each]
            least: list[float | None] = [None] * num_rows
            for one in group:
                for rank, score in one.scores.items():
                    row = rank // ranks_each
                    if rank >= 0 and ((lowest := least[row]) is None or score < lowest):
                        least[row] = score
            columns.append(
                {
                    "start": _round(group[0].start_s),
                    "end": _round(group[-1].end_s),
                    "iteration": group[-1].iteration,
                    "cycle": self._cycle(group[-1].job, group[-1].cycle),
                    "scores": "".join(map(_level, least)),
                    "named": sorted({rank for one in group for rank in one.named}),
                    "excess": round(max(one.excess for one in group), 4),
                    "why_nobody": group[-1].why_none[:400],
                }
            )
        return {
            "num_ranks": size,
            "ranks_each": ranks_each,
            "windows_each": windows_each,
            "columns": columns,
            "named": sorted(named.values(), key=lambda one: -one["num"])[:_MAX_ITEMS],
        }


_RERUN = RecoveryLevel.RERUN_STEP.name.lower()


def bounded(value: Any, depth: int = 0) -> Any:
    """Return plain data with long texts, long lists and deep nesting cut."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]} ... ({len(value)} characters)"
    if isinstance(value, dict):
        if depth >= _MAX_DEPTH:
            return "..."
        items = list(value.items())
        cut = {str(key)[:200]: bounded(one, depth + 1) for key, one in items[:_MAX_ITEMS]}
        return cut if len(items) <= _MAX_ITEMS else {**cut, "...": f"and {len(items) - _MAX_ITEMS} more"}
    if isinstance(value, (list, tuple)):
        if depth >= _MAX_DEPTH:
            return "..."
        listed = [bounded(one, depth + 1) for one in value[:_MAX_ITEMS]]
        return listed if len(value) <= _MAX_ITEMS else [*listed, f"and {len(value) - _MAX_ITEMS} more"]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return bounded(msgspec.to_builtins(value), depth + 1)


def _pick(one: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Return fields that have the same name in the page."""
    return {name: getattr(one, name) for name in names}


def _columns(rows: Sequence[Sequence[Any]], *names: str) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _round(seconds: Any) -> Any:
    return None if seconds is None else round(seconds, 4)


def _level(score: float | None) -> str:
    return "-" if score is None or math.isnan(score) else _LEVELS[round(63 * min(1.0, max(0.0, score)))]


def _follows(ranks: Iterable[int]) -> bool:
    """Return whether ranks are consecutive and not empty."""
    numbers = list(ranks)
    return bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
