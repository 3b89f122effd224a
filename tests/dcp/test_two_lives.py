"""Two processes of one run on one directory: no committed checkpoint is lost, whenever one of them is stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server

from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.shard import digests

pytestmark = pytest.mark.extended

HERE = Path(__file__).parent
PATIENCE_S = 100
KEEP_ALL = -1
_S3_IN_CAMPAIGNS = pytest.param("s3", marks=pytest.mark.campaign)


class RunProcess:
    """A process of ``owning_life``."""

    def __init__(
        self,
        url: str,
        number: int,
        environment: dict[str, str],
        *,
        keep: int = KEEP_ALL,
        point: str = "",
        at: int = 0,
        times: int = 1,
    ) -> None:
        arguments = [url, str(number), f"{number:08x}", str(keep), point, str(at), str(times)]
        self.lines: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, os.fspath(HERE / "owning_life.py"), *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def next(self) -> dict[str, Any] | None:
        """Return the process's next line; ``None``: the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.lines.append(json.loads(line))
        return self.lines[-1]

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Return the ``count``-th line of a kind from now on."""
        while (line := self.next()) is not None:
            count -= kind in line
            if count == 0:
                return line
        raise AssertionError(f"it ended with code {self.process.wait(PATIENCE_S)}: {self.lines[-3:]}")

    def wait_until_stopped(self) -> None:
        """Wait until a signal has stopped the process; the process is not reaped."""
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.wait_until_stopped()

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def finish(self) -> int:
        """Request the process to end; return its exit code."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        while self.next() is not None:
            pass
        return self.process.wait(PATIENCE_S)

    def committed(self) -> dict[int, float]:
        return {line["committed"]: line["value"] for line in self.lines if "committed" in line}

    def close(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self.process.wait(PATIENCE_S)


class RunDirectory:
    """A directory, and the processes on it."""

    def __init__(self, url: str, environment: dict[str, str], stack: ExitStack) -> None:
        self.url, self._environment, self._stack, self._count = url, environment, stack, 0

    def start(self, **options: Any) -> RunProcess:
        self._count += 1
        started = RunProcess(self.url, self._count, self._environment, **options)
        self._stack.callback(started.close)
        return started

    def contents(self) -> dict[int, float]:
        """Return the verified checkpoints that a new process finds."""
        last = self.start()
        found = last.wait_for("found")["found"]
        last.finish()
        return dict(found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server for all tests of this module, reachable from this process."""
    with S3Server.reachable("bucket", tmp_path_factory.mktemp("s3") / "record") as running:
        yield running


@pytest.fixture
def run_directory(tmp_path: Path, server: S3Server, request: pytest.FixtureRequest) -> Iterator[RunDirectory]:
    """A directory of the kind of the test's parameter; S3 is the default."""
    with ExitStack() as stack:
        if getattr(request, "param", "s3") == "posix":
            yield RunDirectory(os.fspath(tmp_path / "run_directory"), {}, stack)
        else:
            yield RunDirectory(f"s3://bucket/{tmp_path.name}", server.environment, stack)


def _check_kept(run_directory: RunDirectory, first: RunProcess, second: RunProcess) -> None:
    """Check that all checkpoints committed by either process exist, and no other ones; the second process's take
    precedence."""
    lines, expected = first.lines + second.lines, {**first.committed(), **second.committed(), **_found(second)}
    # A save whose response was lost has failed but may exist, because a busy object store responds late.
    uncertain = {line["failed"] for line in lines if "failed" in line} - set(expected)
    there = {iteration: value for iteration, value in run_directory.contents().items() if iteration not in uncertain}
    assert there == expected, lines
    found = _found(second)
    for iteration, value in first.committed().items():  # or its replacement, committed before the stop
        assert value <= found[iteration] <= 1000 + iteration + 1 / 8


def _found(started: RunProcess) -> dict[int, float]:
    (line,) = [line for line in started.lines if "found" in line]
    return dict(line["found"])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_directory", "displaces"),
    [("posix", True), ("posix", False), ("s3", True), pytest.param("s3", False, marks=pytest.mark.campaign)],
    indirect=["run_directory"],
)
def test_a_process_stopped_before_its_commit_is_refused(run_directory: RunDirectory, displaces: bool) -> None:
    """A process stopped between its lease check and its commit is refused when it continues after a takeover, with
    an error that contains its successor; all commits of the successor stay, also of the same iteration."""
    first = run_directory.start(point="checkpoint.fenced", at=2)
    first.wait_for("committed", 2)
    first.wait_until_stopped()
    second = run_directory.start()
    second.wait_for("found")
    if displaces:
        second.wait_for("committed", 3)
        first.resume()
        assert "was taken over by" in first.wait_for("refused")["refused"]
        second.wait_for("committed", 2)
    else:
        second.stop()
        first.resume()
        assert "was taken over by" in first.wait_for("refused")["refused"]
        second.resume()
        second.wait_for("committed", 3)
    assert (first.finish(), second.finish()) == (75, 0)
    assert list(first.committed()) == [1, 2]
    _check_kept(run_directory, first, second)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("run_directory", ["posix", _S3_IN_CAMPAIGNS], indirect=True)
def test_a_process_stopped_before_a_deletion_deletes_nothing(run_directory: RunDirectory) -> None:
    """A process stopped before it deletes its oldest checkpoint does not delete a checkpoint that its successor
    found or committed."""
    first = run_directory.start(point="checkpoint.retire", at=0, keep=2)
    first.wait_for("committed", 2)
    first.wait_until_stopped()
    second = run_directory.start()
    second.wait_for("committed", 2)
    first.resume()
    assert "was taken over by" in first.wait_for("refused")["refused"]
    assert (first.finish(), second.finish()) == (75, 0)
    assert run_directory.contents() == {**_found(second), **second.committed()}
    assert set(_found(second)) >= {2, 3}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("run_directory", ["posix", "s3"], indirect=True)
def test_a_second_live_process_is_refused(run_directory: RunDirectory) -> None:
    """The second process writes nothing, reports the owner of the directory and exits; the first one continues."""
    first = run_directory.start()
    first.wait_for("committed")
    second = run_directory.start()
    assert "is in use by" in second.wait_for("refused")["refused"]
    assert second.finish() == 75
    first.wait_for("committed", 2)
    assert first.finish() == 0
    assert run_directory.contents() == first.committed()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("run_directory", ["posix", _S3_IN_CAMPAIGNS], indirect=True)
def test_a_process_stopped_before_a_replacement_replaces_nothing(run_directory: RunDirectory) -> None:
    """A process stopped before it replaces its last checkpoint does not replace it after a takeover: the checkpoint
    is as the successor found it, and its `.metadata` file lists its files."""
    first = run_directory.start(point="checkpoint.fenced", at=3, times=2)
    first.wait_for("committed", 3)
    first.wait_until_stopped()
    second = run_directory.start()
    second.wait_for("found")
    second.stop()
    first.resume()
    assert "was taken over by" in first.wait_for("refused")["refused"]
    second.resume()
    second.wait_for("committed", 2)
    assert (first.finish(), second.finish()) == (75, 0)
    assert first.committed() == {1: 1001.125, 2: 1002.0}
    _check_kept(run_directory, first, second)
    _check_indexes(run_directory)


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("replaces", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_a_save_interrupted_before_its_metadata_is_whole(
    run_directory: RunDirectory, replaces: bool, ends: str
) -> None:
    """A process on S3 ends between the manifest, which commits a checkpoint, and the `.metadata` file: the next
    process finds the new checkpoint and repairs `.metadata`, and the first process does not undo the repair if it
    continues."""
    first = run_directory.start(point="checkpoint.indexed", at=3 if replaces else 2, times=2)
    first.wait_for("committed", 3 if replaces else 2)
    first.wait_until_stopped()
    if ends == "killed":
        first.close()
    second = run_directory.start()
    assert dict(second.wait_for("found")["found"])[2] == (1002.125 if replaces else 1002.0)
    _check_indexes(run_directory, [1, 2])
    second.wait_for("committed")
    if ends == "stopped":
        first.resume()
        first.wait_for("refused")
        assert first.finish() == 75
    second.wait_for("committed")
    assert second.finish() == 0
    _check_kept(run_directory, first, second)
    _check_indexes(run_directory)


def _check_indexes(run_directory: RunDirectory, iterations: Sequence[int] = ()) -> None:
    """Check that each checkpoint's `.metadata` file is the one that was saved with its manifest."""
    directory = GlobalDirectory.open(run_directory.url)
    for iteration in iterations or directory.checkpoints():
        entry = directory.manifest(iteration).metadata
        assert entry is not None
        data = directory.read(f"{directory.folder(iteration)}/{entry.name}")
        assert (len(data), digests(data)) == (entry.num_bytes, entry.chunks), f"checkpoint {iteration}"


_RANDOM = [("posix", 0), ("posix", 1), ("s3", 2)]
_MANY = [pytest.param(kind, seed, marks=pytest.mark.campaign) for kind in ("posix", "s3") for seed in range(100, 120)]


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("run_directory", "seed"), [*_RANDOM, *_MANY], indirect=["run_directory"])
def test_processes_stopped_at_random_times_lose_nothing(run_directory: RunDirectory, seed: int) -> None:
    """The successor finds all checkpoints that the stopped process committed, the successor's commits stay, and no
    checkpoint mixes both."""
    chance = random.Random(seed)
    first = run_directory.start(times=chance.randint(1, 2))
    first.wait_for("committed", chance.randint(1, 4))
    for _ in range(chance.randrange(20_000)):  # a random time within a save
        pass
    first.stop()
    second = run_directory.start()
    second.wait_for("found")
    second.wait_for("committed", chance.randint(1, 3))
    first.resume()
    first.wait_for("refused")
    second.wait_for("committed")
    assert (first.finish(), second.finish()) == (75, 0)
    _check_kept(run_directory, first, second)
