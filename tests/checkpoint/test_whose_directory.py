"""A directory belongs to one run: a second run is rejected at once, and no single file decides the owner."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.catalogue.listing import look_into
from outlast.checkpoint.dcp.directory import GlobalDirectory
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
    """Return settings with one tier, and the folder of its checkpoints."""
    name = "local_directory" if tier == "local" else "directory"
    config = CheckpointConfig(**{name: str(tmp_path / tier)}, save_timeout=LONG_S)
    return config, tmp_path / tier / (NODE if tier == "local" else "")


def _run_of(folder: Path) -> str:
    """Return the run in a folder's ``run.json``."""
    return str(json.loads((folder / "run.json").read_text())["run"])


@contextmanager
def _managers(config: CheckpointConfig, count: int, job: str = "job") -> Iterator[list[CheckpointManager]]:
    """Open ``count`` managers of independent runs."""
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
def test_a_second_run_in_one_directory_is_rejected(tmp_path: Path, tier: str) -> None:
    """Of two runs that started in an empty directory, the second one's first save fails and later ones are not tried.

    The line has the directory, both runs and a remedy. All saves of the first run are kept.
    """
    config, folder = _place(tmp_path, tier)
    with _managers(config, 2) as (first, second):
        first.save({"w": torch.full((8,), 1.0)}, 1).wait(LONG_S)
        with pytest.raises(Untrusted) as rejection:
            second.save({"w": torch.full((8,), -1.0)}, 1).wait(LONG_S)
        with pytest.raises(Untrusted) as second_rejection:
            second.save({"w": torch.full((8,), -2.0)}, 2)
        with pytest.raises(Untrusted):
            second.wait(LONG_S)
        first.save({"w": torch.full((8,), 2.0)}, 2).wait(LONG_S)
        assert second.refusal is not None
        assert first.refusal is None
    line = str(rejection.value)
    assert str(second_rejection.value) == line
    assert "\n" not in line
    assert str(folder) in line
    assert _run_of(folder) in line
    assert len(set(re.findall(r"run-\w+", line))) == 2, line
    assert line.endswith("give it a separate directory")
    assert _load(config) == (2, 2.0)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "owner", "run.json", "step-1", "step-2"]


@pytest.mark.extended
@pytest.mark.parametrize("tier", ["global", "local"])
def test_of_concurrent_first_saves_one_succeeds(tmp_path: Path, tier: str) -> None:
    """Of several runs that save at the same time, one owns the directory and the others are rejected."""
    config, _ = _place(tmp_path, tier)
    gate = threading.Barrier(3, timeout=LONG_S)
    with armed("checkpoint.data", lambda attempt: gate.wait()), _managers(config, 3) as managers:
        handles = {}
        for number, manager in enumerate(managers):
            with contextlib.suppress(Untrusted):  # another run may have been faster
                handles[number] = manager.save({"w": torch.full((8,), float(number))}, 1)
        first_save = []
        for number, handle in handles.items():
            with contextlib.suppress(Untrusted):
                handle.wait(LONG_S)
                first_save.append(number)
        assert all((manager.refusal is None) == (number in first_save) for number, manager in enumerate(managers))
    assert len(first_save) == 1
    assert _load(config) == (1, float(first_save[0]))


def test_a_claim_without_a_commit_is_taken_over(tmp_path: Path) -> None:
    """A directory that contains only a claim of a dead run is taken over by the next run."""
    config, folder = _place(tmp_path, "global")

    folder.mkdir(parents=True)
    create_atomically(folder / "run.json", b'{"run":"run-dead"}')
    with _managers(config, 1) as (manager,):
        assert manager.load_latest({"w": torch.zeros(8)}) is None
        manager.save({"w": torch.full((8,), 3.0)}, 3).wait(LONG_S)
        assert _run_of(folder) == GlobalDirectory.open(str(folder)).manifest(3).run
    assert _load(config) == (3, 3.0)


