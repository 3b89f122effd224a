"""Architecture rules, verified in the source: permitted imports and exclusive owners of mechanisms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import outlast

ROOT = Path(outlast.__file__).parent

LAYERS = {
    "errors": 0,
    "config": 0,
    "env": 0,
    "clock": 0,
    "logs": 0,
    "wording": 0,
    "incidents": 0,
    "decoding": 0,
    "journal": 0,
    "queued_writer": 0,
    "version": 0,
    "lazy": 0,
    "policy": 1,
    "runtime": 2,
    "monitor": 3,
    "checkpoint": 3,
    "numerics": 3,
    "straggler": 3,
    "preemption": 3,
    "health": 3,
    "chaos": 3,
    "goodput": 3,
    "launch": 4,
    "inprocess": 4,
    "session": 4,
    "integrations": 5,
    "ray": 5,
    "__main__": 6,
    "cli": 6,
    "report": 6,
    "status": 6,
    "top": 6,
    "simulate": 6,
    "testing": 6,
}
"""Layer of each top-level module or package; imports go to the same or a lower layer."""


@cache
def sources() -> dict[str, ast.Module]:
    """Return every module of the package, by dotted name below ``outlast``."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for name, path in paths().items()}


@cache
def nodes_of(name: str) -> tuple[ast.AST, ...]:
    """Return every node of a module."""
    return tuple(ast.walk(sources()[name]))


