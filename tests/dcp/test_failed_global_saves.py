"""Failed saves to the global tier, on a path: which checkpoints stay, which files are removed, and the ranks'
errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lanes import LONG_S, Lanes, flat_state

from outlast.checkpoint.dcp import global_lane
from outlast.checkpoint.dcp.assemble import Assemble, Assembled, Range, assemble
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.reader import VerifiedReader, read_rank
from outlast.checkpoint.dcp.store import ObjectStore
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.state import decode
from outlast.checkpoint.verification import VerifiedFiles
from outlast.errors import CheckpointError, Incomplete, Untrusted
from outlast.policy.checkpoint_plan import KEEP_ALL
from outlast.runtime.injection import armed


def _flat(value: float = 1.0):
    return flat_state({"w": torch.full((100,), value), "b": torch.arange(50.0)})


def _saved_value(directory: GlobalDirectory, iteration: int) -> float:
    found = read_rank(VerifiedFiles(directory, directory.manifest(iteration)), 0)
    return float(decode(found.tree, found.tensors.__getitem__)["state"]["w"][0])


def test_one_ranks_failure_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    """All ranks get an error that identifies the failed rank; the older checkpoint stays, the failed save's files
    are removed, and the next save succeeds."""
    full = threading.Event()

    def writer(rank: int, request: Assemble, image: memoryview) -> Assembled:
        if rank == 2 and full.is_set():
            return Assembled(error=f"{request.name}: No space left on device")
        return assemble(request, image)

    with Lanes(str(tmp_path), 3, writer=writer) as lanes:
        assert lanes.save([_flat(1.0)] * 3, 10) == [None] * 3
        full.set()
        errors = lanes.save([_flat(2.0)] * 3, 20)
        assert len({str(error) for error in errors}) == 1
        assert "rank 2 on node node: __2_0.distcp: No space left on device" in str(errors[0])
        assert lanes.directory.checkpoints() == [10]
        assert lanes.directory.latest() == 10
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run.json", "step-10"]
        full.clear()
        assert lanes.save([_flat(3.0)] * 3, 30) == [None] * 3
        assert _saved_value(lanes.directory, 10) == 1.0
        assert _saved_value(lanes.directory, 30) == 3.0


def test_a_file_missing_at_the_commit_fails_the_save(tmp_path: Path) -> None:
    """The commit checks every file: if one rank's writer wrote to another file system, nothing is committed."""

    def writer(rank: int, request: Assemble, image: memoryview) -> Assembled:
        done = assemble(request, image)
        if rank == 1:
            (tmp_path / request.folder / request.name).unlink()
        return done

    with Lanes(str(tmp_path), 2, writer=writer) as lanes:
        errors = lanes.save([_flat()] * 2, 10)
        assert all("__1_0.distcp is missing; is it the same place for all ranks?" in str(error) for error in errors)
        assert lanes.directory.checkpoints() == []


def test_a_suspect_save_is_not_the_latest_checkpoint(tmp_path: Path) -> None:
    """A suspect save goes to `suspect/`; the tracker and the list of checkpoints do not contain it."""
    with Lanes(str(tmp_path), 2) as lanes:
        assert lanes.save([_flat(1.0)] * 2, 10) == [None, None]
        assert lanes.save([_flat(float("nan"))] * 2, 20, suspect=True) == [None, None]
        assert lanes.directory.checkpoints() == [10]
        assert lanes.directory.latest() == 10
        suspects = lanes.directory.suspects
        assert suspects.checkpoints() == [20]
        assert suspects.latest() is None
        assert not suspects.manifest(20).finite
        assert lanes.directory.manifest(10).finite


def test_retention_keeps_one_beyond_the_suspect_window(tmp_path: Path) -> None:
    """Retention keeps the newest two checkpoints and one that is older than the suspect window."""
    with Lanes(str(tmp_path), 1, most_recent_k=2, suspect_window=25) as lanes:
        for iteration in range(10, 100, 10):
            assert lanes.save([_flat()], iteration) == [None]
        present = lanes.directory.checkpoints()
    assert present[:2] == [90, 80]
    assert any(90 - iteration > 25 for iteration in present)
    assert len(present) <= 4


