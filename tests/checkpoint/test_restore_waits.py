"""A start waits for a directory that does not respond, and identifies which rank waits for which file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from saving_ranks import BODY

from hanging_mount import HangingMount
from outlast.checkpoint.writer_client import WriterProcess
from outlast.policy.recovery_point import NONE_DURABLE
from outlast.testing import RankProcesses

pytestmark = [pytest.mark.process, pytest.mark.slow]
LIMIT_S = 240.0

OPEN = """
from outlast.errors import OutlastError
options = json.loads(os.environ["OPTIONS"])
def begin():
    manager = manage(config=options)
    manager.claim()
    return manager, manager.load_latest(state)
def describe(error):
    return {"error": f"{type(error).__name__}: {error}", "node": error.node, "rank": error.rank}
"""
SAVE = (
    OPEN
    + """
manager, restored = begin()
train()
iteration = 1 + (restored.iteration if restored else 0)
tiers = json.loads(os.environ.get("TIERS", "null"))
manager.save(state, iteration, tiers=tiers).wait(100)
tell(loaded=restored and restored.iteration, tiers=restored and restored.tiers, saved=iteration)
manager.close()
"""
)
LOAD = (
    OPEN
    + """
try:
    manager, restored = begin()
    tell(loaded=restored and restored.iteration, tiers=restored and restored.tiers)
    manager.close()
except OutlastError as error:
    tell(**describe(error))
"""
)
HANG_AFTER_THE_LOOK = (
    OPEN
    + """
try:
    manager = manage(config=options)
    manager.claim()
    if rank == 1:
        os.kill(int(os.environ["DAEMON"]), signal.SIGSTOP)
    dist.barrier()
    restored = manager.load_latest(state)
    tell(loaded=restored and restored.iteration, tiers=restored and restored.tiers)
    manager.close()
except OutlastError as error:
    tell(**describe(error))
"""
)
Options = dict[str, Any]


class Ranks:
    """Two ranks on two nodes, each with a writer of its own that outlives the ranks.

    Args:
        folder: For local directories and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self.renew()

    def renew(self) -> None:
        """Start writers that hold nothing, as a new job does."""
        self._stack.close()
        self.writers = [self._stack.enter_context(closing(WriterProcess())) for _ in range(2)]

    def close(self) -> None:
        """End the writers."""
        self._stack.close()

    def run(
        self,
        script: str,
        *options: Options,
        cycle: int = 0,
        until: str = "",
        then: Callable[[], None] = lambda: None,
        mount: HangingMount | None = None,
        **variables: str,
    ) -> tuple[list[dict[str, Any]], str]:
        """Run a script on both ranks; return what each one tells, and the output of both.

        Args:
            options: Each rank's settings.
            cycle: Number of the job's cycle.
            until: A text in the output of a rank after which ``then`` is called; empty = at once.
            then: Is called once.
            mount: A directory that hangs in the script; resumed once both ranks have told. A call that the daemon had
                read before it was stopped cannot be interrupted, so that its process would not end on SIGKILL.
            variables: Of the ranks' environment.
        """
        options = options if len(options) == 2 else (options[0], options[0])
        places = [
            {"OUTLAST_WRITER": writer.address, "OUTLAST_NODES": "1", "OPTIONS": json.dumps(one)}
            for writer, one in zip(self.writers, options, strict=True)
        ]
        with RankProcesses(
            BODY + script,
            str(self.folder / "ckpt"),
            world_size=2,
            code=True,
            nodes=["a", "b"],
            environment={"OUTLAST_CYCLE": str(cycle), **variables},
            environments=places,
        ) as ranks:
            if until:
                ranks.wait_until(lambda: any(until in ranks.output(rank) for rank in range(2)) or None, LIMIT_S)
            then()
            if mount is not None:
                ranks.wait_until(lambda: all('{"' in ranks.output(rank) for rank in range(2)) or None, LIMIT_S)
                mount.resume()
            ranks.wait_until_gone(LIMIT_S)
            outputs = [ranks.output(rank) for rank in range(2)]
        told = []
        for output in outputs:
            lines = [line for line in output.splitlines() if line.startswith("{")]
            assert lines, output
            told.append(json.loads(lines[-1]))
        return told, "".join(outputs)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with closing(Ranks(tmp_path)) as ranks:
        yield ranks


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[HangingMount]:
    with HangingMount(tmp_path / "source", tmp_path / "mounted") as mount:
        yield mount


def settings(directory: Path | None, *, local: Path | None = None, **more: Any) -> Options:
    """Return settings whose limits fit a test: a call may take 2 s, and a start waits 200 s."""
    return {
        "directory": None if directory is None else str(directory),
        "local_directory": None if local is None else str(local),
        "response_timeout": 2.0,
        "restore_timeout": 200.0,
        **more,
    }


