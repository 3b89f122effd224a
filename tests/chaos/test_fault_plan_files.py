"""A plan is the same from Python, TOML and JSON, and an error in one is reported in one line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fault_strategies import plans
from hypothesis import given

from outlast.chaos import Fault, FaultPlan
from outlast.errors import ConfigError

KILL = {"kind": "kill", "rank": 1, "iteration": 5}
AGENT = {"kind": "kill_agent", "iteration": 5}
COPY = {"kind": "corrupt_copy", "iteration": 5}
NET = {"kind": "partition", "iteration": 5}
DISK = {"kind": "disk_full", "iteration": 5, "tier": "local", "duration_s": 2}
NAN = {"kind": "nan", "target": "loss", "iteration": 5}


@pytest.mark.slow
@given(plan=plans(outside=True))
def test_a_plan_survives_a_round_trip_through_text(plan: FaultPlan) -> None:
    """A plan that is written as TOML or JSON and read again is equal, and so are the names of its draws."""
    assert FaultPlan.from_mapping(tomllib.loads(plan.to_toml())) == plan
    assert FaultPlan.from_mapping(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_the_file_suffix_selects_the_format(tmp_path: Path, ending: str) -> None:
    """The suffix of a file decides whether it is read as TOML or JSON."""
    plan = FaultPlan(seed=3, faults=[Fault(**NAN), Fault(kind="sleep", rate=0.5, duration_s=2)])
    path = tmp_path / f"plan.{ending}"
    path.write_text(plan.to_toml() if ending == "toml" else plan.to_json())
    assert FaultPlan.load(path) == plan


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sed": 1}, "plan: unknown key 'sed'; did you mean 'seed'?"),
        ({"seed": "x"}, "plan: seed: 'x' does not fit"),
        ({"faults": {"kind": "kill"}}, "plan: faults: not a list"),
        ({"faults": [KILL, KILL | {"iteratoin": 3}]}, "faults[1]: unknown key 'iteratoin'; did you mean 'iteration'?"),
        ({"faults": [{"iteration": 3}]}, "faults[0]: key 'kind' is missing"),
        ({"faults": [KILL | {"kind": "kil"}]}, "faults[0]: kind='kil' is unknown; did you mean 'kill'?"),
        ({"faults": [KILL | {"target": "loss"}]}, "target is not for kind='kill'"),
        ({"faults": [KILL | {"node": "a"}]}, "rank and node are given; keep one"),
        ({"faults": [KILL | {"rate": 0.1}]}, "iteration and rate are given; keep one"),
        ({"faults": [{"kind": "kill"}]}, "iteration is missing"),
        ({"faults": [{"kind": "kill", "rate": 1.5}]}, "rate=1.5 must be above 0"),
        ({"faults": [{"kind": "kill", "after_s": 1, "persistent": True}]}, "persistent needs an iteration"),
        ({"faults": [KILL | {"once_durable": True}]}, "once_durable needs after_s"),
        ({"faults": [KILL | {"iteration": -1}]}, "iteration=-1 must not be negative"),
        ({"faults": [KILL | {"iteration": 1.5}]}, "iteration: 1.5 does not fit; write a whole number, or none"),
        ({"faults": [KILL | {"exit_code": 3}]}, "exit_code is for kind='exit'"),
        ({"faults": [KILL | {"duration_s": 3}]}, "duration_s=3.0 is for kind sleep, hold_gil and slow"),
        ({"faults": [KILL | {"factor": 2}]}, "factor=2.0 is for kind slow"),
        ({"faults": [KILL | {"kind": "slow"}]}, "factor is missing; a slow needs one above 1"),
        ({"faults": [KILL | {"kind": "slow", "factor": 1}]}, "factor=1.0 is for kind slow, and above 1"),
        ({"faults": [KILL | {"section": ""}]}, "section='' must be a printable text"),
        ({"faults": [{"kind": "nan", "iteration": 5}]}, "target is missing"),
        ({"faults": [NAN | {"target": "gradeint"}]}, "target='gradeint' is unknown; did you mean 'gradient'?"),
        ({"faults": [NAN | {"tensor": "a"}]}, "tensor is not for target='loss'"),
        ({"faults": [NAN | {"bit": 3}]}, "bit=3 is for kind='bit_flip'"),
        ({"faults": [KILL | {"at_s": 3}]}, "iteration and at_s are given; keep one"),
        ({"faults": [KILL | {"on_request": True}]}, "iteration and on_request are given; keep one"),
        ({"faults": [{"kind": "kill", "at_s": -1}]}, "at_s=-1.0 must not be negative"),
        ({"faults": [{"kind": "kill", "at_s": 1, "persistent": True}]}, "persistent needs an iteration"),
        ({"faults": [KILL | {"tier": "local"}]}, "tier is not for kind='kill'"),
        ({"faults": [AGENT | {"rank": 1}]}, "rank is not for kind='kill_agent'"),
        ({"faults": [AGENT | {"device": "a"}]}, "device is not for kind='kill_agent'"),
        ({"faults": [AGENT | {"duration_s": 1}]}, "duration_s is not for kind='kill_agent'"),
        ({"faults": [AGENT | {"persistent": True}]}, "persistent is not for kind='kill_agent'"),
        ({"faults": [AGENT | {"kind": "kill_coordinator", "node": "a"}]}, "node is not for kind='kill_coordinator'"),
        ({"faults": [AGENT | {"kind": "stop_agent", "duration_s": 0}]}, "duration_s=0.0 must be above 0"),
        ({"faults": [AGENT | {"kind": "kill_agnet"}]}, "did you mean 'kill_agent'?"),
        ({"faults": [COPY]}, "tier is missing; a corrupt_copy needs it"),
        ({"faults": [COPY | {"tier": "lokal"}]}, "tier='lokal' is unknown; did you mean 'local'?"),
        ({"faults": [COPY | {"tier": "global", "node": "a"}]}, "node is not for kind='corrupt_copy'"),
        ({"faults": [COPY | {"kind": "truncate_copy", "tier": "memory"}]}, "write one of local, replica, global"),
        ({"faults": [COPY | {"tier": "local", "checkpoint": -1}]}, "checkpoint=-1 must not be negative"),
        ({"faults": [DISK | {"tier": "memory"}]}, "tier='memory' is not for kind='disk_full'; write one of local, glo"),
        ({"faults": [DISK | {"delay_s": 1}]}, "delay_s is not for kind='disk_full'"),
        ({"faults": [DISK | {"kind": "slow_disk"}]}, "delay_s is missing; a slow_disk needs it"),
        ({"faults": [NET]}, "duration_s is missing; a partition needs it"),
        ({"faults": [NET | {"duration_s": 1, "delay_s": 1}]}, "delay_s is not for kind='partition'"),
        ({"faults": [NET | {"duration_s": 1, "kind": "delay"}]}, "delay_s is missing; a delay needs it"),
        ({"faults": [NET | {"duration_s": 1, "kind": "loss"}]}, "share is missing; a loss needs it"),
        ({"faults": [NET | {"duration_s": 1, "kind": "loss", "share": 1.5}]}, "share=1.5 must be above 0 and at mos"),
        ({"faults": [KILL | {"share": 0.5}]}, "share is not for kind='kill'"),
        ({"faults": [NAN | {"section": "step"}]}, "section is not for kind='nan'"),
    ],
)
def test_an_invalid_plan_is_one_error_line(values: dict[str, Any], expected: str) -> None:
    """The line names the source, the key, and what is accepted."""
    with pytest.raises(ConfigError) as caught:
        FaultPlan.from_mapping(values, where="plan")
    message = str(caught.value)
    assert expected in message
    assert message.startswith("plan: ")
    assert "\n" not in message


def test_a_plan_in_python_is_validated_like_a_file() -> None:
    """A fault that is constructed in code is rejected for the same reasons."""
    with pytest.raises(ConfigError, match="did you mean 'bit_flip'"):
        Fault(kind="bitflip", target="weight", iteration=1)
    with pytest.raises(ConfigError, match=r"outlast\.chaos\.Fault"):
        FaultPlan(faults=[KILL])  # type: ignore[arg-type]
