"""The loop of a session in a plain script: restore, resume, and end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import Ranks

from outlast.incidents import EventKind
from outlast.journal import read

SCRIPT = """
import json, sys
import torch
import outlast

folder, total, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
checkpoint = None if what == "nothing" else outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=2)
run = outlast.init(outlast.Config(checkpoint=checkpoint, run_dir=folder + "/run"))
model = torch.nn.Linear(2, 2)
state = {"model": model, "seen": []}
done = []
with torch.no_grad():
    model.weight.zero_()
for iteration in run.steps(state, total=total):
    if what == "raise" and iteration == 3:
        raise ValueError("the body failed")
    if what == "exit" and iteration == 3:
        sys.exit(9)
    if what == "break" and iteration == 3:
        break
    with torch.no_grad():
        model.weight += 1
    state["seen"].append(iteration)
    done.append(iteration)
found = {"done": done, "seen": state["seen"], "weight": model.weight[0, 0].item(), "at": run.iteration}
sys.stdout.write(json.dumps(found) + "\\n")  # at once: a save's line may come meanwhile
if what == "close":
    run.close()
    run.close()
"""


def _start(tmp_path: Path, total: int, case: str) -> tuple[int, str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path), str(total), case) as ranks:
        codes, outputs = ranks.end()
    return codes[0], outputs[0]


def _result(output: str) -> dict[str, object]:
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.mark.process
def test_a_second_start_resumes_at_the_end_of_the_first(tmp_path: Path) -> None:
    """Tensors, plain values and the iteration are restored; no iteration is repeated or skipped."""
    code, output = _start(tmp_path, 5, "train")
    assert code == 0, output
    assert _result(output) == {"done": [0, 1, 2, 3, 4], "seen": [0, 1, 2, 3, 4], "weight": 5.0, "at": 5}
    code, output = _start(tmp_path, 8, "close")
    assert code == 0, output
    assert _result(output) == {"done": [5, 6, 7], "seen": [*range(8)], "weight": 8.0, "at": 8}
    code, output = _start(tmp_path, 8, "train")
    assert code == 0, output
    assert _result(output) == {"done": [], "seen": [*range(8)], "weight": 8.0, "at": 8}


@pytest.mark.process
@pytest.mark.parametrize(("case", "expected"), [("raise", 1), ("exit", 9)])
def test_a_failing_body_ends_the_process_with_its_error(tmp_path: Path, case: str, expected: int) -> None:
    """An exception or exit of the body is not changed, and earlier commits are available to the next start."""
    code, output = _start(tmp_path, 8, case)
    assert code == expected, output
    assert ("ValueError: the body failed" in output) == (case == "raise")
    code, output = _start(tmp_path, 8, "train")
    assert code == 0, output
    done = _result(output)["done"]
    assert isinstance(done, list)
    assert done[0] in (0, 2), "the save at iteration 2 may have been committed before the end, or not"
    assert _result(output)["seen"] == [*range(8)]
    assert _result(output)["weight"] == 8.0


@pytest.mark.process
def test_break_ends_the_loop_without_a_save(tmp_path: Path) -> None:
    """After a break the script continues, and its exit is not delayed."""
    code, output = _start(tmp_path, 8, "break")
    assert code == 0, output
    assert _result(output)["at"] == 3
    kinds = [event.kind for event in read(tmp_path / "run")]
    assert EventKind.SESSION_STARTED in kinds
    assert EventKind.SESSION_ENDED not in kinds


@pytest.mark.process
def test_disabled_protections_are_logged_in_one_line(tmp_path: Path) -> None:
    """Without a checkpoint directory, timeouts or a launcher, one line has the consequences and the settings."""
    code, output = _start(tmp_path, 3, "nothing")
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if " off: " in line]
    for text in ("checkpoint.directory", "rank_section_timeouts", "outlast run"):
        assert text in line


@pytest.mark.process
def test_the_journal_has_start_progress_and_end(tmp_path: Path) -> None:
    """The first finished iteration of a cycle and the end are in the journal, with their iterations."""
    code, output = _start(tmp_path, 5, "train")
    assert code == 0, output
    events = [
        (event.kind, event.iteration)
        for event in read(tmp_path / "run")
        if event.kind in (EventKind.SESSION_STARTED, EventKind.PROGRESS, EventKind.SESSION_ENDED)
    ]
    assert events == [
        (EventKind.SESSION_STARTED, None),
        (EventKind.PROGRESS, 1),
        (EventKind.SESSION_ENDED, 5),
    ]


def test_an_invalid_config_object_is_rejected() -> None:
    """An argument that is not a config is an error with the accepted type."""
    from outlast import OutlastError, init

    with pytest.raises(OutlastError, match="not int"):
        init(3)  # type: ignore[arg-type]
