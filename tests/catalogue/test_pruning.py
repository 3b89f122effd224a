"""``outlast ckpt prune`` deletes what it may, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laid_checkpoints import flip, lay_checkpoint, two_nodes

from outlast.checkpoint.catalogue.entries import (
    Checkpoint,
    DirectoryListing,
    ListedCheckpoint,
    ListedPlace,
    Problem,
    Rule,
    plan_pruning,
)
from outlast.checkpoint.catalogue.listing import look_into
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.shard import shard_name
from outlast.errors import CheckpointError

HOUR_NS = 3600 * 10**9


def chosen(place: Path, rule: Rule, *, now_ns: int = 0) -> list[int]:
    return [found.entry.iteration for found in plan_pruning(look_into(str(place)), rule, now_ns=now_ns).checkpoints]


def test_the_oldest_go(tmp_path: Path) -> None:
    """The newest K, the multiples and one beyond the suspect window stay."""
    for iteration in range(10, 100, 10):
        lay_checkpoint({"node0": tmp_path}, iteration)
    assert chosen(tmp_path, Rule(most_recent_k=2)) == [70, 60, 50, 40, 30, 20, 10]
    assert chosen(tmp_path, Rule(most_recent_k=2, suspect_window=20)) == [50, 40, 30, 20, 10]
    assert chosen(tmp_path, Rule(most_recent_k=2, retain_interval=30)) == [70, 50, 40, 20, 10]
    assert chosen(tmp_path, Rule(most_recent_k=-1)) == []
    assert chosen(tmp_path, Rule()) == []


def test_torn_checkpoints_do_not_count(tmp_path: Path) -> None:
    """A torn newest checkpoint stays where it is, pushes out no good one, and an older torn one goes."""
    for iteration in (1, 2, 3, 4):
        lay_checkpoint({"node0": tmp_path}, iteration)
    (tmp_path / "step-4" / shard_name(0)).unlink()
    (tmp_path / "step-2" / shard_name(0)).write_bytes(b"")
    assert chosen(tmp_path, Rule(most_recent_k=2)) == [2]


def test_what_cannot_be_trusted_stays(tmp_path: Path) -> None:
    """A checkpoint of another run is not this command's to delete."""
    for iteration in (1, 2, 3, 4):
        lay_checkpoint({"node0": tmp_path}, iteration)
    (tmp_path / "step-2").rename(tmp_path / "step-0")
    assert chosen(tmp_path, Rule(most_recent_k=1)) == [1]


def test_what_the_tracker_names_stays(tmp_path: Path) -> None:
    """Training that went back to an older checkpoint keeps what it saved last."""
    for iteration in (1, 2, 3, 9):
        lay_checkpoint({"node0": tmp_path}, iteration)
    (tmp_path / "latest").write_text("step-2\n")
    assert chosen(tmp_path, Rule(most_recent_k=1)) == [1]


def test_all_nodes_folders_are_pruned(tmp_path: Path) -> None:
    """A checkpoint goes from every node that is here, and the others stay whole."""
    for iteration in (1, 2, 3):
        two_nodes(tmp_path, iteration)
    (found,) = plan_pruning(look_into(str(tmp_path)), Rule(most_recent_k=1), now_ns=0).checkpoints
    assert found.entry.iteration == 1
    found.remove()
    assert sorted(path.name for path in tmp_path.glob("node*/step-*")) == ["step-2", "step-2", "step-3", "step-3"]
    assert all(entry.valid and not entry.problems for entry in look_into(str(tmp_path)).entry.checkpoints)


def test_a_checkpoint_that_changed_meanwhile_stays(tmp_path: Path) -> None:
    """What was replaced since it was listed is left alone, and what is gone already is no error."""
    for iteration in (1, 2, 3):
        lay_checkpoint({"node0": tmp_path}, iteration)
    plan = plan_pruning(look_into(str(tmp_path)), Rule(most_recent_k=1), now_ns=0)
    assert [found.entry.iteration for found in plan.checkpoints] == [1]
    (tmp_path / "step-1").rename(tmp_path / "away")
    plan.checkpoints[0].remove()
    lay_checkpoint({"node0": tmp_path}, 1, attempt="job-0-cafe.99")
    with pytest.raises(CheckpointError, match="changed meanwhile"):
        plan.checkpoints[0].remove()
    assert (tmp_path / "step-1" / MANIFEST).exists()


def test_a_checkpoint_with_a_torn_manifest_can_be_deleted(tmp_path: Path) -> None:
    """An old checkpoint whose manifest is torn goes; the newest valid one stays."""
    for iteration in (1, 2):
        lay_checkpoint({"node0": tmp_path}, iteration)
    flip(tmp_path / "step-1" / MANIFEST, 60)
    (found,) = plan_pruning(look_into(str(tmp_path)), Rule(most_recent_k=3), now_ns=0).checkpoints
    found.remove()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]


