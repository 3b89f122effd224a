"""``outlast ckpt prune`` deletes the checkpoints that its rule selects, and no others."""

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


def planned_iterations(place: Path, rule: Rule, *, now_ns: int = 0) -> list[int]:
    return [found.entry.iteration for found in plan_pruning(look_into(str(place)), rule, now_ns=now_ns).checkpoints]


def test_the_oldest_checkpoints_are_deleted(tmp_path: Path) -> None:
    """The newest K, the multiples of the interval and one checkpoint older than the suspect window are kept."""
    for iteration in range(10, 100, 10):
        lay_checkpoint({"node0": tmp_path}, iteration)
    assert planned_iterations(tmp_path, Rule(most_recent_k=2)) == [70, 60, 50, 40, 30, 20, 10]
    assert planned_iterations(tmp_path, Rule(most_recent_k=2, suspect_window=20)) == [50, 40, 30, 20, 10]
    assert planned_iterations(tmp_path, Rule(most_recent_k=2, retain_interval=30)) == [70, 50, 40, 20, 10]
    assert planned_iterations(tmp_path, Rule(most_recent_k=-1)) == []
    assert planned_iterations(tmp_path, Rule()) == []


def test_torn_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    """A torn newest checkpoint is kept but does not count among the newest K; an older torn one is deleted."""
    for iteration in (1, 2, 3, 4):
        lay_checkpoint({"node0": tmp_path}, iteration)
    (tmp_path / "step-4" / shard_name(0)).unlink()
    (tmp_path / "step-2" / shard_name(0)).write_bytes(b"")
    assert planned_iterations(tmp_path, Rule(most_recent_k=2)) == [2]


def test_an_untrusted_checkpoint_is_kept(tmp_path: Path) -> None:
    """A checkpoint whose manifest does not match its folder is not deleted."""
    for iteration in (1, 2, 3, 4):
        lay_checkpoint({"node0": tmp_path}, iteration)
    (tmp_path / "step-2").rename(tmp_path / "step-0")
    assert planned_iterations(tmp_path, Rule(most_recent_k=1)) == [1]


def test_the_checkpoint_in_the_tracker_is_kept(tmp_path: Path) -> None:
    """The checkpoint in the ``latest`` file is kept, even if newer checkpoints exist."""
    for iteration in (1, 2, 3, 9):
        lay_checkpoint({"node0": tmp_path}, iteration)
    (tmp_path / "latest").write_text("step-2\n")
    assert planned_iterations(tmp_path, Rule(most_recent_k=1)) == [1]


def test_pruning_covers_all_nodes(tmp_path: Path) -> None:
    """Pruning deletes a checkpoint from every node present; the other checkpoints stay complete."""
    for iteration in (1, 2, 3):
        two_nodes(tmp_path, iteration)
    (found,) = plan_pruning(look_into(str(tmp_path)), Rule(most_recent_k=1), now_ns=0).checkpoints
    assert found.entry.iteration == 1
    found.remove()
    assert sorted(path.name for path in tmp_path.glob("node*/step-*")) == ["step-2", "step-2", "step-3", "step-3"]
    assert all(entry.valid and not entry.problems for entry in look_into(str(tmp_path)).entry.checkpoints)


def test_a_checkpoint_replaced_after_listing_is_kept(tmp_path: Path) -> None:
    """A checkpoint that was replaced after the listing is not deleted; one that no longer exists causes no error."""
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


def test_a_checkpoint_with_a_torn_manifest_is_deleted(tmp_path: Path) -> None:
    """An old checkpoint with a torn manifest is deleted; the newest valid one is kept."""
    for iteration in (1, 2):
        lay_checkpoint({"node0": tmp_path}, iteration)
    flip(tmp_path / "step-1" / MANIFEST, 60)
    (found,) = plan_pruning(look_into(str(tmp_path)), Rule(most_recent_k=3), now_ns=0).checkpoints
    found.remove()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]


