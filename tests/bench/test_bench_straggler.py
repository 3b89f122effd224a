"""``outlast bench straggler`` measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "bench")


@pytest.mark.process
def test_timed_steps_and_reports_are_measured_in_real_ranks() -> None:
    """The command measures in two ranks and tells both figures; the exit code says whether the bars are kept."""
    done = subprocess.run(
        [*COMMAND, "straggler", "--json", "--repeats=1"], capture_output=True, text=True, timeout=200, check=False
    )
    bars = {bar["name"]: bar for bar in json.loads(done.stdout)["bars"]}
    assert list(bars) == ["straggler_us_per_step", "report_ms"]
    assert bars["straggler_us_per_step"]["peer_value"] > 0
    assert all(bar["value"] > 0 for bar in bars.values())
    assert done.returncode == int(not all(bar["ok"] for bar in bars.values()))
