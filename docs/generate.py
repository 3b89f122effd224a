"""Write the tables of these pages from the code: settings, exit codes, incidents, events.

A page marks a table's place by ``<!-- table: NAME -->`` and ``<!-- end -->``. Without an argument the tables
are written; with ``--check`` nothing is written, and the exit code is 1 when a page is out of date.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from outlast.chaos import Fault, FaultKind, FaultTarget
from outlast.config import (
    CheckpointConfig,
    Config,
    FaultToleranceConfig,
    HealthConfig,
    InProcessRestartConfig,
    PreemptionConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from outlast.config.base import describe_fields
from outlast.errors import ExitReason
from outlast.incidents import EventKind, IncidentKind, Rung
from outlast.launch.run_parser import describe_options, option_name, takes_value
from outlast.status import report

DOCS = Path(__file__).parent
PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_table(cls: type, *, flag: str = "") -> str:
    """Return a config's fields as a table; with ``flag`` also their command line options."""
    head = ["setting", "type", "default", *(["option"] if flag else []), "meaning"]
    rows = []
    for field in describe_fields(cls):
        option = [f"`{flag}{field.name.replace('_', '-')}`"] if flag else []
        rows.append([f"`{field.name}`", _type(field.type_name), _default(field.default), *option, _text(field.text)])
    return _table(head, rows)


def options_table() -> str:
    """Return the options of ``outlast run`` that are not torchrun's alone, a table for each topic."""
    tables = []
    for group in describe_options()[:-1]:
        rows = []
        for option in group.options:
            value = f"={option.metavar}" if takes_value(option) else ""
            text = re.sub(r" \(default: none\)$", "", str(option.help).replace("%%", "%"))
            rows.append([f"`{option_name(option)}{value}`".replace("|", "\\|"), _text(text)])
        tables.append(_table([f"{group.title}: {group.text}" if group.text else group.title, "meaning"], rows))
    return "\n".join(tables)


def words_table(cls: type[enum.Enum], head: str, *, value: str) -> str:
    """Return an enum's members with the text under each."""
    rows = [[f"`{member.value}`", member.name, _text(text)] for member, text in _members(cls)]
    if value == "word":
        rows = [[row[0], row[2]] for row in rows]
        return _table([head, "meaning"], rows)
    return _table([value, head, "meaning"], rows)


def fields_table(cls: type) -> str:
    """Return the fields of a struct with their types and the text under each."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = str(following.value.value) if explained else ""
            rows.append(
                [f"`{ast.unparse(statement.target)}`", _json_type(ast.unparse(statement.annotation)), _text(text)]
            )
    return _table(["field", "type", "meaning"], rows)


def _json_type(name: str) -> str:
    """Return a Python type as the reader of JSON knows it."""
    optional = name.endswith(" | None")
    name = name.removesuffix(" | None")
    plain = {"str": "text", "int": "number", "float": "number", "bool": "true or false", "State": "text"}
    plain |= {"NodeState": "text"}
    inner = name.removeprefix("list[").removesuffix("]")
    found = plain.get(inner, f"object `{inner}`")
    return ("list of " if inner != name else "") + found + (" or null" if optional else "")


def _members(cls: type[enum.Enum]) -> list[tuple[enum.Enum, str]]:
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            texts[statement.targets[0].id] = str(following.value.value) if explained else ""
    return [(member, texts[member.name]) for member in cls]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _type(name: str) -> str:
    if "Mapping" in name:
        return "name:seconds, ..."
    return name.replace(" | None", " or none")


def _default(value: object) -> str:
    if value is None or (isinstance(value, Mapping) and not value):
        return "none"
    return str(value) if value == "required" else f"`{value}`"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


TABLES: dict[str, Callable[[], str]] = {
    "config": lambda: settings_table(Config),
    "checkpoint": lambda: settings_table(CheckpointConfig),
    "fault-tolerance": lambda: settings_table(FaultToleranceConfig, flag="--ft-"),
    "run-options": options_table,
    "preemption": lambda: settings_table(PreemptionConfig),
    "in-process-restart": lambda: settings_table(InProcessRestartConfig),
    "rerun-state-machine": lambda: settings_table(RerunStateMachineConfig),
    "straggler-detection": lambda: settings_table(StragglerDetectionConfig),
    "health": lambda: settings_table(HealthConfig),
    "exit-codes": lambda: words_table(ExitReason, "reason", value="code"),
    "incidents": lambda: words_table(IncidentKind, "kind", value="word"),
    "events": lambda: words_table(EventKind, "kind", value="word"),
    "fault": lambda: settings_table(Fault),
    "fault-kinds": lambda: words_table(FaultKind, "kind", value="word"),
    "fault-targets": lambda: words_table(FaultTarget, "target", value="word"),
    "status": lambda: fields_table(report.StatusReport),
    "status-states": lambda: words_table(report.State, "state", value="word"),
    "status-node": lambda: fields_table(report.NodeReport),
    "status-node-states": lambda: words_table(report.NodeState, "state", value="word"),
    "status-waiting": lambda: fields_table(report.Waiting),
    "status-budgets": lambda: fields_table(report.Budgets),
    "status-budget": lambda: fields_table(report.Budget),
    "status-generation": lambda: fields_table(report.Generation),
    "status-trouble": lambda: fields_table(report.Trouble),
    "rungs": lambda: words_table(Rung, "name", value="rung"),
}


def render(text: str) -> str:
    """Return a page with its tables made anew."""
    return PLACE.sub(lambda found: found[1] + TABLES[found["name"]]() + found[3], text)


def main() -> int:
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (fresh := render(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(fresh, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}; run: python docs/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
