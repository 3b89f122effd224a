"""``report.html`` as a file: self-contained, safe and bounded, with the files of the run directory that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_ledger import make_ledger, write_run_files

from outlast.goodput.account import IncidentCost, Part, SaveSpan, SlowRanksWindow, Statistics
from outlast.goodput.ledger import Ledger
from outlast.report import attachments, page
from outlast.report.page import MAX_POINTS, bounded, embed, make_page, meanings, thin

HOSTILE = "</script><script>window.hacked=1</script><!--<img src=x onerror=hacked=1>&\u2028\u2029{{data}}{{page}}"
DOCS = Path(__file__).parents[2] / "docs"
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def contents(made: bytes) -> dict[str, Any]:
    """Return the data that a page shows."""
    match = _DATA.search(made.decode())
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_the_page_is_self_contained() -> None:
    """Its content security policy forbids everything that is not in the file, and it has no external address."""
    made = make_page(make_ledger()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in made
    addresses = re.findall(r"""\b(?:src|href)=["']([^"']*)["']""", made)
    assert all(address.startswith(("data:", "#")) for address in addresses), addresses
    assert not re.search(r"\burl\((?!\$\{)|@import|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\(", made)
    assert set(re.findall(r"https?://[^\s\"']+", made)) == {"http://www.w3.org/2000/svg"}
    assert "{{" not in made
    assert "innerHTML" not in made
    assert "insertAdjacentHTML" not in made
    assert "document.write" not in made


def test_any_text_stays_in_the_data() -> None:
    """Markup, script end tags, line separators and template placeholders in texts are data, each unchanged."""
    made = make_page(make_ledger(hostile=HOSTILE))
    assert made.count(b"</script>") == make_page(make_ledger()).count(b"</script>")
    data = _DATA.search(made.decode())
    assert data is not None
    assert not set("<>&\u2028\u2029") & set(data[1])
    shown = contents(made)
    assert shown["run"]["headline"].endswith(HOSTILE)
    assert shown["incidents"][0]["output"][1] == f"RuntimeError: {HOSTILE}"
    assert json.loads(embed({"<&>": HOSTILE})) == {"<&>": HOSTILE}


def test_the_page_of_a_large_run_is_below_ten_megabytes(tmp_path: Path) -> None:
    """1,024 ranks and 100 cycles, with stacks of each incident, fit into a page that opens quickly."""
    ledger = make_ledger(num_nodes=128, ranks_each=8, num_cycles=100)
    for cost in ledger.incidents:
        write_run_files(tmp_path, cycle=cost.cycle, rank=cost.rank or 0, text="x" * 30_000)
    made = make_page(ledger, run_dir=tmp_path)
    shown = contents(made)
    assert len(made) < 10_000_000
    assert len(shown["nodes"]["node"]) == 128 * 100
    assert len(shown["slow"]["columns"][0]["scores"]) == 1024
    with_text = [one for cost in shown["incidents"] for one in cost["files"] if "text" in one]
    assert 1_000_000 < sum(len(one["text"]) for one in with_text) <= attachments.TOTAL_BYTES
    left_out = [one for cost in shown["incidents"] for one in cost["files"] if "why_not" in one]
    assert all("left out" in one["why_not"] for one in left_out)
    assert left_out


def test_data_above_the_limits_is_thinned_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, incidents and nodes above the limits are omitted from the page, not from the sums; notes report it."""
    monkeypatch.setattr(page, "MAX_SEGMENTS", 20)
    monkeypatch.setattr(page, "MAX_INCIDENTS", 5)
    monkeypatch.setattr(page, "MAX_NODE_SPANS", 10)
    ledger = make_ledger(num_nodes=4, num_cycles=10)
    shown = contents(make_page(ledger))
    segments = shown["segments"]
    assert len(segments["start"]) <= 21
    assert segments["end"][-1] == ledger.wall_s
    assert segments["start"][1:] == segments["end"][:-1]
    assert sum(part["seconds"] for part in shown["parts"]) == pytest.approx(ledger.wall_s)
    assert len(shown["incidents"]) == 5
    kept = sorted((cost.cost_s for cost in ledger.incidents), reverse=True)[:5]
    assert sorted((one["cost"] for one in shown["incidents"]), reverse=True) == kept
    for part in ("stretches", "incidents that cost least", "only the nodes"):
        assert any(part in note for note in shown["notes"]), part


