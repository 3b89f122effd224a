"""The view: everything told once, in whole words; and a picture that agrees with what was told."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from terminal import seen
from written_events import written

from outlast.demo.plan import Loss, RankScene, Scene, Shape
from outlast.demo.view import LiveView, PlainView, SilentView
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung, Verdict

SHAPE = Shape(num_nodes=1, nproc_per_node=2, iterations=100)
WIDTHS = (60, 80, 100, 200)


def event(kind: EventKind, number: float, *, cycle: int = 0, iteration: int = 30, **data: object) -> Event:
    return written(kind, number, rank=0, iteration=iteration, cycle=cycle, **data)


def started(number: float, cycle: int) -> Event:
    return event(EventKind.CYCLE_STARTED, number, cycle=cycle, ranks=[0, 1], world_size=2, node_rank=0)


def restored(number: float, cycle: int) -> Event:
    facts: dict[str, object] = {"tier": "replica", "rejected": [], "bytes_read": {"replica": 4_600_000}}
    return event(EventKind.RESTORED, number, cycle=cycle, **facts)


def decided(number: float, cycle: int, *, exit_code: int | None = None) -> Event:
    rung = Rung.RESTART_WORKERS if exit_code is None else Rung.STOP
    reason = (
        "rank 1 on node node-0 (pid 4711) was ended by SIGKILL in section 'step/forward' at iteration 30, in "
        "model.blocks.3.mlp.0.weight; restarting the workers, going on from iteration 30 (restart 1 of 3 without "
        "progress)"
    )
    verdict = msgspec.to_builtins(Verdict(rung=rung, reason=reason, exit_code=exit_code))
    return event(EventKind.VERDICT, number, cycle=cycle, verdict=verdict)


def training(*iterations: int, cycle: int = 0) -> tuple[RankScene, ...]:
    return tuple(
        RankScene(rank=rank, node="node-0", pid=11 + rank, cycle=cycle, iteration=iteration, section="step")
        for rank, iteration in enumerate(iterations)
    )


def scene() -> Scene:
    died = msgspec.to_builtins(Incident(kind=IncidentKind.WORKER_DIED, node="node-0", rank=1, exit_code=-9))
    events = [
        event(EventKind.NODE_JOINED, 1, name="node-1", spare=True),
        started(2, 0),
        event(EventKind.FAULT_SIMULATED, 3, fault="SIGKILL of a rank", target="rank 1 (pid 12)"),
        event(EventKind.INCIDENT, 4, incident=died),
        decided(5, 0),
        started(6, 1),
        restored(7, 1),
        event(EventKind.PROGRESS, 8, cycle=1),
    ]
    loss = Loss(iteration=30, value=2.5)
    return Scene(ranks=training(31, cycle=1), events=events, loss=loss, running=("node-0", "node-1"))


def told_plain(*scenes: Scene, width: int) -> list[str]:
    lines: list[str] = []
    view = PlainView(SHAPE, lines.append, width=width)
    with view.act("With faults: 1 nodes x 2 ranks"):
        for one in scenes:
            view.show(one)
    return "\n".join(lines).splitlines()


def shown_live(*scenes: Scene, width: int, height: int = 40) -> tuple[list[str], list[str]]:
    """Return what stands on the terminal with the last scene's screen, and what stays there after it."""
    file = io.StringIO()
    view = LiveView(SHAPE, Console(file=file, force_terminal=True, width=width, height=height))
    with view.act("With faults: 1 nodes x 2 ranks"):
        for one in scenes:
            view._next_s = 0.0  # as if the time of the next picture had come
            view.show(one)
        during = seen(file.getvalue(), width)
    return during, seen(file.getvalue(), width)


def test_plain_lines_tell_each_event_once() -> None:
    """The same scene shown twice adds nothing; a new act begins anew."""
    lines: list[str] = []
    view = PlainView(SHAPE, lines.append, width=200)
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
        "decided: rank 1",
        "rank 0: restored iteration 30 from replica, 4.6 MB",
        "iteration 30 of 100, loss 2.5000",
    ):
        assert told.count(part) == 1, part
    with view.act("Second"):
        view.show(scene())
    assert lines[len(first) :] == ["Second", *first[1:]]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_is_broken(width: int) -> None:
    """Each line fits, and is made of the words that it has where there is room for everything; so is the picture."""
    words, of_picture = set(" ".join(told_plain(scene(), width=1000)).split()), picture_words(1000)
    lines = told_plain(scene(), width=width)
    assert max(map(len, lines)) <= width
    assert set(" ".join(lines).split()) == words
    during, _ = shown_live(scene(), width=width)
    assert during[: len(lines)] == lines
    assert picture_words(width) == of_picture


def picture_words(width: int) -> set[str]:
    during, _ = shown_live(scene(), width=width)
    picture = during[len(told_plain(scene(), width=width)) :]
    return {word for line in picture for word in line.split() if word.strip("━╸╺")}


def test_a_word_longer_than_a_line_stays_whole() -> None:
    """It has a line of its own; what reads it can be searched for it."""
    path = "/somewhere/" + "x" * 100
    (struck,) = (one for one in scene().events if one.kind == EventKind.FAULT_SIMULATED)
    long = msgspec.structs.replace(struck, data={**struck.data, "target": path + ","})
    assert any(path in line for line in told_plain(Scene(ranks=(), events=[long]), width=80))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("height", [12, 24])
