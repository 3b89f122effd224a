"""A demo that cannot show what it is to show says so, and keeps what is needed to see why."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from test_outcome import GOOD
from written_events import written

from outlast.cli.main import main
from outlast.demo import show, stage
from outlast.demo.outcome import DemoOutcome
from outlast.demo.plan import Shape
from outlast.demo.view import SilentView
from outlast.incidents import EventKind

SHAPE = Shape(num_nodes=1, nproc_per_node=1)


@pytest.mark.slow
@pytest.mark.process
def test_a_training_that_fails_is_told_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code, the end of the output and the folder are told; nothing is called identical."""
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('the text cannot be read')")
    monkeypatch.setattr(show, "find_example", lambda: script)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tails: list[str] = []
    outcome = show.perform(SHAPE, seed=0, keep=None, view=SilentView(SHAPE), on_failure=tails.append)
    assert not outcome.ok
    assert not outcome.bit_identical
    assert any("the agent of node-0 ended with exit code 1" in problem for problem in outcome.problems)
    assert any("no result" in problem for problem in outcome.problems)
    (tail,) = tails
    assert "the text cannot be read" in tail
    assert outcome.folder is not None
    assert Path(outcome.folder).parent == tmp_path
    assert list(Path(outcome.folder).glob("undisturbed/run/journal/*.jsonl"))
    assert not Path(outcome.folder, "with-faults").exists(), "there is nothing to compare with"


def test_a_script_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its script the demo ends with exit code 1 and a line that says what to do, not with a traceback."""
    monkeypatch.setattr(stage, "_candidates", lambda: [])
    monkeypatch.setattr(sys, "argv", ["outlast", "demo", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (1, "")
    assert "train_gpt.py is not installed; reinstall outlast" in err
    assert len(err.splitlines()) == 1


@pytest.fixture
def perform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DemoOutcome]:
    """Perform a demo whose two runs are over at once, and good."""

    def run_both(shape: Shape, seed: int, faults: object, script: Path, folder: Path, *others: object) -> DemoOutcome:
        for name in ("undisturbed", "with-faults"):
            (folder / name / "run" / "journal").mkdir(parents=True)
        started = written(EventKind.CYCLE_STARTED, ranks=[0], world_size=1)
        (folder / "with-faults" / "run" / "journal" / "node-0-agent.jsonl").write_bytes(
            msgspec.json.encode(started) + b"\n"
        )
        return GOOD

    monkeypatch.setattr(show, "_run_both", run_both)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def play(**options: object) -> DemoOutcome:
        settings = {"seed": 0, "keep": None, "view": SilentView(Shape()), "on_failure": lambda tails: None, **options}
        return show.perform(Shape(), **settings)

    return play


def test_of_a_good_demo_only_the_page_stays(perform: Callable[..., DemoOutcome], tmp_path: Path) -> None:
    """Its path is told; what the runs wrote is gone, unless it is kept; for a program nothing stays."""
    assert perform().report is None
    assert list(tmp_path.iterdir()) == []
    outcome = perform(writes_page=True)
    assert outcome.folder is None
    page = Path(str(outcome.report))
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert list(tmp_path.rglob("*")) == [page.parent, page]
    kept = tmp_path / "kept"
    outcome = perform(writes_page=True, keep=str(kept))
    assert (outcome.folder, outcome.report) == (str(kept), str(kept / "report.html"))
    assert {one.name for one in kept.iterdir()} == {"report.html", "undisturbed", "with-faults"}


@pytest.mark.process
def test_a_training_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded, and what still runs is ended with the demo."""
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(show, "find_example", lambda: script)
    monkeypatch.setattr(show, "_STARTING_S", 1.0)
    monkeypatch.setattr(show, "_PER_ITERATION_S", 0.0)
    view = SilentView(SHAPE)
    outcome = show.perform(SHAPE, seed=0, keep=str(tmp_path / "kept"), view=view, on_failure=lambda tails: None)
    assert outcome.problems == ("the training did not end within 1 s",)
    assert outcome.folder == str(tmp_path / "kept")
