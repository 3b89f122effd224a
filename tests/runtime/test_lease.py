"""A lease in a folder: taken by one, kept by renewals, taken over from who is gone, and noticed by who wakes up."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from outlast.policy.lease import LeaseOwner, Process
from outlast.runtime.lease import FolderRecords, InUse, Lease, decode_owner, encode_owner
from outlast.runtime.processes import is_alive, this_process

PATIENCE_S = 60.0


class _Quick(FolderRecords):
    renew_s = 0.05


class _Hanging(_Quick):
    """A file system that answers no renewal while it hangs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.answers = threading.Event()
        self.answers.set()

    def renew(self, number: int, data: bytes) -> None:
        assert self.answers.wait(PATIENCE_S)
        super().renew(number, data)


def _own(run: str = "a", *, machine: str | None = None, **known: object) -> LeaseOwner:
    process = this_process()
    if machine is not None:
        process = msgspec.structs.replace(process, machine=machine, host=machine)
    return LeaseOwner(token="", process=process, run=run, **known)  # type: ignore[arg-type]


@dataclass
class Leases:
    """Leases of a test, which are let go at its end."""

    stack: ExitStack = field(default_factory=ExitStack)

    def __call__(
        self, place: Path | FolderRecords, own: LeaseOwner, *, on_lost: Callable[[InUse], None] = lambda lost: None
    ) -> Lease:
        records = place if isinstance(place, FolderRecords) else _Quick(place)
        made = Lease(records, own, on_lost=on_lost)
        self.stack.callback(made.release)
        return made


@pytest.fixture
def lease() -> Iterator[Leases]:
    leases = Leases()
    with leases.stack:
        yield leases


def _newest(folder: Path) -> LeaseOwner:
    records = FolderRecords(folder)
    owner = decode_owner(records.read(max(records.numbers())))
    assert owner is not None
    return owner


def _until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("it did not come to that")


def test_a_directory_is_held_by_one_and_free_once_it_is_released(tmp_path: Path, lease: Leases) -> None:
    """The second is refused with who has it; after the release it gets it at once, under the next number."""
    first, second = lease(tmp_path, _own("first")), lease(tmp_path, _own("second"))
    first.acquire()
    with pytest.raises(InUse, match=r"is in use by run first \(pid \d+ on "):
        second.acquire()
    first.check()
    first.release()
    second.acquire()
    assert second.is_held
    assert max(FolderRecords(tmp_path).numbers()) == 2
    assert _newest(tmp_path).run == "second"


def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path, lease: Leases) -> None:
    """Into an empty directory, and after an owner that has ended."""
    for _ in range(3):
        many = [lease(tmp_path, _own(str(number))) for number in range(8)]
        gate = threading.Barrier(len(many), timeout=PATIENCE_S)

        def take(one: Lease, gate: threading.Barrier = gate) -> bool:
            gate.wait()
            with contextlib.suppress(InUse):
                one.acquire()
            return one.is_held

        with ThreadPoolExecutor(len(many)) as pool:
            assert sorted(pool.map(take, many)) == [False] * 7 + [True]
        for one in many:
            one.release()


