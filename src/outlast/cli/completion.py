"""``outlast completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import click

__all__ = ["completion"]


@click.command(
    "completion",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  eval "$(outlast completion bash)"                                        in ~/.bashrc
  eval "$(outlast completion zsh)"                                         in ~/.zshrc, behind compinit
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
