"""A process of a run: claims a directory, resumes, and saves until it is refused or asked to exit.

Writes one line of JSON for each event. A line on its standard input ends the process after the save in progress.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import ExitStack

import torch
from lanes import Lanes, flat_state

from outlast.checkpoint.dcp.directory import StoreRecords
from outlast.checkpoint.dcp.reader import read_rank
from outlast.checkpoint.directory import DirectoryRefused
from outlast.checkpoint.state import decode
from outlast.checkpoint.verification import VerifiedFiles
from outlast.errors import CheckpointError
from outlast.runtime.injection import armed
from outlast.runtime.lease import FolderRecords

REFUSED = 75


def write_line(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def value_of(lanes: Lanes, iteration: int) -> float:
    """Return the value that a checkpoint has. Raises: CheckpointError, when the checkpoint is incomplete."""
    found = read_rank(VerifiedFiles(lanes.directory, lanes.directory.manifest(iteration)), 0)
    saved = decode(found.tree, found.tensors.__getitem__)["state"]
    value = float(saved["w"][0])
    assert torch.equal(saved["w"], torch.full((4096,), value))
    assert torch.equal(saved["v"], torch.full((4096,), -value)), "a mix"
    return value


def main(url: str, name: str, token: str, keep: str, point: str, at: str, times: str = "1") -> int:
    """Run the process.

    Args:
        url: The directory.
        name: A number, which is part of every saved value and of the machine's name.
        token: Token of the attempts.
        keep: Number of checkpoints to keep.
        point: Injection point where the process stops itself by a signal; empty = none.
        at: Number of passes of the injection point before the stop.
        times: Number of saves of each iteration; each one replaces the one before.
    """
    FolderRecords.renew_s, StoreRecords.renew_s = 0.1, 0.4
    passes = int(at)

    def stop(**facts: object) -> None:
        nonlocal passes
        passes -= 1
        if passes == -1:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # only this thread stops

    is_ending = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), is_ending.set()), daemon=True).start()
    with ExitStack() as stack:
        if point:
            stack.enter_context(armed(point, stop))
        lanes = stack.enter_context(Lanes(url, 1, token=token, leased=f"machine-{name}", most_recent_k=int(keep)))
        try:
            lanes.claim.acquire()
        except DirectoryRefused as error:
            write_line(refused=str(error))
            return REFUSED
        found = dict[int, float]()
        for iteration in lanes.directory.checkpoints():
            try:
                found[iteration] = value_of(lanes, iteration)
            except CheckpointError as error:
                write_line(torn=iteration, why=str(error))
        write_line(found=sorted(found.items()))
        lanes.resume(found)
        iteration, num_saves = max(found, default=0), 0
        while not is_ending.is_set():
            num_replaced = num_saves % int(times)
            num_saves, iteration = num_saves + 1, iteration + (num_replaced == 0)
            value = int(name) * 1000 + iteration + num_replaced / 8
            state = {"w": torch.full((4096,), value), "v": torch.full((4096,), -value)}
            lanes.forget_commit(iteration)
            (error,) = lanes.save([flat_state(state)], iteration)
            if error is None:
                write_line(committed=iteration, value=value)
            elif isinstance(error, DirectoryRefused):
                write_line(refused=str(error))
                return REFUSED
            else:
                write_line(failed=iteration, why=str(error))
    write_line(ended=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
