"""Shared by tests of the docs: the Python blocks of a page, and scripts in separate processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: str) -> list[str]:
    """Return the text of every Python block of ``docs/<page>``, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_python(
    *arguments: str | Path, code: int | None = 0, timeout_s: float = 300, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with some arguments and environment variables; check the exit code unless ``code`` is ``None``."""
    completed = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert code in (None, completed.returncode), completed.stderr[-5000:] + completed.stdout[-5000:]
    return completed
