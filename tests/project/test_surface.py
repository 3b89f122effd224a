"""The public names are frozen: a name is added, renamed or removed on purpose only.

``surface.txt`` in this folder lists every public name. After an intended change, regenerate the file with
``python tests/project/test_surface.py > tests/project/surface.txt`` and review the difference.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import importlib
import inspect
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PUBLIC = [
    "outlast",
    "outlast.chaos",
    "outlast.checkpoint",
    "outlast.config",
    "outlast.errors",
    "outlast.goodput",
    "outlast.health",
    "outlast.incidents",
    "outlast.inprocess",
    "outlast.integrations.kubernetes",
    "outlast.integrations.megatron",
    "outlast.integrations.metrics",
    "outlast.integrations.lightning",
    "outlast.integrations.kempnerforge",
    "outlast.integrations.nvrx",
    "outlast.integrations.slurm",
    "outlast.integrations.transformers",
    "outlast.journal",
    "outlast.monitor",
    "outlast.numerics",
    "outlast.preemption",
    "outlast.ray",
    "outlast.ray.train",
    "outlast.straggler",
    "outlast.testing",
]
NOT_CONSTRUCTED = {"outlast.Attempt", "outlast.inprocess.Handle"}
"""Public classes that only the package constructs, in addition to dataclasses, which have a generated constructor."""
COMMITTED = Path(__file__).with_name("surface.txt")


def describe(name: str, value: Any) -> Iterator[str]:
    """Yield one line for a name, and one for each public member of a class."""
    if inspect.ismodule(value):
        yield f"{name}: module"
    elif not inspect.isclass(value):
        yield f"{name}()" if callable(value) else f"{name}: {type(value).__name__}"
    elif issubclass(value, enum.Enum):
        for member in value:
            yield f"{name}.{member.name} = {member.value!r}"
    elif issubclass(value, BaseException):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
    else:
        yield from describe_class(name, value)


def describe_class(name: str, cls: type) -> Iterator[str]:
    """Yield the class, the fields of a dataclass with their defaults, and the names of its properties and methods."""
    yield name
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for field in fields:
        if field.default is not dataclasses.MISSING:
            default = f" = {field.default!r}"
        else:
            default = " = ..." if field.default_factory is not dataclasses.MISSING else ""
        yield f"{name}.{field.name}{default}"
    for member, raw in sorted(members_of(cls).items()):
        if member.startswith("_") or member in {field.name for field in fields}:
            continue
        if isinstance(raw, property):
            yield f"{name}.{member}"
        elif inspect.isfunction(getattr(raw, "__func__", raw)):
            yield f"{name}.{member}()"


def members_of(cls: type) -> dict[str, Any]:
    """Return the members of a class, or of the class behind it if it adds only a constructor."""
    (base, *_) = cls.__bases__
    is_internal = base.__module__ == cls.__module__ and base not in public_types().values()
    is_face = is_internal and base.__name__[0] != "_" and all(name.startswith("_") for name in vars(cls))
    return {**(vars(base) if is_face else {}), **vars(cls)}


def surface() -> list[str]:
    """Return the public names, one per line."""
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


def test_public_surface_equals_the_committed_one() -> None:
    """The public names are exactly those of ``surface.txt``."""
    committed = COMMITTED.read_text(encoding="utf-8").splitlines()
    difference = list(difflib.unified_diff(committed, surface(), "surface.txt", "the code", lineterm="", n=0))
    assert not difference, (
        "\n".join(difference) + "\nif this is intended: "
        "python tests/project/test_surface.py > tests/project/surface.txt, and mention it in CHANGELOG.md"
    )


def test_public_names_exist_and_are_documented() -> None:
    """Each name in ``__all__`` of a public module exists and has a docstring."""
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), f"{module_name}.{name} has no docstring"


def public_types() -> dict[str, type]:
    """Return every public class by its home and name."""
    found = {}
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            if inspect.isclass(value := getattr(module, name)):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def annotations() -> Iterator[tuple[str, str, str]]:
    """Yield the owner, module and text of each annotation in a public signature or field."""
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            where = f"{module_name}.{name}"
            if inspect.isclass(value):
                makes_itself = dataclasses.is_dataclass(value) or where in NOT_CONSTRUCTED
                members = {
                    key: raw
                    for key, raw in vars(value).items()
                    if not key.startswith("_") or (key == "__init__" and not makes_itself)
                }
                for key, text in vars(value).get("__annotations__", {}).items():
                    if not key.startswith("_"):
                        yield f"{where}.{key}", value.__module__, str(text)
            elif inspect.isfunction(value):
                where, members = module_name, {name: value}
            else:
                continue
            for key, raw in members.items():
                function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
                if inspect.isfunction(function):
                    for text in function.__annotations__.values():
                        yield f"{where}.{key}", function.__module__, str(text)


@cache
def imported_names(module_name: str) -> dict[str, str]:
    """Return the source module of each name that a module imports, including imports for type checkers."""
    tree = ast.parse(Path(importlib.import_module(module_name).__file__ or "").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def own_types(value: Any) -> Iterator[type]:
    """Yield the classes of this package in a class or an alias of types."""
    if inspect.isclass(value) and value.__module__.split(".")[0] == "outlast":
        yield value
    for part in typing.get_args(value):
        yield from own_types(part)


def internal_types() -> dict[str, set[str]]:
    """Return the internal types in public signatures, with their locations."""
    found: dict[str, set[str]] = {}
    public = public_types()
    for where, module_name, text in annotations():
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                continue  # of a Literal
            if not isinstance(node, ast.Name):
                continue
            home = imported_names(module_name).get(node.id, module_name)
            value = getattr(importlib.import_module(home), node.id, None) if home.startswith("outlast") else None
            for one in own_types(value):
                name = f"{one.__module__}.{one.__qualname__}"
                if name not in public:
                    found.setdefault(one.__qualname__, set()).add(where)
    return found


def test_public_signatures_use_public_types_only() -> None:
    """Callers of a public function can construct its arguments and name its results."""
    internal = [f"{where} names {name}" for name, places in internal_types().items() for where in places]
    assert not internal, "\n".join(sorted(internal))


if __name__ == "__main__":
    print("\n".join(surface()))
