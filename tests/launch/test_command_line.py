"""The command line at the prompt: as a module, with its version, and completed by shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from outlast import __version__
from outlast.cli.main import cli


def completions(*words: str) -> list[str]:
    """Return what a shell would offer for the last of the words after `outlast`."""
    kind = get_completion_class("bash")
    assert kind is not None
    return [
        item.value for item in kind(cli, {}, "outlast", "_OUTLAST_COMPLETE").get_completions([*words[:-1]], words[-1])
    ]


def test_commands_and_options_are_completed() -> None:
    """Commands, their options and those of `outlast run`, each in one spelling, are offered; nothing is imported for
    it that is not needed."""
    assert completions("d") == ["demo", "doctor"]
    assert completions("ckpt", "") == ["ls", "prune", "verify"]
    assert completions("--ver") == ["--version"]
    assert completions("run", "--nnodes", "2", "--nproc") == ["--nproc-per-node"]
    assert completions("run", "--ft-rank-h") == ["--ft-rank-heartbeat-timeout"]
    assert "--run-dir" in completions("run", "--standalone", "--")


def test_what_belongs_to_the_script_is_left_to_it() -> None:
    """Behind the script no option of ours is offered; an unknown command is answered with nothing that disturbs."""
    assert completions("run", "--nnodes=2", "train.py", "--n") == []
    assert "run" in completions("bogus", "")


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
    """`python -m outlast` is `outlast`, from anywhere: version, exit codes and one-line errors."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "outlast", *argv]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert run("--version").stdout == f"outlast, version {__version__}\n"
    refused = run("runn")
    assert refused.returncode == 2
    assert refused.stderr == "outlast: there is no command 'runn'; did you mean 'run'?\n"
