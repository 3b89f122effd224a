"""Read every time constant of the package from its source, for the generated page of all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECONDS_PER_UNIT = {"S": 1.0, "MS": 1e-3, "NS": 1e-9}
"""Suffix of a constant's name to its unit in seconds."""


class TimeConstant(NamedTuple):
    """One module constant that is a duration."""

    module: str
    """Dotted name below ``outlast``."""
    name: str
    value: str
    """In seconds; an expression where it is not a number."""
    text: str
    """The docstring under the constant, which constants assigned together share; empty: none."""


def time_constants(package: Path) -> Iterator[TimeConstant]:
    """Yield the module constants whose names end in a unit of time, in the order of modules and lines."""
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            text = _docstring(following)
            for name, value in _assignments(statement):
                unit = SECONDS_PER_UNIT.get(name.rpartition("_")[2])
                if unit is not None and name.isupper():
                    yield TimeConstant(module, name, _in_seconds(value, unit), text)


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        yield statement.target.id, statement.value
    if not isinstance(statement, ast.Assign):
        return
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, part in zip(target.elts, value.elts, strict=True):
            if isinstance(one, ast.Name):
                yield one.id, part


def _docstring(statement: ast.stmt | None) -> str:
    is_text = (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
    return str(statement.value.value) if is_text else ""


def _in_seconds(value: ast.expr, unit: float) -> str:
    try:
        number = ast.literal_eval(value)
    except ValueError:
        return f"`{ast.unparse(value)}`"
    return f"{number * unit:g}" if isinstance(number, int | float) else f"`{ast.unparse(value)}`"
