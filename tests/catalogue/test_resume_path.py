"""`resolve_resume_path` returns checkpoints that prove valid, and no others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from laid_checkpoints import flip, two_nodes
from laid_store import lay_in_store

from outlast.errors import ConfigError
from outlast.integrations import kempnerforge
from outlast.integrations.slurm import resolve_resume_path
from outlast.policy.recovery_point import Exclusion
from outlast.policy.recovery_policy import RecoveryState


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A global directory with checkpoints 100, 200 and 300."""

    def write(name: str, data: bytes) -> None:
        path = tmp_path / "global" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    for iteration in (100, 200, 300):
        lay_in_store(write, iteration)
    return tmp_path / "global"


def test_newest_valid_one(place: Path) -> None:
    """The newest checkpoint is returned when all of it is what was saved."""
    assert resolve_resume_path(place) == place / "step-300"
    assert resolve_resume_path(f"file://{place}") == place / "step-300"


def test_damage_that_only_reading_shows(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One flipped bit in the newest is found, said, and the one before returned."""
    flip(place / "step-300" / "__1_0.distcp", 5000)
    assert resolve_resume_path(place) == place / "step-200"
    assert "iteration 300" in caplog.text
    assert "differs from its digest" in caplog.text


def test_torn_ones_are_passed_over(place: Path) -> None:
    """A truncated file, and a missing one, leave an older checkpoint; a tracker that lies changes nothing."""
    with open(place / "step-300" / "__0_0.distcp", "r+b") as file:
        file.truncate(100)
    (place / "step-200" / "__1_0.distcp").unlink()
    assert resolve_resume_path(place) == place / "step-100"


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    """A first start, with no directory or an empty one, has nothing to resume from."""
    assert resolve_resume_path(tmp_path / "none") is None
    assert resolve_resume_path(tmp_path) is None


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    """A file is not silently taken for an empty directory."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        resolve_resume_path(tmp_path / "file")


def test_local_tier(tmp_path: Path) -> None:
    """Of a local tier it is the folder on a node, when no rank's part is missing; saves for diagnosis never."""
    two_nodes(tmp_path, 100)
    two_nodes(tmp_path, 200, suspect=True)
    assert resolve_resume_path(tmp_path) == tmp_path / "node0" / "step-100"
    assert resolve_resume_path(tmp_path / "node0") == tmp_path / "node0" / "step-100"


def test_what_led_to_invalid_results(place: Path, tmp_path: Path) -> None:
    """A checkpoint that the run's recovery policy distrusts is passed over, though its bytes are right."""
    excluded = Exclusion(checkpoint=300, attempt="job-0-cafe.300", tier="global")
    (tmp_path / "ladder.json").write_bytes(msgspec.json.encode(RecoveryState(excluded=(excluded,))))
    assert resolve_resume_path(place, run_dir=tmp_path) == place / "step-200"
    assert resolve_resume_path(place) == place / "step-300"


def their_step(folder: Path, step: int, *, is_whole: bool = True) -> Path:
    """Lay out a checkpoint as KempnerForge does."""
    path = folder / f"step_{step}"
    (path / "pp0").mkdir(parents=True)
    (path / "metadata.json").write_text(f'{{"step": {step}}}')
    if is_whole:
        (path / "pp0" / ".metadata").touch()
    return path


def test_a_checkpoint_of_kempnerforge_is_resumed_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``latest`` counts, else the highest step that is whole; a WARNING says that its bytes are not verified."""
    assert kempnerforge.resolve_resume_path(tmp_path / "none") is None
    assert kempnerforge.resolve_resume_path(tmp_path) is None
    assert not caplog.records
    torn = their_step(tmp_path, 50, is_whole=False)
    assert kempnerforge.resolve_resume_path(tmp_path) == torn  # their code decides
    for step in (100, 1000, 200):
        their_step(tmp_path, step)
    their_step(tmp_path, 2000, is_whole=False)
    caplog.clear()
    assert kempnerforge.resolve_resume_path(str(tmp_path)) == tmp_path / "step_1000"
    assert "step_2000 has no .metadata: its save was cut short" in caplog.text
    assert f"resuming from {tmp_path / 'step_1000'}, a checkpoint of KempnerForge" in caplog.text
    (tmp_path / "latest").symlink_to("step_200")
    assert kempnerforge.resolve_resume_path(str(tmp_path)) == tmp_path / "step_200"


def test_of_both_kinds_the_newest_is_resumed_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that has changed to outlast resumes from outlast's checkpoint, once it is as new as KempnerForge's."""

    def write(name: str, data: bytes) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    their_step(tmp_path, 250)
    lay_in_store(write, 200)
    assert kempnerforge.resolve_resume_path(tmp_path) == tmp_path / "step_250"
    lay_in_store(write, 300)
    caplog.clear()
    assert kempnerforge.resolve_resume_path(tmp_path) == tmp_path / "step-300"
    assert not caplog.records


def test_another_systems_checkpoints_are_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Outlast's own function returns none of them, and says so."""
    their_step(tmp_path, 100)
    assert resolve_resume_path(tmp_path) is None
    assert f"{tmp_path} holds no checkpoint of outlast, but step_100" in caplog.text
