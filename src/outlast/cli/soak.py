"""``outlast chaos soak``: train the example undisturbed and under faults of all kinds, and compare the results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from outlast.cli.main import (
    Command,
    complete_folder,
    echo,
    ending_on_signals,
    failing_in_one_line,
    json_option,
    open_console,
    print_json,
)
from outlast.errors import ConfigError, ExitReason, OutlastError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.chaos.netns import NodeNetwork
    from outlast.chaos.plan import FaultPlan
    from outlast.chaos.reckoning import KindOutcome
    from outlast.chaos.soak import SoakOutcome
    from outlast.testing import Cluster

_STARTING_S = 240.0
_PER_FAULT_S = 30.0
_PROGRESS_S = 10.0
_WIDTH = 120
_ORPHANS_S = 10.0
_SHM = Path("/dev/shm")


@click.command("soak", cls=Command)
@click.option("--minutes", type=float, default=10.0, show_default=True, help="From the first fault to the last.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the faults.")
@click.option("--every", type=float, default=5.0, show_default=True, metavar="SECONDS", help="From fault to fault.")
@click.option("--kinds", metavar="KIND,...", help="Which kinds; default all but four.")
@click.option("--keep", metavar="DIR", shell_complete=complete_folder, help="Keep everything in this new folder.")
@json_option
def soak(minutes: float, seed: int, every: float, kinds: str | None, keep: str | None, as_json: bool) -> int:
    """Train a small GPT under faults of all kinds; verify that the result is the same.

    Two nodes of two ranks and two spares train on this machine: first undisturbed, then under the faults. The
    weights, the optimizer's state and all losses must be bit-identical, each fault must have been injected, no process
    and no file may be left behind, and the journal must have the end of each job and cycle. As root the nodes get
    network namespaces, so that one can be cut off; where the kernel cannot delay and lose packets, the plan has no such
    faults.

    Examples:
      outlast chaos soak                      10 minutes, 120 faults
      outlast chaos soak --minutes 1 --seed 7
      outlast chaos soak --json | jq .kinds
    """
    from outlast.chaos.draws import draw_plan, parse_kinds
    from outlast.chaos.soak import NPROC_PER_NODE, NUM_NODES, TENSOR, choose_kinds

    wanted, num_ranks = None if kinds is None else parse_kinds(kinds), NUM_NODES * NPROC_PER_NODE
    with ending_on_signals(), failing_in_one_line():
        try:
            chosen, why = choose_kinds(wanted)
            if why is not None:
                echo(f"some faults of networks are left out: {why}", err=True)
            plan = draw_plan(seed, chosen, every_s=every, minutes=minutes, num_ranks=num_ranks, tensor=TENSOR)
            outcome = _soak_in(keep, plan, minutes)
        except KeyboardInterrupt:
            echo("interrupted; every process of the soak has been ended", err=True)
            raise
        except BrokenPipeError:  # the reader of the output has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
    if as_json:
        print_json(outcome)
    else:
        _show(outcome)
    return int(ExitReason.FINISHED if outcome.ok else ExitReason.FAILED)


def _soak_in(keep: str | None, plan: FaultPlan, minutes: float) -> SoakOutcome:
    """Soak in a folder, which is kept if it was named, or after a failure."""
    from outlast.testing.cluster import uninterrupted

    folder = Path(tempfile.mkdtemp(prefix="outlast-soak-")) if keep is None else _make_folder(keep)
    stays = keep is not None
    try:
        outcome = _soak(folder, plan, minutes)
        stays = stays or not outcome.ok
        return msgspec.structs.replace(outcome, folder=os.fspath(folder) if stays else None)
    finally:
        if not stays:
            with uninterrupted():
                shutil.rmtree(folder, ignore_errors=True)


def _soak(folder: Path, plan: FaultPlan, minutes: float) -> SoakOutcome:
    from outlast.chaos.plan import FaultPlan, verify_fired
    from outlast.chaos.soak import CALIBRATION, count_iterations, measure_step_s, next_iterations

    echo(f"measuring a step: {CALIBRATION} iterations", err=True)
    measured = _Training(folder / "measured", CALIBRATION)
    earlier = measured.run(FaultPlan(), limit_s=_STARTING_S)
    step_s = measure_step_s(measured.events())
    iterations = count_iterations(plan, minutes, step_s)
    echo(f"a step takes {step_s * 1000:.0f} ms", err=True)
    attempt = 1
    while True:
        place = folder if attempt == 1 else folder / f"attempt-{attempt}"
        outcome = _compare(place, plan, minutes, iterations)
        missing = [fault.describe() for fault in verify_fired(plan, place / "with-faults" / "run")]
        problems = [*earlier, *outcome.problems]
        longer = next_iterations(iterations, attempt, problems=problems, missing=missing)
        if longer is None:
            return msgspec.structs.replace(outcome, problems=[*problems, *missing])
        echo(f"the training ended before all faults were injected ({missing[0]}): again, twice as long", err=True)
        iterations, attempt = longer, attempt + 1


def _compare(folder: Path, plan: FaultPlan, minutes: float, iterations: int) -> SoakOutcome:
    """Train undisturbed and under the plan, and compare."""
    from outlast import clock
    from outlast.chaos.netns import NodeNetwork
    from outlast.chaos.plan import FaultKind, FaultPlan
    from outlast.chaos.reckoning import by_kind, reckon
    from outlast.chaos.soak import NUM_NODES, NUM_SPARES, SoakOutcome, find_differences, find_gaps
    from outlast.incidents import EventKind

    echo(f"undisturbed: {iterations} iterations", err=True)
    undisturbed = _Training(folder / "undisturbed", iterations)
    problems = undisturbed.run(FaultPlan(), limit_s=_STARTING_S + minutes * 180)
    echo(f"with {len(plan.faults)} faults in {minutes:g} min", err=True)
    faulted = _Training(folder / "with-faults", iterations)
    began_s = clock.now_s()
    if not problems:
        limit_s = _STARTING_S + minutes * 120 + _PER_FAULT_S * len(plan.faults)
        needs_network = any(FaultKind(fault.kind).is_of_networks for fault in plan.faults)
        with NodeNetwork(NUM_NODES + NUM_SPARES) if needs_network else nullcontext() as network:
            problems += faulted.run(plan, limit_s=limit_s, num_spares=NUM_SPARES, network=network)
    wall_s = clock.now_s() - began_s
    events = faulted.events()
    rows = reckon(plan, events)
    problems += find_gaps(events)
    results = [training.result() for training in (undisturbed, faulted)]
    unequal = find_differences(*results) if all(results) else ["everything: a result is missing"]
    if unequal:
        problems.append(f"the results differ in {', '.join(unequal)}")
    return SoakOutcome(
        seed=plan.seed,
        minutes=minutes,
        iterations=iterations,
        planned=len(plan.faults),
        fired=sum(row.fired for row in rows),
        jobs=len({event.job for event in events if event.kind == EventKind.JOB_STARTED}),
        cycles=len({(event.job, event.cycle) for event in events if event.kind == EventKind.CYCLE_STARTED}),
        agents=faulted.num_agents,
        wall_s=wall_s,
        bit_identical=not unequal,
        kinds=by_kind(rows),
        faults=rows,
        problems=problems,
    )


class _Training:
    def __init__(self, folder: Path, iterations: int) -> None:
        self.num_agents = 0
        self._folder, self._iterations = folder, iterations
        self._run_dir, self._result_path = folder / "run", folder / "result.json"

    def run(
        self, plan: FaultPlan, *, limit_s: float, num_spares: int = 0, network: NodeNetwork | None = None
    ) -> list[str]:
        """Train to the end; return all problems."""
        from outlast.chaos.soak import NPROC_PER_NODE, NUM_NODES, OPTIONS, find_example, settings_of
        from outlast.testing import Cluster

        folder = self._folder
        temporary, config = folder / "tmp", folder / "outlast.json"
        temporary.mkdir(parents=True)
        config.write_text(json.dumps(settings_of(folder)))
        shared = _names_in_shm()
        cluster = Cluster(
            find_example(),
            f"--config={config}",
            f"--iterations={self._iterations}",
            f"--out={self._result_path}",
            run_dir=self._run_dir,
            num_nodes=NUM_NODES,
            # At most one announced spare: with two, each half of a divided network could be complete.
            num_spares=min(num_spares, 1),
            num_started=NUM_NODES + num_spares,
            nproc_per_node=NPROC_PER_NODE,
            options=OPTIONS,
            environment={"TMPDIR": os.fspath(temporary)},
            fault_plan=plan,
            network=network,
        )
        problems = []
        with cluster:
            try:
                self._follow(cluster, limit_s, shows_progress=bool(plan.faults))
                if cluster.exit_code:
                    problems.append(f"the run ended with exit code {cluster.exit_code}; see {self._run_dir / 'agents'}")
                problems += find_orphans(cluster)
            except OutlastError as error:
                problems.append(str(error))
            self.num_agents = len(cluster.agents)
        problems += [f"left in /dev/shm: {name}" for name in sorted(_names_in_shm() - shared)]
        problems += [f"left in its temporary folder: {path.name}" for path in temporary.glob("*outlast*")]
        return [f"{folder.name}: {problem}" for problem in problems]

    def events(self) -> list[Any]:
        from outlast.journal import read

        return list(read(self._run_dir))

    def result(self) -> dict[str, Any]:
        """Return the digests that the script has written; empty if it did not end."""
        from outlast.decoding import parse_json

        try:
            result: dict[str, Any] = parse_json(self._result_path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return result

    def _follow(self, cluster: Cluster, limit_s: float, *, shows_progress: bool) -> None:
        from outlast import clock

        next_s = 0.0
        for fault in cluster.supervise(limit_s):
            if fault is not None:
                echo(f"FAULT: {fault.describe()}", err=True)
            if shows_progress and clock.now_s() >= next_s and cluster.injector is not None:
                next_s = clock.now_s() + _PROGRESS_S
                sight = cluster.injector.sight
                sight.look_at_boards()
                echo(
                    f"{time.strftime('%H:%M:%S')} iteration {sight.iteration} of {self._iterations}, job "
                    f"{cluster.num_jobs}, cycle {max(sight.cycle, 0)}, {cluster.injector.num_pending} faults left",
                    err=True,
                )


def _make_folder(keep: str) -> Path:
    folder = Path(keep)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--keep {keep} is not empty; name a new folder")
    except OSError as error:
        raise ConfigError(f"--keep {keep} cannot be used: {error.strerror}; name another folder") from None
    return folder.resolve()


def _names_in_shm() -> set[str]:
    return {path.name for path in _SHM.glob("outlast*")}


def _show(outcome: SoakOutcome) -> None:
    _show_kinds(outcome.kinds)
    same = "bit-identical to" if outcome.bit_identical else "NOT the same as"
    echo(
        f"{outcome.fired} of {outcome.planned} faults injected in {outcome.wall_s:.0f} s: {outcome.jobs} jobs, "
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
    table.add_column("injected", justify="right")
    table.add_column("detected as")
    for name in ("detected after, median", "recovered after, median", "done twice"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.kind,
            f"{row.fired} of {row.planned}",
            ", ".join(f"{name} {number}" for name, number in row.detected_as.items()) or "-",
            format_seconds(row.detected_median_s),
            format_seconds(row.recovered_median_s),
            str(row.lost_iterations),
        )
    open_console(width=max(_WIDTH, shutil.get_terminal_size().columns)).print(table)


def find_orphans(cluster: Cluster) -> list[str]:
    """Return the processes that still run after all agents of a cluster have ended, one per line.

    Blocks: up to 10 s, while some end.
    """
    try:
        cluster.assert_no_orphans(within_s=_ORPHANS_S)
    except AssertionError as error:
        return [f"left behind: {error}"]
    return []


def format_seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
