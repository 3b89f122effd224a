"""The meeting point of the ranks, and cutting a group without waiting for peers."""

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
def test_meeting_point_is_the_first_node_of_a_slurm_list(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    """All ranks of a step derive the same meeting point from the list of its nodes."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    assert meeting_point(WorkerEnv(launcher="srun")).startswith(f"tcp://{first}:")


def test_slurm_step_has_a_default_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the step's first node and a port of the job; MASTER_ADDR and MASTER_PORT take precedence."""
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


def test_cut_ends_only_its_own_connections() -> None:
    """A waiting peer detects the cut; a descriptor number that now belongs to another socket is not cut."""
    ours, peer = socket.socketpair()
    closed, other_peer = socket.socketpair()
    fds = [ours.fileno(), closed.fileno()]
    connections = tuple((fd, os.fstat(fd).st_ino) for fd in fds)
    number = closed.detach()
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


def test_cut_skips_a_descriptor_that_became_a_file() -> None:
    """A descriptor number that now belongs to a file is skipped, and the connections after it are still ended."""
    closed, ours, peer = socket.socket(), *socket.socketpair()
    connections = tuple((one.fileno(), os.fstat(one.fileno()).st_ino) for one in (closed, ours))
    number = closed.detach()
    reused = os.memfd_create("reused")
    os.dup2(reused, number)
    with ours, peer:
        Group(None, connections).cut()
        peer.settimeout(5)
        assert peer.recv(1) == b""
    os.fstat(number)
    os.close(number)
    os.close(reused)
