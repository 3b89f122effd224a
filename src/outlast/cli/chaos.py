"""``outlast chaos``: draw a plan of faults, run a command under one, and soak the demo's training in a storm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outlast.cli.main import (
    Command,
    CommandGroup,
    complete_file,
    complete_folder,
    echo,
    ending_on_signals,
    failing_in_one_line,
    json_option,
    open_console,
    print_json,
)
from outlast.errors import ConfigError, ExitReason

if TYPE_CHECKING:
    from outlast.chaos.netns import NodeNetwork
    from outlast.chaos.plan import FaultPlan
    from outlast.chaos.reckoning import FaultOutcome, KindOutcome
    from outlast.demo.soak import SoakOutcome

_WIDTH = 120


@click.group("chaos", cls=CommandGroup)
def chaos() -> None:
    """Plan faults, run a script under them, and soak the demo's training in a storm of them.

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
@click.option("--nodes", type=click.IntRange(min=1), help="Start this many agents here, each a node of its own.")
@click.option("--spares", type=click.IntRange(min=0), default=0, help="Agents more, which wait for a slot.")
@click.option("--netns", is_flag=True, help="Give each agent a network namespace of its own; needs root.")
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(plan_file: str, nodes: int | None, spares: int, netns: bool, as_json: bool, arguments: tuple[str, ...]) -> int:
    """Run a script under a fault plan, and show what became of each fault.

    What follows PLAN is what follows outlast run. Without --nodes its agent is started as it is; with --nodes that many
    agents are started, and one for each that the plan kills. A job that leaves after a SIGTERM of the plan is followed
    by another. The plan takes the place of the config's fault_plan. With --json the agents' output goes to agents/ in
    the run directory.

    Exit code: that of the run; 1 if it is 0 and a planned fault did not strike.

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
    from outlast.chaos.netns import NodeNetwork
    from outlast.chaos.plan import FaultKind
    from outlast.chaos.reckoning import reckon
    from outlast.demo.struck_run import StruckRun
    from outlast.journal import read

    of_networks = sorted({fault.kind for fault in given.faults if FaultKind(fault.kind).is_of_networks})
    if of_networks and not netns:
        raise ConfigError(f"{' and '.join(of_networks)} need hosts of their own; give --netns, as root")
    num_agents = (nodes or 1) + spares
    network = NodeNetwork(num_agents, needs_netem=bool({"delay", "loss"} & set(of_networks))) if netns else None
    run_dir, words = _complete_words(words, nodes, spares, network, num_agents)
    if nodes is None and any(fault.kind == FaultKind.LOSE_NODE for fault in given.faults):
        raise ConfigError("lose_node loses the only node's disk; give --nodes 2 or more")
    run_dir.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.nullcontext() if network is None else network,
        StruckRun(
            given,
            words,
            run_dir=run_dir,
            plan_path=run_dir / "fault-plan.toml",
            num_agents=num_agents,
            network=network,
            is_named=nodes is not None,
            log_dir=run_dir / "agents" if as_json else None,
            on_strike=lambda one: echo(f"chaos: {one.fault.describe()}", err=True),
        ) as struck,
    ):
        code = struck.follow()
        problems = [f"left behind: {process}" for process in struck.orphans()]
    rows = reckon(given, list(read(run_dir)))
    problems += [f"faults[{row.index}] did not strike: {row.planned}" for row in rows if not row.fired]
    if as_json:
        print_json({"exit_code": code, "run_dir": os.fspath(run_dir), "faults": rows, "problems": problems})
    else:
        _show_faults(rows)
        for problem in problems:
            echo(f"chaos: {problem}", err=True)
    code = 128 - code if code < 0 else code
    return code or int(ExitReason.FAILED if problems else ExitReason.FINISHED)


def _complete_words(
    words: Sequence[str], nodes: int | None, spares: int, network: NodeNetwork | None, num_agents: int
) -> tuple[Path, list[str]]:
    """Return the run directory, and the words of `outlast run` with what is missing there.

    Raises:
        ConfigError: The script is missing, or an option is given that we give.
    """
    from outlast.launch.run_parser import parse_command
    from outlast.testing.ranks import free_port

    if not words:
        raise ConfigError("there is no script to run; name one after PLAN: outlast chaos run PLAN -- train.py")
    command = parse_command(words)
    typed, run_id, run_dir = command.typed, command.args.rdzv_id, command.args.run_dir
    ours = ["node_name"] if nodes is None else ["node_name", "nnodes", "rdzv_endpoint"]
    for name in ours:
        if name in typed and not (nodes is None and name == "node_name"):
            raise ConfigError(f"{typed[name]} is what --nodes gives; leave one of the two out")
    added: list[str] = []
    if "rdzv_id" not in typed:
        run_id = f"chaos-{uuid.uuid4().hex[:8]}"
        added.append(f"--rdzv-id={run_id}")
    if run_dir is None:
        run_dir = os.path.join("outlast-runs", str(run_id))
        added.append(f"--run-dir={run_dir}")
    if nodes is not None:
        hosts = ["127.0.0.1"] * 2 if network is None else [network.address(host) for host in range(num_agents)]
        endpoints = ",".join(f"{host}:{free_port()}" for host in hosts)
        added += [f"--nnodes={nodes}:{nodes + spares}", f"--rdzv-endpoint={endpoints}"]
    return Path(run_dir).absolute(), [*added, *words]


@chaos.command("soak", cls=Command)
@click.option("--minutes", type=float, default=10.0, show_default=True, help="Length of the storm.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the faults.")
@click.option("--every", type=float, default=5.0, show_default=True, metavar="SECONDS", help="From fault to fault.")
@click.option("--kinds", metavar="KIND,...", help="Which kinds; default all but three that are like others.")
@click.option("--keep", metavar="DIR", shell_complete=complete_folder, help="Keep everything in this new folder.")
@json_option
def soak(minutes: float, seed: int, every: float, kinds: str | None, keep: str | None, as_json: bool) -> int:
    """Train the demo's model under a storm of faults of all kinds; prove that the result is the same.

    Two nodes of two ranks and two spares train on this machine: first undisturbed, then under the storm. The
    weights, the optimizer's state and all losses must be bit-identical, each fault must have struck, no process and
    no file may be left behind, and the journal must tell the end of each job and cycle. As root the nodes get
    network namespaces, so that one can be cut off; where the kernel cannot delay and lose packets, the plan does
    without.

    Examples:
      outlast chaos soak                      10 minutes, 120 faults
      outlast chaos soak --minutes 1 --seed 7
      outlast chaos soak --json | jq .kinds
    """
    from outlast.chaos.draws import parse_kinds
    from outlast.demo import soak as soaking

    wanted = None if kinds is None else parse_kinds(kinds)
    with ending_on_signals(), failing_in_one_line():
        try:
            outcome = soaking.soak(
                minutes=minutes,
                seed=seed,
                every_s=every,
                keep=keep,
                kinds=wanted,
                say=lambda line: echo(line, err=True),
            )
        except KeyboardInterrupt:
            echo("interrupted; every process of the soak has been ended", err=True)
            raise
        except BrokenPipeError:  # nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
    if as_json:
        print_json(outcome)
    else:
        _show_soak(outcome)
    return int(ExitReason.FINISHED if outcome.ok else ExitReason.FAILED)


def _show_faults(rows: Sequence[FaultOutcome]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="Planned faults", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("fault", "struck at", "noticed as"):
        table.add_column(name)
    for name in ("noticed after", "recovered after", "done twice"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.planned,
            f"iteration {row.iteration}" if row.fired else "did not strike",
            row.noticed_as or "-",
            _seconds(row.detected_after_s),
            _seconds(row.recovered_after_s),
            "-" if row.lost_iterations is None else str(row.lost_iterations),
        )
    open_console(width=_WIDTH).print(table)


def _show_soak(outcome: SoakOutcome) -> None:
    _show_kinds(outcome.kinds)
    same = "bit-identical to" if outcome.bit_identical else "NOT the same as"
    echo(
        f"{outcome.fired} of {outcome.planned} faults struck in {outcome.storm_s:.0f} s: {outcome.jobs} jobs, "
        f"{outcome.cycles} cycles, {outcome.agents} agents; after {outcome.iterations} iterations the result is {same} "
        "the undisturbed one's."
    )
    for problem in outcome.problems:
        echo(f"problem: {problem}")
    if outcome.folder is not None:
        echo("Everything is stored in", str(outcome.folder))


def _show_kinds(rows: Sequence[KindOutcome]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="Faults by kind", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("kind")
    table.add_column("struck", justify="right")
    table.add_column("noticed as")
    for name in ("noticed after, median", "recovered after, median", "done twice"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.kind,
            f"{row.fired} of {row.planned}",
            ", ".join(f"{name} {number}" for name, number in row.noticed_as.items()) or "-",
            _seconds(row.detected_median_s),
            _seconds(row.recovered_median_s),
            str(row.lost_iterations),
        )
    width = max(_WIDTH, shutil.get_terminal_size().columns)
    open_console(width=width).print(table)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
