"""Listing of node-local folders by ``outlast ckpt ls``."""

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


def only_checkpoint(place: Path) -> Checkpoint:
    (entry,) = look_into(str(place)).entry.checkpoints
    return entry


def test_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    """Checkpoints on two nodes are listed newest first, with ranks, replicas, lineage and size."""
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


def test_a_file_url_is_not_percent_decoded(tmp_path: Path) -> None:
    """``%20`` in a file URL stays as it is, as in a save and in fsspec."""
    for name in ("a b", "a%20b"):
        folder = tmp_path / name
        lay_checkpoint({"node0": folder}, 5)
        assert GlobalDirectory.open(f"file://{folder}").url == str(folder)
        assert look_into(f"file://{folder}").entry.path == str(folder)
        assert look_into(f"file://{folder}").entry.checkpoints[0].valid


def test_a_folder_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    """A folder name that is not UTF-8 is rejected with one line, because no run saves to such a folder."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/ck\xff")
    os.mkdir(folder)
    with pytest.raises(ConfigError, match=r"ck\\udcff is not UTF-8; no run saves to such a folder; rename it"):
        look_into(folder)


def test_one_nodes_folder_lists_other_ranks_as_elsewhere(tmp_path: Path) -> None:
    """In one node's listing, another node's ranks are elsewhere, not missing; a replica counts as held."""
    two_nodes(tmp_path, 5)
    (tmp_path / "node0/step-5" / shard_name(3)).unlink()
    entry = only_checkpoint(tmp_path / "node0")
    assert entry.valid
    assert entry.elsewhere == (3,)
    assert entry.missing == ()
    assert not entry.problems


def test_replicas_cover_a_lost_node(tmp_path: Path) -> None:
    """When a node's folder is lost, its ranks are found on its partner and no rank is missing."""
    two_nodes(tmp_path, 5)
    shutil.rmtree(tmp_path / "node1")
    entry = only_checkpoint(tmp_path)
    assert entry.valid
    assert entry.elsewhere == ()
    assert entry.held[0].replicas == (2, 3)


def test_parity_covers_one_lost_node(tmp_path: Path) -> None:
    """A parity group covers the loss of one node; after the loss of two, their ranks are missing."""
    nodes = ("node0", "node1", "node2")
    lay_checkpoint({node: tmp_path / node for node in nodes}, 5, nodes=nodes, parity=2)
    assert only_checkpoint(tmp_path).rebuildable == ()
    (tmp_path / "node1/step-5" / shard_name(1)).unlink()
    entry = only_checkpoint(tmp_path)
    assert entry.valid
    assert (entry.rebuildable, entry.missing) == ((1,), ())
    assert entry.held[0].parities == (0,)
    (tmp_path / "node2/step-5/parity-00002.bin").unlink()
    entry = only_checkpoint(tmp_path)
    assert not entry.valid
    assert (entry.rebuildable, entry.missing) == ((), (1,))
    shutil.rmtree(tmp_path / "node1")
    assert only_checkpoint(tmp_path).elsewhere == (1,)


def test_an_empty_replacement_node_is_reported(tmp_path: Path) -> None:
    """A node that returned with an empty folder is reported; the replicas keep the checkpoint valid."""
    two_nodes(tmp_path, 5)
    shutil.rmtree(tmp_path / "node1")
    (tmp_path / "node1").mkdir()
    entry = only_checkpoint(tmp_path)
    assert entry.valid
    assert [problem.node for problem in entry.problems if problem.file == "node1/step-5"] == ["node1"]


