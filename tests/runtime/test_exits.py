"""Exit functions run at the end of the interpreter, while threads still work."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS = """
import atexit, multiprocessing, threading
from concurrent.futures import ThreadPoolExecutor
from outlast.runtime.exits import at_exit, forget_at_exit

def work(name):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(print, name, flush=True).result()

def fail():
    raise ValueError("of an exit function")

def elsewhere():
    at_exit(print, "registered by another thread")

atexit.register(print, "atexit")
at_exit(work, "first")
at_exit(fail)
at_exit(work, "second")
at_exit(forgotten := lambda: print("forgotten"))
forget_at_exit(forgotten)
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
child = multiprocessing.get_context("fork").Process(target=print, args=("child",), kwargs={"flush": True})
child.start()
child.join()
raise SystemExit(3)
"""


@pytest.mark.process
@pytest.mark.slow
def test_exit_functions_run_while_threads_can_work() -> None:
    """Exit functions run in the reverse order of their registration, before ``atexit``, and not in a forked child;
    one that raises is logged, and the exit code is unchanged."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3
    lines = ["child", "second", "first", "registered by another thread", "atexit"]
    assert done.stdout.splitlines() == lines, done.stderr
    assert "fail failed" in done.stderr
