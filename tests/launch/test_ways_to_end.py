"""Each way in which a job ends has the exit code and the last line that docs/exit-codes.md states."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from outlast.testing import Cluster

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import outlast

what, folder = sys.argv[1:]
if what == "ends":
    raise SystemExit(0)
if what == "gives up":
    raise SystemExit(93)
if what == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "fails":
    raise ValueError("no such model")
limits = {"max_durable_lag": 2, "max_consecutive_save_failures": 0} if what == "is not saved" else {}
checkpoint = outlast.CheckpointConfig(directory=folder, save_interval=1, **limits) if folder else None
if what == "finds no store":
    os.environ |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    checkpoint = outlast.CheckpointConfig(directory="s3://bucket/run", restore_timeout=1)
run = outlast.init(outlast.Config(checkpoint=checkpoint) if checkpoint else outlast.Config())
model = torch.nn.Linear(2, 2)
optim = torch.optim.SGD(model.parameters(), 0.1)
if what == "was not launched":
    raise RuntimeError("call launch() first")
if what == "cannot start":
    raise TypeError("no such argument")
for iteration in run.steps({"model": model, "optim": optim}, total=5 if what == "trains" else 10**9):
    if what == "waits" and iteration == 4:
        print("waits", flush=True)
    if what == "is not saved" and iteration == 4:
        os.rename(folder, folder + ".away")
        Path(folder).touch()
    if what == "fails later" and iteration == 3:
        while not Path(folder, "step-3", "manifest.json").exists():  # a slow machine could lose this save with the rank
            time.sleep(0.01)
        raise RuntimeError("at three")
    if what == "hangs" and iteration == 3:
        time.sleep(1000)
    for attempt in run.attempts():
        loss = model(torch.ones(2)).sum()
        attempt.validate(loss * float("nan") if what == "is invalid" else loss)
    time.sleep(0.01)
"""
HANGS = ("--ft-rank-section-timeouts=step:2", "--ft-num-warmup-iterations=0")
WAYS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "every worker exits with 0": ("trains", True, ()),
    "an earlier job has finished the run, and the script has no more iterations than before": ("trains", True, ()),
    "SIGTERM or Ctrl-C, and a checkpoint exists": ("waits", True, ()),
    "SIGTERM, and nothing was saved": ("waits", False, ()),
    "Ctrl-C, and nothing was saved": ("waits", False, ()),
    "every rank fails alike before its first step": ("cannot start", True, ()),
    "a rank fails again and again without progress": ("fails later", True, ()),
    "a rank hangs again and again without progress": ("hangs", True, HANGS),
    "a script without a session is killed again and again": ("is killed", False, ()),
    "a script without a session fails twice at the same place": ("fails", False, ()),
    "a script fails twice in the same way before its first step": ("was not launched", True, ()),
    "a result stays invalid": ("is invalid", True, ()),
    "a worker exits with 93": ("gives up", False, ()),
    "the checkpoint directory holds another run's checkpoints": ("trains", True, ()),
    "the checkpoint directory or object store does not respond for `restore_timeout`": ("finds no store", False, ()),
    "no commit to the global directory succeeds for `max_durable_lag`": ("is not saved", True, ()),
    "the node fails its health check": ("ends", False, ("--config={config}",)),
    "nodes are missing for `join_timeout`": ("ends", False, ("--rdzv-conf=join_timeout=2", "--nnodes=2")),
    "the command line is wrong": ("ends", False, ("--ft-max-node-faults=-1",)),
}
"""Cause to the script's mode, whether it has a checkpoint directory, and the options."""


def documented() -> dict[str, tuple[int, str]]:
    """Return cause to exit code and text of the last line, from the page on exit codes."""
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    table = page.partition("## How a job ends\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (\d+) \| `(.+)` \|$", table, re.MULTILINE)
    return {cause: (int(code), line) for cause, code, line in rows}


def test_documented_causes_are_complete() -> None:
    """The page and the table of this module have the same causes."""
    assert documented().keys() == WAYS.keys()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("cause", WAYS)
def test_job_ends_as_documented(cause: str, tmp_path: Path) -> None:
    """Exit code and last line of the agent are those of the page on exit codes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    mode, has_directory, options = WAYS[cause]
    config = tmp_path / "outlast.toml"
    config.write_text('[health]\ncommands = ["false"]\n')
    options = tuple(option.format(config=config) for option in options)
    folder = str(tmp_path / "checkpoints") if has_directory else ""
    code, line = documented()[cause]
    earlier = {
        "an earlier job has finished the run, and the script has no more iterations than before": "run",
        "the checkpoint directory holds another run's checkpoints": "other",
    }
    if cause in earlier:
        with Cluster(script, mode, folder, run_dir=tmp_path / earlier[cause], num_nodes=1, nproc_per_node=1) as cluster:
            assert cluster.wait(timeout_s=300) == [0]
    with Cluster(
        script, mode, folder, run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1, options=options
    ) as cluster:
        if mode == "waits":
            cluster.wait_for("waits", timeout_s=300)
            cluster.agent(0).signal(signal.SIGINT if cause.startswith("Ctrl-C") else signal.SIGTERM)
        assert cluster.wait(timeout_s=300) == [code]
        assert line in cluster.agent(0).output().strip().splitlines()[-1]
