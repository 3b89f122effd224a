"""The checkpoint writer of a node: it belongs to the agent, outlives the workers, and is replaced when it dies."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from outlast.incidents import EventKind
from outlast.runtime.processes import GROUP_SIGNALS
from outlast.testing import Cluster
from outlast.testing.ranks import having_argument

pytestmark = [pytest.mark.process]

SCRIPT = """
import os, pathlib, socket, sys, time
cycle = os.environ["OUTLAST_CYCLE"]
address = os.environ["OUTLAST_WRITER"]
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(150)
    connection.connect("\\0" + address)
print("cycle", cycle, "has the writer", address, flush=True)
awaited = [pathlib.Path(sys.argv[1])]
if cycle == "0":  # the first rank that ends takes the other one along: both have said it by then
    awaited = [pathlib.Path(f"{sys.argv[1]}-{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    awaited[int(os.environ["RANK"])].touch()
deadline = time.monotonic() + 40
while not all(path.exists() for path in awaited):
    assert time.monotonic() < deadline
    time.sleep(0.02)
if cycle == "0":
    raise SystemExit(7)
"""


def _writer(cluster: Cluster) -> psutil.Process:
    (writer,) = having_argument(cluster.processes(), "outlast.checkpoint.writer")
    return writer


def test_writer_serves_all_cycles_and_is_replaced_when_it_dies(tmp_path: Path) -> None:
    """The workers of a second cycle use the same writer process. A killed writer is replaced under the same address
    and its death is recorded in the journal, while training continues; no process is left after the job."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    go = tmp_path / "go"
    with Cluster(script, str(go), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=2) as cluster:
        cluster.wait_for("cycle 0 has the writer", timeout_s=300)
        first = _writer(cluster)
        cluster.wait_for("cycle 1 has the writer", timeout_s=300)
        assert _writer(cluster) == first
        first.send_signal(signal.SIGKILL)
        event = cluster.wait_for(lambda event: event.kind == EventKind.WRITER_ENDED, timeout_s=300)
        assert event is not None
        assert f"pid {first.pid}" in event.data["summary"]
        assert "SIGKILL" in event.data["summary"]
        assert _writer(cluster) != first
        go.touch()
        assert cluster.wait(timeout_s=300) == [0]
        cluster.assert_no_orphans(within_s=60)
        reported = [
            line
            for line in cluster.agent(0).output().splitlines()
            if line.startswith("cycle ") and "has the writer" in line
        ]
        assert len(reported) == 4
        assert len({line.rpartition(" ")[2] for line in reported}) == 1


def test_helper_processes_ignore_group_signals(tmp_path: Path) -> None:
    """The checkpoint writer, the fork server and an agent process survive signals that a terminal or a scheduler
    sends to every process of a job; workers do not inherit this immunity."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    go = tmp_path / "go"
    with Cluster(script, str(go), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for("cycle 1 has the writer", timeout_s=300)
        agent = psutil.Process(cluster.agent(0).pid)
        helpers = agent.children()
        names = [" ".join(one.cmdline()) for one in helpers]
        assert any("checkpoint.writer" in name for name in names), names
        assert any("runtime.fork_server" in name for name in names), names
        for helper in helpers:
            for number in GROUP_SIGNALS:
                helper.send_signal(number)
        status = Path(f"/proc/{cluster.worker_pid(0)}/status").read_text()
        ignored, blocked = (int(status.partition(name)[2].split()[0], 16) for name in ("SigIgn:", "SigBlk:"))
        assert not any((ignored | blocked) >> (number - 1) & 1 for number in GROUP_SIGNALS)
        go.touch()
        assert cluster.wait(timeout_s=300) == [0]
        assert not [one for one in cluster.events() if one.kind in (EventKind.WRITER_ENDED, EventKind.INCIDENT)][1:]


def test_writer_exits_with_its_agent(tmp_path: Path) -> None:
    """A killed agent leaves no writer process behind."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Cluster(script, str(tmp_path / "go"), run_dir=tmp_path / "run", num_nodes=1, nproc_per_node=1) as cluster:
        cluster.wait_for("cycle 1 has the writer", timeout_s=300)
        assert _writer(cluster).is_running()
        cluster.agent(0).kill()
        cluster.assert_no_orphans(within_s=60)
