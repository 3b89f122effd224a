"""Output, exit codes and rejected arguments of ``outlast ckpt``."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from laid_checkpoints import RUN, flip, lay_checkpoint, two_nodes

from outlast.checkpoint.shard import shard_name

Command = Callable[..., tuple[int, str, str]]


def test_ls_prints_a_readable_table(tmp_path: Path, outlast: Command) -> None:
    """``ckpt ls`` prints each checkpoint's state, ranks, lineage, location and problems."""
    two_nodes(tmp_path, 100)
    two_nodes(tmp_path, 200, restored_from=100)
    (tmp_path / "node0/step-200" / shard_name(1)).unlink()
    lay_checkpoint({"node0": tmp_path / "node0"}, 300, name="step-300.tmp-job-0-cafe.3")
    code, out, _ = outlast("ckpt", "ls", tmp_path)
    assert code == 0
    lines = out.splitlines()
    assert RUN in lines[0]
    assert "latest 200" in lines[0]
    older = next(line for line in lines if line.split()[:1] == ["100"])
    assert "valid" in older
    assert "all 4" in older
    assert "node0: 0-1 +2-3; node1: 2-3 +0-1" in older
    assert "degraded" in next(line for line in lines if line.split()[:1] == ["200"])
    assert "node0/step-200/rank-00001.safetensors: is missing" in out
    assert "node0/step-300.tmp-job-0-cafe.3: attempt, failed or under way" in out


def test_ls_prints_the_documented_json(tmp_path: Path, outlast: Command) -> None:
    """``ckpt ls --json`` prints the documented fields and no others."""
    two_nodes(tmp_path, 100)
    code, out, _ = outlast("ckpt", "ls", "--json", tmp_path)
    output = json.loads(out)
    assert (code, output["schema"]) == (0, 1)
    (place,) = output["places"]
    assert set(place) == {"path", "tier", "run", "latest", "nodes", "problems", "checkpoints", "leftovers"}
    (entry,) = place["checkpoints"]
    assert entry["held"][1] == {"node": "node1", "own": [2, 3], "replicas": [0, 1], "parities": []}
    names = "iteration tier suspect valid attempt run world_size num_files num_bytes held elsewhere rebuildable missing"
    lineage = {"restored_from", "restored_attempt", "era", "forks", "abandoned"}
    assert set(entry) == {*names.split(), *lineage, "finite", "unverified", "problems"}


def test_ls_exits_0_when_a_checkpoint_is_bad(tmp_path: Path, outlast: Command) -> None:
    """``ckpt ls`` exits with 0 even if a listed checkpoint is bad."""
    lay_checkpoint({"node0": tmp_path}, 1)
    (tmp_path / "step-1" / shard_name(0)).unlink()
    code, out, _ = outlast("ckpt", "ls", tmp_path)
    assert code == 0
    assert "bad" in out
    assert outlast("ckpt", "ls", tmp_path / "step-1")[0] == 2


def test_verify_reports_success(tmp_path: Path, outlast: Command) -> None:
    """``ckpt verify`` exits with 0 and reports the number of checkpoints when every byte is correct."""
    two_nodes(tmp_path, 100)
    code, out, err = outlast("ckpt", "verify", tmp_path)
    assert code == 0
    assert "every byte of 1 checkpoint is correct" in out
    assert err == ""


def test_verify_reports_corruption(tmp_path: Path, outlast: Command) -> None:
    """``ckpt verify`` exits with 1 and reports the file, chunk and tensor of a flipped byte, as text and as JSON."""
    two_nodes(tmp_path, 100)
    two_nodes(tmp_path, 200)
    flip(tmp_path / "node1/step-100" / shard_name(0), 5000)
    code, out, _ = outlast("ckpt", "verify", tmp_path)
    assert code == 1
    assert "node1/step-100/rank-00000.safetensors: chunk 0" in out
    assert "model.weight" in out
    code, out, _ = outlast("ckpt", "verify", tmp_path, "--json")
    output = json.loads(out)
    assert (code, output["ok"]) == (1, False)
    problems = [problem for entry in output["places"][0]["checkpoints"] for problem in entry["problems"]]
    assert [(one["kind"], one["node"], one["rank"], one["chunk"]) for one in problems] == [("Corrupt", "node1", 0, 0)]
    assert outlast("ckpt", "verify", tmp_path, "--iteration", 200)[0] == 0


def test_verify_of_an_empty_directory_fails(tmp_path: Path, outlast: Command) -> None:
    """``ckpt verify`` exits with 1 for a directory without checkpoints."""
    assert outlast("ckpt", "verify", tmp_path)[0] == 1


