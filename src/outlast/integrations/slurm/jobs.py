"""A run's jobs in Slurm: submission, requeueing, and the checkpoint from which the next job resumes.

An ended job is requeued from within its batch script; the next one resumes from the newest valid checkpoint.

``scontrol requeue`` ends the batch script that calls it with SIGTERM, and after Slurm's ``KillWait`` seconds with
SIGKILL. In between, nodes are excluded, which Slurm allows for a pending job only; so the caller ignores SIGTERM from
then on. Slurm's commands have a time limit, and their messages are quoted in errors.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from outlast import clock, env
from outlast.decoding import MAX_STATE_BYTES, from_json, read_file
from outlast.env import expand_nodes
from outlast.errors import ConfigError, DeadlineExceeded, OutlastError
from outlast.integrations.slurm.batch_script import BatchScript
from outlast.launch.recovery_state_file import load_recovery_state
from outlast.policy.recovery_point import Copy, Tier, is_excluded
from outlast.policy.requeue import JobEnd, RequeueState, Ruling, rule
from outlast.runtime.files import PRIVATE, write_atomically

if TYPE_CHECKING:
    from outlast.checkpoint.catalogue.entries import Checkpoint, ListedCheckpoint, ListedPlace

log = logging.getLogger(__name__)
_SCRIPT = "job.sbatch"
_PATIENCE_S = 10.0


def call_slurm(command: Sequence[str], *, timeout_s: float = 60.0, stdin: str | None = None) -> str:
    """Run a Slurm command and return its output.

    Raises:
        OutlastError: It is not installed, or it failed; the error quotes its message.
        DeadlineExceeded: It did not respond in time.

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
        raise DeadlineExceeded(
            f"{name} did not respond within {timeout_s:g} s; check that slurmctld is running"
        ) from None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise OutlastError(f"{' '.join(command)}: {words}")
    return done.stdout


def prepare(script: BatchScript) -> tuple[str, tuple[str, ...]]:
    """Return a job's script as it would be submitted now, and the command to submit it; nothing is written.

    Nodes that earlier jobs of the run found unhealthy are excluded.

    Raises:
        ConfigError: A file in the run directory cannot be used.
    """
    run_dir = Path(script.run_dir)
    recovery_state = load_recovery_state(run_dir)
    if recovery_state.finished:
        log.warning(
            "the run in %s has finished: the job trains only if its script is given more iterations than before",
            run_dir,
        )
    known = (*load_requeue_state(run_dir).excluded, *recovery_state.quarantined)
    exclude = tuple(dict.fromkeys((*script.exclude, *known)))
    if added := [node for node in exclude if node not in script.exclude]:
        log.warning("excluded because of earlier jobs of the run: %s", ", ".join(added))
    rendered = dataclasses.replace(script, exclude=exclude).render()
    return rendered, ("sbatch", "--parsable", str(run_dir / _SCRIPT))


def submit(script: BatchScript) -> str:
    """Submit a job; return its number.

    The script is stored as ``job.sbatch`` in the run directory.

    Raises:
        ConfigError: The run directory cannot be created.
        OutlastError: Slurm refused the job; the error quotes its message.

    Blocks: up to a minute.
    """
    rendered, command = prepare(script)
    run_dir = Path(script.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / _SCRIPT, rendered.encode(), mode=PRIVATE)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be written ({error}); name one that is writable") from None
    return call_slurm(command).strip().partition(";")[0]


def load_requeue_state(run_dir: Path) -> RequeueState:
    """Return the state of earlier jobs of the run from ``requeue.json``.

    Raises:
        ConfigError: The file exists and is not valid.
    """
    path = run_dir / "requeue.json"
    try:
        return from_json(read_file(path, max_bytes=MAX_STATE_BYTES), RequeueState)
    except FileNotFoundError:
        return RequeueState()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be used ({error}); move it away to begin with fresh retries") from error


def end_job(run_dir: Path, job_id: str, exit_code: int, *, num_job_retries_on_failure: int) -> Ruling:
    """Decide about an ended job, store the decision in the run directory, and requeue the job if it says so.

    Args:
        run_dir: The run directory; its ``ladder.json`` has progress, quarantine, and whether the run is finished.
        job_id: Slurm's number of the job.
        exit_code: Exit code of the job's step.
        num_job_retries_on_failure: Failures in a row without progress after which the job is still requeued.

    Raises:
        ConfigError: A file in the run directory cannot be used.
        OutlastError: Slurm refused; the job ends.
        OSError: The run directory cannot be written; the job is not requeued, as that could repeat without end.

    Blocks: up to two minutes, while Slurm does not respond.
    Thread: the main thread; SIGTERM is ignored from then on if the job is requeued.
    """
    recovery_state = load_recovery_state(run_dir)
    end = JobEnd(
        exit_code=exit_code,
        finished=recovery_state.finished,
        stopped_with=recovery_state.stopped_with,
        durable_iteration=recovery_state.best_durable,
        quarantined=recovery_state.quarantined,
    )
    ruling = rule(load_requeue_state(run_dir), end, num_job_retries_on_failure=num_job_retries_on_failure)
    write_atomically(run_dir / "requeue.json", msgspec.json.format(msgspec.json.encode(ruling.state), indent=1))
    if ruling.requeue:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        call_slurm(["scontrol", "requeue", job_id])
        if ruling.state.excluded:
            _exclude(job_id, ruling.state.excluded)
    return ruling


