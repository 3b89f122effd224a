"""All ranks decide the same at the same step, for one reduction."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from outlast.runtime.consensus import Consensus


def test_one_rank_needs_no_process_group() -> None:
    """With one rank the answer is what was asked, without torch.distributed."""
    consensus = Consensus(["stop", "save"])
    consensus.begin({"stop": 3})
    assert consensus.finish() == {"stop": 3, "save": 0}
    consensus.begin({})
    assert consensus.finish() == {"stop": 0, "save": 0}
    consensus.close()
    consensus.close()


_SCRIPT = """
import json, os, sys
from outlast import env
from outlast.errors import PeerLost
from outlast.runtime.consensus import Consensus
from outlast.runtime.group import connect_world

place = env.read_worker()
world = connect_world(place)
consensus = Consensus(["stop", "save"], world_size=place.world_size)
"""


def _start(body: str, world_size: int, tmp_path: os.PathLike[str]) -> list[subprocess.Popen[str]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", _SCRIPT + body],
                env=environment,
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    return ranks


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()
        for stream in (rank.stdout, rank.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.process
def test_any_ranks_wish_is_seen_by_all_at_the_same_step(tmp_path: os.PathLike[str]) -> None:
    """What one rank asks for at a step's begin, every rank reads at that step's end, and not at another."""
    body = """
answers = []
for step in range(12):
    asked = {}
    if step == 2 + place.global_rank:
        asked["stop"] = 10 + place.global_rank
    if step == 9:
        asked["save"] = place.global_rank
    consensus.begin(asked)
    answers.append(consensus.finish())
print(json.dumps(answers))
consensus.close()
"""
    ranks = _start(body, 4, tmp_path)
    try:
        answers = []
        for rank in ranks:
            out, err = rank.communicate(timeout=40)
            assert rank.returncode == 0, err
            answers.append(json.loads(out))
    finally:
        _end(ranks)
    expected = [{"stop": 0, "save": 0} for _ in range(12)]
    for rank_number in range(4):
        expected[2 + rank_number]["stop"] = 10 + rank_number
    expected[9]["save"] = 3
    assert answers == [expected] * 4


@pytest.mark.process
def test_a_rank_that_leaves_waits_for_no_hung_peer(tmp_path: os.PathLike[str]) -> None:
    """With a reduction under way and a stopped peer, a rank that cuts its groups exits at once."""
    body = """
consensus.begin({}); consensus.finish()
print("ready", flush=True)
if place.global_rank == 0:
    import signal
    signal.pause()
import torch
consensus.begin({})
import torch.distributed as dist
work = dist.all_reduce(torch.ones(1000), async_op=True)
assert not work.is_completed()
consensus.close()
world.cut()
sys.exit(7)
"""
    ranks = _start(body, 2, tmp_path)
    try:
        assert ranks[1].stdout is not None
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "ready\n"
        ranks[0].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        assert ranks[1].wait(timeout=30) == 7
        assert time.monotonic() - start < 20
        assert ranks[0].poll() is None
    finally:
        _end(ranks)


@pytest.mark.process
def test_a_lost_peer_is_said_to_be_lost(tmp_path: os.PathLike[str]) -> None:
    """When a peer dies, finish() raises PeerLost instead of deciding alone."""
    body = """
consensus.begin({}); consensus.finish()
if place.global_rank == 0:
    os._exit(0)
try:
    for _ in range(3):
        consensus.begin({})
        consensus.finish()
except PeerLost as error:
    print("lost:", error, flush=True)
    os._exit(5)
"""
    ranks = _start(body, 2, tmp_path)
    try:
        out, err = ranks[1].communicate(timeout=30)
        assert ranks[1].returncode == 5, err
        assert "lost: a peer left" in out
    finally:
        _end(ranks)


@pytest.mark.process
def test_a_rank_that_leaves_waits_for_no_reduction_under_way(tmp_path: os.PathLike[str]) -> None:
    """At whatever moment of a reduction that its peer takes part in, a rank that closes is through at once."""
    body = """
import torch.distributed as dist
consensus.close()
for number in range(60):
    consensus = Consensus(["stop", "save"], world_size=place.world_size)
    consensus.begin({}); consensus.finish()
    dist.barrier()
    consensus.begin({})
    if place.global_rank == 1:
        for _ in range(1000 * (number % 9)):
            pass
        consensus.close()
    dist.barrier()
    consensus.close()
    dist.barrier()
print("through")
"""
    ranks = _start(body, 2, tmp_path)
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=18)
            assert rank.returncode == 0, err
            assert out == "through\n"
    finally:
        _end(ranks)
