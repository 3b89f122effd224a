"""What ``outlast ckpt ls`` knows of nodes' folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from laid_checkpoints import RUN, attempt_name, flip, lay_checkpoint, two_nodes

from outlast.checkpoint.catalogue.entries import Checkpoint
from outlast.checkpoint.catalogue.listing import look_into
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.shard import shard_name
from outlast.errors import ConfigError


def only(place: Path) -> Checkpoint:
    (entry,) = look_into(str(place)).entry.checkpoints
    return entry


def test_whole_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    """Checkpoints on two nodes are told with their ranks, replicas, lineage and size."""
    two_nodes(tmp_path, 100)
    two_nodes(tmp_path, 200, restored_from=100, finite=False)
    place = look_into(str(tmp_path)).entry
    assert (place.tier, place.run, place.latest, place.nodes) == ("local", RUN, 200, ("node0", "node1"))
    newest, older = place.checkpoints
    assert (newest.iteration, newest.valid, newest.restored_from, newest.finite) == (200, True, 100, False)
    assert (older.iteration, older.valid, older.restored_from, older.finite) == (100, True, None, True)
    assert newest.attempt == attempt_name(200)
    assert [(held.node, held.own, held.replicas) for held in newest.held] == [
        ("node0", (0, 1), (2, 3)),
        ("node1", (2, 3), (0, 1)),
    ]
    files = list(tmp_path.glob("node*/step-200/*"))
    assert newest.num_files == len(files) == 10
    assert newest.num_bytes == sum(path.stat().st_size for path in files)
    assert not newest.problems


def test_a_file_url_is_taken_literally(tmp_path: Path) -> None:
    """`%20` in it stands for itself, as where a run saves and as for fsspec."""
    for name in ("a b", "a%20b"):
        folder = tmp_path / name
        lay_checkpoint({"node0": folder}, 5)
        assert GlobalDirectory.open(f"file://{folder}").url == str(folder)
        assert look_into(f"file://{folder}").entry.path == str(folder)
        assert look_into(f"file://{folder}").entry.checkpoints[0].valid


def test_a_folder_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """No run saves to such a folder, and no table and no JSON could name it: one line says so."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/ck\xff")
    os.mkdir(folder)
    with pytest.raises(ConfigError, match=r"ck\\udcff is not UTF-8; no run saves to such a folder; rename it"):
        look_into(folder)


def test_one_node_speaks_for_its_own_ranks(tmp_path: Path) -> None:
    """Seen from one node's folder, another node's ranks are elsewhere, not missing; a replica here counts."""
    two_nodes(tmp_path, 5)
    (tmp_path / "node0/step-5" / shard_name(3)).unlink()
    entry = only(tmp_path / "node0")
    assert entry.valid
    assert entry.elsewhere == (3,)
    assert entry.missing == ()
    assert not entry.problems


def test_a_lost_node_is_covered_by_replicas(tmp_path: Path) -> None:
    """When a node's folder is gone, its ranks are found on its partner, and nothing is missing."""
    two_nodes(tmp_path, 5)
    shutil.rmtree(tmp_path / "node1")
    entry = only(tmp_path)
    assert entry.valid
    assert entry.elsewhere == ()
    assert entry.held[0].replicas == (2, 3)


def test_a_lost_node_is_covered_by_parity(tmp_path: Path) -> None:
    """Of a group that shares a parity one node may be gone; with two gone their ranks are missing."""
    nodes = ("node0", "node1", "node2")
    lay_checkpoint({node: tmp_path / node for node in nodes}, 5, nodes=nodes, parity=2)
    assert only(tmp_path).rebuildable == ()
    (tmp_path / "node1/step-5" / shard_name(1)).unlink()
    entry = only(tmp_path)
    assert entry.valid
    assert (entry.rebuildable, entry.missing) == ((1,), ())
    assert entry.held[0].parities == (0,)
    (tmp_path / "node2/step-5/parity-00002.bin").unlink()
    entry = only(tmp_path)
    assert not entry.valid
    assert (entry.rebuildable, entry.missing) == ((), (1,))
    shutil.rmtree(tmp_path / "node1")
    assert only(tmp_path).elsewhere == (1,)


def test_a_replaced_node_has_nothing(tmp_path: Path) -> None:
    """A node that came back empty is named; the checkpoint is valid by the replicas."""
    two_nodes(tmp_path, 5)
    shutil.rmtree(tmp_path / "node1")
    (tmp_path / "node1").mkdir()
    entry = only(tmp_path)
    assert entry.valid
    assert [problem.node for problem in entry.problems if problem.file == "node1/step-5"] == ["node1"]


