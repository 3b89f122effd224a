"""Seeded random sequences of faults, each injected into real ranks that restart in process.

Run as a script with seeds as arguments: imports torch once, forks the ranks of one sequence after another, and
prints a line of JSON for each sequence. The first line is the result of a sequence without faults, which has the
expected weights. With ``coordinator`` as the first argument the ranks report to the coordinator through the relays
of two nodes, as under ``outlast run``; the coordinator is lost at random times, including in the middle of an order.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from relaying_nodes import RelayingNodes

from outlast import InProcessRestartConfig, clock
from outlast.errors import RestartAbort
from outlast.inprocess import Handle, RankLeft, RetryController, State, Wrapper
from outlast.inprocess import rank as _loaded_before_forks  # noqa: F401
from outlast.testing.ranks import free_port

ACTIVE, SPARES = 4, 2
WORLD_SIZE = ACTIVE + SPARES
NUM_STEPS = 30
LIMIT_S = 65.0
"""Limit for a sequence; a sequence without faults takes one second, and one with all timeouts about fifteen."""
CONFIG = InProcessRestartConfig(
    active_world_size=ACTIVE,
    granularity="rank",
    soft_timeout=1.0,
    hard_timeout=2.0,
    heartbeat_interval=0.5,
    heartbeat_timeout=3.0,
    barrier_timeout=6.0,
    completion_timeout=6.0,
    monitor_thread_interval=0.2,
    monitor_process_interval=0.2,
    progress_watchdog_interval=0.2,
    last_call_wait=0.3,
    termination_grace_time=0.2,
    max_iterations=10,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fault."""

    kind: str
    """``exception``, ``kill``, ``stop``, ``gil``, ``sleep``."""
    where: str
    """``step``, ``initialize``, ``finalize``, ``health_check``, or ``outside``: from another process, at a time."""
    rank: int
    """Active rank; for ``outside`` the initial rank, so that spares are included."""
    restart_count: int = 0
    step: int = 0
    after_s: float = 0.0
    """Seconds after the first rank has entered the function, for a fault from outside."""


def draw(seed: int) -> tuple[Event, ...]:
    """Return a sequence, which has at least one fault in the function or from outside."""
    rng = random.Random(seed)
    events: list[Event] = []
    restart_count = 0
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind = rng.choice(("exception",) * 3 + ("kill",) * 3 + ("sleep",) * 2 + ("stop", "gil"))
        chance = rng.random()
        if events and chance < 0.25:  # two faults at once
            last = events[-1]
            kind = rng.choice(("kill", "stop")) if last.where == "outside" else kind
            events.append(replace(last, kind=kind, rank=(last.rank + rng.randrange(1, ACTIVE)) % ACTIVE))
        elif events and chance < 0.5:  # during the restart after the last fault, in a plug-in
            where = rng.choice(("finalize", "health_check", "initialize"))
            at = restart_count if where == "initialize" else max(0, restart_count - 1)
            events.append(Event(kind=kind, where=where, rank=rng.randrange(ACTIVE), restart_count=at))
            restart_count += where == "initialize"
        elif chance > 0.85:
            rank, after_s = rng.randrange(WORLD_SIZE), rng.uniform(0.0, 0.8)
            kind = rng.choice(("kill", "stop"))
            events.append(Event(kind=kind, where="outside", rank=rank, after_s=round(after_s, 3)))
        else:
            step = rng.randrange(NUM_STEPS)
            events.append(
                Event(kind=kind, where="step", rank=rng.randrange(ACTIVE), restart_count=restart_count, step=step)
            )
            restart_count += 1
    return tuple(events)


def draw_losses(seed: int) -> tuple[Event, ...]:
    """Return the times at which the coordinator of a sequence is lost and a successor takes over."""
    rng = random.Random(f"coordinator {seed}")
    events: list[Event] = []
    after_s = 0.0
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        after_s += rng.uniform(0.0, 0.6)
        if rng.random() < 0.4:
            events.append(Event(kind="tear", where="outside", rank=-1, after_s=round(after_s, 3)))
        else:
            events.append(Event(kind="lose", where="outside", rank=-1, after_s=round(after_s, 3)))
            after_s += rng.uniform(0.0, 0.5)
            events.append(Event(kind="adopt", where="outside", rank=-1, after_s=round(after_s, 3)))
    return tuple(events)


