"""A launched job: a launcher with its workers on this machine, and the marks that the workers leave in a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from outlast import clock, env
from outlast.errors import DeadlineExceeded

__all__ = ["OUTLAST", "TORCHRUN", "LaunchedJob", "Marks", "strike"]

OUTLAST = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "run")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=3", "--monitor-interval=0.1"),
)
"""The stock launcher at its best: the interval is its default."""
_POLL_S = 0.002
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Marks:
    """What the ranks of a cycle wrote."""

    cycle: int
    marks: dict[int, dict[str, int]]
    """Global rank to its values: its pid, and monotonic nanoseconds."""


class LaunchedJob:
    """Run a launcher; use as a context manager, which ends every process of it.

    Args:
        command: The launcher, its options, the script and its arguments.
        folder: Its own folder: the output goes to ``output.txt``, and the workers write ``CYCLE-RANK.json``.
        variables: What to add to the environment.
    """

    def __init__(self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._output = folder / "output.txt"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        inherited = {name: value for name, value in env.environ().items() if name not in names}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**inherited, "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> LaunchedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait_for_marks(self, cycles: Sequence[int], ranks: Sequence[int], *, timeout_s: float) -> Marks:
        """Return what ranks wrote in the first of some cycles that all of them wrote in.

        Blocks: up to ``timeout_s``.

        Raises:
            DeadlineExceeded: They did not, or the launcher ended first.
        """
        deadline_s = clock.now_s() + timeout_s
        while True:
            code = self._process.poll()  # asked before the files: what is not there after its end never comes
            for cycle in cycles:
                paths = {rank: self._folder / f"{cycle}-{rank}.json" for rank in ranks}
                if all(path.exists() for path in paths.values()):
                    return Marks(cycle, {rank: json.loads(path.read_bytes()) for rank, path in paths.items()})
            if code is not None:
                raise DeadlineExceeded(f"the launcher ended with exit code {code}\n{self._tail()}")
            if clock.now_s() > deadline_s:
                raise DeadlineExceeded(f"cycle {cycles[0]} was not there after {timeout_s:.0f} s\n{self._tail()}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> int | None:
        """Return the launcher's exit code; ``None``: it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End every process; idempotent. Blocks: until they are gone, 10 s at most."""
        left: list[psutil.Process] = []
        if self._process.poll() is None:
            # The launcher first: it must not start others while they are ended one by one.
            self._process.send_signal(signal.SIGSTOP)
            left = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait(timeout=10)
        for process in left:
            if process.is_running():
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def _tail(self) -> str:
        return "\n".join(self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


def strike(pid: int, number: int) -> int:
    """Send a signal and return when, in monotonic nanoseconds."""
    at_ns = clock.now_ns()
    os.kill(pid, number)
    return at_ns
