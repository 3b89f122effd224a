"""A damaged or hostile journal is reported as far as it can be read; no content of it ends a command."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from outlast import journal
from outlast.errors import ConfigError
from outlast.goodput.ledger import Ledger
from outlast.incidents import EventKind
from outlast.report.page import make_page
from outlast.report.trace import make_trace
from outlast.status.evidence import gather
from outlast.status.facts import judge
from outlast.status.report import render

JUNK: tuple[Any, ...] = (None, True, -1, 0, 1e9, 2**40, -(2**63), 1e308, "", "\x1b[2J", [], {}, [[]], [1e9], {"a": []})
DATA = {
    "incident": {"kind": "worker_died", "job": "j", "node": "n0", "rank": 1, "evidence": {"summary": "s"}},
    "verdict": {"rung": 2, "action": "restart_workers", "reason": "r"},
    "faults": [{"rank": 0, "kind": "worker_died", "summary": "s"}],
    "ranks": [0, 1], "named": [1], "pids": [1], "scores": [1.0, None], "worst": {"1": 0.5}, "iterations": {"0": 3},
    "bytes_read": {"local": 5}, "tiers": ["local"], "tier": "local", "rejected": ["x"], "command": ["train.py"],
    "endpoints": ["localhost:1"], "world_size": 2, "node_rank": 0, "missing": 1, "num": 2, "num_bytes": 7, "total": 9,
    "exit_code": 0, "pid": 1, "pid_started": 1, "max_no_progress_cycles": 3, "started_wall_ns": 1, "start_up_s": 0.1,
    "duration_s": 0.1, "stall_s": 0.1, "load_s": 0.1, "step_s": 0.1, "loss": 0.1, "launcher": "outlast run",
    "machine": "m", "host": "h", "directory": "/d", "local_directory": "/l", "reason": "finished", "summary": "s",
    "spared": False, "generation": 3, "limits": {"max_restarts": 3}, "name": "n0", "fault": "kill", "version": "1",
    "metrics": {}, "notes": [], "machines": {}, "restart_iteration": 3, "active_world_size": 2, "replaced": [],
}  # fmt: skip


def make_events() -> list[dict[str, Any]]:
    """Return one event of each kind, in a possible order, with every value that a kind may have."""
    return [
        {
            "kind": str(kind), "wall_ns": 1_800_000_000_000_000_000 + number * 10**9, "mono_ns": number * 10**9,
            "run_id": "r", "job": "j", "node": "n0", "proc": "agent", "cycle": 0, "rank": 1, "iteration": number,
            "data": copy.deepcopy(DATA),
        }
        for number, kind in enumerate(EventKind)
    ]  # fmt: skip


def read_all(run_dir: Path) -> list[str]:
    """Read a run directory as ``report`` and ``status`` do; return the report's notes."""
    list(journal.read(run_dir))
    with contextlib.suppress(ConfigError):
        list(render(judge(gather(run_dir), 1_800_000_100_000_000_000)))
    try:
        ledger = Ledger.read(run_dir)
    except ConfigError:
        return []
    make_page(ledger, run_dir=run_dir)
    make_trace(ledger)
    return list(ledger.notes)


def write_journal_file(run_dir: Path, lines: list[bytes]) -> None:
    (run_dir / "journal").mkdir(exist_ok=True)
    (run_dir / "journal" / "j-n0-agent.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def test_nested_and_huge_lines_are_dropped_with_a_note(tmp_path: Path) -> None:
    """Only the line with 100,000 nested lists or a rank of a billion is dropped, and the report has a note about it."""
    events = make_events()
    huge = copy.deepcopy(events[4])
    huge["data"]["ranks"] = [1e9]
    nested = b'{"kind":"incident","data":{"a":' + b"[" * 100_000
    write_journal_file(tmp_path, [nested, json.dumps(huge).encode(), *(json.dumps(event).encode() for event in events)])
    assert any("2 lines of j-n0-agent.jsonl cannot be read" in note for note in read_all(tmp_path))


@pytest.mark.parametrize("seed", range(4))
def test_invalid_journal_values_never_end_a_command(seed: int, tmp_path: Path) -> None:
    """Values of other types and sizes, anywhere in any event, cause no traceback."""
    draw = random.Random(seed)
    for _ in range(60):
        events = make_events()
        for _ in range(draw.randint(1, 6)):
            event = draw.choice(events)
            node = draw.choice(
                [event, event["data"], event["data"], event["data"]["incident"], event["data"]["verdict"]]
            )
            if isinstance(node, dict) and node:
                node[draw.choice(list(node))] = copy.deepcopy(draw.choice(JUNK))
            if not isinstance(event["data"], dict) or not isinstance(event["data"].get("incident"), dict):
                event["data"] = copy.deepcopy(DATA)
        write_journal_file(tmp_path, [json.dumps(event).encode() for event in events])
        read_all(tmp_path)
