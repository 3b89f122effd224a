"""The log of a run: few lines, all in one format, and only warnings with ``--quiet``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from outlast.testing import Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d\d\d (INFO|WARNING|ERROR) \[(agent node-0|coordinator|rank 0)\] \S.*$")
MAX_LINES = 12
MAX_LINES_PER_RESTART = 6

TRAIN = """
import os, signal, sys
import torch, outlast
folder, fault = sys.argv[1:]
checkpoint = outlast.CheckpointConfig(
    directory=folder + "/global", local_directory=folder + "/local", save_interval=10, async_save=False
)
with outlast.init(outlast.Config(checkpoint=checkpoint)) as run:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for iteration in run.steps({"model": model, "optimizer": optimizer}, total=20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if fault == "killed" and iteration == 12 and os.environ["OUTLAST_CYCLE"] == "0" and run.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "peer" and iteration == 12 and os.environ["OUTLAST_CYCLE"] == "0":
            raise outlast.errors.PeerLost("a peer left")
"""


def run_lines(tmp_path: Path, fault: str, *options: str, **environment: str) -> list[str]:
    """Return the lines of the agent and two ranks in a successful run of 20 iterations with two saves."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Cluster(
        script,
        str(tmp_path / "saved"),
        fault,
        run_dir=tmp_path / "run",
        num_nodes=1,
        nproc_per_node=2,
        options=options,
        environment=environment,
    ) as cluster:
        codes = cluster.wait(timeout_s=240)
        output = cluster.agent(0).output()
    assert codes == [0], output
    return output.splitlines()


def test_healthy_run_logs_at_most_twelve_lines(tmp_path: Path) -> None:
    """Agent and ranks write at most twelve lines, each with time, level and process; a save is one line with all of
    its tiers, and the last line has the exit code."""
    lines = run_lines(tmp_path, "none")
    log = "\n".join(lines)
    assert [line for line in lines if not LINE.match(line)] == [], log
    assert len(lines) <= MAX_LINES, log
    for iteration in (10, 20):
        (line,) = [line for line in lines if f"iteration {iteration} " in line]
        assert re.search(rf"INFO \[rank 0\] saved iteration {iteration} to memory, local, global in [\d.]+ s$", line)
    assert "cycle 0: ranks 0 to 1 of 2 run here" in log
    assert "exit code 0" in lines[-1], log


@pytest.mark.extended
def test_restart_adds_at_most_six_lines(tmp_path: Path) -> None:
    """A killed worker adds at most six lines: the fault, the decision, the restarted ranks, and the loaded
    checkpoint; the lines on settings and protection of the first cycle are not repeated."""
    lines = run_lines(tmp_path, "killed")
    log = "\n".join(lines)
    assert [line for line in lines if not LINE.match(line)] == [], log
    assert len(lines) <= MAX_LINES + MAX_LINES_PER_RESTART, log
    died = next(number for number, line in enumerate(lines) if "was ended by SIGKILL" in line)
    saved = next(number for number, line in enumerate(lines) if "saved iteration 20 to" in line)
    assert saved - died <= MAX_LINES_PER_RESTART, log
    texts = [line.partition("] ")[2] for line in lines]
    assert len(set(texts)) == len(texts), log
    assert any(line.startswith("loaded iteration 10 ") for line in texts), log


@pytest.mark.parametrize("fault", ["killed", "peer"])
def test_quiet_logs_warnings_and_the_last_line(fault: str, tmp_path: Path) -> None:
    """With ``--quiet`` agent, coordinator and workers log only faults and the end of the run, as JSON if requested.
    A rank that only lost its peer leaves the report to the agent and the coordinator."""
    lines = run_lines(tmp_path, fault, "--quiet", OUTLAST_LOG="json")
    records = [json.loads(line) for line in lines]
    assert {record["level"] for record in records[:-1]} == {"WARNING"}, lines
    assert {record["where"] for record in records} == {"agent node-0", "coordinator"}, lines
    assert "exit code 0" in records[-1]["text"]
    assert records[-1]["node"] == "node-0"


@pytest.mark.parametrize(
    ("options", "environment", "named"),
    [
        (("--log-level=loud",), {}, "--log-level=loud is not one of debug, info, warning, error"),
        (("--quiet", "--log-level=debug"), {}, "--quiet and --log-level=debug contradict each other"),
        ((), {"OUTLAST_LOG_LEVEL": "loud"}, "OUTLAST_LOG_LEVEL='loud' is not one of debug, info, warning, error"),
        ((), {"OUTLAST_LOG": "xml"}, "OUTLAST_LOG='xml' is not one of text, json"),
    ],
)
def test_invalid_log_level_or_format_is_rejected(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], named: str
) -> None:
    """The command prints one line with the valid values and exits with code 2 before anything starts."""
    with Cluster(sys.executable, run_dir=tmp_path, num_nodes=1, options=options, environment=environment) as cluster:
        assert cluster.wait(timeout_s=300) == [2]
        (line,) = cluster.agent(0).output().splitlines()
    assert line.startswith("outlast: ")
    assert named in line
