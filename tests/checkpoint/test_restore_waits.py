"""A start waits for a directory that does not respond, and reports which rank waits for which file."""

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
    """Two ranks on two nodes, each with a writer that outlives the ranks.

    Args:
        folder: For local directories and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self.renew()

    def renew(self) -> None:
        """Start empty writers, as a new job does."""
        self._stack.close()
        self.writers = [self._stack.enter_context(closing(WriterProcess())) for _ in range(2)]

    def close(self) -> None:
        """Close the writers."""
        self._stack.close()

    def run(
        self,
        script: str,
        *options: Options,
        cycle: int = 0,
        until_output: str = "",
        action: Callable[[], None] = lambda: None,
        mount: HangingMount | None = None,
        **variables: str,
    ) -> tuple[list[dict[str, Any]], str]:
        """Run a script on both ranks; return each rank's report and the output of both.

        Args:
            options: Each rank's settings.
            cycle: Number of the job's cycle.
            until_output: A text in the output of a rank after which ``action`` is called; empty = at once.
            action: Is called once.
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
            if until_output:
                ranks.wait_until(lambda: any(until_output in ranks.output(rank) for rank in range(2)) or None, LIMIT_S)
            action()
            if mount is not None:
                ranks.wait_until(lambda: all('{"' in ranks.output(rank) for rank in range(2)) or None, LIMIT_S)
                mount.resume()
            ranks.wait_until_gone(LIMIT_S)
            outputs = [ranks.output(rank) for rank in range(2)]
        reports = []
        for output in outputs:
            lines = [line for line in output.splitlines() if line.startswith("{")]
            assert lines, output
            reports.append(json.loads(lines[-1]))
        return reports, "".join(outputs)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with closing(Ranks(tmp_path)) as ranks:
        yield ranks


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[HangingMount]:
    with HangingMount(tmp_path / "source", tmp_path / "mounted") as mount:
        yield mount


def settings(directory: Path | None, *, local: Path | None = None, **more: Any) -> Options:
    """Return settings with limits for a test: a call may take 2 s, and a start waits 200 s."""
    return {
        "directory": None if directory is None else str(directory),
        "local_directory": None if local is None else str(local),
        "response_timeout": 2.0,
        "restore_timeout": 200.0,
        **more,
    }


@pytest.mark.extended
def test_a_start_waits_for_a_hung_global_directory(ranks: Ranks, mount: HangingMount) -> None:
    """A directory that recovers after more than one attempt is loaded from, and the run continues there."""
    reports, _ = ranks.run(SAVE, settings(mount.path / "run"))
    assert [one["saved"] for one in reports] == [1, 1]
    ranks.renew()
    mount.hang()
    reports, output = ranks.run(
        SAVE, settings(mount.path / "run"), until_output="continues to wait", action=mount.resume
    )
    assert [(one["loaded"], one["saved"]) for one in reports] == [(1, 2)] * 2, output
    assert f"{mount.path / 'run'} has not responded for 2 s" in output
    assert "PeerLost" not in output


def test_a_permanently_hung_directory_fails_the_start(ranks: Ranks, mount: HangingMount) -> None:
    """After ``restore_timeout`` all ranks fail with the same error: what does not respond, and to start again.

    Nothing in the directory changes, and the error does not suggest to move anything.
    """
    ranks.run(SAVE, settings(mount.path / "run"))
    before = sorted(os.listdir(mount.source / "run"))
    ranks.renew()
    mount.hang()
    reports, output = ranks.run(LOAD, settings(mount.path / "run", restore_timeout=3.0, response_timeout=1.0))
    assert reports[0]["error"] == reports[1]["error"], output
    assert reports[0]["error"].startswith("Outage: no checkpoint could be looked up for")
    assert f"{mount.path / 'run'} has not responded for" in reports[0]["error"]
    assert "start again once it responds: nothing was changed" in reports[0]["error"]
    for word in ("checkpoint -1", "move", "empty directory", "PeerLost"):
        assert word not in output
    mount.resume()
    assert [name for name in sorted(os.listdir(mount.source / "run")) if not name.startswith(".probe")] == before


def test_restore_timeout_0_makes_one_attempt(ranks: Ranks, mount: HangingMount) -> None:
    """With ``restore_timeout=0`` the start fails after the first attempt."""
    mount.hang()
    reports, output = ranks.run(LOAD, settings(mount.path / "run", restore_timeout=0.0, response_timeout=1.0))
    assert all(one["error"].startswith("Outage") for one in reports), output
    assert "continues to wait" not in output


@pytest.mark.extended
def test_a_restart_loads_from_memory_with_a_hung_directory(ranks: Ranks, mount: HangingMount) -> None:
    """A later cycle does not wait for the directory, because the job's newest checkpoint is in memory on all nodes."""
    ranks.run(SAVE, settings(mount.path / "run"))
    mount.hang()
    reports, output = ranks.run(LOAD, settings(mount.path / "run"), cycle=1)
    assert [(one["loaded"], one["tiers"]) for one in reports] == [(1, ["memory", "memory"])] * 2, output
    assert "continues to wait" not in output


@pytest.mark.extended
def test_a_restart_does_not_wait_for_an_uncommitted_checkpoint(
    ranks: Ranks, mount: HangingMount, tmp_path: Path
) -> None:
    """If no checkpoint was committed to the hung directory, the ranks load the newest one that all nodes have at once.

    A failure ended the cycle while node b committed iteration 2.
    """
    options = [settings(mount.path / "run", local=tmp_path / node, replication=False) for node in "ab"]
    for cycle in range(2):
        reports, output = ranks.run(SAVE, *options, cycle=cycle, TIERS='["local"]')
        assert [one["saved"] for one in reports] == [cycle + 1] * 2, output
    shutil.rmtree(tmp_path / "b" / "b" / "step-2")
    mount.hang()
    reports, output = ranks.run(LOAD, *options, cycle=2, OUTLAST_DURABLE_ITERATION=str(NONE_DURABLE))
    assert [(one["loaded"], one["tiers"]) for one in reports] == [(1, ["local", "local"])] * 2, output
    assert "continues to wait" not in output


