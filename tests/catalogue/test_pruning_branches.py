"""``outlast ckpt`` and the branches of a run: what training has abandoned is marked, and does not count as kept."""

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
"""Of processes that resumed from iteration 20 of the first ones."""


def lay_branches(folder: Path, *, resumed: tuple[int, ...]) -> None:
    """Save 10, 20, 25 and 27, lose what is beyond 20, and save other iterations."""
    for number, iteration in enumerate((10, 20, 25, 27)):
        lay_checkpoint({"node0": folder}, iteration, attempt=f"job-0-aa.{number + 1}", branch=FIRST)
    for number, iteration in enumerate(resumed):
        lay_checkpoint({"node0": folder}, iteration, attempt=f"job-1-bb.{number}", branch=RESUMED)


def left(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_an_abandoned_checkpoint_takes_no_place_of_another_one(tmp_path: Path, outlast: Command) -> None:
    """The newest that a run resumes from stays, and so does the abandoned one that is newer, until training has passed
    it; an abandoned one that is older is deleted."""
    lay_branches(tmp_path, resumed=(26,))
    command = ("ckpt", "prune", tmp_path, "--keep", 2, "--yes")
    assert outlast(*command)[0] == 0
    assert left(tmp_path) == [10, 20, 26, 27]
    lay_checkpoint({"node0": tmp_path}, 28, attempt="job-1-bb.1", branch=RESUMED)
    assert outlast(*command)[0] == 0
    assert left(tmp_path) == [10, 26, 28]


def test_ls_marks_what_is_abandoned(tmp_path: Path, outlast: Command) -> None:
    """The state of such a checkpoint is ``abandoned``, and one line has the reason; --json has it as a field."""
    lay_branches(tmp_path, resumed=(26,))
    _, out, _ = outlast("ckpt", "ls", tmp_path)
    rows = [line.split() for line in out.splitlines()]
    states = {row[0]: row[1] for row in rows if row and row[0].isdecimal()}
    assert states == {"27": "abandoned", "26": "valid", "25": "abandoned", "20": "valid", "10": "valid"}
    assert "27: its branch was abandoned: later training resumed from iteration 20" in out
    (place,) = json.loads(outlast("ckpt", "ls", "--json", tmp_path)[1])["places"]
    assert [one["iteration"] for one in place["checkpoints"] if one["abandoned"] is None] == [26, 20, 10]


def test_all_named_directories_decide_together(tmp_path: Path, outlast: Command) -> None:
    """A node's folder does not show by itself that its checkpoints are abandoned; the global directory does."""
    lay_branches(tmp_path / "node0", resumed=())

    def write(name: str, data: bytes) -> None:
        path = tmp_path / "global" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    lay_in_store(write, 29, attempt="job-1-bb.0", branch=RESUMED)
    command = ("ckpt", "prune", "--keep", 1, "--suspect-window", 0, "--dry-run", "--json")
    (near,) = json.loads(outlast(*command, tmp_path / "node0")[1])["places"]
    assert near["checkpoints"] == [20, 10]
    near, far = json.loads(outlast(*command, tmp_path / "node0", tmp_path / "global")[1])["places"]
    assert near["checkpoints"] == far["checkpoints"] == []
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
def test_abandoned_checkpoints_change_nothing_about_the_others(
    kinds: set[tuple[int, str]], k: int, interval: int, window: int
) -> None:
    """Of what can be loaded the same is deleted, whatever abandoned ones are there, also at the same iterations. Only
    those go that are abandoned for certain and older than the newest that can be loaded."""
    rule = Rule(most_recent_k=k, retain_interval=interval, suspect_window=window)

    def deleted(of: set[tuple[int, str]]) -> set[tuple[int, str]]:
        found = {one: found_at(*one) for one in sorted(of)}
        looked = DirectoryListing(place=ListedPlace(path="", tier="local"), found=tuple(found.values()), remains=())
        plan = plan_pruning(looked, rule, now_ns=0).checkpoints
        return {one for one, listed in found.items() if any(listed is goes for goes in plan)}

    loadable = {one for one in kinds if one[1] == "loadable"}
    gone = deleted(kinds)
    newest = max((iteration for iteration, _ in loadable), default=-1)
    assert gone & loadable == deleted(loadable)
    assert gone - loadable == {(at, kind) for at, kind in kinds if kind == "abandoned" and at < newest}
    assert newest == -1 or (newest, "loadable") not in gone


@pytest.mark.parametrize("content", [None, b"{}"])
def test_another_programs_folder_is_never_deleted(tmp_path: Path, content: bytes | None) -> None:
    """A folder ``step-<n>`` without a manifest of this package is listed as bad, and stays."""
    for iteration in (10, 20, 30):
        lay_checkpoint({"node0": tmp_path}, iteration)
    other = tmp_path / "step-5"
    other.mkdir()
    (other / "model.bin").write_bytes(b"of another program")
    if content is not None:
        (other / "manifest.json").write_bytes(content)
    plan = plan_pruning(look_into(str(tmp_path)), Rule(most_recent_k=1), now_ns=0)
    assert [found.entry.iteration for found in plan.checkpoints] == [10]
