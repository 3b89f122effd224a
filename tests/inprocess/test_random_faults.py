"""After any fault at any time, ranks continue to the same weights or stop with the reason; they do not hang.

The sequences are drawn from seeds, and the tests run some of them. All five hundred take some fifteen minutes::

python tests/inprocess/fault_sequences.py $(seq 0 499) python tests/inprocess/fault_sequences.py coordinator $(seq 0
499)
"""

from __future__ import annotations

import json
from pathlib import Path

import fault_sequences
import pytest

from outlast.testing import RankProcesses

pytestmark = pytest.mark.extended

SAMPLE, CAMPAIGN = [0], range(3, 120, 3)
"""The first seed of each chunk that always runs, and of the chunks of the campaign, at 2.5 s a seed."""
CHUNK = 3


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [*SAMPLE, *(pytest.param(first, marks=pytest.mark.campaign) for first in CAMPAIGN)])
@pytest.mark.parametrize("coordinator", ["agent process", "coordinator"])
def test_any_fault_sequence_ends_correctly(first: int, coordinator: str) -> None:
    """A sequence ends with identical weights to the undisturbed run on every rank, or with a RestartAbort that has
    counts."""
    seeds = [str(seed) for seed in range(first, first + CHUNK)]
    mode = ["coordinator"] if coordinator == "coordinator" else []
    with RankProcesses(Path(fault_sequences.__file__), *mode, *seeds, world_size=1) as runner:
        assert runner.wait(timeout_s=290) == [0], runner.tails()
        undisturbed, *results = [json.loads(line) for line in runner.output(0).splitlines() if line.startswith("{")]
    assert undisturbed["verdict"] == "completed", undisturbed
    assert [str(result["seed"]) for result in results] == seeds
    for result in results:
        assert result["verdict"] in ("completed", "aborted"), result
        if result["verdict"] == "completed":
            assert result["values"] == undisturbed["values"], result


def test_the_sequences_cover_each_kind_of_fault() -> None:
    """Five hundred seeds have each kind of fault at each place, alone, two at once, and during a restart; a seed
    always has the same sequence."""
    drawn = [fault_sequences.draw(seed) for seed in range(500)]
    assert drawn == [fault_sequences.draw(seed) for seed in range(500)]
    covered = {(event.where, event.kind) for events in drawn for event in events}
    kinds = {"exception", "kill", "sleep", "stop", "gil"}
    for where in ("step", "initialize", "finalize", "health_check"):
        assert {kind for place, kind in covered if place == where} == kinds
    assert {kind for place, kind in covered if place == "outside"} == {"kill", "stop"}
    places = [[(event.where, event.restart_count, event.step) for event in events] for events in drawn]
    assert sum(len(set(placed)) < len(placed) for placed in places) > 50, "two at once"
    assert all(events[0].where in ("step", "outside") for events in drawn)
