"""The documents keep to the code: tables, figures and quoted log lines are current, links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import re
import runpy
import tomllib
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
def test_tables_are_those_of_the_code(page: Path) -> None:
    """Settings, exit codes and events in the docs are the code's own, measured figures the committed results';
    docs/generate.py writes them."""
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


def test_every_config_class_has_a_table() -> None:
    """Each class of settings is shown field by field: a setting that no page names does not exist for a user."""
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


def test_the_map_of_modules_is_the_code() -> None:
    """ARCHITECTURE.md lists, package by package, exactly the modules that there are."""
    source = ROOT / "src" / "outlast"
    table = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## Modules\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `?([\w.]+)`? \| (.*?) \|", table, re.MULTILINE)[1:]
    assert len(rows) > 20
    for package, listed in rows:
        folder = source if package == "ground" else source.joinpath(*package.split("."))
        there = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
        assert set(re.findall(r"`(\w+)`", listed)) == there, f"the row of {package} in ARCHITECTURE.md"
    packages = {".".join(path.parent.relative_to(source).parts) for path in source.rglob("*.py")} - {""}
    assert {package for package, _ in rows} == {"ground"} | packages


def test_files_that_the_architecture_names_exist() -> None:
    """Each file and module that ARCHITECTURE.md names is there, so that a path can be followed."""
    source = ROOT / "src" / "outlast"
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+)(?:\.py)?`", text):
        found = (source / f"{name}.py").exists() or (ROOT / f"{name}.py").exists() or (ROOT / name).is_dir()
        assert found, f"ARCHITECTURE.md names {name}"
    packages = "|".join(sorted(path.name for path in source.iterdir() if path.is_dir()))
    for name in re.findall(rf"`((?:{packages})(?:\.[A-Za-z_]+)+)`", text):
        pkgutil.resolve_name(f"outlast.{name}")


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
                for alias in node.names:
                    assert can_import(node.module or "", alias.name), f"{page.name}: {node.module} has no {alias.name}"


def can_import(module: str, name: str) -> bool:
    """Return whether a module has a name; for an adapter whose framework is not here its source is asked."""
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
def test_settings_in_the_docs_are_settings(page: Path, tmp_path: Path) -> None:
    """Each TOML block is a config file, or a plan of faults, that is accepted as it stands."""
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
    """Each --ft- option that the docs and examples mention is one, and is written with dashes."""
    fields = {field.name for field in GENERATE["describe_fields"](GENERATE["FaultToleranceConfig"])}
    known = {field.replace("_", "-") for field in fields} | {"cfg-path"}
    for option in re.findall(r"--ft[-_]([a-z][\w-]*)", page.read_text(encoding="utf-8")):
        assert option in known, f"{page.name} mentions --ft-{option}"


def test_figures_come_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure in a page is what a committed result says, a ratio is shown as both sides, and what was not measured is
    said to be so."""
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


def test_figures_are_of_benches_that_exist() -> None:
    """Each figure that a page shows is one that a benchmark of its name measures; none begins a line, where its comment
    would end a paragraph."""
    for page in PAGES:
        assert not re.search(r"^\s*<!-- figure", page.read_text("utf-8"), re.MULTILINE), page.name
    named = re.findall(r"<!-- figure: (\w+)\.(\w+) -->", "".join(page.read_text("utf-8") for page in PAGES))
    for bench, bar in [*named, *(name.split(".") for name in GENERATE["COMPARED"])]:
        source = (ROOT / "benchmarks" / f"{bench}.py").read_text("utf-8")
        stem = re.sub(r"_\d+$", "_", bar)
        assert f'"{bar}"' in source or f'"{stem}{{' in source, f"benchmark {bench} has no bar {bar}"


def templates() -> str:
    """Return every text of the source, with ``…`` for what is filled in, one after another with zeros between."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[-+# 0]*\d*(?:\.\d+)?[sdrgf]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(str(part) for part in parts))
    return "\0".join(found)


def test_quoted_log_lines_are_logged() -> None:
    """Each log line that the page on troubleshooting explains is a text of the source, where its gaps are filled in."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    tables = page.partition('<div class="log-lines" markdown>')[2].partition("</div>")[0]
    quoted = re.findall(r"^\| `([^`]+)`", tables, re.MULTILINE)
    assert len(quoted) > 40
    texts = templates()
    for line in quoted:
        assert len(line.replace("…", "").strip()) >= 8, f"{line!r} fits too much"
        assert re.search("[^\0]*".join(re.escape(part) for part in line.split("…")), texts), f"nothing logs {line!r}"


def test_lines_that_take_the_place_of_others_are_logged() -> None:
    """Each line of outlast in the table of old and new log lines is a text of the source."""
    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    rows = page.partition("## Log lines, old and new")[2].partition("</div>")[0].splitlines()
    quoted = [line for row in rows for line in re.findall(r"`([^`]+)`", row.rpartition(" | ")[2])]
    assert len(quoted) > 20
    texts = templates()
    for line in quoted:
        assert re.search("[^\0]*".join(re.escape(part) for part in line.split("…")), texts), f"nothing logs {line!r}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_in_the_docs_exist(page: Path) -> None:
    """A test or example that a page names is there."""
    for path in re.findall(r"`((?:tests|examples)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def commands(page: Path) -> list[list[str]]:
    """Return the words of each ``outlast`` command in a page, up to the training script, a pipe or a comment."""
    found = []
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ outlast "):
                words = re.split(r"\s+(?:#|\||--\s|\S+\.py\b)", line.removeprefix("$ outlast "))[0]
                found.append(words.split())
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_in_the_docs_exist(page: Path) -> None:
    """Each command that a page shows is one, with the options that it is shown with."""
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
        told = CliRunner().invoke(cli, [*path, "--help"], standalone_mode=False).output.replace("_", "-")
        for option in re.findall(r"(?<!\S)--[\w-]+", " ".join(words)):
            assert option.replace("_", "-") in told, f"{page.name}: outlast {' '.join(path)} has no {option}"
