"""docs/tuning.md is correct: its code blocks print the documented output, and its settings exist."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import typing
from pathlib import Path

import pytest

import outlast
from outlast.launch.run_parser import RunParser, names_of

pytestmark = pytest.mark.extended

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "shown"), BLOCKS, ids=["intervals", "spares", "budgets"])
def test_each_block_prints_the_documented_output(code: str, shown: str) -> None:
    """Each result on the page is the output of its code block with this version of the package. If this fails after
    a change of the policy or the simulation, run the block and paste its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "docs"})
    assert printed.getvalue() == shown


def test_every_block_has_its_output() -> None:
    """Every Python block of the page is followed by its output."""
    assert len(BLOCKS) == len(re.findall(r"^```python$", TEXT, re.MULTILINE)) == 3


def test_settings_of_the_page_exist() -> None:
    """Each setting and option that the page contains exists."""
    hints = typing.get_type_hints(outlast.Config)
    sections = {
        name: [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        for name, hint in hints.items()
    }
    named = re.findall(r"`(\w+)\.(\w+)`", TEXT)
    assert len(named) > 5
    for section, field in named:
        assert field in {one.name for one in dataclasses.fields(sections[section][0])}, f"{section}.{field}"
    known = {field.name for kinds in sections.values() for kind in kinds for field in dataclasses.fields(kind)}
    for field in re.findall(r"`([a-z]+_[a-z_]+)(?: = [^`]+)?`", TEXT):
        assert field in known, field
    options = names_of(RunParser().options)
    prose = re.sub(r"`outlast [^`]*`|^\$.*$", "", TEXT, flags=re.MULTILINE)
    for option in re.findall(r"`(--[\w-]+)", prose):
        assert option in options, option
