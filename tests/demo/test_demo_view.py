"""The view: everything told once, in lines or in a picture."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from written_events import written

from outlast.demo.plan import Shape
from outlast.demo.scene import RankScene, Scene
from outlast.demo.view import LiveView, PlainView, SilentView
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung, Verdict

SHAPE = Shape(num_nodes=1, nproc_per_node=2, iterations=100)


def event(kind: EventKind, number: int, **data: object) -> Event:
    return written(kind, number, rank=0, iteration=30, **data)


def scene() -> Scene:
    died = msgspec.to_builtins(Incident(kind=IncidentKind.WORKER_DIED, node="node-0", rank=1, exit_code=-9))
    again = msgspec.to_builtins(Verdict(rung=Rung.RESTART_WORKERS, reason="restarting the workers"))
    events = [
        event(EventKind.NODE_JOINED, 1, name="node-1", spare=True),
        event(EventKind.CYCLE_STARTED, 2, ranks=[0, 1], world_size=2, node_rank=0),
        event(EventKind.FAULT_SIMULATED, 3, fault="SIGKILL of a rank", target="rank 1 (pid 12)"),
        event(EventKind.INCIDENT, 4, incident=died),
        event(EventKind.VERDICT, 5, verdict=again, incident=died),
        event(EventKind.RESTORED, 6, tier="replica", rejected=[], bytes_read={"replica": 4_600_000}),
        event(EventKind.PROGRESS, 7),
    ]
    ranks = (RankScene(rank=0, node="node-0", pid=11, cycle=0, iteration=31, section="step"),)
    return Scene(ranks=ranks, events=events, loss=2.5, running=("node-0", "node-1"))


def test_plain_lines_tell_each_event_once() -> None:
    """The same scene shown twice adds nothing; a new act begins anew."""
    lines: list[str] = []
    view = PlainView(SHAPE, lines.append)
    with view.act("First"):
        view.show(scene())
        first = list(lines)
        view.show(scene())
    assert lines == first
    assert lines[0] == "First"
    told = "\n".join(lines)
    for part in (
        "node-1 waits as a spare",
        "cycle 0: node-0 runs ranks 0-1 of 2",
        "FAULT: SIGKILL of a rank: rank 1 (pid 12), at iteration 30",
        "noticed by node-0: rank 1 on node node-0 was ended by SIGKILL",
        "decided: restarting the workers",
        "rank 0: restored iteration 30 from replica, 4.6 MB",
        "iteration 31 of 100, loss 2.5000",
    ):
        assert told.count(part) == 1, part
    with view.act("Second"):
        view.show(scene())
    assert lines[len(first) :] == ["Second", *first[1:]]


def test_the_picture_shows_ranks_loss_and_story() -> None:
    """On a terminal: progress, each rank (also one that is away), the spare, and what happened."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    view = LiveView(SHAPE, console)
    with view.act("With faults"):
        view.show(scene())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("With faults", "2.5000", "waits as a spare", "step", "FAULT", "decided"):
        assert part in shown


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json nothing but the object is printed."""
    view = SilentView(SHAPE)
    with view.act("With faults"):
        view.show(scene())
    assert capsys.readouterr() == ("", "")
