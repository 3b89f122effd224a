"""torchrun's own argument parser, without importing torch.

``outlast run`` takes every option of the installed torch's ``torchrun``. Importing ``torch.distributed.run`` for its
parser would cost a second before ``--help`` or a mistyped option could be answered, so the one function that makes
the parser is compiled from torch's source; where that fails (torch moved it), torch is imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from outlast import env
from outlast.errors import ConfigError

__all__ = ["find_event_handlers", "make_torchrun_parser"]

log = logging.getLogger(__name__)


def make_torchrun_parser() -> argparse.ArgumentParser:
    """Return a parser with every option of the installed ``torchrun``.

    Raises:
        ConfigError: An environment variable of torchrun's for an option without a value is neither 0 nor 1.
    """
    try:
        return _make_from_source()
    except (OSError, ImportError, SyntaxError, LookupError, NameError, AttributeError, TypeError) as error:
        log.debug("torchrun's parser could not be made from its source (%s); importing torch", error)
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def find_event_handlers() -> frozenset[str]:
    """Return the names that the installed torch knows for ``--event-log-handler``; empty = not known."""
    try:
        text = (_torch() / "distributed" / "elastic" / "events" / "handlers.py").read_text()
    except (OSError, ImportError):
        return frozenset()
    table = re.search(r"^_log_handlers\b[^{]*\{(.*?)\}", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r"^\s*\"(\w+)\":", table[1], re.MULTILINE)) if table is not None else frozenset()


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _make_from_source() -> argparse.ArgumentParser:
    root = _torch()
    actions = _load(root / "distributed" / "argparse_util.py", "outlast_torchrun_actions")
    path = root / "distributed" / "run.py"
    function = _find(path, ast.FunctionDef, "get_args_parser")
    namespace: dict[str, Any] = {
        "ArgumentParser": argparse.ArgumentParser,
        "REMAINDER": argparse.REMAINDER,
        "env": actions.env,
        "check_env": _named_in_errors(actions.check_env),
        "_AffinityMode": _read_affinity_modes(root / "numa" / "binding.py"),
    }
    exec(compile(ast.Module([function], []), str(path), "exec"), namespace)  # a function of the installed torch
    return cast(argparse.ArgumentParser, namespace["get_args_parser"]())


def _read_affinity_modes(path: Path) -> list[SimpleNamespace]:
    body = cast(ast.ClassDef, _find(path, ast.ClassDef, "AffinityMode")).body
    return [
        SimpleNamespace(value=statement.value.value)
        for statement in body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    ]


def _named_in_errors(action: type[argparse.Action]) -> type[argparse.Action]:
    """Return torchrun's action for options without a value; its environment variable is named when it is no number."""

    class Switch(action):  # type: ignore[valid-type, misc]
        def __init__(self, dest: str, **kwargs: Any) -> None:
            try:
                super().__init__(dest=dest, **kwargs)
            except ValueError:
                name = f"PET_{dest.upper()}"
                raise ConfigError(f"{name}={env.environ()[name]!r} is neither 0 nor 1; write one of them") from None

    return Switch


def _find(path: Path, kind: type[ast.stmt], name: str) -> ast.stmt:
    """Return a function or class of a module, without parsing what stands around it."""
    found = re.search(rf"^(?:def|class) {name}\b.*?\n(?=[^\s)#]|\Z)", path.read_text(), re.MULTILINE | re.DOTALL)
    if found is not None:
        for node in ast.parse(found[0]).body:
            if isinstance(node, kind):
                return node
    raise LookupError(f"{path} has no {name}")


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
