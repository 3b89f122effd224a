"""A copy that is torn, changed or in the wrong place is passed over by all ranks together."""

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
    """Two checkpoints of two ranks, and what each rank saved; beside them another run's."""
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    assert [code for code, _ in start(folder.with_name("foreign"), SAVE, world=2)] == [0, 0]
    ended = start(folder, SAVE, world=2)
    assert [code for code, _ in ended] == [0, 0], ended
    return folder, [told["saved"] for _, told in ended]


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
def test_all_ranks_pass_over_a_bad_copy_together(
    tmp_path: Path, saved: tuple[Path, list[list[list[float]]]], damage: Callable[[Path], None], reason: str
) -> None:
    """Rank, file and reason are named alike on both ranks, and the older checkpoint is loaded bit by bit."""
    folder = tmp_path / "ckpt"
    shutil.copytree(saved[0], folder)
    shutil.copytree(saved[0].with_name("foreign") / "step-2", tmp_path / "foreign")
    damage(folder)
    ended = start(folder, LOAD, world=2)
    assert [code for code, _ in ended] == [0, 0], ended
    first, second = (told for _, told in ended)
    assert first["iteration"] == second["iteration"] == 1
    assert [first["loaded"], second["loaded"]] == [content[0] for content in saved[1]]
    assert first["rejected"] == second["rejected"]
    assert any(
        (checkpoint, tier, rank) == (2, "local", 1) and reason in why and file.startswith("step-2/")
        for checkpoint, tier, rank, file, why in first["rejected"]
    ), first


@pytest.mark.process
def test_checkpoints_of_another_run_are_an_error_not_a_start_from_scratch(
    tmp_path: Path, saved: tuple[Path, list[list[list[float]]]]
) -> None:
    """Where the directory is one run's and what could be loaded is another's, the load fails on all ranks alike."""
    folder = tmp_path / "ckpt"
    shutil.copytree(saved[0], folder)
    foreign = saved[0].with_name("foreign")
    shutil.copy(foreign / "run.json", folder / "run.json")
    shutil.copy(foreign / "step-2" / "manifest.json", folder / "step-2" / "manifest.json")
    for code, told in start(folder, LOAD, world=2):
        assert code == 0, told
        assert told["kind"] == "Untrusted"
        assert "checkpoint 2" in told["error"]
        assert "is the shard of run" in told["error"]
        assert "checkpoint 1" in told["error"]
        assert "belongs to run" in told["error"]


@pytest.mark.process
def test_another_world_size_is_told_as_such(tmp_path: Path, saved: tuple[Path, list[list[list[float]]]]) -> None:
    """One rank cannot load what two saved, and the error says with how many ranks to start."""
    folder = tmp_path / "ckpt"
    shutil.copytree(saved[0], folder)
    ((code, told),) = start(folder, LOAD)
    assert code == 0, told
    assert told["kind"] == "Untrusted"
    assert "start with 2 ranks" in told["error"]
