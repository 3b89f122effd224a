"""The documents match the code: tables, results and quoted log lines are current, and links are valid."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import re
import runpy
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
API = sorted((DOCS / "api").glob("*.md"))
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh", ".sbatch"))
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_generated_tables_are_current(page: Path) -> None:
    """Settings, exit codes and events in the docs match the code, and measurements the committed results;
    docs/generate.py writes them."""
    text = page.read_text(encoding="utf-8")
    assert text == GENERATE["render"](text), "run: python docs/generate.py"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.relative_to(ROOT / "examples").as_posix())
def test_every_example_has_a_test(example: Path) -> None:
    """A test names each file under examples/, or covers all files of its kind."""
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    named = re.compile(rf"[\"/ ]{re.escape(example.name)}\"|glob\(\"\*{re.escape(example.suffix)}\"\)")
    assert any(named.search(path.read_text("utf-8")) for path in tests), (
        f"no test runs {example.name}; add one to tests/examples"
    )


def test_every_generated_table_is_used() -> None:
    """Each generated table is shown on some page."""
    shown = re.findall(r"<!-- table: ([\w-]+) -->", "".join(page.read_text("utf-8") for page in PAGES))
    assert set(shown) == set(GENERATE["TABLES"])


def test_every_config_class_has_a_table() -> None:
    """Each class of settings is shown field by field, so that users can find every setting."""
    import outlast.config

    classes = {name for name in outlast.config.__all__ if name.endswith("Config")}
    assert {cls.__name__ for cls in GENERATE["CONFIGS"].values()} == classes


def test_every_public_module_has_a_page() -> None:
    """The API reference has one page for each public module, built from its docstrings."""
    surface = runpy.run_path(str(Path(__file__).with_name("test_surface.py")))
    shown = re.findall(r"^::: ([\w.]+)", "".join(page.read_text("utf-8") for page in API), re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))
    assert set(shown) >= set(surface["PUBLIC"])


def test_contracts_are_paragraphs_in_the_reference() -> None:
    """References and contracts of a docstring are readable in the API reference."""
    convert = runpy.run_path(str(DOCS / "contracts.py"))["to_markdown"]
    assert convert(
        "Save, as :meth:`~Session.save` and ``x`` do.\n\nCollective: all ranks.\nBlocks: up to a second."
    ) == ("Save, as `Session.save` and `x` do.\n\n\n**Collective**: all ranks.\n\n**Blocks**: up to a second.")


def test_architecture_lists_all_modules() -> None:
    """ARCHITECTURE.md lists, package by package, exactly the existing modules."""
    source = ROOT / "src" / "outlast"
    table = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## Modules\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `?([\w.]+)`? \| (.*?) \|", table, re.MULTILINE)[1:]
    assert len(rows) > 20
    for package, listed in rows:
        folder = source if package == "ground" else source.joinpath(*package.split("."))
        existing = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
        assert set(re.findall(r"`(\w+)`", listed)) == existing, f"the row of {package} in ARCHITECTURE.md"
    packages = {".".join(path.parent.relative_to(source).parts) for path in source.rglob("*.py")} - {""}
    assert {package for package, _ in rows} == {"ground"} | packages


def test_files_in_the_architecture_exist() -> None:
    """Each file and module mentioned in ARCHITECTURE.md exists."""
    source = ROOT / "src" / "outlast"
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+)(?:\.py)?`", text):
        found = (source / f"{name}.py").exists() or (ROOT / f"{name}.py").exists() or (ROOT / name).is_dir()
        assert found, f"ARCHITECTURE.md names {name}"
    packages = "|".join(sorted(path.name for path in source.iterdir() if path.is_dir()))
    for name in re.findall(rf"`((?:{packages})(?:\.[A-Za-z_]+)+)`", text):
        pkgutil.resolve_name(f"outlast.{name}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_exist(page: Path) -> None:
    """A relative link points to an existing file."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_parse_and_import(page: Path) -> None:
    """Each Python block parses, and its imports from outlast exist."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outlast"):
                for alias in node.names:
                    assert can_import(node.module or "", alias.name), f"{page.name}: {node.module} has no {alias.name}"


def can_import(module: str, name: str) -> bool:
    """Return whether a module has a name; the source is searched for an adapter whose framework is not installed."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        if "pip install 'outlast[" not in str(error):
            raise
        source = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
        public = re.search(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)
        assert public is not None, f"{module} has no __all__"
        return name in ast.literal_eval(public[1])
    return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_toml_blocks_are_valid(page: Path, tmp_path: Path) -> None:
    """Each TOML block is a valid config file or fault plan."""
    from outlast.chaos import FaultPlan
    from outlast.config.sources import load_config

    for block in blocks(page, "toml"):
        path = tmp_path / "outlast.toml"
        path.write_text(block)
        if "faults" in tomllib.loads(block):
            FaultPlan.load(path)
        else:
            load_config(path)


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_ft_options_in_the_docs_exist(page: Path) -> None:
    """Each --ft- option in the docs and examples exists, and is written with dashes."""
    fields = {field.name for field in GENERATE["describe_fields"](GENERATE["FaultToleranceConfig"])}
    known = {field.replace("_", "-") for field in fields} | {"cfg-path"}
    for option in re.findall(r"--ft[-_]([a-z][\w-]*)", page.read_text(encoding="utf-8")):
        assert option in known, f"{page.name} mentions --ft-{option}"