def test_an_unreadable_claim_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file with the run's name cannot be read, the second run's save fails with that error.

    The first run, which has not committed yet, keeps its claim.
    """
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


def test_a_commit_during_a_takeover_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint committed while another run takes over the claim is kept; the second run is rejected at its commit.

    Both runs believe that they own the directory, as after a stop during a commit: the first has passed its last
    comparison when the second replaces its claim, which no manifest confirms yet.
    """
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
        first_save = first.save({"w": torch.full((8,), 1.0)}, 1)
        assert at_rename.wait(LONG_S)
        first_run = _run_of(folder)
        with armed("checkpoint.manifest", stop_before_manifest), _managers(config, 1, job="other") as (second,):
            second_save = second.save({"w": torch.full((8,), -1.0)}, 1)
            assert at_manifest.wait(LONG_S)
            assert _run_of(folder) != first_run
            may_rename.set()
            first_save.wait(LONG_S)
            may_commit.set()
            with pytest.raises(Untrusted, match=f"belongs to run {first_run}"):
                second_save.wait(LONG_S)
        first.save({"w": torch.full((8,), 2.0)}, 2).wait(LONG_S)
    assert {path.name for path in folder.glob("step-*") if path.suffix == ""} == {"step-1", "step-2"}
    assert _load(config) == (2, 2.0)


def test_a_nodes_files_of_an_older_run_are_ignored(tmp_path: Path) -> None:
    """A run identified by its global tier continues and saves although a node's folder holds another run's files."""
    local_config, folder = _place(tmp_path / "old", "local")
    with _managers(local_config, 1) as (manager,):
        manager.save({"w": torch.full((8,), 9.0)}, 9).wait(LONG_S)
    global_config, _ = _place(tmp_path / "new", "global")
    with _managers(global_config, 1) as (manager,):
        manager.save({"w": torch.full((8,), 1.0)}, 1).wait(LONG_S)
    both_config = CheckpointConfig(
        directory=global_config.directory, local_directory=local_config.local_directory, save_timeout=LONG_S
    )
    assert _load(both_config) == (1, 1.0)
    with _managers(both_config, 1) as (manager,):
        assert manager.load_latest({"w": torch.zeros(8)}) is not None
        manager.save({"w": torch.full((8,), 2.0)}, 2).wait(LONG_S)
    assert _run_of(folder) == GlobalDirectory.open(global_config.directory).manifest(2).run
    assert _load(both_config) == (2, 2.0)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4] ^= 1  # a valid JSON text with another run's name
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
def test_a_damaged_run_json_is_reported_and_repaired(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tier: str,
    damage: Callable[[Path], object],
    problem: str,
) -> None:
    """With a damaged ``run.json`` the newest checkpoint is loaded, because its manifest contains the run.

    ``ckpt verify`` reports the file until the next save has written it again.
    """
    config, folder = _place(tmp_path, tier)
    with _managers(config, 1) as (manager,):
        for iteration in (1, 2):
            manager.save({"w": torch.full((8,), float(iteration))}, iteration).wait(LONG_S)
    original = (folder / "run.json").read_bytes()
    damage(folder / "run.json")

    def verify() -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["outlast", "ckpt", "verify", str(folder)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        return int(exit_info.value.code or 0), capsys.readouterr().out

    code, out = verify()
    assert code == ExitReason.FAILED
    assert f"run.json: {problem}" in " ".join(out.split())
    assert "every byte" not in out
    assert all(entry.valid and not entry.problems for entry in look_into(str(folder)).entry.checkpoints)
    assert _load(config) == (2, 2.0)
    with _managers(config, 1) as (manager,):
        manager.load_latest({"w": torch.zeros(8)})
        manager.save({"w": torch.full((8,), 3.0)}, 3).wait(LONG_S)
        assert (folder / "run.json").read_bytes() == original
        damage(folder / "run.json")
        manager.save({"w": torch.full((8,), 4.0)}, 4).wait(LONG_S)  # each save checks it
    assert (folder / "run.json").read_bytes() == original
    assert verify()[0] == ExitReason.FINISHED
    assert _load(config) == (4, 4.0)


def test_a_file_is_created_once_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, or when NFS repeats a link request, exactly one process creates the file."""
    import os

    link = os.link

    def refuse_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def lose_reply(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    for number, replacement in enumerate((refuse_link, lose_reply, link)):
        path = tmp_path / str(number)
        monkeypatch.setattr(os, "link", replacement)
        assert create_atomically(path, b"first")
        monkeypatch.setattr(os, "link", refuse_link if replacement is refuse_link else link)
        assert not create_atomically(path, b"second")
        assert path.read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, a file that could not be written completely is removed."""
    import os

    fsync, num_calls = os.fsync, 0

    def refuse_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def fail_second_fsync(fd: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # the first call is for the temporary file
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "link", refuse_link)
    monkeypatch.setattr(os, "fsync", fail_second_fsync)
    with pytest.raises(OSError, match="No space"):
        create_atomically(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []
    assert create_atomically(tmp_path / "file", b"data")
