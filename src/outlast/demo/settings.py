"""The settings: what the demo writes for the training script, and the plan of the faults that befall it from within."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outlast import chaos
from outlast.demo.plan import Deed, Fault, Shape

__all__ = ["fault_plan", "write_settings"]

_DIGEST_INTERVAL = 2
_MANTISSA_BITS = range(8, 20)
"""Of a float32: one that rounding does not level out, and that makes no number so large that it would be noticed."""
_LAYERS = "model.blocks.*"
_SLOW_FACTOR = 10.0
_SLOW_SCORE = 0.2
"""Who takes less than five times as long is nobody to name: where four ranks share two cores, whoever happens to wait
for one takes several times as long for things of a few milliseconds."""
_REPORT_S = 1.0


def write_settings(
    path: Path, shape: Shape, *, checkpoints: Path, local: Path, faults: Sequence[Fault] = (), seed: int = 0
) -> None:
    """Write the settings of the training script.

    Args:
        path: The file, JSON; the plan of faults, if there are any, is put beside it.
        shape: The world's size and the intervals between saves.
        checkpoints: Folder of the global tier.
        local: Folder of all nodes' local folders.
        faults: What strikes; those that the demo causes from outside are left out.
        seed: Draws which tensors, elements and bits are struck.
    """
    settings: dict[str, Any] = {
        "checkpoint": {
            "directory": str(checkpoints),
            "local_directory": str(local),
            "save_interval": shape.global_save_interval,
            "non_persistent_save_interval": shape.save_interval,
        },
        "replica_digest": {"interval": _DIGEST_INTERVAL},
        "straggler_detection": {
            "enabled": True,
            "report_time_interval": _REPORT_S,
            "calc_individual_gpu_perf": False,  # a cycle is too short to know a rank's own best
            "noticeable_score": _SLOW_SCORE,
            "gpu_relative_perf_threshold": _SLOW_SCORE,
            "check_machine": False,  # all ranks share one
            "num_gpu_perf_scores_to_print": 0,
            "enable_logging": False,
        },
    }
    plan = fault_plan(faults, seed)
    if plan.faults:
        beside = path.with_name("faults.toml")
        beside.write_text(plan.to_toml())
        settings["fault_plan"] = str(beside)
    path.write_text(json.dumps(settings, indent=2) + "\n")


def fault_plan(faults: Sequence[Fault], seed: int) -> chaos.FaultPlan:
    """Return the faults that befall the training from within, as a plan that the session of each rank arms."""
    numbers = random.Random(seed)
    return chaos.FaultPlan(
        seed=seed, faults=tuple(_planned(fault, numbers) for fault in faults if fault.deed.is_planned)
    )


def _planned(fault: Fault, numbers: random.Random) -> chaos.Fault:
    if fault.deed == Deed.SLOW:
        return chaos.Fault(
            kind="slow", factor=_SLOW_FACTOR, rank=fault.rank, iteration=fault.iteration, name=fault.deed
        )
    if fault.deed == Deed.NAN:
        return chaos.Fault(
            kind="nan",
            target="activation",
            tensor=_LAYERS,
            rank=fault.rank,
            iteration=fault.iteration,
            name=fault.deed,
        )
    return chaos.Fault(
        kind="bit_flip",
        target="weight",
        tensor=f"{_LAYERS}.weight",
        bit=numbers.choice(_MANTISSA_BITS),
        rank=fault.rank,
        iteration=fault.iteration,
        name=fault.deed,
    )
