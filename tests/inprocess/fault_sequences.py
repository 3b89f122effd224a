"""Seeded random sequences of faults, each played out by real ranks that restart in process.

Run as a script with seeds as arguments: it imports torch once, forks the ranks of one sequence after another, and
prints a line of JSON for each. The first line is that of a sequence without a fault: what the weights must be. With
``coordinator`` as the first argument the ranks report to the coordinator, over the relays of two nodes, as under
``outlast run``; it is lost at random moments, in the middle of an order, too.
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
"""Within this a sequence must have ended; undisturbed it takes one second, and with all its timeouts about fifteen."""
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
    """Active rank; of ``outside`` the initial one, so that spares are met, too."""
    restart_count: int = 0
    step: int = 0
    after_s: float = 0.0
    """Seconds since the first rank was in the function, for a fault from outside."""


def draw(seed: int) -> tuple[Event, ...]:
    """Return a sequence: always at least one fault in the function or from outside."""
    rng = random.Random(seed)
    events: list[Event] = []
    restart_count = 0
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind = rng.choice(("exception",) * 3 + ("kill",) * 3 + ("sleep",) * 2 + ("stop", "gil"))
        luck = rng.random()
        if events and luck < 0.25:  # two at once
            last = events[-1]
            kind = rng.choice(("kill", "stop")) if last.where == "outside" else kind
            events.append(replace(last, kind=kind, rank=(last.rank + rng.randrange(1, ACTIVE)) % ACTIVE))
        elif events and luck < 0.5:  # during the restart that the last one brought, in a plug-in
            where = rng.choice(("finalize", "health_check", "initialize"))
            at = restart_count if where == "initialize" else max(0, restart_count - 1)
            events.append(Event(kind=kind, where=where, rank=rng.randrange(ACTIVE), restart_count=at))
            restart_count += where == "initialize"
        elif luck > 0.85:
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
    """Return when the coordinator of a sequence is lost, and when another one takes over."""
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
    """What the function or a plug-in raises on purpose."""


def strike(kind: str) -> None:
    """Fail in one way; only an exception comes back from here."""
    if kind == "exception":
        raise InjectedFault("a fault on purpose")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "gil":
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)  # for ever, with the interpreter's lock held; no signal ends it
    else:
        time.sleep(3600)


class Script:
    """What one rank does."""

    def __init__(self, events: tuple[Event, ...], entered: Path) -> None:
        self._entered = entered
        self._events = [event for event in events if event.where != "outside"]

    def meet(self, where: str, rank: int | None, restart_count: int, step: int = 0) -> None:
        """Have the fault that the sequence has for this place, once."""
        for event in self._events:
            if (event.where, event.rank, event.restart_count, event.step) == (where, rank, restart_count, step):
                self._events.remove(event)
                strike(event.kind)

    def plugin(self, where: str) -> Any:
        """Return a plug-in that meets its faults."""
        return lambda state: self.meet(where, state.rank, state.iteration)

    def initialize(self, state: State) -> None:
        """Check the limits, then meet what is to be met."""
        RetryController(max_iterations=8)(state)
        self.meet("initialize", state.rank, state.iteration)

    def train(self, handle: Handle) -> str:
        """Return what the weights are in the end."""
        self._entered.touch()
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
        rank = dist.get_rank()
        weights = torch.zeros(1 << 10)
        for step in range(NUM_STEPS):
            gradient = torch.linspace(0.1, 1.7, 1 << 10) * (rank + 1) / (step + 3)
            self.meet("step", rank, handle.iteration, step)
            dist.all_reduce(gradient)
            weights += gradient / 7
            time.sleep(0.002)
        dist.destroy_process_group()
        return weights.numpy().tobytes().hex()[::61]


def be_rank(initial_rank: int, port: int, events: tuple[Event, ...], folder: Path, environment: dict[str, str]) -> None:
    """Be one rank of a sequence, and write down how it ended; never returns."""
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


def play(seed: int | None, nodes: RelayingNodes | None = None, cycle: int = 0) -> dict[str, Any]:
    """Play one sequence; ``None``: the one without a fault."""
    events = () if seed is None else draw(seed)
    relays = [""]
    if nodes is not None:
        nodes.tell(f"cycle {cycle}")
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
                    be_rank(initial_rank, port, events, folder, environment)
                pids[initial_rank] = pid
            outside = [event for event in events if event.where == "outside"]
            running = watch(pids, outside, begin_s, folder / "entered", nodes)
        finally:
            codes = end(pids)
        ends = {
            rank: json.loads(path.read_text())
            for rank in range(WORLD_SIZE)
            if (path := folder / f"{rank}.json").exists()
        }
        found = judge(ends, codes, running)
        logs = (
            {}
            if found["verdict"] in ("completed", "aborted")
            else {rank: (folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in range(WORLD_SIZE)}
        )
    told = [{name: value for name, value in asdict(event).items() if value or name == "rank"} for event in events]
    return {"seed": seed, "events": told, "seconds": round(clock.now_s() - begin_s, 2), **found, "logs": logs}


def watch(
    pids: dict[int, int], events: list[Event], begin_s: float, entered: Path, nodes: RelayingNodes | None
) -> list[int]:
    """Wait for the ranks, strike some from outside; return who had to be waited for too long."""
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
                    nodes.tell(event.kind)
                elif event.rank in watched:
                    signal.pidfd_send_signal(watched[event.rank], getattr(signal, f"SIG{event.kind.upper()}"))
                    # A stopped spare is nobody's hindrance, so nobody may end it.
                    stopped |= {event.rank} if event.kind == "stop" else set()
            ready, _, _ = select.select(list(watched.values()), [], [], 0.01 if due else 1.0)
            for rank in [rank for rank, fd in watched.items() if fd in ready]:
                os.close(watched.pop(rank))
        return []
    finally:
        for fd in watched.values():
            os.close(fd)


def end(pids: dict[int, int]) -> dict[int, int]:
    """End who is left, and return all exit codes."""
    codes = {}
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes


def judge(ends: dict[int, dict[str, Any]], codes: dict[int, int], running: list[int]) -> dict[str, Any]:
    """Return how a sequence ended: ``completed``, ``aborted``, or what must not be."""
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
        decision = "aborted"  # nobody is left who could say so
    return {
        "verdict": decision,
        "values": values,
        "ends": {str(rank): one["end"] for rank, one in ends.items()},
        "why": sorted({one["why"] for one in ends.values() if "why" in one}),
        "codes": list(codes.values()),
        "running": running,
    }


def main() -> None:
    """Play the sequences of the seeds that are given."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    seeds, nodes = sys.argv[1:], None
    if seeds[:1] == ["coordinator"]:
        seeds, nodes = seeds[1:], RelayingNodes(2)
    with nodes or contextlib.nullcontext():
        for cycle, seed in enumerate((None, *map(int, seeds))):
            print(json.dumps(play(seed, nodes, cycle)), flush=True)


if __name__ == "__main__":
    main()
