"""A reset connection to the TCPStore costs at most the save under way, and no later one."""

from __future__ import annotations

from pathlib import Path

import pytest
from saving_ranks import start

pytestmark = pytest.mark.extended

RESET = """
import socket

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
"""
SAVE_AFTER_A_RESET = """
VICTIM = {victim}
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
LEAVE_A_CALL = """
import pathlib, time
said = pathlib.Path(folder).with_name("pid")
over = pathlib.Path(folder).with_name("over")
manager = manage(config={"save_timeout": 200.0}, is_left=lambda: True)
if rank == 0:
    said.write_text(str(os.getpid()))
    while not over.exists():
        time.sleep(0.05)
    tell(ended="over")
    os._exit(0)
while not (said.exists() and said.read_text()):
    time.sleep(0.05)
os.kill(int(said.read_text()), signal.SIGSTOP)
try:
    num_reset = reset_store_connections()
    handles = [manager.save(state, iteration, tiers=["local"]) for iteration in (1, 2)]
    errors = []
    for handle in handles:
        try:
            handle.wait(60)
        except CheckpointError as error:
            errors.append(type(error).__name__)
        except Exception as error:
            errors.append(repr(error))
    manager.close()
finally:
    os.kill(int(said.read_text()), signal.SIGCONT)
    over.touch()
tell(errors=errors, num_reset=num_reset)
os._exit(0)
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
def test_saves_continue_after_a_store_connection_reset(tmp_path: Path, victim: int) -> None:
    """After a reset of all store connections of a rank, only the next save may fail, on both ranks."""
    results = start(tmp_path / "ckpt", RESET + SAVE_AFTER_A_RESET.format(victim=victim), world=2)
    assert [code for code, _ in results] == [0, 0], results
    reports = [report for _, report in results]
    assert reports[victim]["num_reset"] > 0
    assert reports[0]["outcomes"] == reports[1]["outcomes"]
    assert reports[0]["outcomes"][:1] + reports[0]["outcomes"][2:] == ["committed"] * 3
    loaded = start(tmp_path / "ckpt", LOAD, world=2, cycle=1)
    assert [report for _, report in loaded] == [{"iteration": 4, "content": one["content"]} for one in reports]


@pytest.mark.slow
@pytest.mark.process
def test_saves_of_an_abandoned_call_do_not_reconnect(tmp_path: Path) -> None:
    """If the store's host does not respond, queued saves of an abandoned call are dropped, and the manager closes."""
    (_, _), (code, reports) = start(tmp_path / "ckpt", RESET + LEAVE_A_CALL, world=2)
    assert code == 0, reports
    assert reports["num_reset"] > 0
    assert reports["errors"] in (["PeerSilent", "PeerSilent"], ["Replaced", "PeerSilent"])