@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (lambda path: path.unlink(), "Incomplete", "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "Incomplete", "bytes long instead of"),
        (lambda path: path.write_bytes(b""), "Incomplete", "is 0 bytes long"),
        (lambda path: flip(path, 9), "Corrupt", "the header cannot be read"),
        (
            lambda path: shutil.copy(path.with_name(shard_name(1)), path),
            "Untrusted",
            "is the shard of rank 1 instead of 0",
        ),
        (
            lambda path: shutil.copy(path.parents[1] / "step-1" / path.name, path),
            "Untrusted",
            "iteration 1 instead of 7",
        ),
    ],
)
def test_torn_shards_are_seen_unread(tmp_path: Path, damage: object, kind: str, reason: str) -> None:
    """A shard that is missing, cut, or another one is named, and without another copy the checkpoint is bad."""
    folders = {"node0": tmp_path / "node0"}
    for iteration in (1, 7):
        lay_checkpoint(folders, iteration, nodes=("node0", "node0"))
    path = tmp_path / "node0/step-7" / shard_name(0)
    damage(path)  # type: ignore[operator]
    entry, older = look_into(str(tmp_path)).entry.checkpoints
    assert older.valid
    assert not entry.valid
    assert entry.missing == (0,)
    (problem,) = entry.problems
    assert (problem.kind, problem.file, problem.node, problem.rank) == (kind, f"node0/step-7/{path.name}", "node0", 0)
    assert reason in problem.reason


def test_a_bad_copy_beside_a_good_one_is_told(tmp_path: Path) -> None:
    """A rank whose own file is torn stays covered by its replica; the torn one is a problem all the same."""
    two_nodes(tmp_path, 5)
    (tmp_path / "node0/step-5" / shard_name(0)).write_bytes(b"x" * 100)
    entry = only(tmp_path)
    assert entry.valid
    assert [(problem.rank, problem.node) for problem in entry.problems] == [(0, "node0")]
    assert entry.held[0].own == (1,)


def test_lost_replicas_are_told(tmp_path: Path) -> None:
    """A replica that was committed and is gone is told, once all nodes are here."""
    two_nodes(tmp_path, 5)
    (tmp_path / "node0/step-5" / shard_name(2)).unlink()
    entry = only(tmp_path)
    assert entry.valid
    (problem,) = entry.problems
    assert problem.rank == 2
    assert problem.reason == "0 of 1 copies on other nodes are left"


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda path: path.unlink(), "Incomplete"),
        (lambda path: path.write_bytes(b"{}"), "Corrupt"),
        (lambda path: flip(path, 60), "Corrupt"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "Corrupt"),
    ],
)
def test_a_bad_manifest_makes_a_checkpoint_bad(tmp_path: Path, damage: object, kind: str) -> None:
    """Without a manifest that can be trusted nothing in the folder counts."""
    lay_checkpoint({"node0": tmp_path}, 3)
    damage(tmp_path / "step-3" / MANIFEST)  # type: ignore[operator]
    entry = only(tmp_path)
    assert not entry.valid
    assert entry.attempt is None
    assert [(problem.kind, problem.file) for problem in entry.problems] == [(kind, "step-3/manifest.json")]


def test_a_bad_manifest_on_one_node_is_that_nodes_problem(tmp_path: Path) -> None:
    """The other node's manifest and replicas still make a checkpoint."""
    two_nodes(tmp_path, 3)
    flip(tmp_path / "node0/step-3" / MANIFEST, 60)
    entry = only(tmp_path)
    assert entry.valid
    assert ("node0", "Corrupt") in [(problem.node, problem.kind) for problem in entry.problems]
    assert [held.node for held in entry.held] == ["node1"]


def test_another_runs_checkpoint_is_told(tmp_path: Path) -> None:
    """A checkpoint of another run in the folder is not valid here; which run the folder belongs to, the manifests say,
    and `run.json` where they name several."""
    lay_checkpoint({"node0": tmp_path}, 3)
    lay_checkpoint({"node0": tmp_path}, 5, run="run-of-others")
    place = look_into(str(tmp_path)).entry
    assert (place.run, place.problems) == (RUN, ())
    other, ours = place.checkpoints
    assert (other.valid, ours.valid) == (False, True)
    assert [problem.kind for problem in other.problems] == ["Untrusted"]
    (tmp_path / "run.json").write_text('{"run":"run-nobody"}')
    place = look_into(str(tmp_path)).entry
    assert place.run == "run-of-others"  # the newest checkpoint's
    assert [problem.kind for problem in place.problems] == ["Corrupt"]


