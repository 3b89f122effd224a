"""``outlast doctor``: check whether this node is healthy enough to train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outlast import env
from outlast.cli.main import (
    Command,
    complete_file,
    complete_folder,
    echo,
    ending_on_signals,
    json_option,
    open_console,
    print_json,
)
from outlast.errors import ConfigError, ExitReason

if TYPE_CHECKING:
    from rich.table import Table

    from outlast.health import CheckResult


SCHEMA = 1
"""Version of the ``--json`` output; raised when a field changes its meaning or is removed."""
_STYLES = {"ok": "green", "skipped": "dim"}


@click.command("doctor", cls=Command)
@click.option(
    "--config",
    metavar="FILE",
    shell_complete=complete_file,
    help="A run's settings: its tiers, its run directory, its [health] limits.",
)
@click.option(
    "--place",
    "places",
    multiple=True,
    metavar="DIR",
    shell_complete=complete_folder,
    help="Folder or URL to write to; repeat. Default: this folder.",
)
@click.option(
    "--gpu", "gpus", multiple=True, type=click.IntRange(min=0), metavar="N", help="Only this GPU; repeat. Default: all."
)
@click.option("--no-gpu", is_flag=True, help="Look at no GPU, which takes seconds; the CPU is checked.")
@click.option("--command", "commands", multiple=True, metavar="COMMAND", help="A check of your own; repeat.")
@click.option("--timeout", type=float, metavar="SECONDS", help="For each check but a GPU's; default 30.")
@json_option
def doctor(
    config: str | None,
    places: tuple[str, ...],
    gpus: tuple[int, ...],
    no_gpu: bool,
    commands: tuple[str, ...],
    timeout: float | None,
    as_json: bool,
) -> int:
    """Check whether this node is healthy enough to train.

    Each tier is written to and read back, and has room; shared memory, memory, descriptors, clock and network are
    looked at; CPU and GPUs multiply matrices of which every bit of the product is known; GPU memory is tested and the
    driver is queried for faults. A check that hangs or crashes is stopped and reported.

    Exit code 0: healthy; 1: a check failed, timed out, or could not run; 2: bad input.

    Examples:
      outlast doctor
      outlast doctor --config outlast.toml                 the tiers and limits of a run
      outlast doctor --place /nvme/run --place s3://bucket/run --command 'test -e /data/tokens.bin'
      srun --ntasks-per-node=1 outlast doctor --no-gpu     on all nodes of a job
      outlast doctor --json | jq -r '.checks[] | select(.status == "failed") | .reason'
    """
    from outlast.config import HealthConfig
    from outlast.config.sources import load_config
    from outlast.health import check_gpu, check_node
    from outlast.health.node import places_of

    if gpus and no_gpu:
        raise ConfigError("--gpu and --no-gpu contradict each other; leave one out")
    settings = None if config is None else load_config(config)
    health = (settings and settings.health) or HealthConfig()
    health = health.changed(commands=(*health.commands, *commands))
    if timeout is not None:
        health = health.changed(check_timeout=timeout)
    where = () if settings is None else places_of(settings)
    node = env.clean_name(env.read_worker().node)
    with ending_on_signals():
        results = check_node(health, places=places or where or (".",), node=node)
        if not no_gpu:
            # The CPU was checked already; without a GPU only that is reported.
            found = check_gpu(gpus or None, health, node=node)
            results += tuple(result for result in found if (result.name, result.target) != ("compute", "cpu"))
    failed = [result for result in results if result.has_failed]
    if as_json:
        print_json({"schema": SCHEMA, "node": node, "ok": not failed, "checks": results})
    else:
        open_console(width=160).print(_table(results))
        decision = f"{node} is unhealthy: {len(failed)} of {len(results)} checks failed"
        echo(decision if failed else f"{node} is healthy")
    return int(ExitReason.FAILED if failed else ExitReason.FINISHED)


def _table(results: tuple[CheckResult, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("of")
    table.add_column("result", no_wrap=True)
    table.add_column("why", ratio=1)
    table.add_column("s", justify="right", no_wrap=True)
    for result in results:
        status = Text(result.status.replace("_", " "), style=_STYLES.get(result.status, "bold red"))
        table.add_row(result.name, Text(result.target), status, Text(result.reason), f"{result.took_s:.2f}")
    return table
