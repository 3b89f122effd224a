"""What the demo writes for its training script is what the script's session reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast import Config
from outlast.chaos import FaultPlan
from outlast.config.sources import load_config
from outlast.demo.plan import Deed, DemoFault, Shape, draw_faults
from outlast.demo.stage import fault_plan, write_settings


def written(folder: Path, faults: tuple[DemoFault, ...]) -> Config:
    path, local = folder / "outlast.json", folder / "local"
    write_settings(path, Shape(), checkpoints=folder / "checkpoints", local=local, faults=faults, seed=7)
    return load_config(path)


def test_both_runs_save_and_compare_alike(tmp_path: Path) -> None:
    """The only difference is the plan of the faults that come from within; the others strike from outside."""
    undisturbed, struck = written(tmp_path, ()), written(tmp_path, draw_faults(7, Shape()))
    assert undisturbed.fault_plan is None
    assert undisturbed.checkpoint == struck.checkpoint
    assert undisturbed.replica_digest == struck.replica_digest
    assert undisturbed.straggler_detection == struck.straggler_detection
    assert struck.straggler_detection is not None
    assert struck.straggler_detection.enabled
    assert not struck.straggler_detection.stop_if_detected
    assert struck.checkpoint is not None
    assert (struck.checkpoint.save_interval, struck.checkpoint.non_persistent_save_interval) == (10, 5)
    assert struck.fault_plan is not None
    plan = FaultPlan.load(struck.fault_plan)
    assert {fault.name for fault in plan.faults} == {Deed.SLOW, Deed.NAN, Deed.FLIP}
    assert not any(fault.persistent for fault in plan.faults)


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_a_silent_one(seed: int) -> None:
    """It changes a weight by less than a factor of two, so that no loss gives it away, and by more than rounding."""
    faults = draw_faults(seed, Shape())
    plan = fault_plan(faults, seed)
    (flip,) = (fault for fault in plan.faults if fault.kind == "bit_flip")
    assert flip.bit is not None
    assert 8 <= flip.bit < 20
    moments = {(fault.deed, fault.rank, fault.iteration) for fault in faults if fault.deed.is_planned}
    assert {(fault.name, fault.rank, fault.iteration) for fault in plan.faults} == moments
    assert fault_plan(faults, seed) == plan
