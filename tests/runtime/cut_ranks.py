"""Two ranks, one of which leaves a collective that the other has not entered, or has stopped in.

Arguments: the scenario, and a folder in which the ranks signal their progress to each other.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from outlast.runtime import connections
from outlast.runtime.process_groups import Group

SCENARIO, FOLDER = sys.argv[1], Path(sys.argv[2])
PATIENCE = timedelta(seconds=600)
SIZE = 8_000_000
"""Size of a tensor that does not fit into any socket buffer."""


def signal_peer(word: str) -> None:
    (FOLDER / word).touch()


def wait_for_signal(word: str) -> None:
    end = time.monotonic() + 60
    while not (FOLDER / word).exists():
        assert time.monotonic() < end, f"nobody said {word}"
        time.sleep(0.005)


def cut_repeatedly() -> None:
    """Cut the connections as a monitor thread does, until the main thread has left its collective."""
    wait_for_signal("cut")
    while not (FOLDER / "out").exists():
        connections.cut_all()
        time.sleep(0.005)
        connections.end_lost_waits()


def leave_before_the_peer_enters() -> None:
    """Rank 0 waits in a collective, leaves it and restores its tensors; rank 1 enters afterwards."""
    dist.barrier()  # rank 1 must have connected before rank 0 cuts
    works, tensors = [], [torch.ones(1000) for _ in range(3)]
    if dist.get_rank() == 0:
        threading.Thread(target=cut_repeatedly, daemon=True).start()
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[1:]]
        signal_peer("cut")
        try:
            dist.all_reduce(tensors[0])
        except RuntimeError as error:
            print("left:", type(error).__name__, flush=True)
        signal_peer("out")
        print("at rest:", connections.wait_until_at_rest(10.0), connections.num_open(), flush=True)
        for tensor in tensors:
            tensor.fill_(100.0)
        signal_peer("restored")
        wait_for_signal("late")
    else:
        wait_for_signal("restored")
        for tensor in tensors:
            try:
                works.append(dist.all_reduce(tensor, async_op=True))
            except RuntimeError:
                print("refused", flush=True)
        for work in works:
            try:
                work.wait(timedelta(seconds=20))
            except RuntimeError:
                print("failed", flush=True)
        signal_peer("late")
    print("values:", sorted({float(value) for tensor in tensors for value in tensor}), flush=True)
    os._exit(0)  # the group is still referred to, and torch would wait for it


def leave_a_stopped_peer() -> None:
    """Rank 1 is stopped in the middle of a long message; rank 0 leaves."""
    tensor = torch.ones(SIZE)
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))
        threading.Thread(
            target=lambda: (time.sleep(0.02), signal_peer("cut"), os.kill(os.getpid(), signal.SIGSTOP))
        ).start()
    else:
        dist.all_reduce(torch.ones(1))
        threading.Thread(target=cut_repeatedly, daemon=True).start()
    try:
        while dist.get_rank() == 0:
            dist.recv(tensor, src=1)
        while True:
            dist.send(tensor, dst=0)
    except RuntimeError as error:
        print("left:", type(error).__name__, flush=True)
    signal_peer("out")
    print("at rest:", connections.wait_until_at_rest(10.0), len(connections.waiting_threads()), flush=True)
    dist.destroy_process_group()
    print("destroyed", connections.num_open(), flush=True)
    os._exit(0)


def close_with_a_stopped_peer() -> None:
    """Rank 1 is stopped in the middle of a long message in a separate group; rank 0 closes that group."""
    group = Group.open(timeout_s=PATIENCE.total_seconds())
    tensor = torch.ones(SIZE)
    dist.all_reduce(torch.ones(1), group=group.process_group)
    if dist.get_rank() == 1:
        threading.Thread(
            target=lambda: (time.sleep(0.02), signal_peer("cut"), os.kill(os.getpid(), signal.SIGSTOP))
        ).start()
        while True:
            dist.broadcast(tensor, src=1, group=group.process_group)

    def receive() -> None:
        try:
            while not group.is_cut:
                dist.broadcast(tensor, src=1, group=group.process_group)
        except RuntimeError as error:
            print("left:", type(error).__name__, flush=True)

    receiver = threading.Thread(target=receive)
    receiver.start()
    wait_for_signal("cut")
    group.cut()
    receiver.join()
    group.close()
    print("closed", len(connections.waiting_threads()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    noting = connections.Noting()
    noting.start()
    dist.init_process_group("gloo", timeout=PATIENCE)
    {"late": leave_before_the_peer_enters, "stopped": leave_a_stopped_peer, "closed": close_with_a_stopped_peer}[
        SCENARIO
    ]()
