"""A job that starts while its only checkpoint place hangs waits and loads, or exits with instructions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broken_places import Bucket, Disk, Fault, start_store
from cells import MARKS
from trained_nodes import LIMIT_S, NODES, TrainedNodes, newest_checkpoint

from outlast.errors import ExitReason

pytestmark = [*MARKS, pytest.mark.extended]
INTERVAL = 20
NEVER_S = 20.0
"""``restore_timeout`` of a job whose place does not recover."""


@contextlib.contextmanager
def open_place(kind: str, folder: Path) -> Iterator[tuple[Any, dict[str, Any], dict[str, dict[str, str]], Any]]:
    """Yield a place, its path on each node, the agents' variables, and a function for the newest checkpoint."""
    if kind == "directory":
        with Disk(folder / "shared", NODES) as disk:
            paths = {node: str(disk.path(node) / "run") for node in NODES}
            yield disk, paths, {}, lambda: newest_checkpoint(disk.files / "run")
        return
    server = start_store(folder / "record")
    try:
        with Bucket(server, NODES) as bucket:
            url = f"s3://{server.bucket}/run"
            variables = {node: bucket.environment(node) for node in NODES}
            yield bucket, dict.fromkeys(NODES, url), variables, lambda: bucket.newest_checkpoint(url)
    finally:
        server.kill()


@pytest.mark.parametrize("kind", ["directory", "store"])
@pytest.mark.parametrize("outage_s", [5, pytest.param(200, marks=pytest.mark.campaign), None], ids=str)
def test_a_start_waits_for_its_checkpoints(tmp_path: Path, kind: str, outage_s: int | None) -> None:
    """A start waits for a directory or object store that hangs, logs it, and continues from the newest checkpoint.

    After ``restore_timeout`` the job ends with one line of instructions, and the checkpoints are neither rejected nor
    replaced.
    """
    with open_place(kind, tmp_path) as (place, paths, environments, newest):

        def job(*, is_second: bool) -> TrainedNodes:
            settings: dict[str, dict[str, Any]] = {}
            for node in NODES:
                settings[node] = {"directory": paths[node], "save_interval": INTERVAL}
                if is_second and outage_s is None:
                    settings[node] |= {"restore_timeout": NEVER_S, "response_timeout": 15.0}
            return TrainedNodes(tmp_path, settings, environments=environments)

        with job(is_second=False) as run:
            run.wait_until("a checkpoint", lambda: newest() >= INTERVAL)
            run.stop()
        committed = newest()
        place.break_(Fault.HUNG)
        start_s = time.monotonic()
        with job(is_second=True) as run:
            if outage_s is None:
                codes = run.cluster.wait(LIMIT_S)
                assert set(codes) <= {ExitReason.PREEMPTED, ExitReason.NO_PROGRESS}, run.shown()
                (line,) = {text.partition("exit code")[2] for text in run.lines("job over", paths[NODES[0]])}
                assert "scratch" not in line, line
                place.lift()
                assert newest() == committed
                return
            run.wait_until("the time of the outage", lambda: time.monotonic() >= start_s + outage_s)
            if outage_s > 60:
                assert run.lines("WARNING", paths[NODES[0]]), run.shown()
            place.lift()
            run.wait_for_iteration(committed + 2 * INTERVAL)
            assert run.new_steps[0].iteration == committed + 1, run.shown()
            run.wait_until("a new checkpoint", lambda: newest() > committed)
            assert run.cycle == 0, run.shown()
            assert not run.lines("belongs to run"), run.shown()
            run.check_weights()
