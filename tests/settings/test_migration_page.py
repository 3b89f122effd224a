"""docs/migration.md is correct: its names of outlast exist, and its tables have all options of the other tools."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import outlast
import outlast.checkpoint
import outlast.inprocess
import outlast.monitor
import outlast.straggler
from outlast.cli.main import cli
from outlast.errors import ConfigError
from outlast.integrations.ft_launcher import translate
from outlast.integrations.nvrx.fault_tolerance import NvrxFaultToleranceConfig, RankMonitorClient
from outlast.integrations.nvrx.inprocess import WrapperOfNVRx
from outlast.integrations.nvrx.straggler import Detector
from outlast.launch.run_parser import RunParser, list_torchrun_options, names_of, parse_command

pytestmark = pytest.mark.extended

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
_LOG_LINES = r'<div class="log-lines" markdown>.*?</div>'  # tests/project/test_docs.py checks them
TEXT = re.sub(_LOG_LINES, "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
OBJECTS = {
    "run": outlast.Session,
    "monitor": outlast.monitor.RankMonitor,
    "manager": outlast.checkpoint.CheckpointManager,
    "detector": outlast.straggler.StragglerDetector,
    "call": outlast.inprocess.Handle,
}
"""The names of objects on the page, and their classes."""
SECTIONS = {
    name: next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)
    for name, hint in typing.get_type_hints(outlast.Config).items()
}
OF_GROUP = "with an `ActorGroup`"


@dataclass(frozen=True)
class Row:
    """One row of a table, by the heads of its columns."""

    heading: str
    cells: dict[str, str]

    @property
    def first_cell(self) -> str:
        return next(iter(self.cells.values()))


def rows() -> list[Row]:
    """Return the rows of all tables, each with the heading above it."""
    found, heading, heads = [], "", []
    fenced = False
    for line in TEXT.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not heads:
            heads = cells
        elif not set(line) <= set("|- "):
            assert len(cells) == len(heads), line
            found.append(Row(heading, dict(zip(heads, cells, strict=True))))
    return found


ROWS = rows()


def words(cell: str) -> list[str]:
    """Return the inline code of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def rows_below(heading: str) -> list[Row]:
    """Return the rows below a heading."""
    found = [row for row in ROWS if row.heading == heading]
    assert found, heading
    return found


def names_below(heading: str) -> set[str]:
    """Return the names in the first column below a heading: options and words, without arguments and leading dots."""
    return {
        re.split(r"[(=\s]", word.lstrip("."))[0]
        for row in rows_below(heading)
        for word in words(row.first_cell)
        if word != "..."
    }


