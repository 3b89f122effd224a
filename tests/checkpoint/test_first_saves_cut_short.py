"""What is left of a first save that was cut short keeps no run from beginning; nothing durable is ever given up."""

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
    """Two nodes' writers."""
    writers = {name: WriterProcess() for name in ("one", "two")}
    yield writers
    for writer in writers.values():
        writer.close()


def run(folder: Path, script: str, nodes: dict[str, WriterProcess], cycle: int, **config: Any) -> list[Any]:
    """Run a script on two ranks; return what each said, or its exit code."""
    tiers = config.pop("tiers", None)
    ended = start(
        folder, f"CONFIG = {config!r}\nTIERS = {tiers!r}\n" + script, world=2, cycle=cycle, nodes=nodes, timeout_s=120
    )
    return [told if isinstance(told, dict) else (code, told) for code, told in ended]


def replace(nodes: dict[str, WriterProcess], name: str) -> None:
    """Lose a node's memory."""
    nodes[name].close()
    nodes[name] = WriterProcess()


@pytest.mark.slow
@pytest.mark.process
def test_a_first_save_in_one_ranks_memory_only_lets_the_run_begin_anew(
    tmp_path: Path, nodes: dict[str, WriterProcess]
) -> None:
    """Rank 1 is killed before its writer prepares the first checkpoint: training starts from the beginning, warns and
    saves, and that checkpoint is loaded in the next cycle."""
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    cut = "EARLIER, DYING, BEFORE, REACHED = False, 1, 'PreparePart', 'PreparePart'"
    run(tmp_path / "ckpt", cut + CUT_SHORT, nodes, 0, **config)
    first = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [told["loaded"] for told in first] == [None, None]
    assert any("training starts from the beginning" in text for text in first[0]["warnings"])
    assert not any("training starts from the beginning" in text for text in first[1]["warnings"])
    assert [told["loaded"] for told in run(tmp_path / "ckpt", LOAD, nodes, 2, **config)] == [1, 1]


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
def test_a_rank_killed_while_a_save_is_kept_costs_no_checkpoint(
    tmp_path: Path, nodes: dict[str, WriterProcess], num_nodes: int, dying: int, before: str, reached: str, loaded: int
) -> None:
    """Memory alone: one rank dies before its node's writer prepares or keeps the second checkpoint, the other just
    after its own did that, or leaves by itself. Either all ranks have the second, or all still have the first."""
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    if num_nodes == 1:
        nodes.pop("two").close()
    cut = f"EARLIER, DYING, BEFORE, REACHED = True, {dying}, {before!r}, {reached!r}"
    run(tmp_path / "ckpt", cut + CUT_SHORT, nodes, 0, **config)
    told = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [one["loaded"] for one in told] == [loaded] * 2
    assert [one["loaded"] for one in run(tmp_path / "ckpt", LOAD, nodes, 2, **config)] == [loaded + 1] * 2


@pytest.mark.slow
@pytest.mark.process
def test_a_node_lost_before_anything_was_durable_lets_the_run_begin_anew(
    tmp_path: Path, nodes: dict[str, WriterProcess]
) -> None:
    """A checkpoint in memory alone, unreplicated, of which a node is lost: it was never promised to survive that."""
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    run(tmp_path / "ckpt", SAVE, nodes, 0, **config, tiers=["memory"])
    replace(nodes, "two")
    told = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [one["loaded"] for one in told] == [None, None]
    assert any("training starts from the beginning" in text and "rank 1" in text for text in told[0]["warnings"])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("lost", ["folder", "checkpoint"])
def test_a_durable_checkpoint_that_is_lost_is_not_given_up(
    tmp_path: Path, nodes: dict[str, WriterProcess], lost: str
) -> None:
    """Where a directory shows that a checkpoint was committed, a run whose copies are gone ends and begins nothing: of
    a node's folder, by its tracker beside the other node's, of the global tier by its own."""
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
    told = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert all("none that all ranks can load" in one["error"] for one in told), told
