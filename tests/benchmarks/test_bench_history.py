"""Stored results of benchmarks: they are read in one way, and their history survives a crash."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.results import (
    HISTORY,
    SuiteRecord,
    append_record,
    compare_records,
    read_folder,
    read_history,
)
from outlast.errors import ConfigError
from outlast.simulate.benchmark_results import Bar

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
MACHINE = {"processor": "one", "cores": 2, "memory_gib": 8.0, "kernel": "6.1", "python": "3.11", "torch": "2.13"}


def bar(value: float | None, **fields: Any) -> Bar:
    known = {"bench": "restart", "name": "death_ms", "unit": "ms", "bar": 30.0} | fields
    return Bar(value=value, **known)


def record(*bars: Bar, day: int = 1, **machine: Any) -> SuiteRecord:
    date = f"2026-01-{day:02d}T00:00:00.000Z"
    return SuiteRecord(
        date=date, commit="abcdef012345", version="0.2.0", machine=MACHINE | machine, ok=True, bars=[*bars]
    )


def compare_values(*values: float | None, noise_pct: float = 20.0, **fields: Any) -> tuple[float | None, str]:
    records = [record(bar(value, **fields), day=day) for day, value in enumerate(values, 1)]
    (found,) = compare_records(records, noise_pct=noise_pct)[0].bars
    return found.change and round(found.change, 6), found.moved


# -- the file --------------------------------------------------------------------------------------------------------


def test_runs_are_appended_in_order(tmp_path: Path) -> None:
    """Each run is one more line of JSON, and is read as it was written."""
    runs = [record(bar(10.0)), record(bar(12.5), bar(None, name="hang_ms"), day=2)]
    for one in runs:
        append_record(tmp_path, one)
    lines = (tmp_path / HISTORY).read_text().splitlines()
    assert [json.loads(line)["date"][:10] for line in lines] == ["2026-01-01", "2026-01-02"]
    assert read_history(tmp_path) == (runs, 0)


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    """A line that a crash cut short is skipped and counted; the next run starts a new line."""
    first, second, third = (record(bar(float(day)), day=day) for day in (1, 2, 3))
    append_record(tmp_path, first)
    append_record(tmp_path, second)
    content = (tmp_path / HISTORY).read_bytes()
    (tmp_path / HISTORY).write_bytes(content[:-20])
    assert read_history(tmp_path) == ([first], 1)
    append_record(tmp_path, third)
    assert read_history(tmp_path) == ([first, third], 1)


def test_a_missing_history_is_one_error_line(tmp_path: Path) -> None:
    """A folder without a history is rejected with the command that writes one."""
    with pytest.raises(ConfigError, match="python -m benchmarks all --results"):
        read_history(tmp_path)


def test_a_damaged_result_is_rejected(tmp_path: Path) -> None:
    """The error names a result that cannot be read; other JSON files of the folder are ignored."""
    (tmp_path / "other.json").write_text('{"adapters": []}')
    assert read_folder(tmp_path) == {}
    (tmp_path / "save.json").write_text('{"bench": "save", "mach')
    with pytest.raises(ConfigError, match=r"save\.json"):
        read_folder(tmp_path)


# -- comparison of runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        ((10.0, 11.0), {}, (10.0, "")),
        ((10.0, 13.0), {}, (30.0, "worse")),
        ((10.0, 7.0), {}, (-30.0, "better")),
        ((10.0, 13.0), {"is_floor": True}, (30.0, "better")),
        ((10.0, 7.0), {"is_floor": True}, (-30.0, "worse")),
        ((10.0, None, 13.0), {}, (30.0, "worse")),
        ((-0.5, -0.45), {"unit": "%", "bar": 0.5}, (0.05, "")),
        ((-0.5, 0.1), {"unit": "%", "bar": 0.5}, (0.6, "worse")),
        ((0.0, 0.0), {}, (0.0, "")),
        ((0.0, 1.0), {}, (None, "")),
        ((10.0,), {}, (None, "")),
        ((None, None), {}, (None, "")),
    ],
)
def test_a_change_beyond_the_noise_is_marked(
    values: tuple[float | None, ...], fields: dict[str, Any], expected: tuple[float | None, str]
) -> None:
    """A result that changed by more than the noise is marked better or worse, by the direction of its bar."""
    assert compare_values(*values, **fields) == expected


def test_the_noise_is_configurable() -> None:
    """The caller sets the percentage that counts as noise."""
    assert compare_values(10.0, 11.0, noise_pct=5)[1] == "worse"
    assert compare_values(10.0, 13.0, noise_pct=50)[1] == ""


def test_only_runs_on_equal_machines_are_compared() -> None:
    """Each kind of machine has its own history and its own best value."""
    runs = [record(bar(10.0)), record(bar(99.0), day=2, cores=64), record(bar(20.0), day=3, memory_gib=8.2)]
    small, large = compare_records(runs)
    assert (small.cores, large.cores) == (2, 64)
    assert small.bars[0].values == [10.0, 20.0]
    assert (small.bars[0].best, small.bars[0].change_from_best, small.bars[0].moved) == (10.0, 100.0, "worse")
    assert (large.bars[0].values, large.bars[0].change) == ([99.0], None)


def test_the_command_shows_values_changes_and_marks(tmp_path: Path) -> None:
    """The table has the newest values with their days, the change and the mark; --json has the same; --bar selects one
    result, and an unknown one is rejected with the nearest name."""
    for day, value in enumerate((10.0, 12.0, 18.0), 1):
        append_record(tmp_path, record(bar(value), bar(1.0, name="hang_ms"), day=day))

    def show(*words: str) -> str:
        done = CliRunner().invoke(cli, ["history", str(tmp_path), *words], standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.stdout.replace("\N{NO-BREAK SPACE}", " ")

    (row,) = [line for line in show("--bar", "death_ms").splitlines() if "death_ms" in line]
    for part in ("10 ms", "12 ms", "18 ms", "+50 %", "+80 %", "worse"):
        assert part in row
    assert "2026-01-03" in show()
    (machine,) = json.loads(show("--json"))["machines"]
    assert [one["moved"] for one in machine["bars"]] == ["worse", ""]
    with pytest.raises(ConfigError, match=r"'death_s'; did you mean 'restart\.death_ms'"):
        show("--bar", "death_s")


# -- tables of the docs ----------------------------------------------------------------------------------------------


def test_doc_tables_are_generated_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's table shows a ratio as its two values, with the day and the machine of the result; generating it
    again changes nothing."""
    one = {"name": "restart_vs_torchrun_4", "value": 0.05, "unit": "x", "bar": 0.06, "ok": True}
    one |= {"peer": "torchrun, c10d (s)", "peer_value": 2.0}
    result = {"bench": "restart", "machine": MACHINE | {"date": "2026-01-02", "outlast": "0.2.0"}, "bars": [one]}
    (tmp_path / "restart.json").write_text(json.dumps(result))
    render = runpy.run_path(str(ROOT / "docs" / "generate.py"))["render"]
    monkeypatch.setitem(render.__globals__, "RESULTS", tmp_path)
    page = render("<!-- table: headline-figures -->\n<!-- end -->\n")
    assert render(page) == page
    text = page.replace("\N{NO-BREAK SPACE}", " ")
    assert "| 100 ms | 2 s | torchrun, c10d |" in text
    assert "\nMeasured 2026-01-02, 2 cores of one, 8 GiB, Linux 6.1, Python 3.11, torch 2.13, outlast 0.2.0.\n" in text
