"""``outlast ckpt``: list, verify and prune checkpoints. Reads files only, and needs no run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from outlast import clock
from outlast.cli.main import (
    CommandGroup,
    complete_folder,
    echo,
    ending_on_signals,
    json_option,
    open_console,
    print_json,
)
from outlast.errors import CheckpointError, ConfigError, ExitReason
from outlast.wording import count, number_ranges, one_line

if TYPE_CHECKING:
    from rich.progress import Progress

    from outlast.checkpoint.catalogue.entries import (
        Checkpoint,
        DirectoryListing,
        Leftover,
        ListedCheckpoint,
        ListedLeftover,
        ListedPlace,
        Plan,
    )

__all__ = ["ckpt"]

SCHEMA = 1
"""Version of the ``--json`` output; raised when a field changes its meaning or is removed."""

_directories = click.argument("directories", metavar="DIR...", nargs=-1, required=True, shell_complete=complete_folder)


@click.group("ckpt", cls=CommandGroup)
def ckpt() -> None:
    """List, verify and prune checkpoints.

    DIR is a local_directory, one node's folder in it, or a global directory: a path or a URL (s3://bucket/run,
    gs://bucket/run). Nothing else is needed: no run, no torch.distributed, no GPU.

    Examples:
      outlast ckpt ls /nvme/run s3://bucket/run
      outlast ckpt verify s3://bucket/run --iteration 12000
      outlast ckpt prune /nvme/run --keep 3 --dry-run
    """


@ckpt.command("ls", short_help="What is there, and whether it can be loaded.")
@_directories
@json_option
def list_checkpoints(directories: tuple[str, ...], as_json: bool) -> int:
    """List checkpoints: where their parts are stored, and whether they can be loaded.

    The check is quick: manifests, sizes and headers. `verify` reads every byte.

    Exit code 0: listed, whatever the state; 1: a directory cannot be read; 2: bad input.

    Examples:
      outlast ckpt ls /nvme/run
      outlast ckpt ls /nvme/run s3://bucket/run
      outlast ckpt ls s3://bucket/run --json | jq '.places[].checkpoints[] | select(.valid) | .iteration'
    """
    looked, code = _look_into(directories)
    if as_json:
        print_json({"schema": SCHEMA, "places": [one.entry for one in looked]})
        return code

    _print(*render_places([one.entry for one in looked], now_ns=clock.wall_ns()))
    return code


@ckpt.command("verify", short_help="Read every byte and compare it with its digest.")
@_directories
@click.option(
    "--iteration",
    "iterations",
    type=click.IntRange(min=0),
    multiple=True,
    help="Verify only this checkpoint; may be given several times.",
)
@click.option(
    "--threads", type=click.IntRange(1, 256), default=8, show_default=True, help="Parts that are read at once."
)
@json_option
def verify(directories: tuple[str, ...], iterations: tuple[int, ...], threads: int, as_json: bool) -> int:
    """Read every byte of every checkpoint and compare it with its digest.

    Copies of other nodes' ranks are read too. For each error the report has the file, the tensors, the 8 MiB chunk.

    Exit code 0: every byte is correct; 1: a checkpoint is bad, cannot be read, or none exists; 2: bad input.

    Examples:
      outlast ckpt verify /nvme/run
      outlast ckpt verify s3://bucket/run --iteration 12000
      outlast ckpt verify /nvme/run --json | jq '.places[].checkpoints[].problems[]'
    """
    import msgspec

    from outlast.checkpoint.catalogue.listing import verify as read_all

    looked, code = _look_into(directories)
    chosen = [[found for found in one.found if not iterations or found.entry.iteration in iterations] for one in looked]
    lacking = set(iterations) - {found.entry.iteration for places in chosen for found in places}
    if lacking and not code:
        raise ConfigError(
            f"--iteration={min(lacking)}: no such checkpoint in {', '.join(directories)}; see outlast ckpt ls"
        )
    places, num_bytes_read = [], 0
    total = sum(file.num_bytes for one in chosen for found in one for file in found.files)
    with ending_on_signals(), _reading_progress() as progress:
        task = progress.add_task("reading", total=total)
        for one, founds in zip(looked, chosen, strict=True):
            entries = []
            for found in founds:
                progress.update(task, description=f"checkpoint {found.entry.iteration}")
                verified = read_all(found, num_threads=threads, on_read=partial(progress.advance, task))
                entries.append(verified.entry)
                num_bytes_read += verified.num_bytes_read
            places.append(msgspec.structs.replace(one.entry, checkpoints=tuple(entries)))
    ok = not code and all(
        place.checkpoints
        and not place.problems
        and all(entry.valid and not entry.problems for entry in place.checkpoints)
        for place in places
    )
    if as_json:
        print_json({"schema": SCHEMA, "ok": ok, "num_bytes_read": num_bytes_read, "places": places})
    else:
        _print(*render_verified(places, num_bytes_read))
    return int(ExitReason.FINISHED if ok else ExitReason.FAILED)


@ckpt.command("prune", short_help="Delete old checkpoints and the remains of failed saves.")
@_directories
@click.option(
    "--keep", type=click.IntRange(min=1), help="Newest valid checkpoints to keep; without it no valid one is deleted."
)
@click.option(
    "--retain-interval",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Keep every checkpoint whose iteration is a multiple of this; 0 = none.",
)
@click.option(
    "--suspect-window",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Keep one checkpoint that is more than this many iterations older than the newest.",
)
@click.option("--suspect", "suspects", is_flag=True, help="Delete saves for diagnosis.")
@click.option("--leftovers", is_flag=True, help="Delete failed attempts that no process can be using.")
@click.option(
    "--older-than",
    "older_than_h",
    metavar="HOURS",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    help="Age from which a leftover of another job counts as abandoned.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@click.option(
    "--yes", "-y", is_flag=True, help="Delete without confirmation; this is the default where there is no terminal."
)
@json_option
def prune(
    directories: tuple[str, ...],
    keep: int | None,
    retain_interval: int,
    suspect_window: int,
    suspects: bool,
    leftovers: bool,
    older_than_h: float,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete old checkpoints, saves for diagnosis, and the remains of failed saves.

    Only checkpoints that the quick check of `ls` finds valid and that are not abandoned count towards --keep. The
    newest of them is never deleted, nor anything newer, unreadable or written by another program. Give all directories
    of the run: together they show whether a checkpoint is abandoned. A leftover is deleted once its owner is known to
    have exited, or by its age.

    Exit code 0: done; 1: something could not be deleted, or a directory cannot be read; 2: bad input.

    Examples:
      outlast ckpt prune /nvme/run --keep 3 --dry-run
      outlast ckpt prune s3://bucket/run --keep 5 --retain-interval 10000
      outlast ckpt prune /nvme/run --leftovers --older-than 6 --yes
    """
    from outlast.checkpoint.catalogue.entries import Rule, plan_pruning

    if keep is None and not suspects and not leftovers:
        raise ConfigError("nothing to prune: give --keep N, --suspect or --leftovers")
    rule = Rule(
        most_recent_k=keep,
        retain_interval=retain_interval,
        suspect_window=suspect_window,
        suspects=suspects,
        leftovers=leftovers,
        older_than_s=older_than_h * 3600,
    )
    looked, code = _look_into(directories)
    plans = [plan_pruning(one, rule, now_ns=clock.wall_ns()) for one in looked]
    if not as_json:
        for one, plan in zip(looked, plans, strict=True):
            _print(*render_plan(one.entry, plan, is_done=dry_run))
    anything = any(plan.checkpoints or plan.remains for plan in plans)
    if anything and not dry_run and not yes and sys.stdin.isatty():
        click.confirm("Delete this?", abort=True, err=True)
    reports = [_carry_out(one, plan, dry_run=dry_run) for one, plan in zip(looked, plans, strict=True)]
    if as_json:
        print_json({"schema": SCHEMA, "dry_run": dry_run, "places": reports})
    failed = any(report["errors"] for report in reports)
    return int(ExitReason.FAILED if failed else code)