@pytest.mark.extended
def test_a_start_waits_for_a_global_directory_that_hangs(ranks: Ranks, mount: HangingMount) -> None:
    """Back after more than one attempt, the directory is loaded from, and the same run continues there."""
    told, _ = ranks.run(SAVE, settings(mount.path / "run"))
    assert [one["saved"] for one in told] == [1, 1]
    ranks.renew()
    mount.hang()
    told, output = ranks.run(SAVE, settings(mount.path / "run"), until="continues to wait", then=mount.resume)
    assert [(one["loaded"], one["saved"]) for one in told] == [(1, 2)] * 2, output
    assert f"{mount.path / 'run'} has not responded for 2 s" in output
    assert "PeerLost" not in output


def test_a_directory_that_hangs_for_good_ends_the_start_with_one_sentence(ranks: Ranks, mount: HangingMount) -> None:
    """All ranks get the same error after ``restore_timeout``: what does not respond, and to start again. Nothing in the
    directory changed, and it is not suggested to move anything."""
    ranks.run(SAVE, settings(mount.path / "run"))
    before = sorted(os.listdir(mount.source / "run"))
    ranks.renew()
    mount.hang()
    told, output = ranks.run(LOAD, settings(mount.path / "run", restore_timeout=3.0, response_timeout=1.0))
    assert told[0]["error"] == told[1]["error"], output
    assert told[0]["error"].startswith("Outage: no checkpoint could be looked up for")
    assert f"{mount.path / 'run'} has not responded for" in told[0]["error"]
    assert "start again once it responds: nothing was changed" in told[0]["error"]
    for word in ("checkpoint -1", "move", "empty directory", "PeerLost"):
        assert word not in output
    mount.resume()
    assert [name for name in sorted(os.listdir(mount.source / "run")) if not name.startswith(".probe")] == before


def test_a_start_that_must_not_wait_ends_at_the_first_failure(ranks: Ranks, mount: HangingMount) -> None:
    """With ``restore_timeout=0`` there is one attempt."""
    mount.hang()
    told, output = ranks.run(LOAD, settings(mount.path / "run", restore_timeout=0.0, response_timeout=1.0))
    assert all(one["error"].startswith("Outage") for one in told), output
    assert "continues to wait" not in output


@pytest.mark.extended
def test_memory_of_this_job_is_loaded_at_once_while_the_global_directory_hangs(
    ranks: Ranks, mount: HangingMount
) -> None:
    """A later cycle of the job does not wait: the newest checkpoint that it saved is in memory on all nodes."""
    ranks.run(SAVE, settings(mount.path / "run"))
    mount.hang()
    told, output = ranks.run(LOAD, settings(mount.path / "run"), cycle=1)
    assert [(one["loaded"], one["tiers"]) for one in told] == [(1, ["memory", "memory"])] * 2, output
    assert "continues to wait" not in output


@pytest.mark.extended
def test_a_newer_checkpoint_that_a_node_lacks_keeps_no_restart_waiting(
    ranks: Ranks, mount: HangingMount, tmp_path: Path
) -> None:
    """A failure ended the cycle while node b committed iteration 2, and the launcher knows that no checkpoint was
    committed to the global directory, which hangs: the ranks load iteration 1 at once."""
    options = [settings(mount.path / "run", local=tmp_path / node, replication=False) for node in "ab"]
    for cycle in range(2):
        told, output = ranks.run(SAVE, *options, cycle=cycle, TIERS='["local"]')
        assert [one["saved"] for one in told] == [cycle + 1] * 2, output
    shutil.rmtree(tmp_path / "b" / "b" / "step-2")
    mount.hang()
    told, output = ranks.run(LOAD, *options, cycle=2, OUTLAST_DURABLE_ITERATION=str(NONE_DURABLE))
    assert [(one["loaded"], one["tiers"]) for one in told] == [(1, ["local", "local"])] * 2, output
    assert "continues to wait" not in output


@pytest.mark.extended
@pytest.mark.parametrize("durable", ["", str(NONE_DURABLE)], ids=["unknown", "none"])
def test_older_local_checkpoints_are_loaded_only_once_the_wait_is_over(
    ranks: Ranks, mount: HangingMount, tmp_path: Path, durable: str
) -> None:
    """Another job may have saved newer ones in the global directory: a new job waits for it, and then goes on with what
    the local directories hold, and the line has the directory."""
    options = settings(mount.path / "run", local=tmp_path / "local")
    ranks.run(SAVE, options)
    ranks.renew()
    mount.hang()
    place = {"OUTLAST_JOB": "another", "OUTLAST_DURABLE_ITERATION": durable}
    told, output = ranks.run(LOAD, {**options, "restore_timeout": 3.0, "response_timeout": 1.0}, **place)
    assert [(one["loaded"], one["tiers"]) for one in told] == [(1, ["local", "local"])] * 2, output
    assert "the start continues with the checkpoints of the node-local tiers" in output


