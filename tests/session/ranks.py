"""Start a script's ranks one by one, as a launcher would, and look at each one's end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

LAUNCHERS = ("RANK", "LOCAL_", "GROUP_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OUTLAST_")
"""What a launcher's variables begin with; those of whoever runs the tests are none of the script's."""


class Ranks:
    """The processes of one start of a script; all are gone when the ``with`` block is left."""

    def __init__(
        self,
        script: Path,
        *args: str,
        world_size: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(world_size):
            inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
            variables = {**inherited, "OMP_NUM_THREADS": "1", **(environment or {})}
            if world_size > 1:
                variables |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, os.fspath(script), *args],
                    env=variables,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()

    def wait_for_line(self, rank: int, text: str) -> str:
        """Read a rank's output up to a line with ``text``; the test's timeout is the limit."""
        stream = self.processes[rank].stdout
        assert stream is not None
        seen = []
        for line in stream:
            seen.append(line)
            if text in line:
                return line
        raise AssertionError(f"rank {rank} ended without {text!r}:\n{''.join(seen)}")

    def end(self, timeout_s: float = 30) -> tuple[list[int], list[str]]:
        """Wait for all ranks; return exit codes and (the rest of the) outputs."""
        outputs = [process.communicate(timeout=timeout_s)[0] for process in self.processes]
        return [process.returncode for process in self.processes], outputs
