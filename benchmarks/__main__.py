"""The command line of the benchmarks: one of them, all of them, or their history."""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.measuring import ROOT
from benchmarks.results import (
    NOISE_PCT,
    append_record,
    compare_records,
    describe_machine,
    read_history,
    render_bars,
    render_history,
)
from benchmarks.suite import Suite, SuiteBench, about, select
from outlast.cli.main import (
    CommandGroup,
    echo,
    ending_in_one_line,
    ending_on_signals,
    json_option,
    open_console,
    print_json,
)
from outlast.errors import ConfigError, ExitReason, OutlastError
from outlast.simulate.benchmark_results import BenchResult
from outlast.wording import count

_CODES = "Exit code 0: every bar is kept; 1: one is missed, or could not be measured; 2: bad input."
_NUMBER = click.IntRange(min=1)


@click.group("benchmarks", cls=CommandGroup)
def cli() -> None:
    """Compare outlast with other launchers and libraries.

    Both are measured in turns in one run; the first round is dropped. Progress goes to standard error.
    Leave the machine alone meanwhile: what else runs on it is measured too.

    Exit code 0: every bar is kept; 1: one is missed, or could not be measured; 2: bad input.

    Examples:
      python -m benchmarks heartbeat
      python -m benchmarks restart --repeats 9
      python -m benchmarks all --results results
      TMPDIR=/nvme python -m benchmarks save
      python -m benchmarks rendezvous --json | jq '.bars[] | {name, value, bar, ok}'
      python -m benchmarks save --help
    """


def _add(name: str, one: Benchmark) -> None:
    command = f"python -m benchmarks {name}"
    examples = [command, *(f"{command} --{option} 8" for option in one.options), f"{command} --json | jq .bars"]
    measure: Any = partial(_measure, name)
    for option, text in one.options.items():
        measure = click.option(f"--{option}", f"num_{option}", type=_NUMBER, metavar="N", help=text)(measure)
    rounds = "Rounds that count; medians are shown."
    measure = click.option("--repeats", type=_NUMBER, default=one.repeats, show_default=True, metavar="N", help=rounds)(
        measure
    )
    cli.command(
        name,
        short_help=one.summary,
        help=f"{one.text}\n\nTakes {about(one.takes_s)}. {_CODES}",
        epilog="\n  ".join(["\b\nExamples:", *examples]) + "\n",
    )(json_option(measure))


def _measure(name: str, *, as_json: bool, repeats: int, **chosen: int | None) -> int:
    def progress(line: str) -> None:
        echo(f"[{name}] {line}", err=True)

    given = {option: number for option, number in chosen.items() if number is not None}
    with ending_on_signals():
        module = importlib.import_module(f"benchmarks.{name}")
        result: BenchResult = module.measure(repeats=repeats, progress=progress, **given)
    result = msgspec.structs.replace(result, machine=describe_machine() | dict(result.machine))
    if as_json:
        for note in result.notes:
            progress(note)
        click.echo(result.to_json())
    else:
        open_console(width=140).print(render_bars(name, result.bars, result.notes, result.machine))
    return int(ExitReason.FINISHED if result.ok else ExitReason.FAILED)


for _name, _benchmark in BENCHMARKS.items():
    _add(_name, _benchmark)


