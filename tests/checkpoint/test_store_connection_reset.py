"""A connection to the ranks' store that a network resets costs the save under way, and no later one."""

from __future__ import annotations

from pathlib import Path

import pytest
from saving_ranks import start

SAVE_AFTER_A_RESET = """
import socket
VICTIM = {victim}

def reset_store_connections():
    port, num = int(os.environ["MASTER_PORT"]), 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)
                    num += 1
        except OSError:
            pass  # closed meanwhile, or it has no peer
    return num

manager = manage(config={{"save_timeout": 10.0}})
outcomes, num_reset = [], 0
for iteration in range(1, 5):
    train()
    if iteration == 2 and rank == VICTIM:
        num_reset = reset_store_connections()
    try:
        manager.save(state, iteration).wait(100)
        outcomes.append("committed")
    except CheckpointError as error:
        outcomes.append("failed")
    dist.barrier()
manager.close()
tell(outcomes=outcomes, num_reset=num_reset, content=content())
"""
LOAD = """
manager = manage()
restored = manager.load_latest(state)
manager.close()
tell(iteration=restored.iteration, content=content())
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 1])
def test_saves_go_on_after_a_store_connection_was_reset(tmp_path: Path, victim: int) -> None:
    """Every connection of a rank to the store ends once: at most the next save fails, alike on both ranks; those after
    it are committed, and the newest is loaded."""
    ended = start(tmp_path / "ckpt", SAVE_AFTER_A_RESET.format(victim=victim), world=2)
    assert [code for code, _ in ended] == [0, 0], ended
    told = [what for _, what in ended]
    assert told[victim]["num_reset"] > 0
    assert told[0]["outcomes"] == told[1]["outcomes"]
    assert told[0]["outcomes"] == ["committed", "failed", "committed", "committed"]
    loaded = start(tmp_path / "ckpt", LOAD, world=2, cycle=1)
    assert [what for _, what in loaded] == [{"iteration": 4, "content": one["content"]} for one in told]
