"""The examples for Hugging Face, Accelerate and Lightning on the device: bit-identical after a kill or a preemption."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from device_runs import DETERMINISTIC, EXAMPLE, LAUNCHED, PATIENCE_S, PROGRAMS

from outlast.chaos import Fault, FaultPlan, verify_fired
from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.testing import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(240)]

TOTAL, SAVE_INTERVAL, FAULT_AT = 60, 4, 18
SETTINGS = """
fault_plan = "{folder}/plan.toml"
[checkpoint]
directory = "{folder}/saved"
save_interval = {interval}
"""
EXAMPLES = EXAMPLE.parent
SCRIPTS = {
    "transformers": ("transformers/train.py", "--config={config}", "--output={folder}/out", f"--max-steps={TOTAL}"),
    "accelerate": ("transformers/accelerate_train.py", "--config={config}", f"--total={TOTAL}"),
    "lightning": (
        "lightning/train.py",
        "{folder}",
        "--epochs=2",
        "--size=240",
        "--workers=0",
        "--plan={folder}/plan.toml",
    ),
}
"""By the package that a script needs: the script and its arguments."""


def start(folder: Path, package: str, faults: Sequence[Fault]) -> Cluster:
    """Return a cluster of one rank that runs a package's example under faults."""
    pytest.importorskip(package)
    folder.mkdir(exist_ok=True)
    (folder / "plan.toml").write_text(FaultPlan(faults=list(faults)).to_toml())
    config = folder / "outlast.toml"
    config.write_text(SETTINGS.format(folder=folder, interval=SAVE_INTERVAL))
    script, *words = SCRIPTS[package]
    return Cluster(
        PROGRAMS / "deterministic.py",
        str(EXAMPLES / script),
        *(word.format(config=config, folder=folder) for word in words),
        run_dir=folder / "run",
        num_nodes=1,
        nproc_per_node=1,
        options=LAUNCHED,
        environment=DETERMINISTIC,
    )


def finish(cluster: Cluster) -> str:
    """Return the digest of the weights that a script prints at its end."""
    assert cluster.wait(PATIENCE_S) == [0], cluster.tails()
    output = cluster.agent(0).output()
    ((steps, digest),) = re.findall(r"trained (\d+) steps: ([0-9a-f]{64})", output)
    assert int(steps) == TOTAL, output
    return str(digest)


@pytest.fixture(scope="module", params=SCRIPTS)
def package(request: pytest.FixtureRequest) -> str:
    """Return the package whose example runs."""
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(package: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of a run without a fault."""
    with start(tmp_path_factory.mktemp(package), package, []) as cluster:
        return finish(cluster)


@pytest.mark.parametrize("kind", ["kill", "sigterm"])
def test_a_kill_or_preemption_changes_no_bit(package: str, undisturbed: str, kind: str, tmp_path: Path) -> None:
    """A killed rank resumes from the newest save. After SIGTERM the step is finished and saved, the exit code is 75,
    and the same command resumes. The weights are those of an undisturbed run."""
    fault = Fault(kind=kind, rank=0, iteration=FAULT_AT)
    with start(tmp_path, package, [fault]) as cluster:
        if kind == "sigterm":
            assert cluster.wait(PATIENCE_S) == [ExitReason.PREEMPTED], cluster.tails()
        else:
            digest = finish(cluster)
    if kind == "sigterm":
        with start(tmp_path, package, [fault]) as cluster:
            digest = finish(cluster)
    assert verify_fired(FaultPlan(faults=[fault]), tmp_path / "run") == []
    (resumed,) = (event.iteration for event in read(tmp_path / "run") if event.kind == EventKind.RESTORED)
    assert resumed is not None
    assert (FAULT_AT <= resumed < TOTAL) if kind == "sigterm" else (0 < resumed < FAULT_AT)
    assert digest == undisturbed
