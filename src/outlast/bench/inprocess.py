"""``outlast bench inprocess``: from a fault to the restarted function, beside nvidia-resiliency-ext; its quiet cost."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from outlast.bench.inprocess_worker import HARD_TIMEOUT_S, SOFT_TIMEOUT_S
from outlast.bench.measuring import Rounds
from outlast.bench.result import Bar, BenchResult
from outlast.bench.rounds import Say, median
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.testing.ranks import RankProcesses
from outlast.testing.reaping import free_port

__all__ = ["Comeback", "comebacks", "measure"]

_WORKER = "outlast.bench.inprocess_worker"
_QUIET_WORKER = "outlast.bench.inprocess_steps_worker"
_PEER = "nvidia_resiliency_ext"
_ACTIVE, _SPARES = 4, 1
_GROUP_TIMEOUT_S = 600
_RUN_TIMEOUT_S = 60.0
_PEER_TIMEOUT_S = 40.0
_QUIET_ROUND_S = 120.0
_NUM_RESTARTS, _SETTLED = 50, 5
_MOST_FAILURES = 2

Faults = Sequence[tuple[str, int]]
"""For the function's first call, its second, and so on: how which rank fails."""

_OURS: tuple[Faults, ...] = (
    (("exception", 1), ("sleep", 2), ("kill", 1)),  # the last one takes the spare
    (("kill", 0),),
    (("stop", 1),),
    (("gil", 1),),
)
_PEERS: tuple[Faults, ...] = ((("exception", 1),), (("kill", 1),), (("kill", 0),), (("sleep", 2),))
_TIMEOUTS_S = {"sleep": SOFT_TIMEOUT_S, "stop": HARD_TIMEOUT_S, "gil": HARD_TIMEOUT_S}


@dataclass(frozen=True, slots=True)
class Comeback:
    """One fault and what followed; times are seconds since the fault."""

    kind: str
    rank: int
    entered_s: float
    """The last active rank was back in the function."""
    stepped_s: float
    """The last active rank had finished an iteration there."""
    num_lost: int
    """Processes that ran the function before and not after it."""

    @property
    def name(self) -> str:
        """What the fault is called."""
        return "kill 0" if (self.kind, self.rank) == ("kill", 0) else self.kind

    @property
    def beyond_s(self) -> float:
        """Seconds until the finished iteration, beyond the timeout by which a hang is noticed."""
        return self.stepped_s - _TIMEOUTS_S.get(self.kind, 0.0)


def measure(*, repeats: int, say: Say) -> BenchResult:
    """Let ranks fail in both libraries, in turns; then restart often, and not at all.

    Raises:
        OutlastError: A run of ours did not come back, lost a healthy rank, or ended with other weights.

    Blocks: about a minute a round, and two more.
    """
    peer = _Peer(say)
    ours: list[Comeback] = []
    peers: list[Comeback] = []
    weights: set[float] = set()
    for number in range(repeats + 1):
        dropped = " (dropped: the first)" if number == 0 else ""
        for faults in _OURS:
            found = _run_ours(faults, weights)
            say(f"round {number}/{repeats}: outlast: {_tell(found)}{dropped}")
            ours += found if number else []
        for faults in _PEERS:
            found = peer.run(faults)
            if found:
                say(f"round {number}/{repeats}: {_PEER}: {_tell(found)}{dropped}")
            peers += found if number else []
    say(f"{_NUM_RESTARTS} restarts in a row")
    growth = _restart_often()
    say("growth after the fifth restart: " + ", ".join(f"{name} {value:.2f} %" for name, value in growth.items()))
    say(f"steps in turns with the wrapper and without it, {repeats} rounds and one that is dropped")
    quiet = _step_quietly(repeats, say)
    return BenchResult(
        bench="inprocess",
        bars=(*_fault_bars(ours, peers), *_quiet_bars(quiet, growth)),
        notes=(*_notes(ours, peers, quiet), *peer.notes),
    )


def comebacks(marks: Sequence[dict[str, Any]], faults: Faults) -> list[Comeback] | None:
    """Return what followed each fault, from what the ranks marked; ``None``: not all has followed yet."""
    found = []
    for iteration, (kind, rank) in enumerate(faults):
        before = _of(marks, "entered", iteration)
        fault = _of(marks, "fault", iteration)
        entered, stepped = _of(marks, "entered", iteration + 1), _of(marks, "stepped", iteration + 1)
        if not fault or len(stepped) < _ACTIVE:
            return None
        at_ns = min(mark["at_ns"] for mark in fault)
        found.append(
            Comeback(
                kind=kind,
                rank=rank,
                entered_s=(max(mark["at_ns"] for mark in entered) - at_ns) / 1e9,
                stepped_s=(max(mark["at_ns"] for mark in stepped) - at_ns) / 1e9,
                num_lost=len({mark["pid"] for mark in before} - {mark["pid"] for mark in entered}),
            )
        )
    return found


