"""Links, pipes, devices and huge files in place of outlast's files are rejected, and their targets stay unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from outlast import journal
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.directory import CheckpointFolder, Directory
from outlast.checkpoint.manager import open_manager
from outlast.config import CheckpointConfig
from outlast.decoding import read_file
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError, OutlastError
from outlast.goodput.ledger import Ledger
from outlast.incidents import EventKind
from outlast.integrations.slurm.jobs import load_requeue_state
from outlast.journal import JournalTail
from outlast.launch.node_metrics import NodeHistory
from outlast.launch.recovery_state_file import load_recovery_state
from outlast.monitor.learned_timeouts import LearnedTimeouts
from outlast.runtime.journal import Journal
from outlast.runtime.lease import FolderRecords
from outlast.runtime.run_key import find_run_key, key_of_directory
from outlast.status.evidence import gather

TERABYTE = 1 << 40


def plant_link(path: Path) -> None:
    (target := path.with_name("secret")).write_text("{}")
    path.symlink_to(target)


def plant_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def plant_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(TERABYTE)


PLANTED = {"a symbolic link": plant_link, "a symbolic link to a device": plant_device, "a pipe": os.mkfifo}
PLANTED |= {"a folder": Path.mkdir, f"{TERABYTE} bytes": plant_huge_file}


@pytest.mark.parametrize("variant", PLANTED)
def test_readers_reject_planted_files(variant: str, tmp_path: Path) -> None:
    """Readers of manifests, records, keys and journals do not follow links, wait for pipes or read terabytes."""
    plant: Callable[[Path], object] = PLANTED[variant]
    reason = variant.partition(" to ")[0]
    plant(tmp_path / "file")
    with pytest.raises(OSError, match=reason):
        read_file(tmp_path / "file")
    (tmp_path / "step-3").mkdir()
    plant(tmp_path / "step-3" / "manifest.json")
    with pytest.raises(CheckpointError, match=reason):
        Directory(tmp_path).manifest(3)
    with pytest.raises((CheckpointError, OSError), match=reason):
        GlobalDirectory.open(tmp_path).manifest(3)
    (tmp_path / "owner").mkdir()
    plant(tmp_path / "owner" / "1.json")
    with pytest.raises(OSError, match=reason):
        FolderRecords(tmp_path).read(1)
    if variant != f"{TERABYTE} bytes":
        with pytest.raises(OSError, match=reason):
            FolderRecords(tmp_path).renew(1, b"mine")
    plant(tmp_path / "ladder.json")
    with pytest.raises(ConfigError, match=reason):
        load_recovery_state(tmp_path)
    plant(tmp_path / "ft_state.json")
    assert not LearnedTimeouts.load(tmp_path).learned.sections
    plant(tmp_path / "run.key")
    with pytest.raises(ConfigError, match=reason):
        key_of_directory(tmp_path)
    (tmp_path / "given").mkdir()
    plant(tmp_path / "given" / "key")
    if variant != "a symbolic link":  # a path given by the user may be a link
        with pytest.raises(ConfigError, match=reason.replace("a symbolic link", "a device")):
            find_run_key("r", None, key_file=str(tmp_path / "given" / "key"), is_one_machine=True)


@pytest.mark.parametrize("variant", PLANTED)
def test_journal_readers_skip_planted_files(variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``status``, the ledger, metrics and ``chaos`` read the other files and report the planted one.

    Programs that iterate over the journal do, too. None of them waits or reads a terabyte.
    """
    written = Journal(tmp_path, run_id="r", job="j", node="a", proc="agent")
    written.write(EventKind.CYCLE_STARTED, cycle=0)
    written.close()
    plant: Callable[[Path], object] = PLANTED[variant]
    reason = variant.partition(" to ")[0]
    for name in ("j-b-agent.jsonl", "j-a-coordinator.jsonl", "j-a-rank-0.jsonl", "i-a-rank-0.jsonl"):
        plant(tmp_path / "journal" / name)
        (tmp_path / "journal" / "secret").unlink(missing_ok=True)
    assert [event.kind for event in journal.read(tmp_path)] == [EventKind.CYCLE_STARTED]
    assert any(reason in note for note in Ledger.read(tmp_path).notes)
    evidence = gather(tmp_path, asks=False)
    assert evidence.view.job("j").counts == {EventKind.CYCLE_STARTED: 1}
    if variant != f"{TERABYTE} bytes":  # readers of the end accept any size
        assert any(reason in problem for problem in evidence.problems)
        history = NodeHistory(tmp_path, "a")
        history.read_on("j", [0])
        assert not history.has_read
        assert [event.kind for event in JournalTail(tmp_path).read_new()] == [EventKind.CYCLE_STARTED]
        assert reason in caplog.text


