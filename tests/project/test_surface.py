"""The public surface is frozen: nothing is added, renamed or removed by accident.

``surface.txt`` beside this file lists every public name with its signature. After an intended change, write
it anew with ``python tests/project/test_surface.py > tests/project/surface.txt`` and look at the difference.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PUBLIC = [
    "outlast",
    "outlast.chaos",
    "outlast.checkpoint",
    "outlast.config",
    "outlast.errors",
    "outlast.health",
    "outlast.integrations.slurm",
    "outlast.journal",
    "outlast.monitor",
    "outlast.numerics",
    "outlast.ray",
    "outlast.straggler",
    "outlast.testing",
]
COMMITTED = Path(__file__).with_name("surface.txt")


def describe(name: str, value: Any) -> Iterator[str]:
    """Yield one line for a name, and one for each public member of a class."""
    if inspect.ismodule(value):
        yield f"{name}: module"
    elif not inspect.isclass(value):
        yield f"{name}{inspect.signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"
    elif issubclass(value, enum.Enum):
        for member in value:
            yield f"{name}.{member.name} = {member.value!r}"
    elif issubclass(value, BaseException):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
    else:
        yield from describe_class(name, value)


def describe_class(name: str, cls: type) -> Iterator[str]:
    if dataclasses.is_dataclass(cls):
        yield f"{name}: dataclass"
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                default = f" = {field.default!r}"
            else:
                default = " = ..." if field.default_factory is not dataclasses.MISSING else ""
            yield f"{name}.{field.name}: {field.type}{default}"
    else:
        yield f"{name}{inspect.signature(cls)}"
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for member, raw in sorted(vars(cls).items()):
        if member.startswith("_") or member in fields:
            continue
        if isinstance(raw, property):
            yield f"{name}.{member}: property"
        elif isinstance(raw, staticmethod | classmethod):
            yield f"{name}.{member}{inspect.signature(raw.__func__)}  # {type(raw).__name__}"
        elif inspect.isfunction(raw):
            yield f"{name}.{member}{inspect.signature(raw)}"


def surface() -> list[str]:
    """Return the public names with their signatures, one a line."""
    lines = []
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in sorted(getattr(module, "__all__", ())):
            value = getattr(module, name)
            home = ".".join(getattr(value, "__module__", "").split(".")[:2])
            if module_name == "outlast" and home in PUBLIC:
                lines.append(f"outlast.{name}: the one of {home}")
            else:
                lines.extend(describe(f"{module_name}.{name}", value))
    return lines


def test_public_surface_is_the_committed_one() -> None:
    """Every public name and signature is the one that was last agreed upon."""
    committed = COMMITTED.read_text(encoding="utf-8").splitlines()
    difference = list(difflib.unified_diff(committed, surface(), "surface.txt", "the code", lineterm="", n=0))
    assert not difference, (
        "\n".join(difference) + "\nif this is intended: "
        "python tests/project/test_surface.py > tests/project/surface.txt, and mention it in CHANGELOG.md"
    )


def test_public_names_exist_and_are_documented() -> None:
    """Each name that a public module promises is there and says what it is."""
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), f"{module_name}.{name} has no docstring"


if __name__ == "__main__":
    print("\n".join(surface()))