def _of(marks: Sequence[dict[str, Any]], name: str, iteration: int) -> list[dict[str, Any]]:
    return [mark for mark in marks if mark["mark"] == name and mark["iteration"] == iteration]


def _run_ours(faults: Faults, weights: set[float]) -> list[Comeback]:
    """Run one group of outlast's to its end and check all that must have been kept."""
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name, _group("outlast", faults, Path(name)) as ranks:
        codes = ranks.wait(_RUN_TIMEOUT_S)
        marks = _read(Path(name))
        found = comebacks(marks, faults)
        doomed = sum(kind in ("kill", "stop", "gil") for kind, _ in faults)
        if found is None or sorted(codes) != [-SIGKILL] * doomed + [0] * (len(codes) - doomed):
            raise OutlastError(f"outlast did not come back from {faults}; exit codes {codes}\n{ranks.tails()}")
    for one in found:
        if one.num_lost != (one.kind in ("kill", "stop", "gil")):
            raise OutlastError(f"outlast lost {one.num_lost} ranks in a fault of one ({one.name}); look at its journal")
    weights.update(mark["weights"] for mark in _of(marks, "done", len(faults)))
    if len(weights) != 1:
        raise OutlastError(f"outlast's final weights differ between ranks or runs ({faults}): {weights}")
    return found


class _Peer:
    """The peer, as long as it comes back."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._failures: dict[Faults, int] = {}
        self._is_there = importlib.util.find_spec(_PEER) is not None
        self.notes: list[str] = []
        if not self._is_there:
            self.notes.append(f"{_PEER} is not installed; make bench-peers installs it")

    def run(self, faults: Faults) -> list[Comeback]:
        """Run one group of its; empty: it did not come back, or is not there."""
        if not self._is_there or self._failures.get(faults, 0) >= _MOST_FAILURES:
            return []
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name, _group("nvrx", faults, Path(name)) as ranks:
            try:
                return _await(ranks, Path(name), faults)
            except DeadlineExceeded as error:
                told = faults[0][0] if faults[0] != ("kill", 0) else "kill 0"
                self._failures[faults] = self._failures.get(faults, 0) + 1
                self._say(f"{_PEER}: {told}: {str(error).splitlines()[0]}")
                if self._failures[faults] == _MOST_FAILURES:
                    self.notes.append(f"{_PEER}: {told}: did not come back in {_PEER_TIMEOUT_S:.0f} s, twice; left out")
                return []


def _group(library: str, faults: Faults, folder: Path) -> RankProcesses:
    plan = {
        "faults": faults,
        "active_world_size": _ACTIVE,
        "group_timeout_s": _GROUP_TIMEOUT_S,
        "port": free_port(),
    }
    arguments = (library, str(folder), json.dumps(plan))
    return RankProcesses(_WORKER, *arguments, world_size=_ACTIVE + _SPARES, directory=folder / "logs", module=True)


def _await(ranks: RankProcesses, folder: Path, faults: Faults) -> list[Comeback]:
    """Return what followed as soon as it has; the peer's processes take seconds more to end."""
    return ranks.wait_until(lambda: comebacks(_read(folder), faults), _PEER_TIMEOUT_S)