def test_an_owner_removes_remains_of_earlier_owners(tmp_path: Path) -> None:
    """The owner of a directory removes the unfinished files of earlier owners and restores a checkpoint that an
    interrupted replacement had moved aside."""
    for name in ("step-5.tmp-job-0-ffff.0", "step-6.tmp-other-0-ffff.0", "step-4.doomed"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x")
    with Lanes(str(tmp_path), 1) as lanes:
        assert lanes.save([_flat()], 8) == [None]
        assert lanes.save([_flat()], 9) == [None]
    (tmp_path / "step-8").rename(tmp_path / "step-8.aside-other-0-ffff.1")
    shutil.copytree(tmp_path / "step-9", tmp_path / "step-9.aside-other-0-ffff.2")
    with Lanes(str(tmp_path), 1, cycle=1, leased="here", most_recent_k=KEEP_ALL) as lanes:
        assert lanes.save([_flat()], 10) == [None]
        assert lanes.directory.manifest(8).iteration == 8
    names = ["latest", "owner", "run.json", "step-10", "step-8", "step-9"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert sorted(p.name for p in (tmp_path / "owner").iterdir()) == ["1.json", "1.trash"]
    assert not list((tmp_path / "owner" / "1.trash").iterdir())


def test_readers_wait_for_a_checkpoint_under_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that cannot exchange names, a reader between the two renames of a replacement waits for the
    new checkpoint and does not return an older one."""
    monkeypatch.setattr("outlast.checkpoint.directory.exchange", lambda one, other: False)
    monkeypatch.setattr("outlast.checkpoint.directory.NAMELESS_S", LONG_S)
    is_nameless, may_continue = threading.Event(), threading.Event()
    readers_wait = threading.Semaphore(0)

    def wait_to_continue(_: float) -> None:
        readers_wait.release()
        assert may_continue.wait(LONG_S)

    def stop(final: Path) -> None:
        assert not final.exists()
        is_nameless.set()
        assert may_continue.wait(LONG_S)

    with Lanes(str(tmp_path), 1) as lanes, ThreadPoolExecutor(3) as pool:
        assert lanes.save([_flat(1.0)], 8) == [None]
        assert lanes.save([_flat(2.0)], 9) == [None]
        lanes.forget_commit(9)
        with armed("checkpoint.nameless", stop):
            saved = pool.submit(lanes.save, [_flat(3.0)], 9)
            assert is_nameless.wait(LONG_S)
            monkeypatch.setattr("outlast.checkpoint.directory.time", SimpleNamespace(sleep=wait_to_continue))
            listed = pool.submit(GlobalDirectory.open(tmp_path).checkpoints)
            opened = pool.submit(VerifiedReader, tmp_path / "step-9")
            assert [readers_wait.acquire(timeout=LONG_S) for _ in range(2)] == [True] * 2
            may_continue.set()
            assert saved.result(LONG_S) == [None]
        assert listed.result(LONG_S) == [9, 8]
        assert opened.result(LONG_S).read_metadata().state_dict_metadata
        assert _saved_value(lanes.directory, 9) == 3.0


def test_a_checkpoint_moved_aside_is_reported_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a replacement that ended between its two renames, readers use the older checkpoint and log the reason;
    opening the replaced one is an error with its location; the next run that saves there restores it."""
    monkeypatch.setattr("outlast.checkpoint.directory.NAMELESS_S", 0.0)
    with Lanes(str(tmp_path), 1) as lanes:
        assert lanes.save([_flat(1.0)], 8) == [None]
        assert lanes.save([_flat(2.0)], 9) == [None]
    (tmp_path / "step-9").rename(tmp_path / "step-9.aside-job-0-ab12cd34.2")
    directory = GlobalDirectory.open(tmp_path)
    assert directory.checkpoints() == [8]
    assert "step-9 is skipped until a run that saves there resumes" in caplog.text
    with pytest.raises(Incomplete, match=r"is stored in step-9\.aside-job-0-ab12cd34\.2 until"):
        VerifiedReader(tmp_path / "step-9")
    with pytest.raises(Incomplete, match="there is no manifest"):
        VerifiedReader(tmp_path / "step-7")
    with Lanes(str(tmp_path), 1, token="ffff", leased="here") as later:
        later.claim.acquire()
        assert later.directory.checkpoints() == [9, 8]
        assert _saved_value(later.directory, 9) == 2.0


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_an_assembled_file_is_new_and_digested(tmp_path: Path, scheme: str) -> None:
    """The file has the pieces in order; an existing file is not overwritten; a range outside the image is rejected."""
    image = memoryview(bytes(range(256)) * 100)
    request = Assemble(
        url=f"{scheme}{tmp_path}", folder="step-1", name="f", pieces=(b"ab", Range(10, 5), b"c"), timeout_s=5.0
    )
    done = assemble(request, image)
    assert done.error is None
    assert (tmp_path / "step-1" / "f").read_bytes() == b"ab" + bytes(range(10, 15)) + b"c"
    assert (done.num_bytes, len(done.chunks)) == (8, 1)
    repeated = assemble(request, image)
    assert "File exists" in str(repeated.error)
    outside = Assemble(url=str(tmp_path), folder="step-1", name="g", pieces=(Range(25_599, 2),), timeout_s=5.0)
    assert "not in the image" in str(assemble(outside, image).error)
    assert not (tmp_path / "step-1" / "g").exists()


def test_other_fsspec_file_systems_hold_checkpoints(tmp_path: Path) -> None:
    """`memory://`, which has neither multipart uploads nor an event loop, works as any other fsspec file system."""
    with Lanes("memory://outlast-test/run", 2) as lanes:
        assert lanes.save([_flat(1.0)] * 2, 10) == [None, None]
        assert lanes.save([_flat(2.0)] * 2, 20) == [None, None]
        assert lanes.directory.checkpoints() == [20, 10]
        assert _saved_value(lanes.directory, 20) == 2.0
        lanes.directory.remove(10)
        assert lanes.directory.checkpoints() == [20]
        attempt = SaveAttempt(job="job", cycle=0, token="zz", ordinal=9)
        with pytest.raises(Incomplete, match="no manifest"):
            lanes.directory.manifest(10)
        lanes.directory.discard(20, attempt)
        assert _saved_value(lanes.directory, 20) == 2.0


def test_a_url_without_a_path_holds_checkpoints() -> None:
    """`memory://` itself holds checkpoints, and the reader opens the one at `memory://step-9`."""
    with Lanes("memory://", 1) as lanes:
        try:
            assert lanes.directory.url == "memory://"
            assert lanes.save([_flat(4.0)], 9) == [None]
            assert lanes.directory.checkpoints() == [9]
            assert VerifiedReader("memory://step-9/").read_metadata().state_dict_metadata
            assert ObjectStore("memory://").describe("step-9") == "memory://step-9"
        finally:
            lanes.directory.remove(9)


def test_file_exists_is_an_error_of_a_write_but_not_of_a_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the object store refuses an ordinary write with `FileExistsError`, the write raises an error with the
    object's name; a create returns False."""

    def refuse(*_: object, **__: object) -> None:
        raise FileExistsError("a")

    store = ObjectStore("memory://outlast-exists")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    assert not store.create("a", b"1")
    with pytest.raises(CheckpointError, match="outlast-exists/a: FileExistsError"):
        store.write("a", b"1")


@pytest.mark.parametrize("scheme", ["", "memory://outlast-two-runs"])
def test_a_second_run_in_a_directory_is_refused_on_all_ranks(tmp_path: Path, scheme: str) -> None:
    """Of two runs that began in an empty directory, the first one's saves stay, and the second one is refused on all
    ranks and has no files there."""
    url = f"{scheme}{tmp_path}"
    with Lanes(url, 2, token="aa", run="first") as first, Lanes(url, 2, token="bb", run="second") as second:
        assert first.save([_flat(1.0)] * 2, 10) == [None, None]
        errors = second.save([_flat(2.0)] * 2, 10)
        assert len({str(error) for error in errors}) == 1
        assert all(isinstance(error, Untrusted) for error in errors)
        assert str(errors[0]).startswith(f"{url} belongs to run first, which saves there; this training is run second")
        assert first.save([_flat(3.0)] * 2, 20) == [None, None]
        assert first.directory.run() == "first"
        assert first.directory.checkpoints() == [20, 10]
        assert _saved_value(first.directory, 10) == 1.0
        assert {name.count(".") for name in first.directory.sizes("step-10")} == {1} or scheme


@pytest.mark.cold
@pytest.mark.process
def test_the_writer_and_the_command_line_do_not_import_torch() -> None:
    """The modules of the global tier that the writer process and `outlast ckpt` use do not import torch."""
    modules = "assemble, directory, layout, manifest, store"
    script = "import sys; from outlast.checkpoint import verification; "
    script += f"from outlast.checkpoint.dcp import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_an_unexpected_error_of_one_rank_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error of one rank while it lists its items is the save's error on all ranks; the next save
    succeeds."""
    items = global_lane.Items
    is_broken = threading.Event()

    def make_items(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "outlast-global" and not is_broken.is_set():
            is_broken.set()
            raise ValueError("nonsense")
        return items(*args, **kwargs)

    monkeypatch.setattr(global_lane, "Items", make_items)
    with Lanes(str(tmp_path), 2) as lanes:
        errors = lanes.save([_flat()] * 2, 10)
        assert all("ValueError: nonsense" in str(error) for error in errors)
        assert lanes.save([_flat(2.0)] * 2, 11) == [None, None]
        assert _saved_value(lanes.directory, 11) == 2.0
