"""A session whose directory belongs to another run ends at once on all ranks, and is not restarted."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.journal import read

pytestmark = [pytest.mark.process, pytest.mark.extended]

SCRIPT = """
import os, sys, time
import torch
import outlast

folder, interval = sys.argv[1], int(sys.argv[2])
config = outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=interval)
run = outlast.init(outlast.Config(checkpoint=config, run_dir=folder + "/run"))
state = {"weight": torch.zeros(10)}
for iteration in run.steps(state, total=3000 if interval else 3):
    if iteration == 0 and run.global_rank == 0:
        os.makedirs(folder + "/ckpt", exist_ok=True)  # as another run does that began meanwhile
        with open(folder + "/ckpt/run.json", "w") as file:
            file.write('{"run":"run-other"}')
    state["weight"] += 1
    time.sleep(0.01)
print("finished", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 0], ids=["while it trains", "at its end"])
def test_a_refused_directory_ends_all_ranks(tmp_path: Path, interval: int) -> None:
    """After a refused save all ranks exit with the code that launchers do not restart, and one line has the reason."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path), str(interval), world_size=2) as ranks:
        codes, outputs = ranks.end(120)
    assert codes == [ExitReason.NO_PROGRESS] * 2, outputs
    for output in outputs:
        assert "finished" not in output
        assert "Traceback" not in output
    assert "/ckpt belongs to run run-other, which saves there; this training is run run-" in outputs[0]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["owner", "run.json"]
    ends = [event for event in read(tmp_path / "run") if event.kind == EventKind.SESSION_ENDED]
    assert {event.data["exit_code"] for event in ends} == {ExitReason.NO_PROGRESS}
