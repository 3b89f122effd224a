"""Exit codes 16 and 17 with a diagnosis, on real processes: a replay on another device decides if a spare exists,
tries on the same device are counted, and the last line has the diagnosis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.extended]

SCRIPT = """
import os, pathlib, sys, time
import msgspec

from outlast import env
from outlast.decoding import from_json
from outlast.monitor import RankMonitor
from outlast.policy.recovery_point import Tier
from outlast.policy.rerun import Diagnosis, Finding, Replay
from outlast.runtime.board import LoadedCopy
from outlast.runtime.device import device_name
from outlast.runtime.diagnoses import write_diagnosis

place, what, folder = env.read_worker(), sys.argv[1], pathlib.Path(sys.argv[2])
device = device_name(place.device or place.node, place.local_rank)
replay, monitor = from_json(place.replay, Replay) if place.replay else None, RankMonitor()
monitor.report_progress()
monitor.set_iteration(7)
# One write: the output of both ranks goes to one file.
sys.stdout.write(f"cycle {place.cycle} rank {place.global_rank} on {device} replays {place.replay or 'nothing'}\\n")
sys.stdout.flush()


def when_there(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return path


def leave(code, finding, **facts):
    '''Leave as all ranks do, with the one diagnosis that rank 1 makes.'''
    told = folder / f"cycle-{place.cycle}.json"
    if place.global_rank == 1:
        facts = {"node": place.node, "device": device, "what": "loss", "first": "nan", "batch": "5f3a", **facts}
        text = msgspec.json.encode(Diagnosis(finding=finding, rank=1, iteration=7, **facts))
        (folder / "half").write_bytes(text)
        (folder / "half").rename(told)
    found = from_json(when_there(told).read_bytes(), Diagnosis)
    write_diagnosis(place.run_dir, place.job, place.cycle, place.global_rank, found)
    monitor.set_leaving(code)
    raise SystemExit(code)


when_there(folder / "go")
(folder / f"printed-{place.cycle}-{place.global_rank}").touch()
for other in range(place.world_size):  # who leaves ends the others, who may not have printed yet
    when_there(folder / f"printed-{place.cycle}-{other}")
if what == "near copy":
    if not place.untrusted:
        monitor.page.set_restored(LoadedCopy(checkpoint=5, attempt="job-0-aa.1", tier=Tier.REPLICA, suspect_window=20))
        leave(16, Finding.REPRODUCED)
elif replay is not None:
    before = {"node": replay.node, "device": replay.device, "tries": replay.tries, "replayed_on": device}
    if what == "never decided" or (place.global_rank == 1 and replay.device == device):
        leave(16, Finding.REPRODUCED, **{**before, "tries": replay.tries + 1}, second="nan")
    elif what == "persistent":
        leave(17, Finding.PERSISTENT, **before, second=2.5)
    else:
        leave(17, Finding.CORRECT, **before, second="nan")
elif what != "persistent" or place.cycle == 0:
    leave(16, Finding.REPRODUCED)
monitor.finish()
"""


class Nodes(Cluster):
    """Nodes whose ranks find an invalid result after all nodes have joined."""

    def __init__(self, folder: Path, mode: str, *, num_nodes: int = 1, num_spares: int = 0, nproc: int = 2) -> None:
        self.folder, self._num_joined = folder, num_nodes + num_spares
        script = folder / "train.py"
        script.write_text(SCRIPT)
        super().__init__(
            script,
            mode,
            str(folder),
            run_dir=folder / "run",
            num_nodes=num_nodes,
            num_spares=num_spares,
            nproc_per_node=nproc,
            devices={f"node-{number}": f"board-{number}" for number in range(self._num_joined)},
            options=["--ft-max-no-progress-cycles=9", "--max-restarts=9"],
        )

    def __enter__(self) -> Nodes:
        super().__enter__()
        return self

    def run(self) -> list[int]:
        """Start the ranks once every node has joined; return the exit codes of the agents."""
        joined: set[str] = set()
        self.wait_for(lambda event: self._have_all_joined(event.data, event.kind, joined), timeout_s=300)
        (self.folder / "go").touch()
        return self.wait(timeout_s=300)

    def _have_all_joined(self, data: dict[str, Any], kind: EventKind, joined: set[str]) -> bool:
        if kind == EventKind.NODE_JOINED:
            joined.add(data["name"])
        return len(joined) == self._num_joined

    def decisions(self) -> list[dict[str, Any]]:
        """Return the coordinator's record of the end of each cycle: decision and incident."""
        return [event.data for event in self.events() if event.kind == EventKind.DECISION]

    def runners(self) -> list[str]:
        """Return the node that ran each cycle of a world of one node."""
        return [event.node for event in self.events() if event.kind == EventKind.CYCLE_STARTED]

    def output(self) -> str:
        """Return the output of all nodes."""
        return "\n".join(agent.output() for agent in self.agents)


@pytest.mark.slow
def test_node_with_a_persistent_device_fault_is_quarantined(tmp_path: Path) -> None:
    """A result is reproduced on one node and differs in the replay on the spare: the first node is held back for the
    replay, then quarantined, and the run completes on the spare without a pending replay."""
    with Nodes(tmp_path, "persistent", num_spares=1) as nodes:
        assert nodes.run() == [0, 0], nodes.tails()
        first, spare, last = nodes.runners()
        assert first != spare == last
        replayed, found, finished = nodes.decisions()
        assert replayed["verdict"]["hold_back"] == [first]
        assert "quarantine" not in replayed["verdict"]
        incident = replayed["incident"]
        assert (incident["rank"], incident["node"], incident["exit_code"], incident["iteration"]) == (1, first, 16, 7)
        assert found["verdict"]["quarantine"] == [first]
        device = f"board-{first[-1]}/cpu-1"
        for fact in ("rank 1", f"node {first}", f"device {device}", "iteration 7", "persistent fault of that device"):
            assert fact in found["verdict"]["reason"]
        assert finished["verdict"]["exit_code"] == 0
        replay = json.loads(nodes.output().split("cycle 1 rank 1 on ")[1].split(" replays ")[1].splitlines()[0])
        expected = {"what": "loss", "first": "nan", "batch": "5f3a"}
        assert replay == {"iteration": 7, "device": device, "node": first, "rank": 1, **expected}
        assert "cycle 2 rank 1" in nodes.output()
        lines = [line for line in nodes.output().splitlines() if line.endswith("replays nothing")]
        assert len(lines) == 4


@pytest.mark.slow
def test_equal_result_on_the_spare_ends_with_17(tmp_path: Path) -> None:
    """If the spare computes the same result, every agent exits with 17 after the replay, no further cycle starts,
    and the last line has the finding, batch, rank, node, device and iteration."""
    with Nodes(tmp_path, "correct", num_spares=1) as nodes:
        assert nodes.run() == [ExitReason.FAILED_VALIDATION] * 2, nodes.tails()
        assert len(nodes.runners()) == 2
        assert len(nodes.decisions()) == 2
        assert "quarantine" not in nodes.decisions()[1]["verdict"]
        for agent in nodes.agents:
            over = next(line for line in agent.output().splitlines() if "job over after" in line)
            for fact in ("exit code 17", "rank 1", "board-", "iteration 7", "batch 5f3a", "the data or the model"):
                assert fact in over
        assert json.loads((tmp_path / "run" / "ladder.json").read_text())["replay"] is None


def test_without_a_spare_the_device_replays_twice(tmp_path: Path) -> None:
    """Without a spare the same device replays twice, with the number of the try, then the run stops with 17."""
    with Nodes(tmp_path, "never decided") as nodes:
        assert nodes.run() == [ExitReason.FAILED_VALIDATION], nodes.tails()
        replays = [data["verdict"].get("replay") for data in nodes.decisions()]
        assert [replay and replay.get("tries", 0) for replay in replays] == [0, 1, None]
        assert len(nodes.runners()) == 3
        assert nodes.decisions()[-1]["verdict"]["exit_code"] == ExitReason.FAILED_VALIDATION


@pytest.mark.slow
def test_checkpoint_is_excluded_before_a_replay(tmp_path: Path) -> None:
    """Two iterations after a load from a replica, with a spare waiting, there is no replay: the second cycle runs on
    the same node without that checkpoint, and finishes."""
    with Nodes(tmp_path, "near copy", num_spares=1) as nodes:
        assert nodes.run() == [0, 0], nodes.tails()
        assert len(nodes.runners()) == 2
        assert len(set(nodes.runners())) == 1
        decision = nodes.decisions()[0]["verdict"]
        assert "replay" not in decision
        assert "checkpoint 5 (replica tier" in decision["reason"]
        assert json.loads((tmp_path / "run" / "ladder.json").read_text())["distrusted"][0]["attempt"] == "job-0-aa.1"


@pytest.mark.slow
def test_root_cause_is_the_rank_with_the_invalid_result(tmp_path: Path) -> None:
    """All ranks of two nodes exit with 16 at the same time: rank 1 with its node is the root cause, in whatever
    order the exits are detected, and only that node is held back."""
    with Nodes(tmp_path, "persistent", num_nodes=2, num_spares=1, nproc=1) as nodes:
        assert nodes.run() == [0, 0, 0], nodes.tails()
        started = [event for event in nodes.events() if event.kind == EventKind.CYCLE_STARTED]
        faulty_node = next(event.node for event in started if event.cycle == 0 and event.data["ranks"] == [1])
        replayed, found, _ = nodes.decisions()
        assert (replayed["incident"]["rank"], replayed["incident"]["node"]) == (1, faulty_node)
        assert replayed["verdict"]["hold_back"] == [faulty_node]
        assert found["verdict"]["quarantine"] == [faulty_node]
        other = {event.node for event in started if event.data["ranks"] == [0]}
        assert len(other) == 1
