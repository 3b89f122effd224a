"""Ways to train that a GPU invites to: each is killed, resumes, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from device_runs import DETERMINISTIC, LAUNCHED, ON_GPU, PATIENCE_S, PROGRAMS, run_alone

from outlast.incidents import EventKind
from outlast.testing import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(240)]  # inductor compiles

PROGRAM = PROGRAMS / "train_variants.py"
TOTAL, SAVE_INTERVAL, WAIT_AT = 12, 4, 9
NEWEST = WAIT_AT // SAVE_INTERVAL * SAVE_INTERVAL
VARIANTS = ["compile", "amp", "fused", "fsdp2", *(["graph"] if ON_GPU else [])]
OVERLAPPED = ["fused", "fsdp2", *(["graph"] if ON_GPU else [])]


def words(folder: Path, variant: str) -> list[str]:
    """Return the arguments that disturbed and undisturbed runs share."""
    sizes = [f"--iterations={TOTAL}", f"--save-interval={SAVE_INTERVAL}"]
    return [f"--variant={variant}", f"--directory={folder / 'saved'}", f"--out={folder / 'result.json'}", *sizes]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of all runs: inductor chooses no kernel by how fast it is, and compiles each once."""
    cache = str(tmp_path_factory.mktemp("inductor"))
    own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_DETERMINISTIC": "1"}
    return DETERMINISTIC | own


def train_undisturbed(folder: Path, variant: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what a variant writes when nothing happens to it."""
    output = run_alone(PROGRAM, *words(folder, variant), folder=folder, environment=environment)
    if "compiled by aot_eager" in output:
        (line,) = (line for line in output.splitlines() if line.startswith("compiled by"))
        warnings.warn(f"inductor cannot be used on this machine: {line}", stacklevel=2)
    return read_result(folder)


def read_result(folder: Path) -> dict[str, Any]:
    """Return what a run has written."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def train_killed(folder: Path, variant: str, environment: Mapping[str, str], *, overlap: bool) -> dict[str, Any]:
    """Return what a variant writes that was killed once the newest generation was committed, and resumed from it."""
    more = [f"--wait-at={WAIT_AT}", *(["--overlap"] * overlap)]
    with Cluster(
        PROGRAM,
        *words(folder, variant),
        *more,
        run_dir=folder / "run",
        num_nodes=1,
        nproc_per_node=1,
        options=LAUNCHED,
        environment=environment,
    ) as cluster:
        cluster.wait_for("waits to be killed", PATIENCE_S)
        cluster.wait_for(
            lambda event: event.kind == EventKind.SAVE_COMMITTED and event.iteration == NEWEST, PATIENCE_S / 4
        )
        os.kill(cluster.worker_pid(0), signal.SIGKILL)
        assert cluster.wait(PATIENCE_S / 2) == [0], cluster.tails()
        events = cluster.events()
    restored = [(event.cycle, event.iteration) for event in events if event.kind == EventKind.RESTORED]
    assert restored == [(1, NEWEST)]
    return read_result(folder)


_undisturbed: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize(
    ("variant", "overlap"),
    [
        *(pytest.param(variant, False, id=variant) for variant in VARIANTS),
        *(pytest.param(variant, True, id=f"{variant}-overlapped") for variant in OVERLAPPED),
    ],
)
def test_a_killed_rank_changes_no_bit(
    variant: str,
    overlap: bool,
    environment: dict[str, str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """torch.compile, float16 with a scaled loss, a fused optimizer, FSDP2, and a CUDA graph of forward and backward:
    a rank that is killed resumes, and weights, optimizer state, losses and the loss's scale are those of an undisturbed
    run; also where the state of the run that is killed is copied while the next step computes (overlap_staging)."""
    if variant not in _undisturbed:
        _undisturbed[variant] = train_undisturbed(tmp_path_factory.mktemp(variant), variant, environment)
    expected = _undisturbed[variant]
    found = train_killed(tmp_path, variant, environment, overlap=overlap)
    assert (expected["begins"], found["begins"]) == (0, NEWEST)
    assert expected["num_updates"] > NEWEST // 2, "hardly a step moved the weights"
    if found | {"begins": 0} != expected:
        repeats = train_undisturbed(tmp_path_factory.mktemp(f"{variant}-again"), variant, environment) == expected
        why = "the restart changes the result" if repeats else "this device repeats not even an undisturbed run"
        pytest.fail(f"{why}: {found} instead of {expected}")
