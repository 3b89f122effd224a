"""Two lives of one run on one directory, as processes: whatever moment one is stopped at, nothing committed is lost."""

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


class Life:
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
        """Return what it does next; ``None``: it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.lines.append(json.loads(line))
        return self.lines[-1]

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Return the line of a kind that comes as the ``count``-th from now."""
        while (line := self.next()) is not None:
            count -= kind in line
            if count == 0:
                return line
        raise AssertionError(f"it ended with code {self.process.wait(PATIENCE_S)}: {self.lines[-3:]}")

    def wait_until_stopped(self) -> None:
        """Wait for its stop by a signal; it stays a child to be waited for."""
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.wait_until_stopped()

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def finish(self) -> int:
        """Have it end; return its exit code."""
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


class Place:
    """A directory, and the lives on it."""

    def __init__(self, url: str, environment: dict[str, str], stack: ExitStack) -> None:
        self.url, self._environment, self._stack, self._count = url, environment, stack, 0

    def live(self, **options: Any) -> Life:
        self._count += 1
        life = Life(self.url, self._count, self._environment, **options)
        self._stack.callback(life.close)
        return life

    def contents(self) -> dict[int, float]:
        """Return what a later life finds, verified."""
        last = self.live()
        found = last.wait_for("found")["found"]
        last.finish()
        return dict(found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server for all tests of this module, known to what runs in this process."""
    with S3Server.reachable("bucket", tmp_path_factory.mktemp("s3") / "record") as running:
        yield running


@pytest.fixture
def place(tmp_path: Path, server: S3Server, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A directory of the kind that the test is given, else in the store."""
    with ExitStack() as stack:
        if getattr(request, "param", "s3") == "posix":
            yield Place(os.fspath(tmp_path / "place"), {}, stack)
        else:
            yield Place(f"s3://bucket/{tmp_path.name}", server.environment, stack)


def _check_kept(place: Place, first: Life, second: Life) -> None:
    """Check that all that either life committed is there, and nothing else; the second one's wins."""
    lines, expected = first.lines + second.lines, {**first.committed(), **second.committed(), **_found(second)}
    # A save whose answer was lost has failed, and may be there: a busy store answers late.
    uncertain = {line["failed"] for line in lines if "failed" in line} - set(expected)
    there = {iteration: value for iteration, value in place.contents().items() if iteration not in uncertain}
    assert there == expected, lines
    found = _found(second)
    for iteration, value in first.committed().items():  # or what replaced it, committed and then stopped
        assert value <= found[iteration] <= 1000 + iteration + 1 / 8


def _found(life: Life) -> dict[int, float]:
    (line,) = [line for line in life.lines if "found" in line]
    return dict(line["found"])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "displaces"),
    [("posix", True), ("posix", False), ("s3", True), pytest.param("s3", False, marks=pytest.mark.campaign)],
    indirect=["place"],
)
def test_a_life_stopped_between_its_check_and_its_commit_commits_nothing_later(place: Place, displaces: bool) -> None:
    """It continues after another life took over and, in one case, has committed the very same iteration: it is
    refused with a line that names its successor, ends, and all that the successor committed is there."""
    first = place.live(point="checkpoint.fenced", at=2)
    first.wait_for("committed", 2)
    first.wait_until_stopped()
    second = place.live()
    second.wait_for("found")
    if displaces:
        second.wait_for("committed", 3)
        first.go_on()
        assert "was taken over by" in first.wait_for("refused")["refused"]
        second.wait_for("committed", 2)
    else:
        second.stop()
        first.go_on()
        assert "was taken over by" in first.wait_for("refused")["refused"]
        second.go_on()
        second.wait_for("committed", 3)
    assert (first.finish(), second.finish()) == (75, 0)
    assert list(first.committed()) == [1, 2]
    _check_kept(place, first, second)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("place", ["posix", _S3_IN_CAMPAIGNS], indirect=True)
