"""``ladder.json``: what a run's jobs have tried, kept in the run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.errors import ConfigError
from outlast.policy.ladder import LadderState, begin_job
from outlast.runtime.files import write_atomically

__all__ = ["load_ladder", "save_ladder"]


def _path(run_dir: Path) -> Path:
    return run_dir / "ladder.json"


def load_ladder(run_dir: Path | None, *, is_new_job: bool) -> LadderState:
    """Return what earlier jobs of the run, or this one, left in ``ladder.json``.

    Raises:
        ConfigError: The file is there and is no ladder state.
    """
    if run_dir is None or not _path(run_dir).exists():
        return LadderState()
    try:
        state = msgspec.json.decode(_path(run_dir).read_bytes(), type=LadderState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{_path(run_dir)} cannot be used ({error}); move it away to begin with fresh budgets"
        ) from error
    return begin_job(state) if is_new_job else state


def save_ladder(run_dir: Path, state: LadderState) -> None:
    """Write the file: whole and durable, or not at all.

    Raises:
        OSError: The run directory cannot be written.
    """
    write_atomically(_path(run_dir), msgspec.json.format(msgspec.json.encode(state), indent=1))
