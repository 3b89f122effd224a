"""`resolve_resume_path` returns only checkpoints that it has verified."""

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


def test_the_newest_valid_checkpoint_is_returned(place: Path) -> None:
    """The newest checkpoint is returned if every byte is correct."""
    assert resolve_resume_path(place) == place / "step-300"
    assert resolve_resume_path(f"file://{place}") == place / "step-300"


def test_a_corrupt_checkpoint_is_skipped(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit in the newest checkpoint is logged, and the previous checkpoint is returned."""
    flip(place / "step-300" / "__1_0.distcp", 5000)
    assert resolve_resume_path(place) == place / "step-200"
    assert "iteration 300" in caplog.text
    assert "differs from its digest" in caplog.text


def test_torn_checkpoints_are_skipped(place: Path) -> None:
    """Checkpoints with a truncated or missing file are skipped, whatever the tracker contains."""
    with open(place / "step-300" / "__0_0.distcp", "r+b") as file:
        file.truncate(100)
    (place / "step-200" / "__1_0.distcp").unlink()
    assert resolve_resume_path(place) == place / "step-100"


def test_a_first_start_returns_none(tmp_path: Path) -> None:
    """A missing or empty directory yields ``None``."""
    assert resolve_resume_path(tmp_path / "none") is None
    assert resolve_resume_path(tmp_path) is None


def test_a_file_is_rejected(tmp_path: Path) -> None:
    """A path that is a file is rejected, not treated as an empty directory."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        resolve_resume_path(tmp_path / "file")


def test_a_local_tier_returns_a_nodes_folder(tmp_path: Path) -> None:
    """In a local tier the folder on a node is returned if no rank's part is missing; suspect checkpoints never are."""
    two_nodes(tmp_path, 100)
    two_nodes(tmp_path, 200, suspect=True)
    assert resolve_resume_path(tmp_path) == tmp_path / "node0" / "step-100"
    assert resolve_resume_path(tmp_path / "node0") == tmp_path / "node0" / "step-100"


def test_an_excluded_checkpoint_is_skipped(place: Path, tmp_path: Path) -> None:
    """A checkpoint that the run's recovery policy excluded is skipped, although its bytes are correct."""
    excluded = Exclusion(checkpoint=300, attempt="job-0-cafe.300", tier="global")
    (tmp_path / "ladder.json").write_bytes(msgspec.json.encode(RecoveryState(excluded=(excluded,))))
    assert resolve_resume_path(place, run_dir=tmp_path) == place / "step-200"
    assert resolve_resume_path(place) == place / "step-300"


def write_kempnerforge_step(folder: Path, step: int, *, is_complete: bool = True) -> Path:
    """Write a checkpoint in the layout of KempnerForge."""
    path = folder / f"step_{step}"
    (path / "pp0").mkdir(parents=True)
    (path / "metadata.json").write_text(f'{{"step": {step}}}')
    if is_complete:
        (path / "pp0" / ".metadata").touch()
    return path


def test_a_kempnerforge_checkpoint_is_returned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``latest`` decides, else the highest complete step; a WARNING reports that its bytes are not verified."""
    assert kempnerforge.resolve_resume_path(tmp_path / "none") is None
    assert kempnerforge.resolve_resume_path(tmp_path) is None
    assert not caplog.records
    torn = write_kempnerforge_step(tmp_path, 50, is_complete=False)
    assert kempnerforge.resolve_resume_path(tmp_path) == torn  # KempnerForge's own code decides
    for step in (100, 1000, 200):
        write_kempnerforge_step(tmp_path, step)
    write_kempnerforge_step(tmp_path, 2000, is_complete=False)
    caplog.clear()
    assert kempnerforge.resolve_resume_path(str(tmp_path)) == tmp_path / "step_1000"
    assert "step_2000 has no .metadata: its save was cut short" in caplog.text
    assert f"resuming from {tmp_path / 'step_1000'}, a checkpoint of KempnerForge" in caplog.text
    (tmp_path / "latest").symlink_to("step_200")
    assert kempnerforge.resolve_resume_path(str(tmp_path)) == tmp_path / "step_200"


def test_the_newest_of_both_formats_is_returned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint is returned, whether outlast or KempnerForge wrote it."""

    def write(name: str, data: bytes) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    write_kempnerforge_step(tmp_path, 250)
    lay_in_store(write, 200)
    assert kempnerforge.resolve_resume_path(tmp_path) == tmp_path / "step_250"
    lay_in_store(write, 300)
    caplog.clear()
    assert kempnerforge.resolve_resume_path(tmp_path) == tmp_path / "step-300"
    assert not caplog.records


def test_skipped_foreign_checkpoints_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`resolve_resume_path` ignores checkpoints of other systems and logs that it does."""
    write_kempnerforge_step(tmp_path, 100)
    assert resolve_resume_path(tmp_path) is None
    assert f"{tmp_path} holds no checkpoint of outlast, but step_100" in caplog.text
