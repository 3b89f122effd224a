"""The suite: benchmarks one after another, each in a separate process, and their results as one record.

A benchmark that fails, hangs or lacks a package does not end the others, and does not leave memory behind for them.
Each result is stored before the next benchmark begins, so that Ctrl-C keeps all results until then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.catalogue import Benchmark
from benchmarks.measuring import ROOT
from benchmarks.results import NOT_MEASURED, SuiteRecord, describe_machine
from outlast import clock
from outlast.config.base import nearest
from outlast.decoding import from_json
from outlast.errors import ConfigError, ExitReason
from outlast.runtime.files import write_atomically
from outlast.simulate.benchmark_results import BenchResult
from outlast.version import __version__
from outlast.wording import count

INTERRUPTED = "interrupted"
NOT_BEGUN = "not begun: interrupted before"
_END_S = 30.0
"""How long a stopped benchmark may take to end its processes."""
_REST_S = 5.0
"""How long the end of a benchmark's progress is waited for; a remaining process may hold the pipe open."""
_SLACK, _LEAST_LIMIT_S = 6.0, 600.0
"""A benchmark hangs if it takes so many times the expected time, and this at least."""
_MOST_CHARACTERS = 300
_GIT_S = 20.0


@dataclass(frozen=True, slots=True)
class SuiteBench:
    name: str
    takes_s: float
    """Expected seconds."""
    command: Sequence[str]
    """Prints its result as JSON, and progress to standard error."""
    limit_s: float

    @classmethod
    def of_command_line(cls, name: str, one: Benchmark, repeats: int | None) -> SuiteBench:
        """Return the benchmark of ``python -m benchmarks NAME``; ``repeats=None``: its default rounds."""
        takes_s, command = one.takes_s, [sys.executable, "-m", "benchmarks", name, "--json"]
        if repeats is not None:
            takes_s *= (repeats + 1) / (one.repeats + 1)  # one more round is dropped
            command += ["--repeats", str(repeats)]
        return cls(name, takes_s, command, max(_LEAST_LIMIT_S, _SLACK * takes_s))


def select(names: Sequence[str], *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """Return the selected benchmarks in the suite's order.

    Args:
        names: All benchmarks.
        only: The benchmarks to run; empty: all.
        skip: The benchmarks to omit.

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
        benches: The benchmarks, in this order.
        folder: Folder for each result as ``NAME.json``; ``None``: not stored.
        report: Called with each line of progress, including the benchmarks' lines (from another thread).
    """

    def __init__(self, benches: Iterable[SuiteBench], *, folder: Path | None, report: Callable[[str], None]) -> None:
        self._benches = list(benches)
        self._folder = folder
        self._report = report
        self._results: list[BenchResult] = []
        self._reasons: dict[str, str] = {}
        self._num_failed = 0
        self._began_ns = clock.wall_ns()
        self._machine = describe_machine()
        self._commit = find_commit()

    def run(self) -> None:
        """Run one benchmark after another.

        After an exception that ends this early, as Ctrl-C does, :meth:`record` has the results until then.

        Raises:
            OSError: A result cannot be stored.
        """
        for number, bench in enumerate(self._benches):
            left_s = sum(one.takes_s for one in self._benches[number:])
            of_all = f"{number + 1}/{len(self._benches)}"
            self._report(f"[all] {of_all} {bench.name}: {about(bench.takes_s)}, {about(left_s)} until all are done")
            try:
                self._measure(bench)
            except _Unmeasured as error:
                self._reasons[bench.name] = str(error)
                self._report(f"[all] {bench.name} was {NOT_MEASURED}: {error}")
            except BaseException:
                if all(one.bench != bench.name for one in self._results):
                    self._reasons[bench.name] = INTERRUPTED
                self._reasons |= {one.name: NOT_BEGUN for one in self._benches[number + 1 :]}
                raise

    def record(self) -> SuiteRecord:
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
            code, text, said = _run(bench, self._report)
        except TimeoutError as error:
            self._num_failed += 1
            raise _Unmeasured(str(error)) from None
        except OSError as error:
            self._num_failed += 1
            raise _Unmeasured(f"it cannot be started ({error})") from None
        line = text.strip().rpartition(b"\n")[2]
        try:
            result = from_json(line, BenchResult)
        except msgspec.DecodeError:
            # The command line is valid, so that bad input means a package that is not installed.
            self._num_failed += code != ExitReason.BAD_INPUT
            raise _Unmeasured(_reason(code, said)) from None
        if result.num_measured == 0:
            raise _Unmeasured(_reason(code, said))
        self._results.append(result)
        if self._folder is not None:
            write_atomically(self._folder / f"{bench.name}.json", line + b"\n")


def _run(bench: SuiteBench, report: Callable[[str], None]) -> tuple[int, bytes, list[str]]:
    """Run a benchmark; return its exit code, its standard output, and the last lines of its standard error.

    Raises:
        TimeoutError: It exceeded its limit, and was ended.
    """
    said: deque[str] = deque(maxlen=50)
    with tempfile.TemporaryFile() as output:
        # In a new session, so that Ctrl-C reaches only the suite, which lets the benchmark end its processes.
        process = subprocess.Popen(
            bench.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def forward() -> None:
            assert process.stderr is not None
            with process.stderr as lines:
                for line in lines:
                    said.append(line.rstrip("\n"))
                    report(said[-1])

        forwarding = threading.Thread(target=forward, name="benchmarks-progress", daemon=True)
        try:  # from here on, so that Ctrl-C upon the first line ends the process, too
            forwarding.start()
            code = process.wait(bench.limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it did not end within {bench.limit_s:g} s, and was ended") from None
        finally:
            if process.returncode is None:
                _end(process)
            if forwarding.ident is not None:
                forwarding.join(_REST_S)
        output.seek(0)
        return code, output.read(), list(said)


def _end(process: subprocess.Popen[str]) -> None:
    """End a benchmark with its processes; kill the remaining ones of its session's first group."""
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
    lines = [line.strip() for line in said if line.strip()]
    own = [line.removeprefix("benchmarks: ") for line in lines if line.startswith("benchmarks: ")]
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    text = next(reversed(own), "") or " ".join([f"{ended};", *lines[-1:]]).rstrip(";")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def about(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"about {count(minutes, 'minute')}" if minutes else "less than a minute"


def find_commit() -> str | None:
    """Return the checked-out commit, with ``+`` if the code differs; ``None``: there is no git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks")
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):  # git is missing, or there is no repository
        return None
