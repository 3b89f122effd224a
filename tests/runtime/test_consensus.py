"""All ranks decide the same at the same step, with one reduction."""

from __future__ import annotations

import json
import re

import pytest

from outlast import env
from outlast.runtime.consensus import Consensus
from outlast.runtime.run_key import RunKey
from outlast.testing import RankProcesses

PATIENCE_S = 60.0


def test_one_rank_needs_no_process_group() -> None:
    """With one rank the decision equals the request, without torch.distributed."""
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
from outlast.runtime.process_groups import connect_world

place = env.read_worker()
world = connect_world(place)
consensus = Consensus(["stop", "save"], world_size=place.world_size)
"""


def _start(body: str, world_size: int) -> RankProcesses:
    return RankProcesses(_SCRIPT + body, world_size=world_size, code=True)


@pytest.mark.slow
@pytest.mark.process
def test_request_of_a_rank_is_read_by_all_at_the_same_step() -> None:
    """Every rank reads a request of one rank at the end of the step at whose begin it was made, and at no other."""
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
    with _start(body, 4) as ranks:
        assert ranks.wait(PATIENCE_S) == [0] * 4, ranks.tails()
        answers = [json.loads(ranks.next_line(rank, 0.0, containing="[{")) for rank in range(4)]
    expected = [{"stop": 0, "save": 0} for _ in range(12)]
    for rank_number in range(4):
        expected[2 + rank_number]["stop"] = 10 + rank_number
    expected[9]["save"] = 3
    assert answers == [expected] * 4


@pytest.mark.slow
@pytest.mark.process
def test_rank_without_the_run_key_is_identified() -> None:
    """The rank reports why it does not connect; the others exit as well, long before the timeout of the rounds."""
    key = RunKey.of_run_id("run").as_variable()
    environments = [{env.RUN_KEY: None if rank == 2 else key} for rank in range(4)]
    with RankProcesses(_SCRIPT, world_size=4, code=True, environments=environments) as ranks:
        assert ranks.wait(PATIENCE_S) == [1] * 4, ranks.tails()
        for other in (0, 1, 3):
            end = "refused|reset|closed the conn|likely closed"
            reason = rf"RendezvousError: the ranks could not connect \((rank 2: only|.*({end}))"
            assert re.search(reason, ranks.output(other))
        assert "ConfigError: only another process of this run has OUTLAST_RUN_KEY" in ranks.output(2)
        assert key not in ranks.tails()


@pytest.mark.process
def test_rank_exits_without_waiting_for_a_hung_peer() -> None:
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
    with _start(body, 2) as ranks:
        assert ranks.next_line(0, PATIENCE_S) == "ready"
        ranks.stop(0)
        assert ranks.wait(PATIENCE_S, ranks=[1]) == [7]  # the peer's own timeout is minutes
        assert ranks.running(0)


@pytest.mark.process
def test_lost_peer_raises_peer_lost() -> None:
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
    with _start(body, 2) as ranks:
        assert ranks.wait(PATIENCE_S, ranks=[1]) == [5], ranks.tails()
        assert "lost: a peer exited" in ranks.output(1)


@pytest.mark.process
def test_close_does_not_wait_for_a_reduction() -> None:
    """A rank that closes returns at once, at any moment of a reduction in which its peer takes part."""
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
    with _start(body, 2) as ranks:
        assert ranks.wait(PATIENCE_S) == [0, 0], ranks.tails()
        assert [ranks.output(rank) for rank in range(2)] == ["through\n"] * 2
