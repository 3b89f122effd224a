"""``outlast completion``: what a shell needs to complete commands and options, and how words are completed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from outlast.cli.group import HELP

if TYPE_CHECKING:
    import argparse

__all__ = ["complete_file", "complete_folder", "complete_run_word", "completion", "run_options"]

_VALUES = {
    "nproc_per_node": ("auto", "gpu", "cpu", "xpu"),
    "rdzv_backend": ("c10d", "static", "outlast"),
    "ft_simulated_fault_type": ("rank_hung", "rank_killed", "random"),
    "ft_rank_termination_signal": ("SIGKILL", "SIGTERM", "SIGINT", "SIGABRT"),
}
"""Values of options of `outlast run` that are words."""
_PATHS = {"config": "file", "run_dir": "dir", "log_dir": "dir"}


@click.command(
    "completion",
    context_settings=HELP,
    epilog="""\b
Examples:
  eval "$(outlast completion bash)"            in ~/.bashrc
  eval "$(outlast completion zsh)"             in ~/.zshrc, behind compinit
  outlast completion fish > ~/.config/fish/completions/outlast.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands, options and files.

    The options of `outlast run` are those of the torch that is installed.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "outlast", "_OUTLAST_COMPLETE").source())


def complete_file(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the name of a file."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the name of a folder."""
    return [CompletionItem(incomplete, type="dir")]


def complete_run_word(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete what follows `outlast run`: options and their values before the script, files from there on."""
    from outlast.launch.run_parser import make_parser, words_before_script

    words = _with_values_joined(ctx.params.get(parameter.name or "") or ())
    parser = make_parser()
    typed, position = words_before_script(parser, [*words, "script"])
    if position < len(words):
        return [CompletionItem(incomplete, type="file")]
    if position == len(words):
        if incomplete.startswith("-"):
            return _options_of(parser, incomplete)
        return [CompletionItem(incomplete, type="file")]
    attribute = list(typed)[-1]  # its value is what comes next
    if attribute in _PATHS:
        return [CompletionItem(incomplete, type=_PATHS[attribute])]
    choices = next((action.choices for action in parser._actions if action.dest == attribute), None)
    return [CompletionItem(word) for word in choices or _VALUES.get(attribute, ()) if str(word).startswith(incomplete)]


def run_options(arguments: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Return the options of `outlast run` that begin with ``incomplete``; none behind the script."""
    from outlast.launch.run_parser import make_parser, words_before_script

    parser, words = make_parser(), _with_values_joined(arguments)
    if words_before_script(parser, [*words, "script"])[1] < len(words):
        return []
    return _options_of(parser, incomplete)


def _options_of(parser: argparse.ArgumentParser, incomplete: str) -> list[CompletionItem]:
    """Return options in the first of their spellings that fits; a spelling that the help hides where no other does."""
    shown, hidden = [], []
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith(incomplete) and "=" not in name]
        if names and action.help != "==SUPPRESS==":
            shown.append(CompletionItem(names[0], help=action.help))
        elif names:
            hidden.append(CompletionItem(names[0]))
    return shown or hidden


def _with_values_joined(words: Sequence[str]) -> list[str]:
    """Return words as they were typed: bash makes three words of `--nnodes=2`, the second of them `=`."""
    joined: list[str] = []
    follows = False
    for word in words[:-1] if words and words[-1] == "=" else words:
        if joined and (word == "=" or follows):
            joined[-1] += word
            follows = word == "="
        else:
            joined.append(word)
    return joined