@pytest.mark.parametrize(
    ("damage_file", "kind", "reason"),
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
def test_listing_detects_torn_shards(tmp_path: Path, damage_file: object, kind: str, reason: str) -> None:
    """Listing reports a missing, truncated or foreign shard; without another copy the checkpoint is invalid."""
    folders = {"node0": tmp_path / "node0"}
    for iteration in (1, 7):
        lay_checkpoint(folders, iteration, nodes=("node0", "node0"))
    path = tmp_path / "node0/step-7" / shard_name(0)
    damage_file(path)  # type: ignore[operator]
    entry, older = look_into(str(tmp_path)).entry.checkpoints
    assert older.valid
    assert not entry.valid
    assert entry.missing == (0,)
    (problem,) = entry.problems
    assert (problem.kind, problem.file, problem.node, problem.rank) == (kind, f"node0/step-7/{path.name}", "node0", 0)
    assert reason in problem.reason


def test_a_torn_shard_with_a_replica_is_reported(tmp_path: Path) -> None:
    """A torn shard is reported even if its replica keeps the checkpoint valid."""
    two_nodes(tmp_path, 5)
    (tmp_path / "node0/step-5" / shard_name(0)).write_bytes(b"x" * 100)
    entry = only_checkpoint(tmp_path)
    assert entry.valid
    assert [(problem.rank, problem.node) for problem in entry.problems] == [(0, "node0")]
    assert entry.held[0].own == (1,)


def test_lost_replicas_are_reported(tmp_path: Path) -> None:
    """A committed replica that is lost is reported when all nodes are present."""
    two_nodes(tmp_path, 5)
    (tmp_path / "node0/step-5" / shard_name(2)).unlink()
    entry = only_checkpoint(tmp_path)
    assert entry.valid
    (problem,) = entry.problems
    assert problem.rank == 2
    assert problem.reason == "0 of 1 copies on other nodes are left"


@pytest.mark.parametrize(
    ("damage_file", "kind"),
    [
        (lambda path: path.unlink(), "Incomplete"),
        (lambda path: path.write_bytes(b"{}"), "Corrupt"),
        (lambda path: flip(path, 60), "Corrupt"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "Corrupt"),
    ],
)
def test_a_bad_manifest_invalidates_the_checkpoint(tmp_path: Path, damage_file: object, kind: str) -> None:
    """A checkpoint without a valid manifest is invalid."""
    lay_checkpoint({"node0": tmp_path}, 3)
    damage_file(tmp_path / "step-3" / MANIFEST)  # type: ignore[operator]
    entry = only_checkpoint(tmp_path)
    assert not entry.valid
    assert entry.attempt is None
    assert [(problem.kind, problem.file) for problem in entry.problems] == [(kind, "step-3/manifest.json")]


def test_a_bad_manifest_invalidates_only_its_node(tmp_path: Path) -> None:
    """The other node's manifest and replicas keep the checkpoint valid."""
    two_nodes(tmp_path, 3)
    flip(tmp_path / "node0/step-3" / MANIFEST, 60)
    entry = only_checkpoint(tmp_path)
    assert entry.valid
    assert ("node0", "Corrupt") in [(problem.node, problem.kind) for problem in entry.problems]
    assert [held.node for held in entry.held] == ["node1"]


def test_another_runs_checkpoint_is_invalid(tmp_path: Path) -> None:
    """A checkpoint of another run is invalid.

    The manifests determine the run of a folder, and ``run.json`` does when they name several runs.
    """
    lay_checkpoint({"node0": tmp_path}, 3)
    lay_checkpoint({"node0": tmp_path}, 5, run="run-of-others")
    place = look_into(str(tmp_path)).entry
    assert (place.run, place.problems) == (RUN, ())
    other, this_run = place.checkpoints
    assert (other.valid, this_run.valid) == (False, True)
    assert [problem.kind for problem in other.problems] == ["Untrusted"]
    (tmp_path / "run.json").write_text('{"run":"run-nobody"}')
    place = look_into(str(tmp_path)).entry
    assert place.run == "run-of-others"  # the run of the newest checkpoint
    assert [problem.kind for problem in place.problems] == ["Corrupt"]


def test_a_spares_old_checkpoint_is_not_a_problem(tmp_path: Path) -> None:
    """A spare's folder may hold another run's checkpoint if its ``run.json`` names the run of the other nodes.

    Listed alone, the name in ``run.json`` is not confirmed by a manifest and is reported.
    """
    folders = {node: tmp_path / node for node in ("node0", "node1")}
    lay_checkpoint({"node0": folders["node0"]}, 5)
    lay_checkpoint({"node1": folders["node1"]}, 3, nodes=("node1",), run="run-of-others")
    (folders["node1"] / "run.json").write_text(f'{{"run":"{RUN}"}}')
    assert look_into(str(tmp_path)).entry.problems == ()
    (problem,) = look_into(str(folders["node1"])).entry.problems
    assert f"names run {RUN}" in problem.reason


def test_a_renamed_checkpoint_is_invalid(tmp_path: Path) -> None:
    """A checkpoint folder renamed to another iteration is invalid."""
    lay_checkpoint({"node0": tmp_path}, 3)
    (tmp_path / "step-3").rename(tmp_path / "step-4")
    entry = only_checkpoint(tmp_path)
    assert (entry.iteration, entry.valid) == (4, False)
    assert "iteration 3" in entry.problems[0].reason


def test_a_backup_folder_is_listed_by_its_ranks(tmp_path: Path) -> None:
    """A node's folder under another name (a backup) is listed by the ranks that it holds."""
    two_nodes(tmp_path / "run", 5)
    (tmp_path / "run/node1/step-5" / shard_name(0)).unlink()
    shutil.copytree(tmp_path / "run/node1", tmp_path / "backup")
    entry = only_checkpoint(tmp_path / "backup")
    assert entry.valid
    assert entry.held[0].own == (2, 3)
    assert entry.elsewhere == (0,)


def test_machines_with_the_same_name_are_distinguished(tmp_path: Path) -> None:
    """Two machines with the same host name have numbered names in the manifest and their plain name on disk."""
    for machine, own in (("a", (0, 1)), ("b", (2, 3))):
        nodes = ("box", "box", "box.2", "box.2")
        lay_checkpoint({"box" if machine == "a" else "box.2": tmp_path / machine / "box"}, 5, nodes=nodes)
        entry = only_checkpoint(tmp_path / machine)
        assert entry.valid
        assert entry.held[0].own == own


def test_suspect_checkpoints_are_listed_last(tmp_path: Path) -> None:
    """Suspect checkpoints come last and are marked."""
    lay_checkpoint({"node0": tmp_path / "node0"}, 5)
    lay_checkpoint({"node0": tmp_path / "node0"}, 9, suspect=True)
    entries = look_into(str(tmp_path)).entry.checkpoints
    assert [(entry.iteration, entry.suspect, entry.valid) for entry in entries] == [(5, False, True), (9, True, True)]


def test_leftovers_are_listed_separately(tmp_path: Path) -> None:
    """Attempts, replaced checkpoints and unfinished deletions are listed apart from checkpoints, with their bytes."""
    lay_checkpoint({"node0": tmp_path}, 5)
    for name in ("step-6.tmp-job-0-cafe.6", "step-4.aside-job-0-cafe.5", "step-1.doomed"):
        lay_checkpoint({"node0": tmp_path}, 6, name=name)
    place = look_into(str(tmp_path)).entry
    assert [entry.iteration for entry in place.checkpoints] == [5]
    assert [(leftover.kind, leftover.iteration, leftover.attempt) for leftover in place.leftovers] == [
        ("deletion", 1, None),
        ("aside", 4, "job-0-cafe.5"),
        ("attempt", 6, "job-0-cafe.6"),
    ]
    assert all(leftover.num_bytes > 4000 and leftover.modified_ns for leftover in place.leftovers)


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    """A folder without checkpoints is listed as empty, without an error."""
    place = look_into(str(tmp_path)).entry
    assert (place.tier, place.checkpoints) == ("empty", ())


@pytest.mark.parametrize(
    ("subpath", "message"),
    [
        ("nowhere", "does not exist"),
        ("node0/step-5", "is a single checkpoint"),
        ("node0/step-5/manifest.json", "is not a directory"),
        ("node0/suspect", "contains saves for diagnosis"),
    ],
)
def test_a_wrong_folder_is_rejected(tmp_path: Path, subpath: str, message: str) -> None:
    """A folder that cannot hold checkpoints is rejected with the reason."""
    lay_checkpoint({"node0": tmp_path / "node0"}, 5)
    lay_checkpoint({"node0": tmp_path / "node0"}, 5, suspect=True)
    with pytest.raises(ConfigError, match=message):
        look_into(str(tmp_path / subpath))
