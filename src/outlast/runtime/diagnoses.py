"""Diagnoses: why a worker exits because of an invalid result or a slow rank.

A diagnosis goes to the log, to the journal, and to ``<run_dir>/diagnoses/<job>-cycle-<c>-rank-<r>.json``, where the
agent of a worker that exits with code 16, 17 or 18 reads it.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from outlast.decoding import MAX_STATE_BYTES, from_json, read_file
from outlast.env import WorkerEnv, clean_name
from outlast.incidents import Decision, EventKind, Incident, IncidentKind
from outlast.policy.rerun import Diagnosis
from outlast.runtime.files import PRIVATE, in_time, make_private_folder, write_atomically, write_optional
from outlast.runtime.journal import Journal

log = logging.getLogger(__name__)
_DIAGNOSIS_S = 10.0
"""Time for writing a diagnosis to a disk that does not respond."""


def leave_diagnosis(place: WorkerEnv, diagnosis: Diagnosis, journal: Journal | None = None) -> None:
    """Log and journal, on the rank at fault, why this process is about to exit, and write it for the node's agent.

    Args:
        place: This worker's place; without a run directory nothing is written.
        journal: ``None`` = no incident is written.
    """
    if diagnosis.rank == place.global_rank:
        log.error("%s", diagnosis.describe())
        journal_diagnosis(journal, place, diagnosis)
    if place.run_dir is None:
        return
    write = partial(write_diagnosis, place.run_dir, place.job, place.cycle, place.global_rank, diagnosis)
    write_optional(
        "diagnoses",
        Path(place.run_dir) / "diagnoses",
        write,
        otherwise="the launcher uses the exit code alone",
        timeout_s=_DIAGNOSIS_S,
    )


def journal_diagnosis(
    journal: Journal | None, place: WorkerEnv, diagnosis: Diagnosis, decision: Decision | None = None
) -> None:
    """Write an invalid result of this rank to the journal as an incident, with the decision if there is one."""
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
    more: dict[str, Any] = {} if decision is None else {"verdict": decision}
    journal.write(EventKind.INCIDENT, rank=place.global_rank, iteration=diagnosis.iteration, incident=incident, **more)


def write_diagnosis(run_dir: str | os.PathLike[str], job: str, cycle: int, rank: int, diagnosis: Diagnosis) -> Path:
    """Write a rank's diagnosis for its agent; return its path. Raises: OSError: The run directory cannot be written."""
    path = _path(run_dir, job, cycle, rank)
    make_private_folder(path.parent)
    write_atomically(path, msgspec.json.encode(diagnosis), mode=PRIVATE)
    return path


def read_diagnosis(run_dir: str | os.PathLike[str], job: str, cycle: int, rank: int) -> Diagnosis | None:
    """Return a rank's diagnosis; ``None`` if there is none, or it is unreadable (which is logged)."""
    path = _path(run_dir, job, cycle, rank)
    try:
        return from_json(in_time(path, lambda: read_file(path, max_bytes=MAX_STATE_BYTES)), Diagnosis)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("diagnosis %s cannot be read (%s); the launcher uses the exit code alone", path, error)
        return None


def _path(run_dir: str | os.PathLike[str], job: str, cycle: int, rank: int) -> Path:
    return Path(run_dir) / "diagnoses" / f"{clean_name(job)}-cycle-{cycle}-rank-{rank}.json"