def test_suspect_checkpoints_are_deleted_on_request_only(tmp_path: Path) -> None:
    """Suspect checkpoints do not count among the newest K and are deleted only with ``suspects``."""
    for iteration in (1, 2, 3):
        lay_checkpoint({"node0": tmp_path}, iteration)
    lay_checkpoint({"node0": tmp_path}, 9, suspect=True)
    assert planned_iterations(tmp_path, Rule(most_recent_k=3)) == []
    plan = plan_pruning(look_into(str(tmp_path)), Rule(suspects=True), now_ns=0)
    assert [(found.entry.iteration, found.entry.suspect) for found in plan.checkpoints] == [(9, True)]
    plan.checkpoints[0].remove()
    assert not list((tmp_path / "suspect").glob("step-*"))


@pytest.mark.parametrize(
    ("name", "is_deleted"),
    [
        ("step-1.doomed", True),
        ("step-9.tmp-job-2-cafe.4", True),  # a later save of the same processes is committed
        ("step-9.tmp-job-2-cafe.6", False),  # under way
        ("step-9.tmp-job-1-beef.9", True),  # of an earlier cycle than the committed checkpoint
        ("step-9.tmp-job-2-beef.1", False),  # of the same cycle, by other processes: state unknown
        ("step-9.tmp-job-3-beef.1", False),  # of a later cycle: under way
        ("step-9.tmp-other-0-cafe.1", False),  # of another job: state unknown
        ("step-9.tmp-nonsense", False),
        ("step-4.aside-job-2-cafe.5", False),  # its own commit may be unfinished
        ("step-4.aside-job-2-cafe.3", True),
    ],
)
def test_finished_leftovers_are_deleted(tmp_path: Path, name: str, is_deleted: bool) -> None:
    """An attempt is deleted after a later one is committed, never while it may be under way."""
    lay_checkpoint({"node0": tmp_path}, 5, attempt="job-2-cafe.5")
    lay_checkpoint({"node0": tmp_path}, 9, name=name)
    listing = look_into(str(tmp_path))
    now_ns = (listing.entry.leftovers[0].modified_ns or 0) + HOUR_NS
    plan = plan_pruning(listing, Rule(leftovers=True), now_ns=now_ns)
    assert [remains.entry.name for remains in plan.remains] == ([name] if is_deleted else [])
    assert not plan_pruning(listing, Rule(most_recent_k=1), now_ns=now_ns).remains


def test_old_leftovers_are_deleted(tmp_path: Path) -> None:
    """A leftover whose newest file is older than the limit is deleted, whichever process made it."""
    lay_checkpoint({"node0": tmp_path}, 9, name="step-9.tmp-other-0-cafe.1")
    folder = tmp_path / "step-9.tmp-other-0-cafe.1"
    for path in (*folder.iterdir(), folder):
        os.utime(path, ns=(0, 50 * HOUR_NS))
    os.utime(folder / MANIFEST, ns=(0, 60 * HOUR_NS))
    listing = look_into(str(tmp_path))
    rule = Rule(leftovers=True, older_than_s=24 * 3600)
    assert not plan_pruning(listing, rule, now_ns=84 * HOUR_NS).remains
    (remains,) = plan_pruning(listing, rule, now_ns=84 * HOUR_NS + 1).remains
    remains.remove()
    assert not folder.exists()
    remains.remove()  # another process was faster


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("step-9.tmp-download", "rank-00000.safetensors"),
        ("step-9.tmp-job-2-cafe.4", "model.bin"),
        ("step-9.doomed", "x"),
    ],
)
def test_another_programs_folder_is_never_deleted(tmp_path: Path, name: str, file: str) -> None:
    """A folder whose name or content is not that of a run's attempt is kept, however old it is."""
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
def test_the_newest_valid_checkpoints_are_always_kept(
    kinds: dict[int, str], k: int, interval: int, window: int
) -> None:
    """The newest K valid checkpoints, everything newer, and everything not known to be torn are kept."""
    found = tuple(found_at(iteration, kind) for iteration, kind in sorted(kinds.items(), reverse=True))
    listing = DirectoryListing(place=ListedPlace(path="", tier="local"), found=found, remains=())
    rule = Rule(most_recent_k=k, retain_interval=interval, suspect_window=window)
    deleted = {one.entry.iteration for one in plan_pruning(listing, rule, now_ns=0).checkpoints}
    valid = sorted((iteration for iteration, kind in kinds.items() if kind == "valid"), reverse=True)
    assert not deleted & set(valid[:k])
    assert not deleted if not valid else all(iteration < valid[0] for iteration in deleted)
    assert not any(kinds[iteration] == "Untrusted" for iteration in deleted)
