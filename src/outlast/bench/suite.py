"""The suite: benchmarks one after another, each in a process of its own, and what they found as one record.

A process of its own, so that a benchmark that fails, hangs or lacks a package does not end the others, and so that none
of them begins in the memory that another one has left behind. What one has found is stored before the next begins:
Ctrl-C keeps all that was measured until then.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

import outlast
from outlast import clock
from outlast.bench.measuring import describe_machine
from outlast.bench.results import (
    NOT_MEASURED,
    StoredBar,
    StoredResult,
    SuiteRecord,
    describe_measurement,
    parse_result,
    show_figure,
)
from outlast.config.base import nearest
from outlast.errors import ConfigError, ExitReason
from outlast.runtime.files import write_atomically
from outlast.version import __version__
from outlast.wording import count

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERRUPTED = "interrupted"
NOT_BEGUN = "not begun: interrupted before"
_END_S = 30.0
"""How long a benchmark may take to end its own processes when it is stopped."""
_SLACK, _LEAST_LIMIT_S = 6.0, 600.0
"""A benchmark that takes so many times what is expected, and this at least, hangs."""
_MOST_CHARACTERS = 300
_GIT_S = 20.0


@dataclass(frozen=True, slots=True)
class SuiteBench:
    """A benchmark of the suite."""

    name: str
    takes_s: float
    """How long it is expected to take."""
    command: Sequence[str]
    """What prints its result as JSON, and how far it is to standard error."""
    limit_s: float

    @classmethod
    def of_command_line(cls, name: str, *, takes_s: float, default_repeats: int, repeats: int | None) -> SuiteBench:
        """Return the benchmark that ``outlast bench NAME`` is.

        Args:
            name: Its name.
            takes_s: Seconds that it takes with as many rounds as it has by default.
            default_repeats: Rounds that it has by default.
            repeats: Rounds that it is to have; ``None`` = those.
        """
        if repeats is not None:
            takes_s *= (repeats + 1) / (default_repeats + 1)  # one more round is dropped
        # -P: a module of the working directory takes no other's place
        command = [sys.executable, "-P", "-m", "outlast", "bench", name, "--json"]
        command += [] if repeats is None else ["--repeats", str(repeats)]
        return cls(name, takes_s, command, max(_LEAST_LIMIT_S, _SLACK * takes_s))


def select(names: Sequence[str], *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """Return the benchmarks that are to run, in the suite's order.

    Args:
        names: All of them.
        only: Those that are wanted; none = all.
        skip: Those that are not.

    Raises:
        ConfigError: One does not exist, or none is left.
    """
    for option, given in (("--only", only), ("--skip", skip)):
        for name in given:
            if name not in names:
                raise ConfigError(f"{option}: there is no benchmark {name!r}; {nearest(name, names)}")
    chosen = [name for name in names if (not only or name in only) and name not in skip]
    if not chosen:
        raise ConfigError("--skip leaves no benchmark of those in --only; name another one")
    return chosen


class _Unmeasured(Exception):
    """A benchmark gave no result."""


class Suite:
    """One run of the suite.

    Args:
        benches: What is measured, in this order.
        folder: Where each result is stored as ``NAME.json``; ``None`` = nowhere.
        tell: Is called with each line of progress, those of the benchmarks among them.
    """

    def __init__(self, benches: Iterable[SuiteBench], *, folder: Path | None, tell: Callable[[str], None]) -> None:
        self._benches = list(benches)
        self._folder = folder
        self._tell = tell
        self._results: list[StoredResult] = []
        self._reasons: dict[str, str] = {}
        self._num_failed = 0
        self._began_ns = clock.wall_ns()
        self._machine = describe_machine()
        self._commit = find_commit()

    def run(self) -> None:
        """Measure, one benchmark after another.

        Whatever ends this early, as Ctrl-C does, passes; :meth:`record` then has what was measured until then.

        Raises:
            OSError: A result cannot be stored.
        """
        for number, bench in enumerate(self._benches):
            left_s = sum(one.takes_s for one in self._benches[number:])
            of_all = f"{number + 1}/{len(self._benches)}"
            self._tell(
                f"[bench all] {of_all} {bench.name}: {_about(bench.takes_s)}, {_about(left_s)} until all are done"
            )
            try:
                self._measure(bench)
            except _Unmeasured as error:
                self._reasons[bench.name] = str(error)
                self._tell(f"[bench all] {bench.name} was {NOT_MEASURED}: {error}")
            except BaseException:
                if all(one.bench != bench.name for one in self._results):
                    self._reasons[bench.name] = INTERRUPTED
                self._reasons |= {one.name: NOT_BEGUN for one in self._benches[number + 1 :]}
                raise

    def record(self) -> SuiteRecord:
        """Return what was found so far."""
        bars = [msgspec.structs.replace(bar, bench=one.bench) for one in self._results for bar in one.bars]
        measured = [bar for bar in bars if bar.value is not None]
        return SuiteRecord(
            date=clock.as_iso(self._began_ns),
            commit=self._commit,
            version=__version__,
            machine=self._machine,
            ok=bool(measured) and self._num_failed == 0 and all(bar.ok for bar in measured),
            bars=bars,
            not_measured=dict(self._reasons),
        )

    def _measure(self, bench: SuiteBench) -> None:
        try:
            code, text, said = _run(bench, self._tell)
        except TimeoutError as error:
            self._num_failed += 1
            raise _Unmeasured(str(error)) from None
        except OSError as error:
            self._num_failed += 1
            raise _Unmeasured(f"it cannot be started ({error})") from None
        line = text.strip().rpartition(b"\n")[2]
        try:
            result = parse_result(line)
        except msgspec.DecodeError:
            # Bad input, of a command line that has none, is a package that is not installed.
            self._num_failed += code != ExitReason.BAD_INPUT
            raise _Unmeasured(_reason(code, said)) from None
        if result.num_measured == 0:
            raise _Unmeasured(_reason(code, said))
        self._results.append(result)
        if self._folder is not None:
            write_atomically(self._folder / f"{bench.name}.json", line + b"\n")


def _run(bench: SuiteBench, tell: Callable[[str], None]) -> tuple[int, bytes, list[str]]:
    """Run a benchmark; return its exit code, its standard output, and the last lines of its standard error.

    Raises:
        TimeoutError: It exceeded its limit, and was ended.
    """
    # A session of its own: Ctrl-C at the terminal is for the suite alone, which has the benchmark end its processes.
    process = subprocess.Popen(
        bench.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        return _follow(process, bench, tell)
    finally:
        if process.returncode is None:
            _end(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _follow(
    process: subprocess.Popen[bytes], bench: SuiteBench, tell: Callable[[str], None]
) -> tuple[int, bytes, list[str]]:
    """Read both outputs until the process has ended; nothing is asked again and again meanwhile: it is measuring."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, rest = bytearray(), b""
    said: deque[str] = deque(maxlen=50)
    deadline_s = clock.now_s() + bench.limit_s
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for stream in (process.stdout, process.stderr):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            has_ended = False
            while not has_ended:
                ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline_s - clock.now_s()))]
                if not ready and clock.now_s() >= deadline_s:
                    raise TimeoutError(f"it did not end within {bench.limit_s:g} s, and was ended")
                # What it wrote last may still be in the pipes; a process that it left behind may hold them open.
                has_ended = ended in ready
                for stream in (process.stdout, process.stderr):
                    if (has_ended or stream in ready) and stream in selector.get_map():
                        data, is_at_end = _read_all(stream)
                        if is_at_end:
                            selector.unregister(stream)
                        if stream is process.stdout:
                            out += data
                            continue
                        *lines, rest = (rest + data).split(b"\n")
                        for line in [*lines, *([rest] if has_ended and rest else [])]:
                            said.append(line.decode(errors="replace"))
                            tell(said[-1])
        return process.wait(), bytes(out), list(said)
    finally:
        os.close(ended)


