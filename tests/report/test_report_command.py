"""``outlast report`` on the command line: summary, files, JSON, live runs, read-only disks, and usage errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from made_ledger import make_ledger, write_journal
from rich.console import Console

from outlast.cli.main import main
from outlast.goodput.ledger import Ledger
from outlast.report.summary import render_to_console

LONG_S = 100.0


class Caller:
    """Runs ``outlast report`` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Run ``outlast report``; return its exit code, output and error output."""
        self._monkeypatch.setattr(sys, "argv", ["outlast", "report", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        return int(ended.value.code or 0), out, err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(monkeypatch, capsys)


def test_the_command_prints_a_summary_and_writes_both_files(call: Caller, tmp_path: Path) -> None:
    """One call prints the headline, parts, incident and file paths, and writes a page and a trace into the run
    directory."""
    run_dir = write_journal(tmp_path / "run")
    code, out, err = call(run_dir)
    ledger = Ledger.read(run_dir)
    assert (code, err) == (0, "")
    assert out.startswith(ledger.headline)
    for part, seconds in ledger.partition.items():
        assert (part.replace("_", " ") in out) == (seconds > 0 or part == "restart"), part
    assert "worker died, rank 1 on n0" in out
    assert "workers restarted" in out
    assert "MTBF" in out
    assert "MTTR" in out
    assert f"page   {run_dir}/report.html" in out
    assert f"trace  {run_dir}/trace.json" in out
    assert (run_dir / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert sorted(path.name for path in run_dir.iterdir()) == ["journal", "report.html", "trace.json"]


def test_only_the_owner_can_read_the_files(call: Caller, tmp_path: Path) -> None:
    """A page contains command lines and output, so other users cannot read it."""
    run_dir = write_journal(tmp_path / "run")
    call(run_dir)
    assert {(run_dir / name).stat().st_mode & 0o077 for name in ("report.html", "trace.json")} == {0}


def test_a_second_call_replaces_both_files(call: Caller, tmp_path: Path) -> None:
    """Both files are complete and those of the last call, and no other file remains."""
    run_dir = write_journal(tmp_path / "run")
    (run_dir / "report.html").write_text("old")
    call(run_dir)
    assert (run_dir / "report.html").read_text() != "old"
    assert len(list(run_dir.iterdir())) == 3


def test_json_prints_the_ledger_and_writes_no_file(call: Caller, tmp_path: Path) -> None:
    """``--json`` prints the ledger's fields but its segments, which ``--segments`` adds; no file is written."""
    run_dir = write_journal(tmp_path / "run")
    code, out, err = call(run_dir, "--json")
    printed = json.loads(out)
    fields = set(Ledger.__struct_fields__)
    assert (code, err, set(printed)) == (0, "", fields - {"segments"})
    assert sum(printed["partition"].values()) == pytest.approx(printed["wall_s"], rel=1e-9)
    assert printed["incidents"][0]["kind"] == "worker_died"
    assert [path.name for path in run_dir.iterdir()] == ["journal"]
    code, out, _ = call(run_dir, "--json", "--segments")
    assert (code, set(json.loads(out))) == (0, fields)
    assert msgspec.convert(json.loads(out), Ledger) == Ledger.read(run_dir)


def test_json_writes_only_requested_files(call: Caller, tmp_path: Path) -> None:
    """With ``--json`` only files that an option gives are written."""
    run_dir = write_journal(tmp_path / "run")
    code, out, _ = call(run_dir, "--json", "--html", tmp_path / "page.html")
    assert (code, json.loads(out)["run_id"]) == (0, "written")
    assert (tmp_path / "page.html").exists()
    assert [path.name for path in run_dir.iterdir()] == ["journal"]


def test_options_omit_or_locate_the_files(call: Caller, tmp_path: Path) -> None:
    """``--no-html`` writes no page, and ``--trace`` sets the path of the trace."""
    run_dir = write_journal(tmp_path / "run")
    code, out, _ = call(run_dir, "--no-html", "--trace", tmp_path / "t.json")
    assert (code, "page  " in out, (tmp_path / "t.json").exists()) == (0, False, True)
    assert [path.name for path in run_dir.iterdir()] == ["journal"]