def _names(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    """Split a list at its commas."""
    return [name for one in value.split(",") if (name := one.strip())]


@cli.command("all")
@click.option("--repeats", type=_NUMBER, metavar="N", help="Rounds of each that count; default: what each has alone.")
@click.option("--only", callback=_names, default="", metavar="A,B", help="Only these benchmarks.")
@click.option("--skip", callback=_names, default="", metavar="A,B", help="All but these benchmarks.")
@click.option(
    "--results",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Store each result as DIR/NAME.json, and add a line to DIR/history.jsonl.",
)
@json_option
def measure_all(*, repeats: int | None, only: list[str], skip: list[str], folder: Path | None, as_json: bool) -> int:
    """Measure everything, one benchmark after another.

    Each runs in a separate process. One that fails, hangs or lacks a package is shown as not measured, with the reason,
    and the others are measured all the same. Takes about half an hour; Ctrl-C keeps what was measured until then.

    Exit code 0: every bar that was measured is kept; 1: one is missed, or a benchmark failed (one that lacks a package
    has not failed); 130: Ctrl-C.

    Examples:
      python -m benchmarks all
      python -m benchmarks all --only restart,save --repeats 9
      python -m benchmarks all --skip ray,adapters --results results
      python -m benchmarks all --json | jq '.bars[] | select(.ok | not)'
    """
    benches = [
        SuiteBench.of_command_line(name, BENCHMARKS[name], repeats)
        for name in select(list(BENCHMARKS), only=only, skip=skip)
    ]
    if folder is not None:
        _make_writable(folder)
    code: int | None = None
    try:
        suite = Suite(benches, folder=folder, report=partial(echo, err=True))
        with ending_on_signals():
            try:
                suite.run()
            except KeyboardInterrupt:
                code = 128 + signal.SIGINT
            except SystemExit as ended:  # SIGTERM, SIGHUP
                code = int(ended.code or 0)
        record = suite.record()
        if folder is not None and record.bars:
            append_record(folder, record)
    except OSError as error:
        raise OutlastError(f"a result cannot be stored: {error}") from error
    if as_json:
        print_json(record, on_one_line=True)
    else:
        notes = [f"{name}: not measured: {reason}" for name, reason in record.not_measured.items()]
        open_console(width=140).print(render_bars("all", record.bars, notes, record.machine))
    if code is not None:
        return code
    return int(ExitReason.FINISHED if record.ok else ExitReason.FAILED)


def _make_writable(folder: Path) -> None:
    """Create the folder of the results, before half an hour of measuring.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--results: {folder} cannot be written to ({error.strerror}); name another folder") from None


@cli.command("history")
@click.argument("folder", type=click.Path(path_type=Path), metavar="[DIR]", default=ROOT / "docs" / "results")
@click.option("--bar", "only", metavar="NAME", help="Only this bar: BAR, or BENCH.BAR.")
@click.option(
    "--noise",
    "noise_pct",
    type=click.FloatRange(min=0),
    default=NOISE_PCT,
    show_default=True,
    metavar="PCT",
    help="A change of up to so many per cent is not marked; of a value in per cent, so many per cent of its bar.",
)
@json_option
def history(*, folder: Path, only: str | None, noise_pct: float, as_json: bool) -> int:
    """Show how each value moved from run to run of `python -m benchmarks all`.

    DIR is what --results named; default: docs/results. Runs on the same kind of machine (processor, cores, memory) are
    compared with each other: the newest values, the change from the run before that measured the value, and from the
    best of all. A change that exceeds the noise is marked as better or worse.

    Exit code 0: it could be shown, whatever it shows; 2: there is no history, or no such bar.

    Examples:
      python -m benchmarks history
      python -m benchmarks history results --bar restart.restart_vs_torchrun_4
      python -m benchmarks history --noise 10 --json | jq '.machines[].bars[] | select(.moved == "worse")'
    """
    records, num_torn = read_history(folder)
    if num_torn:
        echo(f"{folder}: {count(num_torn, 'line')} of the history cut short, left out", err=True)
    machines = compare_records(records, noise_pct=noise_pct, only=only)
    if as_json:
        fields = {"noise_pct": noise_pct, "num_torn": num_torn, "machines": [one.to_fields() for one in machines]}
        print_json(fields, on_one_line=True)
    else:
        for one in machines:
            open_console(width=140).print(render_history(one, noise_pct))
    return int(ExitReason.FINISHED)


def main() -> None:
    """Run the command line; an error is one line, with exit code 2 for bad input and 1 for a failure."""
    with ending_in_one_line("benchmarks"):
        try:
            code = cli.main(standalone_mode=False, prog_name="python -m benchmarks")
        except ConfigError:
            raise
        except OutlastError as error:
            echo(f"benchmarks: {error}", err=True)
            code = ExitReason.FAILED
        sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