def test_results_in_the_docs_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result on a page equals the committed one, a ratio is shown with both sides, and a missing measurement is
    marked."""
    bars = [
        {"name": "death_noticed_ms", "value": 11.26, "unit": "ms", "peer": None, "peer_value": None},
        {"name": "restart_vs_torchrun_2", "value": 0.04, "unit": "x", "peer": "torchrun, c10d (s)", "peer_value": 2.0},
        {"name": "restart_vs_torchrun_4", "value": None, "unit": "x", "peer": "torchrun, c10d (s)", "peer_value": None},
    ]
    machine = dict.fromkeys(("processor", "kernel", "python", "torch"), "one") | {"cores": 2, "memory_gib": 8}
    for bar in bars:
        bar |= {"bar": 30.0, "ok": True}
    (tmp_path / "restart.json").write_text(json.dumps({"bench": "restart", "machine": machine, "bars": bars}))
    page = (
        "after <!-- figure: restart.death_noticed_ms -->?<!-- end -->, "
        "<!-- figure: restart.nothing -->?<!-- end -->\n<!-- table: comparison-figures -->\n<!-- end -->"
    )
    monkeypatch.setitem(GENERATE["render"].__globals__, "RESULTS", tmp_path)
    text = GENERATE["render"](page)
    assert "<!-- figure: restart.death_noticed_ms -->11.3\N{NO-BREAK SPACE}ms<!-- end -->" in text
    assert "<!-- figure: restart.nothing -->not measured<!-- end -->" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| one of")]
    cells = [cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in row.split("|")[2:5]]
    assert cells == ["80 ms", "2 s", "torchrun, c10d"]


def test_results_in_the_docs_have_a_benchmark() -> None:
    """Each result on a page is measured by a benchmark of its name; none begins a line, where its comment would end a
    paragraph."""
    for page in PAGES:
        assert not re.search(r"^\s*<!-- figure", page.read_text("utf-8"), re.MULTILINE), page.name
    named = re.findall(r"<!-- figure: (\w+)\.(\w+) -->", "".join(page.read_text("utf-8") for page in PAGES))
    for bench, bar in [*named, *(name.split(".") for name in GENERATE["COMPARED"])]:
        source = (ROOT / "benchmarks" / f"{bench}.py").read_text("utf-8")
        stem = re.sub(r"_\d+$", "_", bar)
        assert f'"{bar}"' in source or f'"{stem}{{' in source, f"benchmark {bench} has no bar {bar}"


@cache
def templates() -> str:
    """Return every string of the source with ``…`` for placeholders, joined by zero bytes."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[-+# 0]*\d*(?:\.\d+)?[sdrgf]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(str(part) for part in parts))
    return "\0".join(found)


def test_quoted_log_lines_exist() -> None:
    """Each log line that the troubleshooting page explains is a string of the source, with its placeholders filled
    in."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    tables = page.partition('<div class="log-lines" markdown>')[2].partition("</div>")[0]
    quoted = re.findall(r"^\| `([^`]+)`", tables, re.MULTILINE)
    assert len(quoted) > 40
    texts = templates()
    for line in quoted:
        assert len(line.replace("…", "").strip()) >= 8, f"{line!r} fits too much"
        assert re.search("[^\0]*".join(re.escape(part) for part in line.split("…")), texts), f"nothing logs {line!r}"


def test_replacement_log_lines_exist() -> None:
    """Each line of outlast in the table of old and new log lines is a string of the source."""
    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    rows = page.partition("## Log lines, old and new")[2].partition("</div>")[0].splitlines()
    quoted = [line for row in rows for line in re.findall(r"`([^`]+)`", row.rpartition(" | ")[2])]
    assert len(quoted) > 20
    texts = templates()
    for line in quoted:
        assert re.search("[^\0]*".join(re.escape(part) for part in line.split("…")), texts), f"nothing logs {line!r}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_in_the_docs_exist(page: Path) -> None:
    """A test or example mentioned on a page exists."""
    for path in re.findall(r"`((?:tests|examples)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def commands(page: Path) -> list[list[str]]:
    """Return the words of each ``outlast`` command on a page, up to the training script, a pipe or a comment."""
    found = []
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ outlast "):
                words = re.split(r"\s+(?:#|\||--\s|\S+\.py\b)", line.removeprefix("$ outlast "))[0]
                found.append(words.split())
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_in_the_docs_exist(page: Path) -> None:
    """Each command on a page exists, with the options that are shown."""
    import click
    from click.testing import CliRunner

    from outlast.cli.main import cli

    for words in commands(page):
        path: list[str] = []
        command: click.Command | None = cli
        while isinstance(command, click.Group) and words[len(path) :]:
            path.append(words[len(path)])
            command = command.get_command(click.Context(command), path[-1])
            assert command is not None, f"{page.name}: there is no command {' '.join(path)!r}"
        help_text = CliRunner().invoke(cli, [*path, "--help"], standalone_mode=False).output.replace("_", "-")
        for option in re.findall(r"(?<!\S)--[\w-]+", " ".join(words)):
            assert option.replace("_", "-") in help_text, f"{page.name}: outlast {' '.join(path)} has no {option}"
