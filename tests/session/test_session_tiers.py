"""The tiers of a session's saves, and the end of a run whose checkpoints are all excluded."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from ranks import Ranks

from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.policy.recovery_point import Exclusion

pytestmark = [pytest.mark.process]

SCRIPT = """
import json, os, sys
import torch
import outlast

folder, total = sys.argv[1], int(sys.argv[2])
settings = json.loads(sys.argv[3])
for name in ("directory", "local_directory"):
    if name in settings:
        settings[name] = os.path.join(folder, settings[name])
checkpoint = outlast.CheckpointConfig(**settings, most_recent_k=-1, local_most_recent_k=-1)
run = outlast.init(outlast.Config(checkpoint=checkpoint, run_dir=folder + "/run"))
state = {"weight": torch.zeros(1000), "seen": []}
for iteration in run.steps(state, total=total):
    if settings.get("suspect_window") == 7 and iteration == 3:
        run.save(state, suspect=True).wait()
    state["weight"] += 1
    state["seen"].append(iteration)
print("at", run.iteration, state["weight"][0].item(), state["seen"] == list(range(total)), flush=True)
"""


def _train(tmp_path: Path, total: int, settings: dict[str, object], **environment: str) -> tuple[int, str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path), str(total), json.dumps(settings), environment=environment) as ranks:
        codes, outputs = ranks.end()
    return codes[0], outputs[0]


def _checkpoints(folder: Path) -> list[int]:
    return sorted(
        int(one.name.removeprefix("step-")) for one in folder.glob("step-*") if (one / "manifest.json").exists()
    )


def test_saves_go_to_the_tiers_of_their_interval(tmp_path: Path) -> None:
    """Every 2nd iteration is saved to the node-local tiers only, every 5th and the last to the global tier too; a
    suspect save is in neither. The run resumes from the global tier after the loss of its node."""
    settings: dict[str, object] = {
        "directory": "global",
        "local_directory": "local",
        "save_interval": 5,
        "non_persistent_save_interval": 2,
        "suspect_window": 7,
        "async_save": False,  # a queued save is replaced by the next one a few milliseconds later
    }
    code, output = _train(tmp_path, 12, settings)
    assert code == 0, output
    (node,) = (tmp_path / "local").iterdir()
    assert _checkpoints(node) == [2, 4, 5, 6, 8, 10, 12]
    assert _checkpoints(tmp_path / "global") == [5, 10, 12]
    assert _checkpoints(tmp_path / "global" / "suspect") == [3]
    node.rename(tmp_path / "gone")
    code, output = _train(tmp_path, 14, settings)
    assert code == 0, output
    assert "at 14 14.0 True" in output


def test_local_saves_need_no_global_tier(tmp_path: Path) -> None:
    """With only a local folder, the run saves there at its interval and at its end, and resumes from there."""
    settings: dict[str, object] = {
        "local_directory": "local",
        "non_persistent_save_interval": 4,
        "async_save": False,
    }
    code, output = _train(tmp_path, 10, settings)
    assert code == 0, output
    (node,) = (tmp_path / "local").iterdir()
    assert _checkpoints(node) == [4, 8, 10]
    code, output = _train(tmp_path, 12, settings)
    assert code == 0, output
    assert "at 12 12.0 True" in output
    restored = [event.iteration for event in read(tmp_path / "run") if event.kind == EventKind.RESTORED]
    assert restored == [10]


def test_an_excluded_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    """A worker loads the checkpoint before an excluded one; if all are excluded, it exits with 17 and does not start
    from scratch."""
    settings: dict[str, object] = {
        "local_directory": "local",
        "non_persistent_save_interval": 4,
        "async_save": False,
    }
    code, output = _train(tmp_path, 8, settings)
    assert code == 0, output
    (node,) = (tmp_path / "local").iterdir()
    attempts = {
        number: json.loads((node / f"step-{number}" / "manifest.json").read_text())["manifest"]["attempt"]
        for number in (4, 8)
    }
    bad = {
        number: Exclusion(checkpoint=number, attempt=attempt, tier="local", tainted=("no-1",))
        for number, attempt in attempts.items()
    }
    code, output = _train(tmp_path, 8, settings, OUTLAST_UNTRUSTED=msgspec.json.encode([bad[4], bad[8]]).decode())
    assert code == ExitReason.FAILED_VALIDATION, output
    assert "no usable checkpoint is left" in output
    code, output = _train(tmp_path, 6, settings, OUTLAST_UNTRUSTED=msgspec.json.encode([bad[8]]).decode())
    assert code == 0, output
    assert "at 6 6.0 True" in output
    restored = [event.iteration for event in read(tmp_path / "run") if event.kind == EventKind.RESTORED]
    assert restored == [4]
