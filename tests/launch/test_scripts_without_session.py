"""A script without a session: its state is reported as unknown, and the same error of the script is not repeated."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.testing import Cluster

FAILS = """
import os, pathlib, sys, time
go = pathlib.Path(sys.argv[1])
deadline = time.monotonic() + 280
while not go.exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
labels = {"cat": 0}
labels["dog"]
"""


def time_of(text: str, output: str) -> float:
    """Return the time of the first log line with ``text``, in seconds of the day."""
    line = next(line for line in output.splitlines() if text in line)
    moment = datetime.strptime(line.split()[0], "%H:%M:%S.%f")
    return moment.hour * 3600 + moment.minute * 60 + moment.second


@pytest.mark.process
@pytest.mark.slow
def test_script_without_a_session_is_reported(tmp_path: Path) -> None:
    """The protection line is logged soon after the start and reports unknown protection; the first restart explains
    that the script loads its own checkpoint; the same error at the same place ends the job with 93 after one restart
    of three; lost iterations are reported as unknown."""
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    with Cluster(
        script, str(tmp_path / "go"), run_dir=tmp_path / "run", num_nodes=1, options=["--max-restarts=3"]
    ) as cluster:
        cluster.wait_for("protected: death yes (3 restarts)", timeout_s=300)
        (tmp_path / "go").touch()
        assert cluster.wait(timeout_s=300) == [ExitReason.NO_PROGRESS], cluster.tails()
        output = cluster.agent(0).output()
        assert {event.cycle for event in cluster.events() if event.kind == EventKind.CYCLE_STARTED} == {0, 1}
    (protected,) = (line for line in output.splitlines() if "protected:" in line)
    assert protected.count("unknown (the script has not called outlast.init() yet)") == 2
    assert (time_of("protected:", output) - time_of("cycle 0: ranks", output)) % 86400 < 50
    assert output.count("the script has no session: it continues from its own checkpoint, if it has one") == 1
    assert re.search(r"KeyError: 'dog' \(train.py:\d+\).*; the same failure at the same place", output)
    assert "(2 cycles, 2 incidents, lost iterations unknown (no session)), exit code 93" in output
