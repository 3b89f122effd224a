"""Run the tests of NVIDIA's extension with the extension and with outlast, and write the counts into the docs.

    git clone --depth 1 --branch v0.6.0 https://github.com/NVIDIA/nvidia-resiliency-ext
    make test-integrations  # installs the extension
    .venv-integrations/bin/python tests/integrations/nvrx_own_tests.py nvidia-resiliency-ext

Each test file runs in a separate process with a time limit, once with each package, for about an hour in total. The
exit code is 1 if a test passes with the extension but not with outlast, unless its error (a module or name that is not
offered, a private name) or an entry of REASONS explains the difference.

With ``--bridge`` the tests of Megatron-Bridge that use the extension run with outlast::

    git clone --depth 1 --branch v0.3.1 https://github.com/NVIDIA-NeMo/Megatron-Bridge
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

FOLDERS = ("inprocess", "fault_tolerance/unit", "straggler/unit", "checkpointing/unit", "ptl_resiliency/unit")
"""Below ``tests`` of the checkout."""
BRIDGE = ("test_fault_tolerance.py", "test_nvrx_straggler.py", "test_inprocess_restart.py")
"""Below ``tests/unit_tests/training`` of Bridge's checkout."""
PAGE = Path(__file__).parents[2] / "docs" / "nvrx.md"
BEGIN, END = "<!-- begin: tests of NVRx -->\n", "<!-- end: tests of NVRx -->"

REASONS: dict[str, str] = {
    "inprocess/test_monitor_thread.py::*": "not offered: `monitor_thread.MonitorThread`, a thread of the wrapper's own",
    "inprocess/test_rank_assignment.py::TestFillGaps.test": "ranks are 0 to 4 here, as documented; there 0, 2, 3, 4, 5",
    "inprocess/test_timeout.py::TestHard.test_sleep": "`time.sleep()` is interrupted here; there the rank is ended",
    "inprocess/test_wrap.py::*faulty_store_factory*": "no store is made",
    "inprocess/test_wrap.py::*test_logging*": "asserts lines of the extension's log",
    "inprocess/test_wrap.py::*test_monitor_process": "asserts lines of the extension's log",
    "inprocess/test_wrap.py::*RestartHealthCheck*": "uses `Wrapper.restart_health_check`, or replaces inner classes",
    "straggler/unit/test_data_shared.py::*": "counts the extension's own calls of `all_gather_object`",
    "straggler/unit/test_name_mapper.py::*": "not offered: `name_mapper.NameMapper`, which sends names as numbers",
}
"""Why tests pass only with the extension, by patterns of ``file::test``, if their errors do not show the reason."""

Outcomes = dict[str, tuple[str, str]]
"""By test: ``passed``, ``skipped``, ``failure`` or ``error``; and the message."""

IN_EACH_PROCESS = {
    "extension": """
import importlib.util, sys, unittest.mock
for name in ("defusedxml.ElementTree", "defusedxml", "httpx"):
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.modules[name] = unittest.mock.MagicMock()
""",
    "outlast": """
import unittest.mock  # some tests use it without importing it
from outlast.integrations import nvrx
assert nvrx.install()
""",
}
"""Code that every Python process of a run executes first, including processes that a test spawns."""


def run_file(file: Path, checkout: Path, in_each_process: str, path: str, arguments: argparse.Namespace) -> Outcomes:
    """Run one test file in a separate process, and kill all remaining processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "sitecustomize.py").write_text(in_each_process)
        report = Path(folder, "report.xml")
        options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
        options.append(f"--timeout={arguments.timeout / 5:g}")
        # The tests of checkpoints read these when they are imported.
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} if "checkpointing" in file.parts else {}
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, f"--rootdir={checkout}", f"--junitxml={report}", str(file)],
            cwd=checkout,
            env={
                **os.environ,
                **world,
                "PYTHONPATH": os.pathsep.join(filter(None, [folder, path, os.environ.get("PYTHONPATH", "")])),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_FORCE_EXIT": "0",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=arguments.timeout)
            except subprocess.TimeoutExpired:
                output = f"the file is not finished within {arguments.timeout:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if not report.exists():
            return {"": ("error", output[-2000:])}
        return dict(map(outcome_of, ElementTree.parse(report).iter("testcase")))


def outcome_of(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    """Return a test's name and outcome; the name is empty if the file cannot be imported."""
    name, parent = case.get("name", ""), case.get("classname", "").rpartition(".")[2]
    full = "" if not parent else name if parent.startswith("test_") else f"{parent}.{name}"
    for one in case:
        if one.tag in ("failure", "error", "skipped"):
            return full, (one.tag, f"{one.get('message', '')}\n{one.text or ''}"[-20000:])
    return full, ("passed", "")


