"""The documents keep to the code: tables are current, links lead somewhere, examples are well-formed."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh", ".sbatch"))
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_tables_are_those_of_the_code(page: Path) -> None:
    """Settings, exit codes and events in the docs are the code's own; docs/generate.py writes them."""
    text = page.read_text(encoding="utf-8")
    assert text == GENERATE["render"](text), "run: python docs/generate.py"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.relative_to(ROOT / "examples").as_posix())
def test_every_example_has_a_test(example: Path) -> None:
    """Each file under examples/ is named by a test, or is one of a kind that a test takes all of."""
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    named = re.compile(rf"[\"/ ]{re.escape(example.name)}\"|glob\(\"\*{re.escape(example.suffix)}\"\)")
    assert any(named.search(path.read_text("utf-8")) for path in tests), (
        f"no test runs {example.name}; add one to tests/examples"
    )


def test_every_table_has_a_place() -> None:
    """Each table that can be generated is shown on some page."""
    shown = re.findall(r"<!-- table: ([\w-]+) -->", "".join(page.read_text("utf-8") for page in PAGES))
    assert set(shown) == set(GENERATE["TABLES"])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file that exists."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_in_the_docs_is_python(page: Path) -> None:
    """Each Python block parses, and what it imports from outlast exists."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outlast"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {node.module} has no {alias.name}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_in_the_docs_are_settings(page: Path, tmp_path: Path) -> None:
    """Each TOML block is a config file, or a plan of faults, that is accepted as it stands."""
    from outlast.chaos import FaultPlan
    from outlast.config.files import load_config

    for block in blocks(page, "toml"):
        path = tmp_path / "outlast.toml"
        path.write_text(block)
        if "faults" in tomllib.loads(block):
            FaultPlan.load(path)
        else:
            load_config(path)


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_ft_options_in_the_docs_exist(page: Path) -> None:
    """Each --ft- option that the docs and examples mention is one, and is written with dashes."""
    fields = {field.name for field in GENERATE["describe_fields"](GENERATE["FaultToleranceConfig"])}
    known = {field.replace("_", "-") for field in fields} | {"cfg-path"}
    for option in re.findall(r"--ft[-_]([a-z][\w-]*)", page.read_text(encoding="utf-8")):
        assert option in known, f"{page.name} mentions --ft-{option}"