def test_a_life_stopped_before_it_deletes_deletes_nothing_that_its_successor_has(place: Place) -> None:
    """It is about to delete its oldest checkpoint; what its successor found and committed is there afterwards."""
    first = place.live(point="checkpoint.retire", at=0, keep=2)
    first.wait_for("committed", 2)
    first.wait_until_stopped()
    second = place.live()
    second.wait_for("committed", 2)
    first.go_on()
    assert "was taken over by" in first.wait_for("refused")["refused"]
    assert (first.finish(), second.finish()) == (75, 0)
    assert place.contents() == {**_found(second), **second.committed()}
    assert set(_found(second)) >= {2, 3}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("place", ["posix", "s3"], indirect=True)
def test_a_life_beside_a_living_one_is_refused(place: Place) -> None:
    """The later one writes nothing, says who has the directory, and ends; the earlier one goes on."""
    first = place.live()
    first.wait_for("committed")
    second = place.live()
    assert "is in use by" in second.wait_for("refused")["refused"]
    assert second.finish() == 75
    first.wait_for("committed", 2)
    assert first.finish() == 0
    assert place.contents() == first.committed()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("place", ["posix", _S3_IN_CAMPAIGNS], indirect=True)
def test_a_life_stopped_before_it_replaces_a_checkpoint_replaces_nothing_later(place: Place) -> None:
    """It is about to replace what it committed last when another life takes over, which finds that checkpoint: it is
    still there afterwards, as found, and the format's own index still names its files."""
    first = place.live(point="checkpoint.fenced", at=3, times=2)
    first.wait_for("committed", 3)
    first.wait_until_stopped()
    second = place.live()
    second.wait_for("found")
    second.stop()
    first.go_on()
    assert "was taken over by" in first.wait_for("refused")["refused"]
    second.go_on()
    second.wait_for("committed", 2)
    assert (first.finish(), second.finish()) == (75, 0)
    assert first.committed() == {1: 1001.125, 2: 1002.0}
    _check_kept(place, first, second)
    _check_indexes(place)


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("replaces", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_a_save_cut_short_before_the_formats_own_index_is_whole(place: Place, replaces: bool, ends: str) -> None:
    """A life on S3 ends between the manifest, which commits a checkpoint, and the format's own index: the next life
    finds the new checkpoint, and puts the index right; the ended one, should it continue, does not undo that."""
    first = place.live(point="checkpoint.indexed", at=3 if replaces else 2, times=2)
    first.wait_for("committed", 3 if replaces else 2)
    first.wait_until_stopped()
    if ends == "killed":
        first.close()
    second = place.live()
    assert dict(second.wait_for("found")["found"])[2] == (1002.125 if replaces else 1002.0)
    _check_indexes(place, [1, 2])
    second.wait_for("committed")
    if ends == "stopped":
        first.go_on()
        first.wait_for("refused")
        assert first.finish() == 75
    second.wait_for("committed")
    assert second.finish() == 0
    _check_kept(place, first, second)
    _check_indexes(place)


def _check_indexes(place: Place, iterations: Sequence[int] = ()) -> None:
    """Check that the format's own index of each checkpoint is the one that was saved with its manifest."""
    directory = GlobalDirectory.open(place.url)
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
@pytest.mark.parametrize(("place", "seed"), [*_RANDOM, *_MANY], indirect=["place"])
def test_lives_stopped_at_random_moments_lose_nothing(place: Place, seed: int) -> None:
    """What the stopped one had committed is found by the other, whose commits stay; no checkpoint is a mix."""
    chance = random.Random(seed)
    first = place.live(times=chance.randint(1, 2))
    first.wait_for("committed", chance.randint(1, 4))
    for _ in range(chance.randrange(20_000)):  # somewhere in a save
        pass
    first.stop()
    second = place.live()
    second.wait_for("found")
    second.wait_for("committed", chance.randint(1, 3))
    first.go_on()
    first.wait_for("refused")
    second.wait_for("committed")
    assert (first.finish(), second.finish()) == (75, 0)
    _check_kept(place, first, second)