class InjectedFault(Exception):
    """Raised by the function or a plug-in as an injected fault."""


def inject(kind: str) -> None:
    """Inject a fault of a kind; only an exception returns to the caller."""
    if kind == "exception":
        raise InjectedFault("a fault on purpose")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "gil":
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)  # never returns, with the interpreter's lock held; no signal ends it
    else:
        time.sleep(3600)


class Script:
    """The faults of one rank and its function."""

    def __init__(self, events: tuple[Event, ...], entered: Path) -> None:
        self._entered = entered
        self._events = [event for event in events if event.where != "outside"]

    def inject_due(self, where: str, rank: int | None, restart_count: int, step: int = 0) -> None:
        """Inject the fault of the sequence at this place, once."""
        for event in self._events:
            if (event.where, event.rank, event.restart_count, event.step) == (where, rank, restart_count, step):
                self._events.remove(event)
                inject(event.kind)

    def plugin(self, where: str) -> Any:
        """Return a plug-in that injects its faults."""
        return lambda state: self.inject_due(where, state.rank, state.iteration)

    def initialize(self, state: State) -> None:
        """Check the limits, then inject the fault that is due."""
        RetryController(max_iterations=8)(state)
        self.inject_due("initialize", state.rank, state.iteration)

    def train(self, handle: Handle) -> str:
        """Return the final weights."""
        self._entered.touch()
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
        rank = dist.get_rank()
        weights = torch.zeros(1 << 10)
        for step in range(NUM_STEPS):
            gradient = torch.linspace(0.1, 1.7, 1 << 10) * (rank + 1) / (step + 3)
            self.inject_due("step", rank, handle.iteration, step)
            dist.all_reduce(gradient)
            weights += gradient / 7
            time.sleep(0.002)
        dist.destroy_process_group()
        return weights.numpy().tobytes().hex()[::61]


