"""``outlast chaos``: draw a plan of faults, and run a command under one; the soak is in :mod:`outlast.cli.soak`."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outlast.cli.main import (
    Command,
    CommandGroup,
    complete_file,
    echo,
    ending_on_signals,
    failing_in_one_line,
    json_option,
    open_console,
    print_json,
)
from outlast.cli.soak import find_orphans, format_seconds, soak
from outlast.errors import ConfigError, ExitReason

if TYPE_CHECKING:
    from outlast.chaos.plan import FaultPlan
    from outlast.chaos.reckoning import FaultOutcome

_WIDTH = 120


@click.group("chaos", cls=CommandGroup)
def chaos() -> None:
    """Plan faults, run a script under them, and verify that training survives all kinds of them.

    Examples:
      outlast chaos plan --seed 7 --kinds kill,stop,kill_agent --minutes 10 --ranks 4 -o faults.toml
      outlast chaos run faults.toml --nodes 2 -- --nproc-per-node 2 train.py
      outlast chaos soak --minutes 1
    """


@chaos.command("plan", cls=Command)
@click.option("--seed", type=int, default=0, show_default=True, help="Everything is drawn from it.")
@click.option("--kinds", metavar="KIND,...", default="all", show_default=True, help="Which kinds, or all.")
@click.option("--every", type=float, default=5.0, show_default=True, metavar="SECONDS", help="From fault to fault.")
@click.option("--minutes", type=float, default=10.0, show_default=True, help="Length of all.")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks of the run.")
@click.option(
    "-o", "--output", metavar="FILE", shell_complete=complete_file, help="A .toml or .json file; default stdout."
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON instead of TOML.")
def plan(seed: int, kinds: str, every: float, minutes: float, ranks: int, output: str | None, as_json: bool) -> None:
    """Draw a fault plan: the same seed draws the same plan.

    Each fault has a moment in seconds of the run (at_s), so the plan is for outlast chaos run.

    Examples:
      outlast chaos plan --seed 7 --ranks 4 --kinds kill,stop --every 30 --minutes 5
      outlast chaos plan --ranks 16 -o faults.toml
    """
    from outlast.chaos.draws import draw_plan, parse_kinds

    drawn = draw_plan(seed, parse_kinds(kinds), every_s=every, minutes=minutes, num_ranks=ranks)
    text = drawn.to_json() if as_json or (output or "").endswith(".json") else drawn.to_toml()
    if output is None:
        click.echo(text, nl=False)
        return
    if not output.endswith((".toml", ".json")):
        raise ConfigError(f"-o {output} is neither a .toml nor a .json file; name one")
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {output} cannot be written: {error.strerror}; name another file") from None


@chaos.command("run", cls=Command, context_settings={"allow_interspersed_args": False})
@click.argument("plan_file", metavar="PLAN", shell_complete=complete_file)
@click.option(
    "--nodes", type=click.IntRange(min=1), help="Start this many agents on this machine, each as a separate node."
)
@click.option("--spares", type=click.IntRange(min=0), default=0, help="More agents, which wait for a slot.")
@click.option("--netns", is_flag=True, help="Give each agent its own network namespace; needs root.")
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(plan_file: str, nodes: int | None, spares: int, netns: bool, as_json: bool, arguments: tuple[str, ...]) -> int:
    """Run a script under a fault plan, and show the result of each fault.

    The words after PLAN are those of outlast run. Without --nodes its agent is started with them alone; with --nodes
    that many agents are started, and one for each that the plan kills. A job that exits after a SIGTERM of the plan is
    followed by another. The plan replaces the config's fault_plan. With --json the agents' output goes to agents/ in
    the run directory.

    Exit code: that of the run; 1 if it is 0 and a planned fault was not injected.

    Examples:
      outlast chaos run faults.toml -- --nproc-per-node 4 train.py
      outlast chaos run faults.toml --nodes 2 --spares 1 -- --nproc-per-node 2 --run-dir runs/gpt train.py
    """
    from outlast.chaos.plan import FaultPlan

    given = FaultPlan.load(plan_file)
    if spares and nodes is None:
        raise ConfigError("--spares is for --nodes; give both")
    if netns and nodes is None:
        raise ConfigError("--netns is for --nodes; give both")
    words = list(arguments[1:] if arguments[:1] == ("--",) else arguments)
    with ending_on_signals(), failing_in_one_line():
        try:
            return _run(given, words, nodes, spares, netns=netns, as_json=as_json)
        except KeyboardInterrupt:
            echo("interrupted; every process of the run has been ended", err=True)
            raise


def _run(given: FaultPlan, words: list[str], nodes: int | None, spares: int, *, netns: bool, as_json: bool) -> int:
    from outlast import env
    from outlast.chaos.netns import NodeNetwork
    from outlast.chaos.plan import LOST_NODES, FaultKind
    from outlast.chaos.reckoning import reckon
    from outlast.journal import read
    from outlast.testing import Cluster

    kinds = [FaultKind(fault.kind) for fault in given.faults]
    of_networks = sorted({kind for kind in kinds if kind.is_of_networks})
    if of_networks and not netns:
        raise ConfigError(f"{' and '.join(of_networks)} need separate hosts; give --netns, as root")
    if on_request := [fault for fault in given.faults if fault.on_request]:
        raise ConfigError(f"{on_request[0].describe()}: only a test can request it; give an iteration, or at_s")
    needs_netem = any(kind.needs_netem for kind in kinds)
    network = NodeNetwork((nodes or 1) + spares, needs_netem=needs_netem) if netns else None
    options, script, run_id, run_dir = _divide_words(words, nodes)
    if lost := [fault.kind for fault in given.faults if nodes is None and fault.kind in LOST_NODES]:
        raise ConfigError(f"{lost[0]} loses the only node's disk; give --nodes 2 or more")
    with contextlib.nullcontext() if network is None else network:
        cluster = Cluster(
            *script,
            run_dir=run_dir,
            num_nodes=nodes,
            num_spares=spares,
            nproc_per_node=None,
            options=options,
            environment={name: env.environ().get(name) for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")},
            run_id=run_id,
            fault_plan=given,
            network=network,
            prints_output=not as_json,
        )
        with cluster:
            for fault in cluster.supervise():
                if fault is not None:
                    echo(f"chaos: {fault.describe()}", err=True)
            problems = find_orphans(cluster)
    code = cluster.exit_code or 0
    rows = reckon(given, list(read(run_dir)))
    problems += [f"faults[{row.index}] was not injected: {row.planned}" for row in rows if not row.fired]
    if as_json:
        print_json({"exit_code": code, "run_dir": os.fspath(run_dir), "faults": rows, "problems": problems})
    else:
        _show_faults(rows)
        for problem in problems:
            echo(f"chaos: {problem}", err=True)
    code = 128 - code if code < 0 else code
    return code or int(ExitReason.FAILED if problems else ExitReason.FINISHED)


def _divide_words(words: Sequence[str], nodes: int | None) -> tuple[list[str], list[str], str, Path]:
    """Split the words of `outlast run` into options and script with arguments; return these, the run's name and
    directory.

    Raises:
        ConfigError: The script is missing, or an option contradicts ``--nodes``.
    """
    from outlast.launch.run_parser import parse_command

    if not words:
        raise ConfigError("there is no script to run; name one after PLAN: outlast chaos run PLAN -- train.py")
    command = parse_command(words)
    for name in ["node_name", "nnodes", "rdzv_endpoint"] if nodes is not None else []:
        if name in command.typed:
            raise ConfigError(f"{command.typed[name]} is set by --nodes; leave one of the two out")
    run_id = command.args.rdzv_id if "rdzv_id" in command.typed else None
    run_id = str(run_id or f"chaos-{uuid.uuid4().hex[:8]}")
    run_dir = command.args.run_dir or os.path.join("outlast-runs", run_id)
    position = len(words) - 1 - len(command.args.training_script_args)
    return list(words[:position]), list(words[position:]), run_id, Path(run_dir).absolute()


def _show_faults(rows: Sequence[FaultOutcome]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="Planned faults", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("fault", "injected at", "detected as"):
        table.add_column(name)
    for name in ("detected after", "recovered after", "done twice"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.planned,
            f"iteration {row.iteration}" if row.fired else "not injected",
            row.detected_as or "-",
            format_seconds(row.detected_after_s),
            format_seconds(row.recovered_after_s),
            "-" if row.lost_iterations is None else str(row.lost_iterations),
        )
    open_console(width=_WIDTH).print(table)


chaos.add_command(soak)
