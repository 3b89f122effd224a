"""User-visible text is standard English: it contains no word of the list in ``words.txt``."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import click

import outlast
from outlast.cli.main import cli

PACKAGE = Path(outlast.__file__).parent
REPOSITORY = PACKAGE.parents[1]
DOCS = REPOSITORY / "docs"
ENTRIES = [
    line.split("\t")
    for line in Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
WORDS = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in ENTRIES]
ANY_WORD = re.compile("|".join(words.pattern for words, _ in WORDS), re.IGNORECASE)
QUOTED = re.compile(r"`[^`]*`|<[^>]*>|'[^' ]*'")
"""Names in code, of options and of files are not prose."""


def find_words(text: str) -> list[str]:
    """Return the listed words in a text, each with the standard term."""
    prose = QUOTED.sub("``", text)
    if not ANY_WORD.search(prose):
        return []
    return [f"{found[0]!r} -> {instead}" for words, instead in WORDS for found in words.finditer(prose)]


def docstrings(tree: ast.Module) -> set[int]:
    """Return the identities of the docstring nodes, which users do not see."""
    return {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the sentences in a module's code: messages of logs and errors, and help texts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring_ids = docstrings(tree)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstring_ids
        if is_text and " " in node.value.strip():
            yield node.lineno, node.value


def commands(command: click.Command, path: str = "outlast") -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its full name."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, f"{path} {name}")


def test_messages_use_standard_terms() -> None:
    """No log message, error or help text of the package, examples and benchmarks contains a word of the list."""
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {word} in {text!r}"
        for folder in (PACKAGE, REPOSITORY / "examples", REPOSITORY / "benchmarks")
        for path in sorted(folder.rglob("*.py"))
        for line, text in messages(path)
        for word in find_words(text)
    ]
    assert not found, "\n".join(found)


def test_help_uses_standard_terms() -> None:
    """No command's help contains a word of the list."""
    found = []
    for name, command in commands(cli):
        text = command.get_help(click.Context(command, info_name=name))
        found += [f"{name} --help: {word}" for word in find_words(text)]
    assert not found, "\n".join(found)


def test_generated_tables_use_standard_terms() -> None:
    """The generated tables of the documentation contain no word of the list."""
    tables = runpy.run_path(str(DOCS / "generate.py"))["TABLES"]
    found = [f"table {name}: {word}" for name, make in tables.items() for word in find_words(make())]
    assert not found, "\n".join(found)
