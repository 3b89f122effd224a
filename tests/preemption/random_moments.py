"""Shutdown requests at random moments, with real ranks that resume where the last ones exited.

Run as a script with a folder, a number of moments, a seed and, optionally, the number of ranks: the script imports
torch once, forks the ranks of one moment after another, and prints a line of JSON for each. All moments share one
checkpoint directory, so every start loads the checkpoint of the previous one.
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import outlast
from outlast import clock
from outlast.checkpoint import CheckpointManager as _loaded_before_forks  # noqa: F401
from outlast.checkpoint.catalogue.listing import look_into, verify
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.runtime.processes import die_with_parent
from outlast.session import session as _too  # noqa: F401
from outlast.testing.ranks import free_port

LIMIT_S = 120.0
"""All ranks must exit within this time; usually they take about a second."""
NUM_NUMBERS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The ranks that get a signal, and when."""

    ranks: tuple[int, ...]
    """The ranks that get SIGTERM, one after the other."""
    after_s: float
    """Seconds after the last rank listens."""
    apart_s: float
    """Seconds between the signals."""
    in_c_s: float
    """Duration of the single C call of each step."""


def draw(rng: random.Random, world_size: int) -> Moment:
    """Return a moment: in the restore, in the first steps, in one of the regular saves, or between them."""
    who = rng.choice(("one", "one", "one", "two", "all"))
    count = {"one": 1, "two": min(2, world_size), "all": world_size}[who]
    return Moment(
        ranks=tuple(rng.sample(range(world_size), count)),
        after_s=round(rng.uniform(0, 0.8), 4),
        apart_s=round(rng.choice((0, rng.uniform(0, 0.05))), 4),
        in_c_s=rng.choice((0.0, 0.0005, 0.005, 0.03)),
    )


_libc = ctypes.CDLL(None)
_mutex = ctypes.create_string_buffer(64)
_libc.pthread_mutex_lock(_mutex)


def block_in_c(seconds: float) -> None:
    """Block in one C call; unlike a sleep it does not return on a signal."""
    until_s = time.monotonic() + seconds
    until = (ctypes.c_long * 2)(int(until_s), int(until_s % 1 * 1e9))
    _libc.pthread_mutex_clocklock(_mutex, time.CLOCK_MONOTONIC, until)


def train(folder: Path, moment: Moment, number: int, listens: int) -> None:
    """Train until a shutdown is requested; the weights depend on the iteration only."""
    run = outlast.init(
        outlast.Config(
            checkpoint=outlast.CheckpointConfig(
                directory=str(folder / "ckpt"), save_interval=7, most_recent_k=2, resume_from_other_run=True
            ),
            preemption=outlast.PreemptionConfig(shutdown_timeout=100.0),
            run_dir=str(folder / f"run-{number}"),
        )
    )
    os.write(listens, b"x")
    state = {"weights": torch.zeros(NUM_NUMBERS), "steps": torch.zeros(1)}
    for iteration in run.steps(state, total=1_000_000_000):
        expected = float(iteration)
        if iteration and not (state["steps"].item() == iteration and bool((state["weights"] == expected).all())):
            raise AssertionError(f"restored {state['steps'].item()} as iteration {iteration}")
        if moment.in_c_s:
            block_in_c(moment.in_c_s)
        state["steps"] += 1
        state["weights"].fill_(float(iteration + 1))


def run_rank(
    parent: int, rank: int, world_size: int, port: int, folder: Path, moment: Moment, number: int, listens: int
) -> None:
    """Run one rank; never returns."""
    code = 1
    try:
        die_with_parent(parent)
        os.setpgid(0, 0)
        with (folder / f"{rank}.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        os.environ.update(OUTLAST_RUN_ID="moments", OUTLAST_JOB=f"job-{number}")
        train(folder, moment, number, listens)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:  # noqa: BLE001  a fork must not continue the caller's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def play(number: int, moment: Moment, folder: Path, world_size: int, expected: int) -> dict[str, Any]:
    """Play one moment, and return its record."""
    begin_s, port = clock.now_s(), free_port()
    reader, writer = os.pipe()
    signalled_ns = 0
    parent, ranks = os.getpid(), {}
    for rank in range(world_size):
        if (pid := os.fork()) == 0:
            run_rank(parent, rank, world_size, port, folder, moment, number, writer)
        ranks[rank] = (pid, os.pidfd_open(pid))
    os.close(writer)
    try:
        num_ready = 0
        while num_ready < world_size and select.select([reader], [], [], LIMIT_S)[0] and (data := os.read(reader, 16)):
            num_ready += len(data)
        time.sleep(moment.after_s)  # the moment itself
        signalled_ns = clock.now_ns()
        for rank in moment.ranks:
            signal.pidfd_send_signal(ranks[rank][1], signal.SIGTERM)
            time.sleep(moment.apart_s)
        until_s = clock.now_s() + LIMIT_S
        waited_for = {fd for _, fd in ranks.values()}
        while waited_for and (left_s := until_s - clock.now_s()) > 0:
            waited_for -= set(select.select(list(waited_for), [], [], left_s)[0])
        took_s = clock.now_s() - begin_s
    finally:
        os.close(reader)
        codes = []
        for pid, fd in ranks.values():
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(fd)
    found = judge(folder, number, codes, expected, signalled_ns)
    return {"moment": number, **asdict(moment), "codes": codes, "hung": bool(waited_for), "took_s": took_s, **found}


def judge(folder: Path, number: int, codes: list[int], expected: int, signalled_ns: int) -> dict[str, Any]:
    """Return the last iteration of the run, and the violated promises."""
    events = list(read(folder / f"run-{number}"))
    ends = {event.iteration for event in events if event.kind == EventKind.SESSION_ENDED}
    restored = {event.iteration for event in events if event.kind == EventKind.RESTORED}
    notices = [event.mono_ns for event in events if event.kind == EventKind.NOTICE]
    problems_found = []
    if set(codes) != {75}:
        problems_found.append(f"exit codes {codes}")
    if len(ends) != 1:
        problems_found.append(f"ranks ended at iterations {ends}")
    if expected and restored != {expected}:
        problems_found.append(f"restored {restored}, not {expected}")
    for checkpoint in look_into(str(folder / "ckpt")).found:
        verified = verify(checkpoint, num_threads=1).entry
        if not verified.valid or verified.problems:
            problems_found.append(f"checkpoint {verified.iteration}: {verified.problems}")
        ends.discard(verified.iteration)
    if ends:
        problems_found.append(f"there is no generation of {ends}")
    last = max((event.iteration or 0 for event in events if event.kind == EventKind.SESSION_ENDED), default=0)
    seen_ms = (min(notices) - signalled_ns) / 1e6 if notices else None
    return {"iteration": last, "noticed_after_ms": seen_ms, "wrong": problems_found}


def main() -> None:
    """Play the moments; exit with 1 at the first violated promise."""
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    world_size = int(sys.argv[4]) if len(sys.argv) > 4 else 4
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    rng, iteration = random.Random(seed), 0
    for number in range(count):
        found = play(number, draw(rng, world_size), folder, world_size, iteration)
        iteration = found["iteration"]
        print(json.dumps(found), flush=True)
        if found["wrong"] or found["hung"]:
            logs = {path.name: path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("*.log"))}
            print(json.dumps({"logs": logs}), flush=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
