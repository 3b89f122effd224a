"""Faults are injected at the points where they are armed, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.runtime.injection import Injection, armed, armed_in_children, reach


def test_hook_is_called_only_while_it_is_armed() -> None:
    """An exception of the hook is raised at the point; later, and at other points, nothing happens."""
    reached: list[object] = []
    with armed("one", lambda attempt: reached.append(attempt)):  # noqa: PLW0108 - by keyword
        reach("one", attempt=1)
        reach("other", attempt=2)
        with armed("one", lambda attempt: 1 // 0), pytest.raises(ZeroDivisionError):
            reach("one", attempt=3)
        reach("one", attempt=4)
    reach("one", attempt=5)
    assert reached == [1, 4]


@pytest.mark.process
def test_fault_armed_in_children_happens_once(tmp_path: Path) -> None:
    """The process is killed at its point; its replacement passes."""
    script = "from outlast.runtime.injection import reach; reach('other'); reach('one'); print('passed')"
    codes = []
    with armed_in_children(Injection(point="one", do="kill", once=str(tmp_path / "done"))):
        for _ in range(2):
            codes.append(subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode)
    assert codes == [-signal.SIGKILL, 0]
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == 0
