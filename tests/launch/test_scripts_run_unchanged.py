"""A script that runs under torchrun runs under `outlast run` unchanged: output, files and exit codes of the same
scripts under both are compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from outlast.incidents import EventKind
from outlast.journal import read

pytestmark = [pytest.mark.process, pytest.mark.cold, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.extended]

SCRIPTS = Path(__file__).parent / "unchanged"
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "outlast": ["-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "run", "--no-health-check"],
}
SHADOWS = ("torch", "numpy")
"""Packages in the working directory with names that only the script's own folder may shadow."""


@dataclass
class Run:
    """The results of a run under one launcher."""

    exit_code: int
    stdout: bytes
    stderr: str
    out: Path
    logs: Path
    run_dir: Path

    def log(self, attempt: int, rank: int, stream: str) -> str:
        """Return the output of a rank, without addresses of objects."""
        (path,) = self.logs.glob(f"*/attempt_{attempt}/{rank}/{stream}.log")
        text = path.read_bytes().decode(errors="surrogateescape")
        return re.sub(r"\b0x[0-9a-f]{8,}", "0x", text)


def launch(launcher: str, tmp_path: Path, script: list[str], *, nproc: int = 1, options: tuple[str, ...] = ()) -> Run:
    """Run a script in the working directory ``tmp_path / "cwd"`` to the end."""
    folder_of_launcher = tmp_path / launcher
    out, logs, run_dir = folder_of_launcher / "out", folder_of_launcher / "logs", folder_of_launcher / "run"
    out.mkdir(parents=True)
    command = [sys.executable, "-P", *LAUNCHERS[launcher], f"--nproc-per-node={nproc}", *options]
    if launcher == "outlast":
        command += [f"--run-dir={run_dir}", "--ft-max-restart-delay=0"]  # a dozen scripts fail in a row
    if "--redirects=3" in options:
        command.append(f"--log-dir={logs}")
    environment = {**os.environ, "CASE_OUT": str(out), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *script], cwd=tmp_path / "cwd", env=environment, capture_output=True, input=b"given", check=False
    )
    return Run(done.returncode, done.stdout, done.stderr.decode(errors="replace"), out, logs, run_dir)


def working_directory(tmp_path: Path, *shadows: str) -> Path:
    folder = tmp_path / "cwd"
    folder.mkdir()
    for name in shadows:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(
            "import sys\nsys.modules['shadow'] = sys\nraise ImportError('mine')\n"
        )
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Return the written files by name, without the timestamp of an archive."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, data in found.items():
        if name.endswith(".gz"):
            found[name] = data[:4] + data[8:]
    return {name: data for name, data in found.items() if not name.endswith("drawn")}


@pytest.mark.extended
def test_scripts_print_and_write_the_same(tmp_path: Path) -> None:
    """Start, annotations, open files, child processes, data loaders, coroutines, progress bars, long output,
    signals, exec, threads and imports behave as under torchrun; only values that must differ between processes
    differ, and always."""
    cwd = working_directory(tmp_path, *SHADOWS)
    script = os.path.relpath(SCRIPTS / "cases.py", cwd)
    text = (SCRIPTS / "cases.py").read_text()
    names = re.findall(r"^    (\w+),$", text[text.index("CASES = [") :], re.MULTILINE)
    options = ("--redirects=3", "--max-restarts=0")
    runs = [
        launch(name, tmp_path, [script, "--steps", "8", "--at=${local_rank}"], nproc=len(names), options=options)
        for name in LAUNCHERS
    ]
    for run in runs:
        assert run.exit_code == 0, "".join(path.read_text()[-3000:] for path in run.logs.rglob("stderr.log"))
    theirs, ours = runs
    for rank, name in enumerate(names):
        for stream in ("stdout", "stderr"):
            expected, got = (run.log(0, rank, stream) for run in runs)
            assert got == expected, f"{stream} of {name}"
    assert files(ours.out) == files(theirs.out)
    random_values = [json.loads(path.read_text()) for run in runs for path in sorted(run.out.glob("*/drawn"))]
    assert len(random_values) == 4
    for values in zip(*random_values, strict=True):
        assert len({str(value) for value in values}) == 4, values


def test_scripts_end_the_same(tmp_path: Path) -> None:
    """Exit codes, signals, tracebacks, hooks, exit handlers and the last bytes of files are those of torchrun, for
    each start in turn."""
    working_directory(tmp_path)
    text = (SCRIPTS / "endings.py").read_text()
    names = re.findall(r"^    (\w+),$", text[text.index("ENDINGS = [") :], re.MULTILINE)
    options = ("--redirects=3", f"--max-restarts={len(names)}", "--monitor-interval=0.02")
    theirs, ours = (launch(name, tmp_path, [str(SCRIPTS / "endings.py")], options=options) for name in LAUNCHERS)
    assert (theirs.exit_code, ours.exit_code) == (0, 0), theirs.stderr + ours.stderr
    for attempt, name in enumerate(names):
        for stream in ("stdout", "stderr"):
            assert ours.log(attempt, 0, stream) == theirs.log(attempt, 0, stream), f"{stream}: {name}"
    assert files(ours.out) == files(theirs.out)
    codes = [int(code) for code in re.findall(r"exitcode: (-?\d+)", theirs.stderr)]
    events = [event for event in read(ours.run_dir) if event.kind == EventKind.WORKER_EXITED]
    assert [event.data["exit_code"] for event in events][:-1] == codes
    assert len(codes) == len(names) - 1


@pytest.mark.extended
def test_modules_run_the_same(tmp_path: Path) -> None:
    """`-m` finds a package in the working directory, also in spawned children; its traceback and 10 MB of output
    through a pipe are those of torchrun."""
    cwd = working_directory(tmp_path)
    (cwd / "package").symlink_to(SCRIPTS / "package")
    options = ("--max-restarts=1", "-m")
    theirs, ours = (launch(name, tmp_path, ["package.train", "--steps"], options=options) for name in LAUNCHERS)
    assert (theirs.exit_code, ours.exit_code) == (0, 0), theirs.stderr + ours.stderr
    assert ours.stdout == theirs.stdout
    traces = [
        re.search(r"^Traceback.*^ValueError: first$", run.stderr, re.DOTALL | re.MULTILINE) for run in (theirs, ours)
    ]
    assert traces[0] is not None
    assert traces[1] is not None
    assert traces[1].group() == traces[0].group()
