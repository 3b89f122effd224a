"""Links, pipes, devices and huge files in place of ours are refused by name, and what they point to is left alone."""

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


def link(path: Path) -> None:
    (target := path.with_name("secret")).write_text("{}")
    path.symlink_to(target)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(TERABYTE)


PLANTED = {"a symbolic link": link, "a symbolic link to a device": device, "a pipe": os.mkfifo}
PLANTED |= {"a folder": Path.mkdir, f"{TERABYTE} bytes": huge}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_not_a_file_of_ours_is_refused_by_name(what: str, tmp_path: Path) -> None:
    """No reader of a manifest, a record, a key or a journal follows a link, waits for a pipe or reads a terabyte."""
    plant: Callable[[Path], object] = PLANTED[what]
    said = what.partition(" to ")[0]
    plant(tmp_path / "file")
    with pytest.raises(OSError, match=said):
        read_file(tmp_path / "file")
    (tmp_path / "step-3").mkdir()
    plant(tmp_path / "step-3" / "manifest.json")
    with pytest.raises(CheckpointError, match=said):
        Directory(tmp_path).manifest(3)
    with pytest.raises((CheckpointError, OSError), match=said):
        GlobalDirectory.open(tmp_path).manifest(3)
    (tmp_path / "owner").mkdir()
    plant(tmp_path / "owner" / "1.json")
    with pytest.raises(OSError, match=said):
        FolderRecords(tmp_path).read(1)
    if what != f"{TERABYTE} bytes":
        with pytest.raises(OSError, match=said):
            FolderRecords(tmp_path).renew(1, b"mine")
    plant(tmp_path / "ladder.json")
    with pytest.raises(ConfigError, match=said):
        load_recovery_state(tmp_path)
    plant(tmp_path / "ft_state.json")
    assert not LearnedTimeouts.load(tmp_path).learned.sections
    plant(tmp_path / "run.key")
    with pytest.raises(ConfigError, match=said):
        key_of_directory(tmp_path)
    (tmp_path / "given").mkdir()
    plant(tmp_path / "given" / "key")
    if what != "a symbolic link":  # a path that the user gave may be one
        with pytest.raises(ConfigError, match=said.replace("a symbolic link", "a device")):
            find_run_key("r", None, key_file=str(tmp_path / "given" / "key"), is_one_machine=True)


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_journal_file_is_left_out_by_every_reader(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``status``, the ledger, the metrics endpoint, ``chaos`` and an iterating program read the other files and name
    the planted one, if they can report it; none of them waits or reads a terabyte."""
    written = Journal(tmp_path, run_id="r", job="j", node="a", proc="agent")
    written.write(EventKind.CYCLE_STARTED, cycle=0)
    written.close()
    plant: Callable[[Path], object] = PLANTED[what]
    said = what.partition(" to ")[0]
    for name in ("j-b-agent.jsonl", "j-a-coordinator.jsonl", "j-a-rank-0.jsonl", "i-a-rank-0.jsonl"):
        plant(tmp_path / "journal" / name)
        (tmp_path / "journal" / "secret").unlink(missing_ok=True)
    assert [event.kind for event in journal.read(tmp_path)] == [EventKind.CYCLE_STARTED]
    assert any(said in note for note in Ledger.read(tmp_path).notes)
    evidence = gather(tmp_path, asks=False)
    assert evidence.view.job("j").counts == {EventKind.CYCLE_STARTED: 1}
    if what != f"{TERABYTE} bytes":  # the end of any other file is read
        assert any(said in problem for problem in evidence.problems)
        history = NodeHistory(tmp_path, "a")
        history.read_on("j", [0])
        assert not history.has_read
        assert [event.kind for event in JournalTail(tmp_path).read_new()] == [EventKind.CYCLE_STARTED]
        assert said in caplog.text


def test_a_journal_of_planted_files_alone_is_an_error_that_names_one(tmp_path: Path) -> None:
    """``status`` and ``report`` give the reason why there is no event."""
    (tmp_path / "journal").mkdir()
    os.mkfifo(tmp_path / "journal" / "j-a-agent.jsonl")
    for read in (Ledger.read, lambda path: gather(path, asks=False)):
        with pytest.raises(ConfigError, match=r"holds no event: .*j-a-agent\.jsonl cannot be read: it is a pipe"):
            read(tmp_path)


def test_a_state_file_of_32_mib_is_not_read(tmp_path: Path) -> None:
    """``ladder.json``, ``requeue.json`` and learned timeouts hold a few values, and their limit is 16 MiB."""
    for name in ("ladder.json", "requeue.json", "ft_state.json"):
        (tmp_path / name).write_bytes(b"{}" + b" " * (32 << 20))
    for load in (load_recovery_state, load_requeue_state):
        with pytest.raises(ConfigError, match="the limit is 16777216"):
            load(tmp_path)
    assert not LearnedTimeouts.load(tmp_path).learned.sections


def test_a_huge_object_is_refused_by_name(tmp_path: Path) -> None:
    """A manifest or an owner's record in an object store that is larger than its limit is not read."""
    directory = GlobalDirectory.open(f"local://{tmp_path}")
    (tmp_path / "step-3").mkdir()
    huge(tmp_path / "step-3" / "manifest.json")
    with pytest.raises(CheckpointError, match=f"step-3/manifest.json: it has {TERABYTE} bytes, and the limit is"):
        directory.manifest(3)
    (tmp_path / "owner").mkdir()
    huge(tmp_path / "owner" / "1.json")
    with pytest.raises(CheckpointError, match="and the limit is 65536"):
        directory.owners.read(1)
    (tmp_path / "step-3" / "manifest.json").unlink()
    device(tmp_path / "step-3" / "manifest.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        directory.manifest(3)


@pytest.mark.process
@pytest.mark.parametrize("tier", ["local_directory", "directory"])
def test_folders_of_other_programs_are_never_removed(tier: str, tmp_path: Path) -> None:
    """Folders that are named like checkpoints, with a manifest of another program or none, outlive all saves; old and
    damaged checkpoints of the run do not."""
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
def test_a_planted_link_costs_its_target_nothing(tmp_path: Path) -> None:
    """A link in place of the folder through which a run deletes, of an owner before it or of the records of owners is
    refused by name; the folders that it points to stay."""
    config = CheckpointConfig(local_directory=str(tmp_path / "local"), save_timeout=60.0)
    victim, folder = tmp_path / "victim", tmp_path / "local" / "node"
    (victim / "home").mkdir(parents=True)
    (victim / "home" / "file").write_text("precious")

    def save(iteration: int) -> None:
        with closing(open_manager(config, env=WorkerEnv(node="node"))) as manager:
            manager.load_latest({"w": torch.zeros(4)})
            manager.save({"w": torch.ones(4)}, iteration).wait(60.0)

    save(1)
    number = max(FolderRecords(folder).numbers())
    (folder / "owner" / f"{number}.trash").rmdir()
    (folder / "owner" / f"{number}.trash").symlink_to(victim)
    (folder / "suspect").symlink_to(victim)
    (victim / "step-1.tmp-x").mkdir()
    with pytest.raises(OutlastError, match=r"symbolic link.*suspect"):
        save(2)
    (folder / "suspect").unlink()
    save(3)
    newest = max(FolderRecords(folder).numbers()) + 1
    (folder / "owner" / f"{newest}.trash").symlink_to(victim)
    with pytest.raises(OutlastError, match=rf"symbolic link.*{newest}\.trash"):
        save(4)
    assert sorted(path.name for path in victim.iterdir()) == ["home", "step-1.tmp-x"]
    assert (victim / "home" / "file").read_text() == "precious"
    (folder / "owner" / f"{newest}.trash").unlink()
    save(5)
    (folder / "owner").rename(victim / "owner")
    (folder / "owner").symlink_to(victim / "owner")
    with pytest.raises(OutlastError, match=r"symbolic link.*owner"):
        save(6)
    assert 5 in CheckpointFolder(folder).checkpoints()


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("tier", ["local_directory", "directory"])
def test_unfinished_folders_of_other_programs_are_never_removed(tier: str, tmp_path: Path) -> None:
    """A run that takes a directory over removes what earlier runs left unfinished, and nothing that only has a similar
    name."""
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
    left = sorted(path.name for path in folder.glob("step-*.*"))
    assert left == sorted(others)
    assert all((folder / name / "model.bin").read_text() == "precious" for name in others)


def test_a_record_is_not_removed_through_a_planted_link(tmp_path: Path) -> None:
    """Where a link replaces the folder of the records, the file of the same name that it leads to stays."""
    records, victim = FolderRecords(tmp_path / "place"), tmp_path / "victim"
    (tmp_path / "place").mkdir()
    assert records.create(1, b"mine")
    (tmp_path / "place" / "owner").rename(victim)
    (tmp_path / "place" / "owner").symlink_to(victim)
    with pytest.raises(OSError, match="owner"):
        records.remove(1)
    records.forget()
    assert (victim / "1.json").read_bytes() == b"mine"
    (tmp_path / "place" / "owner").unlink()
    records.remove(1)
