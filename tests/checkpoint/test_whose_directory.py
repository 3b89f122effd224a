"""A directory belongs to one run: whoever comes second is told at once, and no single file decides it."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.catalogue.listing import look_into
from outlast.checkpoint.directory import Claim
from outlast.checkpoint.manager import open_manager
from outlast.cli.main import main
from outlast.config import CheckpointConfig
from outlast.decoding import read_file
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ExitReason, Untrusted
from outlast.runtime.files import create_atomically
from outlast.runtime.injection import armed

pytestmark = pytest.mark.process
NODE = "node"
LONG_S = 30.0


def _place(tmp_path: Path, tier: str) -> tuple[CheckpointConfig, Path]:
    """Return settings with one tier, and the folder that its checkpoints lie in."""
    name = "local_directory" if tier == "local" else "directory"
    config = CheckpointConfig(**{name: str(tmp_path / tier)}, save_timeout=LONG_S)
    return config, tmp_path / tier / (NODE if tier == "local" else "")


@contextmanager
def _managers(config: CheckpointConfig, count: int, job: str = "job") -> Iterator[list[CheckpointManager]]:
    """Begin so many runs, none of which knows of the others."""
    with ExitStack() as stack:
        managers = []
        for _ in range(count):
            managers.append(open_manager(config, env=WorkerEnv(node=NODE, job=job)))
            stack.callback(managers[-1].close)
        yield managers


def _load(config: CheckpointConfig) -> tuple[int | None, float]:
    state = {"w": torch.zeros(8)}
    with _managers(config, 1) as (manager,):
        restored = manager.load_latest(state)
    return restored.iteration if restored is not None else None, float(state["w"][0])


@pytest.mark.parametrize("tier", ["global", "local"])
def test_the_second_of_two_runs_in_one_directory_is_refused_at_once(tmp_path: Path, tier: str) -> None:
    """Both began while it was empty. The first goes on; the second's first save fails, and its next one is not even
    tried, with one line that names the directory, both runs, and what to do. All that the first saved is there."""
    config, folder = _place(tmp_path, tier)
    with _managers(config, 2) as (first, second):
        first.save({"w": torch.full((8,), 1.0)}, 1).wait(LONG_S)
        with pytest.raises(Untrusted) as refused:
            second.save({"w": torch.full((8,), -1.0)}, 1).wait(LONG_S)
        with pytest.raises(Untrusted) as again:
            second.save({"w": torch.full((8,), -2.0)}, 2)
        with pytest.raises(Untrusted):
            second.wait(LONG_S)
        first.save({"w": torch.full((8,), 2.0)}, 2).wait(LONG_S)
        runs = [manager._places.run for manager in (first, second)]
        assert second.refusal is not None
        assert first.refusal is None
    line = str(refused.value)
    assert str(again.value) == line
    assert "\n" not in line
    assert str(folder) in line
    assert all(run in line for run in runs)
    assert line.endswith("give it a separate directory")
    assert _load(config) == (2, 2.0)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "owner", "run.json", "step-1", "step-2"]


@pytest.mark.extended
@pytest.mark.parametrize("tier", ["global", "local"])
def test_of_runs_that_save_at_the_same_moment_one_saves(tmp_path: Path, tier: str) -> None:
    """Whoever is quicker: one run has the directory, the others are refused, and what it reported as saved loads."""
    config, _ = _place(tmp_path, tier)
    gate = threading.Barrier(3, timeout=LONG_S)
    with armed("checkpoint.data", lambda attempt: gate.wait()), _managers(config, 3) as managers:
        handles = {}
        for number, manager in enumerate(managers):
            with contextlib.suppress(Untrusted):  # another may have been quicker already
                handles[number] = manager.save({"w": torch.full((8,), float(number))}, 1)
        saved = []
        for number, handle in handles.items():
            with contextlib.suppress(Untrusted):
                handle.wait(LONG_S)
                saved.append(number)
        assert all((manager.refusal is None) == (number in saved) for number, manager in enumerate(managers))
    assert len(saved) == 1
    assert _load(config) == (1, float(saved[0]))


def test_a_run_that_died_before_its_first_commit_leaves_the_directory_free(tmp_path: Path) -> None:
    """Nothing but its claim is there: the next run takes it over, without a word to anyone."""
    config, folder = _place(tmp_path, "global")

    folder.mkdir(parents=True)
    create_atomically(folder / "run.json", b'{"run":"run-dead"}')
    with _managers(config, 1) as (manager,):
        assert manager.load_latest({"w": torch.zeros(8)}) is None
        manager.save({"w": torch.full((8,), 3.0)}, 3).wait(LONG_S)
        assert (folder / "run.json").read_text() == f'{{"run":"{manager._places.run}"}}'
    assert _load(config) == (3, 3.0)


def test_a_claim_that_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not give the file that names the run: the save of whoever came second fails with that
    error, and the first run, which has not committed yet, keeps its claim."""
    config, folder = _place(tmp_path, "global")
    claim = folder / "run.json"

    def read_unless_stale(path: Path) -> bytes:
        if path == claim:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read_file(path)

    folder.mkdir(parents=True)
    create_atomically(claim, b'{"run":"run-first"}')
    with monkeypatch.context() as patched, _managers(config, 1) as (second,):
        patched.setattr("outlast.checkpoint.directory.read_file", read_unless_stale)
        with pytest.raises(CheckpointError, match="Stale file handle"):
            second.save({"w": torch.full((8,), 2.0)}, 1).wait(LONG_S)
    assert claim.read_bytes() == b'{"run":"run-first"}'