def commands() -> Iterator[str]:
    """Yield the shell lines that the page's diffs add."""
    for block in re.findall(r"^```diff\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if re.match(r"[+ ](outlast|ft_launcher) ", line):
                yield line[1:].strip()


def check(word: str) -> None:
    """Fail unless a word in a column of outlast is an option, a command, a setting or a name of outlast."""
    plain = re.split(r"[(=]", word)[0]
    if word.startswith("-"):
        assert plain in names_of(RunParser().options) or word == "-1", f"outlast run has no {word}"
    elif word.startswith("outlast "):
        command: click.Command | None = cli
        for part in word.split()[1:]:
            if part.isupper() or part.startswith("-"):
                break
            assert isinstance(command, click.Group), word
            command = command.get_command(click.Context(command), part)
            assert command is not None, f"there is no command {word}"
    elif plain.startswith("outlast."):
        pkgutil.resolve_name(plain)
    elif (first := plain.partition(".")[0]) in OBJECTS:
        assert hasattr(OBJECTS[first], plain.partition(".")[2]), f"{OBJECTS[first].__name__} has no {word}"
    elif first in SECTIONS:
        section = SECTIONS[first]
        assert section is not None, word
        assert plain == first or plain.partition(".")[2] in {field.name for field in dataclasses.fields(section)}, (
            f"no setting {word}"
        )
    else:
        pytest.fail(f"{word!r} is neither an option, a command, a setting nor a name of outlast")


OUR_WORDS = sorted({word for row in ROWS for word in words(row.cells.get("here", ""))})
EXTRA_WORDS = sorted(
    {
        word
        for row in ROWS
        for cell in list(row.cells.values())[2:]
        for word in words(cell)
        if word.startswith("--") or word.partition(".")[0] in SECTIONS or word.startswith(("outlast.", "run."))
    }
)


@pytest.mark.parametrize("word", sorted({*OUR_WORDS, *EXTRA_WORDS}))
def test_the_tables_names_of_outlast_exist(word: str) -> None:
    """Each option, command, setting and name that replaces one of another tool can be given, run, set or imported."""
    if word.startswith("torchrun "):
        return
    check(word)


def test_every_table_has_a_column_of_outlast() -> None:
    """Each table that compares tools has a verified column of outlast."""
    heads = {tuple(row.cells) for row in ROWS}
    assert len(ROWS) > 150
    assert all("here" in head or "with the callback" in head for head in heads), heads


def test_arguments_of_an_actor_group_exist() -> None:
    """Each replacement of a Ray Train setting is an argument of ActorGroup or a setting."""
    pytest.importorskip("ray")
    from outlast.config import RecoveryConfig
    from outlast.ray import ActorGroup

    arguments = set(inspect.signature(ActorGroup).parameters)
    fields = {field.name for field in dataclasses.fields(RecoveryConfig)}
    for row in rows_below("Settings"):
        for word in [*words(row.cells["with the callback"]), *words(row.cells[OF_GROUP])]:
            name = word.partition("=")[0]
            if "=" in word:
                assert name in arguments, word
            elif word not in fields:
                check(word)


def test_every_option_of_torchrun_has_a_row() -> None:
    """The page has all options of the installed torchrun, and no others."""
    options = {name for option in list_torchrun_options() if option.name != "print_completion" for name in option.opts}
    shown = {word for word in names_below("Options") if word.startswith("-")}
    assert shown == options


def test_every_setting_and_call_of_nvrx_has_a_row() -> None:
    """Each field, call and argument of the NVRx replacement has a row with its name."""
    fields = {field.name for field in dataclasses.fields(NvrxFaultToleranceConfig)}
    assert fields <= names_below("FaultToleranceConfig")
    calls = {name for name in vars(RankMonitorClient) if name[0].islower()}
    assert calls <= names_below("RankMonitorClient")
    assert set(inspect.signature(WrapperOfNVRx).parameters) <= names_below("inprocess.Wrapper")
    of_detector = {name for name in vars(Detector) if name[0].islower() and callable(getattr(Detector, name))}
    public = of_detector | set(inspect.signature(Detector.initialize).parameters)
    shown = {word.removeprefix("Detector.") for word in names_below("straggler.Detector")}
    assert public <= shown, public - shown


def test_ft_launcher_options_are_accepted_as_documented() -> None:
    """ft_launcher accepts or rejects each option as the page documents."""
    values = {"--nnodes": "1", "--ft-cfg-path": "/nowhere/ft.yaml", "--ft-rank-section-timeouts": "step:180"}
    values |= {"--ft-rank-termination-signal": "SIGKILL", "--ft-log-level": "INFO", "--ft-restart-policy": "any-failed"}
    for row in rows_below("Options of ft_launcher"):
        is_refused = row.cells["what differs"].startswith("refused")
        for word in words(row.first_cell):
            option = f"--{word.partition('=')[0]}"
            if option == "--ft-ignore-missing-cfg":
                argv = [option, "train.py"]
            else:
                argv = [f"{option}={values.get(option, '5')}", "train.py"]
            if option == "--ft-cfg-path":
                argv.insert(0, "--ft-ignore-missing-cfg")
            translated = list(translate(argv, {}).arguments)
            if is_refused:
                with pytest.raises(ConfigError, match=option):
                    parse_command(translated)
            else:
                parse_command(translated)


def test_every_setting_of_ray_train_has_a_row() -> None:
    """Each field of Ray Train's configs, and each argument of its trainer and of report(), has a row."""
    train = pytest.importorskip("ray.train")
    from ray.train.torch import TorchTrainer

    shown = {word.rpartition(".")[2] for word in names_below("Settings") | names_below("Calls in the train function")}
    for config_class in (train.ScalingConfig, train.FailureConfig, train.RunConfig, train.CheckpointConfig):
        fields = set(inspect.signature(config_class).parameters)
        assert fields <= shown, (config_class.__name__, fields - shown)
    arguments = set(inspect.signature(TorchTrainer.__init__).parameters) - {"self", "train_loop_per_worker"}
    assert arguments - {"scaling_config", "run_config"} <= shown
    assert set(inspect.signature(train.report).parameters) - {"metrics", "checkpoint"} <= shown


def test_command_lines_of_the_page_are_accepted() -> None:
    """Each shell line that a diff adds can be parsed, with placeholders filled in."""
    found = list(commands())
    assert len(found) >= 3
    for line in found:
        argv = shlex.split(line.replace("$HOST", "head"), comments=True)
        if argv[:2] == ["outlast", "shims"]:
            continue
        if argv[0] == "ft_launcher":
            argv = ["outlast", "run", *translate(argv[1:], {}).arguments]
        assert argv[:2] == ["outlast", "run"], line
        parse_command(argv[2:])


def test_python_of_the_page_compiles() -> None:
    """Each Python block compiles."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(ast.parse(block), str(PAGE), "exec")