def _read(folder: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted(folder.glob("marks-*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _restart_often() -> dict[str, float]:
    """Return by how many percent a rank's resources grew from the fifth restart to the last, the worst rank's."""
    faults = [("exception", number % _ACTIVE) for number in range(_NUM_RESTARTS)]
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name, _group("outlast", faults, Path(name)) as ranks:
        codes = ranks.wait(2 * _RUN_TIMEOUT_S)
        marks = _read(Path(name))
        if any(codes) or comebacks(marks, faults) is None:
            raise OutlastError(f"outlast did not come back {_NUM_RESTARTS} times; exit codes {codes}\n{ranks.tails()}")
    growth = {}
    for resource in ("rss_bytes", "num_fds", "num_threads"):
        after = {mark["initial_rank"]: mark[resource] for mark in _of(marks, "stepped", _NUM_RESTARTS)}
        before = {mark["initial_rank"]: mark[resource] for mark in _of(marks, "stepped", _SETTLED)}
        growth[resource] = max(100 * (after[rank] / before[rank] - 1) for rank in after)
    return growth


def _step_quietly(repeats: int, say: Say) -> Rounds:
    """Return what steps take in the wrapper and out of it, by rounds."""
    arguments = (str(repeats + 1), str(free_port()))
    with RankProcesses(_QUIET_WORKER, *arguments, world_size=2, module=True) as ranks:
        codes = ranks.wait(_QUIET_ROUND_S * (repeats + 1))
        lines = [line for line in ranks.output(0).splitlines() if line.startswith("{")]
        if any(codes) or len(lines) != repeats + 1:
            raise OutlastError(f"{_QUIET_WORKER} ended with exit codes {codes}\n{ranks.tails()}")
    found = [json.loads(line) for line in lines]
    for number, one in enumerate(found):
        say(f"round {number}/{repeats}: {', '.join(f'{name} {value:.4g}' for name, value in one.items())}")
    return Rounds(found[1:])


def _fault_bars(ours: Sequence[Comeback], peers: Sequence[Comeback]) -> list[Bar]:
    def of(found: Sequence[Comeback], name: str, figure: Callable[[Comeback], float]) -> float | None:
        values = [figure(one) for one in found if one.name == name]
        return median(values) if values else None

    def bar(name: str, kind: str, limit: float, figure: Callable[[Comeback], float]) -> Bar:
        peer_value = of(peers, kind, figure)
        return Bar(
            name=name,
            value=of(ours, kind, figure),
            unit="s",
            bar=limit,
            peer=None if peer_value is None else _PEER,
            peer_value=peer_value,
        )

    beyond_s = [of(ours, kind, lambda one: one.beyond_s) for kind in _TIMEOUTS_S]
    peer_s = of(peers, "sleep", lambda one: one.beyond_s)
    return [
        bar("exception_s", "exception", 0.2, lambda one: one.entered_s),
        bar("sigkill_s", "kill", 0.4, lambda one: one.stepped_s),
        bar("sigkill_rank0_s", "kill 0", 0.4, lambda one: one.stepped_s),
        Bar(
            name="hang_beyond_timeout_s",
            value=max(value for value in beyond_s if value is not None),
            unit="s",
            bar=0.5,
            peer=None if peer_s is None else f"{_PEER}, sleep",
            peer_value=peer_s,
        ),
    ]


def _quiet_bars(quiet: Rounds, growth: dict[str, float]) -> list[Bar]:
    return [
        Bar(name="quiet_step_overhead_pct", value=quiet.median("wrapped_pct"), unit="%", bar=0.2),
        Bar(name="rss_growth_50_pct", value=growth["rss_bytes"], unit="%", bar=2.0),
        Bar(name="fd_growth_50_pct", value=growth["num_fds"], unit="%", bar=2.0),
        Bar(name="thread_growth_50_pct", value=growth["num_threads"], unit="%", bar=2.0),
    ]


def _notes(ours: Sequence[Comeback], peers: Sequence[Comeback], quiet: Rounds) -> list[str]:
    notes = [
        f"{_ACTIVE} ranks on gloo and {_SPARES} spare; the group's own timeout is {_GROUP_TIMEOUT_S} s, "
        f"soft timeout {SOFT_TIMEOUT_S:g} s, hard timeout {HARD_TIMEOUT_S:g} s"
    ]
    for library, found in (("outlast", ours), (_PEER, peers)):
        for name in dict.fromkeys(one.name for one in found):
            some = [one for one in found if one.name == name]
            entered_s, stepped_s = median([one.entered_s for one in some]), median([one.stepped_s for one in some])
            worst_s, lost = max(one.stepped_s for one in some), sum(one.num_lost for one in some) / len(some)
            notes.append(
                f"  {library}: {name}: back in the function after {entered_s:.3f} s, an iteration finished after "
                f"{stepped_s:.3f} s (at worst {worst_s:.3f} s), {lost:.2g} processes lost"
            )
    notes.append(
        f"steps: {quiet.median('plain_ms'):.4g} ms as they are, {quiet.median('wrapped_ms'):.4g} ms in the wrapper; "
        f"what watches a rank takes {quiet.median('watching_cpu_pct'):.3g} % of a core"
    )
    return notes


def _tell(found: Sequence[Comeback]) -> str:
    return ", ".join(f"{one.name} {one.stepped_s:.3f} s" for one in found)