def test_the_screen_has_the_newest_lines_and_is_gone_afterwards(width: int, height: int) -> None:
    """However much happened, all fits on the screen, above the picture; only the title stays."""
    many = [event(EventKind.NODE_JOINED, 9 + number, name=f"late-{number}", spare=True) for number in range(60)]
    busy = dataclasses.replace(scene(), events=[*scene().events, *many])
    during, after = shown_live(scene(), busy, width=width, height=height)
    assert after == ["With faults: 1 nodes x 2 ranks"]
    assert len(during) <= height
    assert any(line.startswith("iteration 31 of 100") for line in during)
    told = [number for number in range(60) if any(f"late-{number} waits as a spare" in line for line in during)]
    assert told[-1:] == [59]
    assert told == list(range(told[0], 60))


def test_a_pipe_is_told_everything() -> None:
    """What happens between two cycles, in one moment, after the last look, or more than a screen of it."""
    many = [event(EventKind.NODE_JOINED, 9 + number, name=f"late-{number}", spare=True) for number in range(60)]
    first, between = scene(), dataclasses.replace(scene(), ranks=(), events=[*scene().events, *many])
    plain = told_plain(first, between, width=100)
    for number in range(60):
        assert sum(line.endswith(f"late-{number} waits as a spare") for line in plain) == 1


def test_the_picture_agrees_with_what_was_told() -> None:
    """Its iteration is that of the newest cycle: it goes back with a restore, says when there is none, and the loss has
    the iteration that it is of."""
    events = [started(1, 0)]
    at_first = Scene(ranks=(), events=events)
    before = Scene(ranks=training(34, 33), events=events, loss=Loss(iteration=30, value=2.5))
    events = [*events, decided(2, 0)]
    ended = dataclasses.replace(before, events=events)
    again = dataclasses.replace(before, events=[*events, started(3, 1)], ranks=training(0, 0, cycle=1))
    back = dataclasses.replace(again, events=[*again.events, restored(4, 1)])
    done = [*back.events, event(EventKind.SESSION_ENDED, 5, cycle=1, iteration=100, exit_code=0)]
    last = dataclasses.replace(back, events=[*done, decided(6, 1, exit_code=0)])
    scenes = (at_first, before, ended, again, back, last)
    expected = (
        "starting  cycle 0",
        "iteration 34 of 100  cycle 0  loss 2.5000 at 30",
        "starting again after iteration 34  cycle 0  loss 2.5000 at 30",
        "starting again after iteration 34  cycle 1  loss 2.5000 at 30",
        "iteration 30 of 100  cycle 1  loss 2.5000 at 30",
        "iteration 100 of 100  cycle 1  loss 2.5000 at 30",
    )
    for number, line in enumerate(expected, 1):
        during, _ = shown_live(*scenes[:number], width=100)
        assert line in during
    assert told_plain(before, last, width=80)[-1].strip() == "iteration 100 of 100, the last one"


def test_the_picture_shows_ranks_and_spares() -> None:
    """On a terminal: progress, each rank (also one that is away), the spare, and what happened."""
    during, _ = shown_live(scene(), width=80)
    picture = [line.split() for line in during]
    assert ["rank", "node", "pid", "iteration", "in", "section"] in picture
    assert ["0", "node-0", "11", "31", "step"] in picture
    assert ["1", "-", "-", "-"] in picture
    assert ["node-1", "waits", "as", "a", "spare"] in picture


IN_A_TERMINAL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from outlast.cli.demo import demo
from outlast.demo import show
from test_demo_view import scene
from test_outcome import GOOD

def perform(shape, *, view, **others):
    with view.act("With faults"):
        view.show(scene())
    return GOOD

show.perform = perform
sys.exit(demo.main([], standalone_mode=False))
"""


def run_in_terminal(**environment: str) -> str:
    """Return the bytes that the command writes to a terminal, with a show that is over at once."""
    master, slave = os.openpty()
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    try:
        with subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL], stdin=slave, stdout=slave, env={**inherited, **environment}
        ) as command:
            os.close(slave)
            shown = b""
            while data := _read(master):
                shown += data
        assert command.returncode == 0, shown
    finally:
        os.close(master)
    return shown.decode().replace("\r\n", "\n")  # what the terminal itself makes of the end of a line


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # nobody holds the other end any more
        return b""


@pytest.mark.process
@pytest.mark.parametrize("plain", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}], ids=["dumb", "no colour"])
def test_a_terminal_that_wants_plain_text_gets_it(plain: dict[str, str]) -> None:
    """No colour, no cursor that moves, no carriage return."""
    shown = run_in_terminal(**plain)
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "FAULT: SIGKILL of a rank" in shown
    assert "bit-identical" in shown


@pytest.mark.process
def test_a_terminal_that_can_do_more_gets_the_picture() -> None:
    """Colours and a screen that changes; in the end the outcome stands there, and the cursor is seen again."""
    shown = run_in_terminal(TERM="xterm")
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") > 0
    assert "FAULT: SIGKILL of a rank: rank 1 (pid 12), at iteration 30" in shown
    title, *closing = seen(shown, 80)
    assert title == "With faults"
    assert len(closing) <= 10
    assert closing[-1].startswith("bit-identical")


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json nothing but the object is printed."""
    view = SilentView(SHAPE)
    with view.act("With faults"):
        view.show(scene())
    assert capsys.readouterr() == ("", "")