def explain(name: str, test: str, message: str) -> str | None:
    """Return why a test does not pass with outlast; ``None`` = unknown."""
    for pattern, reason in REASONS.items():
        if fnmatch.fnmatchcase(f"{name}::{test}", pattern):
            return reason
    for pattern, reason in {
        r"No module named '(?:nvidia_resiliency_ext\.)?([\w.]+)'": "module not offered: `{}`",
        r"nvidia_resiliency_ext\.([\w.]+) is not among the names": "name not offered: `{}`",
        r"cannot import name '(\w+)' from 'nvidia_resiliency_ext": "name not offered: `{}`",
        r"\(outlast\.integrations\.nvrx\)> does not have the attribute '(\w+)'": "replaces the inner `{}`",
        r"has no attribute '(_[a-z]\w*)'": "uses the private name `{}`",
    }.items():
        if found := re.search(pattern, message):
            return reason.format(found[1])
    return None


def make_table(results: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the table of the docs, and the tests without an explanation."""
    lines = ["| file | over the extension | over outlast | the others |", "| --- | --- | --- | --- |"]
    unexplained: list[str] = []
    totals, none = [0, 0], []
    for name, of_file in sorted(results.items()):
        reference, outcomes_of_outlast = of_file["extension"], of_file["outlast"]
        expected = [test for test, (outcome, _) in reference.items() if outcome == "passed"]
        if not expected:
            none.append(f"`{name}`")
            continue
        reasons: dict[str, int] = {}
        for test in expected:
            outcome, message = outcomes_of_outlast.get(test) or outcomes_of_outlast.get("") or ("error", "")
            if outcome == "passed":
                continue
            if (reason := explain(name, test, message)) is None:
                unexplained.append(f"{name}::{test}: {outcome}: {message.strip().splitlines()[:1]}")
                reason = "not explained"
            reasons[reason] = reasons.get(reason, 0) + 1
        num = len(expected) - sum(reasons.values())
        totals = [totals[0] + len(expected), totals[1] + num]
        why = "; ".join(f"{many}: {reason}" if len(reasons) > 1 else reason for reason, many in reasons.items())
        lines.append(f"| `{name}` | {len(expected)} | {num} | {why} |")
    lines.append(f"| all | {totals[0]} | {totals[1]} | |")
    lines += ["", f"No test passes over the extension without a GPU, or within the time limit, in {', '.join(none)}."]
    return "\n".join(lines) + "\n", unexplained


def run_bridge(arguments: argparse.Namespace) -> int:
    """Run Bridge's tests with outlast; return the number of failures."""
    begin: str = runpy.run_path(str(Path(__file__).with_name("test_megatron_bridge.py")))["BEGIN"]
    num_failed = 0
    for name in BRIDGE:
        file = arguments.bridge / "tests" / "unit_tests" / "training" / name
        outcomes = [outcome for outcome, _ in run_file(file, arguments.bridge, begin, "", arguments).values()]
        print(f"Megatron-Bridge, {name}: {outcomes.count('passed')} of {len(outcomes)} pass over outlast", flush=True)
        num_failed += len(outcomes) - outcomes.count("passed")
    return num_failed


def main() -> int:
    """Run the tests, and write the table into the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="source of the extension at v0.6.0")
    parser.add_argument("--extension", default=str(Path(sys.prefix, "nvrx")), help="its wheel, unpacked, as a path")
    parser.add_argument("--bridge", type=Path, help="source of Megatron-Bridge at v0.3.1: run its tests instead")
    parser.add_argument("--only", default="*", help="pattern of the files below tests that are run")
    parser.add_argument("--over", choices=IN_EACH_PROCESS, action="append", help="run them over this alone")
    parser.add_argument("--results", type=Path, help="JSON file that keeps outcomes, for the table of the next call")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one file; a fifth for one test")
    arguments = parser.parse_args()
    if arguments.bridge is not None:
        arguments.bridge = arguments.bridge.resolve()
        return min(1, run_bridge(arguments))
    checkout, kept = arguments.checkout.resolve(), arguments.results
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    files = {
        file.relative_to(checkout / "tests").as_posix(): file
        for folder in FOLDERS
        for file in sorted((checkout / "tests" / folder).glob("test_*.py"))
    }
    for name, file in files.items():
        if not fnmatch.fnmatch(name, arguments.only):
            continue
        for over in arguments.over or IN_EACH_PROCESS:
            path = arguments.extension if over == "extension" else ""
            outcomes = run_file(file, checkout, IN_EACH_PROCESS[over], path, arguments)
            results.setdefault(name, {})[over] = outcomes
            num_passed = [outcome for outcome, _ in outcomes.values()].count("passed")
            print(f"{name}: {num_passed} of {len(outcomes)} pass over {over}", flush=True)
            if kept is not None:
                kept.write_text(json.dumps(results))
    table, unexplained = make_table({name: one for name, one in results.items() if len(one) == len(IN_EACH_PROCESS)})
    if left_out := [f"`{name}`" for name in files if len(results.get(name, {})) < len(IN_EACH_PROCESS)]:
        table += f"\nNot run: {', '.join(left_out)}.\n"
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    print("\n".join(unexplained) or f"written into {PAGE}")
    return min(1, len(unexplained))


if __name__ == "__main__":
    sys.exit(main())
