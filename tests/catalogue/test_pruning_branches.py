"""Branches of a run in ``outlast ckpt``: abandoned checkpoints are marked and do not count as kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laid_checkpoints import lay_checkpoint
from laid_store import lay_in_store

from outlast.checkpoint.catalogue.entries import (
    Checkpoint,
    DirectoryListing,
    ListedCheckpoint,
    ListedPlace,
    Rule,
    plan_pruning,
)
from outlast.checkpoint.catalogue.listing import look_into
from outlast.policy.lineage import Branch, Lineage, SavedPoint

Command = Callable[..., tuple[int, str, str]]
FIRST = Branch("job-0-aa", (1, 1))
RESUMED = Lineage.of([SavedPoint(20, "job-0-aa.2", FIRST.era, True)], [FIRST]).begin("job-1-bb", "job-0-aa.2", 20)
"""Processes that resumed from iteration 20 of the first branch."""


def lay_branches(folder: Path, *, resumed: tuple[int, ...]) -> None:
    """Save 10, 20, 25 and 27, resume from 20, and save the iterations ``resumed``."""
    for number, iteration in enumerate((10, 20, 25, 27)):
        lay_checkpoint({"node0": folder}, iteration, attempt=f"job-0-aa.{number + 1}", branch=FIRST)
    for number, iteration in enumerate(resumed):
        lay_checkpoint({"node0": folder}, iteration, attempt=f"job-1-bb.{number}", branch=RESUMED)


def remaining(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_abandoned_checkpoints_do_not_count_as_kept(tmp_path: Path, outlast: Command) -> None:
    """Prune keeps the newest loadable checkpoints, and a newer abandoned one until training has passed its iteration.

    Older abandoned checkpoints are deleted.
    """
    lay_branches(tmp_path, resumed=(26,))
    command = ("ckpt", "prune", tmp_path, "--keep", 2, "--yes")
    assert outlast(*command)[0] == 0
    assert remaining(tmp_path) == [10, 20, 26, 27]
    lay_checkpoint({"node0": tmp_path}, 28, attempt="job-1-bb.1", branch=RESUMED)
    assert outlast(*command)[0] == 0
    assert remaining(tmp_path) == [10, 26, 28]


def test_ls_marks_abandoned_checkpoints(tmp_path: Path, outlast: Command) -> None:
    """``ckpt ls`` prints the state ``abandoned`` and the reason; ``--json`` has a field for it."""
    lay_branches(tmp_path, resumed=(26,))
    _, out, _ = outlast("ckpt", "ls", tmp_path)
    rows = [line.split() for line in out.splitlines()]
    states = {row[0]: row[1] for row in rows if row and row[0].isdecimal()}
    assert states == {"27": "abandoned", "26": "valid", "25": "abandoned", "20": "valid", "10": "valid"}
    assert "27: its branch was abandoned: later training resumed from iteration 20" in out
    (place,) = json.loads(outlast("ckpt", "ls", "--json", tmp_path)[1])["places"]
    assert [one["iteration"] for one in place["checkpoints"] if one["abandoned"] is None] == [26, 20, 10]


def test_prune_combines_the_lineage_of_all_directories(tmp_path: Path, outlast: Command) -> None:
    """The global directory shows that a node's checkpoints are abandoned; the node's folder alone does not."""
    lay_branches(tmp_path / "node0", resumed=())

    def write(name: str, data: bytes) -> None:
        path = tmp_path / "global" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    lay_in_store(write, 29, attempt="job-1-bb.0", branch=RESUMED)
    command = ("ckpt", "prune", "--keep", 1, "--suspect-window", 0, "--dry-run", "--json")
    (local_place,) = json.loads(outlast(*command, tmp_path / "node0")[1])["places"]
    assert local_place["checkpoints"] == [20, 10]
    local_place, global_place = json.loads(outlast(*command, tmp_path / "node0", tmp_path / "global")[1])["places"]
    assert local_place["checkpoints"] == global_place["checkpoints"] == []
    assert look_into(str(tmp_path / "node0")).entry.checkpoints[0].abandoned is None


def found_at(iteration: int, kind: str) -> ListedCheckpoint:
    entry = Checkpoint(
        iteration=iteration,
        tier="local",
        valid=True,
        attempt=f"job-0-{kind}.{iteration}",
        abandoned=None if kind == "loadable" else "abandoned",
    )
    return ListedCheckpoint(
        entry=entry,
        files=(),
        judge=lambda problems: entry,
        remove=lambda: None,
        is_abandoned_for_certain=kind == "abandoned",
    )


@given(
    st.sets(st.tuples(st.integers(0, 60), st.sampled_from(["loadable", "abandoned", "perhaps"])), max_size=30),
    st.integers(1, 5),
    st.integers(0, 50),
    st.integers(0, 100),
)
def test_abandoned_checkpoints_do_not_affect_the_others(
    kinds: set[tuple[int, str]], k: int, interval: int, window: int
) -> None:
    """Abandoned checkpoints do not change which loadable checkpoints are deleted, also at the same iterations.

    Of the abandoned ones, only those that are certainly abandoned and older than the newest loadable one are deleted.
    """
    rule = Rule(most_recent_k=k, retain_interval=interval, suspect_window=window)

    def deleted(of: set[tuple[int, str]]) -> set[tuple[int, str]]:
        found = {one: found_at(*one) for one in sorted(of)}
        listing = DirectoryListing(place=ListedPlace(path="", tier="local"), found=tuple(found.values()), remains=())
        plan = plan_pruning(listing, rule, now_ns=0).checkpoints
        return {one for one, listed in found.items() if any(listed is planned for planned in plan)}

    loadable = {one for one in kinds if one[1] == "loadable"}
    deleted_iterations = deleted(kinds)
    newest = max((iteration for iteration, _ in loadable), default=-1)
    assert deleted_iterations & loadable == deleted(loadable)
    assert deleted_iterations - loadable == {(at, kind) for at, kind in kinds if kind == "abandoned" and at < newest}
    assert newest == -1 or (newest, "loadable") not in deleted_iterations


@pytest.mark.parametrize("content", [None, b"{}"])
def test_a_folder_without_our_manifest_is_never_deleted(tmp_path: Path, content: bytes | None) -> None:
    """A folder ``step-<n>`` without a manifest of outlast is listed as bad and is never deleted."""
    for iteration in (10, 20, 30):
        lay_checkpoint({"node0": tmp_path}, iteration)
    other = tmp_path / "step-5"
    other.mkdir()
    (other / "model.bin").write_bytes(b"of another program")
    if content is not None:
        (other / "manifest.json").write_bytes(content)
    plan = plan_pruning(look_into(str(tmp_path)), Rule(most_recent_k=1), now_ns=0)
    assert [found.entry.iteration for found in plan.checkpoints] == [10]