def run_rank(
    initial_rank: int, port: int, events: tuple[Event, ...], folder: Path, environment: dict[str, str]
) -> None:
    """Run one rank of a sequence and write its outcome to a file; never returns."""
    code = 1
    try:
        with (folder / f"{initial_rank}.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        place = {"RANK": initial_rank, "LOCAL_RANK": initial_rank, "WORLD_SIZE": WORLD_SIZE, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", **environment)
        script = Script(events, folder / "entered")
        wrapper = Wrapper(
            CONFIG,
            initialize=script.initialize,
            finalize=script.plugin("finalize"),
            health_check=script.plugin("health_check"),
        )
        end: dict[str, Any]
        try:
            value = wrapper(script.train)()
            end = {"end": "spare" if value is None else "value", "value": value}
        except RestartAbort as error:
            end = {"end": "abort", "counts": error.counts, "why": str(error)}
        except (RankLeft, InjectedFault) as error:
            end = {"end": "left", "why": str(error)}
        (folder / f"{initial_rank}.json").write_text(json.dumps(end))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_sequence(seed: int | None, nodes: RelayingNodes | None = None, cycle: int = 0) -> dict[str, Any]:
    """Run one sequence; ``None``: the one without faults."""
    events = () if seed is None else draw(seed)
    relays = [""]
    if nodes is not None:
        nodes.send_command(f"cycle {cycle}")
        relays = nodes.addresses
        events += () if seed is None else draw_losses(seed)
    begin_s = clock.now_s()
    with TemporaryDirectory(prefix="outlast-faults-") as name:
        folder, port = Path(name), free_port()
        pids: dict[int, int] = {}
        try:
            for initial_rank in range(WORLD_SIZE):
                pid = os.fork()
                if pid == 0:
                    relay = relays[initial_rank * len(relays) // WORLD_SIZE]
                    environment = {"OUTLAST_RELAY": relay, "OUTLAST_CYCLE": str(cycle)}
                    run_rank(initial_rank, port, events, folder, environment)
                pids[initial_rank] = pid
            outside = [event for event in events if event.where == "outside"]
            running = supervise(pids, outside, begin_s, folder / "entered", nodes)
        finally:
            codes = end(pids)
        ends = {
            rank: json.loads(path.read_text())
            for rank in range(WORLD_SIZE)
            if (path := folder / f"{rank}.json").exists()
        }
        found = classify(ends, codes, running)
        logs = (
            {}
            if found["verdict"] in ("completed", "aborted")
            else {rank: (folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in range(WORLD_SIZE)}
        )
    event_dicts = [
        {name: value for name, value in asdict(event).items() if value or name == "rank"} for event in events
    ]
    return {"seed": seed, "events": event_dicts, "seconds": round(clock.now_s() - begin_s, 2), **found, "logs": logs}


def supervise(
    pids: dict[int, int], events: list[Event], begin_s: float, entered: Path, nodes: RelayingNodes | None
) -> list[int]:
    """Wait for the ranks and inject the faults from outside; return the ranks that exceeded the limit."""
    due = sorted(events, key=lambda event: event.after_s)
    watched = {rank: os.pidfd_open(pid) for rank, pid in pids.items()}
    stopped: set[int] = set()
    entered_s: float | None = None
    try:
        while set(watched) - stopped:
            now_s = clock.now_s()
            if now_s > begin_s + LIMIT_S:
                return sorted(set(watched) - stopped)
            if entered_s is None and entered.exists():
                entered_s = now_s
            while due and entered_s is not None and entered_s + due[0].after_s <= now_s:
                event = due.pop(0)
                if event.rank < 0:
                    assert nodes is not None
                    nodes.send_command(event.kind)
                elif event.rank in watched:
                    signal.pidfd_send_signal(watched[event.rank], getattr(signal, f"SIG{event.kind.upper()}"))
                    # A stopped spare blocks no other rank, so it is not ended.
                    stopped |= {event.rank} if event.kind == "stop" else set()
            ready, _, _ = select.select(list(watched.values()), [], [], 0.01 if due else 1.0)
            for rank in [rank for rank, fd in watched.items() if fd in ready]:
                os.close(watched.pop(rank))
        return []
    finally:
        for fd in watched.values():
            os.close(fd)


def end(pids: dict[int, int]) -> dict[int, int]:
    """Kill the remaining ranks, and return all exit codes."""
    codes = {}
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes


def classify(ends: dict[int, dict[str, Any]], codes: dict[int, int], running: list[int]) -> dict[str, Any]:
    """Return the outcome of a sequence: ``completed``, ``aborted``, or a failure."""
    kinds = [one["end"] for one in ends.values()]
    values = sorted({one["value"] for one in ends.values() if one["end"] == "value"})
    decision = "mixed"
    if running:
        decision = "hung"
    elif any(code not in (0, -signal.SIGKILL, -signal.SIGTERM) for code in codes.values()):
        decision = "crashed"
    elif values and "abort" not in kinds:
        decision = "completed" if len(values) == 1 else "torn"
    elif "abort" in kinds and not values:
        has_counts = all(one["counts"].keys() >= {"restarts", "faults"} for one in ends.values() if "counts" in one)
        decision = "aborted" if has_counts else "uncounted"
    elif not ends or set(kinds) == {"left"}:
        decision = "aborted"  # no rank is left that could report an abort
    return {
        "verdict": decision,
        "values": values,
        "ends": {str(rank): one["end"] for rank, one in ends.items()},
        "why": sorted({one["why"] for one in ends.values() if "why" in one}),
        "codes": list(codes.values()),
        "running": running,
    }


def main() -> None:
    """Run the sequences of the given seeds."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    seeds, nodes = sys.argv[1:], None
    if seeds[:1] == ["coordinator"]:
        seeds, nodes = seeds[1:], RelayingNodes(2)
    with nodes or contextlib.nullcontext():
        for cycle, seed in enumerate((None, *map(int, seeds))):
            print(json.dumps(run_sequence(seed, nodes, cycle)), flush=True)


if __name__ == "__main__":
    main()