def test_prune_deletes_the_checkpoints_of_its_dry_run(tmp_path: Path, outlast: Command) -> None:
    """A dry run deletes nothing; the real run deletes exactly the checkpoints that the dry run reported."""
    for iteration in (1, 2, 3, 4):
        lay_checkpoint({"node0": tmp_path}, iteration)
    arguments = ("ckpt", "prune", tmp_path, "--keep", 2, "--suspect-window", 0, "--json")
    code, out, _ = outlast(*arguments, "--dry-run")
    planned = json.loads(out)["places"][0]
    assert (code, planned["checkpoints"]) == (0, [2, 1])
    assert len(list(tmp_path.glob("step-*"))) == 4
    code, out, _ = outlast(*arguments)
    assert (code, json.loads(out)["places"][0]) == (0, planned)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-3", "step-4"]
    code, out, _ = outlast("ckpt", "prune", tmp_path, "--keep", 2)
    assert "nothing to delete" in out


def test_prune_reports_a_failed_deletion(tmp_path: Path, outlast: Command) -> None:
    """A checkpoint that cannot be deleted makes ``ckpt prune`` exit with 1 and one line; the others are deleted."""
    for iteration in (1, 2, 3, 4):
        lay_checkpoint({"node0": tmp_path}, iteration)
    (tmp_path / "step-1.doomed").write_bytes(b"in the way")
    code, _, err = outlast("ckpt", "prune", tmp_path, "--keep", 1, "--suspect-window", 0)
    assert code == 1
    assert "checkpoint 1" in err
    assert sorted(path.name for path in tmp_path.glob("step-?")) == ["step-1", "step-3", "step-4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls",), "missing argument 'DIR...'"),
        (("ls", "/nowhere/at/all"), "does not exist"),
        (("verify", "{place}", "--iteration", "7"), "--iteration=7: no such checkpoint in"),
        (("verify", "{place}", "--threads", "0"), "--threads"),
        (("prune", "{place}"), "--keep"),
        (("prune", "{place}", "--keep", "0"), "--keep"),
    ],
)
def test_invalid_arguments_print_one_line(
    tmp_path: Path, outlast: Command, arguments: tuple[str, ...], message: str
) -> None:
    """Invalid arguments make the command exit with 2 and one line that contains the argument to change."""
    lay_checkpoint({"node0": tmp_path}, 1)
    code, out, err = outlast("ckpt", *(word.format(place=tmp_path) for word in arguments))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_ls_lists_the_others_after_an_unreadable_directory(tmp_path: Path, outlast: Command) -> None:
    """``ckpt ls`` exits with 1 and one line for an unreadable directory, and lists the other directories."""
    lay_checkpoint({"node0": tmp_path / "good"}, 1)
    code, out, err = outlast("ckpt", "ls", "nosuchstore://bucket/run", tmp_path / "good")
    assert code == 1
    assert "nosuchstore" in err
    assert len(err.splitlines()) == 1
    assert "all 1" in out or "valid" in out


@pytest.mark.process
@pytest.mark.parametrize(("answer", "expected_remaining"), [("n", 3), ("y", 2)])
def test_prune_requires_confirmation_on_a_terminal(tmp_path: Path, answer: str, expected_remaining: int) -> None:
    """On a terminal ``ckpt prune`` deletes nothing before the user confirms."""
    for iteration in (1, 2, 3):
        lay_checkpoint({"node0": tmp_path}, iteration)
    parent_fd, child_fd = pty.openpty()
    code = "import sys; from outlast.cli.main import main; sys.argv = sys.argv[1:]; main()"
    try:
        os.write(parent_fd, f"{answer}\n".encode())
        done = subprocess.run(
            [sys.executable, "-c", code, "outlast", "ckpt", "prune", str(tmp_path), "--keep", "1"],
            stdin=child_fd,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        os.close(parent_fd)
        os.close(child_fd)
    assert "Delete this?" in done.stderr
    assert done.returncode == (0 if answer == "y" else 130)
    assert len(list(tmp_path.glob("step-*"))) == expected_remaining


@pytest.mark.process
@pytest.mark.cold
@pytest.mark.parametrize("name", ["ls", "verify", "prune"])
def test_local_directories_do_not_import_torch(tmp_path: Path, name: str) -> None:
    """Local directories are listed, verified and pruned without importing torch, numpy or fsspec."""
    lay_checkpoint({"node0": tmp_path}, 1)
    code = (
        "import sys; from outlast.cli.main import cli\n"
        "done = cli.main(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'fsspec'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else done)\n"
    )
    arguments = [*("ckpt", name, str(tmp_path)), *(("--keep", "1") if name == "prune" else ())]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
