"""Handing a run's job to Slurm."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from outlast.errors import ConfigError, OutlastError
from outlast.integrations.slurm.batch_script import BatchScript
from outlast.integrations.slurm.commands import call
from outlast.integrations.slurm.requeueing import load_requeue_state
from outlast.launch.ladder_file import load_ladder
from outlast.runtime.files import write_atomically

__all__ = ["submit", "with_known_exclusions"]

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


def submit(script: BatchScript) -> str:
    """Submit a job; return its number.

    The script is kept as ``job.sbatch`` in the run directory.

    Raises:
        ConfigError: The run directory cannot be made.
        OutlastError: The run is finished, or Slurm refused the job; the message has its words.

    Blocks: up to a minute.
    """
    run_dir = Path(script.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be made ({error}); name one that is writable") from None
    if load_ladder(run_dir, is_new_job=False).is_over:
        raise OutlastError(f"the run in {run_dir} is finished; name another run directory for a new one")
    path = run_dir / "job.sbatch"
    write_atomically(path, with_known_exclusions(script).render().encode())
    return call(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]
