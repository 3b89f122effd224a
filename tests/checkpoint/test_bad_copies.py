"""All ranks skip a copy that is torn, corrupt or misplaced."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from saving_ranks import start

SAVE = """
manager = manage()
saved = []
for iteration in (1, 2):
    train()
    manager.save(state, iteration).wait(100)
    saved.append(content())
tell(saved=saved)
manager.close()
"""
LOAD = """
manager = manage()
try:
    restored = manager.load_latest(state)
    rejected = [(one.checkpoint, one.tier, one.rank, one.file, one.reason) for one in restored.rejected]
    tell(iteration=restored.iteration, loaded=content(), rejected=rejected)
except CheckpointError as error:
    tell(error=str(error), kind=type(error).__name__)
manager.close()
"""


def _flip(folder: Path) -> None:
    shard = folder / "step-2" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def _flip_header(folder: Path) -> None:
    shard = folder / "step-2" / "rank-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b'"shape":[64,64]', b'"shape":[64,65]', 1))


def _truncate(folder: Path) -> None:
    shard = folder / "step-2" / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def _other_rank(folder: Path) -> None:
    shutil.copy(folder / "step-2" / "rank-00000.safetensors", folder / "step-2" / "rank-00001.safetensors")


def _older(folder: Path) -> None:
    shutil.copy(folder / "step-1" / "rank-00001.safetensors", folder / "step-2" / "rank-00001.safetensors")


def _of_another_run(folder: Path) -> None:
    shutil.copy(folder.with_name("foreign") / "rank-00001.safetensors", folder / "step-2" / "rank-00001.safetensors")


def _no_manifest(folder: Path) -> None:
    (folder / "step-2" / "manifest.json").unlink()


def _edited_manifest(folder: Path) -> None:
    manifest = folder / "step-2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"iteration":2', '"iteration":3'))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[list[float]]]]:
    """Two checkpoints of two ranks, each rank's saved state, and the checkpoints of another run."""
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    assert [code for code, _ in start(folder.with_name("foreign"), SAVE, world=2)] == [0, 0]
    results = start(folder, SAVE, world=2)
    assert [code for code, _ in results] == [0, 0], results
    return folder, [report["saved"] for _, report in results]


@pytest.mark.process
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, "differs from its digest"),
        pytest.param(_flip_header, "contradicts itself about tensor", marks=pytest.mark.extended),
        pytest.param(_truncate, "bytes long instead of", marks=pytest.mark.extended),
        pytest.param(_other_rank, "instead of", marks=pytest.mark.extended),
        (_older, "instead of"),
        pytest.param(_of_another_run, "is the shard of run", marks=pytest.mark.extended),
        (_no_manifest, "there is no manifest"),
        pytest.param(_edited_manifest, "differs from its own SHA-256", marks=pytest.mark.extended),
    ],
)
def test_all_ranks_skip_a_bad_copy(
    tmp_path: Path, saved: tuple[Path, list[list[list[float]]]], damage: Callable[[Path], None], reason: str
) -> None:
    """Both ranks report the same rank, file and reason, and load the older checkpoint bit by bit."""
    folder = tmp_path / "ckpt"
    shutil.copytree(saved[0], folder)
    shutil.copytree(saved[0].with_name("foreign") / "step-2", tmp_path / "foreign")
    damage(folder)
    results = start(folder, LOAD, world=2)
    assert [code for code, _ in results] == [0, 0], results
    first, second = (report for _, report in results)
    assert first["iteration"] == second["iteration"] == 1
    assert [first["loaded"], second["loaded"]] == [content[0] for content in saved[1]]
    assert first["rejected"] == second["rejected"]
    assert any(
        (checkpoint, tier, rank) == (2, "local", 1) and reason in problem and file.startswith("step-2/")
        for checkpoint, tier, rank, file, problem in first["rejected"]
    ), first


@pytest.mark.process
def test_checkpoints_of_another_run_fail_the_load(tmp_path: Path, saved: tuple[Path, list[list[list[float]]]]) -> None:
    """If the directory belongs to one run and its checkpoints to another, the load fails on all ranks."""
    folder = tmp_path / "ckpt"
    shutil.copytree(saved[0], folder)
    foreign = saved[0].with_name("foreign")
    shutil.copy(foreign / "run.json", folder / "run.json")
    shutil.copy(foreign / "step-2" / "manifest.json", folder / "step-2" / "manifest.json")
    for code, report in start(folder, LOAD, world=2):
        assert code == 0, report
        assert report["kind"] == "Untrusted"
        assert "checkpoint 2" in report["error"]
        assert "is the shard of run" in report["error"]
        assert "checkpoint 1" in report["error"]
        assert "belongs to run" in report["error"]


@pytest.mark.process
def test_another_world_size_is_rejected(tmp_path: Path, saved: tuple[Path, list[list[list[float]]]]) -> None:
    """One rank cannot load a checkpoint of two ranks, and the error contains the required number of ranks."""
    folder = tmp_path / "ckpt"
    shutil.copytree(saved[0], folder)
    ((code, report),) = start(folder, LOAD)
    assert code == 0, report
    assert report["kind"] == "Untrusted"
    assert "start with 2 ranks" in report["error"]
