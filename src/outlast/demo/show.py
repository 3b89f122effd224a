"""The show: the undisturbed run, the run with faults, and the comparison of the two."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outlast import clock
from outlast.decoding import parse_json
from outlast.demo.outcome import (
    DemoOutcome,
    account_for,
    count_cycles,
    differences,
    find_leaving,
    find_slowed,
    named_ranks,
    read_ledger,
    unkept,
    unkept_of_leaving,
    unkept_of_slowed,
    unnoticed,
)
from outlast.demo.plan import DemoFault, Scene, Shape, draw_faults, is_time
from outlast.demo.stage import Stage, find_example, uninterrupted
from outlast.demo.view import View
from outlast.errors import ConfigError, DeadlineExceeded, OutlastError
from outlast.goodput import Ledger
from outlast.incidents import Event

_NUM_SPARES = 2
"""Two wait from the start: a bit flip takes a node whenever its iteration comes, a lost node may have taken one."""
_UNDISTURBED, _WITH_FAULTS = "undisturbed", "with-faults"
"""Folders of the two runs."""
_POLL_S = 0.03
_STARTING_S = 120.0
_PER_ITERATION_S = 1.5
"""A run may take this long for each iteration, and :data:`_STARTING_S` besides; many times what it needs."""


def perform(
    shape: Shape,
    *,
    seed: int,
    keep: str | None,
    view: View,
    on_failure: Callable[[str], None],
    writes_page: bool = False,
) -> DemoOutcome:
    """Run the demo.

    Args:
        shape: The world's size and the number of iterations.
        seed: Draws the faults; the training is the same with every seed.
        keep: Folder for everything that the runs write, empty or new; ``None`` = a temporary one, which stays only
            when something went wrong.
        view: Shows what happens.
        on_failure: Called with the end of the agents' output when something went wrong.
        writes_page: Write the page about the run with faults into a file of the folder, which then stays.

    Raises:
        ConfigError: The folder is not empty, or there are too few iterations.

    Blocks: about 70 s with two cores.
    Thread: the main thread.
    """
    faults = draw_faults(seed, shape)
    script = find_example()
    folder = _make_folder(keep)
    try:
        outcome = _run_both(shape, seed, faults, script, folder, view, on_failure)
        if writes_page and outcome.incidents:
            page = _write_page(folder / _WITH_FAULTS / "run", folder / "report.html")
            outcome = dataclasses.replace(outcome, report=page)
    except BaseException:
        if keep is None:
            _remove(folder)
        raise
    if not outcome.ok or keep is not None:
        return dataclasses.replace(outcome, folder=str(folder))
    if outcome.report is None:
        _remove(folder)
    else:
        _remove(folder / _UNDISTURBED, folder / _WITH_FAULTS)
    return outcome


def _write_page(run_dir: Path, path: Path) -> str | None:
    """Write the page about a run; return its path, or ``None`` where the run left no journal."""
    from outlast.report.page import make_page

    try:
        ledger = Ledger.read(run_dir)
    except ConfigError:
        return None
    path.write_bytes(make_page(ledger, run_dir=run_dir))
    return str(path)


def _remove(*folders: Path) -> None:
    with uninterrupted():
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _run_both(
    shape: Shape,
    seed: int,
    faults: tuple[DemoFault, ...],
    script: Path,
    folder: Path,
    view: View,
    on_failure: Callable[[str], None],
) -> DemoOutcome:
    started_s = clock.now_s()
    problems: list[str] = []
    size = f"{shape.num_nodes} nodes x {shape.nproc_per_node} ranks"
    first = Stage(script, folder=folder / _UNDISTURBED, shape=shape)
    calm = _play(first, f"Undisturbed: {size}", (), view, problems, on_failure)
    if named := named_ranks(calm):
        problems.append(f"undisturbed, rank {', '.join(map(str, named))} was taken for a slow one")
    num_heirs = sum(fault.deed.needs_spare for fault in faults)
    second = Stage(
        script,
        folder=folder / _WITH_FAULTS,
        shape=shape,
        faults=faults,
        seed=seed,
        num_spares=_NUM_SPARES,
        num_reserves=num_heirs - _NUM_SPARES,
    )
    events: list[Event] = []
    if not problems:
        events = _play(second, f"With faults: {size} + {_NUM_SPARES} spare nodes", faults, view, problems, on_failure)
    undisturbed, struck = _read_result(first.result_path), _read_result(second.result_path)
    outcome = DemoOutcome(
        seed=seed, undisturbed=undisturbed, struck=struck, incidents=(), cycles=0, wall_s=0.0, problems=()
    )
    if events:
        ledger = read_ledger(events)
        outcome = dataclasses.replace(
            outcome,
            incidents=account_for(ledger, events),
            slowed=find_slowed(events),
            leaving=find_leaving(ledger, events),
            cycles=count_cycles(ledger),
        )
        problems += [*unnoticed(ledger, events), *unkept(outcome.incidents), *unkept_of_slowed(outcome.slowed)]
        problems += unkept_of_leaving(outcome.leaving, world_size=shape.world_size)
    if undisturbed and struck and (unequal := differences(undisturbed, struck)):
        told = (f"{name} ({_short(undisturbed, name)} undisturbed, {_short(struck, name)})" for name in unequal)
        problems.append(f"the results differ in {', '.join(told)}")
    return dataclasses.replace(outcome, wall_s=clock.now_s() - started_s, problems=tuple(problems))


def _play(
    stage: Stage,
    title: str,
    faults: tuple[DemoFault, ...],
    view: View,
    problems: list[str],
    on_failure: Callable[[str], None],
) -> list[Event]:
    """Run one stage to its end; return its journal, and add to ``problems`` what went wrong."""
    num_before = len(problems)
    with stage:
        with view.act(title):
            try:
                left = _follow(stage, faults, view)
                problems += [f"{fault.deed} at iteration {fault.iteration}: it never came to that" for fault in left]
                problems += stage.problems()
            except OutlastError as error:
                problems.append(str(error))
        if len(problems) > num_before:
            on_failure(stage.tails())
        return stage.events()


def _follow(stage: Stage, faults: tuple[DemoFault, ...], view: View) -> list[DemoFault]:
    """Strike when it is time, until all agents have ended; return the faults that were left.

    Blocks: until the run is over, bounded by a deadline in proportion to its length.

    Raises:
        DeadlineExceeded: It took too long.
    """
    pending, struck_cycle = [fault for fault in faults if not fault.deed.is_planned], -1
    planned = [fault for fault in faults if fault.deed.is_planned]
    limit_s = _STARTING_S + _PER_ITERATION_S * stage.shape.iterations
    deadline_s = clock.now_s() + limit_s
    while True:
        running = stage.running  # asked before the look: nothing is missed
        scene: Scene = stage.look()
        world_size = stage.shape.world_size
        is_due = bool(pending) and is_time(
            pending[0], scene, world_size=world_size, after_cycle=struck_cycle, planned=planned
        )
        if is_due and stage.strike(pending[0], scene):
            pending.pop(0)
            struck_cycle = scene.cycle
        view.show(scene)
        if not running and stage.may_resume:
            stage.resume(scene)
        elif not running:
            return [*pending, *(fault for fault in planned if not scene.has_struck(fault))]
        if clock.now_s() > deadline_s:
            raise DeadlineExceeded(f"the training did not end within {limit_s:.0f} s")
        time.sleep(_POLL_S)


def _short(result: dict[str, Any], name: str) -> str:
    return str(result.get(name, "missing"))[:12]


def _make_folder(keep: str | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="outlast-demo-"))
    folder = Path(keep)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--keep {keep} is not empty; name a new folder")
    except OSError as error:
        raise ConfigError(f"--keep {keep} cannot be used: {error.strerror}; name another folder") from None
    return folder.resolve()


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = parse_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return result
