"""A lease in a folder: held by one owner, kept by renewals, taken over from a dead owner; a former owner detects the
loss."""

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
    """A file system that hangs in renewals while ``answers`` is not set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.answers = threading.Event()
        self.answers.set()

    def renew(self, number: int, data: bytes) -> None:
        assert self.answers.wait(PATIENCE_S)
        super().renew(number, data)


def _own(run: str = "a", *, machine: str | None = None, **common: object) -> LeaseOwner:
    process = this_process()
    if machine is not None:
        process = msgspec.structs.replace(process, machine=machine, host=machine)
    return LeaseOwner(token="", process=process, run=run, **common)  # type: ignore[arg-type]


@dataclass
class Leases:
    """Leases of a test, which are released at its end."""

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
    raise AssertionError("the condition was not reached")


def test_directory_has_one_owner_until_its_release(tmp_path: Path, lease: Leases) -> None:
    """A second owner is rejected with the first one's name; after the release it gets the lease at once, under the
    next number."""
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


def test_one_of_many_concurrent_owners_gets_the_lease(tmp_path: Path, lease: Leases) -> None:
    """Exactly one gets it, in an empty directory and after an owner that has ended."""
    for _ in range(3):
        many = [lease(tmp_path, _own(str(number))) for number in range(8)]
        barrier = threading.Barrier(len(many), timeout=PATIENCE_S)

        def take(one: Lease, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            with contextlib.suppress(InUse):
                one.acquire()
            return one.is_held

        with ThreadPoolExecutor(len(many)) as pool:
            assert sorted(pool.map(take, many)) == [False] * 7 + [True]
        for one in many:
            one.release()


@pytest.mark.process
def test_lease_of_a_dead_process_is_taken_over_at_once(
    tmp_path: Path, lease: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    """A reused pid is detected by the start time of the process; the takeover is one log line."""
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


def test_lease_of_another_machine_expires_without_renewals(
    tmp_path: Path, lease: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    """An owner that renews keeps the directory, and another one is rejected within a renewal or two; an owner that
    does not renew is waited for, with a line on how long, and taken over from."""
    remote = lease(tmp_path, _own("far", machine="far"))
    remote.acquire()
    with pytest.raises(InUse, match=r"in use by run far \(pid \d+ on far\)"):
        lease(tmp_path, _own("near")).acquire()
    caplog.clear()
    remote.release(is_idle=False)  # no more renewals, and no record of the end
    with caplog.at_level("INFO", logger="outlast"):
        lease(tmp_path, _own("near")).acquire()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "waiting until it has sent no heartbeat for" in caplog.messages[0]
    assert "is taken over from run far" in caplog.messages[1]


def test_owner_detects_a_takeover_before_it_writes(tmp_path: Path, lease: Leases) -> None:
    """If another machine took the directory over during a hang, the next check raises, and so do all later ones; the
    successor's record is unchanged, and the former owner is notified once."""
    records, lost_leases = _Hanging(tmp_path), list[InUse]()
    first = lease(records, _own("first", machine="far"), on_lost=lost_leases.append)
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
    _until(lambda: bool(lost_leases))
    first.release()
    second.check()
    assert [one.owner.run for one in lost_leases] == ["second"]
    assert _newest(tmp_path).run == "second"
    assert not _newest(tmp_path).released


def test_deleted_records_are_written_again(tmp_path: Path, lease: Leases) -> None:
    """Deleting the records of a directory in use does not end the lease."""
    first = lease(tmp_path, _own("first"))
    first.acquire()
    FolderRecords(tmp_path).remove(1)
    first.check()
    assert _newest(tmp_path).run == "first"
    with pytest.raises(InUse, match="in use by run first"):
        lease(tmp_path, _own("second")).acquire()


def test_torn_record_counts_as_an_owner(tmp_path: Path, lease: Leases) -> None:
    """A torn record has an unknown owner: it is watched, and taken over once it stops changing."""
    folder = tmp_path / "owner"
    folder.mkdir()
    (folder / "7.json").write_bytes(b'{"token":"x","proc')
    own = lease(tmp_path, _own("next"))
    own.acquire()
    assert FolderRecords(tmp_path).numbers() == [8]


def test_processes_of_one_job_share_a_lease(tmp_path: Path, lease: Leases) -> None:
    """Agents of one job share its run directory; the host of the coordinator leads, the former leader is not
    notified and can lead again. Another job is rejected throughout."""
    lost_leases = list[InUse]()
    common = {"job": "id@endpoint", "shares": True, "outlives": True}
    one = lease(tmp_path, _own("run", **common), on_lost=lost_leases.append)
    other = lease(tmp_path, _own("run", machine="far", **common), on_lost=lost_leases.append)
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
    assert lost_leases == []


class _Slow(FolderRecords):
    renew_s = 60.0


@pytest.mark.parametrize("records", [_Slow, _Quick])
def test_lead_is_taken_back_at_once(tmp_path: Path, lease: Leases, records: type[FolderRecords]) -> None:
    """An agent whose lead passed to another agent and back leads under a new record, even if it never detected the
    loss; that record is renewed by no other agent."""
    common = {"job": "id@endpoint", "shares": True, "outlives": True}
    one = lease(records(tmp_path), _own("run", **common))
    other = lease(records(tmp_path), _own("run", machine="far", **common))
    one.acquire()
    other.acquire(leads=True)
    one.acquire(leads=True)
    leading_record = _newest(tmp_path)
    assert leading_record.process == this_process()
    assert max(FolderRecords(tmp_path).numbers()) == 3
    if records is _Quick:
        _until(lambda: _newest(tmp_path).renewals >= 5)
    assert _newest(tmp_path).token == leading_record.token
    assert one.is_held
    one.release()
    assert _newest(tmp_path).released


def test_launcher_keeps_the_lease_of_restarting_ranks(tmp_path: Path, lease: Leases) -> None:
    """Between two cycles no rank process lives; while the owner of their run directory lives, another run gets
    neither directory, and the next cycle gets its lease at once."""
    run_dir, ckpt = tmp_path / "run", tmp_path / "ckpt"
    launcher = lease(run_dir, _own("run"))
    launcher.acquire()
    dead_process = Process(host="here", machine=this_process().machine, pid=2**22 + 1, started=1)
    ranks = LeaseOwner(
        token="t",
        process=dead_process,
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


def test_new_launcher_does_not_keep_leases_of_the_last_job(tmp_path: Path, lease: Leases) -> None:
    """After a job was killed as a whole, the ranks of the next job with the same name and run directory get the
    checkpoint directory at once, although their own launcher lives."""
    run_dir, ckpt = tmp_path / "run", tmp_path / "ckpt"
    lease(run_dir, _own("run")).acquire()
    dead_process = Process(host="here", machine=this_process().machine, pid=2**22 + 1, started=1)
    own = _own("run", run_dir=str(run_dir), job="run job-2", stage=(0, 0), outlives=True)
    ranks = msgspec.structs.replace(own, token="t", process=dead_process, job="run job-1", stage=(3, 0), renew_s=60)
    FolderRecords(ckpt).create(1, encode_owner(ranks))
    lease(ckpt, own).acquire()
    assert FolderRecords(ckpt).numbers() == [2]
