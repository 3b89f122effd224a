"""Terminal output goes through one function or one console, both of which escape control characters."""

from __future__ import annotations

import ast
from pathlib import Path

import outlast

PRINTS = {"print", "click.echo", "click.secho", "Console", "rich.print", "console.Console", "StreamHandler"}
WRITES = {"sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer.write", "sys.stderr.buffer.write"}
WRITES |= {"traceback.print_exception", "traceback.print_exc", "warnings.warn", "logging.basicConfig"}

KNOWN = {
    "cli.main": {"click.echo"},  # echo() and print_json(), which escape; help; the completion script of a shell
    "launch.run_parser": {"click.echo"},  # help
    # exact output for a file or a program, made from the user's options
    "cli.slurm": {"click.echo"},
    "cli.k8s": {"click.echo"},
    "cli.chaos": {"click.echo"},
    "cli.shims": {"click.echo"},
    # the output of the user's script, as Python writes it
    "runtime.forked_worker": {"sys.stderr.write", "traceback.print_exception"},
    "runtime.fork_server": {"sys.stderr.write"},
    "integrations.nvrx.__main__": {"sys.stderr.write"},
    # where NVRx warns by UserWarning, which scripts may catch
    "integrations.nvrx.inprocess": {"warnings.warn"},
    "integrations.nvrx.ranks": {"warnings.warn"},
}


def test_every_print_is_escaped_or_listed() -> None:
    """A module that prints other than by ``cli.main.echo``, ``print_json``, ``open_console`` or a log is listed above
    with the reason."""
    root = Path(outlast.__file__).parent
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        called = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in PRINTS | WRITES
        }
        if called:
            found[".".join(path.relative_to(root).with_suffix("").parts)] = called
    assert found == KNOWN
