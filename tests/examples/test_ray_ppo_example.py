"""The PPO example on Ray ends with the same weights with and without the death of actors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray_scripts import run_script

pytestmark = pytest.mark.extended

pytest.importorskip("gymnasium")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ray_ppo.py"


@pytest.mark.campaign
@pytest.mark.process
def test_killed_data_shard_does_not_change_the_result(tmp_path: Path) -> None:
    """A data shard dies while its peers are in an all-reduce: the peers are kept, the shard is replaced, and the
    results are equal."""
    result_file = tmp_path / "told.json"
    arguments = ["--iterations=6", "--fail=kill@4", "--compare", f"--json={result_file}"]
    code, output = run_script(SCRIPT, *arguments, timeout_s=240)
    assert code == 0, output
    assert "both runs ended with the same weights, bit for bit" in output
    result = json.loads(result_file.read_text(encoding="utf-8"))
    assert result["equal"]
    assert len(set(result["disturbed"]["digests"])) == 2  # tensor slices differ, data shards do not
    (recovery,) = [one for one in result["disturbed"]["recoveries"] if {2, 3} == {lost["rank"] for lost in one["lost"]}]
    assert {lost["kind"] for lost in recovery["lost"]} == {"died"}
    assert (recovery["kept"], recovery["replaced"]) == ([0, 1], [2, 3])
    assert {2, 3} <= set(recovery["loaded"])
