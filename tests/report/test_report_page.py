"""``report.html`` as a file: self-contained, safe, bounded; what it shows of the run directory's own files."""

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
    """Return what a page shows."""
    match = _DATA.search(made.decode())
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_the_page_is_one_file_that_loads_nothing() -> None:
    """Its policy forbids whatever is not in it, and it names no address at all."""
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


def test_whatever_a_text_holds_stays_in_the_data() -> None:
    """Markup, ends of scripts, line separators and places of the template are data, each as it was."""
    made = make_page(make_ledger(hostile=HOSTILE))
    assert made.count(b"</script>") == make_page(make_ledger()).count(b"</script>")
    data = _DATA.search(made.decode())
    assert data is not None
    assert not set("<>&\u2028\u2029") & set(data[1])
    shown = contents(made)
    assert shown["run"]["headline"].endswith(HOSTILE)
    assert shown["incidents"][0]["output"][1] == f"RuntimeError: {HOSTILE}"
    assert json.loads(embed({"<&>": HOSTILE})) == {"<&>": HOSTILE}


def test_a_large_run_makes_a_page_below_ten_megabytes(tmp_path: Path) -> None:
    """1,024 ranks and 100 cycles, with stacks of each incident, fit into a page that opens at once."""
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


def test_what_is_too_much_is_thinned_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limits stretches, incidents and nodes are left out of the page, not of the sums; notes say so."""
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


def test_thinning_keeps_the_extremes_and_the_order() -> None:
    """A curve of a long run keeps its highest and lowest points."""
    points = [(float(place), 1.0 if place != 77_777 else 99.0, place) for place in range(100_000)]
    kept = thin(points)
    assert len(kept) <= MAX_POINTS + 3
    assert (77_777.0, 99.0, 77_777) in kept
    assert kept == sorted(kept)
    assert thin(points[:10]) == points[:10]


def test_a_heat_map_of_many_ranks_and_windows_keeps_each_lowest_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many scores there are, a slow rank is seen, and its window is still framed."""
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


def test_each_part_and_kind_is_explained_by_the_text_in_its_source() -> None:
    """What a part means is said once, in the source."""
    texts = meanings(Part)
    assert list(texts) == [str(part) for part in Part]
    assert texts["save_stall"] == "Training waited for a save."
    assert all(text.endswith(".") for text in texts.values())


def test_evidence_of_any_shape_is_cut_to_a_size() -> None:
    """Long texts, long lists, deep nesting and numbers that JSON has no word for are shown in part."""
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


def test_an_incident_has_its_stack_those_of_others_its_traceback_and_its_diagnosis(tmp_path: Path) -> None:
    """Ranks that are at the same place are one entry; the rank itself comes first."""
    write_run_files(tmp_path)
    files = contents(make_page(make_ledger(), run_dir=tmp_path))["incidents"][0]["files"]
    titles = [one["title"] for one in files]
    assert titles[0] == "Stack of rank 1"
    assert "Stack of ranks 0, 2-3" in titles
    assert "Traceback and last output of rank 1" in titles
    assert "Diagnosis of rank 1" in titles
    assert "line 127 in main" in files[0]["text"]
    assert files[0]["path"] == "stacks/cycle-0/rank-1.txt"


def test_stacks_of_a_later_job_are_not_taken_for_the_incidents(tmp_path: Path) -> None:
    """The names of stacks do not hold the job: those of another process are left out."""
    write_run_files(tmp_path, pid=999)
    files = contents(make_page(make_ledger(), run_dir=tmp_path))["incidents"][0]["files"]
    assert not [one for one in files if one["title"].startswith("Stack")]
    assert [one for one in files if one["title"].startswith("Traceback")]


def test_nothing_outside_the_run_directory_is_read(tmp_path: Path) -> None:
    """Neither a path in the evidence, nor a link, nor a job's name leads out of the run directory."""
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


def test_a_long_file_shows_its_begin_and_its_end(tmp_path: Path) -> None:
    """Of a traceback with megabytes of output both ends are there."""
    write_run_files(tmp_path)
    path = tmp_path / "failures/job-1-cycle-0/rank-1.txt"
    path.write_text("BEGIN" + "\n".join(["filler"] * 1_000_000) + "END")
    files = contents(make_page(make_ledger(), run_dir=tmp_path))["incidents"][0]["files"]
    (one,) = [one for one in files if one["title"].startswith("Traceback and last output of rank 1")]
    assert one["text"].startswith("BEGIN")
    assert one["text"].endswith("END")
    assert "bytes are left out" in one["text"]
    assert len(one["text"]) < 30_000


def test_a_run_with_next_to_nothing_makes_a_page() -> None:
    """No cycle, no incident, no save, no rank that reports: each is optional."""
    ledger = make_ledger(num_cycles=1)
    bare = msgspec.structs.replace(
        ledger, wall_s=0.0, ettr=None, cycles=(), incidents=(), warned=(), segments=(), saves=(), loads=(),
        slow_ranks=(), steps=(), clocks=(), notes=(), jobs=(), partition={},
    )  # fmt: skip
    shown = contents(make_page(bare))
    assert shown["slow"] is None
    assert [part["seconds"] for part in shown["parts"]] == [0.0] * len(Part)


def test_an_unfinished_incident_and_an_uncommitted_save_are_shown_as_such() -> None:
    """What is not known is null, not 0."""
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


def test_the_docs_name_every_part_and_every_field() -> None:
    """``docs/report.md`` has each part with its meaning, and each field of the JSON."""
    text = DOCS.joinpath("report.md").read_text()
    for name, meaning in meanings(Part).items():
        assert f"| `{name}` | {meaning} |" in text, name
    for struct in (Ledger, IncidentCost, Statistics):
        for name in struct.__struct_fields__:
            assert f"| `{name}` | " in text, name