def _carry_out(looked: DirectoryListing, plan: Plan, *, dry_run: bool) -> dict[str, object]:
    """Execute a plan; report what cannot be deleted, and continue."""
    errors = []
    report: dict[str, list[object]] = {"checkpoints": [], "suspects": [], "leftovers": []}
    num_bytes = 0
    doomed: list[tuple[ListedCheckpoint | ListedLeftover, str, int | str]] = [
        (found, "suspects" if found.entry.suspect else "checkpoints", found.entry.iteration)
        for found in plan.checkpoints
    ]
    doomed += [(remains, "leftovers", remains.entry.name) for remains in plan.remains]
    for one, kind, name in doomed:
        try:
            if not dry_run:
                one.remove()
            report[kind].append(name)
            num_bytes += one.entry.num_bytes
        except (OSError, CheckpointError) as error:
            errors.append(f"{name if kind == 'leftovers' else f'checkpoint {name}'}: {error}")
    for line in errors:
        echo(f"outlast: {looked.entry.path}: {line}", err=True)
    return {"path": looked.entry.path, **report, "num_bytes": num_bytes, "errors": errors}


def _look_into(directories: Iterable[str]) -> tuple[list[DirectoryListing], int]:
    """List all directories; an unreadable one is reported on standard error and makes the exit code 1."""
    from outlast.checkpoint.catalogue.entries import mark_abandoned
    from outlast.checkpoint.catalogue.listing import look_into

    looked, code = [], ExitReason.FINISHED
    for name in directories:
        try:
            looked.append(look_into(name))
        except (OSError, CheckpointError) as error:
            echo(f"outlast: {name} cannot be read: {error}", err=True)
            code = ExitReason.FAILED
    return mark_abandoned(looked), int(code)


