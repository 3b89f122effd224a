"""Damaged checkpoints: each kind of damage is rejected with the file's name, and nothing is loaded."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lanes import Lanes, flat_state

from outlast.checkpoint.catalogue.listing import look_into, verify
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.reader import VerifiedReader, read_rank
from outlast.checkpoint.dcp.reshard import load_resharded
from outlast.checkpoint.verification import VerifiedFiles
from outlast.errors import CheckpointError, Corrupt, Incomplete, Untrusted

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _state() -> dict[str, object]:
    return {"model": {"a": torch.arange(3000.0), "b": torch.arange(5000.0)}, "n": 3}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("pristine") / "g"
    with Lanes(str(folder), 2, file_bytes=4096) as lanes:
        for iteration in (10, 20):
            state = _state()
            state["n"] = iteration
            flats = [flat_state(state, {"rank": rank}) for rank in range(2)]
            assert lanes.save(flats, iteration) == [None, None]
    return folder


@pytest.fixture
def damaged(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "g")
    return tmp_path / "g"


def _flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def _largest(folder: Path) -> Path:
    return max((folder / "step-20").glob("*.distcp"), key=lambda path: path.stat().st_size)


def _read_all(folder: Path) -> None:
    """Load checkpoint 20 as both of its ranks."""
    directory = GlobalDirectory.open(folder)
    manifest = directory.manifest(20)
    if manifest.iteration != 20:
        raise Untrusted(f"is the manifest of iteration {manifest.iteration}")  # as the callers do
    for rank in range(2):
        read_rank(VerifiedFiles(directory, manifest), rank)


def _drop_manifest(folder: Path) -> str:
    (folder / "step-20" / "manifest.json").unlink()
    return "there is no manifest"


def _drop_file(folder: Path) -> str:
    path = _largest(folder)
    path.unlink()
    return f"step-20/{path.name} is missing"


def _drop_all_files(folder: Path) -> str:
    for path in (folder / "step-20").glob("*.distcp"):
        path.unlink()
    return "is missing"


def _truncate(folder: Path) -> str:
    path = _largest(folder)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    return f"step-20/{path.name} ends after {size - 100} bytes instead of {size}"


def _flip_data(folder: Path) -> str:
    path = _largest(folder)
    _flip(path, path.stat().st_size // 2)
    return f"step-20/{path.name}: chunk 0, bytes 0 to {path.stat().st_size} .*model.*differs from its digest"


def _swap_files(folder: Path) -> str:
    first, second = _largest(folder), _largest(folder).with_name("other")
    source = folder / "step-10" / first.name
    shutil.copy(source, second)
    os.truncate(second, first.stat().st_size)
    os.replace(second, first)
    other = next(path for path in sorted((folder / "step-20").glob("*.distcp")) if path != first)
    kept = other.read_bytes()
    other.write_bytes(first.read_bytes())
    first.write_bytes(kept)
    return "step-20/__"


def _flip_manifest(folder: Path) -> str:
    path = folder / "step-20" / "manifest.json"
    _flip(path, path.stat().st_size // 2)
    return "manifest"


def _truncate_manifest(folder: Path) -> str:
    os.truncate(folder / "step-20" / "manifest.json", 100)
    return "the manifest cannot be read"


def _empty_manifest(folder: Path) -> str:
    os.truncate(folder / "step-20" / "manifest.json", 0)
    return "the manifest cannot be read"


def _manifest_of_another(folder: Path) -> str:
    shutil.copy(folder / "step-10" / "manifest.json", folder / "step-20" / "manifest.json")
    return "is the manifest of iteration 10"


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (_drop_manifest, Incomplete),
        (_drop_file, Incomplete),
        (_drop_all_files, Incomplete),
        (_truncate, Incomplete),
        (_flip_data, Corrupt),
        (_swap_files, CheckpointError),
        (_flip_manifest, Corrupt),
        (_truncate_manifest, Corrupt),
        (_empty_manifest, Corrupt),
        (_manifest_of_another, Untrusted),
    ],
)
def test_each_kind_of_damage_is_rejected_with_the_file_name(
    damaged: Path, damage: Callable[[Path], str], kind: type[CheckpointError]
) -> None:
    """The error has the kind of the damage and the file and chunk; the other checkpoint is readable."""
    pattern = damage(damaged)
    with pytest.raises(kind, match=pattern) as raised:
        _read_all(damaged)
    assert type(raised.value) is kind or kind is CheckpointError
    directory = GlobalDirectory.open(damaged)
    for rank in range(2):
        assert read_rank(VerifiedFiles(directory, directory.manifest(10)), rank).num_bytes_read > 0


def test_a_damaged_checkpoint_does_not_change_live_state(damaged: Path) -> None:
    """Resharding and `dcp.load` with VerifiedReader raise the error, and the live state does not change."""
    _flip_data(damaged)
    directory = GlobalDirectory.open(damaged)
    live = {"model": {"a": torch.zeros(3000), "b": torch.zeros(5000)}, "n": 0}
    with pytest.raises(Corrupt):
        load_resharded(VerifiedFiles(directory, directory.manifest(20)), live)
    assert live["n"] == 0
    assert not live["model"]["a"].any()
    assert not live["model"]["b"].any()
    with pytest.raises(dcp.CheckpointException, match="differs from its digest"):
        dcp.load(_state(), storage_reader=VerifiedReader(damaged / "step-20"))


def test_any_flipped_byte_of_any_file_is_detected(pristine: Path, tmp_path: Path) -> None:
    """After a change of any byte of data or manifest, a rank rejects the checkpoint."""
    choices = random.Random(3)
    names = [path.name for path in (pristine / "step-20").iterdir() if path.name != ".metadata"]
    folder = tmp_path / "g"
    shutil.copytree(pristine, folder)
    for _ in range(120):
        path = folder / "step-20" / choices.choice(names)
        position = choices.randrange(path.stat().st_size)
        _flip(path, position)
        with pytest.raises(CheckpointError):
            _read_all(folder)
        _flip(path, position)
    _read_all(folder)


def test_any_flipped_bit_of_the_metadata_file_is_detected(
    pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit in `.metadata` makes other readers fail or read wrong data: verification reports it, and a load
    with VerifiedReader logs it and loads the saved state."""
    choices = random.Random(5)
    folder = tmp_path / "g"
    shutil.copytree(pristine, folder)
    path = folder / "step-20" / ".metadata"
    for _ in range(20):
        position = choices.randrange(path.stat().st_size)
        _flip(path, position)
        found = next(one for one in look_into(str(folder)).found if one.entry.iteration == 20)
        entry = verify(found, num_threads=1).entry
        assert [(problem.file, problem.kind) for problem in entry.problems] == [("step-20/.metadata", "Corrupt")]
        assert entry.valid
        _flip(path, position)
    assert not caplog.records
    _flip(path, position)
    state = _state()
    dcp.load(state, storage_reader=VerifiedReader(folder / "step-20"))
    assert state["n"] == 20
    assert "step-20/.metadata differs from its digest" in caplog.text


