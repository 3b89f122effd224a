"""Soak test: training under random faults ends with the undisturbed result and without leftovers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.extended

COMMAND = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "chaos", "soak")


def soak(folder: Path, *options: str, timeout_s: float) -> dict[str, Any]:
    """Return the outcome of a successful soak."""
    command = [*COMMAND, "--json", f"--keep={folder}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.stdout, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, (outcome["problems"], done.stderr)
    assert outcome["problems"] == []
    assert outcome["bit_identical"]
    assert outcome["fired"] == outcome["planned"] > 0
    return outcome


@pytest.mark.slow
@pytest.mark.process
def test_two_faults_keep_the_weights_bit_identical(tmp_path: Path) -> None:
    """A corrupt copy and a lost node are both detected, and the weights are bit-identical."""
    kinds = "corrupt_copy,lose_node"
    outcome = soak(tmp_path / "soak", f"--kinds={kinds}", "--minutes=0.2", "--every=6", timeout_s=500)
    assert {row["kind"]: row["fired"] for row in outcome["kinds"]} == dict.fromkeys(kinds.split(","), 1)
    assert {row["kind"]: row["detected_as"] for row in outcome["kinds"]}["lose_node"] == {"node_lost": 1}
    assert outcome["agents"] == 5, "two nodes and two spares, and one for the one that was lost"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_of_faults_keeps_the_weights_bit_identical(tmp_path: Path, seed: int) -> None:
    """A minute with a fault of any kind every three seconds ends with bit-identical weights."""
    outcome = soak(tmp_path / "soak", "--minutes=1", "--every=3", f"--seed={seed}", timeout_s=1500)
    assert outcome["fired"] == 20
    assert len(outcome["kinds"]) >= 18
