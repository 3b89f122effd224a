"""What the demo prints at its end."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from outlast.demo.outcome import Account, DemoOutcome, Leaving, Slowed, Sources, differences
from outlast.demo.view import render
from outlast.incidents import IncidentKind

RESULT = {"iterations": 100, "final_loss": 2.5, "weights": "aa", "optimizer": "bb", "losses": "cc"}
HUNG = Account(
    kind=IncidentKind.WORKER_HUNG,
    cycle=0,
    node="node-1",
    rank=2,
    fault="SIGSTOP of a rank",
    iteration=34,
    detected_after_s=3.01,
    evidence='stopped [T] at File "/a/long/path/train_gpt.py", line 41 in forward',
    action="restart_workers",
    verdict="because",
    restored_iteration=30,
    recovered_after_s=3.4,
    redone_iterations=4,
)
FROM_REPLICA = Sources(
    tiers={0: "memory", 1: "memory", 2: "replica", 3: "replica"},
    bytes_read={"memory": 9_000_000, "replica": 8_500_000},
    rejected={"replica": 1},
)
LOST = dataclasses.replace(
    HUNG, kind=IncidentKind.NODE_LOST, rank=None, victims=(2, 3), sources=FROM_REPLICA, copies_spoiled=4
)
NAN = dataclasses.replace(
    HUNG,
    kind=IncidentKind.INVALID_RESULT,
    fault="NaN in an activation",
    action="rerun_step",
    evidence="loss was nan (not finite), run again 2.5000: transient",
    restored_iteration=34,
    redone_iterations=0,
    restarts=0,
    finding="transient",
    named="loss",
    struck="model.blocks.1",
)
FLIPPED = dataclasses.replace(
    NAN,
    fault="bit flip in a weight",
    action="replace_node",
    evidence="replicas differ from the majority",
    restored_iteration=30,
    restarts=1,
    finding="persistent",
    named="model.w",
    struck="model.w",
    quarantined=("node-1",),
    sources=FROM_REPLICA,
)
SLOW = Slowed(
    fault="slow forward of a rank",
    rank=3,
    node="node-0",
    since=2,
    until=24,
    num_reports=3,
    noticed_after_s=3.5,
    section="forward",
    ratio=6.1,
    evidence="Rank=3 Node=node-0 takes 6.10 times as long; Rank=3 Node=node-0: the machine is as fast (copy 1.0)",
    others_named=(),
    restarts=0,
)
LEFT = Leaving(
    fault="SIGTERM of a rank",
    rank=2,
    node="node-1",
    struck_at=91,
    noticed_after_s=0.002,
    left_after_s=0.4,
    left_at=dict.fromkeys(range(4), 92),
    exit_codes=dict.fromkeys(range(4), 75),
    saved_by={92: 4},
    run_exit_codes=(75,),
    resumed_at=dict.fromkeys(range(4), 92),
    sources=Sources(tiers=dict.fromkeys(range(4), "local"), bytes_read={"local": 20_000_000}, rejected={}),
    going_on_after_s=3.2,
    next_exit_codes=(0,),
)
GOOD = DemoOutcome(
    seed=0, undisturbed=RESULT, struck=dict(RESULT), incidents=(HUNG,), cycles=2, wall_s=40.0, problems=()
)


ALL = dataclasses.replace(GOOD, incidents=(HUNG, LOST, NAN, FLIPPED), slowed=SLOW, leaving=LEFT)


def text(outcome: DemoOutcome, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(outcome))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_closing_lines_are_narrow(width: int) -> None:
    """They fit, no word of them is broken, each fault has one, and the verdict is the last."""
    shown = text(ALL, width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.split() == text(ALL, 1000).split()
    rows = [line.split() for line in shown.splitlines()]
    assert rows[0] == ["incident", "where", "noticed", "going", "on", "redone"]
    assert ["straggler", "rank", "3", "on", "node-0", "3.50", "s", "-", "0"] in rows
    assert ["worker_hung", "rank", "2", "on", "node-1", "3.01", "s", "3.40", "s", "4"] in rows
    assert ["node_lost", "node-1", "3.01", "s", "3.40", "s", "4"] in rows
    assert ["preempted", "rank", "2", "on", "node-1", "2", "ms", "3.20", "s", "0"] in rows


def test_eight_faults_are_told_in_ten_lines() -> None:
    """A line each, the columns' names, and the verdict with the digest of the weights, which counts them."""
    eight = dataclasses.replace(ALL, incidents=(HUNG, LOST, NAN, FLIPPED, HUNG, LOST))
    lines = text(eight).splitlines()
    assert len(lines) == 10
    assert lines[-1] == "bit-identical: 8 faults, 2 cycles in 2 jobs, weights aa (40 s)"
    other = dataclasses.replace(ALL, incidents=(HUNG, dataclasses.replace(LOST, fault=None)), slowed=None)
    assert "2 faults and 1 incident that the demo did not cause" in " ".join(text(other).split())
    assert "1 fault, 2 cycles, weights" in text(GOOD)


