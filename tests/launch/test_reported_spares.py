"""Reported spares: only waiting spares are counted, and the shutdown of a spare does not end the job."""

from __future__ import annotations

import signal
from itertools import groupby
from pathlib import Path

import pytest

from outlast.testing import Cluster

pytestmark = pytest.mark.extended

WAITS = """
import pathlib, sys, time
from outlast.monitor import RankMonitor
monitor = RankMonitor()
deadline = time.monotonic() + 280
while not pathlib.Path(sys.argv[1]).exists():
    monitor.heartbeat()
    assert time.monotonic() < deadline
    time.sleep(0.02)
monitor.finish()
"""


@pytest.mark.process
@pytest.mark.slow
def test_protection_line_counts_waiting_spares(tmp_path: Path) -> None:
    """The protection line counts the spares that wait, and is logged again when one joins or exits; a spare that is
    shut down reports that it has left the job, without an error and without a line on saves."""
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    with Cluster(
        *(script, str(tmp_path / "end")), run_dir=tmp_path / "run", num_nodes=1, num_spares=1, num_started=1
    ) as cluster:
        cluster.wait_for("node loss no (none of up to 1 spare is here)", timeout_s=300)
        spare = cluster.add_node("spare")
        cluster.wait_for("node loss yes (1 spare)", timeout_s=300)
        spare.signal(signal.SIGTERM)
        assert spare.wait(300) == 128 + signal.SIGTERM
        spare_output = spare.output()
        assert "node spare has left the job" in spare_output
        assert "this node held no slot, and the job continues without it" in spare_output
        assert "ERROR" not in spare_output
        assert "saved" not in spare_output
        (tmp_path / "end").touch()
        assert cluster.agent(0).wait(300) == 0
        lines = [line for line in cluster.agent(0).output().splitlines() if "protected:" in line]
    reported = [line.partition("node loss ")[2].partition(" ")[0] for line in lines]
    assert [value for value, _ in groupby(reported)][:2] == ["no", "yes"]
