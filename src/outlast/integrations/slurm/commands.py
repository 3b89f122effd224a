"""Slurm's own commands, called with a time limit; what they complain of becomes an error that says it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from outlast.errors import DeadlineExceeded, OutlastError

__all__ = ["call"]


def call(command: Sequence[str], *, timeout_s: float = 60.0, stdin: str | None = None) -> str:
    """Run a command of Slurm's and return what it printed.

    Raises:
        OutlastError: It is not installed, or it refused; the message has its own words.
        DeadlineExceeded: No answer in time.

    Blocks: up to ``timeout_s``.
    """
    name = command[0]
    try:
        done = subprocess.run(
            [*command], input=stdin or "", capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise OutlastError(f"{name} is not installed here; run this on a node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"{name} did not answer in {timeout_s:g} s; is slurmctld running?") from None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise OutlastError(f"{' '.join(command)}: {words}")
    return done.stdout