def test_thinning_keeps_extremes_and_order() -> None:
    """A curve of a long run keeps its highest and lowest points."""
    points = [(float(place), 1.0 if place != 77_777 else 99.0, place) for place in range(100_000)]
    kept = thin(points)
    assert len(kept) <= MAX_POINTS + 3
    assert (77_777.0, 99.0, 77_777) in kept
    assert kept == sorted(kept)
    assert thin(points[:10]) == points[:10]


def test_a_thinned_heat_map_keeps_the_lowest_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of scores a slow rank stays visible, and its window is still framed."""
    monkeypatch.setattr(page, "MAX_CELLS", 10_000)
    monkeypatch.setattr(page, "MAX_RANK_ROWS", 400)
    fast = dict.fromkeys(range(1_000), 1.0)
    slow = fast | {901: 0.0}
    windows = tuple(
        SlowRanksWindow(
            job="job-1", cycle=0, iteration=number, start_s=float(number), end_s=number + 1.0,
            named=(901,) if number == 50 else (), scores=slow if number == 50 else fast,
        )
        for number in range(100)
    )  # fmt: skip
    shown = contents(make_page(msgspec.structs.replace(make_ledger(num_cycles=1), slow_ranks=windows)))["slow"]
    assert sum(len(column["scores"]) for column in shown["columns"]) <= 10_000
    assert shown["ranks_each"] == 3
    assert shown["windows_each"] > 1
    (framed,) = [column for column in shown["columns"] if column["named"]]
    assert framed["named"] == [901]
    assert framed["scores"][901 // shown["ranks_each"]] == "A"
    assert framed["scores"].count("A") == 1


def test_meanings_come_from_the_docstrings_of_the_source() -> None:
    """The meaning of each part is written once, in the source."""
    texts = meanings(Part)
    assert list(texts) == [str(part) for part in Part]
    assert texts["save_stall"] == "Training waited for a save."
    assert all(text.endswith(".") for text in texts.values())


def test_evidence_is_cut_to_a_bounded_size() -> None:
    """Long texts, long lists, deep nesting and numbers without a JSON form are shown in part."""
    value = {
        "text": "x" * 100_000,
        "list": list(range(1_000)),
        "nan": float("nan"),
        "deep": {"a": {"b": {"c": {"d": {"e": {}}}}}},
    }
    cut = bounded(value)
    assert len(json.dumps(cut)) < 10_000
    assert cut["nan"] == "nan"
    assert cut["list"][-1] == "and 800 more"


def test_an_incident_has_stacks_traceback_and_diagnosis(tmp_path: Path) -> None:
    """Other ranks at the same place are one entry; the incident's own rank comes first."""
    write_run_files(tmp_path)
    files = contents(make_page(make_ledger(), run_dir=tmp_path))["incidents"][0]["files"]
    titles = [one["title"] for one in files]
    assert titles[0] == "Stack of rank 1"
    assert "Stack of ranks 0, 2-3" in titles
    assert "Traceback and last output of rank 1" in titles
    assert "Diagnosis of rank 1" in titles
    assert "line 127 in main" in files[0]["text"]
    assert files[0]["path"] == "stacks/cycle-0/rank-1.txt"