def test_identical_means_every_digest_there_and_equal() -> None:
    """A digest that is missing in one or in both results is a difference."""
    assert differences(RESULT, dict(RESULT)) == ()
    assert differences(RESULT, {**RESULT, "weights": "ab"}) == ("weights",)
    assert set(differences({}, {})) == {"weights", "optimizer", "losses"}
    assert not dataclasses.replace(GOOD, undisturbed={}, struck={}).bit_identical
    assert GOOD.ok
    assert not dataclasses.replace(GOOD, problems=("the spare never came",)).ok


def test_the_json_object_has_what_the_documents_promise() -> None:
    """One line, with the verdict, the incidents and their costs."""
    printed = json.loads(GOOD.to_json())
    assert "\n" not in GOOD.to_json()
    assert printed["bit_identical"] is True
    assert (printed["cycles"], printed["final_loss"], printed["wall_s"]) == (2, 2.5, 40.0)
    (one,) = printed["incidents"]
    assert (one["kind"], one["rank"], one["node"]) == ("worker_hung", 2, "node-1")
    assert (one["detected_after_s"], one["recovered_after_s"], one["redone_iterations"]) == (3.01, 3.4, 4)


def test_where_ranks_came_back_from_is_counted() -> None:
    """Ranks and bytes by tier, and always those of the global tier."""
    outcome = dataclasses.replace(GOOD, incidents=(HUNG, LOST))
    hung, lost = json.loads(outcome.to_json())["incidents"]
    assert (hung["tiers"], hung["global_bytes_read"], hung["copies_spoiled"]) == (None, None, None)
    assert lost["tiers"] == {"memory": 2, "replica": 2}
    assert lost["bytes_read"] == {"memory": 9_000_000, "replica": 8_500_000}
    assert (lost["global_bytes_read"], lost["copies_rejected"]) == (0, {"replica": 1})
    assert (lost["victims"], lost["copies_spoiled"]) == ([2, 3], 4)


def test_wrong_numbers_are_told_with_what_was_struck_and_done() -> None:
    """A NaN with no restart, a flipped bit with its tensor and the node that is quarantined."""
    outcome = dataclasses.replace(GOOD, incidents=(NAN, FLIPPED))
    nan, flipped = json.loads(outcome.to_json())["incidents"]
    assert (nan["restarts"], nan["finding"], nan["struck"]) == (0, "transient", "model.blocks.1")
    assert (flipped["restarts"], flipped["named"], flipped["quarantined"]) == (1, "model.w", ["node-1"])


def test_a_slow_rank_is_told_with_the_report_that_named_it() -> None:
    """Who, since when, in which report, and that nobody was restarted for it."""
    assert json.loads(GOOD.to_json())["slowed"] is None
    told = json.loads(dataclasses.replace(GOOD, slowed=SLOW).to_json())["slowed"]
    assert (told["rank"], told["num_reports"], told["others_named"], told["restarts"]) == (3, 3, [], 0)


def test_a_notice_to_leave_is_told_with_what_was_kept() -> None:
    """When it was noticed, after which iteration all left, with which exit codes, and where the next job went on."""
    assert json.loads(GOOD.to_json())["preemption"] is None
    outcome = dataclasses.replace(GOOD, leaving=LEFT)
    told = json.loads(outcome.to_json())["preemption"]
    assert (told["rank"], told["noticed_after_s"], told["iteration"], told["ranks_that_saved"]) == (2, 0.002, 92, 4)
    assert (told["exit_code"], told["resumed_at"], told["lost_iterations"]) == (75, 92, 0)
    assert (told["next_exit_code"], told["tiers"]) == (0, {"local": 4})
    apart = dataclasses.replace(LEFT, left_at={0: 92, 1: 93}, run_exit_codes=(1, 75), resumed_at={})
    assert json.loads(dataclasses.replace(GOOD, leaving=apart).to_json())["preemption"]["exit_code"] is None


def test_a_failure_says_what_went_wrong() -> None:
    """Each problem has its line, differing digests are named, and nothing claims success."""
    failed = dataclasses.replace(GOOD, struck={**RESULT, "losses": "xx"}, problems=("the results differ in losses",))
    shown = text(failed)
    assert "failed: the results differ in losses" in shown
    assert "bit-identical" not in shown
    assert text(dataclasses.replace(failed, struck={}, incidents=()))