def _exclude(job_id: str, nodes: tuple[str, ...]) -> None:
    """Add nodes to those that the pending job excludes."""
    found = re.search(r"\bExcNodeList=(\S+)", call_slurm(["scontrol", "--oneliner", "show", "job", job_id]))
    earlier = expand_nodes(found[1]) if found is not None and found[1] != "(null)" else ()
    wanted = ",".join(dict.fromkeys((*earlier, *nodes)))
    until_s = clock.now_s() + _PATIENCE_S
    while True:
        try:
            call_slurm(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={wanted}"])
        except OutlastError as error:
            if clock.now_s() >= until_s:
                log.error("%s could not be excluded, and the next job may get them again: %s", ", ".join(nodes), error)
                return
            time.sleep(0.2)  # not pending yet: Slurm is still ending the job
        else:
            log.warning("excluded from now on: %s", wanted)
            return


def resolve_resume_path(
    checkpoint_dir: str | os.PathLike[str],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    num_threads: int = 4,
    warns_of_others: bool = True,
) -> Path | str | None:
    """Return the newest checkpoint whose every byte is verified; ``None`` if there is none.

    Damaged and foreign checkpoints are skipped, and so are those saved for a diagnosis. A tracker file is not trusted.

    Args:
        checkpoint_dir: A global directory (path or URL), a ``local_directory``, or one node's folder in it.
        run_dir: The run directory; checkpoints that its ``ladder.json`` excludes, because they led to invalid results,
            are skipped, too.
        num_threads: Readers.
        warns_of_others: Log a WARNING if the directory contains only files that outlast did not save.

    Returns:
        The checkpoint's folder (of a local tier: this node's, else the first that has a part of it); a URL for a URL.

    Raises:
        ConfigError: It exists and is not a checkpoint directory.
        CheckpointError: The object store cannot be reached.
        OSError: It cannot be read.

    Blocks: while the newest checkpoint is read.
    """
    from outlast.checkpoint.catalogue.listing import look_into, verify

    name = os.fspath(checkpoint_dir)
    is_url = "://" in name and not name.startswith("file://")
    if not is_url and not Path(name.removeprefix("file://")).exists():
        return None
    looked = look_into(name)
    excluded = _excluded_attempts(run_dir, looked.entry)
    for found in sorted(looked.found, key=lambda one: one.entry.iteration, reverse=True):
        why = _why_not(found.entry, excluded)
        if why is None:
            entry = verify(found, num_threads=num_threads).entry
            if entry.valid:
                return _path_of(found, looked.entry, is_url=is_url)
            why = "; ".join(str(problem) for problem in entry.problems[:3])
        log.warning("skipped the checkpoint of iteration %d in %s: %s", found.entry.iteration, name, why)
    if warns_of_others and not looked.found and not is_url:
        there = sorted(path.name for path in Path(name.removeprefix("file://")).iterdir())
        if there:
            log.warning(
                "%s holds no checkpoint of outlast, but %s%s: a checkpoint of another system is not resumed from",
                *(name, ", ".join(there[:3]), ", ..." if len(there) > 3 else ""),
            )
    return None


def _why_not(entry: Checkpoint, excluded: frozenset[str]) -> str | None:
    if entry.suspect:
        return "saved for diagnosis"
    if not entry.valid:
        return "; ".join(str(problem) for problem in entry.problems[:3]) or f"ranks {list(entry.missing)} are missing"
    if entry.elsewhere:
        return f"ranks {list(entry.elsewhere)} are on nodes that are not seen from here"
    if entry.attempt in excluded:
        return "it led to invalid results"
    return entry.abandoned


def _excluded_attempts(run_dir: str | os.PathLike[str] | None, place: ListedPlace) -> frozenset[str]:
    """Return the attempts in this place that the run excludes from loading."""
    excluded = load_recovery_state(None if run_dir is None else Path(run_dir)).excluded
    tier = Tier.GLOBAL if place.tier == "global" else Tier.LOCAL
    known = [one for one in place.checkpoints if one.attempt is not None]
    lineage = {str(one.attempt): one.restored_attempt for one in known}
    return frozenset(
        str(one.attempt) for one in known if is_excluded(Copy(one.iteration, str(one.attempt), tier), lineage, excluded)
    )


def _path_of(found: ListedCheckpoint, place: ListedPlace, *, is_url: bool) -> Path | str:
    entry = found.entry
    if is_url:
        return f"{place.path.rstrip('/')}/step-{entry.iteration}"
    if place.tier == "global":
        folder = Path(place.path)
    else:
        nodes = [held.node for held in entry.held]
        own = env.read_worker().node
        node = own if own in nodes else nodes[0]
        folder = Path(place.path) if Path(place.path).name == node and len(place.nodes) == 1 else Path(place.path, node)
    path = folder / f"step-{entry.iteration}"
    if not path.is_dir():
        raise ConfigError(f"{path} was there a moment ago; is something else pruning {place.path}?")
    return path
