"""Help, hints and completion of the command line, and the package as a module."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from outlast import __version__
from outlast.cli.main import cli, main
from outlast.launch.run_parser import describe_options, list_torchrun_options, parse_command


def completions(*words: str) -> list[str]:
    """Return the completions of the last of the words after `outlast`; paths as their kind."""
    kind = get_completion_class("bash")
    assert kind is not None
    items = kind(cli, {}, "outlast", "_OUTLAST_COMPLETE").get_completions([*words[:-1]], words[-1])
    return [item.value if item.type == "plain" else f"{item.type} {item.value}" for item in items]


def test_commands_and_options_are_completed() -> None:
    """Commands, their options and those of `outlast run` are completed, each in one spelling, without heavy imports."""
    assert completions("s") == ["status", "simulate", "slurm", "shims"]
    assert completions("ckpt", "") == ["ls", "prune", "verify"]
    assert completions("--ver") == ["--version"]
    assert "--run-dir" in completions("run", "--standalone", "--")


def test_arguments_of_the_script_are_not_completed() -> None:
    """After the script no option of outlast is completed; an unknown command has no completions and no errors."""
    assert completions("run", "--nnodes=2", "train.py", "--n") == []
    assert "run" in completions("bogus", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(shell: str) -> None:
    """The completion script of each shell is printed; an installed shell can read it."""
    printed = CliRunner().invoke(cli, ["completion", shell])
    assert printed.exit_code == 0
    assert f"_OUTLAST_COMPLETE={shell}_complete" in printed.output
    if (program := shutil.which(shell)) is not None:
        done = subprocess.run([program, "-n"], input=printed.output, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    """`python -m outlast` is `outlast`, from any directory: exit codes and one-line errors."""
    line = [sys.executable, "-m", "outlast", "runn"]
    refused = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "outlast: there is no command 'runn'; did you mean 'run'?\n"


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int | str | None, str, str]:
    """Return exit code, output and errors of `outlast`."""
    monkeypatch.setattr(sys, "argv", ["outlast", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return (ended.value.code, *capsys.readouterr())


@pytest.mark.parametrize("words", [(), ("ckpt",), ("slurm",)], ids=" ".join)
def test_a_bare_command_prints_its_help(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command group without a command prints its help to standard output and exits with 0."""
    bare = run_command(monkeypatch, capsys, *words)
    assert bare == run_command(monkeypatch, capsys, *words, "--help")
    assert (bare[0], bare[2]) == (0, "")
    assert f"Usage: {' '.join(('outlast', *words))}" in bare[1]


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_both_spellings_print_the_version(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--version and -V print the version."""
    assert run_command(monkeypatch, capsys, option) == (0, f"outlast, version {__version__}\n", "")


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*above, name)
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


@pytest.mark.parametrize("words", list(commands(cli)), ids=" ".join)
def test_every_help_has_examples_and_fits_80_columns(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of each command has examples; only their lines may exceed 80 columns."""
    monkeypatch.setenv("COLUMNS", "200")
    code, text, err = run_command(monkeypatch, capsys, *words, "--help")
    assert (code, err) == (0, "")
    examples = re.split(r"^ *examples.*:$", text, maxsplit=1, flags=re.MULTILINE | re.IGNORECASE)[1]
    assert f"outlast {words[0]}" in examples
    assert [line for line in text.splitlines() if len(line) > 80 and "outlast " not in line] == []


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_help_of_run_lists_outlast_options_first(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help has three examples, then outlast's options by topic, with simulated faults apart, and torchrun's options
    last; in 80 columns."""
    monkeypatch.setenv("COLUMNS", columns)
    _, text, _ = run_command(monkeypatch, capsys, "run", "--help")
    assert text.startswith("usage: outlast run [OPTION]... SCRIPT")
    before_options, _, rest = text.partition("\nrun:\n")
    assert before_options.count("\n  outlast run ") == 3
    titles = re.findall(r"^(\w[\w' ]*):$", rest, re.MULTILINE)
    assert titles[:3] == ["spares and nodes", "restarts", "fault tolerance"]
    assert titles[-2:] == ["fault simulation", "torchrun's other options"]
    production, simulation = text.split("\nfault simulation:\n")
    assert "simulate" not in production
    assert simulation.index("--ft-simulated-fault-type") < simulation.index("torchrun's other options:")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_help_lists_each_option_once_with_dashes() -> None:
    """Each option is in one group and in one spelling; torchrun's group contains none of outlast's."""
    groups = describe_options()
    shown = [option.long_name for group in groups for option in group.options]
    assert len(shown) == len(set(shown))
    assert not [name for name in shown if "_" in name]
    torchruns = {option.long_name for option in list_torchrun_options()}
    assert {option.long_name for option in groups[-1].options} <= torchruns <= set(shown)
    assert {"--run-dir", "--config", "--nnodes", "--nproc-per-node", "--ft-min-nodes"} <= set(shown)


OPTIONS = {option.long_name: option for group in describe_options() for option in group.options}


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"--help"}))
def test_underscores_are_accepted_in_options(name: str) -> None:
    """An option may be spelled with underscores instead of dashes, with the same meaning."""
    words = {"--numa-binding": "node", "--start-method": "fork", "--ft-rank-section-timeouts": "step:5"}
    value = [] if OPTIONS[name].value is None else [words.get(name, "7")]
    spellings = [parse_command([one, *value, "train.py"]) for one in (name, "--" + name[2:].replace("-", "_"))]
    attribute = name[2:].replace("-", "_")
    assert spellings[0].args == spellings[1].args
    assert attribute in spellings[0].typed.keys() & spellings[1].typed.keys()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["train.py", "--nproc-per-node=2"],
            "--nproc-per-node stands after the script, so the script gets it; put it before train.py if it is meant "
            "for outlast run",
        ),
        (
            ["--nnodes", "1", "train.py", "--ft_min_nodes", "2", "--max-restarts=1", "--ft_min_nodes=3", "--lr=1"],
            "--ft_min_nodes and --max-restarts stand after the script, so the script gets them; put them before "
            "train.py if they are meant for outlast run",
        ),
        (["--", "train.py", "--nnodes=3"], "--nnodes stands"),
        (
            ["-m", "train", "--standalone"],
            "--standalone stands after the script, so the script gets it; put it before t",
        ),
        (["train.py", "--nproc=2", "--lr", "--nnode", "-m", "nnodes"], None),  # no complete name
        (["train.py", "--config=x", "--log-dir", "x", "--run_dir=x", "--role=x", "--help"], None),  # scripts' options
        (["train.py", "--", "--nnodes=3"], None),
        (["--nnodes=3", "train.py", "nnodes"], None),
    ],
)
def test_options_after_the_script_get_a_hint(words: list[str], hint: str | None) -> None:
    """One line lists the options of outlast that are passed to the script, which gets all of them unchanged."""
    command = parse_command(words)
    at = words.index(command.args.training_script)
    assert command.args.training_script_args == [word for word in words[at + 1 :] if word != "--"]
    assert (command.hint or "").startswith(hint or "")
    assert (command.hint is None) == (hint is None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--nnodes", "2", "--nproc"], ["--nproc-per-node"]),
        (["run", "--ft-rank-h"], ["--ft-rank-heartbeat-timeout"]),
        (["run", "--ft-rank_h"], ["--ft-rank_heartbeat_timeout"]),
        (["run", "--start-method", "s"], ["spawn"]),
        (["run", "--start-method", "=", "f"], ["fork", "forkserver"]),  # as bash splits --start-method=f
        (["run", "--nproc-per-node", ""], ["auto", "gpu", "cpu", "xpu"]),
        (["run", "--ft-simulated-fault-type", "rank_h"], ["rank_hung"]),
        (["run", "--nnodes", ""], []),
        (["run", "--nnodes", "=", "2", "--max-restarts-"], ["--max-restarts-total"]),
        (["run", "--config", "run"], ["file run"]),
        (["run", "--run-dir", "=", "ru"], ["dir ru"]),
        (["run", "tr"], ["file tr"]),
        (["run", "-m", "--standalone", "tr"], ["file tr"]),
        (["run", "train.py", "--data", "x"], ["file x"]),
        (["run", "train.py", "--n"], []),
        (["slurm", "submit", "--dry"], ["--dry-run"]),
        (["slurm", "submit", "--run-dir", "ru"], ["dir ru"]),
        (["slurm", "script", "--nodes", "2", "--", "--ft-min"], ["--ft-min-nodes"]),
        (["slurm", "script", "tr"], ["file tr"]),
        (["ckpt", "ls", "ru"], ["dir ru"]),
        (["ckpt", "verify", "--thr"], ["--threads"]),
        (["doctor", "--config", "ru"], ["file ru"]),
        (["doctor", "--place", "ru"], ["dir ru"]),
        (["chaos", "soak", "--keep", "ru"], ["dir ru"]),
        (["completion", "f"], ["fish"]),
    ],
    ids=" ".join,
)
def test_option_values_and_paths_are_completed(words: list[str], expected: list[str]) -> None:
    """Options, their values, files and folders are completed in their place, for every command."""
    assert completions(*words) == expected
