"""One cluster for all tests that leave its nodes alone."""

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
    """Leave alone what jobs run: a job may outlast a test, and a cluster's keeper ends all of it with the cluster."""