def test_what_is_committed_while_a_claim_is_taken_over_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs believe that they own a directory, as after a stop in the middle of a commit. One has passed its last
    comparison when another takes its claim, which nothing proves yet, over. What the first then reports as saved
    stays: the second is refused at its own commit, and the first goes on."""
    monkeypatch.setattr(Claim, "acquire", lambda claim: None)
    config, folder = _place(tmp_path, "local")
    at_rename, may_rename, at_manifest, may_commit = (threading.Event() for _ in range(4))

    def stop_before_rename(attempt: str) -> None:
        if attempt.startswith("job-"):
            at_rename.set()
            assert may_rename.wait(LONG_S)

    def stop_before_manifest(attempt: str) -> None:
        if attempt.startswith("other-"):
            at_manifest.set()
            assert may_commit.wait(LONG_S)

    with armed("checkpoint.rename", stop_before_rename), _managers(config, 1) as (first,):
        saved = first.save({"w": torch.full((8,), 1.0)}, 1)
        assert at_rename.wait(LONG_S)
        with armed("checkpoint.manifest", stop_before_manifest), _managers(config, 1, job="other") as (second,):
            other = second.save({"w": torch.full((8,), -1.0)}, 1)
            assert at_manifest.wait(LONG_S)
            assert (folder / "run.json").read_text() == f'{{"run":"{second._places.run}"}}'
            may_rename.set()
            saved.wait(LONG_S)
            may_commit.set()
            with pytest.raises(Untrusted, match=f"belongs to run {first._places.run}"):
                other.wait(LONG_S)
        first.save({"w": torch.full((8,), 2.0)}, 2).wait(LONG_S)
    assert {path.name for path in folder.glob("step-*") if path.suffix == ""} == {"step-1", "step-2"}
    assert _load(config) == (2, 2.0)


def test_a_node_that_brings_an_older_runs_files_is_no_obstacle(tmp_path: Path) -> None:
    """A run whose global tier says who it is goes on, and saves, where a node's own folder still holds another's."""
    old, folder = _place(tmp_path / "old", "local")
    with _managers(old, 1) as (manager,):
        manager.save({"w": torch.full((8,), 9.0)}, 9).wait(LONG_S)
    far, _ = _place(tmp_path / "new", "global")
    with _managers(far, 1) as (manager,):
        manager.save({"w": torch.full((8,), 1.0)}, 1).wait(LONG_S)
    both = CheckpointConfig(directory=far.directory, local_directory=old.local_directory, save_timeout=LONG_S)
    assert _load(both) == (1, 1.0)
    with _managers(both, 1) as (manager,):
        assert manager.load_latest({"w": torch.zeros(8)}) is not None
        manager.save({"w": torch.full((8,), 2.0)}, 2).wait(LONG_S)
        run = manager._places.run
    assert (folder / "run.json").read_text() == f'{{"run":"{run}"}}'
    assert _load(both) == (2, 2.0)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4] ^= 1  # another run's name, as far as JSON can tell
    path.write_bytes(data)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_bytes(path.read_bytes()[:9]), "cannot be read"),
    (lambda path: path.write_bytes(b""), "cannot be read"),
    (lambda path: path.unlink(), "is missing"),
    (_flip, "names run run-"),
    (lambda path: path.write_bytes(b'{"run":"\xff\xfe"}'), "cannot be read"),
]


@pytest.mark.extended
@pytest.mark.parametrize("tier", ["global", "local"])
@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=["cut", "emptied", "deleted", "flipped", "not-utf8"])
def test_a_damaged_run_name_costs_nothing_and_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tier: str,
    damage: Callable[[Path], object],
    problem: str,
) -> None:
    """The newest checkpoint is loaded, since its manifest names the run; `ckpt verify` says what is wrong with the
    file, until the next save has written it again."""
    config, folder = _place(tmp_path, tier)
    with _managers(config, 1) as (manager,):
        for iteration in (1, 2):
            manager.save({"w": torch.full((8,), float(iteration))}, iteration).wait(LONG_S)
    whole = (folder / "run.json").read_bytes()
    damage(folder / "run.json")

    def verify() -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["outlast", "ckpt", "verify", str(folder)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, out = verify()
    assert code == ExitReason.FAILED
    assert f"run.json: {problem}" in " ".join(out.split())
    assert "every byte" not in out
    assert all(entry.valid and not entry.problems for entry in look_into(str(folder)).entry.checkpoints)
    assert _load(config) == (2, 2.0)
    with _managers(config, 1) as (manager,):
        manager.load_latest({"w": torch.zeros(8)})
        manager.save({"w": torch.full((8,), 3.0)}, 3).wait(LONG_S)
        assert (folder / "run.json").read_bytes() == whole
        damage(folder / "run.json")
        manager.save({"w": torch.full((8,), 4.0)}, 4).wait(LONG_S)  # it is noticed at every save
    assert (folder / "run.json").read_bytes() == whole
    assert verify()[0] == ExitReason.FINISHED
    assert _load(config) == (4, 4.0)


def test_a_file_system_without_links_gives_a_file_to_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no hard links, and where NFS repeats a link that it has made, one process makes the file."""
    import os

    link = os.link

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def answer_is_lost(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    for number, instead in enumerate((no_links, answer_is_lost, link)):
        path = tmp_path / str(number)
        monkeypatch.setattr(os, "link", instead)
        assert create_atomically(path, b"first")
        monkeypatch.setattr(os, "link", no_links if instead is no_links else link)
        assert not create_atomically(path, b"second")
        assert path.read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_full_disk_leaves_no_part_of_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no hard links, a file that could not be written to its end is not there."""
    import os

    fsync, num_calls = os.fsync, 0

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def second_fails(fd: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # the first is that of the file under its temporary name
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(OSError, match="No space"):
        create_atomically(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []
    assert create_atomically(tmp_path / "file", b"data")
