"""Texts from a journal, a checkpoint, a config or a path cannot control the terminal of the reader."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outlast.cli.console import PrintableConsole
from outlast.cli.main import main
from outlast.incidents import EventKind

HOSTILE = "\x1b]0;owned\x07\x9b2J\u202e\r\b\x7f[red]x[/red]\nstate      finished\t:smile:"
NAME = HOSTILE.replace("/", "_").replace("\n", "")
DATA: dict[str, Any] = {
    "incident": {"kind": "worker_died", "job": "j", "node": "n0", "rank": 1, "evidence": {"summary": "s"}},
    "verdict": {"rung": 2, "action": "restart_workers", "reason": "r"},
    "faults": [{"rank": 0, "kind": "worker_died", "summary": "s"}], "tiers": ["local"], "tier": "local",
    "command": ["train.py"], "endpoints": ["localhost:1"], "launcher": "outlast run", "machine": "m", "host": "h",
    "directory": "/d", "local_directory": "/l", "reason": "finished", "summary": "s", "name": "n0", "version": "1",
    "world_size": 2, "num": 2, "total": 9, "exit_code": 0,
}  # fmt: skip
MANIFEST = {"schema": 2, "run": "r", "topology": "t", "world_size": 1, "iteration": 5, "attempt": "a-0-b.1"}
MANIFEST |= {"restored_from": None, "shards": [[0, 4, "MTIzNDU2Nzg=", "0", True]]}
FILES = {"schema": 1, "run": "r", "topology": "t", "world_size": 1, "iteration": 6, "attempt": "a-0-b.1"}
FILES |= {"restored_from": None, "finite": True, "files": [{"name": "f", "num_bytes": 64, "chunks": ["0"]}]}
FILES |= {"items": [], "ranks": [{"tree": [0, 0, 16, 4, 8], "tensors": []}]}
OWNER = {"token": "t", "process": {"host": "h", "machine": "m", "pid": 1, "started": 1}, "run": "r"}


def make_hostile(value: Any) -> Any:
    """Return a value with control characters in all of its texts but those of its type fields."""
    if isinstance(value, dict):
        return {key: one if key in ("kind", "proc") else make_hostile(one) for key, one in value.items()}
    if isinstance(value, list):
        return [make_hostile(one) for one in value]
    return value + HOSTILE if isinstance(value, str) else value


def seal(value: Any) -> bytes:
    body = json.dumps(make_hostile(value)).encode()
    return b'{"manifest":%s,"sha256":"%s"}' % (body, hashlib.sha256(body).hexdigest().encode())


def write_json(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory in which every text, also in its checkpoints, is hostile."""
    root = tmp_path / NAME
    events = (
        {"kind": str(kind), "wall_ns": 1_800_000_000_000_000_000 + number * 10**9, "mono_ns": number * 10**9,
         "run_id": "r", "job": "j", "node": "n0", "proc": "agent", "cycle": 0, "rank": 1, "iteration": 3, "data": DATA}
        for number, kind in enumerate(EventKind)
    )  # fmt: skip
    write_json(root / "journal" / "j-n0-agent.jsonl", "\n".join(json.dumps(make_hostile(event)) for event in events))
    (root / "journal" / f"j-{NAME}-rank-0.jsonl").symlink_to("nowhere")
    write_json(root / "ladder.json", json.dumps({"job": HOSTILE, "num_cycles": HOSTILE}))
    write_json(root / "local" / "step-5" / "manifest.json", seal(MANIFEST))
    write_json(root / "local" / f".step-4.{NAME}", b"")
    write_json(root / "global" / "step-6" / "manifest.json", seal(FILES))
    write_json(root / "global" / "step-6" / NAME, b"")
    write_json(root / "empty" / "owner" / "1.json", json.dumps(make_hostile(OWNER)))
    write_json(root / "keys.json", json.dumps({HOSTILE: 1}))
    write_json(root / "foreign.json", json.dumps({"train": {HOSTILE: 1}, "run_dir": str(tmp_path / NAME)}))
    write_json(root / "values.json", json.dumps({"seed": HOSTILE}))
    write_json(root / "bad.toml", "a = " + "\x1b[2J")
    write_json(root / "plan.json", json.dumps({"faults": [{"kind": HOSTILE}]}))
    write_json(root / "trace.json", json.dumps([{"time": 0, "kind": HOSTILE}]))
    return root


COMMANDS = (
    "status .", "status . --json", "status empty", "status missing", "top . --once", "top . --once --json", "report .",
    "report . --json", "report empty", "ckpt ls local global", "ckpt ls local global --json", "ckpt verify local",
    "ckpt verify global", "ckpt verify local global --json", "ckpt prune local --keep 1 --dry-run", "ckpt ls missing",
    "ckpt ls empty", "doctor --no-gpu --config foreign.json", "doctor --no-gpu --config keys.json",
    "doctor --no-gpu --config values.json", "doctor --no-gpu --config bad.toml", "chaos run plan.json -- train.py",
    "simulate --trace trace.json", "simulate --costs keys.json", "simulate --ranks 8 --hours 1 --trace .",
    f"run --config keys.json {__file__}", f"run --config values.json {__file__}", "run missing", "missing",
)  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_foreign_text_cannot_control_the_terminal(
    words: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command that reads a run, checkpoints or settings prints their texts without control characters, and none of
    the texts begins a line of the command's output."""
    own = {".": run_dir, "missing": run_dir / "missing"} | {path.name: path for path in run_dir.iterdir()}
    monkeypatch.setattr(sys, "argv", ["outlast", *(str(own.get(word, word)) for word in words.split())])
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert shown
    assert all(char.isprintable() or char == "\n" for char in shown), repr(shown)
    assert not re.search(r"^state      finished", shown, re.MULTILINE), shown


def test_warnings_without_a_log_handler_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings that Python prints where no logging is configured are escaped, too."""
    assert logging.lastResort is not None
    record = logging.LogRecord("outlast", logging.WARNING, "", 0, "\x1b[2J%s", ("\x9b",), None)
    with pytest.raises(SystemExit):
        main()
    capsys.readouterr()
    assert logging.lastResort.format(record) == r"\x1b[2J\x9b"


def table(text: str) -> Table:
    made = Table(text)
    made.add_row(text)
    return made


@pytest.mark.parametrize("make", [Text, str, lambda text: Group(Text(text)), table])
def test_a_console_escapes_text_and_keeps_its_colours(make: Callable[[str], Any]) -> None:
    """Control characters in texts, tables and live screens are escaped; the console's own sequences are not."""
    file = io.StringIO()
    console = PrintableConsole(file=file, force_terminal=True, color_system="standard", width=200)
    console.print(Text("red", style="red"), make(HOSTILE))
    console.print(make("[red]x[/red]"))
    with Live(make(HOSTILE), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
    assert "\x1b[31mred" in file.getvalue()
    left = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert r"\x1b]0;owned" in left
    assert "[red]x[/red]" in left
    assert all(char.isprintable() or char == "\n" for char in left), repr(left)
