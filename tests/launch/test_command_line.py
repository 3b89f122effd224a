"""The command line at the prompt: its help, hints, and what shells complete; as a module, with its version."""

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


def completed(*words: str) -> list[str]:
    """Return what a shell would offer for the last of the words after `outlast`; of paths, their kind."""
    kind = get_completion_class("bash")
    assert kind is not None
    items = kind(cli, {}, "outlast", "_OUTLAST_COMPLETE").get_completions([*words[:-1]], words[-1])
    return [item.value if item.type == "plain" else f"{item.type} {item.value}" for item in items]


def test_commands_and_options_are_completed() -> None:
    """Commands, their options and those of `outlast run`, each in one spelling, are offered; nothing is imported for
    it that is not needed."""
    assert completed("s") == ["status", "simulate", "slurm", "shims"]
    assert completed("ckpt", "") == ["ls", "prune", "verify"]
    assert completed("--ver") == ["--version"]
    assert "--run-dir" in completed("run", "--standalone", "--")


def test_what_belongs_to_the_script_is_left_to_it() -> None:
    """Behind the script no option of ours is offered; an unknown command is answered with nothing that disturbs."""
    assert completed("run", "--nnodes=2", "train.py", "--n") == []
    assert "run" in completed("bogus", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_a_shell(shell: str) -> None:
    """Each shell gets its script; a shell that is installed can read it."""
    printed = CliRunner().invoke(cli, ["completion", shell])
    assert printed.exit_code == 0
    assert f"_OUTLAST_COMPLETE={shell}_complete" in printed.output
    if (program := shutil.which(shell)) is not None:
        done = subprocess.run([program, "-n"], input=printed.output, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_module_is_the_command(tmp_path: Path) -> None:
    """`python -m outlast` is `outlast`, from anywhere: exit codes and one-line errors."""
    line = [sys.executable, "-m", "outlast", "runn"]
    refused = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "outlast: there is no command 'runn'; did you mean 'run'?\n"


def answer(
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
    """Who types a command that has commands gets its help on standard output, and exit code 0."""
    bare = answer(monkeypatch, capsys, *words)
    assert bare == answer(monkeypatch, capsys, *words, "--help")
    assert (bare[0], bare[2]) == (0, "")
    assert f"Usage: {' '.join(('outlast', *words))}" in bare[1]


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both spellings print the version."""
    assert answer(monkeypatch, capsys, option) == (0, f"outlast, version {__version__}\n", "")


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    """Yield every command, as its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*above, name)
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


@pytest.mark.parametrize("words", list(commands(cli)), ids=" ".join)
def test_every_help_has_examples_and_fits(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command's help shows it in use; no line but an example's own is longer than 80 columns."""
    monkeypatch.setenv("COLUMNS", "200")
    code, text, err = answer(monkeypatch, capsys, *words, "--help")
    assert (code, err) == (0, "")
    examples = re.split(r"^ *examples.*:$", text, maxsplit=1, flags=re.MULTILINE | re.IGNORECASE)[1]
    assert f"outlast {words[0]}" in examples
    assert [line for line in text.splitlines() if len(line) > 80 and "outlast " not in line] == []


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_of_run_begins_with_what_is_ours(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three examples, then our options by topic, faults on purpose apart from them, torchrun's last; in 80 columns."""
    monkeypatch.setenv("COLUMNS", columns)
    _, text, _ = answer(monkeypatch, capsys, "run", "--help")
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


def test_help_shows_each_option_once_and_with_dashes() -> None:
    """Every option is in one group, in one spelling; none of ours is left to torchrun's."""
    groups = describe_options()
    shown = [option.long_name for group in groups for option in group.options]
    assert len(shown) == len(set(shown))
    assert not [name for name in shown if "_" in name]
    torchruns = {option.long_name for option in list_torchrun_options()}
    assert {option.long_name for option in groups[-1].options} <= torchruns <= set(shown)
    assert {"--run-dir", "--config", "--nnodes", "--nproc-per-node", "--ft-min-nodes"} <= set(shown)


OPTIONS = {option.long_name: option for group in describe_options() for option in group.options}


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"--help"}))
def test_underscores_are_taken_silently(name: str) -> None:
    """Whatever is written with dashes is taken with underscores, too, and means the same."""
    words = {"--numa-binding": "node", "--start-method": "fork", "--ft-rank-section-timeouts": "step:5"}
    value = [] if OPTIONS[name].value is None else [words.get(name, "7")]
    both = [parse_command([one, *value, "train.py"]) for one in (name, "--" + name[2:].replace("-", "_"))]
    attribute = name[2:].replace("-", "_")
    assert both[0].args == both[1].args
    assert attribute in both[0].typed.keys() & both[1].typed.keys()


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
        (["train.py", "--nproc=2", "--lr", "--nnode", "-m", "nnodes"], None),  # no whole name
        (["train.py", "--config=x", "--log-dir", "x", "--run_dir=x", "--role=x", "--help"], None),  # many scripts' own
        (["train.py", "--", "--nnodes=3"], None),
        (["--nnodes=3", "train.py", "nnodes"], None),
    ],
)
def test_options_behind_the_script_get_a_hint(words: list[str], hint: str | None) -> None:
    """One line names options of ours that the script gets; they reach it unchanged, whoever's they are."""
    command = parse_command(words)
    at = words.index(command.args.training_script)
    assert command.args.training_script_args == [word for word in words[at + 1 :] if word != "--"]
    assert (command.hint or "").startswith(hint or "")
    assert (command.hint is None) == (hint is None)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["run", "--nnodes", "2", "--nproc"], ["--nproc-per-node"]),
        (["run", "--ft-rank-h"], ["--ft-rank-heartbeat-timeout"]),
        (["run", "--ft-rank_h"], ["--ft-rank_heartbeat_timeout"]),
        (["run", "--start-method", "s"], ["spawn"]),
        (["run", "--start-method", "=", "f"], ["fork", "forkserver"]),  # as bash takes --start-method=f apart
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
def test_words_are_completed(words: list[str], offered: list[str]) -> None:
    """Options, their values, files and folders are offered where they fit, for every command."""
    assert completed(*words) == offered