@pytest.mark.extended
def test_one_node_whose_mount_hangs_is_identified_on_all_ranks(ranks: Ranks, mount: HangingMount) -> None:
    """The directory responds on node a and hangs on node b: both ranks name b, and only b's rank has it as its own
    failure, so that the recovery policy counts the failure for node b."""
    ranks.run(SAVE, settings(mount.source / "run"), settings(mount.path / "run"))
    ranks.renew()
    mount.hang()
    told, output = ranks.run(LOAD, settings(mount.source / "run"), settings(mount.path / "run", response_timeout=1.0))
    (other, own) = told
    assert other["error"].startswith("UnavailableToPeer: ")
    assert own["error"].startswith("Unavailable: "), output
    assert own["node"] == "b"
    for one in told:
        assert f"node b: {mount.path / 'run'} has not responded for" in one["error"]


@pytest.mark.extended
def test_a_rank_whose_reading_hangs_is_identified_with_its_file(ranks: Ranks, mount: HangingMount) -> None:
    """Rank 1's directory hangs after the look: the others learn rank, node and file, in bounded time."""
    options = settings(mount.source / "run"), settings(mount.path / "run")
    ranks.run(SAVE, *options)
    ranks.renew()
    told, output = ranks.run(HANG_AFTER_THE_LOOK, *options, mount=mount, DAEMON=str(mount.pid))
    for one in told:
        assert "rank 1 on node b cannot load step-1/rank-00001" in one["error"], output
        assert f"{mount.path / 'run'}/step-1/" in one["error"]
    assert told[0]["error"].startswith("UnavailableToPeer")
    assert (told[1]["node"], told[1]["rank"]) == ("b", 1)


def test_a_rank_whose_local_directory_hangs_loads_from_another_tier(
    ranks: Ranks, mount: HangingMount, tmp_path: Path
) -> None:
    """The local directory of node b hangs while its rank reads: all load the same checkpoint from the global tier."""
    directory = tmp_path / "global"
    options = (
        settings(directory, local=tmp_path / "local", replication=False),
        settings(directory, local=mount.path, replication=False),
    )
    ranks.run(SAVE, *options)
    ranks.renew()
    told, output = ranks.run(HANG_AFTER_THE_LOOK, *options, mount=mount, DAEMON=str(mount.pid))
    assert [one.get("loaded") for one in told] == [1, 1], output
    assert told[0]["tiers"][1] == "global"


@pytest.mark.extended
def test_a_local_directory_that_hangs_at_the_start_is_done_without(
    ranks: Ranks, mount: HangingMount, tmp_path: Path
) -> None:
    """Node b's local directory hangs from the start: the ranks load from the global tier, and one line names node, tier
    and path. A run that has not saved anything starts from scratch."""
    directory = tmp_path / "global"
    options = (
        settings(directory, local=tmp_path / "local", replication=False),
        settings(directory, local=mount.path, replication=False),
    )
    mount.hang()
    told, output = ranks.run(LOAD, *options)
    assert [one.get("loaded", "") for one in told] == [None, None], output
    mount.resume()
    ranks.run(SAVE, *options)
    ranks.renew()
    mount.hang()
    told, output = ranks.run(LOAD, *options)
    assert [one.get("loaded") for one in told] == [1, 1], output
    assert "node b: the local tier cannot be used at present" in output
    assert str(mount.path) in output


def test_a_full_local_directory_does_not_end_the_start(ranks: Ranks, tmp_path: Path) -> None:
    """The local directory of node b is on a full file system: the start continues, and one line names it."""
    full = tmp_path / "full"
    full.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(full)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("a small file system needs root")
    try:
        (full / "fill").write_bytes(bytes(64 << 10))
        options = (
            settings(tmp_path / "global", local=tmp_path / "local", replication=False),
            settings(tmp_path / "global", local=full, replication=False),
        )
        told, output = ranks.run(LOAD, *options)
        assert [one.get("loaded", "") for one in told] == [None, None], output
        assert "node b: the local tier cannot be used at present" in output
        assert "No space left on device" in output
    finally:
        subprocess.run(["umount", "-l", full], check=True)


def test_a_read_only_global_directory_does_not_end_the_start(ranks: Ranks, tmp_path: Path) -> None:
    """What can be read is loaded; one line says that it cannot be written."""
    source, path = tmp_path / "source", tmp_path / "read-only"
    source.mkdir()
    path.mkdir()
    local = tmp_path / "local"
    ranks.run(SAVE, settings(source, local=local))
    if os.geteuid() != 0 or subprocess.run(["mount", "--bind", source, path], check=False).returncode:
        pytest.skip("a bind mount needs root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
        ranks.renew()
        told, output = ranks.run(LOAD, settings(path, local=tmp_path / "another"))
        assert [(one.get("loaded"), one.get("tiers")) for one in told] == [(1, ["global"] * 2)] * 2, output
        assert "node a: the global tier cannot be written at present" in output
    finally:
        subprocess.run(["umount", "-l", path], check=True)
