"""What a rank still has under way on its device is aborted before anything waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.testing import RankProcesses

PROGRAM = """
import json
import sys
import time
from outlast import InProcessRestartConfig, inprocess
from outlast.runtime import device

happened = []
device.abort_collectives = lambda: happened.append("abort") or 0

@inprocess.Wrapper(InProcessRestartConfig(soft_timeout=2, hard_timeout=60))
def train(call: inprocess.Handle):
    happened.append(call.iteration)
    call.before_abort(lambda: happened.append("look"))
    call.on_leave(lambda: happened.append("leave"))
    if call.iteration == 0:
        if sys.argv[1] == "raise":
            raise ValueError("planned")
        time.sleep(3600)

train()
print(json.dumps(happened))
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_collectives_are_aborted_before_the_call_is_left(tmp_path: Path, fault: str) -> None:
    """Whether a rank raises, and leaves before anybody orders it, or hangs and is interrupted: once in the call it is
    looked at what the device has done, then collectives are aborted, and only then is the state released."""
    with RankProcesses(PROGRAM, fault, world_size=1, directory=tmp_path, code=True) as ranks:
        assert ranks.wait(timeout_s=250) == [0], ranks.tails()
        output = ranks.output(0)
    assert output.splitlines()[-1] == '[0, "look", "abort", "leave", 1]', output
