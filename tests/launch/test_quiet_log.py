"""What a run writes of its own: few lines, all in one form, and only warnings where that is asked for."""

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
MAX_LINES_OF_A_RESTART = 6

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


def lines_of(tmp_path: Path, fault: str, *options: str, **environment: str) -> list[str]:
    """Return what the agent and two ranks write in a run of 20 iterations with two saves, which ends well."""
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


def test_a_healthy_run_writes_a_dozen_lines_in_one_form(tmp_path: Path) -> None:
    """Agent and ranks write at most twelve lines, each with time, level and writer; a save is one line, which names all
    of its tiers, and the last line says how the run ended."""
    lines = lines_of(tmp_path, "none")
    shown = "\n".join(lines)
    assert [line for line in lines if not LINE.match(line)] == [], shown
    assert len(lines) <= MAX_LINES, shown
    for iteration in (10, 20):
        (line,) = [line for line in lines if f"iteration {iteration} " in line]
        assert re.search(rf"INFO \[rank 0\] saved iteration {iteration} to memory, local, global in [\d.]+ s$", line)
    assert "cycle 0: ranks 0 to 1 of 2 run here" in shown
    assert "exit code 0" in lines[-1], shown


@pytest.mark.extended
def test_a_restart_adds_few_lines(tmp_path: Path) -> None:
    """A killed worker costs at most six lines: what happened, what was decided, who runs again, and what was loaded;
    what was said of settings and protection in the first cycle is not repeated."""
    lines = lines_of(tmp_path, "killed")
    shown = "\n".join(lines)
    assert [line for line in lines if not LINE.match(line)] == [], shown
    assert len(lines) <= MAX_LINES + MAX_LINES_OF_A_RESTART, shown
    died = next(number for number, line in enumerate(lines) if "was ended by SIGKILL" in line)
    again = next(number for number, line in enumerate(lines) if "saved iteration 20 to" in line)
    assert again - died <= MAX_LINES_OF_A_RESTART, shown
    said = [line.partition("] ")[2] for line in lines]
    assert len(set(said)) == len(said), shown
    assert any(line.startswith("loaded iteration 10 ") for line in said), shown


@pytest.mark.parametrize("fault", ["killed", "peer"])
def test_quiet_leaves_warnings_and_the_last_line(fault: str, tmp_path: Path) -> None:
    """With ``--quiet`` a run says what went wrong and how it ended, and as JSON if that is asked for: agent,
    coordinator and workers alike. A rank that only lost a peer leaves that to them."""
    lines = lines_of(tmp_path, fault, "--quiet", OUTLAST_LOG="json")
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
def test_a_wrong_level_or_form_is_refused_in_one_line(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], named: str
) -> None:
    """Before anything starts: one line that names what is known, and exit code 2."""
    with Cluster(sys.executable, run_dir=tmp_path, num_nodes=1, options=options, environment=environment) as cluster:
        assert cluster.wait(timeout_s=300) == [2]
        (line,) = cluster.agent(0).output().splitlines()
    assert line.startswith("outlast: ")
    assert named in line
