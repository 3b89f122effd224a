"""A run under a fault plan whose spare is refused: the run continues, and another spare takes its place."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from outlast.chaos.plan import FaultPlan
from outlast.demo.struck_run import StruckRun
from outlast.errors import ExitReason
from outlast.testing.ranks import free_port

pytestmark = [pytest.mark.process, pytest.mark.slow]
LIMIT_S = 150.0
WAIT = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\n"


def test_a_refused_spare_is_replaced(tmp_path: Path) -> None:
    """A spare is killed, and its successor is refused, as the config file is damaged for a moment. The run does not end
    with the exit code of that agent: another one takes its place, and the run ends with 0."""
    script, config, enough = tmp_path / "train.py", tmp_path / "outlast.toml", tmp_path / "enough"
    script.write_text(WAIT)
    config.write_text("")
    arguments = ["--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=refused"]
    arguments += [f"--run-dir={tmp_path / 'run'}", f"--config={config}", "--no-health-check", str(script), str(enough)]
    logs = tmp_path / "agents"

    def log(name: str) -> str:
        path = logs / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def look() -> None:
        refused = [agent for agent in run.agents if agent.was_refused]
        spare = next((agent for agent in run.agents if "is a spare" in log(agent.name)), None)
        if refused:
            config.write_text("")
        elif spare is not None and spare.running:
            config.write_text("unknown = 1")
            spare.process.send_signal(signal.SIGKILL)
        if refused and any("is a spare" in log(agent.name) for agent in run.agents[3:]):
            enough.touch()

    plan = tmp_path / "plan.toml"
    with StruckRun(
        FaultPlan(), arguments, run_dir=tmp_path / "run", plan_path=plan, num_agents=2, is_named=True, log_dir=logs
    ) as run:
        assert run.follow(limit_s=LIMIT_S, on_look=look) == ExitReason.FINISHED
        assert [agent.process.returncode for agent in run.agents][2] == ExitReason.BAD_INPUT
