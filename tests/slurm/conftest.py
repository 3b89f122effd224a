"""One Slurm cluster for all tests that do not change its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, run_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    with run_slurm() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_process_left_behind() -> None:
    """Skip the check for left processes: a job may outlast a test, and the keeper of a cluster ends all of its
    processes."""
