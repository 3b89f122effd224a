"""Diagnoses of invalid results and slow ranks: in the log, in the journal, and in a file for the node's agent.

A worker that leaves with exit code 16, 17 or 18 writes what it knows to
``<run_dir>/diagnoses/<job>-cycle-<c>-rank-<r>.json``; the agent, which sees only the code, reads it. Nothing here
imports torch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from outlast.env import WorkerEnv, clean_name
from outlast.incidents import EventKind, Incident, IncidentKind, Verdict
from outlast.policy.rerun import Diagnosis, decode_diagnosis, encode_diagnosis
from outlast.runtime.files import write_atomically
from outlast.runtime.journal import Journal

__all__ = ["journal_diagnosis", "leave_diagnosis", "read_diagnosis", "write_diagnosis"]

log = logging.getLogger(__name__)


def leave_diagnosis(place: WorkerEnv, diagnosis: Diagnosis, journal: Journal | None = None) -> None:
    """Log and journal why this process is about to end, on the rank it names, and write it for the node's agent.

    Args:
        place: This worker's place; without a run directory nothing is written.
        diagnosis: The same on all ranks; each writes it.
        journal: Where the incident is written; ``None`` = nowhere.
    """
    if diagnosis.rank == place.global_rank:
        log.error("%s", diagnosis.describe())
        journal_diagnosis(journal, place, diagnosis)
    if place.run_dir is None:
        return
    try:
        write_diagnosis(place.run_dir, place.job, place.cycle, place.global_rank, diagnosis)
    except OSError as error:
        log.error("the diagnosis cannot be written (%s); the launcher uses the exit code alone", error)


def journal_diagnosis(
    journal: Journal | None, place: WorkerEnv, diagnosis: Diagnosis, verdict: Verdict | None = None
) -> None:
    """Write an invalid result of this rank to the journal as an incident, with the verdict if there is one."""
    if journal is None:
        return
    incident = Incident(
        kind=IncidentKind.INVALID_RESULT,
        job=place.job,
        cycle=place.cycle,
        node=place.node,
        rank=place.global_rank,
        iteration=diagnosis.iteration,
        evidence={"summary": diagnosis.describe(), "diagnosis": msgspec.to_builtins(diagnosis)},
    )
    more: dict[str, Any] = {} if verdict is None else {"verdict": verdict}
    journal.write(EventKind.INCIDENT, rank=place.global_rank, iteration=diagnosis.iteration, incident=incident, **more)


def write_diagnosis(run_dir: str | os.PathLike[str], job: str, cycle: int, rank: int, diagnosis: Diagnosis) -> Path:
    """Write a rank's diagnosis for its agent; return its path.

    Raises:
        OSError: The run directory cannot be written.
    """
    path = _path(run_dir, job, cycle, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, encode_diagnosis(diagnosis))
    return path


def read_diagnosis(run_dir: str | os.PathLike[str], job: str, cycle: int, rank: int) -> Diagnosis | None:
    """Return what a rank left; ``None`` when it left nothing, or nothing that can be read (which is logged)."""
    path = _path(run_dir, job, cycle, rank)
    try:
        return decode_diagnosis(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("diagnosis %s cannot be read (%s); the launcher uses the exit code alone", path, error)
        return None


def _path(run_dir: str | os.PathLike[str], job: str, cycle: int, rank: int) -> Path:
    return Path(run_dir) / "diagnoses" / f"{clean_name(job)}-cycle-{cycle}-rank-{rank}.json"
