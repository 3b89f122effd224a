"""Giving an ended job back to Slurm, from within its batch script.

``scontrol requeue`` ends the batch script that asks for it with SIGTERM, and Slurm's ``KillWait`` seconds later with
SIGKILL. In between the nodes to keep away from are set, which Slurm allows for a pending job only; so whoever calls
this ignores SIGTERM from then on.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from pathlib import Path

import msgspec

from outlast import clock
from outlast.decoding import from_json
from outlast.errors import ConfigError, OutlastError
from outlast.integrations.slurm.commands import call
from outlast.launch.verdicts import load_ladder
from outlast.policy.requeue import JobEnd, RequeueState, Ruling, rule
from outlast.runtime.files import write_atomically
from outlast.slurm_notation import expand_nodes

__all__ = ["end_job", "load_requeue_state"]

log = logging.getLogger(__name__)
_PATIENCE_S = 10.0


def load_requeue_state(run_dir: Path) -> RequeueState:
    """Return what earlier jobs of the run left in ``requeue.json``.

    Raises:
        ConfigError: The file is there and is no such state.
    """
    path = run_dir / "requeue.json"
    try:
        return from_json(path.read_bytes(), RequeueState)
    except FileNotFoundError:
        return RequeueState()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be used ({error}); move it away to begin with fresh retries") from error


def end_job(run_dir: Path, job_id: str, exit_code: int, *, num_job_retries_on_failure: int) -> Ruling:
    """Decide about a job that ended, remember it in the run directory, and give the job back if it is to be.

    Args:
        run_dir: The run directory; its ``ladder.json`` tells progress, quarantine, and whether the run is finished.
        job_id: Slurm's number of the job.
        exit_code: Of the job's step.
        num_job_retries_on_failure: Failures in a row, without progress in between, after which it is given back.

    Raises:
        ConfigError: A file in the run directory cannot be used.
        OutlastError: Slurm refused; the job ends.
        OSError: The run directory cannot be written; the job is not given back, lest that happen without end.

    Blocks: up to two minutes, while Slurm does not answer.
    Thread: the main thread; SIGTERM is ignored from then on when the job is given back.
    """
    ladder = load_ladder(run_dir, is_new_job=False)
    end = JobEnd(
        exit_code=exit_code,
        finished=ladder.finished,
        stopped_with=ladder.stopped_with,
        durable_iteration=ladder.best_durable,
        quarantined=ladder.quarantined,
    )
    ruling = rule(load_requeue_state(run_dir), end, num_job_retries_on_failure=num_job_retries_on_failure)
    write_atomically(run_dir / "requeue.json", msgspec.json.format(msgspec.json.encode(ruling.state), indent=1))
    if ruling.requeue:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        call(["scontrol", "requeue", job_id])
        if ruling.state.excluded:
            _exclude(job_id, ruling.state.excluded)
    return ruling


def _exclude(job_id: str, nodes: tuple[str, ...]) -> None:
    """Add nodes to those that the pending job keeps away from."""
    found = re.search(r"\bExcNodeList=(\S+)", call(["scontrol", "--oneliner", "show", "job", job_id]))
    earlier = expand_nodes(found[1]) if found is not None and found[1] != "(null)" else ()
    wanted = ",".join(dict.fromkeys((*earlier, *nodes)))
    until_s = clock.now_s() + _PATIENCE_S
    while True:
        try:
            call(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={wanted}"])
        except OutlastError as error:
            if clock.now_s() >= until_s:
                log.error("%s could not be excluded, and the next job may get them again: %s", ", ".join(nodes), error)
                return
            time.sleep(0.2)  # not pending yet: Slurm is taking the job down
        else:
            log.warning("excluded from now on: %s", wanted)
            return
