"""A rank that fails exits at once, whatever its peers do."""

from __future__ import annotations

import re
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
@pytest.mark.parametrize(("failure", "expected"), [("raise", 1), pytest.param("exit", 9, marks=pytest.mark.campaign)])
def test_a_failing_rank_exits_while_its_peer_hangs(tmp_path: Path, failure: str, expected: int) -> None:
    """With a stopped peer, an unfinished collective and saves in progress, the failing rank exits at once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path), failure, world_size=2) as ranks:
        ranks.wait_for_line(0, "stops")
        codes = ranks.wait(PATIENCE_S, ranks=[1])
        output = ranks.output(1)
        assert codes == [expected], output
        assert ("ValueError: the body failed" in output) == (failure == "raise")
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
def test_the_last_traceback_is_the_scripts(tmp_path: Path) -> None:
    """A script that raises right after a save, with an open session, ends with its own traceback; no thread of the
    package fails during the interpreter's shutdown."""
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


TRIES_AGAIN = """
import sys
import torch
import outlast

def train(fails_at):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    checkpoint = outlast.CheckpointConfig(directory=sys.argv[1], save_interval=2, async_save=sys.argv[3] == "True")
    config = outlast.Config(checkpoint=checkpoint, seed=0)
    with outlast.init(config) as run:
        begun = None
        for iteration in run.steps({"model": model}, total=12):
            begun = iteration if begun is None else begun
            if iteration == fails_at:
                raise ValueError("of the script")
            with torch.no_grad():
                model.weight.add_(torch.rand(4, 4))
        print("began at", begun, "weights", model.weight.sum().item().hex(), flush=True)

if sys.argv[2] == "fails":
    try:
        train(5)
    except ValueError:
        print("caught", flush=True)
train(None)
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("world_size", "is_async"), [(1, False), (2, True)])
def test_a_second_session_resumes_after_a_caught_error(tmp_path: Path, world_size: int, is_async: bool) -> None:
    """A second session in the same process gets the directory of a session that an exception ended, resumes from its
    last commit, and ends with the weights of an undisturbed run."""
    script = tmp_path / "script.py"
    script.write_text(TRIES_AGAIN)
    ended = {}
    for case in ("fails", "goes well"):
        with Ranks(script, str(tmp_path / case), case, str(is_async), world_size=world_size) as ranks:
            codes, outputs = ranks.end()
        assert codes == [0] * world_size, outputs
        ended[case] = [re.findall(r"began at (\d+) weights (\S+)", output)[0] for output in outputs]
        assert ["caught" in output for output in outputs] == [case == "fails"] * world_size
    begun = {int(number) for number, _ in ended["fails"]}
    assert len(begun) == 1
    assert begun <= ({0, 2, 4} if is_async else {4})
    assert [weights for _, weights in ended["fails"]] == [weights for _, weights in ended["goes well"]]
