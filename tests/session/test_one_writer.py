"""A checkpoint directory has one live writer; a run resumes another run's checkpoints only on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import PATIENCE_S, Ranks

from outlast.errors import ExitReason

pytestmark = [pytest.mark.process]

SCRIPT = """
import json, os, sys, time
import torch
import outlast
from outlast.runtime import lease, processes

folder, told = sys.argv[1], json.loads(sys.argv[2])
lease.FolderRecords.renew_s = 0.2
if "machine" in told:
    processes.machine_id = lambda: told["machine"]
checkpoint = outlast.CheckpointConfig(
    directory=folder + "/ckpt", save_interval=1, async_save=False, resume_from_other_run=told.get("resume", False)
)
run = outlast.init(outlast.Config(checkpoint=checkpoint, run_dir=told.get("run_dir")))
state = {"weight": torch.zeros(10)}
for iteration in run.steps(state, total=told["total"]):
    state["weight"] += 1
    if iteration == told.get("wait_at"):
        print("waits", flush=True)
        while not os.path.exists(folder + "/go"):
            time.sleep(0.01)
print("finished with", state["weight"][0].item(), flush=True)
"""


def _ranks(tmp_path: Path, arguments: str, *, world_size: int = 1) -> Ranks:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return Ranks(script, str(tmp_path), arguments, world_size=world_size)


def _train(tmp_path: Path, arguments: str) -> tuple[int, str]:
    with _ranks(tmp_path, arguments) as ranks:
        codes, outputs = ranks.end()
    return codes[0], outputs[0]


def _content(tmp_path: Path) -> dict[str, bytes]:
    ckpt = tmp_path / "ckpt"
    return {
        str(path.relative_to(ckpt)): path.read_bytes()
        for path in sorted(ckpt.rglob("*"))
        if path.is_file() and path.parent.name != "owner"
    }


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_is_alive(tmp_path: Path) -> None:
    """All ranks of the second run exit with 93 and one line before anything is loaded or written, and the first run
    continues. Once the first run is killed, the next start takes the directory over, logs it, and resumes from its
    checkpoint."""
    with _ranks(tmp_path, '{"total": 9, "wait_at": 4}') as first:
        first.wait_for_line(0, "waits")
        before = _content(tmp_path)
        with _ranks(tmp_path, '{"total": 9}', world_size=2) as second:
            codes, outputs = second.end()
        assert codes == [ExitReason.NO_PROGRESS] * 2, outputs
        (line,) = [line for line in "".join(outputs).splitlines() if "is in use by" in line]
        assert f"{tmp_path}/ckpt is in use by run run-" in line
        assert f"(pid {first.pid(0)} on " in line
        assert line.endswith("or give it a separate directory")
        assert "Traceback" not in "".join(outputs)
        assert _content(tmp_path) == before
        assert first.running(0)
        first.kill(0)
    code, output = _train(tmp_path, '{"total": 6}')
    assert code == 0, output
    assert "finished with 6.0" in output
    (line,) = [line for line in output.splitlines() if "is taken over from" in line]
    assert line.endswith("which has ended")
    assert "loaded iteration 4" in output


@pytest.mark.slow
def test_a_stopped_owner_writes_nothing_after_a_takeover(tmp_path: Path) -> None:
    """A run on another machine logs that it waits until the owner's heartbeats end, and then continues. When the
    first run resumes, it exits with 93 and a line that contains the other run, and the saved files do not change."""
    with _ranks(tmp_path, '{"total": 1000000, "wait_at": 3}') as first:
        first.wait_for_line(0, "waits")
        first.stop(0)
        code, output = _train(tmp_path, '{"total": 6, "machine": "far"}')
        assert code == 0, output
        assert "cannot be queried from this node; waiting until it has sent no heartbeat" in output
        assert "which has stopped sending heartbeats" in output
        assert "loaded iteration 3" in output
        saved = _content(tmp_path)
        (tmp_path / "go").touch()
        first.resume(0)
        assert first.wait(PATIENCE_S) == [ExitReason.NO_PROGRESS], first.tails()
        output = first.output(0)
    assert f"{tmp_path}/ckpt was taken over by run run-" in output.splitlines()[-1]
    assert "end one of the two" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert _content(tmp_path) == saved
    assert saved["latest"] == b"step-6\n"


@pytest.mark.extended
@pytest.mark.slow
def test_another_runs_checkpoints_are_resumed_only_on_request(tmp_path: Path) -> None:
    """For runs with different names, one line has the other run and the setting. A run without a name resumes the
    checkpoints of the same script."""

    def arguments(run: str | None, **options: object) -> str:
        return json.dumps({"total": 3, "run_dir": None if run is None else f"{tmp_path}/{run}", **options})

    code, output = _train(tmp_path, arguments("one"))
    assert code == 0, output
    code, output = _train(tmp_path, arguments("other"))
    assert code == ExitReason.NO_PROGRESS, output
    last = output.splitlines()[-1]
    assert f"{tmp_path}/ckpt holds what the run with directory {tmp_path}/one" in last
    assert "to resume from there set checkpoint.resume_from_other_run = true" in last
    assert "Traceback" not in output
    for run, options in (("one", {}), (None, {}), ("other", {"resume": True}), ("other", {})):
        code, output = _train(tmp_path, arguments(run, **options))
        assert code == 0, output
        assert ("since resume_from_other_run is on" in output) == bool(options)
