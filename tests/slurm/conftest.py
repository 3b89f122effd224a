"""One cluster for all tests that leave its nodes alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, run_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    with run_slurm() as cluster:
        yield cluster