@pytest.mark.extended
@pytest.mark.parametrize("durable", ["", str(NONE_DURABLE)], ids=["unknown", "none"])
def test_a_new_job_loads_local_checkpoints_after_the_wait(
    ranks: Ranks, mount: HangingMount, tmp_path: Path, durable: str
) -> None:
    """A new job waits for the global directory, which may have newer checkpoints, and then loads the local ones.

    The line contains the directory.
    """
    options = settings(mount.path / "run", local=tmp_path / "local")
    ranks.run(SAVE, options)
    ranks.renew()
    mount.hang()
    job_variables = {"OUTLAST_JOB": "another", "OUTLAST_DURABLE_ITERATION": durable}
    reports, output = ranks.run(LOAD, {**options, "restore_timeout": 3.0, "response_timeout": 1.0}, **job_variables)
    assert [(one["loaded"], one["tiers"]) for one in reports] == [(1, ["local", "local"])] * 2, output
    assert "the start continues with the checkpoints of the node-local tiers" in output


@pytest.mark.extended
def test_a_hung_mount_of_one_node_is_reported_on_all_ranks(ranks: Ranks, mount: HangingMount) -> None:
    """Both ranks report node b, and only b's rank reports its own failure, so that the failure counts for node b."""
    ranks.run(SAVE, settings(mount.source / "run"), settings(mount.path / "run"))
    ranks.renew()
    mount.hang()
    reports, output = ranks.run(
        LOAD, settings(mount.source / "run"), settings(mount.path / "run", response_timeout=1.0)
    )
    (other, affected) = reports
    assert other["error"].startswith("UnavailableToPeer: ")
    assert affected["error"].startswith("Unavailable: "), output
    assert affected["node"] == "b"
    for one in reports:
        assert f"node b: {mount.path / 'run'} has not responded for" in one["error"]


@pytest.mark.extended
def test_a_hung_read_is_reported_with_rank_and_file(ranks: Ranks, mount: HangingMount) -> None:
    """If rank 1's directory hangs after the lookup, the others report rank, node and file in bounded time."""
    options = settings(mount.source / "run"), settings(mount.path / "run")
    ranks.run(SAVE, *options)
    ranks.renew()
    reports, output = ranks.run(HANG_AFTER_THE_LOOK, *options, mount=mount, DAEMON=str(mount.pid))
    for one in reports:
        assert "rank 1 on node b cannot load step-1/rank-00001" in one["error"], output
        assert f"{mount.path / 'run'}/step-1/" in one["error"]
    assert reports[0]["error"].startswith("UnavailableToPeer")
    assert (reports[1]["node"], reports[1]["rank"]) == ("b", 1)


def test_a_hung_local_directory_falls_back_to_another_tier(ranks: Ranks, mount: HangingMount, tmp_path: Path) -> None:
    """If a local directory hangs during a read, all ranks load the same checkpoint, this one from the global tier."""
    directory = tmp_path / "global"
    options = (
        settings(directory, local=tmp_path / "local", replication=False),
        settings(directory, local=mount.path, replication=False),
    )
    ranks.run(SAVE, *options)
    ranks.renew()
    reports, output = ranks.run(HANG_AFTER_THE_LOOK, *options, mount=mount, DAEMON=str(mount.pid))
    assert [one.get("loaded") for one in reports] == [1, 1], output
    assert reports[0]["tiers"][1] == "global"


@pytest.mark.extended
def test_a_start_continues_without_a_hung_local_directory(ranks: Ranks, mount: HangingMount, tmp_path: Path) -> None:
    """With a local directory hung from the start, the ranks load from the global tier or start from scratch.

    One line contains node, tier and path.
    """
    directory = tmp_path / "global"
    options = (
        settings(directory, local=tmp_path / "local", replication=False),
        settings(directory, local=mount.path, replication=False),
    )
    mount.hang()
    reports, output = ranks.run(LOAD, *options)
    assert [one.get("loaded", "") for one in reports] == [None, None], output
    mount.resume()
    ranks.run(SAVE, *options)
    ranks.renew()
    mount.hang()
    reports, output = ranks.run(LOAD, *options)
    assert [one.get("loaded") for one in reports] == [1, 1], output
    assert "node b: the local tier cannot be used at present" in output
    assert str(mount.path) in output


def test_a_start_continues_with_a_full_local_directory(ranks: Ranks, tmp_path: Path) -> None:
    """With a local directory on a full file system the start continues, and one line reports it."""
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
        reports, output = ranks.run(LOAD, *options)
        assert [one.get("loaded", "") for one in reports] == [None, None], output
        assert "node b: the local tier cannot be used at present" in output
        assert "No space left on device" in output
    finally:
        subprocess.run(["umount", "-l", full], check=True)


def test_a_start_continues_with_a_read_only_directory(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint in a read-only global directory is loaded, and one line reports that it cannot be written."""
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
        reports, output = ranks.run(LOAD, settings(path, local=tmp_path / "another"))
        assert [(one.get("loaded"), one.get("tiers")) for one in reports] == [(1, ["global"] * 2)] * 2, output
        assert "node a: the global tier cannot be written at present" in output
    finally:
        subprocess.run(["umount", "-l", path], check=True)
