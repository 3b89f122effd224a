"""``ladder.json`` in the run directory: the recovery policy's state, kept from job to job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.decoding import MAX_STATE_BYTES, from_json, read_file
from outlast.errors import ConfigError
from outlast.launch import protocol as m
from outlast.policy import recovery_policy
from outlast.policy.recovery_policy import RecoveryState, begin_job, begin_run
from outlast.runtime.files import PRIVATE, write_atomically


def _path(run_dir: Path) -> Path:
    return run_dir / "ladder.json"


def load_recovery_state(run_dir: Path | None) -> RecoveryState:
    """Load the state that the run's newest job saved.

    Args:
        run_dir: The run directory; ``None``: nothing is kept.

    Raises:
        ConfigError: The file cannot be read or decoded.
    """
    if run_dir is None or not _path(run_dir).exists():
        return RecoveryState()
    try:
        return from_json(read_file(_path(run_dir), max_bytes=MAX_STATE_BYTES), RecoveryState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{_path(run_dir)} cannot be used ({error}); move it away to begin with fresh budgets"
        ) from error


def state_of_job(saved: RecoveryState, job: str, *, is_new_job: bool, is_named: bool = True) -> RecoveryState:
    """Return the state with which a job begins, or continues under another coordinator.

    Args:
        saved: The state that the run's newest job saved.
        job: Name of the job.
        is_new_job: The job begins.
        is_named: The user gave the run an id or a directory; otherwise the directory may be that of an earlier unnamed
            run: if that has finished, another run begins.
    """
    if is_new_job or (saved.job and saved.job != job):
        saved = begin_run(saved) if saved.finished and not is_named else begin_job(saved)
    return msgspec.structs.replace(saved, job=job)


def describe_last_job(state: RecoveryState, known: str) -> m.Stop | None:
    """Return how a job of the run ended while this agent was starting; ``None``: none did.

    Args:
        state: The state that the run's newest job saved.
        known: The run's last job when this agent began.
    """
    outcome = recovery_policy.find_outcome(state) if state.job != known else None
    if outcome is None:
        return None
    code, reason = outcome
    return m.Stop(exit_code=code, reason=f"job {state.job} of this run ended while this agent was starting: {reason}")


def save_recovery_state(run_dir: Path, state: RecoveryState) -> None:
    """Save the state atomically and durably.

    Raises:
        OSError: The run directory cannot be written.
    """
    write_atomically(_path(run_dir), msgspec.json.format(msgspec.json.encode(state), indent=1), mode=PRIVATE)
