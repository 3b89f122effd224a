"""The soak: the demo's training under a storm of faults of all kinds, and the proof that its result is the same."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from outlast import clock
from outlast.chaos.draws import draw_plan
from outlast.chaos.netns import NodeNetwork
from outlast.chaos.plan import FaultKind, FaultPlan, verify_fired
from outlast.chaos.reckoning import FaultOutcome, KindOutcome, by_kind, reckon
from outlast.demo.outcome import differences
from outlast.demo.plan import Shape
from outlast.demo.show import _make_folder, _read_result
from outlast.demo.stage import TIMEOUTS, find_example, uninterrupted, write_settings
from outlast.demo.struck_run import StruckRun
from outlast.errors import ConfigError, OutlastError
from outlast.incidents import Event, EventKind
from outlast.journal import read
from outlast.testing.ranks import free_port

KINDS = tuple(kind for kind in FaultKind if kind not in (FaultKind.INF, FaultKind.SIGN_FLIP, FaultKind.EXIT))
"""Those three are like others that are among them."""
_TENSOR = "model.blocks.*"
_CALIBRATION = 40
"""Iterations by which the length of a step is measured."""
_SHARE, _RESTARTING = 1.1, 0.5
"""Of the storm's time at most this much is training, and so much less where all faults cost a restart."""
_REST_S = 12.0
"""What is trained after the storm, at least."""
_ATTEMPTS = 3
"""A machine on which steps take less and less time is given up after so many."""
_STARTING_S = 240.0
_NUM_SPARES = 2
"""So that a node that is lost right after another one leaves most of them: fewer may not go on without the others."""
_PER_FAULT_S = 30.0
_MAX_RESTARTS = 12
_PATIENT = (
    f"--max-restarts={_MAX_RESTARTS}",
    f"--ft-max-no-progress-cycles={_MAX_RESTARTS}",
    "--rdzv-conf=join_timeout=45",  # where most are gone at once, the job leaves, and another one follows
)
_SHM = Path("/dev/shm")


class SoakOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a soak."""

    seed: int
    minutes: float
    iterations: int
    planned: int
    fired: int
    jobs: int
    cycles: int
    agents: int
    """How many were started."""
    storm_s: float
    """From the first agent's start to the last one's end."""
    bit_identical: bool
    kinds: list[KindOutcome]
    faults: list[FaultOutcome]
    problems: list[str]
    folder: str | None = None
    """Where everything lies, if it was kept."""

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problems


def soak(
    *,
    minutes: float,
    seed: int,
    every_s: float,
    keep: str | None,
    say: Callable[[str], None],
    kinds: Sequence[FaultKind] | None = None,
) -> SoakOutcome:
    """Train under a storm.

    Args:
        minutes: Length of the storm.
        seed: Draws the faults; the training is always the same.
        every_s: Seconds from one fault to the next.
        keep: New folder for everything that is written; ``None`` = a temporary one, which stays only when something
            went wrong.
        say: Called with lines on how far it is.
        kinds: Which kinds strike; ``None`` = :data:`KINDS`, without those of networks that this machine cannot cause.

    Raises:
        ConfigError: A value is wrong, or the folder is not empty.

    Blocks: about three times the storm's length at most, and a bounded time in any case. Where steps become so much
    faster that the training is over before all faults have struck, it is repeated with more of them.
    Thread: the main thread.
    """
    shape = Shape()
    possible = _possible_networks(say if kinds is None else None)
    if kinds is None:
        kinds = [kind for kind in KINDS if not kind.is_of_networks or kind in possible]
    elif impossible := [kind for kind in kinds if kind.is_of_networks and kind not in possible]:
        raise ConfigError(f"{' and '.join(impossible)} cannot be caused here: {_why_no_networks()}")
    plan = draw_plan(seed, kinds, every_s=every_s, minutes=minutes, num_ranks=shape.world_size, tensor=_TENSOR)
    folder = _make_folder(keep) if keep is not None else Path(tempfile.mkdtemp(prefix="outlast-soak-"))
    try:
        outcome = _soak(folder, plan, minutes, say)
    except BaseException:
        if keep is None:
            with uninterrupted():
                shutil.rmtree(folder, ignore_errors=True)
        raise
    if outcome.ok and keep is None:
        with uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)
        return outcome
    return msgspec.structs.replace(outcome, folder=os.fspath(folder))


def _possible_networks(say: Callable[[str], None] | None) -> frozenset[FaultKind]:
    """Return the kinds of networks that this user, machine and kernel can cause; say why, if some are missing."""
    why = _why_no_networks()
    if why is None:
        return frozenset(kind for kind in FaultKind if kind.is_of_networks)
    if say is not None:
        say(f"some faults of networks are left out: {why}")
    try:
        with NodeNetwork(1):
            return frozenset({FaultKind.PARTITION})
    except ConfigError:
        return frozenset()


def _why_no_networks() -> str | None:
    try:
        with NodeNetwork(1, needs_netem=True):
            return None
    except ConfigError as error:
        return str(error)


def _soak(folder: Path, plan: FaultPlan, minutes: float, say: Callable[[str], None]) -> SoakOutcome:
    say(f"measuring a step: {_CALIBRATION} iterations")
    measured, problems = _Training(folder / "measured", _CALIBRATION), list[str]()
    measured.run(FaultPlan(), limit_s=_STARTING_S, problems=problems)
    step_s = _step_s(measured.events())
    gentle = sum(FaultKind(fault.kind).is_gentle for fault in plan.faults) / len(plan.faults)
    share = _SHARE - _RESTARTING * (1 - gentle)
    iterations = int((minutes * 60 * share + _REST_S) / step_s)
    say(f"a step takes {step_s * 1000:.0f} ms")
    for attempt in range(1, _ATTEMPTS + 1):
        place = folder if attempt == 1 else folder / f"attempt-{attempt}"
        outcome, missed = _storm(place, plan, minutes, iterations, say)
        problems += outcome.problems
        if problems or not missed or attempt == _ATTEMPTS:
            break
        iterations *= 2
        say(f"the training was over too early ({missed[0]}): a step takes less time than it did; again, twice as long")
    return msgspec.structs.replace(outcome, problems=problems + missed)


def _storm(
    folder: Path, plan: FaultPlan, minutes: float, iterations: int, say: Callable[[str], None]
) -> tuple[SoakOutcome, list[str]]:
    """Train undisturbed and under the plan; return what came of it, and which faults did not strike."""
    problems: list[str] = []
    say(f"undisturbed: {iterations} iterations")
    calm = _Training(folder / "undisturbed", iterations)
    calm.run(FaultPlan(), limit_s=_STARTING_S + minutes * 180, problems=problems)
    say(f"with {len(plan.faults)} faults in {minutes:g} min")
    struck = _Training(folder / "with-faults", iterations)
    began_s = clock.now_s()
    if not problems:
        limit_s = _STARTING_S + minutes * 120 + _PER_FAULT_S * len(plan.faults)
        needs_network = any(FaultKind(fault.kind).is_of_networks for fault in plan.faults)
        with NodeNetwork(Shape().num_nodes + _NUM_SPARES) if needs_network else nullcontext() as network:
            struck.run(plan, limit_s=limit_s, problems=problems, say=say, num_spares=_NUM_SPARES, network=network)
    storm_s = clock.now_s() - began_s
    events = struck.events()
    rows = reckon(plan, events)
    problems += _incomplete(events)
    results = [_read_result(training.result) for training in (calm, struck)]
    unequal = list(differences(*results)) if all(results) else ["everything: a result is missing"]
    if unequal:
        problems.append(f"the results differ in {', '.join(unequal)}")
    outcome = SoakOutcome(
        seed=plan.seed,
        minutes=minutes,
        iterations=iterations,
        planned=len(plan.faults),
        fired=sum(row.fired for row in rows),
        jobs=len({event.job for event in events if event.kind == EventKind.JOB_STARTED}),
        cycles=len({(event.job, event.cycle) for event in events if event.kind == EventKind.CYCLE_STARTED}),
        agents=struck.num_agents,
        storm_s=storm_s,
        bit_identical=not unequal,
        kinds=by_kind(rows),
        faults=rows,
        problems=problems,
    )
    return outcome, [missing.describe() for missing in verify_fired(plan, struck.run_dir)]


class _Training:
    """One training of the example by two nodes of two ranks."""

    def __init__(self, folder: Path, iterations: int) -> None:
        self.run_dir, self.result = folder / "run", folder / "result.json"
        self.num_agents = 0
        self._folder, self._shape = folder, Shape(iterations=iterations)

    def run(
        self,
        plan: FaultPlan,
        *,
        limit_s: float,
        problems: list[str],
        say: Callable[[str], None] | None = None,
        num_spares: int = 0,
        network: NodeNetwork | None = None,
    ) -> None:
        """Run it to its end; add to ``problems`` what went wrong."""
        shape, folder = self._shape, self._folder
        temporary = folder / "tmp"
        temporary.mkdir(parents=True)
        config = folder / "outlast.json"
        write_settings(config, shape, checkpoints=folder / "checkpoints", local=folder / "local")
        num_agents = shape.num_nodes + num_spares
        hosts = ["127.0.0.1"] * 2 if network is None else [network.address(host) for host in range(num_agents)]
        arguments = [
            # One spare is announced, whatever comes: were it two, each half of a divided network could be complete.
            f"--nnodes={shape.num_nodes}:{shape.num_nodes + min(num_spares, 1)}",
            f"--nproc-per-node={shape.nproc_per_node}",
            f"--rdzv-endpoint={','.join(f'{host}:{free_port()}' for host in hosts)}",
            f"--rdzv-id=soak-{folder.name}",
            f"--run-dir={self.run_dir}",
            *TIMEOUTS,
            *_PATIENT,
            os.fspath(find_example()),
            f"--config={config}",
            f"--iterations={shape.iterations}",
            f"--out={self.result}",
        ]
        shared = _names_in_shm()
        with StruckRun(
            plan,
            arguments,
            run_dir=self.run_dir,
            plan_path=folder / "faults.toml",
            num_agents=num_agents,
            network=network,
            is_named=True,
            log_dir=folder / "agents",
            environment={"TMPDIR": os.fspath(temporary), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            on_strike=None if say is None else lambda one: say(f"FAULT: {one.fault.describe()}"),
        ) as run:
            try:
                code = run.follow(limit_s=limit_s, on_look=None if say is None else _Teller(run, shape, say).tell)
                if code:
                    problems.append(f"{folder.name}: the run ended with exit code {code}; see {folder / 'agents'}")
                problems += [f"{folder.name}: left behind: {process}" for process in run.orphans()]
            except OutlastError as error:
                problems.append(f"{folder.name}: {error}")
            self.num_agents = len(run.agents)
        problems += [f"{folder.name}: left in /dev/shm: {name}" for name in sorted(_names_in_shm() - shared)]
        problems += [
            f"{folder.name}: left in its temporary folder: {path.name}" for path in temporary.glob("*outlast*")
        ]

    def events(self) -> list[Event]:
        """Return what its journal holds."""
        return list(read(self.run_dir))


class _Teller:
    """Say now and then how far a run is."""

    def __init__(self, run: StruckRun, shape: Shape, say: Callable[[str], None]) -> None:
        self._run, self._shape, self._say = run, shape, say
        self._next_s = 0.0

    def tell(self) -> None:
        """Say it, if it is time."""
        if clock.now_s() < self._next_s:
            return
        self._next_s = clock.now_s() + 10.0
        sight = self._run.injector.sight
        sight.look_at_boards()
        self._say(
            f"{time.strftime('%H:%M:%S')} iteration {sight.iteration} of {self._shape.iterations}, job "
            f"{self._run.num_jobs}, cycle {max(sight.cycle, 0)}, {self._run.injector.num_pending} faults left"
        )


def _names_in_shm() -> set[str]:
    return {path.name for path in _SHM.glob("outlast*")}


def _step_s(events: Sequence[Event]) -> float:
    """Return how long a step took.

    Raises:
        OutlastError: The training did not end.
    """
    begin = [event for event in events if event.kind == EventKind.PROGRESS and event.rank == 0]
    end = [event for event in events if event.kind == EventKind.SESSION_ENDED and event.rank == 0]
    if not begin or not end:
        raise OutlastError("the undisturbed training did not end; run outlast demo to see why")
    num_steps = max(1, _CALIBRATION - (begin[0].iteration or 0))
    return max(1e-3, (end[-1].mono_ns - begin[0].mono_ns) / 1e9 / num_steps)


def _incomplete(events: Sequence[Event]) -> list[str]:
    """Return what the journal should tell of and does not: the ends of jobs and cycles, and lost events."""
    found = []
    ended: dict[str, Any] = {event.job: event for event in events if event.kind == EventKind.JOB_ENDED}
    decided = {(event.job, event.cycle) for event in events if event.kind in (EventKind.CYCLE_ENDED, EventKind.VERDICT)}
    jobs = list(dict.fromkeys(event.job for event in events if event.kind == EventKind.CYCLE_STARTED))
    cycles = dict.fromkeys((event.job, event.cycle) for event in events if event.kind == EventKind.CYCLE_STARTED)
    found += [f"the journal tells no end of job {job}" for job in jobs if job not in ended]
    found += [
        f"the journal tells no end of cycle {cycle} of job {job}"
        for job, cycle in cycles
        if (job, cycle) not in decided
    ]
    lost = sum(event.data.get("num", 0) for event in events if event.kind == EventKind.EVENTS_LOST)
    if lost:
        found.append(f"{lost} events of the journal are lost")
    return found
