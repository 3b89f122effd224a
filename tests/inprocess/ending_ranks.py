"""Ranks whose wrapped function ends in a given way.

Arguments: the way, the number of active ranks, and ``nvrx`` for the wrapper of NVRx's names or ``ours``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from outlast import InProcessRestartConfig, inprocess
from outlast.errors import RestartAbort

ENDING, ACTIVE, NAMES = sys.argv[1], int(sys.argv[2]), sys.argv[3]
INITIAL_RANK = int(os.environ["RANK"])
IS_VICTIM = INITIAL_RANK == 0 or ENDING.endswith("everywhere")
LIMITS = {"soft_timeout": 200.0, "hard_timeout": 220.0, "barrier_timeout": 240.0}


class ModelBug(Exception):
    """Raised by the wrapped function."""


class BadDevice(Exception):
    """Raised by a plug-in."""


def plug_in(name: str) -> Any:
    def call(_: Any) -> None:
        if not ENDING.startswith(name) or not IS_VICTIM:
            return
        if "exits" in ENDING:
            sys.exit(0)
        if "aborts" in ENDING:
            raise RestartAbort("planned abort")
        raise BadDevice("planned fault")

    return call


def train() -> str:
    if ENDING in ("returns", "completion fails"):
        return "trained"
    call = inprocess.current_handle()
    if call is not None and call.iteration > 0 and not IS_VICTIM:
        return "trained"  # in a call without the victim
    if IS_VICTIM:
        if ENDING == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ENDING == "is interrupted":
            raise KeyboardInterrupt
        if ENDING.startswith("exits with "):
            code = ENDING.removeprefix("exits with ").removesuffix(" everywhere")
            sys.exit(int(code) if code.isdecimal() else code)
        raise ModelBug("planned bug")
    threading.Event().wait(200)
    return "not trained"


plug_ins = {name: plug_in(name) for name in ("initialize", "finalize", "health_check", "completion", "terminate")}
wrapper: Any
if NAMES == "nvrx":
    from outlast.integrations import nvrx

    nvrx.install()
    import nvidia_resiliency_ext.inprocess as nvidia  # type: ignore[import-not-found]

    wrapper = nvidia.Wrapper(**LIMITS, **plug_ins)
else:
    config = InProcessRestartConfig(
        granularity="rank",
        active_world_size=ACTIVE,
        max_iterations=1,
        max_rank_faults=0 if ENDING.startswith("fails too often") else None,
        **LIMITS,  # type: ignore[arg-type]
    )
    wrapper = inprocess.Wrapper(config, **plug_ins)

print("returned", wrapper(train)(), flush=True)
