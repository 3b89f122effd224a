"""Where the ranks meet, and leaving without waiting for anybody."""

from __future__ import annotations

import os
import socket

import pytest

from outlast.env import WorkerEnv
from outlast.runtime.process_groups import Group, meeting_point


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack1-gpu[03-05]-ib", "rack1-gpu03-ib"),
        ("rack[1-2]n[01-02]", "rack1n01"),
    ],
)
def test_the_first_node_of_a_slurm_list_is_found(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    """All ranks of a step derive the same meeting point from the list of its nodes."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    assert meeting_point(WorkerEnv(launcher="srun")).startswith(f"tcp://{first}:")


def test_ranks_of_a_slurm_step_meet_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's first node and a port of the job's own; what is set goes before it."""
    place = WorkerEnv(launcher="srun", global_rank=1, world_size=2)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[07-09]")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert meeting_point(place) == f"tcp://gpu07:{20000 + 4711 * 7 % 12000}"
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert meeting_point(place) == f"tcp://gpu07:{20000 + (4711 * 7 + 1) % 12000}"
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert meeting_point(place) == "tcp://head:29500"
    assert meeting_point(WorkerEnv(launcher="torchrun")) == "env://"


def test_cut_ends_its_own_connections_and_no_others() -> None:
    """A waiting peer learns of the cut; a descriptor that is used for something else by now is left alone."""
    ours, peer = socket.socketpair()
    gone, other_peer = socket.socketpair()
    fds = [ours.fileno(), gone.fileno()]
    connections = tuple((fd, os.fstat(fd).st_ino) for fd in fds)
    number = gone.detach()
    os.close(number)
    replacement, replacement_peer = socket.socketpair()
    with ours, peer, other_peer, replacement, replacement_peer:
        if replacement.fileno() != number:
            os.dup2(replacement.fileno(), number)
        group = Group(None, connections)
        group.cut()
        group.cut()
        peer.settimeout(5)
        assert peer.recv(1) == b""
        replacement.send(b"x")
        replacement_peer.settimeout(5)
        assert replacement_peer.recv(1) == b"x"
        if replacement.fileno() != number:
            os.close(number)


def test_cut_passes_over_a_descriptor_that_is_no_socket_any_more() -> None:
    """A number that a file got meanwhile is left alone, and the connections after it are still ended."""
    gone, ours, peer = socket.socket(), *socket.socketpair()
    connections = tuple((one.fileno(), os.fstat(one.fileno()).st_ino) for one in (gone, ours))
    number = gone.detach()
    reused = os.memfd_create("reused")
    os.dup2(reused, number)
    with ours, peer:
        Group(None, connections).cut()
        peer.settimeout(5)
        assert peer.recv(1) == b""
    os.fstat(number)
    os.close(number)
    os.close(reused)