def test_a_folder_that_the_run_of_the_others_took_over_is_no_problem(tmp_path: Path) -> None:
    """A spare's folder holds another run's checkpoint, and names the run of the nodes beside it, which has committed
    nothing there yet; alone, nothing proves that name, and it is told."""
    folders = {node: tmp_path / node for node in ("node0", "node1")}
    lay_checkpoint({"node0": folders["node0"]}, 5)
    lay_checkpoint({"node1": folders["node1"]}, 3, nodes=("node1",), run="run-of-others")
    (folders["node1"] / "run.json").write_text(f'{{"run":"{RUN}"}}')
    assert look_into(str(tmp_path)).entry.problems == ()
    (problem,) = look_into(str(folders["node1"])).entry.problems
    assert f"names run {RUN}" in problem.reason


def test_a_moved_checkpoint_is_told(tmp_path: Path) -> None:
    """A folder renamed to another iteration is not that iteration."""
    lay_checkpoint({"node0": tmp_path}, 3)
    (tmp_path / "step-3").rename(tmp_path / "step-4")
    entry = only(tmp_path)
    assert (entry.iteration, entry.valid) == (4, False)
    assert "iteration 3" in entry.problems[0].reason


def test_a_copied_folder_keeps_its_ranks(tmp_path: Path) -> None:
    """A node's folder under another name (a backup) is judged by the ranks that it holds."""
    two_nodes(tmp_path / "run", 5)
    (tmp_path / "run/node1/step-5" / shard_name(0)).unlink()
    shutil.copytree(tmp_path / "run/node1", tmp_path / "backup")
    entry = only(tmp_path / "backup")
    assert entry.valid
    assert entry.held[0].own == (2, 3)
    assert entry.elsewhere == (0,)


def test_machines_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Two machines called alike have numbered names in the manifest and plain ones on their disks."""
    for machine, own in (("a", (0, 1)), ("b", (2, 3))):
        nodes = ("box", "box", "box.2", "box.2")
        lay_checkpoint({"box" if machine == "a" else "box.2": tmp_path / machine / "box"}, 5, nodes=nodes)
        entry = only(tmp_path / machine)
        assert entry.valid
        assert entry.held[0].own == own


def test_saves_for_diagnosis_are_apart(tmp_path: Path) -> None:
    """Suspect checkpoints come last and are marked."""
    lay_checkpoint({"node0": tmp_path / "node0"}, 5)
    lay_checkpoint({"node0": tmp_path / "node0"}, 9, suspect=True)
    entries = look_into(str(tmp_path)).entry.checkpoints
    assert [(entry.iteration, entry.suspect, entry.valid) for entry in entries] == [(5, False, True), (9, True, True)]


def test_leftovers_are_no_checkpoints(tmp_path: Path) -> None:
    """Attempts, what was set aside and half deletions are listed apart, with their bytes."""
    lay_checkpoint({"node0": tmp_path}, 5)
    for name in ("step-6.tmp-job-0-cafe.6", "step-4.aside-job-0-cafe.5", "step-1.doomed"):
        lay_checkpoint({"node0": tmp_path}, 6, name=name)
    place = look_into(str(tmp_path)).entry
    assert [entry.iteration for entry in place.checkpoints] == [5]
    assert [(left.kind, left.iteration, left.attempt) for left in place.leftovers] == [
        ("deletion", 1, None),
        ("aside", 4, "job-0-cafe.5"),
        ("attempt", 6, "job-0-cafe.6"),
    ]
    assert all(left.num_bytes > 4000 and left.modified_ns for left in place.leftovers)


def test_an_empty_folder_is_empty(tmp_path: Path) -> None:
    """A folder without checkpoints is no error."""
    place = look_into(str(tmp_path)).entry
    assert (place.tier, place.checkpoints) == ("empty", ())


@pytest.mark.parametrize(
    ("below", "says"),
    [
        ("nowhere", "does not exist"),
        ("node0/step-5", "is a single checkpoint"),
        ("node0/step-5/manifest.json", "is not a directory"),
        ("node0/suspect", "contains saves for diagnosis"),
    ],
)
def test_the_wrong_folder_is_refused(tmp_path: Path, below: str, says: str) -> None:
    """What holds no checkpoints is refused with the name of what does."""
    lay_checkpoint({"node0": tmp_path / "node0"}, 5)
    lay_checkpoint({"node0": tmp_path / "node0"}, 5, suspect=True)
    with pytest.raises(ConfigError, match=says):
        look_into(str(tmp_path / below))
