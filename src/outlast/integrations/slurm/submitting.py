"""Handing a run's job to Slurm."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from outlast.errors import ConfigError, OutlastError
from outlast.integrations.slurm.batch_script import BatchScript
from outlast.integrations.slurm.commands import call
from outlast.integrations.slurm.requeueing import load_requeue_state
from outlast.launch.verdicts import load_ladder
from outlast.runtime.files import write_atomically

__all__ = ["Submission", "prepare", "submit", "with_known_exclusions"]

log = logging.getLogger(__name__)


def with_known_exclusions(script: BatchScript) -> BatchScript:
    """Return the script with the nodes excluded that the run's earlier jobs found to be bad.

    Raises:
        ConfigError: A file in the run directory cannot be used.
    """
    run_dir = Path(script.run_dir)
    known = (*load_requeue_state(run_dir).excluded, *load_ladder(run_dir, is_new_job=False).quarantined)
    exclude = tuple(dict.fromkeys((*script.exclude, *known)))
    if added := [node for node in exclude if node not in script.exclude]:
        log.warning("excluded because of earlier jobs of the run: %s", ", ".join(added))
    return dataclasses.replace(script, exclude=exclude)


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """A job as it would be handed over."""

    script: str
    path: Path
    """Where the script is kept, in the run directory."""

    @property
    def command(self) -> tuple[str, ...]:
        """What Slurm is called with."""
        return ("sbatch", "--parsable", str(self.path))


def prepare(script: BatchScript) -> Submission:
    """Make a job's script as it would be submitted now; nothing is written.

    Raises:
        ConfigError: A file in the run directory cannot be used.
        OutlastError: The run is finished.
    """
    run_dir = Path(script.run_dir)
    if load_ladder(run_dir, is_new_job=False).is_over:
        raise OutlastError(f"the run in {run_dir} is finished; name another run directory for a new one")
    return Submission(with_known_exclusions(script).render(), run_dir / "job.sbatch")


def submit(script: BatchScript) -> str:
    """Submit a job; return its number.

    The script is kept as ``job.sbatch`` in the run directory.

    Raises:
        ConfigError: The run directory cannot be made.
        OutlastError: The run is finished, or Slurm refused the job; the message has its words.

    Blocks: up to a minute.
    """
    submission = prepare(script)
    run_dir = Path(script.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(submission.path, submission.script.encode())
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be written ({error}); name one that is writable") from None
    return call(submission.command).strip().partition(";")[0]
