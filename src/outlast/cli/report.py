"""``outlast report``: the history and costs of a run, as text, a page and a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outlast.cli.main import Command, complete_file, complete_folder, echo, json_option, open_console, print_json
from outlast.errors import ConfigError, ExitReason

if TYPE_CHECKING:
    from outlast.goodput.ledger import Ledger

_WIDTH = 100


@click.command("report", cls=Command)
@click.argument("run_dir", metavar="RUN_DIR", shell_complete=complete_folder)
@click.option("--html", "html", metavar="FILE", shell_complete=complete_file, help="The page; RUN_DIR/report.html.")
@click.option("--trace", "trace", metavar="FILE", shell_complete=complete_file, help="The trace; RUN_DIR/trace.json.")
@click.option("--no-html", is_flag=True, help="Write no page.")
@click.option("--no-trace", is_flag=True, help="Write no trace.")
@json_option
@click.option("--segments", is_flag=True, help="With --json: each stretch of the wall time, too.")
def report(
    run_dir: str, html: str | None, trace: str | None, no_html: bool, no_trace: bool, as_json: bool, segments: bool
) -> int:
    """Show what happened in a run, and what each incident cost; write a page and a trace of it.

    The page is one file that needs no network: open it in a browser. The trace is for ui.perfetto.dev. Both replace
    those of an earlier call. Only RUN_DIR is read. The report of a run that is under way ends at the present. --json
    writes no files, unless --html or --trace names them.

    Exit code 0: shown, whatever the result of the run; 2: there is no such run directory, or a file that was
    named cannot be written.

    Examples:
      outlast report runs/my-run
      outlast report runs/my-run --html /tmp/my-run.html --no-trace
      outlast report runs/my-run --json | jq '.wall_s, .partition, .ettr'
      outlast report runs/my-run --json | jq '.incidents | max_by(.cost_s) | .text, .parts'
    """
    _check(html, trace, no_html=no_html, no_trace=no_trace, as_json=as_json, segments=segments)
    from outlast.goodput.ledger import Ledger

    if not Path(run_dir).exists():
        raise ConfigError(f"there is no {run_dir}; name a run directory: the --run-dir of outlast run")
    ledger = Ledger.read(run_dir)
    wanted: dict[str, Path] = {}
    if not no_html and (html is not None or not as_json):
        wanted["page"] = Path(run_dir, "report.html") if html is None else Path(html)
    if not no_trace and (trace is not None or not as_json):
        wanted["trace"] = Path(run_dir, "trace.json") if trace is None else Path(trace)
    named = {name for name, path in (("page", html), ("trace", trace)) if path is not None}
    written = _write(ledger, Path(run_dir), wanted, named)
    if as_json:
        import msgspec

        fields = msgspec.structs.asdict(ledger)
        if not segments:
            del fields["segments"]
        print_json(fields)
        return int(ExitReason.FINISHED)
    from outlast.report.summary import list_files, render_to_console

    console = open_console(width=_WIDTH)
    render_to_console(console, ledger)
    if written:
        console.print()
    for line in list_files(written):
        console.print(line, soft_wrap=True)
    return int(ExitReason.FINISHED)


def _check(
    html: str | None, trace: str | None, *, no_html: bool, no_trace: bool, as_json: bool, segments: bool
) -> None:
    if html is not None and no_html:
        raise ConfigError("--html and --no-html contradict each other; give one of them")
    if trace is not None and no_trace:
        raise ConfigError("--trace and --no-trace contradict each other; give one of them")
    if segments and not as_json:
        raise ConfigError("--segments is for --json; give both, or leave it out")
    if html is not None and trace is not None and Path(html).resolve() == Path(trace).resolve():
        raise ConfigError("--html and --trace name the same file; give two")


def _write(ledger: Ledger, run_dir: Path, wanted: dict[str, Path], named: set[str]) -> dict[str, Path]:
    """Write the files; return those written. An unwritable file at a default path is left out, with a message."""
    from outlast.report.page import make_page
    from outlast.report.trace import make_trace
    from outlast.runtime.files import PRIVATE, write_atomically

    written: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for what, path in wanted.items():
        data = make_page(ledger, run_dir=run_dir) if what == "page" else make_trace(ledger)
        try:
            write_atomically(path, data, mode=PRIVATE)  # it contains command lines and output
        except OSError as error:
            if what in named:
                option = "--html" if what == "page" else "--trace"
                raise ConfigError(
                    f"{path} cannot be written ({error.strerror}); give {option} a file in a folder that can be"
                ) from None
            left_out[path.name] = error.strerror or str(error)
        else:
            written[what] = path
    if left_out:
        names, why = " and ".join(left_out), next(iter(left_out.values()))
        echo(
            f"outlast: {names} cannot be written to {run_dir} ({why}); name other places with --html and --trace",
            err=True,
        )
    return written
