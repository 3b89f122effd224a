"""With process_group_interval a session checks regularly that all ranks respond, and identifies those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import PATIENCE_S, Ranks

from outlast.incidents import EventKind, IncidentKind
from outlast.journal import read

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
import outlast
import outlast.config
from outlast.health import process_group

folder, what = sys.argv[1], sys.argv[2]
health = outlast.config.HealthConfig(process_group_interval=2, process_group_timeout=float(sys.argv[3]))
config = outlast.Config(run_dir=folder, health=health)
dist.init_process_group("gloo")
training = dist.new_group([0, 1])
try:
    with outlast.init(config) as run:
        for iteration in run.steps({}, total=8):
            if iteration == 3 and run.global_rank == 2 and what == "stopped":
                print("stops", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            if iteration == 3 and run.global_rank == 2 and what == "wrong":
                right = process_group.expected_answer
                process_group.expected_answer = lambda who, number: right(who, number) + (who == 2)
except (outlast.errors.PeerLost, outlast.errors.UnhealthyRank) as error:
    print(f"FOUND {type(error).__name__} rank={error.rank} iteration={error.iteration}: {error}", flush=True)
    if dist.get_rank() < 2:
        number = torch.ones(1)
        dist.all_reduce(number, group=training)
        assert int(number) == 2, "the training's group was poisoned"
    print("group works", flush=True)
print("done", flush=True)
os._exit(0)  # gloo would wait for the absent rank
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


def run(folder: Path, behavior: str, *, timeout_s: float) -> dict[int, str]:
    """Run three ranks; return the outputs of the first two."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    output = {}
    with Ranks(script, str(folder), behavior, str(timeout_s), world_size=3) as ranks:
        for rank in (0, 1):
            codes = ranks.wait(180, ranks=[rank])
            output[rank] = ranks.output(rank)
            assert codes == [0], output[rank]
        if behavior == "stopped":
            assert ranks.running(2), "the rank was to be silent, not gone"
            ranks.kill(2)
        ranks.wait(PATIENCE_S, ranks=[2])
    return output


def incidents(folder: Path) -> list[tuple[str, int, list[int]]]:
    found = [event.data["incident"] for event in read(folder) if event.kind == EventKind.INCIDENT]
    return [(one["kind"], one["rank"], one["evidence"]["ranks"]) for one in found]


def test_a_run_without_faults_is_not_disturbed(tmp_path: Path) -> None:
    """While all ranks respond nothing is reported, and training finishes."""
    for output_of_rank in run(tmp_path, "quiet", timeout_s=60).values():
        assert "done" in output_of_rank
        assert "FOUND" not in output_of_rank
    assert incidents(tmp_path) == []


@pytest.mark.slow
def test_a_stopped_rank_is_identified(tmp_path: Path) -> None:
    """All other ranks report a rank that is stopped within a step at the end of that step, as an error and once in
    the journal; the groups of training still work."""
    for output_of_rank in run(tmp_path, "stopped", timeout_s=8).values():
        assert "FOUND PeerLost rank=2 iteration=4: " in output_of_rank
        assert "rank 2 did not come" in output_of_rank
        assert "group works" in output_of_rank
    assert incidents(tmp_path) == [(IncidentKind.WORKER_HUNG, 2, [2])]


def test_a_wrong_response_is_not_a_missing_one(tmp_path: Path) -> None:
    """A rank that responds with a wrong number is reported as unhealthy, with its number, and not as silent."""
    for output_of_rank in run(tmp_path, "wrong", timeout_s=60).values():
        assert "FOUND UnhealthyRank rank=2 iteration=4: " in output_of_rank
        assert "rank 2 responded with a wrong number" in output_of_rank
        assert "group works" in output_of_rank
    assert incidents(tmp_path) == [(IncidentKind.WRONG_ANSWER, 2, [2])]