def test_a_live_run_is_reported_up_to_now(call: Caller, tmp_path: Path) -> None:
    """A run that is not over, and a torn last line, are not errors."""
    run_dir = write_journal(tmp_path / "run", is_over=False)
    with open(run_dir / "journal" / "job-1-n0-rank-0.jsonl", "ab") as file:
        file.write(b'{"kind":"progress","wall_ns":17')
    code, out, _ = call(run_dir, "--no-html", "--no-trace")
    assert code == 0
    assert out.startswith("not over")
    assert json.loads(call(run_dir, "--json")[1])["state"] == "open"


@pytest.mark.process
def test_a_read_only_run_directory_is_one_log_line(tmp_path: Path) -> None:
    """On a read-only disk the summary is printed, one line says why there are no files, and ``--html`` works."""
    run_dir = write_journal(tmp_path / "run")
    read_only = f"mount --bind {run_dir} {run_dir} && mount -o remount,bind,ro {run_dir} && exec "
    words = [sys.executable, "-m", "outlast", "report", str(run_dir)]
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", read_only + '"$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, timeout=LONG_S, check=False).returncode:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere, and this machine does not allow read-only mounts")
        run_dir.chmod(0o500)
        prefix = []
    try:
        plain = subprocess.run([*prefix, *words], capture_output=True, text=True, timeout=LONG_S, check=False)
        page = tmp_path / "page.html"
        named = subprocess.run(
            [*prefix, *words, "--html", str(page)], capture_output=True, text=True, timeout=LONG_S, check=False
        )
    finally:
        run_dir.chmod(0o700)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.startswith("finished")
    assert plain.stderr.count("\n") == 1
    assert "report.html and trace.json cannot be written" in plain.stderr
    assert "--html" in plain.stderr
    assert named.returncode == 0
    assert page.exists()
    assert "trace.json cannot be written" in named.stderr
    assert [path.name for path in run_dir.iterdir()] == ["journal"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["{run}/nothing-here"], "there is no"),
        (["{run}/journal"], "has no journal"),
        (["{empty}"], "holds no event"),
        (["{run}", "--html", "{run}/no/such/folder/x.html"], "cannot be written"),
        (["{run}", "--html", "a", "--no-html"], "contradict"),
        (["{run}", "--trace", "a", "--no-trace"], "contradict"),
        (["{run}", "--segments"], "--json"),
        (["{run}", "--html", "a", "--trace", "./a"], "same file"),
        ([], "missing argument"),
        (["{run}", "--page"], "no such option"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(call: Caller, tmp_path: Path, words: list[str], part: str) -> None:
    """Each usage error is one line that names the cause; nothing else is printed or written."""
    run_dir = write_journal(tmp_path / "run")
    (tmp_path / "empty" / "journal").mkdir(parents=True)
    code, out, err = call(*(word.format(run=run_dir, empty=tmp_path / "empty") for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert part in err
    assert [path.name for path in run_dir.iterdir()] == ["journal"]


@pytest.mark.parametrize("num_cycles", [1, 2, 500])
def test_the_summary_fits_one_screen(num_cycles: int) -> None:
    """The summary has at most 40 lines of 100 columns, and marks the costliest of the newest incidents."""
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  the console is its user
    ledger = msgspec.structs.replace(make_ledger(num_cycles=num_cycles), notes=tuple("x" * 300 for _ in range(9)))
    render_to_console(console, ledger)
    console.file.close()
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    if num_cycles > 1:
        assert sum("worker hung, rank" in line for line in lines) == min(10, num_cycles - 1)
        assert "costliest" in "\n".join(lines)


def test_journal_texts_cannot_control_the_terminal(call: Caller, tmp_path: Path) -> None:
    """No control character of a log line reaches the terminal, and rich markup in it is not interpreted."""
    ledger = make_ledger(num_cycles=3, hostile="\x1b[31m\x07\r[bold]x[/bold]")
    console = Console(width=300, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    render_to_console(console, ledger)
    console.file.close()
    text = console.export_text()
    assert not {"\x1b", "\x07", "\r"} & set(text)
    assert "[bold]x[/bold]" in text


@pytest.mark.process
def test_the_summary_works_in_ascii(tmp_path: Path) -> None:
    """A terminal that supports only ASCII gets the complete summary."""
    run_dir = write_journal(tmp_path / "run", text=" ünicode 日本")
    ended = subprocess.run(
        [sys.executable, "-m", "outlast", "report", str(run_dir), "--no-html", "--no-trace"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        timeout=LONG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert b"####" in ended.stdout