def test_saves_for_diagnosis_go_only_when_asked(tmp_path: Path) -> None:
    """Suspect checkpoints neither count nor go by themselves."""
    for iteration in (1, 2, 3):
        lay_checkpoint({"node0": tmp_path}, iteration)
    lay_checkpoint({"node0": tmp_path}, 9, suspect=True)
    assert chosen(tmp_path, Rule(most_recent_k=3)) == []
    plan = plan_pruning(look_into(str(tmp_path)), Rule(suspects=True), now_ns=0)
    assert [(found.entry.iteration, found.entry.suspect) for found in plan.checkpoints] == [(9, True)]
    plan.checkpoints[0].remove()
    assert not list((tmp_path / "suspect").glob("step-*"))


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("step-1.doomed", True),
        ("step-9.tmp-job-2-cafe.4", True),  # a later save of the same processes is committed
        ("step-9.tmp-job-2-cafe.6", False),  # under way
        ("step-9.tmp-job-1-beef.9", True),  # of an earlier cycle than what is committed
        ("step-9.tmp-job-2-beef.1", False),  # of the same cycle, by other processes: nothing is known
        ("step-9.tmp-job-3-beef.1", False),  # of a later cycle: under way
        ("step-9.tmp-other-0-cafe.1", False),  # of another job: nothing is known
        ("step-9.tmp-nonsense", False),
        ("step-4.aside-job-2-cafe.5", False),  # its own commit may not be over
        ("step-4.aside-job-2-cafe.3", True),
    ],
)
def test_leftovers_go_when_their_owner_is_gone(tmp_path: Path, name: str, goes: bool) -> None:
    """An attempt is deleted once a later one is committed, never while it may be under way."""
    lay_checkpoint({"node0": tmp_path}, 5, attempt="job-2-cafe.5")
    lay_checkpoint({"node0": tmp_path}, 9, name=name)
    looked = look_into(str(tmp_path))
    now_ns = (looked.entry.leftovers[0].modified_ns or 0) + HOUR_NS
    plan = plan_pruning(looked, Rule(leftovers=True), now_ns=now_ns)
    assert [remains.entry.name for remains in plan.remains] == ([name] if goes else [])
    assert not plan_pruning(looked, Rule(most_recent_k=1), now_ns=now_ns).remains


def test_old_leftovers_go(tmp_path: Path) -> None:
    """What nobody touched for long goes, whoever made it; its youngest file counts."""
    lay_checkpoint({"node0": tmp_path}, 9, name="step-9.tmp-other-0-cafe.1")
    folder = tmp_path / "step-9.tmp-other-0-cafe.1"
    for path in (*folder.iterdir(), folder):
        os.utime(path, ns=(0, 50 * HOUR_NS))
    os.utime(folder / MANIFEST, ns=(0, 60 * HOUR_NS))
    looked = look_into(str(tmp_path))
    rule = Rule(leftovers=True, older_than_s=24 * 3600)
    assert not plan_pruning(looked, rule, now_ns=84 * HOUR_NS).remains
    (remains,) = plan_pruning(looked, rule, now_ns=84 * HOUR_NS + 1).remains
    remains.remove()
    assert not folder.exists()
    remains.remove()  # somebody else was quicker


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("step-9.tmp-download", "rank-00000.safetensors"),
        ("step-9.tmp-job-2-cafe.4", "model.bin"),
        ("step-9.doomed", "x"),
    ],
)
def test_what_another_program_left_never_goes(tmp_path: Path, name: str, file: str) -> None:
    """A folder whose name or content is not that of an attempt of a run stays, however old it is."""
    lay_checkpoint({"node0": tmp_path}, 5, attempt="job-2-cafe.5")
    (tmp_path / name).mkdir()
    (tmp_path / name / file).write_text("precious")
    plan = plan_pruning(look_into(str(tmp_path)), Rule(leftovers=True, older_than_s=0), now_ns=1 << 62)
    assert not plan.remains


def found_at(iteration: int, kind: str) -> ListedCheckpoint:
    problems = () if kind == "valid" else (Problem(kind=kind, reason="", file=""),)
    entry = Checkpoint(iteration=iteration, tier="local", valid=kind == "valid", problems=problems)
    return ListedCheckpoint(entry=entry, files=(), judge=lambda problems: entry, remove=lambda: None)


@given(
    st.dictionaries(st.integers(0, 200), st.sampled_from(["valid", "Incomplete", "Untrusted"]), max_size=30),
    st.integers(1, 5),
    st.integers(0, 50),
    st.integers(0, 100),
)
def test_the_newest_valid_one_always_stays(kinds: dict[int, str], k: int, interval: int, window: int) -> None:
    """Whatever lies there: the newest K valid ones, all that is newer, and all that is not known to be torn stay."""
    found = tuple(found_at(iteration, kind) for iteration, kind in sorted(kinds.items(), reverse=True))
    looked = DirectoryListing(place=ListedPlace(path="", tier="local"), found=found, remains=())
    rule = Rule(most_recent_k=k, retain_interval=interval, suspect_window=window)
    gone = {one.entry.iteration for one in plan_pruning(looked, rule, now_ns=0).checkpoints}
    valid = sorted((iteration for iteration, kind in kinds.items() if kind == "valid"), reverse=True)
    assert not gone & set(valid[:k])
    assert not gone if not valid else all(iteration < valid[0] for iteration in gone)
    assert not any(kinds[iteration] == "Untrusted" for iteration in gone)