def paths() -> dict[str, Path]:
    """Return the file of every module."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def is_package(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).is_dir() if name else True


def imports_of(name: str) -> Iterator[tuple[str, int]]:
    """Yield the modules below ``outlast`` (and foreign ones with their full name) that a module imports anywhere."""
    package = name if is_package(name) else name.rpartition(".")[0]
    for node in nodes_of(name):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _own(alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".") if package else []
                above = above[: len(above) - (node.level - 1)]
                base = ".".join(["outlast", *above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = _own(f"{base}.{alias.name}")
                known = inner.startswith("outlast:") and inner.removeprefix("outlast:") in sources()
                yield (inner if known else _own(base)), node.lineno


def _own(dotted: str) -> str:
    """Mark a module of the package by the prefix ``outlast:``."""
    if dotted == "outlast" or dotted.startswith("outlast."):
        return "outlast:" + dotted.removeprefix("outlast").lstrip(".")
    return dotted


@cache
def own_imports(name: str) -> list[tuple[str, int]]:
    found = imports_of(name)
    return [(target.removeprefix("outlast:"), line) for target, line in found if target.startswith("outlast:")]


def top(name: str) -> str:
    return name.split(".")[0]


MODULES = [name for name in paths() if name]  # the root re-exports lazily and belongs to no layer


def test_every_module_has_a_layer() -> None:
    """A new top-level module or package is assigned a layer here before any module imports it."""
    for name in MODULES:
        assert top(name) in LAYERS, f"put {top(name)!r} into LAYERS, in the layer where ARCHITECTURE.md has it"


def test_imports_go_downward() -> None:
    """No module imports from a higher layer, not even inside a function."""
    for name in MODULES:
        for target, line in own_imports(name):
            if target:
                assert LAYERS[top(target)] <= LAYERS[top(name)], (
                    f"{name}:{line} (layer {LAYERS[top(name)]}) imports {target} (layer {LAYERS[top(target)]})"
                )


def test_capabilities_do_not_import_each_other() -> None:
    """A capability (layer 3) imports no other capability: orchestration combines them."""
    for name in (name for name in MODULES if LAYERS.get(top(name)) == 3):
        for target, line in own_imports(name):
            if target and LAYERS[top(target)] == 3:
                assert top(target) == top(name), f"{name}:{line} imports its sibling {target}"


def test_imports_have_no_cycle() -> None:
    """No module imports itself indirectly, neither in functions nor for type checkers."""
    cycles = _cycles()
    assert not cycles, "\n".join(" <-> ".join(sorted(cycle)) for cycle in cycles)


def _cycles() -> list[frozenset[str]]:
    """Return the strongly connected groups of modules (Tarjan's algorithm)."""
    graph = {}
    for name in sources():
        targets = {target for target, _ in own_imports(name)} - {name}
        graph[name] = {one for one in targets if one in sources() and one and not name.startswith(f"{one}.")}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            group = frozenset(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(group)

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


def test_policy_is_pure() -> None:
    """Decisions use no I/O, no torch, no clock and no randomness."""
    for name in (name for name in MODULES if LAYERS.get(top(name)) == 1):
        libraries = "asyncio datetime io multiprocessing numpy os pathlib psutil random secrets select signal socket"
        forbidden = {
            *libraries.split(),
            "subprocess",
            "threading",
            "time",
            "torch",
            "outlast:env",
            "outlast:clock",
        }
        for target, line in imports_of(name):
            complete = target if target.startswith("outlast:") else target.split(".")[0]
            assert complete not in forbidden, f"{name}:{line} imports {target}"
        for node in nodes_of(name):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("open", "print", "input"), f"{name}:{node.lineno} does I/O"


def test_only_env_reads_the_environment() -> None:
    """Only env.py uses os.environ and os.getenv."""
    for name in MODULES:
        if name == "env":
            continue
        for node in nodes_of(name):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv", "putenv", "environb"), f"{name}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {alias.name for alias in node.names} & {"environ", "getenv"}, f"{name}:{node.lineno}"


def test_only_decoding_prepares_types() -> None:
    """Only decoding.py lets msgspec inspect types, since two threads that do so concurrently end the process."""
    for name in MODULES:
        if name == "decoding":
            continue
        for node in nodes_of(name):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec."):
                what = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                looks = what in ("convert", "Decoder") or (
                    what == "decode" and any(one.arg == "type" for one in node.keywords)
                )
                assert not looks, f"{name}:{node.lineno} has msgspec look into a type"


def test_only_device_modules_use_cuda() -> None:
    """Only runtime/device*.py mentions CUDA, so that other devices need changes there only."""
    for name in MODULES:
        if name in {"runtime.device", "runtime.device_collectives", "runtime.device_copies", "runtime.device_timing"}:
            continue
        for node in nodes_of(name):
            if isinstance(node, ast.Attribute | ast.Name):
                word = node.attr if isinstance(node, ast.Attribute) else node.id
                assert word != "cuda", f"{name}:{node.lineno} names CUDA"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.split(":")[0] not in ("cuda", "nccl"), f"{name}:{node.lineno} names {node.value!r}"


def test_wall_clock_is_used_by_the_journal_only() -> None:
    """No module uses time.time(); the clock's wall time is used only in the journal and in the name of a new run."""
    for name in MODULES:
        for node in nodes_of(name):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                complete = f"{node.value.id}.{node.attr}"
                assert complete not in ("time.time", "datetime.now", "datetime.utcnow"), f"{name}:{node.lineno}"
                if name != "clock":
                    assert complete != "time.time_ns", f"{name}:{node.lineno}"
        if name not in ("clock", "runtime.journal", "launch.options") and LAYERS[top(name)] < 6:
            text = ast.unparse(sources()[name])
            assert "wall_ns()" not in text, f"{name} reads the wall clock"


def test_every_module_has_a_docstring() -> None:
    """Each module opens with a docstring that states its purpose."""
    for name in [*MODULES, ""]:
        assert ast.get_docstring(sources()[name]), f"{name or 'outlast'} has no docstring"


def test_no_module_is_a_grab_bag() -> None:
    """No module is named utils, helpers, common or misc."""
    for name in MODULES:
        assert not set(name.split(".")) & {"utils", "util", "helpers", "common", "misc"}


def test_no_handler_swallows_all_errors() -> None:
    """No handler catches all exceptions and passes."""
    for name in [*MODULES, ""]:
        for node in nodes_of(name):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                silent = all(isinstance(statement, ast.Pass) for statement in node.body)
                assert not (broad and silent), f"{name}:{node.lineno} swallows every error"


@pytest.mark.cold
@pytest.mark.process
@pytest.mark.parametrize(
    "module",
    ["outlast", "outlast.config.sources", "outlast.policy.recovery_policy", "outlast.cli.main"],
)
def test_import_is_light(module: str) -> None:
    """The root, the settings, the policy and the command line are imported without torch or numpy."""
    code = (
        f"import sys, {module}; heavy = {{'torch', 'numpy'}} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
