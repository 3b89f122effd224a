"""What is left of a first save that was cut short keeps no run from beginning; nothing durable is ever given up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from saving_ranks import start

from outlast.checkpoint.writer_client import WriterProcess

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
def ask_or_die(request, *rest, **more):
    if rank == 1 and isinstance(request, protocol.KeepPart):
        kill_self()
    return ask(request, *rest, **more)
manager._writer.ask = ask_or_die
train()
manager.save(state, 1).wait(100)
kill_self()
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
    """Rank 1 is killed before its writer keeps the first generation: the run begins anew, warns, saves, and that
    generation is loaded in the next cycle."""
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    run(tmp_path / "ckpt", CUT_SHORT, nodes, 0, **config)
    shutil.rmtree(tmp_path / "global", ignore_errors=True)  # rank 0 may have begun the global save
    first = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [told["loaded"] for told in first] == [None, None]
    assert any("the run begins anew" in text for text in first[0]["warnings"])
    assert not any("the run begins anew" in text for text in first[1]["warnings"])
    assert [told["loaded"] for told in run(tmp_path / "ckpt", LOAD, nodes, 2, **config)] == [1, 1]


@pytest.mark.slow
@pytest.mark.process
def test_a_node_lost_before_anything_was_durable_lets_the_run_begin_anew(
    tmp_path: Path, nodes: dict[str, WriterProcess]
) -> None:
    """A generation in memory alone, unreplicated, of which a node is lost: it was never promised to survive that."""
    config: dict[str, Any] = {"local_directory": None, "directory": str(tmp_path / "global"), "replication": False}
    run(tmp_path / "ckpt", SAVE, nodes, 0, **config, tiers=["memory"])
    replace(nodes, "two")
    told = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert [one["loaded"] for one in told] == [None, None]
    assert any("the run begins anew" in text and "rank 1" in text for text in told[0]["warnings"])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("lost", ["folder", "generation"])
def test_a_durable_generation_that_is_lost_is_not_given_up(
    tmp_path: Path, nodes: dict[str, WriterProcess], lost: str
) -> None:
    """Where a directory shows that a generation was committed, a run whose copies are gone ends and begins nothing: of
    a node's folder, by its tracker beside the other node's, of the global tier by its own."""
    config: dict[str, Any] = {"replication": False}
    if lost == "generation":
        config |= {"local_directory": None, "directory": str(tmp_path / "global")}
    run(tmp_path / "ckpt", SAVE, nodes, 0, **config)
    replace(nodes, "two")
    if lost == "generation":
        shutil.rmtree(tmp_path / "global" / "step-1")
        assert (tmp_path / "global" / "latest").exists()
    else:
        shutil.rmtree(tmp_path / "ckpt" / "two")
    told = run(tmp_path / "ckpt", LOAD, nodes, 1, **config)
    assert all("none that all ranks can load" in one["error"] for one in told), told