def _read_all(stream: IO[bytes]) -> tuple[bytes, bool]:
    """Return what a pipe that does not block holds now, and whether nothing can follow."""
    data = bytearray()
    while True:
        try:
            part = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return bytes(data), False
        if not part:
            return bytes(data), True
        data += part


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a benchmark end itself and what it started, and kill what is left of its session's first group."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason(code: int, said: Sequence[str]) -> str:
    """Return in one line why a benchmark gave no result."""
    told = [line.strip() for line in said if line.strip()]
    own = [line.removeprefix("outlast: ") for line in told if line.startswith("outlast: ")]
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    text = next(reversed(own), "") or " ".join([f"{ended};", *told[-1:]]).rstrip(";")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _about(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"about {count(minutes, 'minute')}" if minutes else "less than a minute"


def find_checkout() -> Path | None:
    """Return the root of the checkout that this package is part of; ``None``: it is installed from a wheel."""
    root = Path(outlast.__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "docs").is_dir() else None


def find_commit() -> str | None:
    """Return the commit that is checked out, with ``+`` where the code differs from it; ``None``: in no checkout."""
    root = find_checkout()
    if root is None:
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "src"))
    except (OSError, subprocess.SubprocessError):  # git is not installed, or there is no repository
        return None


def render_record(record: SuiteRecord) -> RenderableType:
    """Return the table of all figures, and below it what was not measured and the machine."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title="outlast bench all", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("bench", "figure"):
        table.add_column(head, no_wrap=True)
    for head in ("value", "unit", "bar"):
        table.add_column(head, justify="left" if head == "unit" else "right", no_wrap=True)
    table.add_column("ok")
    table.add_column("peer", overflow="fold")
    table.add_column("its value", justify="right", no_wrap=True)
    before = ""
    for bar in record.bars:
        peer, peer_unit = bar.name_peer()
        table.add_row(
            "" if bar.bench == before else bar.bench,
            bar.name,
            "-" if bar.value is None else f"{bar.value:.3g}",
            bar.unit,
            f"{'>=' if bar.is_floor else '<='} {bar.bar:.3g}",
            _verdict(bar),
            Text(peer),
            "-" if bar.peer_value is None else show_figure(bar.peer_value, peer_unit),
        )
        before = bar.bench
    for name in record.not_measured:
        table.add_row(name, NOT_MEASURED, "-", "", "-", "-", "-", "-")
    reasons = [Text(f" {name}: {NOT_MEASURED}: {reason}") for name, reason in record.not_measured.items()]
    return Group(table, *reasons, Text(f" {describe_measurement(record.machine)}", style="dim"))


def _verdict(bar: StoredBar) -> str:
    if bar.value is None:
        return "-"
    return "[green]kept[/]" if bar.ok else "[bold red]missed[/]"