def _print(*parts: object) -> None:
    console = open_console(width=160, markup=True)
    for part in parts:
        console.print(one_line(part) if isinstance(part, str) else part)


def _reading_progress() -> Progress:
    """Return a progress bar of the bytes read, on standard error if that is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from outlast.cli.console import PrintableConsole

    columns = ("{task.description}", BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    is_shown = sys.stderr.isatty()
    return Progress(
        *columns, console=PrintableConsole(stderr=True, quiet=not is_shown), transient=True, disable=not is_shown
    )


MAX_PROBLEMS = 20
"""Problems printed per checkpoint; ``--json`` has all."""


def render_places(places: Iterable[ListedPlace], *, now_ns: int) -> Iterator[Table | str]:
    """Yield the output of ``ls``."""
    for place in places:
        yield from _render_place(place, word="valid")
        for leftover in place.leftovers:
            yield f"  {_describe_leftover(leftover, now_ns)}"


def render_verified(places: Sequence[ListedPlace], num_bytes_read: int) -> Iterator[Table | str]:
    """Yield the output of ``verify``."""
    for place in places:
        yield from _render_place(place, word="verified")
    checkpoints = [entry for place in places for entry in place.checkpoints]
    num_checkpoints = len(checkpoints)
    num_bad = sum(not entry.valid or bool(entry.problems) for entry in checkpoints)
    if not num_checkpoints:
        yield "[red]there is no checkpoint[/red]"
    elif num_bad:
        bad = f"{num_bad} of {count(num_checkpoints, 'checkpoint')} with bad or missing parts"
        yield f"[red]{bad}[/red], {_size(num_bytes_read)} read"
    elif any(place.problems for place in places):
        right = "the checkpoints are correct, but their directories have other problems"
        yield f"[yellow]{right}[/yellow], {_size(num_bytes_read)} read"
    else:
        right = f"every byte of {count(num_checkpoints, 'checkpoint')} is correct"
        yield f"[green]{right}[/green], {_size(num_bytes_read)} read"
    unverified = [name for entry in checkpoints for name in entry.unverified]
    if unverified:
        more = f" and {len(unverified) - 1} more" if len(unverified) > 1 else ""
        yield f"not compared, since an earlier version kept no digest: {escape(unverified[0])}{more}"


def render_plan(place: ListedPlace, plan: Plan, *, is_done: bool) -> Iterator[str]:
    """Yield the output of ``prune`` before its confirmation."""
    if not plan.checkpoints and not plan.remains:
        yield f"[bold]{escape(place.path)}[/bold]: nothing to delete"
        return
    would = "would be deleted" if is_done else "to be deleted"
    yield f"[bold]{escape(place.path)}[/bold]: {_size(plan.num_bytes)} {would}"
    for found in plan.checkpoints:
        entry = found.entry
        kind = "valid" if entry.valid else "not valid"
        if entry.suspect or entry.abandoned is not None:
            kind = "saved for diagnosis" if entry.suspect else "abandoned"
        yield f"  checkpoint {entry.iteration}, {kind}, {_size(entry.num_bytes)}"
    for remains in plan.remains:
        yield f"  {escape(remains.entry.name)}, {_size(remains.entry.num_bytes)}"


def _render_place(place: ListedPlace, *, word: str) -> Iterator[Table | str]:
    facts = ["local tier" if place.tier == "local" else "global tier"]
    if place.run is not None:
        facts.append(place.run)
    if place.latest is not None:
        facts.append(f"latest {place.latest}")
    yield f"[bold]{escape(place.path)}[/bold]  {escape(', '.join(facts) if place.tier != 'empty' else 'empty')}"
    for problem in place.problems:
        yield f"  [yellow]{escape(str(problem))}[/yellow]"
    if not place.checkpoints:
        yield "  no checkpoint"
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("  checkpoint", "state", "size", "ranks", "from", "finite", "attempt"):
        is_number = name in ("  checkpoint", "size", "from")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    if place.tier == "local":
        table.add_column("where (+ copies of other nodes' ranks)", overflow="fold")
    else:
        table.add_column("files", justify="right")
    for entry in place.checkpoints:
        table.add_row(
            str(entry.iteration),
            _state(entry, word),
            _size(entry.num_bytes),
            _ranks(entry),
            "-" if entry.restored_from is None else str(entry.restored_from),
            {True: "yes", False: "[yellow]no[/yellow]", None: "?"}[entry.finite],
            escape(entry.attempt or "?"),
            escape(_where(entry)) if place.tier == "local" else str(entry.num_files),
        )
    yield table
    for entry in place.checkpoints:
        if entry.abandoned is not None:
            yield f"  [yellow]{entry.iteration}[/]: {escape(entry.abandoned)}"
        for problem in entry.problems[:MAX_PROBLEMS]:
            yield f"  [{'red' if not entry.valid else 'yellow'}]{entry.iteration}[/]: {escape(str(problem))}"
        if len(entry.problems) > MAX_PROBLEMS:
            yield f"  {entry.iteration}: and {len(entry.problems) - MAX_PROBLEMS} more; --json names all"


def _state(entry: Checkpoint, word: str) -> str:
    good = "[yellow]degraded[/yellow]" if entry.problems else f"[green]{word}[/green]"
    state = good if entry.valid else "[red]bad[/red]"
    if entry.abandoned is not None:
        return f"[yellow]abandoned[/yellow]{'' if entry.valid else ', [red]bad[/red]'}"
    return f"{state}, suspect" if entry.suspect else state


def _ranks(entry: Checkpoint) -> str:
    if entry.world_size is None:
        return "?"
    num_here = entry.world_size - len(entry.missing) - len(entry.elsewhere) - len(entry.rebuildable)
    if num_here == entry.world_size:
        return f"all {entry.world_size}" if entry.world_size > 1 else "1"
    lacks = [f"lacks {_ranges(entry.missing)}"] if entry.missing else []
    lacks += [f"{_ranges(entry.elsewhere)} elsewhere"] if entry.elsewhere else []
    lacks += [f"{_ranges(entry.rebuildable)} by parity"] if entry.rebuildable else []
    return f"{num_here} of {entry.world_size}, {', '.join(lacks)}"


def _where(entry: Checkpoint) -> str:
    parts = []
    for one in entry.held:
        own = _ranges(one.own) or "-"
        replicas = f" +{_ranges(one.replicas)}" if one.replicas else ""
        parities = f" parity {_ranges(one.parities)}" if one.parities else ""
        parts.append(f"{one.node}: {own}{replicas}{parities}")
    return "; ".join(parts)


def _ranges(ranks: Sequence[int]) -> str:
    return ",".join(number_ranges(ranks))


def _describe_leftover(leftover: Leftover, now_ns: int) -> str:
    what = {
        "attempt": "attempt, failed or under way",
        "aside": "set aside by another attempt",
        "deletion": "remains of a deletion",
    }[leftover.kind]
    if leftover.modified_ns is None:
        return f"{escape(leftover.name)}: {what}, {_size(leftover.num_bytes)}"
    age_h = max(0, now_ns - leftover.modified_ns) / 3.6e12
    age = f"{age_h:.0f} h" if age_h >= 1.5 else f"{age_h * 60:.0f} min"
    return f"{escape(leftover.name)}: {what}, {_size(leftover.num_bytes)}, {age} old"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 100 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
