"""Run the tests of NVIDIA's extension over the extension itself and over outlast's, and write the counts into the docs.

    git clone --depth 1 --branch v0.6.0 https://github.com/NVIDIA/nvidia-resiliency-ext
    python tests/integrations/nvrx_own_tests.py nvidia-resiliency-ext --extension .venv-integrations/nvrx

Each test file runs in a process of its own, with a time limit, once over each of the two. The exit code is 1 where a
test passes over the extension and not over outlast's, and no entry of REASONS, nor a module that is not offered,
explains it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FOLDERS = (*("inprocess", "fault_tolerance/unit", "straggler/unit", "checkpointing/unit", "ptl_resiliency/unit"),)
"""Below ``tests`` of the checkout."""
PAGE = Path(__file__).parents[2] / "docs" / "nvrx.md"
BEGIN, END = "<!-- begin: tests of NVRx -->", "<!-- end: tests of NVRx -->"

REASONS: dict[str, str] = {}
"""Tests that pass over the extension alone, as patterns of ``file::test``, and why."""

IN_EACH_PROCESS = {
    "extension": """
import importlib.util, sys, unittest.mock
for name in ("defusedxml.ElementTree", "defusedxml"):
    if importlib.util.find_spec("defusedxml") is None:
        sys.modules[name] = unittest.mock.MagicMock()
""",
    "outlast": """
assert nvrx.install()
""",
}
"""What every Python process of a run does first: also those that a test spawns."""


def run_file(file: Path, over: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Run one test file; return the outcome of each of its tests by name."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "sitecustomize.py").write_text(IN_EACH_PROCESS[over])
        report, tests = Path(folder, "report.xml"), arguments.checkout / "tests"
        path = [folder, *([str(arguments.extension)] if over == "extension" else [])]
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, f"--rootdir={tests}"]
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", str(file)],
            cwd=arguments.checkout,
            env={
                **os.environ,
                **(world if "checkpointing" in file.parts else {}),
                "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
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
                output = f"not finished within {arguments.timeout:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if arguments.logs is not None:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            name = f"{file.parent.parent.name}-{file.parent.name}-{file.stem}.{over}.log"
            (arguments.logs / name).write_text(output)
        if not report.exists():
            return {}
        return {
            f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": outcome_of(case)
            for case in ElementTree.parse(report).iter("testcase")
        }


def outcome_of(case: ElementTree.Element) -> str:
    """Return ``passed``, or the name of the element that says otherwise."""
    return next((one.tag for one in case if one.tag in ("failure", "error", "skipped")), "passed")


# ---- see below
def main() -> None:
    """Run them, print the table, write it into the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="source of the extension at v0.6.0")
    parser.add_argument("--extension", type=Path, default=Path(sys.prefix, "nvrx"), help="its unpacked wheel")
    parser.add_argument("--only", default="*", help="pattern of the files below tests that are run")
    parser.add_argument("--over", choices=[*IN_EACH_PROCESS, "both"], default="both", help="what they are run over")
    parser.add_argument("--results", type=Path, required=True, help="JSON file that keeps the outcomes")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one file")
    parser.add_argument("--logs", type=Path, help="folder for the output of each run")
    arguments = parser.parse_args()
    arguments.checkout = arguments.checkout.resolve()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    for folder in FOLDERS:
        for file in sorted((arguments.checkout / "tests" / folder).glob("test_*.py")):
            name = file.relative_to(arguments.checkout / "tests").as_posix()
            if not fnmatch.fnmatch(name, arguments.only):
                continue
            for over in IN_EACH_PROCESS if arguments.over == "both" else [arguments.over]:
                outcomes = run_file(file, over, arguments)
                results.setdefault(name, {})[over] = outcomes
                print(f"{name}: {list(outcomes.values()).count('passed')} of {len(outcomes)} over {over}", flush=True)
                arguments.results.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