def test_a_journal_of_planted_files_only_is_an_error(tmp_path: Path) -> None:
    """``status`` and ``report`` give the reason why there is no event."""
    (tmp_path / "journal").mkdir()
    os.mkfifo(tmp_path / "journal" / "j-a-agent.jsonl")
    for read in (Ledger.read, lambda path: gather(path, asks=False)):
        with pytest.raises(ConfigError, match=r"holds no event: .*j-a-agent\.jsonl cannot be read: it is a pipe"):
            read(tmp_path)


def test_a_state_file_above_its_limit_is_not_read(tmp_path: Path) -> None:
    """``ladder.json``, ``requeue.json`` and learned timeouts above their limit of 16 MiB are not read."""
    for name in ("ladder.json", "requeue.json", "ft_state.json"):
        (tmp_path / name).write_bytes(b"{}" + b" " * (32 << 20))
    for load in (load_recovery_state, load_requeue_state):
        with pytest.raises(ConfigError, match="the limit is 16777216"):
            load(tmp_path)
    assert not LearnedTimeouts.load(tmp_path).learned.sections


def test_a_huge_object_is_rejected(tmp_path: Path) -> None:
    """A manifest or an owner's record in an object store above its limit is not read."""
    directory = GlobalDirectory.open(f"local://{tmp_path}")
    (tmp_path / "step-3").mkdir()
    plant_huge_file(tmp_path / "step-3" / "manifest.json")
    with pytest.raises(CheckpointError, match=f"step-3/manifest.json: it has {TERABYTE} bytes, and the limit is"):
        directory.manifest(3)
    (tmp_path / "owner").mkdir()
    plant_huge_file(tmp_path / "owner" / "1.json")
    with pytest.raises(CheckpointError, match="and the limit is 65536"):
        directory.owners.read(1)
    (tmp_path / "step-3" / "manifest.json").unlink()
    plant_device(tmp_path / "step-3" / "manifest.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        directory.manifest(3)


@pytest.mark.process
@pytest.mark.parametrize("tier", ["local_directory", "directory"])
def test_other_programs_folders_are_never_removed(tier: str, tmp_path: Path) -> None:
    """Folders named like checkpoints but without a manifest of outlast are kept; old checkpoints are removed."""
    counts = {"most_recent_k": 2, "local_most_recent_k": 2}
    config = CheckpointConfig(**{tier: str(tmp_path), "save_timeout": 60.0} | counts)  # type: ignore[arg-type]
    folder = tmp_path / ("node" if tier == "local_directory" else "")
    with closing(open_manager(config, env=WorkerEnv(node="node"))) as manager:
        manager.load_latest({"w": torch.zeros(4)})
        (folder / "step-1").mkdir(parents=True, exist_ok=True)
        (folder / "step-2").mkdir()
        (folder / "step-2" / "manifest.json").write_text('{"files": ["model.bin"]}')
        (folder / "step-2" / "model.bin").write_text("precious")
        for iteration in range(5, 10):
            manager.save({"w": torch.ones(4)}, iteration).wait(60.0)
            (folder / f"step-{iteration}" / "manifest.json").write_bytes(b"\0" * (iteration == 6) * 100)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-1", "step-2", "step-5", "step-8", "step-9"]
    assert (folder / "step-2" / "model.bin").read_text() == "precious"


@pytest.mark.extended
@pytest.mark.process
def test_deletion_never_follows_a_planted_link(tmp_path: Path) -> None:
    """A link in place of a folder for deletions or of the owner records is rejected, and its target stays unchanged."""
    config = CheckpointConfig(local_directory=str(tmp_path / "local"), save_timeout=60.0)
    target_folder, folder = tmp_path / "victim", tmp_path / "local" / "node"
    (target_folder / "home").mkdir(parents=True)
    (target_folder / "home" / "file").write_text("precious")

    def save(iteration: int) -> None:
        with closing(open_manager(config, env=WorkerEnv(node="node"))) as manager:
            manager.load_latest({"w": torch.zeros(4)})
            manager.save({"w": torch.ones(4)}, iteration).wait(60.0)

    save(1)
    number = max(FolderRecords(folder).numbers())
    (folder / "owner" / f"{number}.trash").rmdir()
    (folder / "owner" / f"{number}.trash").symlink_to(target_folder)
    (folder / "suspect").symlink_to(target_folder)
    (target_folder / "step-1.tmp-x").mkdir()
    with pytest.raises(OutlastError, match=r"symbolic link.*suspect"):
        save(2)
    (folder / "suspect").unlink()
    save(3)
    newest = max(FolderRecords(folder).numbers()) + 1
    (folder / "owner" / f"{newest}.trash").symlink_to(target_folder)
    with pytest.raises(OutlastError, match=rf"symbolic link.*{newest}\.trash"):
        save(4)
    assert sorted(path.name for path in target_folder.iterdir()) == ["home", "step-1.tmp-x"]
    assert (target_folder / "home" / "file").read_text() == "precious"
    (folder / "owner" / f"{newest}.trash").unlink()
    save(5)
    (folder / "owner").rename(target_folder / "owner")
    (folder / "owner").symlink_to(target_folder / "owner")
    with pytest.raises(OutlastError, match=r"symbolic link.*owner"):
        save(6)
    assert 5 in CheckpointFolder(folder).checkpoints()


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("tier", ["local_directory", "directory"])
def test_other_programs_unfinished_folders_are_never_removed(tier: str, tmp_path: Path) -> None:
    """A run that takes over a directory removes earlier unfinished attempts, but no folder with a similar name."""
    config = CheckpointConfig(**{tier: str(tmp_path), "save_timeout": 60.0})  # type: ignore[arg-type]
    folder = tmp_path / ("node" if tier == "local_directory" else "")
    others = ["step-7.tmp-download", "step-7.aside-0", "step-8.doomed"]
    for name in (*others, "step-9.tmp-job-0-beef.3", "step-6.doomed"):
        (folder / name).mkdir(parents=True)
        (folder / name / ("model.bin" if name in others else "manifest.json")).write_text("precious")
    for iteration in (1, 2):
        with closing(open_manager(config, env=WorkerEnv(node="node"))) as manager:
            manager.load_latest({"w": torch.zeros(4)})
            manager.save({"w": torch.ones(4)}, iteration).wait(60.0)
    remaining = sorted(path.name for path in folder.glob("step-*.*"))
    assert remaining == sorted(others)
    assert all((folder / name / "model.bin").read_text() == "precious" for name in others)


def test_a_record_is_not_removed_through_a_planted_link(tmp_path: Path) -> None:
    """If a link replaces the folder of the records, the file of the same name in its target stays."""
    records, target_folder = FolderRecords(tmp_path / "place"), tmp_path / "victim"
    (tmp_path / "place").mkdir()
    assert records.create(1, b"mine")
    (tmp_path / "place" / "owner").rename(target_folder)
    (tmp_path / "place" / "owner").symlink_to(target_folder)
    with pytest.raises(OSError, match="owner"):
        records.remove(1)
    records.forget()
    assert (target_folder / "1.json").read_bytes() == b"mine"
    (tmp_path / "place" / "owner").unlink()
    records.remove(1)
