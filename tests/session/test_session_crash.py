"""A rank that fails is gone at once, whatever its peers do."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import PATIENCE_S, Ranks

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import outlast

folder, what = sys.argv[1], sys.argv[2]
run = outlast.init(outlast.Config(checkpoint=outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=1)))
state = {"steps": torch.zeros(1)}
for iteration in run.steps(state, total=100):
    state["steps"] += 1
    dist.all_reduce(torch.ones(1000))
    if iteration == 3:
        if run.global_rank == 0:
            print("stops", flush=True)
            import os, signal
            os.kill(os.getpid(), signal.SIGSTOP)
        pending = dist.all_reduce(torch.ones(1000), async_op=True)
        if what == "raise":
            raise ValueError("the body failed")
        sys.exit(9)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("what", "expected"), [("raise", 1), pytest.param("exit", 9, marks=pytest.mark.campaign)])
def test_a_failing_rank_leaves_while_its_peer_hangs(tmp_path: Path, what: str, expected: int) -> None:
    """With a stopped peer, an unfinished collective and saves under way, the failing rank still ends at once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path), what, world_size=2) as ranks:
        ranks.wait_for_line(0, "stops")
        codes = ranks.wait(PATIENCE_S, ranks=[1])
        output = ranks.output(1)
        assert codes == [expected], output
        assert ("ValueError: the body failed" in output) == (what == "raise")
        assert ranks.running(0), "the peer did not make it leave"
        ranks.kill(0)


RAISES = """
import sys, threading, time
import torch
import outlast

class Upload(threading.Thread):  # the interpreter waits for it, and meanwhile the package's threads run
    def run(self):
        threading.main_thread().join()
        time.sleep(1)

run = outlast.init(outlast.Config(checkpoint=outlast.CheckpointConfig(directory=sys.argv[1], overlap_staging=True)))
state = {"weights": torch.zeros(1_000_000)}
run.restore(state)
run.begin_step()
run.end_step()
run.save(state)
Upload().start()
raise ValueError("of the script")
"""


@pytest.mark.slow
@pytest.mark.process
def test_the_last_traceback_is_that_of_the_script(tmp_path: Path) -> None:
    """A script that raises right after a save, while its session is open, ends with its own traceback; no thread of
    the package fails because the interpreter shuts down."""
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    with Ranks(script, str(tmp_path / "ckpt")) as ranks:
        (code,), (output,) = ranks.end()
    assert code == 1
    assert output.count("Traceback") == 1, output
    after = output.partition("ValueError: of the script\n")[2]
    assert "are lost" in after
    assert "failed" not in after
    assert "cannot" not in after
