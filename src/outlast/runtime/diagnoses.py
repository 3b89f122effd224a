"""Diagnoses that workers leave for their node's agent: ``<run_dir>/diagnoses/<job>-cycle-<c>-rank-<r>.json``.

A worker that leaves with exit code 16, 17 or 18 writes what it knows; the agent, which sees only the code, reads it.
Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from outlast.env import clean_name
from outlast.policy.rerun import Diagnosis, decode_diagnosis, encode_diagnosis
from outlast.runtime.files import write_atomically

__all__ = ["read_diagnosis", "write_diagnosis"]

log = logging.getLogger(__name__)


def write_diagnosis(run_dir: str | os.PathLike[str], job: str, cycle: int, rank: int, diagnosis: Diagnosis) -> Path:
    """Leave a rank's diagnosis; return its path.

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