def test_stacks_of_a_later_job_are_not_shown(tmp_path: Path) -> None:
    """The names of stack files lack the job, so stacks of other processes are omitted by their pid."""
    write_run_files(tmp_path, pid=999)
    files = contents(make_page(make_ledger(), run_dir=tmp_path))["incidents"][0]["files"]
    assert not [one for one in files if one["title"].startswith("Stack")]
    assert [one for one in files if one["title"].startswith("Traceback")]


def test_no_file_outside_the_run_directory_is_read(tmp_path: Path) -> None:
    """A path in the evidence, a symbolic link and a job's name cannot lead out of the run directory."""
    run_dir = tmp_path / "run"
    write_run_files(run_dir)
    secret = tmp_path / "secret.txt"
    secret.write_text("TOP-SECRET (pid 4711)")
    for path in (run_dir / "stacks/cycle-0/rank-1.txt", run_dir / "failures/job-1-cycle-0/rank-1.txt"):
        path.unlink()
        path.symlink_to(secret)
    ledger = make_ledger()
    stolen = ledger.incidents[0].evidence | {"file": str(secret)}
    first = msgspec.structs.replace(ledger.incidents[0], evidence=stolen)
    second = msgspec.structs.replace(ledger.incidents[1], job="../../")
    made = make_page(msgspec.structs.replace(ledger, incidents=(first, second)), run_dir=run_dir)
    assert b"TOP-SECRET" not in made


def test_a_long_file_shows_its_first_and_last_lines(tmp_path: Path) -> None:
    """Of a traceback with megabytes of output the beginning and the end are shown."""
    write_run_files(tmp_path)
    path = tmp_path / "failures/job-1-cycle-0/rank-1.txt"
    path.write_text("BEGIN" + "\n".join(["filler"] * 1_000_000) + "END")
    files = contents(make_page(make_ledger(), run_dir=tmp_path))["incidents"][0]["files"]
    (one,) = [one for one in files if one["title"].startswith("Traceback and last output of rank 1")]
    assert one["text"].startswith("BEGIN")
    assert one["text"].endswith("END")
    assert "bytes are left out" in one["text"]
    assert len(one["text"]) < 30_000


def test_a_run_without_data_makes_a_page() -> None:
    """Cycles, incidents, saves and reporting ranks are each optional."""
    ledger = make_ledger(num_cycles=1)
    bare = msgspec.structs.replace(
        ledger, wall_s=0.0, ettr=None, cycles=(), incidents=(), warned=(), segments=(), saves=(), loads=(),
        slow_ranks=(), steps=(), clocks=(), notes=(), jobs=(), partition={},
    )  # fmt: skip
    shown = contents(make_page(bare))
    assert shown["slow"] is None
    assert [part["seconds"] for part in shown["parts"]] == [0.0] * len(Part)


def test_unknown_values_are_null() -> None:
    """An unfinished incident and an uncommitted save have null, not 0, for values that are not known."""
    ledger = make_ledger()
    cost = IncidentCost(
        index=0, kind="node_lost", text="node x is lost", recovery_level="", job="job-1", cycle=0, at_s=5.0
    )
    saves = (SaveSpan(job="job-1", cycle=0, iteration=5, at_s=9.0),)
    shown = contents(make_page(msgspec.structs.replace(ledger, incidents=(cost,), saves=saves, loads=())))
    assert shown["incidents"][0]["recovered"] is None
    assert shown["incidents"][0]["load"] is None
    assert shown["saves"]["tiers"] == {"none": {"num": 1, "newest": 5, "num_bytes": 0, "at": 9.0}}
    assert shown["saves"]["duration"] == []


def test_the_docs_cover_every_part_and_field() -> None:
    """``docs/report.md`` has each part with its meaning, and each field of the JSON."""
    text = DOCS.joinpath("report.md").read_text()
    for name, meaning in meanings(Part).items():
        assert f"| `{name}` | {meaning} |" in text, name
    for struct in (Ledger, IncidentCost, Statistics):
        for name in struct.__struct_fields__:
            assert f"| `{name}` | " in text, name
