"""A rank's collectives in progress on its device are aborted before anything waits for the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.testing import RankProcesses

PROGRAM = """
import json
import sys
import time
from outlast import InProcessRestartConfig, inprocess
from outlast.runtime import device_collectives

happened = []
device_collectives.abort_collectives = lambda: happened.append("abort") or 0

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
def test_collectives_are_aborted_before_the_call_ends(tmp_path: Path, fault: str) -> None:
    """For a rank that raises and for a rank that hangs, the completed device work is recorded once, then collectives
    are aborted, and only then the state is released."""
    with RankProcesses(PROGRAM, fault, world_size=1, directory=tmp_path, code=True) as ranks:
        assert ranks.wait(timeout_s=250) == [0], ranks.tails()
        output = ranks.output(0)
    assert output.splitlines()[-1] == '[0, "look", "abort", "leave", 1]', output


ABORTING = """
import json
import sys
import threading
import torch.distributed as dist
from outlast import InProcessRestartConfig, inprocess
from outlast.runtime import device_collectives

happened, let_end = [], threading.Event()

class SlowToAbort:
    def abort(self):
        happened.append("abort begins")
        let_end.wait(0.5 if sys.argv[1] == "own" else 200)
        happened.append("abort ends")

groups = [SlowToAbort()]
device_collectives._nccl_groups = lambda: groups if dist.is_initialized() and 1 not in happened else []
device_collectives._settle_devices = lambda: happened.append("settled")

destroy = dist.destroy_process_group

def destroy_and_note():
    happened.append("destroyed")
    destroy()

dist.destroy_process_group = destroy_and_note

def own_leave():
    happened.append("own")
    dist.destroy_process_group()

@inprocess.Wrapper(InProcessRestartConfig(soft_timeout=60, hard_timeout=90))
def train(call: inprocess.Handle):
    dist.init_process_group("gloo")
    happened.append(call.iteration)
    if call.iteration == 0:
        if sys.argv[1] == "own":
            call.on_leave(own_leave)
        raise ValueError("planned")
    let_end.set()
    device_collectives.await_aborts()

train()
print(json.dumps(happened))
"""


@pytest.mark.slow
@pytest.mark.process
def test_only_the_scripts_on_leave_waits_for_aborts(tmp_path: Path) -> None:
    """Groups that are being aborted (a stand-in for NCCL's) are dropped, and the function is called again during
    their abort; the script's ``on_leave`` callbacks run after the abort and may destroy the groups."""
    for mode, expected in (
        ("none", [0, "abort begins", "settled", 1, "abort ends", "destroyed"]),
        ("own", [0, "abort begins", "settled", "abort ends", "own", "destroyed", 1, "destroyed"]),
    ):
        folder = tmp_path / mode
        folder.mkdir()
        with RankProcesses(ABORTING, mode, world_size=1, directory=folder, code=True) as ranks:
            assert ranks.wait(timeout_s=250) == [0], ranks.tails()
            output = ranks.output(0)
        assert output.splitlines()[-1] == json.dumps(expected), output
