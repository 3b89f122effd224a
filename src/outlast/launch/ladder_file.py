"""``ladder.json``: what a run's jobs have tried, kept in the run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.decoding import from_json
from outlast.errors import ConfigError
from outlast.policy.ladder import LadderState, begin_job, begin_run
from outlast.runtime.files import write_atomically

__all__ = ["load_ladder", "save_ladder"]


def _path(run_dir: Path) -> Path:
    return run_dir / "ladder.json"


def load_ladder(run_dir: Path | None, *, is_new_job: bool, is_named: bool = True) -> LadderState:
    """Return what earlier jobs of the run, or this one, left in ``ladder.json``.

    Args:
        run_dir: The run directory; ``None`` = nothing is kept.
        is_new_job: The state is for a new job, not for one that is in progress.
        is_named: The run has an id or a directory of its own. Without one its directory may be that of an earlier run
            which had none either: if that has finished, another begins.

    Raises:
        ConfigError: The file is there and is no ladder state.
    """
    if run_dir is None or not _path(run_dir).exists():
        return LadderState()
    try:
        state = from_json(_path(run_dir).read_bytes(), LadderState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{_path(run_dir)} cannot be used ({error}); move it away to begin with fresh budgets"
        ) from error
    if not is_new_job:
        return state
    return begin_run(state) if state.finished and not is_named else begin_job(state)


def save_ladder(run_dir: Path, state: LadderState) -> None:
    """Write the file: whole and durable, or not at all.

    Raises:
        OSError: The run directory cannot be written.
    """
    write_atomically(_path(run_dir), msgspec.json.format(msgspec.json.encode(state), indent=1))
