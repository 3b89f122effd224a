"""Train a variant of ``programs/train_variants.py``, undisturbed or with a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from device_runs import LAUNCHED, PATIENCE_S, PROGRAMS, run_alone

from outlast.incidents import EventKind
from outlast.testing import Cluster

PROGRAM = PROGRAMS / "train_variants.py"
TOTAL, WAIT_AT = 12, 9


def shared_arguments(folder: Path, variant: str, interval: int) -> list[str]:
    """Return the arguments that the runs with and without a fault share."""
    sizes = [f"--iterations={TOTAL}", f"--save-interval={interval}"]
    return [f"--variant={variant}", f"--directory={folder / 'saved'}", f"--out={folder / 'result.json'}", *sizes]


def train_undisturbed(folder: Path, variant: str, environment: Mapping[str, str], interval: int) -> dict[str, Any]:
    """Return the result of a variant without a fault."""
    output = run_alone(PROGRAM, *shared_arguments(folder, variant, interval), folder=folder, environment=environment)
    if "compiled by aot_eager" in output:
        (line,) = (line for line in output.splitlines() if line.startswith("compiled by"))
        warnings.warn(f"inductor cannot be used on this machine: {line}", stacklevel=2)
    return read_result(folder)


def read_result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def train_killed(
    folder: Path, variant: str, environment: Mapping[str, str], *, overlap: bool, interval: int
) -> dict[str, Any]:
    """Return the result of a variant whose rank is killed after its newest save is committed, and resumes from that
    save."""
    newest = newest_save(interval)
    more = [f"--wait-at={WAIT_AT}", *(["--overlap"] * overlap)]
    with Cluster(
        PROGRAM,
        *shared_arguments(folder, variant, interval),
        *more,
        run_dir=folder / "run",
        num_nodes=1,
        nproc_per_node=1,
        options=LAUNCHED,
        environment=environment,
    ) as cluster:
        cluster.wait_for("waits to be killed", PATIENCE_S)
        cluster.wait_for(
            lambda event: event.kind == EventKind.SAVE_COMMITTED and event.iteration == newest, PATIENCE_S / 4
        )
        os.kill(cluster.worker_pid(0), signal.SIGKILL)
        assert cluster.wait(PATIENCE_S / 2) == [0], cluster.tails()
        events = cluster.events()
    restored = [(event.cycle, event.iteration) for event in events if event.kind == EventKind.RESTORED]
    assert restored == [(1, newest)]
    return read_result(folder)


def newest_save(interval: int) -> int:
    """Return the iteration of the newest save before the rank is killed."""
    return WAIT_AT // interval * interval


def check_no_bit_changes(
    variant: str,
    environment: Mapping[str, str],
    folders: pytest.TempPathFactory,
    *,
    overlap: bool,
    interval: int,
    killed_environment: Mapping[str, str] | None = None,
) -> None:
    """Check that a variant with a killed rank ends with the bits of an undisturbed run.

    Args:
        variant: Of the program.
        environment: Of both runs.
        folders: Makes their folders.
        overlap: Save with ``overlap_staging`` in the run with the fault.
        interval: Iterations between saves.
        killed_environment: Variables to add for the run with the fault.
    """
    if (variant, interval) not in _undisturbed:
        folder = folders.mktemp(variant)
        _undisturbed[variant, interval] = train_undisturbed(folder, variant, environment, interval)
    expected = _undisturbed[variant, interval]
    disturbed = {**environment, **(killed_environment or {})}
    found = train_killed(folders.mktemp(f"{variant}-killed"), variant, disturbed, overlap=overlap, interval=interval)
    newest = newest_save(interval)
    assert (expected["begins"], found["begins"]) == (0, newest)
    assert expected["num_updates"] > newest // 2, "hardly a step changed the weights"
    if found | {"begins": 0} != expected:
        again = train_undisturbed(folders.mktemp(f"{variant}-again"), variant, environment, interval)
        why = "the restart changes the result" if again == expected else "two undisturbed runs differ on this device"
        pytest.fail(f"{why}: {found} instead of {expected}")


_undisturbed: dict[tuple[str, int], dict[str, Any]] = {}