def test_a_hostile_metadata_file_is_not_unpickled(damaged: Path) -> None:
    """A hostile `.metadata` file does not affect loads with outlast."""
    (damaged / "step-20" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    _read_all(damaged)
    state = _state()
    dcp.load(state, storage_reader=VerifiedReader(damaged / "step-20"))
    assert state["n"] == 20


def test_a_value_that_would_run_code_is_rejected(tmp_path: Path) -> None:
    """VerifiedReader checks plain values without running code before the planner of `dcp.load` unpickles them."""

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    folder = tmp_path / "g"
    with Lanes(str(folder), 1) as lanes:
        flat = flat_state({"n": 3})
        from outlast.checkpoint.dcp import global_lane

        value = global_lane.Items.value
        global_lane.Items.value = lambda self, item: _dumped(Hostile())  # type: ignore[method-assign]
        try:
            assert lanes.save([flat], 20) == [None]
        finally:
            global_lane.Items.value = value  # type: ignore[method-assign]
    with pytest.raises(dcp.CheckpointException, match="must not be unpickled"):
        dcp.load({"n": 0}, storage_reader=VerifiedReader(folder / "step-20"))
    assert not (tmp_path / "owned").exists()


def _dumped(value: object) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_reader_rejects_a_folder_without_a_checkpoint(pristine: Path) -> None:
    """A path that does not end in step-<n> is rejected with the expected form."""
    with pytest.raises(CheckpointError, match="does not end in step-<n>"):
        VerifiedReader(pristine)


@pytest.mark.parametrize(
    ("url", "parent"),
    [
        ("/step-7", "/"),
        ("step-7", "."),
        ("runs/step-7/", "runs"),
        ("s3://b/run/step-7", "s3://b/run"),
        ("memory://step-7", "memory://"),
        ("file:///step-7", "file://"),
    ],
)
def test_a_reader_opens_the_parent_folder_of_its_checkpoint(url: str, parent: str, monkeypatch) -> None:
    """The reader opens the parent folder, also for a checkpoint directly below the root."""
    opened = []

    def refuse(name: str) -> GlobalDirectory:
        opened.append(name)
        raise CheckpointError("nothing is opened here")

    monkeypatch.setattr(GlobalDirectory, "open", refuse)
    with pytest.raises(CheckpointError, match="nothing is opened"):
        VerifiedReader(url)
    assert opened == [parent]
