"""Start a script's ranks one by one, as a launcher would, and return each rank's exit code and output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outlast.testing import RankProcesses

PATIENCE_S = 120.0
_NO_LAUNCHER = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


class Ranks(RankProcesses):
    """The ranks of one start of a script; a single rank is started without the variables of a launcher."""

    def __init__(
        self, script: Path, *args: str, world_size: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        own = [_NO_LAUNCHER] if world_size == 1 else None
        super().__init__(script, *args, world_size=world_size, environment=environment, environments=own)

    def wait_for_line(self, rank: int, text: str) -> str:
        """Return a rank's next line with ``text``."""
        return self.next_line(rank, PATIENCE_S, containing=text)

    def end(self, timeout_s: float = PATIENCE_S) -> tuple[list[int], list[str]]:
        """Wait for all ranks and their child processes; return exit codes and outputs."""
        codes = self.wait_until_gone(timeout_s)
        return codes, [self.output(rank) for rank in range(self.world_size)]