@pytest.mark.process
def test_an_owner_that_died_is_followed_at_once_with_one_line(
    tmp_path: Path, lease: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process number may have been given to another process since: the time of its start tells."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = int(Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        dead = msgspec.structs.replace(this_process(), pid=child.pid, started=started)
        assert is_alive(dead)
        assert is_alive(msgspec.structs.replace(dead, started=started + 1)) is False
        child.kill()
    assert is_alive(dead) is False
    FolderRecords(tmp_path).create(4, encode_owner(msgspec.structs.replace(_own("dead"), token="t", process=dead)))
    with caplog.at_level("INFO", logger="outlast"):
        lease(tmp_path, _own("next")).acquire()
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} is taken over from run dead (pid {child.pid} on ")
    assert line.endswith("which has ended")
    assert FolderRecords(tmp_path).numbers() == [5]


def test_an_owner_on_another_machine_is_watched(
    tmp_path: Path, lease: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    """Who renews keeps the directory, the other one is refused within a renewal or two; who does not is waited for
    with a line that says how long, and followed."""
    elsewhere = lease(tmp_path, _own("far", machine="far"))
    elsewhere.acquire()
    with pytest.raises(InUse, match=r"in use by run far \(pid \d+ on far\)"):
        lease(tmp_path, _own("near")).acquire()
    caplog.clear()
    elsewhere.release(is_idle=False)  # it renews no more, and did not say that it has ended
    with caplog.at_level("INFO", logger="outlast"):
        lease(tmp_path, _own("near")).acquire()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "waiting until it has sent no heartbeat for" in caplog.messages[0]
    assert "is taken over from run far" in caplog.messages[1]


def test_an_owner_whose_file_system_hung_finds_out_before_it_writes(tmp_path: Path, lease: Leases) -> None:
    """Another machine has taken the directory over meanwhile: the next look raises, and so do all later ones; the
    successor's record is what it was, and the owner is told once."""
    records, told = _Hanging(tmp_path), list[InUse]()
    first = lease(records, _own("first", machine="far"), on_lost=told.append)
    first.acquire()
    records.answers.clear()
    second = lease(tmp_path, _own("second"))
    second.acquire()
    for _ in range(2):
        with pytest.raises(InUse, match="was taken over by run second"):
            first.check()
    with pytest.raises(InUse):
        first.hold()
    records.answers.set()
    _until(lambda: bool(told))
    first.release()
    second.check()
    assert [one.owner.run for one in told] == ["second"]
    assert _newest(tmp_path).run == "second"
    assert not _newest(tmp_path).released


def test_records_that_somebody_deleted_are_made_again(tmp_path: Path, lease: Leases) -> None:
    """Who clears a directory while a run writes to it takes nothing from the run."""
    first = lease(tmp_path, _own("first"))
    first.acquire()
    FolderRecords(tmp_path).remove(1)
    first.check()
    assert _newest(tmp_path).run == "first"
    with pytest.raises(InUse, match="in use by run first"):
        lease(tmp_path, _own("second")).acquire()


def test_a_torn_record_is_not_taken_for_none(tmp_path: Path, lease: Leases) -> None:
    """Nobody knows whose it is: it is watched, and followed once nothing changes."""
    folder = tmp_path / "owner"
    folder.mkdir()
    (folder / "7.json").write_bytes(b'{"token":"x","proc')
    own = lease(tmp_path, _own("next"))
    own.acquire()
    assert FolderRecords(tmp_path).numbers() == [8]


def test_processes_of_one_job_enter_beside_their_owner(tmp_path: Path, lease: Leases) -> None:
    """Agents of one job share its run directory; the one that hosts the coordinator leads, the former leader is told
    nothing and takes the lead again where it has to. Another job is refused all the while."""
    told = list[InUse]()
    known = {"job": "id@endpoint", "shares": True, "outlives": True}
    one = lease(tmp_path, _own("run", **known), on_lost=told.append)
    other = lease(tmp_path, _own("run", machine="far", **known), on_lost=told.append)
    one.acquire()
    other.acquire()
    assert not other.is_held
    other.acquire(leads=True)
    assert other.is_held
    _until(lambda: not one.is_held)
    with pytest.raises(InUse, match="in use by run run"):
        lease(tmp_path, _own("stranger")).acquire()
    one.acquire(leads=True)
    assert one.is_held
    assert told == []


class _Slow(FolderRecords):
    renew_s = 60.0


@pytest.mark.parametrize("records", [_Slow, _Quick])
def test_the_lead_is_taken_back_at_once(tmp_path: Path, lease: Leases, records: type[FolderRecords]) -> None:
    """An agent whose lead passed to another and comes back leads under a record of its own, although it never noticed
    that it had lost it; nothing else renews that record."""
    known = {"job": "id@endpoint", "shares": True, "outlives": True}
    one = lease(records(tmp_path), _own("run", **known))
    other = lease(records(tmp_path), _own("run", machine="far", **known))
    one.acquire()
    other.acquire(leads=True)
    one.acquire(leads=True)
    taken = _newest(tmp_path)
    assert taken.process == this_process()
    assert max(FolderRecords(tmp_path).numbers()) == 3
    if records is _Quick:
        _until(lambda: _newest(tmp_path).renewals >= 5)
    assert _newest(tmp_path).token == taken.token
    assert one.is_held
    one.release()
    assert _newest(tmp_path).released


def test_ranks_that_restart_are_vouched_for_by_their_launcher(tmp_path: Path, lease: Leases) -> None:
    """Between two cycles no process of theirs lives; as long as the owner of their run directory does, another run gets
    neither of the two directories, and the next cycle gets its own at once."""
    run_dir, ckpt = tmp_path / "run", tmp_path / "ckpt"
    launcher = lease(run_dir, _own("run"))
    launcher.acquire()
    gone = Process(host="here", machine=this_process().machine, pid=2**22 + 1, started=1)
    ranks = LeaseOwner(
        token="t",
        process=gone,
        run="run",
        run_dir=str(run_dir),
        job="run job",
        stage=(0, 0),
        outlives=True,
        renew_s=0.05,
    )
    FolderRecords(ckpt).create(1, encode_owner(ranks))
    with pytest.raises(InUse):
        lease(ckpt, _own("stranger")).acquire()
    lease(ckpt, msgspec.structs.replace(_own("run"), job="run job", stage=(1, 0))).acquire()
    assert FolderRecords(ckpt).numbers() == [2]


def test_the_next_launcher_of_a_run_vouches_for_no_rank_before_it(tmp_path: Path, lease: Leases) -> None:
    """A job that was killed as a whole is followed by another one with its name and run directory: that one's ranks get
    the checkpoint directory at once, although the owner of the run directory, their own launcher, lives."""
    run_dir, ckpt = tmp_path / "run", tmp_path / "ckpt"
    lease(run_dir, _own("run")).acquire()
    gone = Process(host="here", machine=this_process().machine, pid=2**22 + 1, started=1)
    own = _own("run", run_dir=str(run_dir), job="run job-2", stage=(0, 0), outlives=True)
    ranks = msgspec.structs.replace(own, token="t", process=gone, job="run job-1", stage=(3, 0), renew_s=60)
    FolderRecords(ckpt).create(1, encode_owner(ranks))
    lease(ckpt, own).acquire()
    assert FolderRecords(ckpt).numbers() == [2]
