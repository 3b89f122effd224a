"""Shared fixtures and hooks: a fork server, deterministic hypothesis, and checks for leftover processes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

import fork_server

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: spinning threads only cost time here
SLOW_S = 5.0
_TOGETHER = ("ray", "slurm")
"""Folders whose tests share one cluster: one process of pytest-xdist runs them all."""
_LONG = ("places", "faults")
"""Folders whose modules take minutes each."""

settings.register_profile("outlast", deadline=None, derandomize=True, database=None)
settings.load_profile("outlast")

_too_long: dict[str, float] = {}
_num_slow = 0


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server of the tests' Python processes in each process that runs tests.

    A shell's background processes ignore SIGINT, and so would all processes that the tests start.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        fork_server.install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Exclude the objects of several thousand tests from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the modules that take longest, so that all processes have work until the end.

    Runs last, because deselected tests do not count.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))

    def order(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        folder = item.path.parent.name
        is_of_processes = item.get_closest_marker("process") is not None
        return folder not in _TOGETHER, folder not in _LONG, -slow[item.path], not is_of_processes

    items.sort(key=order)


class _ByModule(LoadScopeScheduling):
    """Run each module in one process, for its fixtures, and the folders that share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        folder = Path(module).parent.name
        return folder if folder in _TOGETHER else module

    def remove_node(self, node: Any) -> str | None:
        """Reassign the work of a dead process, without the modules that it had finished.

        A finished module would be assigned as work without tests, for which a process with one test left waits forever.
        """
        of_node = self.assigned_work[node]
        for scope in [scope for scope, tests in of_node.items() if all(tests.values())]:
            del of_node[scope]
        return super().remove_node(node)

    def schedule(self) -> None:
        """Give two modules to a process that replaces a dead one: with a single test it would wait for the next one."""
        replaces = self.collection is not None
        super().schedule()
        for node in self.nodes if replaces else ():
            self._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByModule:
    """Return the scheduler that keeps modules together."""
    return _ByModule(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the tests marked as slow, and record the slow ones without the mark."""
    global _num_slow
    if report.when == "call":
        is_marked = bool({"slow", "campaign", "extended"} & {*report.keywords})
        _num_slow += is_marked
        if report.duration > SLOW_S and not is_marked:
            _too_long[report.nodeid] = report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of tests marked as slow and the slow ones without the mark; a busy machine has more of them."""
    terminalreporter.write_line(f"{_num_slow} tests are marked slow")
    for name, duration in sorted(_too_long.items(), key=lambda entry: -entry[1]):
        terminalreporter.write_line(f"took {duration:.1f} s without being marked slow: {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Start all processes of a test marked ``cold``, and of its fixtures, without the fork server.

    Ray sets a SIGTERM handler that ends this process; other tests get the default one.
    """
    if item.path.parent.name != "ray":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with fork_server.cold() if item.get_closest_marker("cold") else contextlib.nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def no_listener_left_behind() -> Iterator[None]:
    """Fail a test that leaves a shutdown listener open: its deadline would end this process minutes later."""
    yield
    signals = sys.modules.get("outlast.preemption.signals")
    ending = [one for one in threading.enumerate() if one.name == "outlast-deadline"]
    for one in ending:
        one.join(60)  # of a listener that was just closed
    left = [*(signals.open_watches if signals else ()), *(one for one in ending if one.is_alive())]
    assert not left, f"close the session's ShutdownListener: {left}"


@pytest.fixture(autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process running, and kill that process."""
    if request.node.get_closest_marker("process") is None:
        yield
        return
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    left = [child for child in me.children(recursive=True) if child not in before and child.is_running()]
    _, alive = psutil.wait_procs(left, timeout=30)
    described = [text for child in alive if (text := _describe_if_alive(child))]
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(alive, timeout=60)
    assert not described, f"processes left behind: {described}"


def _describe_if_alive(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    return ""
