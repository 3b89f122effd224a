"""Learned timeouts end no healthy run, and the next launch of the same command uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
import torch
import outlast

config = outlast.Config(
    checkpoint=outlast.CheckpointConfig(directory="checkpoints", save_interval=5),
    fault_tolerance=outlast.FaultToleranceConfig(calc_ft_timeouts=True, rank_section_timeouts={"evaluation": 100.0}),
)
run = outlast.init(config)
total = int(open("total").read())
for iteration in run.steps({"model": torch.nn.Linear(2, 2)}, total=total):
    if iteration == 30 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if iteration % 5 == 0:
        with run.section("evaluation"):
            time.sleep(1.6 if iteration == 35 else 0.001)
    if iteration == 36:
        time.sleep(2.5)
"""


def launch(folder: Path, *, total: int) -> str:
    """Run the same command in a folder up to an iteration, and return its output."""
    (folder / "total").write_text(str(total))
    command = [sys.executable, "-m", "outlast", "run", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
def test_a_longer_pause_is_not_a_hang(tmp_path: Path) -> None:
    """After a cycle of very short steps and evaluations, longer ones of some seconds are not taken for a hang; options
    are suggested at the end, and the next launch of the same command enforces the learned timeouts."""
    (tmp_path / "train.py").write_text(SCRIPT)
    output = launch(tmp_path, total=60)
    assert "exceeded" not in output, output
    assert "2 cycles" in output, output
    assert "suggested timeouts, from the durations of this run: --ft-rank-section-timeouts=evaluation:" in output
    learned = json.loads((tmp_path / "checkpoints" / "ft_state.json").read_text())["learned"]["sections"]
    assert learned.keys() == {"setup", "step", "evaluation"}
    assert min(learned.values()) == 10.0
    second_output = launch(tmp_path, total=70)
    assert "evaluation 100 s" in second_output
    assert f"step {learned['step']:g} s" in second_output


FAILING = """
import torch
import outlast

timeouts = outlast.FaultToleranceConfig(calc_ft_timeouts=True)
with outlast.init(outlast.Config(run_dir="run", fault_tolerance=timeouts)) as run:
    for iteration in run.steps({"model": torch.nn.Linear(2, 2)}, total=100_000):
        if iteration == 20:
            print("twenty", flush=True)
        if iteration > 20:
            time.sleep(0.02) if sys.argv[1] == "shutdown" else 1 / 0
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["fails", "fails alone", "shutdown"])
def test_timeouts_are_suggested_at_the_end_of_each_job(tmp_path: Path, how: str) -> None:
    """The line with the options is logged at the end of each job: also after a failure, with and without a launcher,
    and after a shutdown."""
    (tmp_path / "train.py").write_text("import sys, time\n" + FAILING)
    launcher = [] if how == "fails alone" else ["-m", "outlast", "run", "--max-restarts=0"]
    with subprocess.Popen(
        [sys.executable, *launcher, "train.py", how],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if how == "shutdown" and "twenty" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(100) != 0, output
    assert output.count("suggested timeouts, from the durations of this run: --ft-rank-section-timeouts=step:10") == 1
