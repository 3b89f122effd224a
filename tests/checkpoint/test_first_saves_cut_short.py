"""An interrupted first save does not prevent a start; a durable checkpoint is never dropped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from saving_ranks import start

from outlast.checkpoint.writer_client import WriterProcess

pytestmark = pytest.mark.extended

SAVE = """
manager = manage(config=CONFIG)
train()
manager.save(state, 1, tiers=TIERS).wait(100)
kill_all()
"""
CUT_SHORT = """
from outlast.checkpoint import protocol
manager = manage(config=CONFIG)
ask = manager._writer.ask
if EARLIER:
    train()
    manager.save(state, 1, tiers=["memory"]).wait(100)
def ask_or_die(request, *rest, **more):
    if rank == DYING and isinstance(request, getattr(protocol, BEFORE)):
        kill_self()
    reply = ask(request, *rest, **more)
    if rank != DYING and isinstance(request, getattr(protocol, REACHED)):
        kill_self()
    return reply
manager._writer.ask = ask_or_die
train()
manager.save(state, 2, tiers=["memory"]).wait(100)
"""
LOAD = """
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("outlast").addHandler(handler)
manager = manage(config=CONFIG)
try:
    restored = manager.load_latest(state)
except CheckpointError as error:
    tell(error=str(error))
    manager.close()
    sys.exit(93)
before = None if restored is None else restored.iteration
train()
manager.save(state, (before or 0) + 1).wait(100)
tell(loaded=before, warnings=warnings, content=content())
kill_all()
"""


@pytest.fixture
def nodes() -> Iterator[dict[str, WriterProcess]]:
    """Writers of two nodes."""
    writers = {name: WriterProcess() for name in ("one", "two")}
    yield writers
    for writer in writers.values():
        writer.close()


def run(folder: Path, script: str, nodes: dict[str, WriterProcess], cycle: int, **config: Any) -> list[Any]:
    """Run a script on two ranks; return each rank's report, or its exit code and output."""
    tiers = config.pop("tiers", None)
    results = start(
        folder, f"CONFIG = {config!r}\nTIERS = {tiers!r}\n" + script, world=2, cycle=cycle, nodes=nodes, timeout_s=120
    )
    return [reports if isinstance(reports, dict) else (code, reports) for code, reports in results]


def replace(nodes: dict[str, WriterProcess], name: str) -> None:
    """Lose a node's memory."""
    nodes[name].close()
    nodes[name] = WriterProcess()


@pytest.mark.slow
@pytest.mark.process
def test_a_first_save_in_one_ranks_memory_allows_a_new_start(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """If rank 1 is killed before it prepares its part of the first checkpoint, training starts from scratch.

    The run logs a warning, and the next checkpoint is loaded in the next cycle.
    """
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    cut_short = "EARLIER, DYING, BEFORE, REACHED = False, 1, 'PreparePart', 'PreparePart'"
    run(tmp_path / "ckpt", cut_short + CUT_SHORT, nodes, 0, **config)
    second_cycle = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [reports["loaded"] for reports in second_cycle] == [None, None]
    assert any("training starts from the beginning" in text for text in second_cycle[0]["warnings"])
    assert not any("training starts from the beginning" in text for text in second_cycle[1]["warnings"])
    assert [reports["loaded"] for reports in run(tmp_path / "ckpt", LOAD, nodes, 2, **config)] == [1, 1]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("num_nodes", "dying", "before", "reached", "loaded"),
    [
        (1, 0, "PreparePart", "Discard", 1),
        (2, 0, "PreparePart", "PreparePart", 1),
        (2, 1, "PreparePart", "PreparePart", 1),
        *((num_nodes, dying, "KeepPart", "KeepPart", 2) for num_nodes in (1, 2) for dying in (0, 1)),
    ],
)
def test_a_rank_killed_during_the_commit_loses_no_checkpoint(
    tmp_path: Path, nodes: dict[str, WriterProcess], num_nodes: int, dying: int, before: str, reached: str, loaded: int
) -> None:
    """If a rank dies before it prepares or keeps the second checkpoint, all ranks load the same checkpoint.

    This is the second or the first one. The checkpoints are in memory only, and the other rank is killed right after
    its own step, or exits by itself.
    """
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    if num_nodes == 1:
        nodes.pop("two").close()
    cut_short = f"EARLIER, DYING, BEFORE, REACHED = True, {dying}, {before!r}, {reached!r}"
    run(tmp_path / "ckpt", cut_short + CUT_SHORT, nodes, 0, **config)
    reports = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [one["loaded"] for one in reports] == [loaded] * 2
    assert [one["loaded"] for one in run(tmp_path / "ckpt", LOAD, nodes, 2, **config)] == [loaded + 1] * 2


@pytest.mark.slow
@pytest.mark.process
def test_a_node_lost_before_a_durable_save_allows_a_new_start(tmp_path: Path, nodes: dict[str, WriterProcess]) -> None:
    """If a node with an unreplicated checkpoint in memory is lost, training starts from scratch."""
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    run(tmp_path / "ckpt", SAVE, nodes, 0, **config, tiers=["memory"])
    replace(nodes, "two")
    reports = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [one["loaded"] for one in reports] == [None, None]
    assert any("training starts from the beginning" in text and "rank 1" in text for text in reports[0]["warnings"])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("lost", ["folder", "checkpoint"])
def test_a_lost_durable_checkpoint_fails_the_load(tmp_path: Path, nodes: dict[str, WriterProcess], lost: str) -> None:
    """If a tracker shows a committed checkpoint whose copies are lost, the run fails instead of starting from scratch.

    The tracker is the other node's for a lost node folder, and its own for the global tier.
    """
    config: dict[str, Any] = {"replication": False}
    if lost == "checkpoint":
        config |= {"local_directory": None, "directory": str(tmp_path / "global")}
    run(tmp_path / "ckpt", SAVE, nodes, 0, **config)
    replace(nodes, "two")
    if lost == "checkpoint":
        shutil.rmtree(tmp_path / "global" / "step-1")
        assert (tmp_path / "global" / "latest").exists()
    else:
        shutil.rmtree(tmp_path / "ckpt" / "two")
    reports = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert all("none that all ranks can load" in one["error"] for one in reports), reports
