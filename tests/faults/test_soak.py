"""The soak: a training under a storm of faults ends with the undisturbed one's result, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast.chaos import FaultKind, FaultPlan
from outlast.demo import soak as module
from outlast.demo.soak import SoakOutcome

COMMAND = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "chaos", "soak")


def soak(folder: Path, *options: str, timeout_s: float) -> dict[str, Any]:
    """Return what a soak says of itself, once it has ended well."""
    command = [*COMMAND, "--json", f"--keep={folder}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.stdout, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, (outcome["problems"], done.stderr)
    assert outcome["problems"] == []
    assert outcome["bit_identical"]
    assert outcome["fired"] == outcome["planned"] > 0
    return outcome


@pytest.mark.parametrize(("num_early", "problems"), [(0, []), (2, []), (9, []), (9, ["the results differ"])])
def test_a_training_that_is_over_too_early_is_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_early: int, problems: list[str]
) -> None:
    """Steps may take less time than when they were measured: then twice as many are trained, in a folder of its own,
    but not for ever, and not where something else is wrong."""
    tried: list[tuple[Path, int]] = []

    def storm(folder: Path, plan: FaultPlan, minutes: float, iterations: int, say: Any) -> Any:
        tried.append((folder, iterations))
        outcome = SoakOutcome(
            seed=plan.seed,
            minutes=minutes,
            iterations=iterations,
            planned=1,
            fired=0,
            jobs=1,
            cycles=1,
            agents=2,
            storm_s=1.0,
            bit_identical=True,
            kinds=[],
            faults=[],
            problems=problems,
        )
        return outcome, ["faults[0] did not strike"] if len(tried) <= num_early else []

    monkeypatch.setattr(module, "_storm", storm)
    monkeypatch.setattr(module, "_step_s", lambda events: 0.1)
    monkeypatch.setattr(module._Training, "run", lambda *args, **options: None)
    monkeypatch.setattr(module._Training, "events", lambda training: [])
    outcome = module.soak(
        minutes=0.1, seed=1, every_s=3.0, keep=str(tmp_path / "soak"), say=lambda line: None, kinds=[FaultKind.KILL]
    )
    num_tried = 1 if problems else min(num_early + 1, 3)
    first = tried[0][1]
    assert [iterations for _, iterations in tried] == [first, first * 2, first * 4][:num_tried]
    assert len({folder for folder, _ in tried}) == num_tried
    assert outcome.problems == problems + (["faults[0] did not strike"] if num_early >= num_tried else [])


@pytest.mark.slow
@pytest.mark.process
def test_two_faults_change_no_bit(tmp_path: Path) -> None:
    """A damaged copy and a lost node: the same weights, and each is accounted for."""
    kinds = "corrupt_copy,lose_node"
    outcome = soak(tmp_path / "soak", f"--kinds={kinds}", "--minutes=0.2", "--every=6", timeout_s=500)
    assert {row["kind"]: row["fired"] for row in outcome["kinds"]} == dict.fromkeys(kinds.split(","), 1)
    assert {row["kind"]: row["noticed_as"] for row in outcome["kinds"]}["lose_node"] == {"node_lost": 1}
    assert outcome["agents"] == 5, "two nodes and two spares, and one for the one that was lost"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_of_all_kinds_changes_no_bit(tmp_path: Path, seed: int) -> None:
    """A fault every three seconds, of all kinds, for a minute."""
    outcome = soak(tmp_path / "soak", "--minutes=1", "--every=3", f"--seed={seed}", timeout_s=1500)
    assert outcome["fired"] == 20
    assert len(outcome["kinds"]) >= 18
